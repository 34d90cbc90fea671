"""Moving rows of keys and values between slots, rotated on the way or not, and merging of finished states.

Both are an element a thread: nothing is shared, so there is no barrier.
"""

from __future__ import annotations

import functools
from typing import Any

from tvm.script import tirx as T

from ..emit import (
    Expr,
    PrimFunc,
    device_func,
    f32,
    flat,
    fma,
    greater,
    launch,
    let,
    part,
    pointer,
    put,
    scalar,
    when,
    wide,
)
from ..rotation import LOW, angle, turned
from ..softmax import NOTHING, normaliser, weight
from .arguments import LEAST_EXTENT
from .elements import Elements, declared

THREADS = 128
MOVE_FIELDS = 3  # of a row to move: slot it is read from, slot it is written to, position
SIDE = ("at", "page", "slot", "head")
"""Scalars of either side of a move: the offset of its first element, and strides."""


def move_rows(traits: Any, dtypes: tuple[str, str], d: int, rope: tuple[str, int] | None) -> PrimFunc:
    """Build the kernel that copies rows of ``d`` elements from slots to slots, converted, and rotated by position.

    Slot ``s`` of a side is place ``s % page_size`` of page ``s / page_size``.
    """

    def body() -> None:
        memory = [declared(dtype, traits) for dtype in dtypes]
        handles = [pointer(name, kind) for name, kind in zip(("given", "made"), memory, strict=True)]
        handles += [pointer("moves", "int32"), pointer("tables", "float32")]
        num_blocks, count, heads = (scalar(name, "int32") for name in ("num_blocks", "count", "heads"))
        sizes = [scalar(f"{side}_page_size", "int32") for side in ("given", "made")]
        strides = [[scalar(f"{side}_{step}", traits.index) for step in SIDE] for side in ("given", "made")]
        moves, tables = flat(handles[2], "int32", LEAST_EXTENT), flat(handles[3], "float32", LEAST_EXTENT)
        given, made = (
            Elements(flat(handle, kind, LEAST_EXTENT), dtype, traits)
            for handle, kind, dtype in zip(handles[:2], memory, dtypes, strict=True)
        )
        with launch(num_blocks, THREADS) as (block, thread):
            index = let(block * THREADS + thread)
            with when(index < count):
                row, dim = let(T.truncdiv(index, d)), let(index % d)
                token, head = let(T.truncdiv(row, heads)), let(T.truncmod(row, heads))

                def begin(side: int) -> Expr:
                    slot = let(moves[token * MOVE_FIELDS + side])
                    page = let(T.truncdiv(slot, sizes[side]))
                    places = page, slot - page * sizes[side], head
                    at, *steps = strides[side]
                    return let(at + sum(wide(x, traits.index) * y for x, y in zip(places, steps, strict=True)))

                source = begin(0)

                def load(dim: Expr) -> Expr:
                    return given[let(source + wide(dim, traits.index))]

                if rope is None:
                    value = load(dim)
                else:
                    style, rotary_dim = rope
                    high = part(tables, LEAST_EXTENT, LOW * rotary_dim)
                    position = moves[token * MOVE_FIELDS + 2]
                    value = turned(style, rotary_dim, d, angle(tables, high, position, rotary_dim, LOW), dim, load)
                made.store(begin(1) + wide(dim, traits.index), value)

    return device_func("move_rows", body)


def merge_states(traits: Any, dtype: str, d: int) -> PrimFunc:
    """Build the kernel that merges two states ``out [rows, d]`` and ``lse [rows]`` of disjoint keys."""

    def body() -> None:
        memory = declared(dtype, traits)
        outs = [pointer(name, memory) for name in ("out_a", "out_b", "out")]
        lses = [pointer(name, "float32") for name in ("lse_a", "lse_b", "lse")]
        num_blocks, count = (scalar(name, "int32") for name in ("num_blocks", "count"))
        *parts, out = (Elements(flat(handle, memory, LEAST_EXTENT), dtype, traits) for handle in outs)
        first, second, lse = (flat(handle, "float32", LEAST_EXTENT) for handle in lses)
        with launch(num_blocks, THREADS) as (block, thread):
            index = let(block * THREADS + thread)
            with when(index < count):
                row = let(T.truncdiv(index, d))
                maximum = let(T.ceil(functools.reduce(greater, (first[row], second[row]), f32(NOTHING))))
                weights = [let(weight(one[row], maximum, 1)) for one in (first, second)]
                total = let(weights[0] + weights[1])
                share = let(normaliser(total, 1))
                value = f32(0.0)
                for state, factor in zip(parts, weights, strict=True):  # one without weight adds nothing
                    held = let(state[wide(index, traits.index)])
                    value = let(T.Select(factor == f32(0.0), value, fma(factor, held, value, 1)))
                out.store(wide(index, traits.index), value * share)
                with when(index % d == 0):
                    put(lse, row, T.Select(total == f32(0.0), first[row], maximum + T.log2(total)))

    return device_func("merge_states", body)
