"""`PagedKVCache`: sequences over shared pages, and the steps that grow them."""

from __future__ import annotations

import itertools
import operator
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import cache_ops
from ..checks import integer
from ..errors import CacheError, CacheFullError, DTypeError, IndexRangeError, ShapeError
from ..masks import Sink, Window
from ..tree import TokenTree
from . import saved
from .layout import Layout
from .pages import PagePool
from .step import Step
from .table import CachedSequence, Snapshot, chain

_names = itertools.count()
"""Names of sequences are never used twice, in no cache of the process: a stale or foreign one is always found out."""


class PagedKVCache:
    """Keys and values of many sequences, in pages shared by all layers' page table.

    Sequences are named by integers that `add`, `fork` and `load` return. A step grows some of them by a tree of
    tokens, or by tokens in a row, and `commit` keeps a path of it. Not for several threads at once.

    Parameters
    ----------
    num_layers, kv_heads, head_dim : int
        Of the model.
    num_pages, page_size : int
        Pages of each layer's pool, and tokens a page. Memory is used when a page is first written.
    dtype : str
        ``"float32"``, ``"float16"`` or ``"bfloat16"``.

    Examples
    --------
    >>> import numpy as np, treeattn as ta
    >>> cache = ta.PagedKVCache(num_layers=1, kv_heads=1, head_dim=8, num_pages=4, page_size=2, dtype="float32")
    >>> seq = cache.add()
    >>> step = cache.begin({seq: ta.TokenTree.from_parents([-1, 0, 0])})
    >>> x = np.ones((3, 1, 8), "float32")
    >>> step.append(0, x, x)
    >>> out, lse = step.attention(0, x)
    >>> cache.commit(step, {seq: [0, 2]})
    >>> cache.length(seq), cache.used_pages
    (2, 1)
    """

    def __init__(
        self, num_layers: int, kv_heads: int, head_dim: int, num_pages: int, page_size: int = 16, dtype: str = "float16"
    ) -> None:
        self._start(Layout(num_layers, kv_heads, head_dim, num_pages, page_size, dtype))

    @classmethod
    def latent(
        cls, num_layers: int, d_latent: int, d_rope: int, num_pages: int, page_size: int = 16, dtype: str = "float16"
    ) -> PagedKVCache:
        """Make a cache of compressed keys and values (MLA, absorbed form): one row of ``d_latent + d_rope`` a token.

        ``step.append(layer, rows)`` takes rows ``[q_total, d_latent + d_rope]``; pass ``sm_scale`` to attention.
        """
        d_latent, d_rope = integer(d_latent, "d_latent"), integer(d_rope, "d_rope", 0)
        cache = cls.__new__(cls)
        cache._start(Layout(num_layers, 1, d_latent + d_rope, num_pages, page_size, dtype, d_latent))
        return cache

    def _start(self, layout: Layout) -> None:
        self._layout = layout
        self._layers = [layout.storage(pages) for pages in layout.allocate()]
        self._pools = [cache_ops.Pool(layer.pages, writes=True) for layer in self._layers]
        self._pool = PagePool(layout.num_pages)
        self._sequences: dict[int, CachedSequence] = {}

    # sequences

    @property
    def free_pages(self) -> int:
        """Number of pages that no sequence holds."""
        return self._pool.free

    @property
    def used_pages(self) -> int:
        """Number of pages that some sequence holds, shared ones counted once."""
        return self._pool.used

    @property
    def seqs(self) -> tuple[int, ...]:
        """The sequences there are, oldest first."""
        return tuple(self._sequences)

    def add(self) -> int:
        """Return a new, empty sequence."""
        return self._name(CachedSequence())

    def length(self, seq: int) -> int:
        """Return the number of committed tokens, dropped ones included: the position of the next."""
        return self._find(seq).length

    def fork(self, seq: int, length: int | None = None) -> int:
        """Return a new sequence with the first ``length`` tokens (all by default) of ``seq``, whose pages it shares.

        Nothing is copied now. A last page that is not full is copied when one of its sequences next grows.

        Raises
        ------
        CacheError
            A tree of ``seq`` is not committed, or the tokens about ``length`` were dropped.
        IndexRangeError
            No such sequence, or more tokens than it has.
        """
        parent = self._settled(seq, "fork")
        child = CachedSequence(parent.pages[:], parent.length, parent.kept, parent.dropped)
        child.truncate(parent.length if length is None else length)
        child.trim(self._layout.page_size)
        self._pool.share(child.pages)
        return self._name(child)

    def truncate(self, seq: int, length: int) -> None:
        """Keep the first ``length`` committed tokens; what is not committed goes in any case.

        Raises
        ------
        IndexRangeError
            No such sequence, or more tokens than it has.
        CacheError
            Tokens about ``length`` were dropped.
        """
        sequence = self._find(seq)
        sequence.truncate(length)
        self._settle(sequence)

    def remove(self, seq: int) -> None:
        """Forget a sequence and give back its pages."""
        sequence = self._find(seq)
        sequence.truncate(0)
        self._settle(sequence)
        del self._sequences[seq]

    def drop_outside(self, window: int, sink: int = 0, seqs: Iterable[int] | None = None) -> int:
        """Give back pages of which no later token sees anything.

        A token at position p sees positions ``> p - window`` and those below ``sink``. Whole pages are dropped; the
        tokens behind them keep their positions. Attention that would see a dropped token is refused from then on.

        Parameters
        ----------
        window, sink : int
            The widest of all layers.
        seqs : iterable of int, optional
            The sequences; all by default.

        Returns
        -------
        int
            How many pages became free.

        Raises
        ------
        CacheError
            A sequence has uncommitted tokens; nothing has changed.
        """
        size, first = Window(window).size, Sink(sink).size
        try:
            names = self.seqs if seqs is None else tuple(dict.fromkeys(seqs))
        except TypeError:
            raise DTypeError(f"seqs: expected a list of sequences, got {seqs!r:.60}") from None
        sequences = [self._settled(seq, "drop_outside") for seq in names]
        before = self.free_pages
        for sequence in sequences:
            self._pool.release(sequence.drop_outside(size, first, self._layout.page_size))
        return self.free_pages - before

    def pages(self, layer: int) -> NDArray[Any]:
        """Return a layer's pool, not a copy, as `PagedKV` or `LatentKV` has it."""
        pages: NDArray[Any] = self._layers[integer(layer, "layer", 0, len(self._layers) - 1)].pages
        return pages

    def read(self, layer: int, seq: int) -> Any:
        """Return a copy of the committed keys and values of a sequence, without those that were dropped.

        Returns
        -------
        k, v : ndarray
            ``[tokens, kv_heads, head_dim]`` each; in a cache of compressed keys and values one array
            ``[tokens, d_latent + d_rope]``.
        """
        slots = self._find(seq).all_slots(self._layout.page_size)
        return cache_ops.gather(self.pages(layer), slots, check=False)

    def save(self, seq: int, path: str | os.PathLike[str]) -> None:
        """Write a sequence to a ``.safetensors`` file, whole or not at all.

        Raises
        ------
        CacheError
            The sequence has uncommitted tokens.
        UnsupportedError
            The safetensors package is not installed.
        OSError
            The file cannot be written; what was there before is there still.
        """
        sequence = self._settled(seq, "save")
        layers = [self.read(layer, seq) for layer in range(self._layout.num_layers)]
        saved.write(_path_of(path), self._layout, (sequence.length, sequence.kept, sequence.dropped), layers)

    def load(self, path: str | os.PathLike[str]) -> int:
        """Return a new sequence with what `save` wrote, from a cache of the same layout and any number of pages.

        Raises
        ------
        SequenceFileError
            A damaged or foreign file, or one of another layout; a TreeAttnError of `treeattn.cache.saved`.
        CacheFullError
            Not enough free pages.
        UnsupportedError
            The safetensors package is not installed.
        OSError
            The file cannot be read.
        """
        layout = self._layout
        (length, kept, dropped), layers = saved.read(_path_of(path), layout)
        sequence = CachedSequence(length=length, kept=kept, dropped=dropped)
        self._reserve([sequence], [-(-sequence.prefix_len // layout.page_size)], [])
        places = self._pools[0].places(sequence.all_slots(layout.page_size))
        for pool, arrays in zip(self._pools, layers, strict=True):
            pool.append(places, *arrays)
        return self._name(sequence)

    # steps

    def begin(self, new: Mapping[int, TokenTree | int]) -> Step:
        """Make room for new tokens.

        Parameters
        ----------
        new : mapping from sequence to TokenTree or int
            A tree, or a number of tokens in a row. While a tree of the sequence is not committed, the tree given is
            the whole tree so far: its first nodes are that tree, the others get rows; a number continues a chain.

        Returns
        -------
        Step
            Its rows are the new tokens of each sequence, in the order of ``new``.

        Raises
        ------
        CacheFullError
            Not enough free pages.
        TreeAttnError
            Bad input. Nothing has changed after an error.
        """
        new = _mapping(new, "new")
        for count in new.values():  # a chain of a billion nodes is not even made
            if isinstance(count, int) and count > self._layout.num_pages * self._layout.page_size:
                raise self._full(-(-count // self._layout.page_size))
        trees = {seq: _whole_tree(seq, self._find(seq), value) for seq, value in new.items()}
        sequences = [self._sequences[seq] for seq in trees]
        growths = [
            tree.num_nodes - sequence.num_pending for sequence, tree in zip(sequences, trees.values(), strict=True)
        ]
        self._grow(sequences, growths)
        for sequence, tree in zip(sequences, trees.values(), strict=True):
            if sequence.step:
                sequence.step.close()
            sequence.pending = tree
        table = Snapshot.of(sequences, growths, self._layout.page_size)
        step = Step(tuple(trees), table, self._layout, self._layers, self._pools)
        for sequence in sequences:
            sequence.step = step
        return step

    def commit(self, step: Step, accepted: Mapping[int, Iterable[int] | int]) -> None:
        """Keep a path of each tree, and give back the pages the rest took.

        Only nodes that are out of place are moved, in every layer; none of a chain.

        Parameters
        ----------
        step : Step
            The last step of each sequence in ``accepted``.
        accepted : mapping from sequence to nodes or int
            The nodes of a path from a root of the whole tree, in order; or how many tokens of a chain. In any order;
            sequences that are left out stay uncommitted.

        Raises
        ------
        TreeAttnError
            Nodes that are no path, or another step. Nothing has changed after an error.
        """
        paths = {seq: self._path(step, seq, value) for seq, value in _mapping(accepted, "accepted").items()}
        self._move(paths)
        for seq, path in paths.items():
            sequence = self._sequences[seq]
            sequence.length += len(path)
            self._settle(sequence)

    def _path(self, step: Step, seq: int, value: Iterable[int] | int) -> NDArray[np.int64]:
        sequence = self._find(seq)
        if sequence.step is not step or sequence.pending is None:
            raise CacheError(f"step: expected the last step of sequence {seq}, got another; commit each step once")
        return _check_path(seq, sequence.pending, value)

    def _move(self, paths: Mapping[int, NDArray[np.int64]]) -> None:
        source: list[int] = []
        target: list[int] = []
        for seq, path in paths.items():
            sequence, place = self._sequences[seq], np.arange(len(path))
            wrong = path != place
            source += sequence.slots(sequence.prefix_len + path[wrong], self._layout.page_size)
            target += sequence.slots(sequence.prefix_len + place[wrong], self._layout.page_size)
        if source:
            for layer in self._layers:
                cache_ops.compact(layer.pages, np.array(source), np.array(target), check=False)

    # pages

    def _grow(self, sequences: list[CachedSequence], growths: list[int]) -> None:
        """Give every sequence pages of its own for its new rows, or raise and change nothing."""
        size = self._layout.page_size
        grown = list(zip(sequences, growths, strict=True))
        fresh = [-(-(sequence.kv_len + growth) // size) - len(sequence.pages) for sequence, growth in grown]
        written = [sequence for sequence, growth in grown if growth and sequence.kv_len % size]
        self._reserve(sequences, fresh, written)

    def _reserve(self, sequences: list[CachedSequence], fresh: list[int], written: list[CachedSequence]) -> None:
        """Append ``fresh`` pages to each sequence, and copy the last pages of those ``written`` that are shared."""
        tails = Counter(sequence.pages[-1] for sequence in written)
        copies = sum(min(count, self._pool.holders(page) - 1) for page, count in tails.items())
        wanted = sum(fresh) + copies
        if wanted > self._pool.free:
            raise self._full(wanted, copies)
        for sequence in written:
            self._own_tail(sequence)
        for sequence, count in zip(sequences, fresh, strict=True):
            sequence.pages.extend(self._pool.take(count))

    def _full(self, wanted: int, copies: int = 0) -> CacheFullError:
        return CacheFullError(
            f"cache: expected {wanted} free pages ({copies} of them for copies of shared ones), got "
            f"{self._pool.free} of {self._layout.num_pages}; remove or truncate sequences, or make a larger cache"
        )

    def _own_tail(self, sequence: CachedSequence) -> None:
        shared = sequence.pages[-1]
        if self._pool.holders(shared) == 1:
            return
        (own,) = self._pool.take(1)
        for layer in self._layers:
            cache_ops.copy_page(layer.pages, shared, own, sequence.kv_len % self._layout.page_size)
        sequence.pages[-1] = own
        self._pool.release([shared])

    def _settle(self, sequence: CachedSequence) -> None:
        """End a sequence's step, and give back the pages its committed tokens do not need."""
        if sequence.step:
            sequence.step.close()
        sequence.step = sequence.pending = None
        self._pool.release(sequence.trim(self._layout.page_size))

    # names

    def _name(self, sequence: CachedSequence) -> int:
        name = next(_names)
        self._sequences[name] = sequence
        return name

    def _find(self, seq: int) -> CachedSequence:
        try:
            return self._sequences[seq]
        except (KeyError, TypeError):
            raise IndexRangeError(
                f"seq: expected a sequence of this cache, got {seq!r:.60}, which was removed or never added; call add()"
            ) from None

    def _settled(self, seq: int, action: str) -> CachedSequence:
        sequence = self._find(seq)
        if sequence.pending is not None:
            raise CacheError(
                f"{action}: expected sequence {seq} without uncommitted tokens; commit or truncate it first"
            )
        return sequence


def _mapping(value: Any, name: str) -> dict[int, Any]:
    if not isinstance(value, Mapping):
        raise DTypeError(f"{name}: expected a dict from sequence to nodes, got {type(value).__name__}")
    return dict(value)


def _path_of(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(path)
    except TypeError:
        raise DTypeError(f"path: expected the name of a file, got {path!r:.60}") from None


def _whole_tree(seq: int, sequence: CachedSequence, new: TokenTree | int) -> TokenTree:
    """Return the tree with what was pending and what is new."""
    pending = sequence.pending
    if isinstance(new, TokenTree):
        if pending is None:
            return new
        old = pending.num_nodes
        if new.num_nodes < old or not np.array_equal(new.parents[:old], pending.parents):
            raise ShapeError(
                f"new[{seq}]: expected the whole tree, whose first {old} nodes are those not committed yet, got {new}; "
                "commit or truncate first to begin another tree"
            )
        return new
    try:
        count = operator.index(new)
    except TypeError:
        raise DTypeError(f"new[{seq}]: expected a TokenTree or a number of tokens, got {new!r:.60}") from None
    if count < 0:
        raise ShapeError(f"new[{seq}]: expected 0 or more tokens, got {count}")
    if pending is None:
        return chain(count)
    if not pending.is_chain:
        raise ShapeError(f"new[{seq}]: expected the whole tree so far, got {count} tokens; a tree is not committed yet")
    return chain(pending.num_nodes + count)


def _check_path(seq: int, tree: TokenTree, accepted: Iterable[int] | int) -> NDArray[np.int64]:
    name = f"accepted[{seq}]"
    if isinstance(accepted, int | np.integer):
        if not tree.is_chain:
            raise DTypeError(f"{name}: expected the nodes of a path, got {accepted}; a number is for a chain")
        if not 0 <= accepted <= tree.num_nodes:
            raise IndexRangeError(f"{name}: expected 0 to {tree.num_nodes} tokens, got {accepted}")
        return np.arange(accepted)
    try:
        numbers = [operator.index(node) for node in accepted]
    except TypeError:
        raise DTypeError(f"{name}: expected node numbers, got {accepted!r:.60}") from None
    outside = [node for node in numbers if not 0 <= node < tree.num_nodes]
    if outside:
        raise IndexRangeError(f"{name}: expected nodes in [0, {tree.num_nodes}), got {outside[0]}")
    nodes = np.array(numbers, np.int64)
    if not np.array_equal(tree.parents[nodes], np.concatenate([[-1], nodes])[: len(nodes)]):
        raise ShapeError(f"{name}: expected a path from a root down, got {nodes.tolist()}")
    return nodes
