"""RoPE in registers, from two small tables: position ``p`` turns by the angles of ``p // LOW * LOW`` and ``p % LOW``.

Tables hold ``[row][cos, sin][rotary_dim / 2]``. Both row tiles rotate by the same multiply-adds, so a key has the
same bits wherever it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script import tirx as T

from .emit import Buffer, Expr, fma, let, span
from .vectors import pieces, shuffle

LOW = 1024  # as treeattn.rope.TABLE_LOW

Load = Callable[[int, int], Expr]
Store = Callable[[int, int, Expr], None]


@dataclass(frozen=True)
class Angle:
    """Where the cosines and sines of a position begin in the tables."""

    low: Buffer
    high: Buffer
    low_row: Expr
    high_row: Expr
    half: int

    def cos_sin(self, i: int, lanes: int) -> tuple[Expr, Expr]:
        """Return cosine and sine of pairs ``i .. i + lanes``."""
        low_cos, low_sin = (self.low[span(self.low_row + part + i, lanes)] for part in (0, self.half))
        high_cos, high_sin = (self.high[span(self.high_row + part + i, lanes)] for part in (0, self.half))
        cos = fma(low_cos, high_cos, -(low_sin * high_sin), lanes)
        sin = fma(low_sin, high_cos, low_cos * high_sin, lanes)
        return cos, sin


def angle(low: Buffer, high: Buffer, position: Expr, rotary_dim: int, rows: int) -> Angle:
    """Find the angle of a position; negative ones count as 0."""
    place = let(T.max(position, 0))
    low_row, high_row = let(T.truncmod(place, rows) * rotary_dim), let(T.truncdiv(place, rows) * rotary_dim)
    return Angle(low, high, low_row, high_row, rotary_dim // 2)


def rotate(style: str, rotary_dim: int, size: int, at: Angle, load: Load, store: Store) -> None:
    """Load ``size`` dims of a vector, rotate the first ``rotary_dim`` of them, and store all."""
    half = rotary_dim // 2
    turn = _turn_halves if style == "neox" else _turn_pairs
    for i, lanes in pieces(half):
        turn(i, lanes, half, at, load, store)
    for offset, lanes in pieces(size - rotary_dim):
        store(rotary_dim + offset, lanes, load(rotary_dim + offset, lanes))


def turned(style: str, rotary_dim: int, size: int, at: Angle, dim: Expr, load: Callable[[Expr], Expr]) -> Expr:
    """Return one dim of a rotated vector of ``size``, for threads that load one dim each."""
    half = rotary_dim // 2
    pair = let(T.truncdiv(dim, 2) if style == "gptj" else T.truncmod(dim, half))
    is_first = let(T.truncmod(dim, 2) == 0 if style == "gptj" else dim < half)
    step = 1 if style == "gptj" else half

    def value() -> Expr:
        cos, sin = at.cos_sin(pair, 1)
        other = load(T.Select(is_first, T.min(dim + step, size - 1), dim - step)) * sin
        return fma(load(dim), cos, T.Select(is_first, -other, other), 1)

    return value() if rotary_dim == size else T.if_then_else(dim < rotary_dim, value(), load(dim))


def _turn_halves(i: int, lanes: int, half: int, at: Angle, load: Load, store: Store) -> None:
    cos, sin = at.cos_sin(i, lanes)
    x, y = load(i, lanes), load(half + i, lanes)
    store(i, lanes, fma(x, cos, -(y * sin), lanes))
    store(half + i, lanes, fma(y, cos, x * sin, lanes))


def _turn_pairs(i: int, lanes: int, half: int, at: Angle, load: Load, store: Store) -> None:
    cos, sin = at.cos_sin(i, lanes)
    if lanes == 1:
        x, y = load(2 * i, 1), load(2 * i + 1, 1)
        store(2 * i, 1, fma(x, cos, -(y * sin), 1))
        store(2 * i + 1, 1, fma(y, cos, x * sin, 1))
        return
    first, second = load(2 * i, lanes), load(2 * i + lanes, lanes)
    x, y = (shuffle([first, second], range(odd, 2 * lanes, 2)) for odd in (0, 1))
    turned = fma(x, cos, -(y * sin), lanes), fma(y, cos, x * sin, lanes)
    order = [place for lane in range(lanes) for place in (lane, lanes + lane)]
    store(2 * i, lanes, shuffle(turned, order[:lanes]))
    store(2 * i + lanes, lanes, shuffle(turned, order[lanes:]))
