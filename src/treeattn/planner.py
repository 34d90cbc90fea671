"""From lengths, trees and page tables to work items, balanced over threads.

Everything that depends on lengths is computed here once a step, on the host; `Plan.run` only launches, once a layer.
"""

from __future__ import annotations

import heapq
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .arrays import DTYPES, INT32_MAX, IntArray, check_dtype, indices
from .checks import integer
from .errors import IndexRangeError, ShapeError
from .launch import Launch
from .masks import Batch, Mask, tile_spans
from .schedules.tiles import TileConfig
from .split import SplitLaunch
from .storage import PageTable, Storage, check_indptr

if TYPE_CHECKING:
    from .device_launch import DeviceLaunch

MOST_THREADS = 64
LEAST_PART = 64  # columns; merging a part costs about as much
LANES = 8  # bounds are read by vectors of tokens
BLOCK_COST = 24
"""What a block costs beside its columns, in columns: softmax state, rescaling, addresses."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a kernel is told to do, as flat int32 arrays; fields as in `treeattn.kernels.cpu`."""

    items: IntArray
    item_indptr: IntArray
    seqs: IntArray
    spans: IntArray
    bounds: IntArray
    positions: IntArray
    nodes: IntArray
    last_position: int
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Tiles:
    """Row tiles before they are multiplied by kv heads: parallel arrays, one entry a tile."""

    kind: IntArray
    seq: IntArray
    row_begin: IntArray
    num_rows: IntArray


def make_work(
    batch: Batch,
    mask: Mask,
    table: PageTable,
    *,
    kv_heads: int,
    group: int,
    config: TileConfig,
    threads: int,
    positions: bool,
    cut: int | None = None,
) -> Work:
    """Cut rows in tiles, find the columns each visits, and deal tiles times kv heads to threads.

    With ``cut``, the columns of a tile are cut too, at multiples of it. Part ``p`` then works for the queries and
    outputs ``p * q_total`` rows further: q is to be repeated ``Work.parts`` times, and outputs are states to merge.
    """
    tiles = cut_rows(batch.q_len * group, config)
    bounds = mask.bounds(batch, spare=LANES)
    visits = find_visits(batch, mask, bounds, tiles, group)
    parts = 1 if cut is None else max(1, -(-int(batch.kv_len.max(initial=0)) // cut))
    seqs = describe_seqs(batch, table)
    if cut is not None:
        tiles, visits = _cut_columns(tiles, visits, cut, parts, len(seqs))
        bounds = np.pad(np.tile(bounds[:, :-LANES], parts), ((0, 0), (0, LANES)))
        seqs = np.tile(seqs, (parts, 1))
        seqs[:, 0] += np.repeat(np.arange(parts) * batch.q_indptr[-1], len(batch.q_len)).astype(np.int32)
    items, item_indptr = _deal(tiles, visits.indptr, _cost(tiles, visits.columns, config), kv_heads, threads)
    return Work(
        items=items,
        item_indptr=item_indptr,
        seqs=seqs,
        spans=np.concatenate([visits.spans, np.zeros((1, 3), np.int32)]),  # the walk reads one past the last
        bounds=bounds,
        positions=_contiguous(np.tile(batch.position, parts)) if positions else np.zeros(1, np.int32),
        nodes=_contiguous(batch.nodes),
        last_position=batch.last_position if positions else 0,
        parts=parts,
    )


def _cut_columns(tiles: Tiles, visits: Visits, cut: int, parts: int, num_seqs: int) -> tuple[Tiles, Visits]:
    """Give every tile ``parts`` parts, each with what it visits between two multiples of ``cut``."""
    begin, end, full = visits.spans.T
    span, part, first, last = cut_spans(begin, end, np.broadcast_to(cut, begin.shape))
    owner = visits.tile_of_span[span] * parts + part  # rises, because the spans of a tile do
    pieces = np.stack([first, last, full[span]], axis=1)
    kind, seq, row_begin, num_rows = (np.repeat(field, parts) for field in astuple(tiles))
    seq = seq + np.tile(np.arange(parts, dtype=np.int32) * num_seqs, len(tiles.seq))
    return Tiles(kind, seq, row_begin, num_rows), Visits.of(pieces, owner, len(seq))


def cut_spans(begin: Any, end: Any, size: Any) -> tuple[Any, Any, Any, Any]:
    """Cut spans ``[begin, end)`` at multiples of their ``size``.

    Returns, for every piece, its span, how many multiples come before it, and its begin and end.
    """
    first = begin // size
    span, index = repeat_each((end - 1) // size - first + 1)
    part = first[span] + index
    return span, part, np.maximum(begin[span], part * size[span]), np.minimum(end[span], (part + 1) * size[span])


def repeat_each(count: Any) -> tuple[Any, Any]:
    """Return, for ``count[i]`` entries of every ``i``, that ``i`` and the number of the entry among them."""
    which = np.repeat(np.arange(len(count)), count)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)


def describe_seqs(batch: Batch, table: PageTable) -> IntArray:
    """Return what kernels read of every sequence, int32 ``[num_seqs, 8]`` (`treeattn.kernels.arguments`)."""
    fixed = np.stack([batch.q_indptr[:-1], table.page_indptr[:-1], batch.prefix_len, batch.node_indptr[:-1]], axis=1)
    moves = np.zeros_like(fixed) if table.moves is None else table.moves
    return _contiguous(np.concatenate([fixed, moves], axis=1))


@dataclass(frozen=True, slots=True)
class Visits:
    """The columns that tiles visit.

    ``spans`` is ``[num_spans, 3]`` (begin, end, full), those of a tile begin at its ``indptr``, and ``columns`` counts
    what they cover.
    """

    spans: IntArray
    indptr: IntArray
    columns: IntArray

    @classmethod
    def of(cls, spans: Any, owner: Any, num_tiles: int) -> Visits:
        """Make them of spans whose tiles, ``owner``, never fall."""
        indptr = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=num_tiles))]).astype(np.int32)
        columns = np.bincount(owner, weights=spans[:, 1] - spans[:, 0], minlength=num_tiles).astype(np.int32)
        return cls(_contiguous(spans), indptr, columns)

    @property
    def tile_of_span(self) -> NDArray[np.intp]:
        """The tile of every span."""
        return np.repeat(np.arange(len(self.columns)), np.diff(self.indptr))


