"""Which key a query row may see: a small closed algebra of data.

``Full Causal Tree ValidLength PaddedLeft Window Sink``, joined by ``&`` and ``|``. Every leaf compares one integer of
the row, its *bound*, with one property of the column::

    leaf         test          visible when
    Full         full          always
    Causal       col_below     col <  bound      (bound = kv_len - q_len + row + 1)
    ValidLength  col_below     col <  bound      (bound = n, or 0 for a row at or past n)
    PaddedLeft   col_from      col >= bound      (bound = kv_len - n, or kv_len for a padded row)
    Window       pos_from      pos >= bound      (bound = position of the row - size + 1)
    Sink         pos_below     pos <  bound      (bound = size)
    Tree         tree          enter <= bound < exit, or the column precedes the tree   (bound = the row's enter)

The form of the expression is compile-time, the bounds are data, so one kernel serves every tree and every window.
A column before the tree has its index as position; a node of the tree has ``prefix_len + depth``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .arrays import INT32_MAX, IntArray, indices
from .checks import integer
from .errors import DTypeError, ShapeError, UnsupportedError
from .tree import TokenTree, lay_out

Form: TypeAlias = tuple[Any, ...]
BoolArray: TypeAlias = NDArray[np.bool_]
Span: TypeAlias = tuple[IntArray, IntArray]
"""Columns ``[begin, end)`` of each tile, two int32 arrays ``[num_tiles]``."""


@dataclass(frozen=True)
class Batch:
    """Lengths, trees and positions of a batch, flattened: what bounds and spans are computed from."""

    q_indptr: IntArray
    kv_len: IntArray
    trees: tuple[TokenTree, ...] | None
    moves: IntArray | None = None
    """As in `treeattn.storage.PageTable`."""

    @cached_property
    def q_len(self) -> IntArray:
        return np.diff(self.q_indptr)

    @cached_property
    def seq_of_row(self) -> NDArray[np.intp]:
        return np.repeat(np.arange(len(self.q_len)), self.q_len)

    @cached_property
    def row(self) -> IntArray:
        """Index of each query token within its sequence."""
        return np.arange(self.q_indptr[-1], dtype=np.int32) - self.per_row(self.q_indptr[:-1])

    @cached_property
    def node_indptr(self) -> IntArray:
        """Offsets of each sequence's nodes in `nodes`, int32 ``[num_seqs + 1]``."""
        counts = [tree.num_nodes for tree in self.trees] if self.trees else [0] * len(self.kv_len)
        return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int32)

    @cached_property
    def nodes(self) -> IntArray:
        """``(enter, exit, depth)`` of every node, int32 ``[num_nodes, 3]``."""
        if not self.trees or self.node_indptr[-1] == 0:
            return np.zeros((0, 3), np.int32)
        first = np.repeat(self.node_indptr[:-1], np.diff(self.node_indptr))
        parents = np.concatenate([tree.parents for tree in self.trees])
        depth, intervals = lay_out(np.where(parents < 0, np.int32(-1), parents + first))  # all trees as one forest
        return np.concatenate([intervals - first[:, None], depth[:, None]], axis=1)

    @cached_property
    def prefix_len(self) -> IntArray:
        """Number of columns before the tree (all of them without one), int32 ``[num_seqs]``."""
        return self.kv_len - np.diff(self.node_indptr)

    @cached_property
    def node_of_row(self) -> IntArray:
        """Row of `nodes` that each query token is: the last ``q_len`` nodes of its tree."""
        first = self.node_indptr[1:] - self.q_len
        return self.per_row(first) + self.row

    @cached_property
    def position(self) -> IntArray:
        """Position of each query token: by depth in a tree, by index otherwise."""
        if self.trees is None:
            return self._position_of(self.per_row(self.kv_len - self.q_len) + self.row)
        depth: IntArray = self.nodes[self.node_of_row, 2]
        return self._position_of(self.per_row(self.prefix_len)) + depth

    @property
    def last_position(self) -> int:
        """A bound on every position that occurs."""
        gap = 0 if self.moves is None else self.moves[:, 0] + self.moves[:, 2]
        return int(np.max(self.kv_len.astype(np.int64) + gap, initial=1)) - 1

    def _position_of(self, column: IntArray) -> IntArray:
        if self.moves is None:
            return column
        begin, kept, gap, _ = self.moves[self.seq_of_row].T
        moved: IntArray = begin + column + np.where(column >= kept, gap, 0).astype(np.int32)
        return moved

    def column_of(self, position: IntArray, seq: IntArray) -> IntArray:
        """First column at or past a position, in the part before the tree: spans are of columns."""
        if self.moves is None:
            return position
        begin, kept, gap, _ = self.moves[seq].T
        place = position - begin
        column: IntArray = np.where(place <= kept, place, np.maximum(place - gap, kept)).astype(np.int32)
        return column

    def per_row(self, values: IntArray) -> IntArray:
        """Repeat a value per sequence for each of its query tokens."""
        return values[self.seq_of_row]


