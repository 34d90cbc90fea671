"""Inputs of one attention call, made to find faults: permuted pages, NaN in unused slots, sharp rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .. import reference
from ..arrays import numpy_dtype, to_numpy
from ..errors import IndexRangeError, ShapeError, UnsupportedError
from ..masks import And, Causal, Leaf, Mask, Or, PaddedLeft, Tree, ValidLength
from ..storage import LatentKV, PagedKV, RaggedKV
from ..tree import TokenTree
from .kinds import Batch, MaskFactory, mask_kinds, random_lengths

Layout: TypeAlias = Literal["paged", "ragged"]


@dataclass(frozen=True, eq=False)
class Case:
    """The arguments of one attention call, with what the oracle says of them.

    Attributes
    ----------
    q : NDArray ``[q_total, q_heads, d_qk]``
    kv : RaggedKV, PagedKV or LatentKV
    mask : Mask
    q_indptr : int32 NDArray ``[num_seqs + 1]``
    sm_scale : float, or None for ``1 / sqrt(d_qk)``
    parts : mapping
        ``softcap``, ``alibi``, ``sink_logits``, ``rope``, as `treeattn.attention` takes them.
    """

    q: NDArray[Any]
    kv: PagedKV | RaggedKV | LatentKV
    mask: Mask
    q_indptr: NDArray[np.int32]
    sm_scale: float | None = None
    parts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_seqs(self) -> int:
        return len(self.q_indptr) - 1

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the call."""
        return {"q_indptr": self.q_indptr, "sm_scale": self.sm_scale, **self.parts}

    @cached_property
    def expected(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """``out, lse`` by the float64 reference."""
        return reference.attention(self.q, self.kv, self.mask, **self.options)

    @cached_property
    def yardsticks(self) -> list[tuple[NDArray[Any], NDArray[np.float32]]]:
        """``out, lse`` in float32, rounded in four ways: on a small case a single one may be lucky."""
        ways = [{"folded": folded, "backwards": backwards} for folded, backwards in product((False, True), repeat=2)]
        return [reference.low_precision(self.q, self.kv, self.mask, **self.options, **way) for way in ways]

    @cached_property
    def more_yardsticks(self) -> list[tuple[NDArray[Any], NDArray[np.float32]]]:
        """Twenty-four more, with ``q . k`` summed in other orders: asked for where the first four were lucky."""
        if self.parts.get("rope") or isinstance(self.kv, LatentKV):
            return []  # dims cannot trade places there
        parts = [_gather(self.kv, seq) for seq in range(self.num_seqs)]
        k, v = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        kv_indptr = _indptr(np.array([len(keys) for keys, _ in parts]))
        orders = [np.random.default_rng(seed).permutation(k.shape[2]) for seed in range(24)]
        return [
            reference.low_precision(
                self.q[..., order],
                RaggedKV(k[..., order], v, kv_indptr),
                self.mask,
                **self.options,
                folded=way % 2 == 0,
                backwards=way % 4 > 1,
            )
            for way, order in enumerate(orders)
        ]


def make_case(
    rng: np.random.Generator,
    *,
    mask: str | MaskFactory | Mask = "tree",
    lengths: Sequence[tuple[int, int]] | None = None,
    trees: Sequence[TokenTree] | None = None,
    contexts: Sequence[int] | None = None,
    num_seqs: int = 6,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    q_heads: int = 4,
    kv_heads: int = 2,
    d_qk: int = 16,
    d_v: int | None = None,
    storage: Layout = "paged",
    page_size: int = 16,
    sm_scale: float | None = None,
    logit_scale: float = 200.0,
    nan_unused: bool = True,
) -> Case:
    """Draw a case.

    Parameters
    ----------
    rng : numpy.random.Generator
        Source of all that is random.
    mask : str, MaskFactory or Mask
        A name of `mask_kinds`, a factory like them, or the mask itself (then give ``lengths``, or ``trees``).
    lengths : sequence of ``(q_len, kv_len)``, optional
        Of each sequence; by default ``num_seqs`` of `random_lengths`.
    trees, contexts : sequences, optional
        In place of ``lengths``: the tree of each sequence, and how many keys come before it (0 by default).
        All nodes are rows.
    dtype, kv_dtype : str
        Of ``q`` and of the storage (as ``q`` by default).
    q_heads, kv_heads, d_qk, d_v : int
        Sizes; ``d_v`` is ``d_qk`` by default and must be in paged storage.
    storage, page_size
        ``"paged"`` (a pool with pages to spare, ids permuted) or ``"ragged"``.
    logit_scale : float
        Each row and head gets its own sharpness; the sharpest one has logits that reach plus or minus this.
    nan_unused : bool
        NaN in unused slots and unreferenced pages, in place of large numbers.
    """
    lengths, own_trees = _lengths(rng, mask, num_seqs, given=lengths, trees=trees, contexts=contexts)
    factory = mask_kinds()[mask] if isinstance(mask, str) else mask
    made = factory if isinstance(factory, Mask) else factory(rng, Batch(lengths, own_trees))
    q_len, kv_len = np.array(lengths, np.int64).reshape(-1, 2).T
    q_indptr, kv_indptr = _indptr(q_len), _indptr(kv_len)
    kv_kind = numpy_dtype(kv_dtype or dtype)
    k = rng.standard_normal((kv_indptr[-1], kv_heads, d_qk)).astype(kv_kind)
    v = rng.standard_normal((kv_indptr[-1], kv_heads, d_v or d_qk)).astype(kv_kind)
    q = rng.standard_normal((q_indptr[-1], q_heads, d_qk))
    scale = d_qk**-0.5 if sm_scale is None else sm_scale
    q *= logit_scale * _sharpness(rng, q, k.astype(np.float64) * scale, q_indptr, kv_indptr)
    kv = pack(rng, k, v, kv_indptr, storage=storage, page_size=page_size, nan_unused=nan_unused)
    return Case(q.astype(numpy_dtype(dtype)), kv, made, q_indptr, sm_scale)


def pack(
    rng: np.random.Generator,
    k: NDArray[Any],
    v: NDArray[Any],
    kv_indptr: NDArray[np.int32],
    *,
    storage: Layout = "paged",
    page_size: int = 16,
    nan_unused: bool = True,
) -> PagedKV | RaggedKV:
    """Put keys ``[kv_total, kv_heads, d_qk]`` and values ``[kv_total, kv_heads, d_v]`` into a fresh storage.

    Paged storage gets a pool of more pages than needed, in random order.

    Raises
    ------
    ShapeError
        ``d_qk != d_v`` in paged storage.
    """
    if storage == "ragged":
        return RaggedKV(k, v, kv_indptr)
    if k.shape != v.shape:
        raise ShapeError(f"d_v: expected d_qk ({k.shape[2]}) in paged storage, got {v.shape[2]}; use storage='ragged'")
    kv_len = np.diff(kv_indptr)
    page_indptr = _indptr(-(-kv_len // page_size))
    num_pages = int(page_indptr[-1])
    pool = num_pages + 3 + num_pages // 2
    page_ids = rng.permutation(pool)[:num_pages].astype(np.int32)
    pages = np.full((pool, 2, k.shape[1], page_size, k.shape[2]), np.nan if nan_unused else 1e4, k.dtype)
    for seq, length in enumerate(kv_len):
        for position in range(length):
            page, slot = page_ids[page_indptr[seq] + position // page_size], position % page_size
            pages[page, 0, :, slot] = k[kv_indptr[seq] + position]
            pages[page, 1, :, slot] = v[kv_indptr[seq] + position]
    last_page_len = np.where(kv_len > 0, (kv_len - 1) % page_size + 1, 0).astype(np.int32)
    return PagedKV(pages, page_indptr, page_ids, last_page_len)


def repack(case: Case, rng: np.random.Generator, *, storage: Layout = "paged", page_size: int = 7) -> Case:
    """The same case with its keys and values elsewhere: other pages, another page size, or ragged."""
    parts = [_gather(case.kv, seq) for seq in range(case.num_seqs)]
    k, v = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    kv_indptr = _indptr(np.array([len(keys) for keys, _ in parts]))
    return replace(case, kv=pack(rng, k, v, kv_indptr, storage=storage, page_size=page_size))


def alone(case: Case, seq: int, rng: np.random.Generator, *, storage: Layout = "paged", page_size: int = 7) -> Case:
    """Sequence ``seq`` of a case as a batch of one, in a fresh storage."""

    def own(leaf: Leaf) -> Mask:
        if isinstance(leaf, Tree):
            return Tree(leaf.trees_of[seq])
        if isinstance(leaf, ValidLength | PaddedLeft):
            return type(leaf)([leaf.lengths[seq]])
        return leaf

    q = case.q[case.q_indptr[seq] : case.q_indptr[seq + 1]]
    k, v = _gather(case.kv, seq)
    kv = pack(rng, k, v, _indptr(np.array([len(k)])), storage=storage, page_size=page_size)
    return Case(q, kv, case.mask.fold(own, And, Or), _indptr(np.array([len(q)])), case.sm_scale, case.parts)


def gather_path(
    case: Case,
    seq: int,
    node: int,
    rng: np.random.Generator,
    *,
    only_last: bool = False,
    storage: Layout = "paged",
    page_size: int = 7,
) -> tuple[Case, NDArray[np.int64]]:
    """Decoding of one root-to-node path as a plain sequence: what verification of the tree must equal.

    Keys and values are those of the prefix and of the path, in a fresh storage; `Tree` becomes `Causal`.

    Parameters
    ----------
    case : Case
        A case with a `Tree` in its mask, beside which may stand `Window`, `Sink`, `Full` and `Causal`.
    seq, node : int
        Which path; the node must be a row, one of the last ``q_len`` of its tree.
    only_last : bool
        One row, the node itself; otherwise also the nodes above it, as far as they are rows.

    Returns
    -------
    path : Case
        The batch of one sequence.
    rows : int64 ``[q_total of path]``
        Rows of ``case.q`` that the rows of ``path`` are.
    """
    trees = case.mask.trees
    if trees is None:
        raise UnsupportedError("case: expected a mask with a Tree, got none; there are no paths to gather")
    q_begin, q_end = (int(offset) for offset in case.q_indptr[seq : seq + 2])
    first_row = trees[seq].num_nodes - (q_end - q_begin)
    if node < first_row:
        raise IndexRangeError(f"node: expected a row, {first_row} or more in sequence {seq}, got {node}")
    nodes = trees[seq].path(node)
    k, v = _gather(case.kv, seq)
    prefix_len = len(k) - trees[seq].num_nodes
    cols = np.array([*range(prefix_len), *(prefix_len + member for member in nodes)])
    kv = pack(rng, k[cols], v[cols], _indptr(np.array([len(cols)])), storage=storage, page_size=page_size)
    rows = [] if only_last else _rows_above(nodes, first_row)
    at = np.array([q_begin + member - first_row for member in [*rows, node]], np.int64)
    linear = case.mask.fold(_linear, And, Or)
    return Case(case.q[at], kv, linear, _indptr(np.array([len(at)])), case.sm_scale, case.parts), at


def _rows_above(nodes: list[int], first_row: int) -> list[int]:
    """The unbroken run of ``nodes`` above the last that are rows: node order is free, one may be missing."""
    rows: list[int] = []
    for member in reversed(nodes[:-1]):
        if member < first_row:
            break
        rows.insert(0, member)
    return rows


def _linear(leaf: Leaf) -> Mask:
    if isinstance(leaf, Tree):
        return Causal()
    if isinstance(leaf, ValidLength | PaddedLeft):
        raise UnsupportedError(f"mask: {type(leaf).__name__} counts rows, so it has no meaning on one path")
    return leaf


def _gather(kv: PagedKV | RaggedKV | LatentKV, seq: int) -> tuple[NDArray[Any], NDArray[Any]]:
    k, v = reference.gather(kv, seq)
    kind = to_numpy(kv.k if isinstance(kv, RaggedKV) else kv.pages, "kv").dtype  # float64 in a check
    return k.astype(kind), v.astype(kind)


def _lengths(
    rng: np.random.Generator,
    mask: str | MaskFactory | Mask,
    num_seqs: int,
    *,
    given: Sequence[tuple[int, int]] | None,
    trees: Sequence[TokenTree] | None,
    contexts: Sequence[int] | None,
) -> tuple[tuple[tuple[int, int], ...], tuple[TokenTree, ...] | None]:
    if trees is None:
        if given is None:
            given = random_lengths(rng, num_seqs, tree=not isinstance(mask, str) or "tree" in mask)
        return tuple(given), None
    if given is None:
        counts = [tree.num_nodes for tree in trees]
        before = contexts or [0] * len(counts)
        given = [(nodes, nodes + prefix) for nodes, prefix in zip(counts, before, strict=True)]
    return tuple(given), tuple(trees)


def _sharpness(
    rng: np.random.Generator,
    q: NDArray[np.float64],
    k: NDArray[np.float64],
    q_indptr: NDArray[np.int32],
    kv_indptr: NDArray[np.int32],
) -> NDArray[np.float64]:
    """Factor of each row and head, ``[q_total, q_heads, 1]``, that brings its largest logit to 1 or less."""
    targets = rng.random(q.shape[:2]) ** 3  # more flat rows than sharp ones
    peaks = np.zeros(q.shape[:2])
    group = q.shape[1] // k.shape[1]
    for seq in range(len(q_indptr) - 1):
        rows, cols = slice(*q_indptr[seq : seq + 2]), slice(*kv_indptr[seq : seq + 2])
        logits = np.einsum("rhd,chd->rhc", q[rows], k[cols].repeat(group, axis=1))
        targets[rows][:1, :1] = 1
        peaks[rows] = np.abs(logits).max(axis=2, initial=0)
    factors: NDArray[np.float64] = targets / np.maximum(peaks, 0.02)  # the bound keeps q within float16
    return factors[..., None]


def _indptr(lengths: NDArray[Any]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