def find_visits(batch: Batch, mask: Mask, bounds: IntArray, tiles: Tiles, group: int) -> Visits:
    """Find the spans of columns that each tile must visit, from the bounds of its rows."""
    first, last = token_range(batch, tiles, group)
    low, high = bound_range(bounds, first, last)
    for k, leaf in enumerate(mask.leaves()):
        if leaf.test.startswith("pos"):
            low[k], high[k] = (batch.column_of(bound[k], tiles.seq) for bound in (low, high))
    begin, end, some, full = tile_spans(mask, low, high, batch.prefix_len[tiles.seq], batch.kv_len[tiles.seq])
    spans = np.stack([begin[some], end[some], full[some]], axis=1).astype(np.int32)
    indptr = np.concatenate([[0], np.cumsum(some.sum(axis=1))]).astype(np.int32)
    return Visits(spans, indptr, ((end - begin) * some).sum(axis=1))


def cut_rows(rows: IntArray, config: TileConfig) -> Tiles:
    """Cut each sequence's rows in even tiles; few rows take the smallest row tile that holds them."""
    seq, row_begin, num_rows = even_rows(rows, config.rows, np.where(rows > config.few[-1], config.panel, 1))
    kind = np.searchsorted(np.asarray(config.few), num_rows)
    return Tiles(_contiguous(kind), seq, row_begin, num_rows)


