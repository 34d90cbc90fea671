"""The CPU template: one function for every mask, storage, dtype and head shape.

Work items come from the plan, balanced over threads. Every item is a tile of rows; what differs between a tile of one
row and one of a hundred is the row tile's class, not the walk, the masks or the order of summation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from .arguments import Arguments, declare
from .emit import PrimFunc, i32, let, loop, parallel, prim_func, put, registers, when, while_
from .rows_few import FewRows
from .rows_many import ManyRows
from .spec import KernelSpec, Sizes
from .walk import Tile, Walk


def attention(spec: KernelSpec, config: Sizes) -> PrimFunc:
    """Build the attention function of a spec for a tile configuration.

    Its arguments are `POINTERS` then `SCALARS`; items are those of `treeattn.planner`.
    """

    def body() -> None:
        run_items(Arguments(spec, config, declare(spec)))

    return prim_func("attention", body)


def run_items(args: Arguments) -> None:
    """Run every work item, each thread its own."""
    spec, config = args.spec, args.config
    with parallel(args.threads) as thread:
        args.of_thread(thread)
        tiles = row_tiles(spec, config, args)
        walk = Walk(max(config.columns, config.few_columns), args, spec.mask)
        with loop(args.item_indptr[thread], args.item_indptr[thread + 1]) as item:
            _run_item(args.tile(item), walk, tiles)


def row_tiles(spec: KernelSpec, config: Sizes, args: Arguments) -> list[Any]:
    """Return the row tiles, in the order of an item's ``kind``: few rows by `TileConfig.few`, then many."""
    few = [FewRows(rows, spec, config, args) for rows in config.few]
    return [*few, ManyRows(spec, config, args)] if config.has_many else few


def _run_item(tile: Tile, walk: Walk, tiles: list[Any]) -> None:
    def dispatch(method: Callable[[Any], None]) -> None:
        for kind, row_tile in enumerate(tiles):
            with when(tile.kind == kind):
                method(row_tile)

    dispatch(lambda row_tile: row_tile.begin(tile))
    limit = registers(1, "int32")
    dispatch(lambda row_tile: put(limit, 0, row_tile.limit(tile)))
    state = registers(2, "int32")  # parity of the block at work, whether to go on
    put(state, 0, i32(0))
    put(state, 1, i32(1))
    walk.start(tile)
    with while_(state[1] == 1):
        parity = let(state[0])
        walk.fill(tile, let(1 - parity), limit[0])
        with when(walk.count[parity] > 0):
            block = walk.block(tile, parity)
            dispatch(lambda row_tile: row_tile.block(walk, block))
        put(state, 0, 1 - parity)
        put(state, 1, T.Select(walk.count[1 - parity] > 0, i32(1), i32(0)))
    dispatch(lambda row_tile: row_tile.end(tile))