class Mask:
    """Base of the algebra; ``a & b`` sees what both see, ``a | b`` what either sees."""

    def __and__(self, other: Mask) -> Mask:
        return And(self, _as_mask(other))

    def __or__(self, other: Mask) -> Mask:
        return Or(self, _as_mask(other))

    def leaves(self) -> Iterator[Leaf]:
        """Iterate over the leaves, left to right: the order of bounds."""
        raise NotImplementedError

    def fold(
        self, leaf: Callable[[Leaf], Any], both: Callable[[Any, Any], Any], either: Callable[[Any, Any], Any]
    ) -> Any:
        """Evaluate the expression with ``leaf`` at its leaves, ``both`` at ``&`` and ``either`` at ``|``."""
        raise NotImplementedError

    @property
    def trees(self) -> tuple[TokenTree, ...] | None:
        """The trees of the one `Tree` in the expression, or None."""
        found = [leaf.trees_of for leaf in self.leaves() if isinstance(leaf, Tree)]
        if len(found) > 1:
            raise UnsupportedError(f"mask: expected at most one Tree, got {len(found)}; join their nodes in one forest")
        return found[0] if found else None

    @property
    def form(self) -> Form:
        """The compile-time shape: nested ``("&" | "|", left, right)`` over ``(test, index of its bound)``."""
        order = {id(leaf): index for index, leaf in enumerate(self.leaves())}

        def join(sign: str) -> Callable[[Form, Form], Form]:
            return lambda left, right: (sign, left, right)

        form: Form = self.fold(lambda leaf: (leaf.test, order[id(leaf)]), join("&"), join("|"))
        return form

    def simplified(self) -> Mask:
        """Return an equal expression without `Full` where it decides nothing."""
        return self

    def check(self, batch: Batch) -> None:
        """Check every leaf's sizes against the batch."""
        for leaf in self.leaves():
            leaf.check(batch)

    def bounds(self, batch: Batch, spare: int = 0) -> IntArray:
        """Bounds of every row for every leaf, int32 ``[num_leaves, q_total + spare]``, zero in the spare places."""
        leaves, q_total = list(self.leaves()), len(batch.row)
        bounds = np.zeros((len(leaves), q_total + spare), np.int32)
        for place, leaf in zip(bounds, leaves, strict=True):
            place[:q_total] = leaf.bound(batch)
        return bounds


@dataclass(frozen=True, eq=False)
class Pair(Mask):
    """Two masks put together."""

    left: Mask
    right: Mask

    def leaves(self) -> Iterator[Leaf]:
        yield from self.left.leaves()
        yield from self.right.leaves()


class And(Pair):
    """What both masks see; written ``left & right``."""

    def simplified(self) -> Mask:
        left, right = self.left.simplified(), self.right.simplified()
        if isinstance(left, Full):
            return right
        return left if isinstance(right, Full) else And(left, right)

    def fold(
        self, leaf: Callable[[Leaf], Any], both: Callable[[Any, Any], Any], either: Callable[[Any, Any], Any]
    ) -> Any:
        return both(self.left.fold(leaf, both, either), self.right.fold(leaf, both, either))


class Or(Pair):
    """What either mask sees; written ``left | right``."""

    def simplified(self) -> Mask:
        left, right = self.left.simplified(), self.right.simplified()
        full = isinstance(left, Full) or isinstance(right, Full)
        return Full() if full else Or(left, right)

    def fold(
        self, leaf: Callable[[Leaf], Any], both: Callable[[Any, Any], Any], either: Callable[[Any, Any], Any]
    ) -> Any:
        return either(self.left.fold(leaf, both, either), self.right.fold(leaf, both, either))


class Leaf(Mask):
    """One test of a row's bound against a column."""

    test: ClassVar[str]

    def leaves(self) -> Iterator[Leaf]:
        yield self

    def fold(
        self, leaf: Callable[[Leaf], Any], both: Callable[[Any, Any], Any], either: Callable[[Any, Any], Any]
    ) -> Any:
        return leaf(self)

    def check(self, batch: Batch) -> None:
        """Check this leaf's sizes against the batch."""

    def bound(self, batch: Batch) -> IntArray:
        """The bound of each query token, int32 ``[q_total]`` or one value for all."""
        raise NotImplementedError

    def spans(self, low: IntArray, high: IntArray, prefix_len: IntArray, kv_len: IntArray) -> tuple[Span, Span]:
        """Columns some row may see and columns every row sees, of tiles whose bounds lie in ``[low, high]``."""
        return SPANS[self.test](low, high, prefix_len, kv_len)


