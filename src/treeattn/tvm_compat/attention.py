"""Attention functions with the signatures of TVM's paged KV cache: tensors in, plan made inside, same template.

Every function names its arguments in TVM's order; shapes are by name, so one table serves them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ..kernels.cpu import run_items
from ..kernels.emit import (
    Buffer,
    Expr,
    PrimFunc,
    allocate,
    flattened,
    i32,
    i64,
    let,
    loop,
    matched,
    prim_func,
    put,
    scalar,
    symbol,
    tensor,
    when,
)  # fmt: skip
from ..kernels.predicates import NODE_FIELDS
from ..kernels.spec import KernelSpec, Sizes
from .inline_plan import InlineArguments, InlinePlan, Sequence, Source, angles

ENDLESS = 2**31 - 1
LOW_ROWS = 128  # of the angle tables, which are filled at every call

FLOATS = ("rope_scale", "rope_theta", "sm_scale")
PAGED = ("pages", "page_indptr", "page_values", "length_info")
RAGGED = ("k", "v", "kv_indptr")
ROTARY = ("rotary_mode", "rope_scale", "rope_theta", "sm_scale")
SIGNATURES = {
    "paged": (
        "q", "q_indptr", *PAGED, "k_rope_pos_offset", "q_rope_position", "output", "lse", "causal", *ROTARY,
    ),
    "ragged": (
        "q", "q_indptr", *RAGGED, "q_rope_position", "k_rope_pos_offset", "output", "lse", "causal", *ROTARY,
    ),
    "decode": ("q", *PAGED, "k_rope_pos_offset", "q_rope_position", "output", "lse", *ROTARY),
    "tree_paged": (
        "q", "q_indptr", *PAGED, "k_rope_pos_offset", "q_rope_position", "output", "lse", *ROTARY,
        "tree_indptr", "tree",
    ),
    "tree_ragged": (
        "q", "q_indptr", *RAGGED, "q_rope_position", "tree_indptr", "tree", "output", "lse", *ROTARY,
    ),
    "latent": ("q", "q_indptr", *PAGED, "output", "lse", "causal", "sm_scale"),
    "dense": ("q", "k", "v", "output", "lse"),
    "dense_masked": ("q", "k", "v", "valid_lens", "output", "lse"),
}  # fmt: skip


@dataclass(frozen=True)
class Heads:
    """Head counts, dimensions and page size: compile-time here, as in TVM."""

    q_heads: int
    kv_heads: int
    d_qk: int
    d_v: int
    dtype: str
    page_size: int = ENDLESS
    sliding_window: bool = False

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.q_heads // self.kv_heads


class Call:
    """The arguments of one function, matched to their shapes, and what is read from them."""

    def __init__(self, kind: str, heads: Heads) -> None:
        self.kind, self.heads = kind, heads
        names = SIGNATURES[kind]
        scalars = {name for name in names if name in (*FLOATS, "causal", "rotary_mode")}
        given = {
            name: scalar(name, "float32" if name in FLOATS else "int32") if name in scalars else tensor(f"var_{name}")
            for name in names
        }
        shapes = self._shapes()
        self.values = {
            name: value if name in scalars else matched(value, *shapes[name]) for name, value in given.items()
        }

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def _shapes(self) -> dict[str, tuple[Any, ...]]:
        """Shape, dtype and element offset by argument."""
        h, total, offsets = self.heads, symbol(), symbol()
        batch = offsets - 1 if self.kind == "tree_ragged" else symbol()  # a size must stand bare in some shape
        indptr_size = offsets if self.kind == "tree_ragged" else batch + 1
        self.num_seqs, self.q_total = batch, total
        dims = {"q": h.d_qk, "k": h.d_qk, "v": h.d_v, "output": h.d_v}
        if self.kind.startswith("dense"):
            q_len, kv_len = symbol(), symbol()
            self.q_len, self.kv_len, self.q_total = q_len, kv_len, batch * q_len
            lead: dict[str, tuple[Any, ...]] = {name: (batch, q_len, h.q_heads) for name in ("q", "output")}
            lead |= {name: (batch, kv_len, h.kv_heads) for name in "kv"}
            lse: tuple[Any, ...] = ((batch, q_len, h.q_heads), h.dtype)
        else:
            rows = batch if self.kind == "decode" else total
            self.q_total = rows
            lead = {"q": (rows, h.q_heads), "output": (rows, h.q_heads)}
            kv_total = symbol()
            lead |= {name: (kv_total, h.kv_heads) for name in "kv"}
            lse = ((rows, h.q_heads), "float32")

        def ints(*shape: Expr) -> tuple[Any, ...]:
            return shape, "int32", symbol()

        arrays = {name: ((*shape, dims[name]), h.dtype) for name, shape in lead.items()}
        heads = () if self.kind == "latent" else (2, h.kv_heads)
        return arrays | {
            "lse": lse,
            "pages": ((symbol(), *heads, h.page_size, h.d_qk), h.dtype, symbol("int64")),
            "page_indptr": ints(indptr_size),
            "page_values": ints(symbol()),
            "length_info": ints(3, batch) if h.sliding_window else ints(batch),
            "q_indptr": ints(indptr_size),
            "kv_indptr": ints(indptr_size),
            "k_rope_pos_offset": ints(batch),
            "q_rope_position": ints(self.q_total),
            "tree_indptr": ints(indptr_size),
            "tree": ints(symbol(), 2),
            "valid_lens": ((batch,), "int32"),
        }

    def kv_len_of(self, b: Expr) -> Expr:
        """Return the number of keys of a sequence."""
        if "page_indptr" in self:
            pages = let(self["page_indptr"][b + 1] - self["page_indptr"][b])
            info = self["length_info"]
            last = info[0, b] - info[1, b] + info[2, b] if self.heads.sliding_window else info[b]
            return let(T.if_then_else(pages > 0, (pages - 1) * self.heads.page_size + last, i32(0)))
        if "kv_indptr" in self:
            return let(self["kv_indptr"][b + 1] - self["kv_indptr"][b])
        return self.kv_len

    def rows_of(self, b: Expr) -> tuple[Expr, Expr]:
        """Return the first query token of a sequence and their number."""
        if "q_indptr" in self:
            return let(self["q_indptr"][b]), let(self["q_indptr"][b + 1] - self["q_indptr"][b])
        if self.kind == "decode":
            return b, i32(1)
        return let(b * self.q_len), self.q_len


Bound = Callable[[Call, Expr, Expr, Expr, Expr], Expr]
"""A row's bound, from the call, the sequence, the row, its ``q_len`` and ``kv_len``."""


