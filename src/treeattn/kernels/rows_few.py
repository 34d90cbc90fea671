"""Row tile for one to eight rows of a kv head: decode and small trees, bound by bandwidth.

Keys and values are read straight from the pages, once, in the summation order of `rows_many`. Lanes of a vector of
scores are eight columns, or two beside four rows. Dims are lanes of the sums.
Values of the block are prefetched while scores are computed, keys of the next block while weights and sums are, both
in address order and evenly: that alone is worth a tenth of the speed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from . import logits, workspace
from .arguments import Scratch
from .emit import (
    Buffer,
    Expr,
    broadcast,
    either,
    f32,
    fma,
    greater,
    i32,
    i64,
    let,
    loop,
    prefetch,
    put,
    registers,
    smaller,
    span,
    when,
)
from .rows_many import LINE
from .softmax import MASKED, normaliser, rescale, weight
from .spec import KernelSpec, Sizes
from .vectors import horizontal_max, interleave, pieces, register_tile, shuffle, split, to_float, transpose4, zero
from .walk import Block, Tile, Walk

LANE_ROWS = {7: 4, 8: 4}
"""Rows in the lanes of a vector of scores, beside two keys: that many rows would load a query for every product."""
SUM_VECTORS = {1: 8, 2: 6, 3: 4, 4: 3, 5: 2, 6: 2}
"""Most vectors of dims beside that many rows in the sum tile: at most 12 accumulators."""


@dataclass(frozen=True)
class Key:
    """A key in memory."""

    data: Buffer
    at: Expr
    dtype: str

    def load(self, dim: Expr, lanes: int) -> Expr:
        """Return dims from ``dim`` on, as float32."""
        return to_float(self.data[span(self.at + i64(dim), lanes)], self.dtype, lanes)


def two_keys(left: Key, right: Key, dim: Expr) -> Expr:
    """Four dims of two keys side by side, as float32."""
    pair = [key.data[span(key.at + i64(dim), 4)] for key in (left, right)]
    if left.dtype == "float32":
        return shuffle(pair, range(8))
    joined = shuffle([T.reinterpret("float64", half) for half in pair], range(2))  # one 64-bit load each
    return to_float(T.reinterpret("float16x8", joined), left.dtype)


LoadDims = Callable[[list[Key], Expr], list[Expr]]
"""Vectors of consecutive dims, from a dim on, of the keys whose elements are their lanes."""


class FewRows(Scratch):
    """Exactly ``rows`` rows, the last one repeated where the tile has fewer."""

    factor: Buffer
    columns_at: Buffer

    def __init__(self, rows: int, spec: KernelSpec, config: Sizes, args: Any) -> None:
        self.rows, self.spec, self.columns, self.args = rows, spec, config.few_columns, args
        self.key_dtype = spec.kv_dtype if spec.rope is None else "float32"
        self.lane_rows = 1 if self.key_dtype == "bfloat16" else LANE_ROWS.get(rows, 1)
        self.groups = -(-rows // self.lane_rows)
        self.dims = 8 if self.key_dtype == "bfloat16" else 4  # and keys, at a time: a step's loads stay in registers
        self.keys_each = {1: 128 // self.dims, 2: 16}.get(rows, 8)
        self.sum_groups = 1 if rows <= 6 else 2
        self.sum_rows = -(-rows // self.sum_groups)
        self.element = 4 if spec.kv_dtype == "float32" else 2
        self.lines = [-(-d * self.element // LINE) for d in (spec.d_qk, spec.d_v)]
        self.passes = split(spec.d_v // 8, SUM_VECTORS[self.sum_rows]) if spec.d_v >= 8 else []
        self.visits = self.sum_groups * sum(tiles for _, _, tiles in self.passes)
        self.key_lines = max(1, self.lines[0] // max(1, self.visits))  # of a key, fetched a step of the sums: evenly,
        self.early_lines = max(0, self.lines[0] - self.visits * self.key_lines)  # the rest beside the weights
        super().__init__(args, workspace.few_rows(spec, config))

    def limit(self, tile: Tile) -> Expr:
        """Columns of a block."""
        return i32(self.columns)

    def begin(self, tile: Tile) -> None:
        """Scale the queries to base-2 units, ``[group][dim][row]``, and start empty sums."""
        d, d_v, each = self.spec.d_qk, self.spec.d_v, self.lane_rows
        with loop(self.groups * each) as r:
            self.args.load_query(tile, let(smaller(r, tile.num_rows - 1)), self.keys, 0)
            at = let(T.truncdiv(r, each) * (d * each) + T.truncmod(r, each))
            with loop(d) as dim:
                put(self.queries, at + dim * each, self.keys[dim])
        with loop(self.sum_rows * self.sum_groups) as r:
            self.args.start_row(self, tile, r, let(smaller(r, tile.num_rows - 1)))
            for dim, lanes in pieces(d_v):
                put(self.sums, span(r * d_v + dim, lanes), zero(lanes))

    def block(self, walk: Walk, block: Block) -> None:
        """Take one block of columns into the sums of every row."""
        step = self.keys_each
        with loop(T.truncdiv(block.count + step - 1, step)) as group:
            self._score(walk, block.tile, let(block.base + group * step), let(group * step))
        masks = self.spec.masks and self.rows > 1  # a single row sees every column its tile visits
        if self.spec.adjusts:
            self._adjust(walk, block)
        if masks:
            with when(block.partial == 1):
                self._mask(walk, block)
        self._weigh(walk, block)
        fast = functools.partial(self._accumulate, walk, block)
        if masks:
            either(block.partial == 0, fast, lambda: fast(guarded=True))
        else:
            fast()

    def _score(self, walk: Walk, tile: Tile, first: Expr, out: Expr) -> None:
        """``scores[row][column]``: a vector of keys is done before the next is loaded, or registers would not do."""
        whole, groups = span(0, 8), range(self.groups)
        shared = self._shared(self._keys(walk, tile, first, self.keys_each))
        accumulators = [[registers(8) for _ in shared] for _ in groups]
        for accumulator in itertools.chain(*accumulators):
            put(accumulator, whole, zero(8))
        for dim, load in self._dims(functools.partial(self._fetch_values, walk, first)):
            for i, keys in enumerate(shared):
                for n, vector in enumerate(load(keys, dim)):
                    key = let(vector)
                    for group in groups:
                        accumulator = accumulators[group][i]
                        put(accumulator, whole, fma(self._query(group, dim + n), key, accumulator[whole], 8))
        for group in groups:
            self._store_scores(group * self.lane_rows, [scores[whole] for scores in accumulators[group]], out)

    def _query(self, group: int, dim: Expr) -> Expr:
        """One dim of the queries of a group of rows, as the lanes of scores are."""
        each = self.lane_rows
        rows = self.queries[span((group * self.spec.d_qk + dim) * each, each)]
        return broadcast(rows, 8) if each == 1 else shuffle([rows, rows], range(8))

    def _shared(self, keys: list[Key]) -> list[list[Key]]:
        """Return the keys of each vector of scores; two that share one are four apart, as `transpose4` wants them."""
        strips = [keys[i : i + 8] for i in range(0, len(keys), 8)]
        return strips if self.lane_rows == 1 else [strip[i::4] for strip in strips for i in range(4)]

    def _store_scores(self, first: int, vectors: list[Expr], out: Expr) -> None:
        """Store vectors as columns of the rows from ``first`` on."""
        each = self.lane_rows
        for strip in range(len(vectors) // each):
            part = vectors[strip * each : strip * each + each]
            rows = part if each == 1 else transpose4(part)
            for row, vector in enumerate(rows[: self.rows - first]):
                put(self.scores, span((first + row) * self.columns + out + strip * 8, 8), vector)

    def _keys(self, walk: Walk, tile: Tile, first: Expr, count: int) -> list[Key]:
        """Return ``count`` keys, where they lie or, to be rotated, as float32 in scratch."""
        if self.spec.rope is None:
            slots = [let(walk.key[first + i]) for i in range(count)]
            return [Key(self.args.k.data, slot, self.key_dtype) for slot in slots]
        d = self.spec.d_qk
        with loop(count) as i:
            self.args.load_key(walk, tile, first + i, self.keys, i * d)
        return [Key(self.keys, i64(i * d), "float32") for i in range(count)]

    def _adjust(self, walk: Walk, block: Block) -> None:
        """Soft-cap and ALiBi, columns as lanes."""
        strips = let(T.truncdiv(block.count + 7, 8))
        if "alibi" in self.spec.logits:
            with loop(strips * 8) as t:
                put(self.columns_at, t, T.cast(walk.position(block.tile, block.base + t), "float32"))
        with loop(self.rows) as row, loop(strips) as t:
            at = span(row * self.columns + t * 8, 8)
            score = self.scores[at]
            if "softcap" in self.spec.logits:
                score = logits.cap(score, self.args.cap_limit, self.args.cap_inverse, 8)
            if "alibi" in self.spec.logits:
                distance = self.columns_at[span(t * 8, 8)] - broadcast(self.positions[row], 8)
                score = logits.bias(score, broadcast(self.slopes[row], 8), distance, 8)
            put(self.scores, at, score)

    def _mask(self, walk: Walk, block: Block) -> None:
        """Put `MASKED` where a row does not see a column."""
        with loop(T.truncdiv(block.count + 7, 8) * 8) as t:
            visible = walk.tester(block.tile, let(walk.column[block.base + t]))
            for row in range(self.rows):
                at = row * self.columns + t
                sees = visible(functools.partial(self.args.row_bounds_of, i32(row)), 1)
                seen = let(T.Select(sees, i32(1), i32(0)))
                put(self.scores, at, T.Select(seen == 1, self.scores[at], f32(MASKED)))
                put(self.seen, at, T.cast(seen, "float32"))

    def _weigh(self, walk: Walk, block: Block) -> None:
        """Raise the maximum, turn scores into weights, and add them to the denominator, column after column."""
        whole, count = span(0, 8), block.count
        strips = let(T.truncdiv(count + 7, 8))
        with loop(self.rows) as row:
            highest = registers(8)
            put(highest, whole, broadcast(self.maximum[row], 8))
            with loop(strips) as t:
                put(highest, whole, greater(highest[whole], self.scores[span(row * self.columns + t * 8, 8)]))
            put(highest, whole, T.ceil(horizontal_max(highest[whole])))
            put(self.factor, row, rescale(self.maximum[row], highest[0], 1))
            put(self.maximum, row, highest[0])
            with loop(strips) as t:
                at = span(row * self.columns + t * 8, 8)
                put(self.scores, at, weight(self.scores[at], highest[whole], 8))
        totals = registers(self.rows)
        for row in range(self.rows):
            put(totals, row, self.denominator[row] * self.factor[row])
        with loop(count) as t:
            self._fetch_keys(walk, block, t * self.early_lines, self.early_lines)
            for row in range(self.rows):
                put(totals, row, totals[row] + self.scores[row * self.columns + t])
        for row in range(self.rows):
            put(self.denominator, row, totals[row])

    def _accumulate(self, walk: Walk, block: Block, *, guarded: bool = False) -> None:
        """``sums[row][dim] = sums * factor + weights . values``; guarded, only what is seen is multiplied."""
        rows, d = self.sum_rows, self.spec.d_v
        passes = split(d // 8, 1) if guarded and self.passes else self.passes
        visits = self.visits // self.sum_groups

        def tile(first: Expr, dim: Expr, vectors: int, lanes: int, step: Callable[[Expr], None] | None) -> None:
            def at(i: int, j: int) -> Expr:
                return span((first + i) * d + dim + j * lanes, lanes)

            def weight_of(i: int, k: Expr) -> Expr:
                return self.scores[(first + i) * self.columns + k]

            def seen(i: int, k: Expr, j: int) -> Expr:
                return broadcast(self.seen[(first + i) * self.columns + k] != f32(0.0), lanes)

            def value(k: Expr, j: int) -> Expr:
                stored = self.args.v.data[span(walk.value[block.base + k] + i64(dim + j * lanes), lanes)]
                return to_float(stored, self.spec.kv_dtype, lanes)

            register_tile(
                rows, vectors, lanes, block.count,
                init=lambda i, j: self.sums[at(i, j)] * broadcast(self.factor[first + i], lanes),
                left=weight_of,
                right=value,
                done=lambda i, j, value: put(self.sums, at(i, j), value),
                step=step,
                keep=seen if guarded else None,
            )  # fmt: skip

        with loop(self.sum_groups) as group:
            first, visit = let(group * rows), 0
            for begin, vectors, tiles in passes:
                with loop(tiles) as c:
                    fetch = None if guarded else self._key_fetcher(walk, block, group * visits + c + visit)
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
                tile, row, lambda dim, lanes: self.sums[span(row * d + dim, lanes)] * broadcast(inverse, lanes)
            )
            self.args.store_lse(tile, row, self.maximum[row], self.denominator[row])

    def _dims(self, prefetch: Callable[[Expr, int], None]) -> Iterator[tuple[Expr, LoadDims]]:
        """Emit a loop over several dims at once, and the dims that are left: ``(dim, load(keys, dim))`` of either."""
        steps = self.spec.d_qk // self.dims
        with loop(steps) as c:
            prefetch(c, steps)
            yield c * self.dims, self._eight_dims if self.dims == 8 else self._four_dims
        for dim in range(steps * self.dims, self.spec.d_qk):
            yield i32(dim), self._one_dim

    def _one_dim(self, keys: list[Key], dim: Expr) -> list[Expr]:
        """One dim of the keys of a vector, as float32."""
        return [shuffle([key.load(dim, 1) for key in keys for _ in range(8 // len(keys))], range(8))]

    def _four_dims(self, keys: list[Key], dim: Expr) -> list[Expr]:
        """Four dims of the keys of a vector, as float32."""
        if len(keys) == 8:
            return transpose4([two_keys(keys[i], keys[i + 4], dim) for i in range(4)])
        pair = let(two_keys(keys[0], keys[1], dim))
        return [shuffle([pair], [n] * 4 + [n + 4] * 4) for n in range(4)]

    def _eight_dims(self, keys: list[Key], dim: Expr) -> list[Expr]:
        """Eight dims of eight bfloat16 keys, as float32: transposed as they lie, then their bits put above zeros."""
        stored = [key.data[span(key.at + i64(dim), 8)] for key in keys]
        a, b, c, d = (let(shuffle(stored[i::4], range(16))) for i in range(4))
        two = zip(interleave(a, c), interleave(b, d), strict=True)
        four = [vector for pair in two for vector in interleave(*pair)]
        zeros = T.Broadcast(T.uint16(0), 16)
        return [T.reinterpret("float32x8", bits) for keys in four for bits in interleave(zeros, keys)]

    def _fetch_values(self, walk: Walk, first: Expr, step: Expr, steps: int) -> None:
        """Prefetch the values of the columns being scored, spread over the steps of the score tile."""
        columns, lines = self.keys_each, self.lines[1]
        each = -(-columns * lines // max(1, steps))
        self._fetch(self.args.v.data, walk.value, first, (columns, lines), step * each, each)

    def _key_fetcher(self, walk: Walk, block: Block, visit: Expr) -> Callable[[Expr], None]:
        """Prefetch the keys of the next block, spread over the passes and steps of the sums."""
        each, early = self.key_lines, self.early_lines * self.columns
        useful = (self.lines[0] - self.early_lines) // each

        def fetch(t: Expr) -> None:
            with when(visit < useful) if useful < self.visits else contextlib.nullcontext():
                self._fetch_keys(walk, block, early + (visit * self.columns + t) * each, each)

        return fetch

    def _fetch_keys(self, walk: Walk, block: Block, first: Expr, count: int) -> None:
        """Prefetch lines ``first .. first + count`` of the keys of the next block."""
        self._fetch(self.args.k.data, walk.key, block.following, (self.columns, self.lines[0]), first, count)

    def _fetch(self, data: Buffer, slots: Buffer, begin: Expr, size: tuple[int, int], first: Expr, count: int) -> None:
        """Prefetch lines ``first .. first + count`` of ``size`` (columns, lines of each) vectors from ``begin`` on."""
        columns, lines = size
        for n in (first + i for i in range(count)):
            token = begin + smaller(T.truncdiv(n, lines), columns - 1)
            prefetch(data, slots[token] + i64(T.truncmod(n, lines) * (LINE // self.element)))
