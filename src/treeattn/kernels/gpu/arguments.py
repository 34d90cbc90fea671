"""The arguments of the GPU kernels: eight buffers, the least that every WebGPU device binds, and offsets and strides.

All of a plan's integers are one buffer, all its floats another. ``plan`` begins with a header (`HEADER`) that says
where the parts of both begin; ``tables`` begins with `TABLE_HEADER`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tvm.script import tirx as T

from ..arguments import PlanArguments
from ..emit import (
    Buffer,
    Expr,
    PrimFunc,
    all_of,
    device_func,
    either,
    f32,
    flat,
    launch,
    let,
    part,
    pointer,
    put,
    scalar,
    wide,
)
from ..predicates import Column
from ..rotation import LOW, Angle, angle, turned
from ..softmax import LOG2_E, start
from ..spec import KernelSpec
from ..walk import Pool, Tile
from .elements import Elements, declared

POINTERS = {
    "q": "q", "k": "kv", "v": "kv", "out": "q", "lse": "float32", "partial": "float32", "plan": "int32",
    "tables": "float32",
}  # fmt: skip
PARTS = ("items", "merges", "seqs", "spans", "page_ids", "bounds", "nodes", "positions")
"""Parts of ``plan``, in order. An item is (partial state or -1, sequence, kv head, first row, rows, first span, past
the last span); a merge is the same, of a tile that was split, with partial states in place of spans."""
TABLES = ("rope_low", "rope_high", "alibi", "sink_logits")
"""Parts of ``tables``, in order."""
VALUES = ("bounds_stride", "page_size", "group", "q_heads")
HEADER = (*PARTS, *TABLES, *VALUES)
"""Fields of ``plan``'s header: where the parts of both buffers begin, then values."""
TABLE_HEADER = ("sm_scale", "cap_limit", "cap_inverse", "minus_infinity")  # WGSL cannot write an infinity
OFFSETS = (
    "q_at", "q_token", "q_head", "k_at", "k_page", "k_slot", "k_head", "v_at", "v_page", "v_slot", "v_head", "out_at",
    "out_token", "out_head",
)  # fmt: skip
"""Scalar arguments in elements, of the target's index dtype; before them comes the number of blocks, int32."""
LEAST_EXTENT = 2**31 - 1  # of buffers, whose size the kernel need not know
STATE_FIELDS = 2  # of a row's partial state, after its sums: maximum and denominator


def declare(spec: KernelSpec, traits: Any) -> dict[str, Any]:
    """Declare a kernel's arguments."""
    dtypes = {"q": spec.q_dtype, "kv": spec.kv_dtype}
    memory = {name: dtypes.get(dtype, dtype) for name, dtype in POINTERS.items()}
    memory = {name: dtype if dtype == "int32" else declared(dtype, traits) for name, dtype in memory.items()}
    handles = {name: pointer(name, dtype) for name, dtype in memory.items()}
    scalars = {"num_blocks": scalar("num_blocks", "int32")}
    scalars |= {name: scalar(name, traits.index) for name in OFFSETS}
    extent = extent_of(traits)
    return scalars | {name: flat(handles[name], dtype, extent) for name, dtype in memory.items()}


def extent_of(traits: Any) -> int:
    """Return the most elements of an array that a GPU's offsets reach, or without one a CPU's."""
    return LEAST_EXTENT if traits and traits.index == "int32" else 2**48


def tile_kernel(row_tile: Any, spec: KernelSpec, config: Any, traits: Any) -> PrimFunc:
    """Build the attention kernel whose blocks each run one item as a ``row_tile(spec, config, args, tile, thread)``."""

    def body() -> None:
        values = declare(spec, traits)
        with launch(values["num_blocks"], config.threads) as (block, thread):
            args = GpuArguments(spec, traits, values)
            row_tile(spec, config, args, args.tile(block), thread).run()

    return device_func("attention", body)


