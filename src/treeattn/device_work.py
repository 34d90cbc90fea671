"""From tiles and spans to the work of a GPU: items, some of them parts of a split tile, in two packed buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import IntArray
from .masks import Batch, Form, Mask
from .planner import (
    Tiles,
    Visits,
    bound_range,
    cut_spans,
    describe_seqs,
    even_rows,
    find_visits,
    repeat_each,
    token_range,
)
from .schedules.gpu import AnyTile
from .storage import PageTable

# The layout of both buffers, as in `treeattn.kernels.gpu.arguments`; a test compares.
PARTS = ("items", "merges", "seqs", "spans", "page_ids", "bounds", "nodes", "positions")
TABLES = ("rope_low", "rope_high", "alibi", "sink_logits")
VALUES = ("bounds_stride", "page_size", "group", "q_heads")
CONSTANTS = ("sm_scale", "cap_limit", "cap_inverse", "minus_infinity")
LEAST_BLOCKS = 2
"""Blocks of columns that a part of a split tile has at least: merging a part costs about as much."""


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """What the GPU kernels are told to do: ``parts`` of their integer buffer, by name, and the size of it all."""

    parts: dict[str, IntArray]
    values: dict[str, int]
    num_states: int
    last_position: int

    @property
    def num_items(self) -> int:
        return len(self.parts["items"])

    @property
    def num_merges(self) -> int:
        return len(self.parts["merges"])

    def pack(self, tables: Mapping[str, Any], constants: Mapping[str, float]) -> tuple[IntArray, NDArray[np.float32]]:
        """Return the buffers ``plan`` and ``tables``, each with a header that says where its parts begin."""
        flat = [self.parts[name].ravel() for name in PARTS]
        floats = [np.asarray(tables.get(name, ()), np.float32).ravel() for name in TABLES]
        size = len(PARTS) + len(TABLES) + len(VALUES)
        header = [*_starts(size, flat), *_starts(len(CONSTANTS), floats), *(self.values[name] for name in VALUES)]
        given = np.array([constants[name] for name in CONSTANTS], np.float32)
        return np.concatenate([np.array(header, np.int32), *flat]), np.concatenate([given, *floats])


def make_device_work(
    batch: Batch,
    mask: Mask,
    table: PageTable,
    *,
    kv_heads: int,
    group: int,
    tile: AnyTile,
    blocks: int,
    positions: bool,
) -> DeviceWork:
    """Cut rows in tiles, and the columns of the tiles too where there are fewer tiles than ``blocks``."""
    seq, row_begin, num_rows = even_rows(batch.q_len * group, tile.rows)
    tiles = Tiles(np.full_like(seq, -1), seq, row_begin, num_rows)
    bounds = mask.bounds(batch, spare=1)
    whole = drop_unseen(find_visits(batch, mask, bounds, tiles, group), batch, mask, bounds, tiles, group, tile.columns)
    visits, of_tile = split(whole, tile.columns, -(-blocks // kv_heads))
    items, merges = _items(tiles, visits, of_tile, kv_heads)
    parts = {
        "items": items,
        "merges": merges,
        "seqs": describe_seqs(batch, table),
        "spans": visits.spans,
        "page_ids": table.page_ids,
        "bounds": bounds,
        "nodes": batch.nodes,
        "positions": batch.position if positions else np.zeros(0, np.int32),
    }
    values = {
        "bounds_stride": bounds.shape[1],
        "page_size": table.page_size,
        "group": group,
        "q_heads": group * kv_heads,
    }
    last = batch.last_position if positions else 0
    return DeviceWork(parts, values, int(items[:, 0].max(initial=-1)) + 1, last)


def drop_unseen(
    visits: Visits, batch: Batch, mask: Mask, bounds: IntArray, tiles: Tiles, group: int, columns: int
) -> Visits:
    """Leave out blocks of nodes that no row of a tile sees: of a large tree, most are in other branches.

    A node is seen by a row within its interval, so one whose interval misses all of a tile's rows is not.
    """
    leaf = _required_tree(mask.form)
    if leaf is None or len(visits.spans) == 0 or int(np.diff(batch.node_indptr).max(initial=0)) <= columns:
        return visits
    begin, end, full = visits.spans.astype(np.int64).T
    tile = visits.tile_of_span
    prefix_len = batch.prefix_len[tiles.seq[tile]]
    can_miss = (begin >= prefix_len) & (full == 0)
    span, part = repeat_each(np.where(can_miss, -(-(end - begin) // columns), 1))
    first = begin[span] + part * columns
    last = np.where(can_miss[span], np.minimum(first + columns, end[span]), end[span])
    low, high = bound_range(bounds[leaf : leaf + 1], *token_range(batch, tiles, group))
    seen = ~can_miss[span]
    tested = np.flatnonzero(can_miss[span])
    of = tile[span[tested]]
    node = np.minimum(first[tested, None] + np.arange(columns), last[tested, None] - 1)
    node += (batch.node_indptr[tiles.seq[of]] - batch.prefix_len[tiles.seq[of]])[:, None]
    enter, leave, _ = np.moveaxis(batch.nodes[node], -1, 0)
    seen[tested] = ((enter <= high[0, of, None]) & (leave > low[0, of, None])).any(axis=1)
    spans = np.stack([first, last, full[span]], axis=1)[seen]
    return Visits.of(spans, tile[span[seen]], len(visits.columns))


def _required_tree(form: Form) -> int | None:
    """Return the index of the tree's bounds if nothing is seen that the tree hides."""
    if form[0] == "&":
        left = _required_tree(form[1])
        return _required_tree(form[2]) if left is None else left
    return form[1] if form[0] == "tree" else None


