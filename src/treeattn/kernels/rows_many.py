"""Row tile for nine rows of a kv head and more: rows are lanes in both products.

Per block of columns, keys and values are converted once to float32 (and keys rotated). Then, per panel of rows, while
its scores stay in the first-level cache: ``scores[column][row]``, masked only in partial blocks;
``weights = 2^(score - max)``; and ``sums[dim][row]``. No horizontal operation anywhere; sums are transposed once, at
the end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from . import logits, workspace
from .arguments import Scratch
from .emit import (
    Buffer,
    Expr,
    all_of,
    broadcast,
    either,
    f32,
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
    typed,
    when,
)  # fmt: skip
from .softmax import MASKED, normaliser, rescale, weight
from .spec import KernelSpec, Sizes
from .vectors import pieces, register_tile, split, to_float, transpose8, zero
from .walk import Block, Tile, Walk

LINE = 64  # bytes
EXPONENT = 0x7F800000  # of a float32; all ones in NaN and infinity


class ManyRows(Scratch):
    """Up to ``config.rows`` rows in panels of ``config.panel``."""

    values: Buffer
    strip: Buffer

    def __init__(self, spec: KernelSpec, config: Sizes, args: Any) -> None:
        self.spec, self.config, self.args = spec, config, args
        self.width, self.lanes = config.panel, config.lanes
        self.vectors = self.width // self.lanes
        super().__init__(args, workspace.many_rows(spec, config))
        self.straight = spec.kv_dtype == "float32" and spec.rope is None and not spec.values_are_keys
        self.d_value = spec.d_v
        if spec.values_are_keys:
            self.values, self.d_value = self.keys, spec.d_qk

    def panels(self, tile: Tile) -> Expr:
        return T.truncdiv(tile.num_rows + self.width - 1, self.width)

    def limit(self, tile: Tile) -> Expr:
        """Columns of a block: few where few rows make conversion dear and latency matters."""
        return T.if_then_else(tile.num_rows <= 2 * self.width, i32(self.config.columns // 2), i32(self.config.columns))

    def begin(self, tile: Tile) -> None:
        """Pack the queries ``[panel][dim][row]``, scaled to base-2 units, and start empty sums."""
        d, width = self.spec.d_qk, self.width
        panels = let(self.panels(tile))
        with loop(panels * width) as row:
            self.args.start_row(self, tile, row, let(smaller(row, tile.num_rows - 1)))
        with loop(panels * (width * self.spec.d_v // self.lanes)) as i:
            put(self.sums, span(i * self.lanes, self.lanes), zero(self.lanes))
        with loop(panels * (width // 8)) as strip:
            first = let(strip * 8)
            at = let(T.truncdiv(first, width) * (d * width) + T.truncmod(first, width))
            with loop(8) as i:
                row = let(smaller(first + i, tile.num_rows - 1))
                self.args.load_query(tile, row, self.strip, i * d)
            with loop(d // 8) as c:
                rows = [self.strip[span(i * d + c * 8, 8)] for i in range(8)]
                for i, vector in enumerate(transpose8(rows)):
                    put(self.queries, span(at + (c * 8 + i) * width, 8), vector)
            for dim in range(d // 8 * 8, d):
                with loop(8) as i:
                    put(self.queries, at + dim * width + i, self.strip[i * d + dim])

    def block(self, walk: Walk, block: Block) -> None:
        """Take one block of columns into the sums of every row."""
        tokens = self.config.tokens
        groups = let(T.truncdiv(block.count + tokens - 1, tokens))
        panels = let(self.panels(block.tile))

        def load_keys() -> None:
            with loop(groups * tokens) as t:
                self.args.load_key(walk, block.tile, block.base + t, self.keys, t * self.spec.d_qk)

        if self.straight:
            with when(panels > 1):
                load_keys()
        else:
            load_keys()
        if not self.spec.values_are_keys:
            with loop(block.count) as t:
                self._load_value(let(walk.value[block.base + t]), t)
        broken = registers(1, "int32")
        put(broken, 0, i32(0))
        if self.spec.masks:
            with when(block.partial == 1):
                self._find_nonfinite(block.count, broken)
        with loop(panels) as panel:
            self._panel(walk, block, groups, panel, let(broken[0]))

    def _panel(self, walk: Walk, block: Block, groups: Expr, panel: Expr, broken: Expr) -> None:
        lanes, vectors = self.lanes, range(self.vectors)
        state = [span(panel * self.width + j * lanes, lanes) for j in vectors]
        highest, factor = ([registers(lanes) for _ in vectors] for _ in range(2))
        whole = span(0, lanes)
        for j in vectors:
            put(highest[j], whole, self.maximum[state[j]])
        fetch = self._fetcher(walk, block.following)

        def from_scratch() -> None:
            either(
                panel == 0,
                lambda: self._score(panel, groups, highest, self._staged_key, fetch),
                lambda: self._score(panel, groups, highest, self._staged_key, None),
            )

        if self.straight:
            key = functools.partial(self._key_in_place, walk, block)
            once = block.tile.num_rows <= self.width
            either(once, lambda: self._score(panel, groups, highest, key, fetch), from_scratch)
        else:
            from_scratch()
        self._revise(walk, block, highest, state)
        for j in vectors:
            old, new = self.maximum[state[j]], let(T.ceil(highest[j][whole]))
            put(factor[j], whole, rescale(old, new, lanes))
            put(self.denominator, state[j], self.denominator[state[j]] * factor[j][whole])
            put(self.maximum, state[j], new)
            put(highest[j], whole, new)
        self._weigh(block.count, highest, state)
        if self.spec.masks:
            either(
                broken == 0,
                lambda: self._accumulate(panel, block.count, factor, guarded=False),
                lambda: self._accumulate(panel, block.count, factor, guarded=True),
            )
        else:
            self._accumulate(panel, block.count, factor, guarded=False)

    def _staged_key(self, token: Expr) -> Callable[[Expr], Expr]:
        """Elements of a key that was converted to scratch."""
        return lambda dim: self.keys[token * self.spec.d_qk + dim]

    def _key_in_place(self, walk: Walk, block: Block, token: Expr) -> Callable[[Expr], Expr]:
        """Elements of a float32 key where it lies: a single panel reads it once."""
        slot = let(walk.key[block.base + token])
        return lambda dim: self.args.k.data[slot + i64(dim)]

    def _score(
        self,
        panel: Expr,
        groups: Expr,
        highest: list[Buffer],
        key: Callable[[Expr], Callable[[Expr], Expr]],
        fetch: Callable[[Expr, Expr], None] | None,
    ) -> None:
        """``scores[column][row] = keys . queries``, and the running maximum as they are stored."""
        tokens, width, lanes, d = self.config.tokens, self.width, self.lanes, self.spec.d_qk
        with loop(groups) as group:
            rows = [key(group * tokens + i) for i in range(tokens)]

            def done(i: int, j: int, value: Expr) -> None:
                put(self.scores, span((group * tokens + i) * width + j * lanes, lanes), value)
                put(highest[j], span(0, lanes), greater(highest[j][span(0, lanes)], value))

            register_tile(
                tokens, self.vectors, lanes, d,
                init=lambda i, j: zero(lanes),
                left=lambda i, k: rows[i](k),
                right=lambda k, j: self.queries[span((panel * d + k) * width + j * lanes, lanes)],
                done=done,
                step=(lambda k: fetch(group, k)) if fetch else None,
            )  # fmt: skip

    def _revise(self, walk: Walk, block: Block, highest: list[Buffer], state: list[Expr]) -> None:
        """Adjust logits and mask them, where there is anything to do."""
        revise = self._revise_scores
        if self.spec.adjusts and self.spec.masks:
            either(
                block.partial == 1,
                lambda: revise(walk, block, highest, state, masked=True),
                lambda: revise(walk, block, highest, state, masked=False),
            )
        elif self.spec.adjusts:
            revise(walk, block, highest, state, masked=False)
        elif self.spec.masks:
            with when(block.partial == 1):
                revise(walk, block, highest, state, masked=True)

    def _revise_scores(
        self, walk: Walk, block: Block, highest: list[Buffer], state: list[Expr], *, masked: bool
    ) -> None:
        """Adjust the scores, put `MASKED` where a row does not see a column, and take the maximum again."""
        lanes, whole = self.lanes, span(0, self.lanes)
        for j in range(self.vectors):
            put(highest[j], whole, self.maximum[state[j]])
        with loop(block.count) as t:
            place = block.base + t
            visible = walk.tester(block.tile, let(walk.column[place])) if masked else None
            position = self._position(walk, block.tile, place)
            for j in range(self.vectors):
                at, rows = span(t * self.width + j * lanes, lanes), state[j]
                score = self._adjust(self.scores[at], rows, position)
                if visible:
                    sees = visible(functools.partial(self.args.row_bounds_of, rows), lanes)
                    score = T.Select(sees, score, f32(MASKED, lanes))
                    put(self.seen, at, T.Select(sees, f32(1.0, lanes), zero(lanes)))
                put(self.scores, at, score)
                put(highest[j], whole, greater(highest[j][whole], self.scores[at]))

    def _position(self, walk: Walk, tile: Tile, place: Expr) -> Expr | None:
        if "alibi" not in self.spec.logits:
            return None
        return let(T.cast(walk.position(tile, place), "float32"))

    def _adjust(self, score: Expr, rows: Expr, position: Expr | None) -> Expr:
        lanes = self.lanes
        if "softcap" in self.spec.logits:
            score = logits.cap(score, self.args.cap_limit, self.args.cap_inverse, lanes)
        if position is not None:
            score = logits.bias(score, self.slopes[rows], broadcast(position, lanes) - self.positions[rows], lanes)
        return score

    def _weigh(self, count: Expr, maximum: list[Buffer], state: list[Expr]) -> None:
        """Turn scores into weights and add them to the denominator, column after column."""
        lanes, whole = self.lanes, span(0, self.lanes)
        totals = [registers(lanes) for _ in range(self.vectors)]
        for j, total in enumerate(totals):
            put(total, whole, self.denominator[state[j]])
        with loop(count) as t:
            for j, total in enumerate(totals):
                at = span(t * self.width + j * lanes, lanes)
                put(self.scores, at, weight(self.scores[at], maximum[j][whole], lanes))
                put(total, whole, total[whole] + self.scores[at])
        for j, total in enumerate(totals):
            put(self.denominator, state[j], total[whole])

    def _accumulate(self, panel: Expr, count: Expr, factor: list[Buffer], *, guarded: bool) -> None:
        """``sums[dim][row] = sums * factor + values . weights``; guarded, only what is seen is multiplied."""
        width, lanes, d = self.width, self.lanes, self.spec.d_v

        def weights(k: Expr, j: int) -> Expr:
            return self.scores[span(k * width + j * lanes, lanes)]

        def seen(i: int, k: Expr, j: int) -> Expr:
            return self.seen[span(k * width + j * lanes, lanes)] != zero(lanes)

        for first, rows, tiles in split(d, self.config.tokens):
            with loop(tiles) as c:
                dim = let(c * rows + first)

                def at(i: int, j: int, dim: Expr = dim) -> Expr:
                    return span((panel * d + dim + i) * width + j * lanes, lanes)

                register_tile(
                    rows, self.vectors, lanes, count,
                    init=lambda i, j: self.sums[at(i, j)] * factor[j][span(0, lanes)],
                    left=lambda i, k, dim=dim: self.values[k * self.d_value + dim + i],
                    right=weights,
                    done=lambda i, j, value: put(self.sums, at(i, j), value),
                    keep=seen if guarded else None,
                )  # fmt: skip

    def end(self, tile: Tile) -> None:
        """Divide by the denominator, transpose, and store rows and their LSE."""
        spec, width, args = self.spec, self.width, self.args
        with loop(self.panels(tile) * (width // 8)) as strip:
            first = let(strip * 8)
            at = let(T.truncdiv(first, width) * (spec.d_v * width) + T.truncmod(first, width))
            inverse = registers(8)
            put(inverse, span(0, 8), normaliser(self.denominator[span(first, 8)], 8))
            with loop(spec.d_v // 8) as c:
                columns = [self.sums[span(at + (c * 8 + i) * width, 8)] * inverse[span(0, 8)] for i in range(8)]
                for i, vector in enumerate(transpose8(columns)):
                    put(self.strip, span(i * spec.d_v + c * 8, 8), vector)
            for dim in range(spec.d_v // 8 * 8, spec.d_v):
                with loop(8) as i:
                    put(self.strip, i * spec.d_v + dim, self.sums[at + dim * width + i] * inverse[i])
            with loop(smaller(i32(8), tile.num_rows - first)) as i:
                row = let(first + i)
                args.store_row(tile, row, lambda dim, lanes, i=i: self.strip[span(i * spec.d_v + dim, lanes)])
                args.store_lse(tile, row, self.maximum[row], self.denominator[row])

    def _load_value(self, slot: Expr, t: Expr) -> None:
        for offset, lanes in pieces(self.spec.d_v):
            value = to_float(self.args.v.data[span(slot + i64(offset), lanes)], self.spec.kv_dtype, lanes)
            put(self.values, span(t * self.spec.d_v + offset, lanes), value)

    def _find_nonfinite(self, count: Expr, broken: Buffer) -> None:
        """Set ``broken`` if a value of the block is NaN or infinite: weights of zero must not multiply it."""
        size = let(count * self.d_value)
        exponent = registers(8, "int32")
        put(exponent, span(0, 8), broadcast(i32(0), 8))

        def look(at: Expr, lanes: int) -> None:
            bits = T.reinterpret(typed("int32", lanes), self.values[span(at, lanes)])
            held = T.bitwise_and(bits, broadcast(i32(EXPONENT), lanes))
            put(exponent, span(0, lanes), greater(exponent[span(0, lanes)], held))

        with loop(T.truncdiv(size, 8)) as i:
            look(i * 8, 8)
        with loop(T.truncdiv(size, 8) * 8, size) as i:
            look(i, 1)
        with loop(8) as i, when(exponent[i] == EXPONENT):
            put(broken, 0, i32(1))

    def _fetcher(self, walk: Walk, following: Expr) -> Callable[[Expr, Expr], None]:
        """Prefetch the next block: per group of columns, its keys and values spread over the steps of a tile.

        One of each every few steps, a power of two so that asking costs little: bursts are slower.
        """
        element = 4 if self.spec.kv_dtype == "float32" else 2
        pools = [(self.args.k.data, walk.key, self.spec.d_qk), (self.args.v.data, walk.value, self.spec.d_v)]
        tokens, steps = self.config.tokens, self.spec.d_qk

        def fetch(group: Expr, k: Expr) -> None:
            for data, slots, size in pools[: 1 if self.spec.values_are_keys else 2]:
                lines = -(-size * element // LINE)
                total = tokens * lines
                each, every = -(-total // steps), 2 ** int(math.log2(max(1, steps // total)))
                for n in range(each):
                    i = let(T.truncdiv(k, every) * each + n)
                    with when(all_of(T.truncmod(k, every) == 0, i < total)):
                        slot = slots[following + group * tokens + T.truncdiv(i, lines)]
                        prefetch(data, slot + i64(T.truncmod(i, lines) * (LINE // element)))

        return fetch