class TileArguments:
    """What row tiles ask of a kernel's arguments, whoever plans their work."""

    spans: Buffer
    nodes: Buffer
    positions: Buffer
    alibi: Buffer
    sink_logits: Buffer
    page_size: Expr
    q_heads: Expr
    sm_scale: Expr
    cap_limit: Expr
    cap_inverse: Expr
    minus_infinity: Expr

    def __init__(self, spec: KernelSpec, traits: Any, values: dict[str, Any]) -> None:
        self.spec, self.index, self.values = spec, traits.index, values
        self.lse, self.partial = values["lse"], values.get("partial")
        self.q, self.out = (Elements(values[name], spec.q_dtype, traits) for name in ("q", "out"))
        self.k, self.v = (self._pool(name, Elements(values[name], spec.kv_dtype, traits)) for name in "kv")

    def _pool(self, name: str, data: Elements) -> Pool:
        page, slot, head = (self.values[f"{name}_{step}"] for step in ("page", "slot", "head"))
        return Pool(data, page, slot, head, self.index)

    def page_id(self, tile: Tile, page: Expr) -> Expr:
        """Return where a page of the tile's sequence lies."""
        raise NotImplementedError

    def bound(self, tile: Tile, leaf: int, token: Expr) -> Expr:
        """Return the bound of a query token for a leaf of the mask."""
        raise NotImplementedError

    def angle(self, position: Expr) -> Any:
        """Return the angle of a position (`treeattn.kernels.rotation`)."""
        raise NotImplementedError

    def slots(self, tile: Tile, column: Expr) -> tuple[Expr, Expr]:
        """Return where key and value of a column begin."""
        slot = let(tile.moves.slot(column)) if tile.moves else column
        page = let(T.truncdiv(slot, self.page_size))
        offset = let(slot - page * self.page_size)
        page_id = let(self.page_id(tile, page))
        key, value = (pool.address(page_id, offset, tile.head) for pool in (self.k, self.v))
        return self.values["k_at"] + key, self.values["v_at"] + value

    def column(self, tile: Tile, index: Expr) -> Column:
        """Return a column for the tests of the mask."""
        return Column(index, tile.prefix_len, tile.node_begin, self.nodes, tile.position_of)

    def start_row(
        self, row_tile: Any, tile: Tile, row: Expr, *, place: int, places: int, counts_sink: Sequence[Expr]
    ) -> None:
        """Prepare one of a thread's ``places`` for a row: empty state, bounds, and what its logits need.

        Threads that share a row count its sink logit once, where all of ``counts_sink`` hold; of a split tile, merging
        adds it.
        """
        spec, token, head = self.spec, let(tile.token(row)), let(tile.q_head(row))
        maximum, denominator = start(self.sink_logits[head] if "sinks" in spec.logits else None)
        if "sinks" in spec.logits:
            first = let(all_of(tile.kind < 0, *counts_sink))
            denominator = T.Select(first, denominator, f32(0.0))
        put(row_tile.maximum, place, maximum)
        put(row_tile.denominator, place, denominator)
        if "alibi" in spec.logits:
            put(row_tile.slopes, place, self.alibi[head] * f32(LOG2_E))
            put(row_tile.positions, place, T.cast(self.positions[token], "float32"))
        for k in range(spec.num_bounds if spec.masks else 0):
            put(row_tile.bounds, k * places + place, self.bound(tile, k, token))

    def query(self, tile: Tile, row: Expr, dim: Expr) -> Expr:
        """Load an element of a row's query as float32, rotated, in base-2 units."""
        token = let(tile.token(row))
        position = self.positions[token] if self.spec.rope else None
        at = let(self.row_at("q", token, tile.q_head(row)))
        return self._turned(self.q, at, dim, position) * (self.sm_scale * f32(LOG2_E))

    def key(self, slot: Expr, dim: Expr, position: Expr | None) -> Expr:
        """Load an element of the key at ``slot`` as float32, rotated."""
        return self._turned(self.k.data, slot, dim, position)

    def value(self, slot: Expr, dim: Expr) -> Expr:
        """Load an element of the value at ``slot`` as float32."""
        return self.v.data[let(slot + wide(dim, self.index))]

    def out_at(self, tile: Tile, row: Expr) -> Expr:
        """Return where a row of the output begins."""
        return let(self.row_at("out", tile.token(row), tile.q_head(row)))

    def store_lse(self, tile: Tile, row: Expr, maximum: Expr, denominator: Expr) -> None:
        """Store the base-2 log-sum-exp of a row."""
        lse = T.Select(denominator == f32(0.0), self.minus_infinity, maximum + T.log2(denominator))
        token, head, heads = (wide(x, self.index) for x in (tile.token(row), tile.q_head(row), self.q_heads))
        put(self.lse, token * heads + head, lse.astype(self.lse.ty.dtype))

    def finish(self, tile: Tile, finished: Callable[[], None], partial: Callable[[], None]) -> None:
        """Store the rows: finished, or, of a split tile, as a partial state."""
        if self.partial is None:
            finished()
        else:
            either(tile.kind < 0, finished, partial)

    def row_at(self, name: str, token: Expr, head: Expr) -> Expr:
        """Return where a row of ``q`` or ``out`` begins."""
        at, of_token, of_head = (self.values[f"{name}_{step}"] for step in ("at", "token", "head"))
        return at + wide(token, self.index) * of_token + wide(head, self.index) * of_head

    def is_aligned(self, name: str, elements: int) -> Expr:
        """Return whether all vectors of an argument begin at multiples of ``elements``."""
        steps = [self.values[at] for at in OFFSETS if at.startswith(f"{name}_")]
        low_bits = T.bitwise_and(functools.reduce(T.bitwise_or, steps), wide(elements - 1, self.index))
        return let(low_bits == wide(0, self.index))

    def _turned(self, data: Elements, at: Expr, dim: Expr, position: Expr | None) -> Expr:
        def load(dim: Expr) -> Expr:
            return data[let(at + wide(dim, self.index))]

        if self.spec.rope is None:
            return load(dim)
        style, rotary_dim = self.spec.rope
        return turned(style, rotary_dim, self.spec.d_qk, self.angle(position), dim, load)


