"""Row tile for nine rows of a kv head and more: rows are lanes in both products.

Per block of columns, keys and values are converted once to float32. Then, per panel of rows, while its scores stay in
the first-level cache: ``scores[column][row]``, masked only in partial blocks; ``weights = 2^(score - max)``; and
``sums[dim][row]``. No horizontal operation anywhere; sums are transposed once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from . import workspace
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
    part,
    prefetch,
    put,
    registers,
    smaller,
    span,
    when,
)
from .softmax import BIAS, LOG2_E, MASKED, NOTHING, normaliser, rescale, weight
from .spec import KernelSpec, Sizes
from .vectors import pieces, register_tile, split, to_float, transpose8, zero
from .walk import Tile, Walk

LINE = 64  # bytes


class ManyRows:
    """Up to ``config.rows`` rows in panels of ``config.panel``."""

    def __init__(self, spec: KernelSpec, config: Sizes, args: Any) -> None:
        self.spec, self.config, self.args = spec, config, args
        self.width, self.lanes = config.panel, config.lanes
        self.vectors = self.width // self.lanes
        for name, (offset, size) in workspace.many_rows(spec, config).items():
            setattr(self, name, part(args.workspace, size, args.base + offset))

    scores: Buffer
    keys: Buffer
    values: Buffer
    queries: Buffer
    sums: Buffer
    maximum: Buffer
    denominator: Buffer
    transposed: Buffer

    def panels(self, tile: Tile) -> Expr:
        return T.truncdiv(tile.num_rows + self.width - 1, self.width)

    def limit(self, tile: Tile) -> Expr:
        """Columns of a block: few where few rows make conversion dear and latency matters."""
        return T.if_then_else(tile.num_rows <= 2 * self.width, i32(self.config.columns // 2), i32(self.config.columns))

    def begin(self, tile: Tile) -> None:
        """Pack the queries ``[panel][dim][row]``, scaled to base-2 units, and start empty sums."""
        spec, width = self.spec, self.width
        panels = let(self.panels(tile))
        with loop(panels * width) as row:
            put(self.maximum, row, f32(NOTHING))
            put(self.denominator, row, f32(0.0))
            self.args.stage_bounds(tile, row, smaller(row, tile.num_rows - 1))
        with loop(panels * (width * spec.d_v // self.lanes)) as i:
            put(self.sums, span(i * self.lanes, self.lanes), zero(self.lanes))
        scale = let(self.args.sm_scale * f32(LOG2_E))
        with loop(panels * (width // 8)) as strip:
            first = let(strip * 8)
            at = let(T.truncdiv(first, width) * (spec.d_qk * width) + T.truncmod(first, width))
            rows = [self.args.q_address(tile, smaller(first + i, tile.num_rows - 1)) for i in range(8)]

            def query(row: Expr, dim: Expr, lanes: int) -> Expr:
                value = self.args.q[span(row + i64(dim), lanes)]
                return to_float(value, spec.q_dtype, lanes) * broadcast(scale, lanes)

            with loop(spec.d_qk // 8) as c:
                for i, vector in enumerate(transpose8([query(row, c * 8, 8) for row in rows])):
                    put(self.queries, span(at + (c * 8 + i) * width, 8), vector)
            for dim in range(spec.d_qk // 8 * 8, spec.d_qk):
                for i, row in enumerate(rows):
                    put(self.queries, at + dim * width + i, query(row, dim, 1))

    def block(self, tile: Tile, walk: Walk, parity: Expr) -> None:
        """Take one block of columns into the sums of every row."""
        base, count = let(parity * walk.capacity), let(walk.count[parity])
        following = let(walk.capacity - base)
        groups = let(T.truncdiv(count + self.config.tokens - 1, self.config.tokens))
        self._convert(self.args.k, walk.key, base, groups * self.config.tokens, self.keys, self.spec.d_qk)
        self._convert(self.args.v, walk.value, base, count, self.values, self.spec.d_v)
        partial = let(walk.partial[parity])
        broken = registers(1, "int32")
        put(broken, 0, i32(0))
        if self.spec.mask[0] != "full":
            with when(partial == 1):
                self._find_nonfinite(count, broken)
        with loop(self.panels(tile)) as panel:
            self._panel(tile, walk, base, following, count, groups, panel, partial, let(broken[0]))

    def _panel(
        self,
        tile: Tile,
        walk: Walk,
        base: Expr,
        following: Expr,
        count: Expr,
        groups: Expr,
        panel: Expr,
        partial: Expr,
        broken: Expr,
    ) -> None:
        lanes, vectors = self.lanes, range(self.vectors)
        state = [span(panel * self.width + j * lanes, lanes) for j in vectors]
        highest, factor = ([registers(lanes) for _ in vectors] for _ in range(2))
        whole = span(0, lanes)
        for j in vectors:
            put(highest[j], whole, self.maximum[state[j]])
        fetch = self._fetcher(walk, following)
        either(
            panel == 0,
            lambda: self._score(panel, groups, highest, fetch),
            lambda: self._score(panel, groups, highest, None),
        )
        if self.spec.mask[0] != "full":
            with when(partial == 1):
                self._mask(tile, walk, base, count, panel, highest, state)
        for j in vectors:
            old, new = self.maximum[state[j]], let(T.ceil(highest[j][whole]))
            put(factor[j], whole, rescale(old, new, lanes))
            put(self.denominator, state[j], self.denominator[state[j]] * factor[j][whole])
            put(self.maximum, state[j], new)
            put(highest[j], whole, new - f32(BIAS, lanes))
        self._weigh(count, highest, state)
        if self.spec.mask[0] == "full":
            self._accumulate(panel, count, factor, guarded=False)
        else:
            either(
                broken == 0,
                lambda: self._accumulate(panel, count, factor, guarded=False),
                lambda: self._accumulate(panel, count, factor, guarded=True),
            )

    def _score(
        self, panel: Expr, groups: Expr, highest: list[Buffer], fetch: Callable[[Expr, Expr], None] | None
    ) -> None:
        """``scores[column][row] = keys . queries``, and the running maximum as they are stored."""
        tokens, width, lanes, d = self.config.tokens, self.width, self.lanes, self.spec.d_qk
        with loop(groups) as group:

            def done(i: int, j: int, value: Expr) -> None:
                put(self.scores, span((group * tokens + i) * width + j * lanes, lanes), value)
                put(highest[j], span(0, lanes), greater(highest[j][span(0, lanes)], value))

            register_tile(
                tokens,
                self.vectors,
                lanes,
                d,
                init=lambda i, j: zero(lanes),
                left=lambda i, k: self.keys[(group * tokens + i) * d + k],
                right=lambda k, j: self.queries[span((panel * d + k) * width + j * lanes, lanes)],
                done=done,
                step=(lambda k: fetch(group, k)) if fetch else None,
            )

    def _mask(
        self,
        tile: Tile,
        walk: Walk,
        base: Expr,
        count: Expr,
        panel: Expr,
        highest: list[Buffer],
        state: list[Expr],
    ) -> None:
        """Put `MASKED` where a row does not see a column, and take the maximum again."""
        lanes, whole = self.lanes, span(0, self.lanes)
        for j in range(self.vectors):
            put(highest[j], whole, self.maximum[state[j]])
        with loop(count) as t:
            visible = walk.tester(tile, let(walk.column[base + t]))
            for j in range(self.vectors):
                at = span(t * self.width + j * lanes, lanes)

                def bound(k: int, row: Expr = panel * self.width + j * lanes) -> Expr:
                    return self.args.row_bounds[span(k * self.config.rows + row, lanes)]

                put(self.scores, at, T.Select(visible(bound, lanes), self.scores[at], f32(MASKED, lanes)))
                put(highest[j], whole, greater(highest[j][whole], self.scores[at]))

    def _weigh(self, count: Expr, biased: list[Buffer], state: list[Expr]) -> None:
        """Turn scores into weights and add them to the denominator, column after column."""
        lanes, whole = self.lanes, span(0, self.lanes)
        totals = [registers(lanes) for _ in range(self.vectors)]
        for j, total in enumerate(totals):
            put(total, whole, self.denominator[state[j]])
        with loop(count) as t:
            for j, total in enumerate(totals):
                at = span(t * self.width + j * lanes, lanes)
                put(self.scores, at, weight(self.scores[at], biased[j][whole], lanes))
                put(total, whole, total[whole] + self.scores[at])
        for j, total in enumerate(totals):
            put(self.denominator, state[j], total[whole])

    def _accumulate(self, panel: Expr, count: Expr, factor: list[Buffer], *, guarded: bool) -> None:
        """``sums[dim][row] = sums * factor + values . weights``; guarded, a weight of zero multiplies nothing."""
        width, lanes, d = self.width, self.lanes, self.spec.d_v

        def weights(k: Expr, j: int) -> Expr:
            return self.scores[span(k * width + j * lanes, lanes)]

        for first, rows, tiles in split(d, self.config.tokens):
            with loop(tiles) as c:
                dim = let(c * rows + first)

                def at(i: int, j: int, dim: Expr = dim) -> Expr:
                    return span((panel * d + dim + i) * width + j * lanes, lanes)

                register_tile(
                    rows,
                    self.vectors,
                    lanes,
                    count,
                    init=lambda i, j: self.sums[at(i, j)] * factor[j][span(0, lanes)],
                    left=lambda i, k, dim=dim: self.values[k * d + dim + i],
                    right=weights,
                    done=lambda i, j, value: put(self.sums, at(i, j), value),
                    keep=(lambda i, k, j: weights(k, j) != zero(lanes)) if guarded else None,
                )

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
                    put(self.transposed, span(i * spec.d_v + c * 8, 8), vector)
            for dim in range(spec.d_v // 8 * 8, spec.d_v):
                with loop(8) as i:
                    put(self.transposed, i * spec.d_v + dim, self.sums[at + dim * width + i] * inverse[i])
            with loop(smaller(i32(8), tile.num_rows - first)) as i:
                row = let(first + i)
                args.store_row(tile, row, lambda dim, lanes, i=i: self.transposed[span(i * spec.d_v + dim, lanes)])
                args.store_lse(tile, row, self.maximum[row], self.denominator[row])

    def _convert(self, pool: Any, slots: Buffer, base: Expr, count: Expr, out: Buffer, d: int) -> None:
        with loop(count) as t:
            slot = let(slots[base + t])
            for offset, lanes in pieces(d):
                value = pool.data[span(slot + i64(offset), lanes)]
                put(out, span(t * d + offset, lanes), to_float(value, self.spec.kv_dtype, lanes))

    def _find_nonfinite(self, count: Expr, broken: Buffer) -> None:
        """Set ``broken`` if a value of the block is NaN or infinite: zero weights must not multiply it."""
        d = self.spec.d_v
        trace = registers(8)
        put(trace, span(0, 8), zero(8))
        with loop(T.truncdiv(count * d, 8)) as i:
            value = self.values[span(i * 8, 8)]
            put(trace, span(0, 8), trace[span(0, 8)] + (value - value))
        with loop(T.truncdiv(count * d, 8) * 8, count * d) as i:
            put(trace, 0, trace[0] + (self.values[i] - self.values[i]))
        with loop(8) as i, when(trace[i] != f32(0.0)):
            put(broken, 0, i32(1))

    def _fetcher(self, walk: Walk, following: Expr) -> Callable[[Expr, Expr], None]:
        """Prefetch the next block: per group of columns, its keys and values spread over the steps of a tile."""
        size = 4 if self.spec.kv_dtype == "float32" else 2
        steps, tokens = self.spec.d_qk, self.config.tokens
        lines = [-(-d * size // LINE) for d in (self.spec.d_qk, self.spec.d_v)]
        total = tokens * sum(lines)
        every, each = max(1, steps // total), -(-total // steps)

        def fetch_one(group: Expr, i: Expr) -> None:
            token = let(following + group * tokens + T.truncdiv(i, sum(lines)))
            line = let(T.truncmod(i, sum(lines)))
            either(
                line < lines[0],
                lambda: prefetch(self.args.k.data, walk.key[token] + i64(line * (LINE // size))),
                lambda: prefetch(self.args.v.data, walk.value[token] + i64((line - lines[0]) * (LINE // size))),
            )

        def fetch(group: Expr, k: Expr) -> None:
            for n in range(each):
                i = let(T.truncdiv(k, every) * each + n)
                with when(all_of(T.truncmod(k, every) == 0, i < total)):
                    fetch_one(group, i)

        return fetch
