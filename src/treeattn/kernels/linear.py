"""Matrix product of a few rows with a large weight, for the layers around attention.

A weight lies in *panels* of ``config.panel`` outputs, ``[num_panels, inputs, panel]``: threads share out panels, so it
is read from memory once whatever the number of rows. Every output is summed over inputs in order, as attention sums
over columns, so a row depends on itself alone and not on the rows beside it.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from .arguments import EXTENT
from .emit import PrimFunc, flat, i64, let, loop, parallel, pointer, prim_func, put, scalar, span, when
from .spec import Sizes
from .vectors import register_tile, zero

POINTERS = ("x", "weight", "out")
SCALARS = {"threads": "int32", "num_rows": "int32", "inputs": "int32", "num_panels": "int32", "x_row": "int64",
           "out_row": "int64"}  # fmt: skip


def product(config: Sizes) -> PrimFunc:
    """Build ``out[r][n] = sum over k of x[r][k] * weight[n // panel][k][n % panel]``, all float32.

    Its arguments are `POINTERS` then `SCALARS`; ``x_row`` and ``out_row`` are strides, in elements.
    """

    def body() -> None:
        handles = [pointer(name, "float32") for name in POINTERS]
        scalars = {name: scalar(name, dtype) for name, dtype in SCALARS.items()}
        x, weight, out = (flat(handle, "float32", EXTENT) for handle in handles)
        _panels(config, x, weight, out, **scalars)

    return prim_func("product", body)


def _panels(
    config: Sizes, x: Any, weight: Any, out: Any, *, threads: Any, num_rows: Any, inputs: Any, num_panels: Any,
    x_row: Any, out_row: Any,
) -> None:  # fmt: skip
    most, lanes, width = config.tokens, config.lanes, config.panel
    tiles = let(T.truncdiv(num_rows + (most - 1), most))

    def tile(rows: int, first: Any, panel: Any) -> None:
        base = let(i64(panel) * i64(inputs) * width)
        sources = [let(i64(first + r) * x_row) for r in range(rows)]
        register_tile(
            rows, width // lanes, lanes, inputs,
            init=lambda r, j: zero(lanes),
            left=lambda r, k: x[sources[r] + i64(k)],
            right=lambda k, j: weight[span(base + i64(k) * width + j * lanes, lanes)],
            done=lambda r, j, total: put(
                out, span(i64(first + r) * out_row + i64(panel) * width + j * lanes, lanes), total
            ),
        )  # fmt: skip

    with parallel(threads) as thread:
        begin, end = (let(_share(num_panels, thread + i, threads)) for i in range(2))
        with loop(begin, end) as panel, loop(tiles) as t:
            first, last = (let(_share(num_rows, t + i, tiles)) for i in range(2))
            for rows in range(1, most + 1):
                with when(last - first == rows):
                    tile(rows, first, panel)


def _share(count: Any, part: Any, parts: Any) -> Any:
    """Where part number ``part`` of ``parts`` even parts of ``count`` begins."""
    return T.truncdiv(count * part, parts)
