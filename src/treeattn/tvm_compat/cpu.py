"""TVM's attention functions on the CPU: the plan is made inside, the template is the package's."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ..kernels.cpu import run_items
from ..kernels.emit import Buffer, Expr, PrimFunc, allocate, flattened, i32, i64, let, loop, prim_func, put, when
from ..kernels.predicates import NODE_FIELDS
from ..kernels.spec import Sizes
from .attention import Attention, Call, is_above, strides, value_offset
from .inline_plan import InlineArguments, InlinePlan, Source, angles
from .rotation import Rotation
from .spans import SequenceRows

LOW_ROWS = 128  # of the angle tables, which are filled at every call


def attention_function(made: Attention, config: Sizes) -> PrimFunc:
    """Build an attention function for a tile configuration."""

    def body() -> None:
        call = Call(made.kind, made.heads)
        rope = made.rope if made.rotates(call) else None
        spec = made.spec(rotated=rope is not None)
        nodes = _Nodes(call, rope) if "tree" in made.leaves else None

        def read(b: Expr) -> SequenceRows:
            return made.sequence(call, b, nodes, moved=spec.moved)

        if nodes:
            nodes.emit()
        source = Source(call.num_seqs, call.q_total, read, call.heads.kv_heads, call.heads.group)
        plan = InlinePlan(spec, config, source, list(made.leaves))
        plan.emit()
        values = plan.arrays | _memory(call) | {"sm_scale": made.scale(call)}
        values |= _rotation(rope, call) if rope else {}
        values["nodes"] = nodes.table if nodes else values["bounds"]
        run_items(InlineArguments(spec, config, values))

    return prim_func(made.name, body)


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
                    at = node * NODE_FIELDS + 2
                    put(self.table, at, self.table[at] + T.Select(is_above(tree, above, node), i32(1), i32(0)))

    def depth(self, b: Expr, node: Expr) -> Expr:
        """Return the depth of a node of sequence ``b``."""
        return self.table[node * NODE_FIELDS + 2]


def _rotation(rope: Rotation, call: Call) -> dict[str, Any]:
    """Fill the angle tables up to the last position, if the mode asks for rotation."""
    wanted = call["rotary_mode"] == 1
    last = let(_last_position(call))
    theta = T.cast(call["rope_theta"], "float64")
    rows = let(T.truncdiv(last, LOW_ROWS) + 1)
    low, high = angles(
        lambda pair: rope.frequency(pair, theta), call["rope_scale"], rope.size, rope.rotary_dim // 2, LOW_ROWS, rows,
        wanted,
    )  # fmt: skip
    positions = flattened(call["q_rope_position"], "int32")
    return {"rope_low": low, "rope_high": high, "positions": positions, "rotates": wanted, "low_rows": LOW_ROWS}


def _last_position(call: Call) -> Expr:
    last = allocate(1, "int32")
    put(last, 0, i32(0))
    with when(call["rotary_mode"] == 1):
        with loop(call.q_total) as token:
            put(last, 0, T.max(last[0], call["q_rope_position"][token]))
        with loop(call.num_seqs) as b:
            offset = call["k_rope_pos_offset"][b] if "k_rope_pos_offset" in call else i32(0)
            put(last, 0, T.max(last[0], offset + call.kv_len_of(b)))
    return last[0]


def _memory(call: Call) -> dict[str, Any]:
    """Buffers and strides of q, keys, values and outputs, by the names of `Arguments`."""
    h = call.heads
    values: dict[str, Any] = {name: i64(size) for name, size in strides(call).items()}
    values |= {"lse_token": i64(h.q_heads), "page_size": i32(h.page_size)}
    values |= {name: flattened(call[at], h.dtype) for name, at in (("q", "q"), ("out", "output"))}
    values["lse"] = flattened(call["lse"], h.dtype if call.kind.startswith("dense") else "float32")
    if "pages" in call:
        pages, values["page_ids"] = call["pages"], flattened(call["page_values"], "int32")
        k, v = flattened(pages, h.dtype), flattened(pages, h.dtype, value_offset(call))
    else:
        values["page_ids"] = _first_rows(call)
        k, v = flattened(call["k"], h.dtype), flattened(call["v"], h.dtype)
    return values | {"k": k, "v": v}


def _first_rows(call: Call) -> Buffer:
    """Page ids of ragged memory: one endless page a sequence, at its first row."""
    if "kv_indptr" in call:
        return flattened(call["kv_indptr"], "int32")
    rows = allocate(call.num_seqs, "int32")
    with loop(call.num_seqs) as b:
        put(rows, b, b * call.kv_len)
    return rows
