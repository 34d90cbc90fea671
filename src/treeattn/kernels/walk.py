"""The walk over a tile's columns: spans of the plan become blocks of columns with the addresses of key and value.

A full span is taken page by page without a test. A column of a partial span is taken only if some token of the tile
sees it; the block is *partial* if some token does not see some column of it, and only then are scores masked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from .emit import (
    Buffer,
    Expr,
    all_of,
    broadcast,
    either,
    i32,
    i64,
    let,
    loop,
    put,
    registers,
    smaller,
    span,
    when,
    while_,
    wide,
)
from .predicates import Column, tester
from .vectors import shuffle

SPAN_FIELDS = 3  # begin, end, full
LANES = 8


@dataclass(frozen=True)
class Pool:
    """Keys or values: a flat buffer and its strides in elements, of dtype ``index``."""

    data: Buffer
    page: Expr
    slot: Expr
    head: Expr
    index: str = "int64"

    def address(self, page_id: Expr, offset: Expr, head: Expr) -> Expr:
        """Return the offset of the first element of a slot."""
        page_id, offset, head = (wide(value, self.index) for value in (page_id, offset, head))
        return let(page_id * self.page + offset * self.slot + head * self.head)


@dataclass(frozen=True)
class Moves:
    """Columns from ``kept`` on lie ``skip`` slots further, ``gap`` positions further; column 0 is at ``begin``."""

    begin: Expr
    kept: Expr
    gap: Expr
    skip: Expr

    def _past(self, column: Expr, shift: Expr) -> Expr:
        return column + T.Select(column >= self.kept, shift, i32(0))

    def position(self, column: Expr) -> Expr:
        """Return the position of a column that is no node of a tree."""
        return self.begin + self._past(column, self.gap)

    def slot(self, column: Expr) -> Expr:
        """Return the slot, counted through the sequence's pages."""
        return self._past(column, self.skip)


@dataclass(frozen=True)
class Tile:
    """A work item: rows of one kv head of one sequence, and the spans of columns it visits."""

    kind: Expr
    head: Expr
    row_begin: Expr
    num_rows: Expr
    span_begin: Expr
    span_end: Expr
    q_begin: Expr
    page_begin: Expr
    prefix_len: Expr
    node_begin: Expr
    moves: Moves | None
    group: Expr

    def token(self, row: Expr) -> Expr:
        """Return the query token, within the batch, of a row of the tile."""
        return self.q_begin + T.truncdiv(self.row_begin + row, self.group)

    def q_head(self, row: Expr) -> Expr:
        """Return the query head of a row of the tile."""
        return self.head * self.group + T.truncmod(self.row_begin + row, self.group)

    def position_of(self, column: Expr) -> Expr:
        """Return the position of a column that is no node of a tree."""
        return self.moves.position(column) if self.moves else column


@dataclass(frozen=True)
class Block:
    """Columns at work: where they begin in the walk's tables, where the next block's do, how many, and if partial."""

    tile: Tile
    base: Expr
    following: Expr
    count: Expr
    partial: Expr


