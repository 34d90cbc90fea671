"""The plan made inside a function, for callers that bring lengths and page tables but no plan (TVM's KV cache).

It fills the same arrays as `treeattn.planner` and deals items to a fixed number of workers by their
cost; TVM's threads take the workers in contiguous ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ..kernels.arguments import FIXED_FIELDS, ITEM_FIELDS, SEQ_FIELDS, Arguments
from ..kernels.emit import (
    Buffer,
    Expr,
    all_of,
    allocate,
    greater,
    i32,
    i64,
    let,
    loop,
    put,
    registers,
    smaller,
    when,
    while_,
)
from ..kernels.spec import KernelSpec, Sizes
from ..kernels.walk import SPAN_FIELDS
from ..kernels.workspace import workspace_floats
from ..planner import BLOCK_COST, LANES
from .spans import MOST_SPANS, SequenceRows, store_spans, tile_spans

WORKERS = 64
MOST_HIGH_ROWS = 2**14
"""Of the angle tables: positions up to this many times their low rows."""


@dataclass(frozen=True)
class Source:
    """The batch: how many sequences and query tokens, and how to read a sequence."""

    num_seqs: Expr
    q_total: Expr
    read: Callable[[Expr], SequenceRows]
    kv_heads: int
    group: int


class InlineArguments(Arguments):
    """Arguments whose plan is made in the function; each worker allocates its own scratch memory."""

    def of_thread(self, thread: Expr) -> None:
        """Allocate scratch memory."""
        self.base = 0
        self.workspace = allocate(workspace_floats(self.spec, self.config), "float32")
        self.row_bounds = allocate(self.spec.num_bounds * self.row_stride, "int32")


class InlinePlan:
    """Emits the plan; afterwards ``arrays`` are those of `Arguments`."""

    def __init__(self, spec: KernelSpec, config: Sizes, source: Source, tests: Sequence[str]) -> None:
        self.spec, self.config, self.source, self.tests = spec, config, source, tests
        rows = config.rows if config.has_many else config.few[-1]
        self.rows = rows
        tiles = let(T.truncdiv(source.q_total * source.group, rows) + source.num_seqs)
        self.items = allocate(tiles * (source.kv_heads * ITEM_FIELDS), "int32")
        self.costs = allocate(tiles * source.kv_heads + 1, "int64")
        self.spans = allocate((tiles * MOST_SPANS + 1) * SPAN_FIELDS, "int32")
        self.seqs = allocate(source.num_seqs * SEQ_FIELDS + 1, "int32")
        self.stride = let(source.q_total + LANES)
        self.bounds = allocate(self.stride * len(tests), "int32")
        self.item_indptr = allocate(WORKERS + 1, "int32")
        self.count = registers(2, "int32")  # items, spans
        self.cost = registers(1, "int64")

    @property
    def arrays(self) -> dict[str, Any]:
        """The plan, by the names of `Arguments`."""
        names = ("items", "item_indptr", "seqs", "spans", "bounds")
        return {name: getattr(self, name) for name in names} | {
            "threads": i32(WORKERS), "group": i32(self.source.group), "bounds_stride": self.stride
        }  # fmt: skip

    def emit(self) -> None:
        """Fill the arrays."""
        put(self.count, 0, i32(0))
        put(self.count, 1, i32(0))
        put(self.cost, 0, T.int64(0))
        with loop(self.source.num_seqs) as b:
            self._sequence(b)
        put(self.costs, self.count[0], self.cost[0])
        self._deal()

    def _sequence(self, b: Expr) -> None:
        seq = self.source.read(b)
        fields = (seq.q_begin, seq.page_begin, seq.prefix_len, seq.node_begin, *(seq.moves or ()))
        for i, value in enumerate(fields[: SEQ_FIELDS if self.spec.moved else FIXED_FIELDS]):
            put(self.seqs, b * SEQ_FIELDS + i, value)
        with loop(seq.q_len) as row:
            for k, bound in enumerate(seq.bounds(row)):
                put(self.bounds, k * self.stride + seq.q_begin + row, bound)
        total = let(seq.q_len * self.source.group)
        with loop(T.truncdiv(total + self.rows - 1, self.rows)) as t:
            begin = let(t * self.rows)
            self._tile(b, seq, begin, let(smaller(total - begin, i32(self.rows))))

    def _tile(self, b: Expr, seq: SequenceRows, begin: Expr, num_rows: Expr) -> None:
        first = let(T.truncdiv(begin, self.source.group))
        last = let(T.truncdiv(begin + num_rows - 1, self.source.group))
        span_begin = let(self.count[1])
        found = tile_spans(self.tests, seq, first, last)
        store_spans(found, self.spans, self.count, 1)
        visited = sum(greater(end - start, i32(0)) for start, end, _ in found)
        kind = i32(0)
        for rows in self.config.few if self.config.has_many else self.config.few[:-1]:
            kind = kind + T.Select(num_rows > rows, i32(1), i32(0))
        price = let(i64(T.truncdiv(num_rows + 15, 16)) * i64(visited + BLOCK_COST))
        with loop(self.source.kv_heads) as head:
            at = let(self.count[0])
            fields = (let(kind), b, head, begin, num_rows, span_begin, self.count[1])
            for i, value in enumerate(fields):
                put(self.items, at * ITEM_FIELDS + i, value)
            put(self.costs, at, self.cost[0])
            put(self.cost, 0, self.cost[0] + price)
            put(self.count, 0, at + 1)

    def _deal(self) -> None:
        """Cut the items, in order, where the cost so far passes the next worker's share."""
        total, at = let(self.cost[0]), registers(1, "int32")
        put(at, 0, i32(0))
        with loop(WORKERS) as worker:
            put(self.item_indptr, worker, at[0])
            share = let(T.truncdiv(total * i64(worker + 1), T.int64(WORKERS)))
            with while_(all_of(at[0] < self.count[0], self.costs[at[0]] < share)):
                put(at, 0, at[0] + 1)
        put(self.item_indptr, WORKERS, self.count[0])


def angles(
    inverse_frequency: Callable[[Expr], Expr],
    scale: Expr,
    factor: float,
    half: int,
    low_rows: int,
    high_rows: Expr,
    needed: Expr,
) -> tuple[Buffer, Buffer]:
    """Fill the tables of angles in float64, where ``needed``; ``inverse_frequency(pair)`` is an angle per position."""
    low, high = (allocate(rows * 2 * half, "float32") for rows in (low_rows, MOST_HIGH_ROWS))
    frequency = allocate(half, "float64")

    def fill(table: Buffer, rows: Expr, step: int, size: float) -> None:
        with loop(rows) as row, loop(half) as pair:
            turn = registers(1, "float64")  # TVM's analyser refuses a variable of this type
            put(turn, 0, T.cast(row * step, "float64") * T.cast(scale, "float64") * frequency[pair])
            put(table, row * (2 * half) + pair, T.cast(T.cos(turn[0]) * T.float64(size), "float32"))
            put(table, row * (2 * half) + half + pair, T.cast(T.sin(turn[0]) * T.float64(size), "float32"))

    with when(needed):
        with loop(half) as pair:
            put(frequency, pair, inverse_frequency(pair))
        fill(low, i32(low_rows), 1, factor)
        fill(high, smaller(high_rows, i32(MOST_HIGH_ROWS)), low_rows, 1.0)
    return low, high
