"""The CPU template: one function for every mask, storage, dtype and head shape.

Work items come from the plan, balanced over threads. Every item is a tile of rows; what differs between a tile of one
row and one of a hundred is the row tile's class, not the walk, the masks or the order of summation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from .emit import (
    Buffer,
    Expr,
    PrimFunc,
    flat,
    i32,
    i64,
    let,
    loop,
    parallel,
    part,
    pointer,
    prim_func,
    put,
    registers,
    scalar,
    span,
    when,
    while_,
)
from .rows_few import FewRows
from .rows_many import ManyRows
from .spec import KernelSpec, Sizes
from .vectors import from_float, pieces
from .walk import Pool, Tile, Walk
from .workspace import workspace_floats

ITEM_FIELDS = 7  # kind, sequence, kv head, first row, rows, first span, past the last span
SEQ_FIELDS = 4  # q_begin, page_begin, prefix_len, node_begin
EXTENT = 2**48  # of pools, whose size the kernel need not know

POINTERS = (
    ("q", "q"),
    ("k", "kv"),
    ("v", "kv"),
    ("out", "q"),
    ("lse", "float32"),
    ("items", "int32"),
    ("item_indptr", "int32"),
    ("seqs", "int32"),
    ("spans", "int32"),
    ("page_ids", "int32"),
    ("bounds", "int32"),
    ("nodes", "int32"),
    ("workspace", "float32"),
    ("row_bounds", "int32"),
)
SCALARS = (
    ("threads", "int32"),
    ("group", "int32"),
    ("page_size", "int32"),
    ("bounds_stride", "int32"),
    ("sm_scale", "float32"),
    ("q_token", "int64"),
    ("q_head", "int64"),
    ("out_token", "int64"),
    ("out_head", "int64"),
    ("lse_token", "int64"),
    ("k_page", "int64"),
    ("k_slot", "int64"),
    ("k_head", "int64"),
    ("v_page", "int64"),
    ("v_slot", "int64"),
    ("v_head", "int64"),
)


class Arguments:
    """The function's arguments, and the few ways kernels use them."""

    q: Buffer
    out: Buffer
    lse: Buffer
    items: Buffer
    item_indptr: Buffer
    seqs: Buffer
    spans: Buffer
    page_ids: Buffer
    bounds: Buffer
    nodes: Buffer
    workspace: Buffer
    threads: Expr
    group: Expr
    page_size: Expr
    bounds_stride: Expr
    sm_scale: Expr
    q_token: Expr
    q_head: Expr
    out_token: Expr
    out_head: Expr
    lse_token: Expr

    def __init__(self, spec: KernelSpec, config: Sizes) -> None:
        self.spec, self.config = spec, config
        dtypes = {"q": spec.q_dtype, "kv": spec.kv_dtype}
        pointers = [(name, dtypes.get(dtype, dtype)) for name, dtype in POINTERS]
        handles = [pointer(name, dtype) for name, dtype in pointers]
        values = {name: scalar(name, dtype) for name, dtype in SCALARS}
        values |= {name: flat(handle, dtype, EXTENT) for (name, dtype), handle in zip(pointers, handles, strict=True)}
        self.k, self.v = (Pool(values[x], *(values[f"{x}_{step}"] for step in ("page", "slot", "head"))) for x in "kv")
        self.row_bounds, self.row_stride = values["row_bounds"], config.rows
        for name in values.keys() & Arguments.__annotations__.keys():
            setattr(self, name, values[name])

    def of_thread(self, thread: Expr) -> None:
        """Take the thread's own part of the scratch memory."""
        self.base = let(i64(thread) * workspace_floats(self.spec, self.config))
        size = self.spec.num_bounds * self.row_stride
        self.row_bounds = part(self.row_bounds, size, thread * size, "int32")

    def tile(self, item: Expr) -> Tile:
        """Read a work item."""
        kind, seq, head, row_begin, num_rows, span_begin, span_end = (
            let(self.items[item * ITEM_FIELDS + field]) for field in range(ITEM_FIELDS)
        )
        q_begin, page_begin, prefix_len, node_begin = (let(self.seqs[seq * SEQ_FIELDS + i]) for i in range(SEQ_FIELDS))
        return Tile(
            kind, head, row_begin, num_rows, span_begin, span_end, q_begin, page_begin, prefix_len, node_begin,
            self.group,
        )  # fmt: skip

    def q_address(self, tile: Tile, row: Expr) -> Expr:
        """Return the offset of a row's query."""
        return let(i64(tile.token(row)) * self.q_token + i64(tile.q_head(row)) * self.q_head)

    def stage_bounds(self, tile: Tile, row: Expr, real: Expr) -> None:
        """Copy the bounds of row ``real`` to place ``row`` of the tile, for masks of partial blocks."""
        token = let(tile.token(real))
        for k in range(self.spec.num_bounds if self.spec.mask[0] != "full" else 0):
            put(self.row_bounds, k * self.row_stride + row, self.bounds[k * self.bounds_stride + token])

    def store_row(self, tile: Tile, row: Expr, values: Callable[[int, int], Expr]) -> None:
        """Store ``values(dim, lanes)`` of a row in the output."""
        at = let(i64(tile.token(row)) * self.out_token + i64(tile.q_head(row)) * self.out_head)
        for dim, lanes in pieces(self.spec.d_v):
            put(self.out, span(at + i64(dim), lanes), from_float(values(dim, lanes), self.spec.q_dtype, lanes))

    def store_lse(self, tile: Tile, row: Expr, maximum: Expr, denominator: Expr) -> None:
        """Store the base-2 log-sum-exp of a row."""
        at = i64(tile.token(row)) * self.lse_token + i64(tile.q_head(row))
        put(self.lse, at, maximum + T.log2(denominator))


def attention(spec: KernelSpec, config: Sizes) -> PrimFunc:
    """Build the attention function of a spec for a tile configuration.

    Its arguments are `POINTERS` then `SCALARS`; items are those of `treeattn.plan`.
    """

    def body() -> None:
        args = Arguments(spec, config)
        with parallel(args.threads) as thread:
            args.of_thread(thread)
            tiles = row_tiles(spec, config, args)
            walk = Walk(config.columns, args, spec.mask)
            with loop(args.item_indptr[thread], args.item_indptr[thread + 1]) as item:
                _run_item(args.tile(item), walk, tiles)

    return prim_func("attention", body)


def row_tiles(spec: KernelSpec, config: Sizes, args: Arguments) -> list[Any]:
    """Return the row tiles, in the order of an item's ``kind``: few rows by `TileConfig.few`, then many."""
    few = [FewRows(rows, spec, config, args) for rows in config.few]
    return [*few, ManyRows(spec, config, args)]


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
            dispatch(lambda row_tile: row_tile.block(tile, walk, parity))
        put(state, 0, 1 - parity)
        put(state, 1, T.Select(walk.count[1 - parity] > 0, i32(1), i32(0)))
    dispatch(lambda row_tile: row_tile.end(tile))