def even_rows(rows: IntArray, most: int, step: Any = 1) -> tuple[IntArray, IntArray, IntArray]:
    """Cut each sequence's rows in even tiles of at most ``most``, multiples of ``step`` but for the last.

    Returns sequence, first row and number of rows of every tile.
    """
    count = -(-rows // most)
    seq, index = repeat_each(count)
    even = -(-rows // np.maximum(count, 1))
    even = (-(-even // step) * step)[seq]
    row_begin = index * even
    num_rows = np.minimum(even, rows[seq] - row_begin)
    real = num_rows > 0
    return _contiguous(seq[real]), _contiguous(row_begin[real]), _contiguous(num_rows[real])


def token_range(batch: Batch, tiles: Tiles, group: int) -> tuple[IntArray, IntArray]:
    """First and last token of each tile."""
    begin = batch.q_indptr[tiles.seq]
    return begin + tiles.row_begin // group, begin + (tiles.row_begin + tiles.num_rows - 1) // group


def bound_range(bounds: IntArray, first: IntArray, last: IntArray) -> tuple[IntArray, IntArray]:
    """Least and greatest bound of each tile's tokens ``first .. last``, for every leaf; ``bounds`` has spare places."""
    if len(first) == 0:
        empty = np.zeros((len(bounds), 0), np.int32)
        return empty, empty
    edges = np.stack([first, last + 1], axis=1).ravel()
    return np.minimum.reduceat(bounds, edges, axis=1)[:, ::2], np.maximum.reduceat(bounds, edges, axis=1)[:, ::2]


def _cost(tiles: Tiles, columns: IntArray, config: TileConfig) -> NDArray[np.int64]:
    """Estimate the time of a tile in row-columns: many rows come in panels, few are bound by reading."""
    panels = -(-tiles.num_rows // config.panel) * config.panel
    rows = np.where(tiles.kind < config.many, np.maximum(tiles.num_rows, LANES), panels)
    return rows.astype(np.int64) * (columns + BLOCK_COST)


def _deal(
    tiles: Tiles, span_indptr: IntArray, cost: NDArray[np.int64], kv_heads: int, threads: int
) -> tuple[IntArray, IntArray]:
    """Give the dearest item to the least loaded thread, over and over; a thread works through its items in order."""
    num_tiles = len(tiles.seq)
    heads = np.repeat(np.arange(kv_heads, dtype=np.int32), num_tiles)
    tile = np.tile(np.arange(num_tiles), kv_heads)
    order = np.argsort(tiles.seq[tile], kind="stable")  # row tiles of one head share its keys: keep them together
    owner = _balance(cost[tile[order]], heads[order], kv_heads, threads)
    order = order[np.argsort(owner, kind="stable")]
    tile, heads = tile[order], heads[order]
    fields = tiles.kind, tiles.seq, tiles.seq, tiles.row_begin, tiles.num_rows, span_indptr[:-1], span_indptr[1:]
    items = np.stack(fields, axis=1).astype(np.int32)[tile]
    items[:, 2] = heads
    per_thread = np.bincount(owner, minlength=threads)
    return items, _contiguous(np.concatenate([[0], np.cumsum(per_thread)]))


def _balance(cost: NDArray[np.int64], head: IntArray, kv_heads: int, threads: int) -> NDArray[np.intp]:
    """Return the thread of each item.

    A tile costs the same for every head: as many heads as can be shared out evenly are, and only the rest is dealt.
    """
    each = kv_heads // threads
    owner = head.astype(np.intp) // max(each, 1)
    dealt = np.flatnonzero(head >= each * threads)
    loads = [(0, thread) for thread in range(threads)]
    for item in dealt[np.argsort(-cost[dealt], kind="stable")].tolist():
        load, thread = loads[0]
        owner[item] = thread
        heapq.heapreplace(loads, (load + int(cost[item]), thread))
    return owner


def _contiguous(array: Any) -> IntArray:
    return np.ascontiguousarray(array, np.int32)


class Plan:
    """A step's work, ready to run once a layer. Made by `treeattn.plan`.

    A plan may run from several threads at once; each keeps its own scratch memory.
    """

    def __init__(self, launch: Launch | SplitLaunch | DeviceLaunch) -> None:
        self._launch = launch

    @property
    def num_items(self) -> int:
        """Number of work items (row tiles times kv heads; on a GPU, parts of them)."""
        return self._launch.num_items

    @property
    def threads(self) -> int:
        """Number of threads the items are dealt to."""
        return self._launch.threads

    @property
    def template(self) -> str:
        """Which kernel template runs, and why not another one."""
        return self._launch.template

    def run(self, q: Any, kv: Storage | None = None, *, out: Any = None, check: bool = True) -> tuple[Any, Any]:
        """Compute attention for one layer.

        Parameters
        ----------
        q : Array
            ``[q_total, q_heads, d_qk]``.
        kv : RaggedKV or PagedKV
            This layer's keys and values, laid out as those the plan was made for; its page table is not read again.
            None for the ones the plan was made with.
        out : Array, optional
            Where to write, ``[q_total, q_heads, d_v]`` of the dtype of ``q``.
        check : bool
            False skips the comparison with the planned shapes, for callers who made it once.

        Returns
        -------
        out : Array
            ``[q_total, q_heads, d_v]``, of the kind and dtype of ``q``.
        lse : Array
            ``[q_total, q_heads]`` float32, the log-sum-exp of the logits in base 2; -inf for a row that saw nothing.

        Raises
        ------
        ShapeError, DTypeError
            An array that differs from the plan.
        """
        return self._launch.run(q, kv, out, check)


def check_q_indptr(q_indptr: Any, num_seqs: int, q_total: int | None = None) -> IntArray:
    """Return ``q_indptr`` as int32 ``[num_seqs + 1]``, checked, and against ``q_total`` where it is known."""
    indptr = indices(q_indptr, "q_indptr")
    if len(indptr) != num_seqs + 1:
        raise ShapeError(f"q_indptr: expected shape [num_seqs + 1] = [{num_seqs + 1}], got [{len(indptr)}]")
    check_indptr(indptr, int(indptr[-1]) if q_total is None else q_total, "q_indptr", "q")
    return indptr


def check_rows(q_indptr: IntArray, group: int) -> None:
    """Check that rows (query tokens times heads of a group) can be counted in int32."""
    if int(q_indptr[-1]) * group > INT32_MAX:
        raise IndexRangeError(
            f"q_indptr: expected at most {INT32_MAX} rows, got {q_indptr[-1]} tokens times {group} heads a kv head"
        )


def check_heads(q_heads: Any, kv_heads: int) -> int:
    """Return ``q_heads``, a positive multiple of ``kv_heads``."""
    heads = integer(q_heads, "q_heads")
    if heads % kv_heads:
        raise ShapeError(f"q_heads: expected a positive multiple of kv_heads ({kv_heads}), got {heads}")
    return heads


def check_threads(threads: Any, most: int) -> int:
    """Return the thread count: all available for None."""
    if threads is None:
        return most
    return min(integer(threads, "threads"), max(most, MOST_THREADS))  # more than there are processors only take turns


def check_split(split_kv: Any) -> int | None:
    """Return ``split_kv``, columns of a part, or None."""
    return None if split_kv is None else integer(split_kv, "split_kv", LEAST_PART)


def check_q_dtype(dtype: Any) -> str:
    """Return the name of a q dtype given as name, NumPy or PyTorch dtype."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]
    if isinstance(dtype, type):
        name = np.dtype(dtype).name
    return check_dtype(name, "dtype") if name not in DTYPES else name
