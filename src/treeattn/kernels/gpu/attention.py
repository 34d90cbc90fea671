"""Attention of a row tile over its spans of columns, by the threads of one block.

The threads form a grid of ``row_threads x column_threads``. A thread keeps a few rows all along: of each block of
columns it computes their scores for a few columns, turns these into weights, and adds all columns' values to a few
dims. Keys pass through shared memory in chunks of dims. Rows' maxima are exchanged once a block of columns,
denominators once at the end; the loops over columns hold no barrier, and every loop and branch around one depends
on the plan alone, so all threads of a block meet at it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from .. import logits
from ..emit import (
    Expr,
    PrimFunc,
    all_of,
    any_of,
    barrier,
    either,
    f32,
    fma,
    greater,
    i32,
    let,
    loop,
    private,
    put,
    shared,
    smaller,
    when,
    wide,
)  # fmt: skip
from ..predicates import tester
from ..softmax import MASKED, normaliser, rescale, weight
from ..spec import KernelSpec
from ..walk import SPAN_FIELDS, Tile
from .arguments import STATE_FIELDS, TileArguments, tile_kernel

UNSEEN = -1.0  # the weight of a column that a row does not see: it is not multiplied, whatever the value holds


def attention(spec: KernelSpec, config: Any, traits: Any) -> PrimFunc:
    """Build the kernel of a spec for a tile configuration (`treeattn.schedules.gpu.GpuTile`) and a target."""
    return tile_kernel(RowTile, spec, config, traits)


class RowTile:
    """One thread's part of a row tile."""

    def __init__(self, spec: KernelSpec, config: Any, args: TileArguments, tile: Tile, thread: Expr) -> None:
        self.spec, self.config, self.args, self.tile, self.thread = spec, config, args, tile, thread
        self.mine, self.place = let(T.truncdiv(thread, config.column_threads)), let(thread % config.column_threads)
        self.rows, self.cols = range(config.rows_each), range(config.columns_each)
        self.dims = config.dims_each(spec)
        self.chunk = config.chunk(spec)
        self.maximum, self.denominator, self.factor = (private(config.rows_each) for _ in range(3))
        self.scores = private(config.rows_each * config.columns_each)
        self.seen = private(config.rows_each * config.columns_each, "int32")
        self.sums = private(config.rows_each * self.dims)
        self.bounds = private(max(spec.num_bounds, 1) * config.rows_each, "int32")
        self.slopes, self.positions = (private(config.rows_each) for _ in range(2))
        self.queries = shared(config.rows * config.query_stride(spec))
        self.stage = shared(config.stage_floats(spec))
        self.weights = shared(config.rows * (config.columns + 1))
        self.exchange = shared(config.rows * config.column_threads)
        self.keys_at, self.values_at = (shared(config.columns, args.index) for _ in range(2))
        self.columns_at = shared(config.columns, "int32")
        self.needs_position = spec.rope is not None or "alibi" in spec.logits

    def run(self) -> None:
        """Visit every span, block by block, and store the rows."""
        self._begin()
        with loop(self.tile.span_begin, self.tile.span_end) as index:
            begin, end, full = (let(self.args.spans[index * SPAN_FIELDS + i]) for i in range(SPAN_FIELDS))
            size = self.config.columns
            with loop(T.truncdiv(end - begin + (size - 1), size)) as step:
                first = let(begin + step * size)
                self._block(first, let(smaller(i32(size), end - first)), full)
        self._end()

    def _begin(self) -> None:
        """Start empty sums, and load what the rows' logits and masks need; rows past the last repeat it."""
        tile = self.tile
        for i in self.rows:
            row = let(smaller(self._row(i), tile.num_rows - 1))
            self.args.start_row(self, tile, row, place=i, places=self.config.rows_each, counts_sink=[self.place == 0])
            for j in range(self.dims):
                put(self.sums, i * self.dims + j, f32(0.0))
        if self.config.holds_query:
            self._stage_queries(i32(0), self.spec.d_qk)

    def _block(self, first: Expr, count: Expr, full: Expr) -> None:
        """Take columns ``first .. first + count`` into the sums of every row."""
        partial = let(any_of(full != 1, count != self.config.columns))
        self._stage_columns(first, count)
        barrier()
        for i in range(len(self.rows) * len(self.cols)):
            put(self.seen, i, i32(1))
        self._score()
        if self.spec.adjusts:
            self._adjust()
        with when(partial):
            self._mask(first, count)
        self._exchange_maxima()
        barrier()
        self._revise_maxima()
        self._weigh()
        barrier()
        either(
            partial,
            functools.partial(self._accumulate, count, guarded=True),
            functools.partial(self._accumulate, count, guarded=False),
        )
        barrier()

    def _row(self, i: int) -> Expr:
        return self.mine + i * self.config.row_threads

    def _column(self, j: int) -> Expr:
        return self.place + j * self.config.column_threads

    def _dim(self, j: int) -> Expr:
        return self.place + j * self.config.column_threads

    def _spread(self, count: int, body: Callable[[Expr], None]) -> None:
        """Run ``body(index)`` for ``count`` indices, dealt to the threads in turn."""
        threads = self.config.threads
        with loop(-(-count // threads)) as step:
            index = let(self.thread + step * threads)
            if count % threads:
                with when(index < count):
                    body(index)
            else:
                body(index)

    def _stage_columns(self, first: Expr, count: Expr) -> None:
        """Look up where the block's keys and values lie; columns past the last repeat it."""

        def stage(c: Expr) -> None:
            column = let(first + smaller(c, count - 1))
            key, value = self.args.slots(self.tile, column)
            put(self.keys_at, c, key)
            put(self.values_at, c, value)
            if self.needs_position:
                put(self.columns_at, c, self.args.column(self.tile, column).position())

        self._spread(self.config.columns, stage)

    def _stage_queries(self, dim: Expr, size: int) -> None:
        """Load dims ``dim .. dim + size`` of every row; past the last dim, zeros."""
        stride = self.config.query_stride(self.spec)

        def stage(index: Expr) -> None:
            row, place = let(T.truncdiv(index, size)), let(index % size)
            real = smaller(row, self.tile.num_rows - 1)
            put(
                self.queries,
                row * stride + place,
                self._padded(dim + place, lambda at: self.args.query(self.tile, real, at)),
            )

        self._spread(self.config.rows * size, stage)

    def _stage_keys(self, dim: Expr) -> None:
        size = self.chunk

        def stage(index: Expr) -> None:
            c, place = let(T.truncdiv(index, size)), let(index % size)
            position = let(self.columns_at[c]) if self.spec.rope else None
            slot = let(self.keys_at[c])
            put(
                self.stage,
                c * (size + 1) + place,
                self._padded(dim + place, lambda at: self.args.key(slot, at, position)),
            )

        self._spread(self.config.columns * size, stage)

    def _padded(self, dim: Expr, load: Callable[[Expr], Expr]) -> Expr:
        """Return ``load(dim)``, and 0 past the last dim of a key."""
        d = self.spec.d_qk
        if d % self.chunk == 0:
            return load(dim)
        return T.Select(dim < d, load(let(smaller(dim, i32(d - 1)))), f32(0.0))

    def _score(self) -> None:
        """``scores = queries . keys``, chunk of dims by chunk."""
        each, stride = self.config.columns_each, self.config.query_stride(self.spec)
        for i in range(self.config.rows_each * each):
            put(self.scores, i, f32(0.0))
        with loop(-(-self.spec.d_qk // self.chunk)) as step:
            dim = let(step * self.chunk)
            self._stage_keys(dim)
            if not self.config.holds_query:
                self._stage_queries(dim, self.chunk)
            barrier()
            base = dim if self.config.holds_query else 0
            with loop(self.chunk) as k:
                queries = [let(self.queries[self._row(i) * stride + base + k]) for i in self.rows]
                keys = [let(self.stage[self._column(j) * (self.chunk + 1) + k]) for j in self.cols]
                for i, query in enumerate(queries):
                    for j, key in enumerate(keys):
                        put(self.scores, i * each + j, fma(query, key, self.scores[i * each + j], 1))
            barrier()

    def _adjust(self) -> None:
        """Soft-cap and ALiBi."""
        each, args = self.config.columns_each, self.args
        for i in self.rows:
            for j in self.cols:
                score = self.scores[i * each + j]
                if "softcap" in self.spec.logits:
                    score = logits.cap(score, args.cap_limit, args.cap_inverse, 1)
                if "alibi" in self.spec.logits:
                    distance = T.cast(self.columns_at[self._column(j)], "float32") - self.positions[i]
                    score = logits.bias(score, self.slopes[i], distance, 1)
                put(self.scores, i * each + j, score)

    def _mask(self, first: Expr, count: Expr) -> None:
        """Put `MASKED` where a row does not see a column, or there is none."""
        config = self.config
        for j in self.cols:
            c = let(self._column(j))
            visible = None
            if self.spec.masks:
                column = let(first + smaller(c, count - 1))
                visible = tester(self.spec.mask, self.args.column(self.tile, column))
            for i in self.rows:
                sees = c < count
                if visible:
                    sees = all_of(sees, visible(functools.partial(self._bound, i), 1))
                at = i * config.columns_each + j
                put(self.seen, at, T.Select(sees, i32(1), i32(0)))
                put(self.scores, at, T.Select(sees, self.scores[at], f32(MASKED)))

    def _bound(self, i: int, k: int) -> Expr:
        return self.bounds[k * self.config.rows_each + i]

    def _exchange_maxima(self) -> None:
        """Write the thread's own maximum of each row."""
        each = self.config.columns_each
        for i in self.rows:
            highest = functools.reduce(greater, [self.scores[i * each + j] for j in self.cols], f32(MASKED))
            put(self.exchange, self._row(i) * self.config.column_threads + self.place, highest)

    def _revise_maxima(self) -> None:
        """Take the new running maximum of each row, an integer, and move the sums to it, exactly."""
        threads = self.config.column_threads
        for i in self.rows:
            put(self.factor, i, self.maximum[i])
            row = let(self._row(i) * threads)
            with loop(threads) as other:
                put(self.maximum, i, greater(self.maximum[i], self.exchange[row + other]))
            put(self.maximum, i, T.ceil(self.maximum[i]))
            put(self.factor, i, rescale(self.factor[i], self.maximum[i], 1))
            put(self.denominator, i, self.denominator[i] * self.factor[i])
            for j in range(self.dims):
                put(self.sums, i * self.dims + j, self.sums[i * self.dims + j] * self.factor[i])

    def _weigh(self) -> None:
        """Turn scores into weights, and add them to the thread's own denominators."""
        each, stride = self.config.columns_each, self.config.columns + 1
        for i in self.rows:
            for j in self.cols:
                at = i * each + j
                value, seen = let(weight(self.scores[at], self.maximum[i], 1)), let(self.seen[at] == 1)
                put(self.denominator, i, self.denominator[i] + T.Select(seen, value, f32(0.0)))
                put(self.weights, self._row(i) * stride + self._column(j), T.Select(seen, value, f32(UNSEEN)))

    def _accumulate(self, count: Expr, *, guarded: bool) -> None:
        """``sums += weights . values``; guarded, only what is seen is multiplied.

        Values come straight from their slots: neighbours read neighbouring dims, other rows' threads find them in the
        cache, and a value is multiplied no more often from shared memory.
        """
        dims = [let(smaller(self._dim(j), i32(self.spec.d_v - 1))) for j in range(self.dims)]
        with loop(count) as c:
            slot = let(self.values_at[c])
            weights = [let(self.weights[self._row(i) * (self.config.columns + 1) + c]) for i in self.rows]
            for j, dim in enumerate(dims):
                value = let(self.args.value(slot, dim))
                for i, of_row in enumerate(weights):
                    at = i * self.dims + j
                    new = fma(of_row, value, self.sums[at], 1)
                    put(self.sums, at, T.Select(of_row < f32(0.0), self.sums[at], new) if guarded else new)

    def _end(self) -> None:
        """Add up the denominators, and store the rows: finished, or as the partial state of a split tile."""
        threads = self.config.column_threads
        for i in self.rows:
            put(self.exchange, self._row(i) * threads + self.place, self.denominator[i])
        barrier()
        for i in self.rows:
            row = let(self._row(i) * threads)
            put(self.denominator, i, f32(0.0))
            with loop(threads) as other:
                put(self.denominator, i, self.denominator[i] + self.exchange[row + other])
        self.args.finish(self.tile, self._store_finished, self._store_partial)

    def _store_finished(self) -> None:
        for i in self.rows:
            row = let(self._row(i))
            with when(row < self.tile.num_rows):
                inverse = let(normaliser(self.denominator[i], 1))
                self._store_sums(i, self.args.out_at(self.tile, row), inverse)
                with when(self.place == 0):
                    self.args.store_lse(self.tile, row, self.maximum[i], self.denominator[i])

    def _store_sums(self, i: int, at: Expr, inverse: Expr) -> None:
        for j in range(self.dims):
            dim = let(self._dim(j))
            with when(dim < self.spec.d_v):
                self.args.out.store(at + wide(dim, self.args.index), self.sums[i * self.dims + j] * inverse)

    def _store_partial(self) -> None:
        """Store sums, maximum and denominator of each row."""
        d, index = self.spec.d_v, self.args.index
        for i in self.rows:
            row = let(wide(self.tile.kind * self.config.rows + self._row(i), index))
            at = let(row * wide(d + STATE_FIELDS, index))
            for j in range(self.dims):
                dim = let(self._dim(j))
                with when(dim < d):
                    put(self.args.partial, at + wide(dim, index), self.sums[i * self.dims + j])
            with when(self.place == 0):
                put(self.args.partial, at + wide(d, index), self.maximum[i])
                put(self.args.partial, at + wide(d + 1, index), self.denominator[i])