class GpuArguments(TileArguments, PlanArguments):
    """A kernel's arguments where the host has made the plan."""

    partial: Buffer
    merges: Buffer
    page_ids: Buffer
    bounds: Buffer
    rope_low: Buffer
    rope_high: Buffer
    bounds_stride: Expr

    def __init__(self, spec: KernelSpec, traits: Any, values: dict[str, Any]) -> None:
        """Read the headers; called within `launch`."""
        plan, tables = values["plan"], values["tables"]
        header = {name: let(plan[i]) for i, name in enumerate(HEADER)}
        for name in PARTS:
            setattr(self, name, part(plan, LEAST_EXTENT, header[name], "int32"))
        for name in TABLES:
            setattr(self, name, part(tables, LEAST_EXTENT, header[name]))
        for name in VALUES:
            setattr(self, name, header[name])
        for i, name in enumerate(TABLE_HEADER):
            setattr(self, name, let(tables[i]))
        super().__init__(spec, traits, values)

    def page_id(self, tile: Tile, page: Expr) -> Expr:
        """Return where a page of the tile's sequence lies."""
        return self.page_ids[tile.page_begin + page]

    def bound(self, tile: Tile, leaf: int, token: Expr) -> Expr:
        """Return the bound of a query token for a leaf of the mask."""
        return self.bounds[leaf * self.bounds_stride + token]

    def angle(self, position: Expr) -> Angle:
        """Return the angle of a position, from the tables."""
        assert self.spec.rope is not None
        return angle(self.rope_low, self.rope_high, position, self.spec.rope[1], LOW)