def attention_function(
    name: str,
    kind: str,
    heads: Heads,
    config: Sizes,
    *,
    leaves: Mapping[str, Bound],
    rope: Rotation | None = None,
    sm_scale: float | None = None,
) -> PrimFunc:
    """Build a function of TVM's family.

    Parameters
    ----------
    name : str
        Its global symbol.
    kind : str
        Of `SIGNATURES`.
    leaves : mapping of str
        Tests of the mask, joined by ``&``, each with the bound of a row.
    rope : Rotation, optional
        How angles are made, for functions with a ``rotary_mode``.
    sm_scale : float, optional
        For functions that are not given it.
    """
    tests = list(leaves)
    forms: list[tuple[Any, ...]] = [(test, k) for k, test in enumerate(tests)]
    mask = forms[0] if len(forms) == 1 else ("&", *forms)
    spec = KernelSpec(
        heads.d_qk, heads.d_v, heads.dtype, heads.dtype, mask,
        rope=(rope.style, rope.rotary_dim) if rope else None, shared=kind == "latent",
        moved=rope is not None or heads.sliding_window,
    )  # fmt: skip

    def body() -> None:
        call = Call(kind, heads)
        nodes = _Nodes(call, rope) if "tree" in leaves else None

        def read(b: Expr) -> Sequence:
            q_begin, q_len = call.rows_of(b)
            kv_len = call.kv_len_of(b)
            tree_begin = let(call["tree_indptr"][b]) if nodes else i32(0)
            prefix_len = let(kv_len - (call["tree_indptr"][b + 1] - tree_begin)) if nodes else kv_len
            page_begin = let(call["page_indptr"][b]) if "page_indptr" in call else b
            moves = _moves(call, b, q_begin, q_len, nodes) if spec.moved else None

            def bounds(row: Expr) -> list[Expr]:
                return [bound(call, b, row, q_len, kv_len) for bound in leaves.values()]

            return Sequence(q_begin, q_len, kv_len, page_begin, prefix_len, bounds, tree_begin, moves)

        if nodes:
            nodes.emit()
        plan = InlinePlan(spec, config, Source(call.num_seqs, call.q_total, read, heads.kv_heads, heads.group), tests)
        plan.emit()
        values = plan.arrays | _memory(call, sm_scale) | (rope.emit(call) if rope else {})
        values["nodes"] = nodes.table if nodes else values["bounds"]
        run_items(InlineArguments(spec, config, values))

    return prim_func(name, body)


class _Nodes:
    """``(enter, exit, depth)`` of the batch's nodes; depth only where angles need it."""

    def __init__(self, call: Call, rope: Rotation | None) -> None:
        self.call, self.rope = call, rope
        self.table = allocate(call["tree"].shape[0] * NODE_FIELDS + 1, "int32")

    def emit(self) -> None:
        tree = self.call["tree"]
        with loop(self.call.num_seqs) as b:
            begin, end = let(self.call["tree_indptr"][b]), let(self.call["tree_indptr"][b + 1])
            with loop(begin, end) as node:
                for field in range(2):
                    put(self.table, node * NODE_FIELDS + field, tree[node, field])
                put(self.table, node * NODE_FIELDS + 2, i32(0))
            if self.rope:
                with when(self.call["rotary_mode"] == 1), loop(begin, end) as node, loop(begin, end) as above:
                    inside = T.And(tree[above, 0] < tree[node, 0], tree[node, 0] < tree[above, 1])
                    at = node * NODE_FIELDS + 2
                    put(self.table, at, self.table[at] + T.Select(inside, i32(1), i32(0)))

    def depth(self, node: Expr) -> Expr:
        return self.table[node * NODE_FIELDS + 2]


