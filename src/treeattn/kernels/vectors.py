"""Vectors of float32: conversion, transposes, powers of two, and the register tile.

Nothing here depends on a vectoriser: every vector is explicit. Eight lanes are one AVX2 register; LLVM splits them for
narrower machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tvm
from tvm.script import tirx as T

from .emit import Expr, broadcast, f32, fma, greater, let, loop, put, registers, span, typed

Emit = Callable[..., Any]


def to_float(value: Expr, dtype: str, lanes: int = 8) -> Expr:
    """Convert stored elements to float32, exactly."""
    if dtype == "float32":
        return value
    if dtype == "bfloat16":
        bits = T.shift_left(value.astype(typed("uint32", lanes)), broadcast(T.uint32(16), lanes))
        return T.reinterpret(typed("float32", lanes), bits)
    return value.astype(typed("float32", lanes))


def from_float(value: Expr, dtype: str, lanes: int = 8) -> Expr:
    """Convert float32 to stored elements, to nearest even; NaN stays NaN."""
    if dtype == "float32":
        return value
    if dtype == "bfloat16":

        def constant(x: int) -> Expr:
            return broadcast(T.uint32(x), lanes)

        bits = T.reinterpret(typed("uint32", lanes), value)
        odd = T.bitwise_and(T.shift_right(bits, constant(16)), constant(1))
        rounded = T.shift_right(bits + constant(0x7FFF) + odd, constant(16))
        return T.Select(T.isnan(value), constant(0x7FC0), rounded).astype(typed("uint16", lanes))
    return value.astype(typed("float16", lanes))


def pieces(size: int, lanes: int = 8) -> Iterator[tuple[int, int]]:
    """Cut ``size`` elements in whole vectors and a tail of powers of two: ``(offset, lanes)``."""
    offset = 0
    while offset < size:
        while lanes > size - offset:
            lanes //= 2
        yield offset, lanes
        offset += lanes


def shuffle(vectors: Sequence[Expr], lanes: Sequence[int]) -> Expr:
    """Pick lanes of one or two vectors, counted through both."""
    return tvm.tirx.Shuffle(list(vectors), [tvm.tirx.const(lane, "int32") for lane in lanes])


def interleave(left: Expr, right: Expr) -> list[Expr]:
    """Interleave two vectors of 16 within their halves: the lower four lanes of each, then the upper four."""
    low = [0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27]
    return [let(shuffle([left, right], lanes)) for lanes in (low, [lane + 4 for lane in low])]


def transpose4(rows: Sequence[Expr]) -> list[Expr]:
    """Transpose the 4 x 4 blocks in both halves of four vectors of 8: 8 shuffles."""
    low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
    first, last = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    t0, t1 = shuffle(rows[:2], low), shuffle(rows[:2], high)
    t2, t3 = shuffle(rows[2:], low), shuffle(rows[2:], high)
    return [shuffle([t0, t2], first), shuffle([t0, t2], last), shuffle([t1, t3], first), shuffle([t1, t3], last)]


def transpose8(rows: Sequence[Expr]) -> list[Expr]:
    """Transpose eight vectors of 8: 24 shuffles."""
    upper, lower = transpose4(rows[:4]), transpose4(rows[4:])
    halves = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
    return [shuffle(pair, half) for half in halves for pair in zip(upper, lower, strict=True)]


def horizontal_max(vector: Expr) -> Expr:
    """Return the maximum of eight lanes in every lane; a maximum is exact in any order."""
    for lanes in ([4, 5, 6, 7, 0, 1, 2, 3], [2, 3, 0, 1, 6, 7, 4, 5], [1, 0, 3, 2, 5, 4, 7, 6]):
        vector = greater(vector, shuffle([vector], lanes))
    return vector


def split(size: int, most: int) -> list[tuple[int, int, int]]:
    """Cut ``size`` rows in register tiles of at most ``most``: ``(first, rows of a tile, tiles)``; no thin tail."""
    whole, rest = divmod(size, most)
    if not rest:
        return [(0, most, whole)]
    if whole and most - rest > rest:  # two even tiles beat a full one beside a thin one
        half = most + rest
        tail = [(half // 2, 2)] if half % 2 == 0 else [(half // 2 + 1, 1), (half // 2, 1)]
        whole -= 1
    else:
        tail = [(rest, 1)]
    tiles, first = ([(0, most, whole)] if whole else []), whole * most
    for rows, count in tail:
        tiles.append((first, rows, count))
        first += rows * count
    return tiles


def register_tile(
    rows: int,
    vectors: int,
    lanes: int,
    steps: Expr,
    *,
    init: Emit,
    left: Emit,
    right: Emit,
    done: Emit,
    step: Emit | None = None,
    keep: Emit | None = None,
) -> None:
    """For ``k < steps`` in order, ``acc[i][j] += left(i, k) * right(k, j)``.

    Accumulators start at ``init(i, j)`` and end in ``done(i, j, acc)``; ``left`` gives scalars, ``right`` vectors.
    ``step(k)`` may emit a prefetch. With ``keep(i, k, j)``, lanes where it is false leave the accumulator alone,
    whatever ``left`` and ``right`` hold there.
    """
    accumulators = [registers(vectors * lanes) for _ in range(rows)]
    tile = [(i, j, span(j * lanes, lanes)) for i in range(rows) for j in range(vectors)]
    for i, j, at in tile:
        put(accumulators[i], at, init(i, j))
    with loop(steps) as k:
        if step:
            step(k)
        for i, j, at in tile:
            old = accumulators[i][at]
            new = fma(broadcast(left(i, k), lanes), right(k, j), old, lanes)
            put(accumulators[i], at, T.Select(keep(i, k, j), new, old) if keep else new)
    for i, j, at in tile:
        done(i, j, accumulators[i][at])


def zero(lanes: int) -> Expr:
    """Return zeros."""
    return f32(0.0, lanes)