class Walk:
    """Two blocks of columns, the one at work and the next, so that the next can be prefetched."""

    def __init__(self, capacity: int, tables: Any, mask: tuple[Any, ...]) -> None:
        self.capacity, self.tables, self.mask = capacity, tables, mask
        self.at = registers(2, "int32")  # span, column
        self.count = registers(2, "int32")
        self.partial = registers(2, "int32")
        self.column = registers(2 * capacity, "int32")
        self.key = registers(2 * capacity, "int64")
        self.value = registers(2 * capacity, "int64")

    def block(self, tile: Tile, parity: Expr) -> Block:
        """Return the block filled last for ``parity``."""
        base = let(parity * self.capacity)
        return Block(tile, base, let(self.capacity - base), let(self.count[parity]), let(self.partial[parity]))

    def start(self, tile: Tile) -> None:
        """Stand before the first span."""
        put(self.at, 0, tile.span_begin)
        put(self.at, 1, self.tables.spans[tile.span_begin * SPAN_FIELDS])
        put(self.count, 0, i32(0))
        put(self.column, 0, i32(0))
        put(self.key, 0, T.int64(0))
        put(self.value, 0, T.int64(0))

    def fill(self, tile: Tile, parity: Expr, limit: Expr) -> None:
        """Gather the next ``limit`` columns; what stays empty repeats the last one, so a full block needs no bounds."""
        base = let(parity * self.capacity)
        put(self.count, parity, i32(0))
        put(self.partial, parity, i32(0))
        with while_(all_of(self.count[parity] < limit, self.at[0] < tile.span_end)):
            row = let(self.at[0] * SPAN_FIELDS)
            end = let(self.tables.spans[row + 1])
            if self.mask[0] == "full":
                self._take_run(tile, parity, base, limit, end)
            else:
                either(
                    self.tables.spans[row + 2] == 1,
                    lambda: self._take_run(tile, parity, base, limit, end),
                    lambda: self._take_seen(tile, parity, base),
                )
            with when(self.at[1] == end):
                put(self.at, 0, self.at[0] + 1)
                put(self.at, 1, self.tables.spans[row + SPAN_FIELDS])
        self._pad(base, let(self.count[parity]), parity)

    def _pad(self, base: Expr, count: Expr, parity: Expr) -> None:
        last = let(T.if_then_else(count > 0, base + count - 1, (1 - parity) * self.capacity))
        for table in (self.column, self.key, self.value):
            value = let(table[last])
            with loop(count, self.capacity) as t:
                put(table, base + t, value)

    def _take_run(self, tile: Tile, parity: Expr, base: Expr, limit: Expr, end: Expr) -> None:
        """Take columns up to the end of the span, of the page or of the block."""
        column, count = let(self.at[1]), let(self.count[parity])
        key, value, left = self._address(tile, column)
        run = let(smaller(smaller(end - column, limit - count), left))
        with loop(run) as r:
            at = base + count + r
            put(self.column, at, column + r)
            put(self.key, at, key + i64(r) * self.tables.k.slot)
            put(self.value, at, value + i64(r) * self.tables.v.slot)
        put(self.count, parity, count + run)
        put(self.at, 1, column + run)

    def _take_seen(self, tile: Tile, parity: Expr, base: Expr) -> None:
        """Take one column if some token of the tile sees it."""
        column, count = let(self.at[1]), let(self.count[parity])
        seeing, tokens = self._count_seeing(tile, column)
        with when(seeing > 0):
            key, value, _ = self._address(tile, column)
            put(self.column, base + count, column)
            put(self.key, base + count, key)
            put(self.value, base + count, value)
            put(self.count, parity, count + 1)
            with when(seeing < tokens):
                put(self.partial, parity, i32(1))
        put(self.at, 1, column + 1)

    def _address(self, tile: Tile, column: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the offsets of key and value of a column, and how many columns its page still holds."""
        tables = self.tables
        slot = let(tile.moves.slot(column)) if tile.moves else column
        page = let(T.truncdiv(slot, tables.page_size))
        offset = let(slot - page * tables.page_size)
        page_id = let(tables.page_ids[tile.page_begin + page])
        key, value = (pool.address(page_id, offset, tile.head) for pool in (tables.k, tables.v))
        left = tables.page_size - offset
        if tile.moves:
            left = T.Select(column < tile.moves.kept, smaller(left, tile.moves.kept - column), left)
        return key, value, left

    def _count_seeing(self, tile: Tile, column: Expr) -> tuple[Expr, Expr]:
        first = let(tile.token(i32(0)))
        tokens = let(tile.token(tile.num_rows - 1) - first + 1)
        visible = self.tester(tile, column)
        seeing = registers(LANES, "int32")
        put(seeing, span(0, LANES), broadcast(i32(0), LANES))
        with loop(T.truncdiv(tokens + LANES - 1, LANES)) as v:
            at = first + v * LANES

            def bound(k: int) -> Expr:
                return self.tables.bounds[span(k * self.tables.bounds_stride + at, LANES)]

            inside = T.Ramp(v * LANES, 1, LANES) < broadcast(tokens, LANES)
            sees = T.Select(
                T.bitwise_and(visible(bound, LANES), inside), broadcast(i32(1), LANES), broadcast(i32(0), LANES)
            )
            put(seeing, span(0, LANES), seeing[span(0, LANES)] + sees)
        total = seeing[span(0, LANES)]
        for lanes in ([4, 5, 6, 7, 0, 1, 2, 3], [2, 3, 0, 1, 6, 7, 4, 5], [1, 0, 3, 2, 5, 4, 7, 6]):
            total = total + shuffle([total], lanes)
        put(seeing, span(0, LANES), total)
        return let(seeing[0]), tokens

    def tester(self, tile: Tile, column: Expr) -> Callable[[Callable[[int], Expr], int], Expr]:
        """Return the test of rows against a column of the tile's sequence."""
        return tester(self.mask, self._column(tile, column))

    def position(self, tile: Tile, index: Expr) -> Expr:
        """Return the position of the column at ``index`` of the tables."""
        return self._column(tile, let(self.column[index])).position()

    def _column(self, tile: Tile, column: Expr) -> Column:
        return Column(column, tile.prefix_len, tile.node_begin, self.tables.nodes, tile.position_of)
