"""What the tensor-core template copies ahead: two blocks of keys and values in shared memory, and which come next."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ..emit import Buffer, Expr, all_of, dynamic, i32, let, part, private, put, smaller, when
from ..spec import KernelSpec
from ..walk import SPAN_FIELDS, Tile
from .arguments import TileArguments
from .ptx import CHUNK

FIRST, COUNT, FULL = range(3)  # fields of a block of columns


class Stages:
    """Shared memory of keys and values (two blocks of each) and of queries, as rows of 16-bit elements.

    Rows are 16 bytes longer than a key, so that the eight rows a warp loads at once lie in different banks.
    """

    def __init__(self, spec: KernelSpec, config: Any) -> None:
        self.size = config.stage_elements(spec)
        self.data = dynamic(self.size, "uint16")
        self.words = part(self.data, self.size // 2, 0, "uint32")
        self.key_row, self.value_row = spec.d_qk + CHUNK, spec.d_v + CHUNK
        self.columns = config.columns
        self.queries = config.query_at(spec)

    def key(self, parity: Expr, column: Expr) -> Expr:
        """Return where a key begins."""
        return (parity * self.columns + column) * self.key_row

    def value(self, parity: Expr, column: Expr) -> Expr:
        """Return where a value begins."""
        return 2 * self.columns * self.key_row + (parity * self.columns + column) * self.value_row

    def query(self, row: Expr) -> Expr:
        """Return where a query begins."""
        return self.queries + row * self.key_row


class Cursor:
    """Steps through the spans of a tile, a block of columns at a time."""

    def __init__(self, args: TileArguments, tile: Tile, columns: int) -> None:
        self.args, self.tile, self.columns = args, tile, columns
        self.at = private(4, "int32")  # span, column, end of the span, whether it is full
        put(self.at, 0, tile.span_begin)
        self._enter()

    def _enter(self) -> None:
        """Read the span to come, if there is one."""
        with when(self.at[0] < self.tile.span_end):
            for field in range(SPAN_FIELDS):
                put(self.at, field + 1, self.args.spans[self.at[0] * SPAN_FIELDS + field])

    def take(self, block: Buffer, at: int) -> None:
        """Write the next block to ``block[at:]``; its count is 0 after the last."""
        column, rest = let(self.at[1]), let(self.at[2] - self.at[1])
        there = self.at[0] < self.tile.span_end
        count = let(T.Select(there, smaller(rest, i32(self.columns)), i32(0)))
        put(block, at + FIRST, column)
        put(block, at + COUNT, count)
        put(block, at + FULL, self.at[3])
        put(self.at, 1, column + count)
        with when(all_of(count > 0, count == rest)):
            put(self.at, 0, self.at[0] + 1)
            self._enter()
