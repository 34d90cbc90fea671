"""The arguments of the CPU function, and the few ways kernels use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm.script import tirx as T

from .emit import Buffer, Expr, broadcast, either, f32, flat, i64, let, part, pointer, put, scalar, span
from .rotation import LOW, Load, Store, angle, rotate
from .softmax import LOG2_E, start
from .spec import KernelSpec, Sizes
from .vectors import from_float, pieces, to_float
from .walk import Moves, Pool, Tile, Walk
from .workspace import Layout, workspace_floats

ITEM_FIELDS = 7  # kind, sequence, kv head, first row, rows, first span, past the last span
FIXED_FIELDS = 4  # of a sequence: q_begin, page_begin, prefix_len, node_begin
SEQ_FIELDS = 8  # and, where columns moved: position_begin, kept, gap, skip
MOST_FEW = 8  # rows of the largest tile for few rows
EXTENT = 2**48  # of pools, whose size the kernel need not know

POINTERS = {
    "q": "q", "k": "kv", "v": "kv", "out": "q", "lse": "float32", "items": "int32", "item_indptr": "int32",
    "seqs": "int32", "spans": "int32", "page_ids": "int32", "bounds": "int32", "positions": "int32", "nodes": "int32",
    "rope_low": "float32", "rope_high": "float32", "alibi": "float32", "sink_logits": "float32",
    "workspace": "float32", "row_bounds": "int32",
}  # fmt: skip
SCALARS = {
    "threads": "int32", "group": "int32", "page_size": "int32", "bounds_stride": "int32", "sm_scale": "float32",
    "cap_limit": "float32", "cap_inverse": "float32", "q_token": "int64", "q_head": "int64", "out_token": "int64",
    "out_head": "int64", "lse_token": "int64", "k_page": "int64", "k_slot": "int64", "k_head": "int64",
    "v_page": "int64", "v_slot": "int64", "v_head": "int64",
}  # fmt: skip


def declare(spec: KernelSpec) -> dict[str, Any]:
    """Declare the function's arguments."""
    dtypes = {"q": spec.q_dtype, "kv": spec.kv_dtype}
    pointers = [(name, dtypes.get(dtype, dtype)) for name, dtype in POINTERS.items()]
    handles = [pointer(name, dtype) for name, dtype in pointers]
    values = {name: scalar(name, dtype) for name, dtype in SCALARS.items()}
    return values | {name: flat(handle, dtype, EXTENT) for (name, dtype), handle in zip(pointers, handles, strict=True)}


class PlanArguments:
    """What a plan tells a kernel, on every target."""

    spec: KernelSpec
    items: Buffer
    seqs: Buffer
    group: Expr

    def tile(self, item: Expr) -> Tile:
        """Read a work item."""
        kind, seq, head, row_begin, num_rows, span_begin, span_end = (
            let(self.items[item * ITEM_FIELDS + field]) for field in range(ITEM_FIELDS)
        )
        q_begin, page_begin, prefix_len, node_begin, *moves = (
            let(self.seqs[seq * SEQ_FIELDS + i]) for i in range(SEQ_FIELDS if self.spec.moved else FIXED_FIELDS)
        )
        return Tile(
            kind, head, row_begin, num_rows, span_begin, span_end, q_begin, page_begin, prefix_len, node_begin,
            Moves(*moves) if moves else None, self.group,
        )  # fmt: skip


class Scratch:
    """A thread's scratch memory for a row tile: its parts by the names of `workspace`."""

    scores: Buffer
    seen: Buffer
    queries: Buffer
    keys: Buffer
    sums: Buffer
    maximum: Buffer
    denominator: Buffer
    positions: Buffer
    slopes: Buffer

    def __init__(self, args: Arguments, layout: Layout) -> None:
        for name, (offset, size) in layout.items():
            setattr(self, name, part(args.workspace, max(size, 1), args.base + offset))