@dataclass(frozen=True)
class Rotation:
    """RoPE of a function with ``rotary_mode``: ``frequency(pair, theta)`` in float64, and the size of cos and sin."""

    style: str
    rotary_dim: int
    frequency: Callable[[Expr, Expr], Expr]
    size: float

    def emit(self, call: Call) -> dict[str, Any]:
        """Fill the angle tables up to the last position, if the mode asks for rotation."""
        wanted = call["rotary_mode"] == 1
        last = let(self._last_position(call))
        theta = T.cast(call["rope_theta"], "float64")
        rows = let(T.truncdiv(last, LOW_ROWS) + 1)
        low, high = angles(
            lambda pair: self.frequency(pair, theta), call["rope_scale"], self.size, self.rotary_dim // 2, LOW_ROWS,
            rows, wanted,
        )  # fmt: skip
        positions = flattened(call["q_rope_position"], "int32")
        return {"rope_low": low, "rope_high": high, "positions": positions, "rotates": wanted, "low_rows": LOW_ROWS}

    def _last_position(self, call: Call) -> Expr:
        last = allocate(1, "int32")
        put(last, 0, i32(0))
        with when(call["rotary_mode"] == 1):
            with loop(call.q_total) as token:
                put(last, 0, T.max(last[0], call["q_rope_position"][token]))
            with loop(call.num_seqs) as b:
                offset = call["k_rope_pos_offset"][b] if "k_rope_pos_offset" in call else i32(0)
                put(last, 0, T.max(last[0], offset + call.kv_len_of(b)))
        return last[0]


def _moves(call: Call, b: Expr, q_begin: Expr, q_len: Expr, nodes: _Nodes | None) -> tuple[Expr, Expr, Expr, Expr]:
    """Position of column 0, and where a sliding window's columns lie."""
    zero = i32(0)
    if "k_rope_pos_offset" in call:
        begin = let(call["k_rope_pos_offset"][b])
    elif nodes:  # a ragged tree: its first query tells where its root stands
        first = let(call["tree_indptr"][b + 1] - q_len)
        begin = let(T.if_then_else(q_len > 0, call["q_rope_position"][q_begin] - nodes.depth(T.max(first, 0)), zero))
    else:
        begin = zero
    if not call.heads.sliding_window:
        return begin, zero, zero, zero
    sink, offset = let(call["length_info"][2, b]), let(call["length_info"][1, b])
    return begin, sink, zero, let(offset - sink)


def _memory(call: Call, sm_scale: float | None) -> dict[str, Any]:
    """Buffers and strides of q, keys, values and outputs, by the names of `Arguments`."""
    h, one = call.heads, i64(1)
    values: dict[str, Any] = {name: flattened(call[at], h.dtype) for name, at in (("q", "q"), ("out", "output"))}
    values["lse"] = flattened(call["lse"], h.dtype if call.kind.startswith("dense") else "float32")
    values |= {
        "q_token": i64(h.q_heads * h.d_qk), "q_head": i64(h.d_qk), "out_token": i64(h.q_heads * h.d_v),
        "out_head": i64(h.d_v), "lse_token": i64(h.q_heads), "page_size": i32(h.page_size),
        "sm_scale": T.float32(sm_scale) if sm_scale is not None else call["sm_scale"],
    }  # fmt: skip
    if "pages" in call:
        values["page_ids"] = flattened(call["page_values"], "int32")
        k, v, strides = _paged_memory(call, h)
    else:
        values["page_ids"] = _first_rows(call)
        k, v = flattened(call["k"], h.dtype), flattened(call["v"], h.dtype)
        strides = {name: (h.kv_heads * d, h.kv_heads * d, d) for name, d in (("k", h.d_qk), ("v", h.d_v))}
    values |= {"k": k, "v": v}
    for name, steps in strides.items():
        values |= {
            f"{name}_{step}": i64(size) * one for step, size in zip(("page", "slot", "head"), steps, strict=True)
        }
    return values


def _paged_memory(call: Call, h: Heads) -> tuple[Buffer, Buffer, dict[str, tuple[int, int, int]]]:
    pages = flattened(call["pages"], h.dtype)
    if call.kind == "latent":
        steps = (h.page_size * h.d_qk, h.d_qk, 0)
        return pages, pages, {"k": steps, "v": steps}
    half = h.kv_heads * h.page_size * h.d_qk
    steps = (2 * half, h.d_qk, h.page_size * h.d_qk)
    return pages, flattened(call["pages"], h.dtype, half), {"k": steps, "v": steps}


def _first_rows(call: Call) -> Buffer:
    """Page ids of ragged memory: one endless page a sequence, at its first row."""
    if "kv_indptr" in call:
        return flattened(call["kv_indptr"], "int32")
    rows = allocate(call.num_seqs, "int32")
    with loop(call.num_seqs) as b:
        put(rows, b, b * call.kv_len)
    return rows
