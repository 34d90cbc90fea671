"""Attention of a row tile on tensor cores: ``mma.m16n8k16`` of float16 or bfloat16, from sm_80 on.

A warp has 16 rows for good. Queries, scores, weights and sums are fragments in its registers, so softmax needs nothing
but two shuffles a row. Keys and values come by asynchronous copies into one of two stages while the other is at work;
one barrier a block of columns separates them. The addresses of a block are looked up one block ahead of its copies.

Rows, walk, masks and partial states are those of `treeattn.kernels.gpu.attention`; so are the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from .. import logits
from ..emit import (
    Buffer,
    Expr,
    PrimFunc,
    all_of,
    any_of,
    barrier,
    either,
    f32,
    i32,
    let,
    loop,
    part,
    private,
    put,
    shared,
    smaller,
    unrolled,
    when,
    while_,
    wide,
)
from ..predicates import tester
from ..softmax import LOG2_E, MASKED, normaliser, rescale
from ..spec import KernelSpec
from ..walk import Tile
from . import ptx
from .arguments import STATE_FIELDS, TileArguments, tile_kernel
from .elements import widened
from .pipeline import COUNT, FIRST, FULL, Cursor, Stages
from .ptx import CHUNK, QUAD, WARP

WARP_ROWS = 16
ROWS = range(2)  # of a lane: `WARP_ROWS // 2` apart
EXPONENT = {"float16": 0x7C00, "bfloat16": 0x7F80}
"""Exponent bits: all set in an infinity and a NaN, and nowhere else."""


def attention(spec: KernelSpec, config: Any, traits: Any) -> PrimFunc:
    """Build the kernel of a spec for a tile configuration (`treeattn.schedules.gpu.MmaTile`) and a target."""
    return tile_kernel(RowTile, spec, config, traits)


class RowTile:
    """One thread's part of a row tile."""

    def __init__(self, spec: KernelSpec, config: Any, args: TileArguments, tile: Tile, thread: Expr) -> None:
        self.spec, self.config, self.args, self.tile, self.thread = spec, config, args, tile, thread
        self.warp, self.lane = let(T.truncdiv(thread, WARP)), let(thread % WARP)
        self.row_warp = let(T.truncdiv(self.warp, config.column_warps))
        self.column_warp = let(self.warp % config.column_warps)
        self.own = config.own_columns
        self.mine, self.place = let(T.truncdiv(self.lane, QUAD)), let(self.lane % QUAD)
        self.has_rows = let(self.row_warp * WARP_ROWS < tile.num_rows)
        self.stages = Stages(spec, config)
        self.keys_at, self.values_at = (shared(2 * config.columns, args.index) for _ in range(2))
        self.query = private(config.query_words(spec), "uint32")
        self.loaded = private(4, "uint32")
        self.weights = private(self.own // 4, "uint32")
        self.scores = private(self.own // 2)
        self.sums = private(spec.d_v // 2)
        self.maximum, self.denominator, self.factor = (private(len(ROWS)) for _ in range(3))
        self.slopes, self.positions = (private(len(ROWS)) for _ in range(2))
        self.bounds = private(max(spec.num_bounds, 1) * len(ROWS), "int32")
        self.blocks = private(9, "int32")  # at work, next, after next
        self.parity = private(1, "int32")

    def run(self) -> None:
        """Visit every block of columns, and store the rows."""
        self._begin()
        cursor = Cursor(self.args, self.tile, self.config.columns)
        self._fill_pipeline(cursor)
        with while_(self.blocks[COUNT] > 0):
            parity, other = let(self.parity[0]), let(1 - self.parity[0])
            ptx.wait(0)
            barrier()
            self._copy_columns(3, other)
            cursor.take(self.blocks, 6)
            self._find_columns(6, parity)
            self._block(parity)
            for i in range(6):
                put(self.blocks, i, self.blocks[3 + i])
            put(self.parity, 0, other)
        self._end()

    # --- before the first block ---------------------------------------------------------------------------------------

    def _row(self, i: int) -> Expr:
        return self.row_warp * WARP_ROWS + self.mine + i * (WARP_ROWS // 2)

    def _begin(self) -> None:
        """Start empty sums, and load what the rows' logits and masks need; rows past the last repeat it."""
        tile = self.tile
        for i in ROWS:
            row = let(smaller(self._row(i), tile.num_rows - 1))
            firsts = [self.place == 0, self.column_warp == 0]
            self.args.start_row(self, tile, row, place=i, places=len(ROWS), counts_sink=firsts)
        with unrolled(self.spec.d_v // 2) as j:
            put(self.sums, j, f32(0.0))

    def _fill_pipeline(self, cursor: Cursor) -> None:
        """Copy the queries and the first block, and find the second."""
        put(self.parity, 0, i32(0))
        for ahead in range(2):
            cursor.take(self.blocks, 3 * ahead)
            self._find_columns(3 * ahead, i32(ahead))
        self._copy_queries()
        barrier()
        self._copy_columns(0, i32(0))
        ptx.wait(1)
        barrier()
        if self.config.keeps_query(self.spec):
            with when(self.has_rows), unrolled(self.spec.d_qk // 16) as k:
                self._load_query(k, k * 4)

    def _load_query(self, k: Expr, at: Expr) -> None:
        row = self.stages.query(self.row_warp * WARP_ROWS + self.lane % 16)
        ptx.load_fragments(self.query, at, self.stages.data, row + k * 16 + T.truncdiv(self.lane, 16) * CHUNK)

    # --- copies into shared memory ------------------------------------------------------------------------------------

    def _find_columns(self, block: int, parity: Expr) -> None:
        """Look up where keys and values of a block lie; columns past the last repeat it."""
        first, count = let(self.blocks[block + FIRST]), let(self.blocks[block + COUNT])
        with when(all_of(self.thread < self.config.columns, count > 0)):
            column = let(first + smaller(self.thread, count - 1))
            at = let(parity * self.config.columns + self.thread)
            key, value = self.args.slots(self.tile, column)
            put(self.keys_at, at, key)
            put(self.values_at, at, value)

    def _copy_columns(self, block: int, parity: Expr) -> None:
        """Copy keys and values of a block, zeros past the last column, as one group."""
        count = let(self.blocks[block + COUNT])
        pools = (
            ("k", self.spec.d_qk, self.keys_at, self.stages.key),
            ("v", self.spec.d_v, self.values_at, self.stages.value),
        )
        with when(count > 0):
            for name, size, places, target in pools:

                def begin(c: Expr, places: Buffer = places) -> tuple[Expr, Expr]:
                    return places[parity * self.config.columns + c], c < count

                def to(c: Expr, target: Callable[[Expr, Expr], Expr] = target) -> Expr:
                    return target(parity, c)

                self._copy_rows(name, self.config.columns, size, begin, to)
        ptx.commit()

    def _copy_queries(self) -> None:
        """Copy the tile's queries, zeros past the last row, as one group."""

        def begin(row: Expr) -> tuple[Expr, Expr]:
            real = let(smaller(row, self.tile.num_rows - 1))
            return self.args.row_at("q", self.tile.token(real), self.tile.q_head(real)), row < self.tile.num_rows

        self._copy_rows("q", self.config.rows, self.spec.d_qk, begin, self.stages.query)
        ptx.commit()

    def _copy_rows(
        self,
        name: str,
        rows: int,
        size: int,
        begin: Callable[[Expr], tuple[Expr, Expr]],
        target: Callable[[Expr], Expr],
    ) -> None:
        """Copy ``rows`` vectors of ``size`` elements of an argument, dealt to the threads in chunks.

        ``begin(row)`` is where one begins and whether it is real. Vectors that do not lie at multiples of 16 bytes are
        copied element by element.
        """
        source, chunks = self.args.values[name], size // CHUNK

        def each(copy: Callable[[Expr, Expr, Expr], None], steps: Callable[[int], Any]) -> None:
            with steps(-(-rows * chunks // self.config.threads)) as step:
                index = let(self.thread + step * self.config.threads)
                row, chunk = let(T.truncdiv(index, chunks)), let(index % chunks * CHUNK)
                with when(index < rows * chunks):
                    at, real = begin(row)
                    copy(let(target(row) + chunk), let(at + wide(chunk, self.args.index)), real)

        def by_element(at: Expr, element: Expr, real: Expr) -> None:
            with loop(CHUNK) as i:
                value = let(source[let(element + wide(i, self.args.index))])
                put(self.stages.data, at + i, T.Select(real, T.reinterpret("uint16", value), T.uint16(0)))

        def at_once(at: Expr, element: Expr, real: Expr) -> None:
            ptx.copy_async(self.stages.data, at, source, element, real)

        aligned = self.args.is_aligned(name, CHUNK)
        either(aligned, lambda: each(at_once, unrolled), lambda: each(by_element, loop))

    # --- a block of columns -------------------------------------------------------------------------------------------

    def _block(self, parity: Expr) -> None:
        """Take the block at work into the sums of every row."""
        first, count = let(self.blocks[FIRST]), let(self.blocks[COUNT])
        partial = let(any_of(self.blocks[FULL] != 1, count != self.config.columns))
        dirty = private(1, "int32")
        put(dirty, 0, i32(0))
        if self.spec.masks:
            with when(self.blocks[FULL] != 1):
                put(dirty, 0, self._find_special(parity))
        with when(self.has_rows):
            self._score(parity)
            self._adjust(first, count)
            with when(partial):
                self._mask(first, count)
            self._revise_maxima()
            self._weigh()
        if self.spec.masks:
            with when(dirty[0] != 0):
                self._take_special(parity, first, count)
        with when(self.has_rows):
            self._accumulate(parity)

    def _score(self, parity: Expr) -> None:
        """``scores = queries . keys``."""
        column = self.column_warp * self.own + self.lane % 8 + T.truncdiv(self.lane, 16) * 8
        key = let(self.stages.key(parity, column) + self.lane % 16 // 8 * CHUNK)
        with unrolled(self.own // 2) as j:
            put(self.scores, j, f32(0.0))
        with unrolled(self.spec.d_qk // 16) as k:
            query = k * 4
            if not self.config.keeps_query(self.spec):
                self._load_query(k, 0)
                query = 0
            with unrolled(self.own // 16) as j:
                ptx.load_fragments(self.loaded, 0, self.stages.data, key + j * (16 * self.stages.key_row) + k * 16)
                for half in range(2):
                    self._multiply(self.scores, (j * 2 + half) * 4, self.query, query, half)

    def _multiply(self, sums: Buffer, at: Expr, left: Buffer, row: Expr, half: int) -> None:
        """Add the product of fragment ``left[row:]`` and half of what was loaded last."""
        ptx.multiply(self.spec.kv_dtype, sums, at, left, row, self.loaded, half * 2)

    def _each_score(self, body: Callable[[Expr, int], None]) -> None:
        """Run ``body(at, i)`` for every score of the lane and its row."""
        with unrolled(self.own // 8) as j:
            for i in ROWS:
                for e in range(2):
                    body(j * 4 + i * 2 + e, i)

    def _column(self, j: Expr, e: int) -> Expr:
        return self.column_warp * self.own + j * 8 + self.place * 2 + e

    def _dim(self, j: Expr, e: int) -> Expr:
        return j * 8 + self.place * 2 + e

    def _adjust(self, first: Expr, count: Expr) -> None:
        """Scale to base-2 units, then soft-cap and ALiBi."""
        args, scale, parts = self.args, let(self.args.sm_scale * f32(LOG2_E)), self.spec.logits
        with unrolled(self.own // 8) as j:
            for e in range(2):
                if "alibi" in parts:
                    column = args.column(self.tile, let(first + smaller(self._column(j, e), count - 1)))
                    position = let(T.cast(column.position(), "float32"))
                for i in ROWS:
                    at = j * 4 + i * 2 + e
                    score = self.scores[at] * scale
                    if "softcap" in parts:
                        score = logits.cap(let(score), args.cap_limit, args.cap_inverse, 1)
                    if "alibi" in parts:
                        score = logits.bias(score, self.slopes[i], position - self.positions[i], 1)
                    put(self.scores, at, score)

    def _sees(self, first: Expr, count: Expr, c: Expr) -> Callable[[int], Expr]:
        """Return the test whether row ``i`` sees column ``c`` of the block."""
        there = c < count
        if not self.spec.masks:
            return lambda i: there
        visible = tester(self.spec.mask, self.args.column(self.tile, let(first + smaller(c, count - 1))))
        return lambda i: all_of(there, visible(lambda k: self.bounds[k * len(ROWS) + i], 1))

    def _mask(self, first: Expr, count: Expr) -> None:
        """Put `MASKED` where a row does not see a column, or there is none."""
        with unrolled(self.own // 8) as j:
            for e in range(2):
                sees = self._sees(first, count, let(self._column(j, e)))
                for i in ROWS:
                    at = j * 4 + i * 2 + e
                    put(self.scores, at, T.Select(sees(i), self.scores[at], f32(MASKED)))

    def _revise_maxima(self) -> None:
        """Take the new running maximum of each row, an integer, and move the sums to it, exactly."""
        for i in ROWS:
            put(self.factor, i, self.maximum[i])
        self._each_score(lambda at, i: put(self.maximum, i, T.max(self.maximum[i], self.scores[at])))
        for i in ROWS:
            put(self.maximum, i, T.ceil(ptx.over_row(self.maximum[i], T.max, let)))
            self._move_sums(i)

    def _move_sums(self, i: int) -> None:
        """Rescale sums and denominator of a row from its last maximum, in ``factor``, to the present one."""
        put(self.factor, i, rescale(self.factor[i], self.maximum[i], 1))
        put(self.denominator, i, self.denominator[i] * self.factor[i])
        with unrolled(self.spec.d_v // 8) as j:
            for e in range(2):
                put(self.sums, j * 4 + i * 2 + e, self.sums[j * 4 + i * 2 + e] * self.factor[i])

    def _weigh(self) -> None:
        """Turn scores into weights, add them to the lane's own denominators, and pack them as fragments."""

        def weigh(at: Expr, i: int) -> None:
            ptx.power(self.scores, at, self.scores[at] - self.maximum[i])
            put(self.denominator, i, self.denominator[i] + self.scores[at])

        self._each_score(weigh)
        with unrolled(self.own // 4) as w:
            ptx.pack(self.spec.kv_dtype, self.weights, w, self.scores[w * 2], self.scores[w * 2 + 1])

    def _accumulate(self, parity: Expr) -> None:
        """``sums += weights . values``."""
        value = let(
            self.stages.value(parity, self.column_warp * self.own + self.lane % 16) + T.truncdiv(self.lane, 16) * CHUNK
        )
        with unrolled(self.own // 16) as k, unrolled(self.spec.d_v // 16) as j:
            at = value + k * (16 * self.stages.value_row) + j * 16
            ptx.load_fragments(self.loaded, 0, self.stages.data, at, transposed=True)
            for half in range(2):
                ptx.multiply(
                    self.spec.kv_dtype, self.sums, (j * 2 + half) * 4, self.weights, k * 4, self.loaded, half * 2
                )

    # --- infinities and NaN among values that not all rows see --------------------------------------------------------

    def _find_special(self, parity: Expr) -> Expr:
        """Return, in all threads alike, whether a value of the block is infinite or NaN."""
        found, exponent = private(1, "uint32"), EXPONENT[self.spec.kv_dtype]
        both, carry = exponent * 0x10001, (0x8000 - exponent) * 0x10001
        put(found, 0, T.uint32(0))

        def look(c: Expr, word: Expr) -> None:
            bits = let(self.stages.words[T.truncdiv(self.stages.value(parity, c), 2) + word])
            carried = T.bitwise_and(bits, T.uint32(both)) + T.uint32(carry)
            put(found, 0, T.bitwise_or(found[0], T.bitwise_and(carried, T.uint32(0x80008000))))

        self._each_of_values(self.spec.d_v // 2, look)
        return T.cast(ptx.any_thread(T.cast(found[0] != T.uint32(0), "int32")), "int32")

    def _take_special(self, parity: Expr, first: Expr, count: Expr) -> None:
        """Add infinite and NaN values to rows that see them, and put 0 in their places: 0 times them would be NaN."""
        begin = let(self.column_warp * self.own)
        with when(self.has_rows), loop(begin, smaller(count, begin + self.own)) as c:
            sees = self._sees(first, count, c)
            seen = [let(T.cast(sees(i), "int32")) for i in ROWS]
            at = let(self.stages.value(parity, c))
            with unrolled(self.spec.d_v // 8) as j:
                for e in range(2):
                    bits = let(self.stages.data[at + self._dim(j, e)])
                    for i in ROWS:
                        place = j * 4 + i * 2 + e
                        taken = all_of(seen[i] == 1, self._is_special(bits))
                        value = widened(T.cast(bits, "uint32"), self.spec.kv_dtype)
                        put(self.sums, place, T.Select(taken, self.sums[place] + value, self.sums[place]))
        barrier()

        def clear(c: Expr, element: Expr) -> None:
            at = let(self.stages.value(parity, c) + element)
            bits = let(self.stages.data[at])
            put(self.stages.data, at, T.Select(self._is_special(bits), T.uint16(0), bits))

        self._each_of_values(self.spec.d_v, clear)
        barrier()

    def _is_special(self, bits: Expr) -> Expr:
        exponent = T.uint16(EXPONENT[self.spec.kv_dtype])
        return T.bitwise_and(bits, exponent) == exponent

    def _each_of_values(self, size: int, body: Callable[[Expr, Expr], None]) -> None:
        """Run ``body(column, index)`` for ``size`` parts of each value of a block, dealt to the threads."""
        with loop(-(-self.config.columns * size // self.config.threads)) as step:
            index = let(self.thread + step * self.config.threads)
            with when(index < self.config.columns * size):
                body(let(T.truncdiv(index, size)), let(index % size))

    # --- after the last block -----------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Add up the denominators, and store the rows: finished, or as the partial state of a split tile."""
        for i in ROWS:
            put(self.denominator, i, ptx.over_row(self.denominator[i], lambda a, b: a + b, let))
        if self.config.column_warps > 1:
            self._merge_warps()
        with when(all_of(self.has_rows, self.column_warp == 0)):
            self.args.finish(self.tile, self._store_finished, self._store_partial)

    def _merge_warps(self) -> None:
        """Bring the states of the warps that share rows together in the first of them, exactly and in order."""
        warps, states = self.config.column_warps, part(self.stages.data, self.stages.size // 2, 0, "float32")
        peaks = shared(self.config.warps * WARP_ROWS)

        def row_of(other: Expr, i: int) -> Expr:
            warp = self.row_warp * warps + other
            return warp * WARP_ROWS + self.mine + i * (WARP_ROWS // 2)

        for i in ROWS:
            with when(self.place == 0):
                put(peaks, row_of(self.column_warp, i), self.maximum[i])
        barrier()
        for i in ROWS:
            put(self.factor, i, self.maximum[i])
            for other in range(warps):
                put(self.maximum, i, T.max(self.maximum[i], peaks[row_of(other, i)]))
            self._move_sums(i)
            at = let(row_of(self.column_warp, i) * (self.spec.d_v + 1))
            with when(self.column_warp > 0):

                def store(dim: Expr, value: Expr, at: Expr = at) -> None:
                    put(states, at + dim, value)

                self._each_sum(i, store)
                with when(self.place == 0):
                    put(states, at + self.spec.d_v, self.denominator[i])
        barrier()
        with when(self.column_warp == 0):
            for other in range(1, warps):
                for i in ROWS:
                    at = let(row_of(other, i) * (self.spec.d_v + 1))
                    put(self.denominator, i, self.denominator[i] + states[at + self.spec.d_v])
                    with unrolled(self.spec.d_v // 8) as j:
                        for e in range(2):
                            place = j * 4 + i * 2 + e
                            put(self.sums, place, self.sums[place] + states[at + self._dim(j, e)])

    def _store_finished(self) -> None:
        args, tile = self.args, self.tile
        for i in ROWS:
            row = let(self._row(i))
            with when(row < tile.num_rows):
                inverse, at = let(normaliser(self.denominator[i], 1)), args.out_at(tile, row)

                def store(dim: Expr, value: Expr, at: Expr = at, inverse: Expr = inverse) -> None:
                    args.out.store(at + wide(dim, args.index), value * inverse)

                self._each_sum(i, store)
                with when(self.place == 0):
                    args.store_lse(tile, row, self.maximum[i], self.denominator[i])

    def _store_partial(self) -> None:
        """Store sums, maximum and denominator of each row."""
        d, index = self.spec.d_v, self.args.index
        for i in ROWS:
            row = let(self._row(i))
            at = let(wide(self.tile.kind * self.config.rows + row, index) * wide(d + STATE_FIELDS, index))

            def store(dim: Expr, value: Expr, at: Expr = at) -> None:
                put(self.args.partial, at + wide(dim, index), value)

            with when(row < self.tile.num_rows):
                self._each_sum(i, store)
                with when(self.place == 0):
                    put(self.args.partial, at + wide(d, index), self.maximum[i])
                    put(self.args.partial, at + wide(d + 1, index), self.denominator[i])

    def _each_sum(self, i: int, store: Callable[[Expr, Expr], None]) -> None:
        with unrolled(self.spec.d_v // 8) as j:
            for e in range(2):
                store(let(self._dim(j, e)), self.sums[j * 4 + i * 2 + e])