class Arguments(PlanArguments):
    """The function's arguments, and the few ways kernels use them."""

    q: Buffer
    out: Buffer
    lse: Buffer
    item_indptr: Buffer
    spans: Buffer
    page_ids: Buffer
    bounds: Buffer
    positions: Buffer
    nodes: Buffer
    rope_low: Buffer
    rope_high: Buffer
    alibi: Buffer
    sink_logits: Buffer
    workspace: Buffer
    threads: Expr
    page_size: Expr
    bounds_stride: Expr
    sm_scale: Expr
    cap_limit: Expr
    cap_inverse: Expr
    q_token: Expr
    q_head: Expr
    out_token: Expr
    out_head: Expr
    lse_token: Expr
    row_bounds: Buffer

    def __init__(self, spec: KernelSpec, config: Sizes, values: dict[str, Any]) -> None:
        self.spec, self.config = spec, config
        self.k, self.v = (Pool(values[x], *(values[f"{x}_{step}"] for step in ("page", "slot", "head"))) for x in "kv")
        self.row_stride = max(config.rows, MOST_FEW)
        self.rotates: Expr | None = values.get("rotates")  # where rotation is decided at run time
        self.low_rows = values.get("low_rows", LOW)
        known = PlanArguments.__annotations__.keys() | Arguments.__annotations__.keys()
        for name in values.keys() & known:
            setattr(self, name, values[name])

    def of_thread(self, thread: Expr) -> None:
        """Take the thread's own part of the scratch memory."""
        self.base = let(i64(thread) * workspace_floats(self.spec, self.config))
        size = self.spec.num_bounds * self.row_stride
        self.row_bounds = part(self.row_bounds, size, thread * size, "int32")

    def load_query(self, tile: Tile, row: Expr, out: Buffer, at: Expr) -> None:
        """Load a row's query as float32, rotated, in base-2 units."""
        spec, token = self.spec, let(tile.token(row))
        source = let(i64(token) * self.q_token + i64(tile.q_head(row)) * self.q_head)
        scale = let(self.sm_scale * f32(LOG2_E))

        def load(dim: int, lanes: int) -> Expr:
            return to_float(self.q[span(source + i64(dim), lanes)], spec.q_dtype, lanes)

        def store(dim: int, lanes: int, value: Expr) -> None:
            put(out, span(at + dim, lanes), value * broadcast(scale, lanes))

        self._load_rotated(let(self.positions[token]) if spec.rope else None, load, store)

    def load_key(self, walk: Walk, tile: Tile, index: Expr, out: Buffer, at: Expr) -> None:
        """Load the key at ``index`` of the walk's tables as float32, rotated."""
        slot = let(walk.key[index])

        def load(dim: int, lanes: int) -> Expr:
            return to_float(self.k.data[span(slot + i64(dim), lanes)], self.spec.kv_dtype, lanes)

        def store(dim: int, lanes: int, value: Expr) -> None:
            put(out, span(at + dim, lanes), value)

        self._load_rotated(walk.position(tile, index) if self.spec.rope else None, load, store)

    def _load_rotated(self, position: Expr | None, load: Load, store: Store) -> None:
        d = self.spec.d_qk
        style, rotary_dim = self.spec.rope or ("neox", 0)

        def plain() -> None:
            for dim, lanes in pieces(d):
                store(dim, lanes, load(dim, lanes))

        def turned() -> None:
            at = angle(self.rope_low, self.rope_high, position, rotary_dim, self.low_rows)
            rotate(style, rotary_dim, d, at, load, store)

        if self.spec.rope is None:
            plain()
        elif self.rotates is None:
            turned()
        else:
            either(self.rotates, turned, plain)

    def start_row(self, row_tile: Scratch, tile: Tile, row: Expr, real: Expr) -> None:
        """Prepare place ``row`` of a tile for row ``real``: empty state, bounds, and what its logits need."""
        logits, token, head = self.spec.logits, let(tile.token(real)), let(tile.q_head(real))
        maximum, denominator = start(self.sink_logits[head] if "sinks" in logits else None)
        put(row_tile.maximum, row, maximum)
        put(row_tile.denominator, row, denominator)
        if "alibi" in logits:
            put(row_tile.slopes, row, self.alibi[head] * f32(LOG2_E))
            put(row_tile.positions, row, T.cast(self.positions[token], "float32"))
        for k in range(self.spec.num_bounds if self.spec.masks else 0):
            put(self.row_bounds, k * self.row_stride + row, self.bounds[k * self.bounds_stride + token])

    def row_bounds_of(self, rows: Expr, k: int) -> Expr:
        """Return the bounds of leaf ``k`` for places of the tile (an index, or a span of them)."""
        if isinstance(rows, tvm.tirx.Ramp):
            rows = T.Ramp(k * self.row_stride + rows.base, rows.stride, rows.lanes)
        else:
            rows = k * self.row_stride + rows
        return self.row_bounds[rows]

    def store_row(self, tile: Tile, row: Expr, values: Callable[[int, int], Expr]) -> None:
        """Store ``values(dim, lanes)`` of a row in the output."""
        at = let(i64(tile.token(row)) * self.out_token + i64(tile.q_head(row)) * self.out_head)
        for dim, lanes in pieces(self.spec.d_v):
            put(self.out, span(at + i64(dim), lanes), from_float(values(dim, lanes), self.spec.q_dtype, lanes))

    def store_lse(self, tile: Tile, row: Expr, maximum: Expr, denominator: Expr) -> None:
        """Store the base-2 log-sum-exp of a row."""
        at = i64(tile.token(row)) * self.lse_token + i64(tile.q_head(row))
        put(self.lse, at, (maximum + T.log2(denominator)).astype(self.lse.ty.dtype))