@dataclass(frozen=True, eq=False)
class Full(Leaf):
    """Every row sees every column."""

    test: ClassVar[str] = "full"

    def bound(self, batch: Batch) -> IntArray:
        return np.zeros(1, np.int32)


@dataclass(frozen=True, eq=False)
class Causal(Leaf):
    """Row ``i`` of ``q_len`` sees columns ``<= kv_len - q_len + i`` (aligned at the bottom right)."""

    test: ClassVar[str] = "col_below"

    def bound(self, batch: Batch) -> IntArray:
        return batch.per_row(batch.kv_len - batch.q_len) + batch.row + 1


@dataclass(frozen=True, eq=False)
class Tree(Leaf):
    """A node sees the columns before its tree, its ancestors and itself.

    Parameters
    ----------
    trees_of : sequence of TokenTree
        One tree per sequence. Its nodes are the last ``num_nodes`` columns; the query rows are its last ``q_len``
        nodes, so a tree may span rounds that are in the cache already.
    """

    trees_of: Any
    test: ClassVar[str] = "tree"

    def __post_init__(self) -> None:
        try:
            trees = (self.trees_of,) if isinstance(self.trees_of, TokenTree) else tuple(self.trees_of)
        except TypeError:
            raise DTypeError(
                f"trees: expected a list of TokenTree, one per sequence, got {type(self.trees_of).__name__}"
            ) from None
        for index, tree in enumerate(trees):
            if not isinstance(tree, TokenTree):
                raise DTypeError(
                    f"trees: expected a TokenTree per sequence, got {type(tree).__name__} at index {index}; "
                    "build one with TokenTree.from_parents"
                )
        object.__setattr__(self, "trees_of", trees)

    def check(self, batch: Batch) -> None:
        _check_count(len(self.trees_of), batch, "trees")
        nodes = np.diff(batch.node_indptr)
        _check_each(batch.q_len <= nodes, "trees", "at least q_len nodes", nodes, "q_len", batch.q_len)
        _check_each(
            nodes <= batch.kv_len,
            "trees",
            "at most kv_len nodes (the tree's own keys are in the cache)",
            nodes,
            "kv_len",
            batch.kv_len,
        )

    def bound(self, batch: Batch) -> IntArray:
        enter: IntArray = batch.nodes[batch.node_of_row, 0]
        return enter


@dataclass(frozen=True, eq=False)
class ValidLength(Leaf):
    """Right padding: rows and columns below ``lengths[b]`` are real; a row at or past it sees nothing."""

    lengths: Any
    test: ClassVar[str] = "col_below"

    def check(self, batch: Batch) -> None:
        _check_lengths(self.lengths, batch, "ValidLength")

    def bound(self, batch: Batch) -> IntArray:
        length = batch.per_row(indices(self.lengths, "lengths"))
        return np.where(batch.row < length, length, 0)


@dataclass(frozen=True, eq=False)
class PaddedLeft(Leaf):
    """Left padding: the last ``lengths[b]`` rows and the last ``lengths[b]`` columns are real."""

    lengths: Any
    test: ClassVar[str] = "col_from"

    def check(self, batch: Batch) -> None:
        _check_lengths(self.lengths, batch, "PaddedLeft")

    def bound(self, batch: Batch) -> IntArray:
        length, kv_len = batch.per_row(indices(self.lengths, "lengths")), batch.per_row(batch.kv_len)
        real = batch.row >= batch.per_row(batch.q_len) - length
        return np.where(real, kv_len - length, kv_len)


@dataclass(frozen=True, eq=False)
class Window(Leaf):
    """A query at position ``p`` sees positions ``> p - size``. Join it with `Causal` or `Tree`."""

    size: int
    test: ClassVar[str] = "pos_from"

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", integer(self.size, "Window"))

    def bound(self, batch: Batch) -> IntArray:
        return np.maximum(batch.position.astype(np.int64) - (self.size - 1), -INT32_MAX)


@dataclass(frozen=True, eq=False)
class Sink(Leaf):
    """Every row sees positions ``< size``: the first tokens, kept beside a `Window`."""

    size: int
    test: ClassVar[str] = "pos_below"

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", integer(self.size, "Sink", 0))

    def bound(self, batch: Batch) -> IntArray:
        return np.full(1, self.size, np.int32)


