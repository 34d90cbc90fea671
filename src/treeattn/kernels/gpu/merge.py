"""Merging the partial states of row tiles whose keys were split between blocks."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ..emit import Expr, PrimFunc, device_func, f32, fma, greater, launch, let, loop, private, put, when, wide
from ..softmax import normaliser, rescale, start
from ..spec import KernelSpec
from ..walk import Tile
from .arguments import STATE_FIELDS, GpuArguments, declare


def merge(spec: KernelSpec, config: Any, traits: Any) -> PrimFunc:
    """Build the kernel that merges what `attention` left of split tiles; it takes the same arguments."""

    def body() -> None:
        values = declare(spec, traits)
        with launch(values["num_blocks"], config.threads) as (block, thread):
            args = GpuArguments(spec, traits, values)
            args.items = args.merges
            tile = args.tile(block)
            threads, size = config.threads, let(tile.num_rows * spec.d_v)
            with loop(T.truncdiv(size + (threads - 1), threads)) as step:
                index = let(thread + step * threads)
                with when(index < size):
                    _merge_element(spec, config, args, tile, let(T.truncdiv(index, spec.d_v)), let(index % spec.d_v))

    return device_func("merge", body)


def _merge_element(spec: KernelSpec, config: Any, args: GpuArguments, tile: Tile, row: Expr, dim: Expr) -> None:
    """Merge one dim of a row, in the order of the parts; a sink logit is a state without a sum."""
    maximum, denominator, total = (private(1) for _ in range(3))
    sink = args.sink_logits[tile.q_head(row)] if "sinks" in spec.logits else None

    def state(part: Expr, field: Expr) -> Expr:
        at = wide(part * config.rows + row, args.index) * wide(spec.d_v + STATE_FIELDS, args.index)
        return args.partial[at + wide(field, args.index)]

    first_maximum, first_denominator = start(sink)
    put(maximum, 0, first_maximum)
    with loop(tile.span_begin, tile.span_end) as part:
        put(maximum, 0, greater(maximum[0], state(part, spec.d_v)))
    put(denominator, 0, first_denominator * rescale(first_maximum, maximum[0], 1))
    put(total, 0, f32(0.0))
    with loop(tile.span_begin, tile.span_end) as part:
        factor = let(rescale(state(part, spec.d_v), maximum[0], 1))
        put(denominator, 0, fma(state(part, spec.d_v + 1), factor, denominator[0], 1))
        put(total, 0, fma(state(part, dim), factor, total[0], 1))
    args.out.store(args.out_at(tile, row) + wide(dim, args.index), total[0] * normaliser(denominator[0], 1))
    with when(dim == 0):
        args.store_lse(tile, row, maximum[0], denominator[0])
