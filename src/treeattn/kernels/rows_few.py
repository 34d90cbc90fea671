"""Row tile for one to eight rows of a kv head: decode and small trees, bound by bandwidth.

Keys and values are read straight from the pages, once, in the summation order of `rows_many`. Up to six rows: columns
are lanes of the scores (keys are transposed in registers and multiplied at once) and dims are lanes of the sums. Seven
and eight rows: rows are lanes of the scores. Values of the block are prefetched while scores are computed, keys of the
next block while sums are, both in address order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tvm
from tvm.script import tirx as T

from . import workspace
from .emit import (
    Buffer,
    Expr,
    broadcast,
    either,
    f32,
    greater,
    i32,
    i64,
    let,
    loop,
    part,
    prefetch,
    put,
    registers,
    smaller,
    span,
    when,
)
from .rows_many import LINE
from .softmax import BIAS, LOG2_E, MASKED, NOTHING, normaliser, rescale, weight
from .spec import KernelSpec, Sizes
from .vectors import (
    fma,
    horizontal_max,
    pieces,
    register_tile,
    shuffle,
    split,
    to_float,
    transpose4,
    transpose8,
    zero,
)
from .walk import Tile, Walk

ROWS_AS_LANES = 7
KEY_VECTORS = {1: 4, 2: 4, 3: 2, 4: 2}
"""Vectors of eight columns beside that many rows in the score tile; one for more."""
SUM_VECTORS = {1: 8, 2: 6, 3: 4, 4: 3, 5: 2, 6: 2}
"""Most vectors of dims beside that many rows in the sum tile: at most 12 accumulators."""


class FewRows:
    """Exactly ``rows`` rows, the last one repeated where the tile has fewer."""

    def __init__(self, rows: int, spec: KernelSpec, config: Sizes, args: Any) -> None:
        self.rows, self.spec, self.columns, self.args = rows, spec, config.few_columns, args
        self.rows_as_lanes = rows >= ROWS_AS_LANES
        self.key_vectors = 1 if self.rows_as_lanes else KEY_VECTORS.get(rows, 1)
        self.sum_groups = 1 if rows <= 6 else 2
        self.sum_rows = -(-rows // self.sum_groups)
        self.element = 4 if spec.kv_dtype == "float32" else 2
        self.lines = [-(-d * self.element // LINE) for d in (spec.d_qk, spec.d_v)]
        for name, (offset, size) in workspace.few_rows(rows, spec, config).items():
            setattr(self, name, part(args.workspace, size, args.base + offset))

    scores: Buffer
    queries: Buffer
    keys: Buffer
    sums: Buffer
    maximum: Buffer
    denominator: Buffer
    factor: Buffer

    def limit(self, tile: Tile) -> Expr:
        """Columns of a block."""
        return i32(self.columns)

    def begin(self, tile: Tile) -> None:
        """Scale the queries to base-2 units, ``[row][dim]`` or, rows as lanes, ``[dim][8]``, and start empty sums."""
        spec = self.spec
        scale = let(self.args.sm_scale * f32(LOG2_E))
        with loop(8 if self.rows_as_lanes else self.rows) as r:
            row = let(smaller(r, tile.num_rows - 1))
            address = self.args.q_address(tile, row)

            def query(dim: Expr, lanes: int) -> Expr:
                value = self.args.q[span(address + i64(dim), lanes)]
                return to_float(value, spec.q_dtype, lanes) * broadcast(scale, lanes)

            if self.rows_as_lanes:
                with loop(spec.d_qk) as dim:
                    put(self.queries, dim * 8 + r, query(dim, 1))
            else:
                for dim, lanes in pieces(spec.d_qk):
                    put(self.queries, span(r * spec.d_qk + dim, lanes), query(dim, lanes))
        with loop(self.sum_rows * self.sum_groups) as r:
            put(self.maximum, r, f32(NOTHING))
            put(self.denominator, r, f32(0.0))
            self.args.stage_bounds(tile, r, smaller(r, tile.num_rows - 1))
            for dim, lanes in pieces(spec.d_v):
                put(self.sums, span(r * spec.d_v + dim, lanes), zero(lanes))

    def block(self, tile: Tile, walk: Walk, parity: Expr) -> None:
        """Take one block of columns into the sums of every row."""
        base, count = let(parity * walk.capacity), let(walk.count[parity])
        following = let(walk.capacity - base)
        step = 8 * self.key_vectors
        with loop(T.truncdiv(count + step - 1, step)) as group:
            score = self._score_rows_as_lanes if self.rows_as_lanes else self._score
            score(walk, let(base + group * step), let(group * step))
        masks = self.spec.mask[0] != "full" and self.rows > 1  # a single row sees every column its tile visits
        partial = let(walk.partial[parity])
        if masks:
            with when(partial == 1):
                self._mask(tile, walk, base, count)
        self._weigh(count)
        fast = functools.partial(self._accumulate, walk, base, following, count)
        if masks:
            either(partial == 0, fast, lambda: fast(guarded=True))
        else:
            fast()

    def _score(self, walk: Walk, first: Expr, out: Expr) -> None:
        """``scores[row][column]``, columns as lanes: four dims of eight keys are transposed and multiplied at once."""
        d = self.spec.d_qk
        slots = [let(walk.key[first + i]) for i in range(8 * self.key_vectors)]
        strips = [slots[i : i + 8] for i in range(0, len(slots), 8)]
        tile = [(i, j, registers(8)) for i in range(self.rows) for j in range(self.key_vectors)]
        whole = span(0, 8)
        for _, _, accumulator in tile:
            put(accumulator, whole, zero(8))

        def multiply(dim: Expr, keys: list[Expr]) -> None:
            for i, j, accumulator in tile:
                query = broadcast(self.queries[i * d + dim], 8)
                put(accumulator, whole, fma(query, keys[j], accumulator[whole], 8))

        with loop(d // 4) as c:
            self._fetch_values(walk, first, c, d // 4)
            dims = zip(*(self._four_dims(strip, i64(c * 4)) for strip in strips), strict=True)
            for n, keys in enumerate(dims):
                multiply(c * 4 + n, list(keys))
        for dim in range(d // 4 * 4, d):
            multiply(i32(dim), [self._one_dim(strip, dim) for strip in strips])
        for i, j, accumulator in tile:
            put(self.scores, span(i * self.columns + out + j * 8, 8), accumulator[whole])

    def _score_rows_as_lanes(self, walk: Walk, first: Expr, out: Expr) -> None:
        """``scores[row][column]``, rows as lanes: a key's element is broadcast, the tile transposed when stored."""
        d = self.spec.d_qk
        slots = [let(walk.key[first + i]) for i in range(8)]
        straight = self.spec.kv_dtype == "float32"
        if not straight:
            for i, slot in enumerate(slots):
                for dim, lanes in pieces(d):
                    value = self.args.k.data[span(slot + i64(dim), lanes)]
                    put(self.keys, span(i * d + dim, lanes), to_float(value, self.spec.kv_dtype, lanes))
        accumulators = [registers(8) for _ in range(8)]
        whole = span(0, 8)
        for accumulator in accumulators:
            put(accumulator, whole, zero(8))

        def multiply(dim: Expr) -> None:
            for i, accumulator in enumerate(accumulators):
                key = self.args.k.data[slots[i] + i64(dim)] if straight else self.keys[i * d + dim]
                put(
                    accumulator,
                    whole,
                    fma(broadcast(key, 8), self.queries[span(dim * 8, 8)], accumulator[whole], 8),
                )

        with loop(d // 4) as c:
            self._fetch_values(walk, first, c, d // 4)
            for n in range(4):
                multiply(c * 4 + n)
        for dim in range(d // 4 * 4, d):
            multiply(i32(dim))
        for row, vector in enumerate(transpose8([accumulator[whole] for accumulator in accumulators])):
            put(self.scores, span(row * self.columns + out, 8), vector)

    def _mask(self, tile: Tile, walk: Walk, base: Expr, count: Expr) -> None:
        """Put `MASKED` where a row does not see a column."""
        with loop(T.truncdiv(count + 7, 8) * 8) as t:
            visible = walk.tester(tile, let(walk.column[base + t]))
            for row in range(self.rows):

                def bound(k: int, row: int = row) -> Expr:
                    return self.args.row_bounds[k * self.args.row_stride + row]

                sees = visible(bound, 1)
                at = row * self.columns + t
                put(self.scores, at, T.Select(sees, self.scores[at], f32(MASKED)))

    def _weigh(self, count: Expr) -> None:
        """Raise the maximum, turn scores into weights, and add them to the denominator, column after column."""
        whole = span(0, 8)
        strips = let(T.truncdiv(count + 7, 8))
        with loop(self.rows) as row:
            highest = registers(8)
            put(highest, whole, broadcast(self.maximum[row], 8))
            with loop(strips) as t:
                put(highest, whole, greater(highest[whole], self.scores[span(row * self.columns + t * 8, 8)]))
            put(highest, whole, T.ceil(horizontal_max(highest[whole])))
            put(self.factor, row, rescale(self.maximum[row], highest[0], 1))
            put(self.maximum, row, highest[0])
            put(highest, whole, highest[whole] - f32(BIAS, 8))
            with loop(strips) as t:
                at = span(row * self.columns + t * 8, 8)
                put(self.scores, at, weight(self.scores[at], highest[whole], 8))
        totals = registers(self.rows)
        for row in range(self.rows):
            put(totals, row, self.denominator[row] * self.factor[row])
        with loop(count) as t:
            for row in range(self.rows):
                put(totals, row, totals[row] + self.scores[row * self.columns + t])
        for row in range(self.rows):
            put(self.denominator, row, totals[row])

    def _accumulate(self, walk: Walk, base: Expr, following: Expr, count: Expr, *, guarded: bool = False) -> None:
        """``sums[row][dim] = sums * factor + weights . values``; guarded, a weight of zero multiplies nothing."""
        rows, d = self.sum_rows, self.spec.d_v
        passes = split(d // 8, 1 if guarded else SUM_VECTORS[rows]) if d >= 8 else []
        visits = sum(tiles for _, _, tiles in passes)

        def tile(first: Expr, dim: Expr, vectors: int, lanes: int, step: Callable[[Expr], None] | None) -> None:
            def at(i: int, j: int) -> Expr:
                return span((first + i) * d + dim + j * lanes, lanes)

            def weight_of(i: int, k: Expr) -> Expr:
                return self.scores[(first + i) * self.columns + k]

            def value(k: Expr, j: int) -> Expr:
                stored = self.args.v.data[span(walk.value[base + k] + i64(dim + j * lanes), lanes)]
                return to_float(stored, self.spec.kv_dtype, lanes)

            register_tile(
                rows, vectors, lanes, count,
                init=lambda i, j: self.sums[at(i, j)] * broadcast(self.factor[first + i], lanes),
                left=weight_of,
                right=value,
                done=lambda i, j, value: put(self.sums, at(i, j), value),
                step=step,
                keep=(lambda i, k, j: broadcast(weight_of(i, k) != f32(0.0), lanes)) if guarded else None,
            )  # fmt: skip

        with loop(self.sum_groups) as group:
            first, visit = let(group * rows), 0
            for begin, vectors, tiles in passes:
                with loop(tiles) as c:
                    fetch = None if guarded else self._key_fetcher(walk, following, group * visits + c + visit, visits)
                    tile(first, let((begin + c * vectors) * 8), vectors, 8, fetch)
                visit += tiles
            for offset, lanes in pieces(d % 8):
                tile(first, d // 8 * 8 + offset, 1, lanes, None)

    def end(self, tile: Tile) -> None:
        """Divide by the denominator and store rows and their LSE."""
        d = self.spec.d_v
        with loop(smaller(i32(self.rows), tile.num_rows)) as row:
            inverse = let(normaliser(self.denominator[row], 1))
            self.args.store_row(
                tile,
                row,
                lambda dim, lanes: self.sums[span(row * d + dim, lanes)] * broadcast(inverse, lanes),
            )
            self.args.store_lse(tile, row, self.maximum[row], self.denominator[row])

    def _one_dim(self, slots: list[Expr], dim: int) -> Expr:
        """One dim of eight keys, as float32."""
        keys = [to_float(self.args.k.data[slot + i64(dim)], self.spec.kv_dtype, 1) for slot in slots]
        return tvm.tirx.Shuffle(keys, [i32(i) for i in range(8)])

    def _four_dims(self, slots: list[Expr], dim: Expr) -> list[Expr]:
        """Four dims of eight keys, transposed in registers, as float32."""
        return transpose4([self._two_keys(slots[i] + dim, slots[i + 4] + dim) for i in range(4)])

    def _two_keys(self, left: Expr, right: Expr) -> Expr:
        """Four elements of two keys side by side, as float32."""
        keys, dtype = self.args.k.data, self.spec.kv_dtype
        if dtype == "float32":
            return shuffle([keys[span(left, 4)], keys[span(right, 4)]], range(8))
        pair = [T.reinterpret("float64", keys[span(at, 4)]) for at in (left, right)]  # one 64-bit load each
        joined = tvm.tirx.Shuffle(pair, [i32(0), i32(1)])
        return to_float(T.reinterpret("uint16x8" if dtype == "bfloat16" else "float16x8", joined), dtype)

    def _fetch_values(self, walk: Walk, first: Expr, step: Expr, steps: int) -> None:
        """Prefetch the values of the columns being scored, spread over the steps of the score tile."""
        columns, lines = 8 * self.key_vectors, self.lines[1]
        each = -(-columns * lines // max(1, steps))
        for i in range(each):
            n = step * each + i
            token = first + smaller(T.truncdiv(n, lines), columns - 1)
            prefetch(self.args.v.data, walk.value[token] + i64(T.truncmod(n, lines) * (LINE // self.element)))

    def _key_fetcher(self, walk: Walk, following: Expr, visit: Expr, visits: int) -> Callable[[Expr], None]:
        """Prefetch the keys of the next block, spread over the passes and steps of the first group's sums."""
        lines = self.lines[0]
        each = -(-lines // visits)
        useful = min(-(-lines // each), visits)

        def fetch(t: Expr) -> None:
            def ask() -> None:
                n = let((visit * self.columns + t) * each)
                token = following + smaller(T.truncdiv(n, lines), self.columns - 1)
                for i in range(each):
                    line = T.truncmod(n, lines) + i
                    prefetch(self.args.k.data, walk.key[token] + i64(line * (LINE // self.element)))

            if useful < visits * self.sum_groups:
                with when(visit < useful):
                    ask()
            else:
                ask()

        return fetch