def tile_spans(
    mask: Mask, low: IntArray, high: IntArray, prefix_len: IntArray, kv_len: IntArray
) -> tuple[IntArray, IntArray, BoolArray, BoolArray]:
    """Columns that tiles of rows must visit.

    Parameters
    ----------
    mask : Mask
        The expression.
    low, high : int32 ``[num_leaves, num_tiles]``
        Least and greatest bound of the tile's rows, for each leaf.
    prefix_len, kv_len : int32 ``[num_tiles]``
        Of the tile's sequence.

    Returns
    -------
    begin, end : int32 ``[num_tiles, num_pieces]``
        Pieces of the columns, in order and disjoint.
    visit : bool ``[num_tiles, num_pieces]``
        Whether some row may see a column of the piece.
    full : bool ``[num_tiles, num_pieces]``
        Whether every row sees every column of the piece.
    """
    leaf_spans = [leaf.spans(lo, hi, prefix_len, kv_len) for leaf, lo, hi in zip(mask.leaves(), low, high, strict=True)]
    ends = [edge for some, every in leaf_spans for edge in (*some, *every)]
    edges = np.stack([np.zeros_like(kv_len), kv_len, *ends], axis=1)
    edges = np.sort(np.clip(edges, 0, kv_len[:, None]), axis=1)
    begin, end = edges[:, :-1], edges[:, 1:]

    def inside(which: int) -> BoolArray:
        spans = iter(leaf_spans)

        def covers(_: Leaf) -> BoolArray:
            first, last = next(spans)[which]
            return (first[:, None] <= begin) & (begin < last[:, None])

        result: BoolArray = mask.fold(covers, np.logical_and, np.logical_or)
        return result

    some = inside(0) & (begin < end)
    return begin, end, some, some & inside(1)


def _full_spans(low: IntArray, high: IntArray, prefix_len: IntArray, kv_len: IntArray) -> tuple[Span, Span]:
    whole = np.zeros_like(kv_len), kv_len
    return whole, whole


def _tree_spans(low: IntArray, high: IntArray, prefix_len: IntArray, kv_len: IntArray) -> tuple[Span, Span]:
    zero = np.zeros_like(kv_len)
    return (zero, kv_len), (zero, prefix_len)


def _col_below_spans(low: IntArray, high: IntArray, prefix_len: IntArray, kv_len: IntArray) -> tuple[Span, Span]:
    zero = np.zeros_like(kv_len)
    return (zero, high), (zero, low)


def _col_from_spans(low: IntArray, high: IntArray, prefix_len: IntArray, kv_len: IntArray) -> tuple[Span, Span]:
    return (low, kv_len), (high, kv_len)


def _pos_from_spans(low: IntArray, high: IntArray, prefix_len: IntArray, kv_len: IntArray) -> tuple[Span, Span]:
    every_end = np.where(high <= prefix_len, kv_len, 0)  # past the prefix, positions follow depth, not the column
    return (np.minimum(low, prefix_len), kv_len), (high, every_end)


def _pos_below_spans(low: IntArray, high: IntArray, prefix_len: IntArray, kv_len: IntArray) -> tuple[Span, Span]:
    zero = np.zeros_like(kv_len)
    return (zero, np.where(high <= prefix_len, high, kv_len)), (zero, np.minimum(low, prefix_len))


SPANS: dict[str, Callable[[IntArray, IntArray, IntArray, IntArray], tuple[Span, Span]]] = {
    "full": _full_spans,
    "tree": _tree_spans,
    "col_below": _col_below_spans,
    "col_from": _col_from_spans,
    "pos_from": _pos_from_spans,
    "pos_below": _pos_below_spans,
}


def _as_mask(value: Any) -> Mask:
    if not isinstance(value, Mask):
        raise DTypeError(
            f"mask: expected a Mask beside & or |, got {type(value).__name__}; masks are Full, Causal, Tree, ..."
        )
    return value


def _check_count(count: int, batch: Batch, name: str) -> None:
    num_seqs = len(batch.kv_len)
    if count != num_seqs:
        raise ShapeError(f"{name}: expected one per sequence ({num_seqs}), got {count}")


def _check_lengths(lengths: Any, batch: Batch, name: str) -> None:
    array = indices(lengths, f"{name} lengths")
    _check_count(len(array), batch, f"{name} lengths")
    limit = np.maximum(batch.kv_len, batch.q_len)
    _check_each((array >= 0) & (array <= limit), f"{name} lengths", "0 to max(q_len, kv_len)", array, "limit", limit)


def _check_each(
    fine: BoolArray, name: str, wanted: str, got: IntArray, limit_name: str, limit: Sequence[int] | IntArray
) -> None:
    if not fine.all():
        seq = int(np.argmin(fine))
        raise ShapeError(f"{name}: expected {wanted}, got {got[seq]} for sequence {seq} with {limit_name} {limit[seq]}")