def split(visits: Visits, columns: int, blocks: int) -> tuple[Visits, IntArray]:
    """Split the columns of tiles in even parts, about ``blocks`` in all, cut at multiples of ``columns``.

    Returns
    -------
    parts : Visits
        Of the parts, in order.
    of_tile : int32 ``[num_parts]``
        The tile of each; one that visits nothing has one part.
    """
    num_tiles, visited = len(visits.columns), visits.columns.astype(np.int64)
    share = max(int(visited.sum()) // max(blocks, 1), LEAST_BLOCKS * columns)
    wanted = np.maximum((2 * visited + share) // (2 * share), 1)  # less than 1.5 shares stay whole
    sizes = np.maximum(-(-visited // (wanted * columns)), 1) * columns
    parts = np.maximum(-(-visited // sizes), 1)
    first_part = np.cumsum(parts) - parts
    tile = visits.tile_of_span
    begin, end, full = visits.spans.astype(np.int64).T
    length = end - begin
    before = np.cumsum(length) - length
    before -= (np.cumsum(visits.columns) - visits.columns)[tile]  # columns of the tile before the span
    span, part, first, last = cut_spans(before, before + length, sizes[tile])
    shift = (begin - before)[span]
    spans = np.stack([first + shift, last + shift, full[span]], axis=1)
    cut = Visits.of(spans, first_part[tile[span]] + part, int(parts.sum()))
    return cut, np.repeat(np.arange(num_tiles, dtype=np.int32), parts)


def _items(tiles: Tiles, parts: Visits, of_tile: IntArray, kv_heads: int) -> tuple[IntArray, IntArray]:
    """Return items, the longest first, and merges; both ``[n, 7]``, fields as in `treeattn.kernels.gpu.arguments`."""
    num_parts, split_tiles = len(of_tile), np.bincount(of_tile, minlength=len(tiles.seq)) > 1
    part = np.tile(np.arange(num_parts), kv_heads)
    head = np.repeat(np.arange(kv_heads, dtype=np.int32), num_parts)
    tile = of_tile[part]
    is_split = split_tiles[tile]
    state = np.where(is_split, np.cumsum(is_split) - 1, -1)
    fields = (
        state, tiles.seq[tile], head, tiles.row_begin[tile], tiles.num_rows[tile], parts.indptr[part],
        parts.indptr[part + 1],
    )  # fmt: skip
    items = np.stack(fields, axis=1).astype(np.int32)
    begins = is_split & np.concatenate([[True], (tile[1:] != tile[:-1]) | (head[1:] != head[:-1])])[: len(tile)]
    merges = items[begins]
    counts = np.bincount(of_tile, minlength=len(tiles.seq))[tile[begins]]
    merges[:, 5], merges[:, 6] = merges[:, 0], merges[:, 0] + counts
    return items[np.argsort(-parts.columns[part], kind="stable")], merges


def _starts(begin: int, arrays: list[NDArray[Any]]) -> list[int]:
    """Return where each array begins in a buffer that starts with ``begin`` other elements."""
    return [begin + sum(array.size for array in arrays[:i]) for i in range(len(arrays))]
