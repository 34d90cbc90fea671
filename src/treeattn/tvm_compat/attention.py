"""TVM's attention functions: their arguments by name, and what a sequence's metadata says. `cpu` and `gpu` build them.

Every function names its arguments in TVM's order; shapes are by name, so one table serves them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tvm.script import tirx as T

from ..checks import number
from ..kernels.emit import Buffer, Expr, i32, let, matched, require, scalar, symbol, tensor
from ..kernels.spec import KernelSpec
from ..logits import LARGEST
from .rotation import Rotation
from .spans import SequenceRows

ENDLESS = 2**31 - 1

SCALARS = {
    "rope_scale": "float32", "rope_theta": "float32", "sm_scale": "float32", "causal": "int32", "rotary_mode": "int32"
}  # fmt: skip
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
        given = {name: scalar(name, SCALARS[name]) if name in SCALARS else tensor(f"var_{name}") for name in names}
        shapes = self._shapes()
        self.values = {
            name: value if name in SCALARS else matched(value, *shapes[name]) for name, value in given.items()
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
            self.q_total, self.q_len = rows, i32(1)
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
        return let(b * self.q_len), self.q_len


Bound = Callable[[Call, Expr, Expr, Expr, Expr], Expr]
"""A row's bound, from the call, the sequence, the row, its ``q_len`` and ``kv_len``."""


class Nodes(Protocol):
    """The nodes of the batch's trees."""

    def depth(self, b: Expr, node: Expr) -> Expr:
        """Return the depth of a node of sequence ``b``."""


@dataclass(frozen=True)
class Attention:
    """One of TVM's attention functions: what tells it from the others.

    Parameters
    ----------
    name : str
        Its global symbol.
    kind : str
        Of `SIGNATURES`.
    heads : Heads
        Head counts and dimensions.
    leaves : mapping of str
        Tests of the mask, joined by ``&``, each with the bound of a row.
    rope : Rotation, optional
        How angles are made, for functions with a ``rotary_mode``.
    sm_scale : float, optional
        For functions that are not given it.
    """

    name: str
    kind: str
    heads: Heads
    leaves: Mapping[str, Bound]
    rope: Rotation | None = None
    sm_scale: float | None = None

    def spec(self, *, rotated: bool) -> KernelSpec:
        """Return what its kernel computes, with keys rotated as they are read or not."""
        h, forms = self.heads, [(test, k) for k, test in enumerate(self.leaves)]
        mask: tuple[Any, ...] = forms[0] if len(forms) == 1 else ("&", *forms)
        rope = (self.rope.style, self.rope.rotary_dim) if self.rope and rotated else None
        return KernelSpec(
            h.d_qk, h.d_v, h.dtype, h.dtype, mask, rope=rope, shared=self.kind == "latent",
            moved=rope is not None or h.sliding_window,
        )  # fmt: skip

    def rotates(self, call: Call, most_arrays: float = math.inf) -> bool:
        """Return whether keys can be rotated as they are read; where they cannot, ``rotary_mode`` 1 is refused."""
        arrays, d = sum(name not in SCALARS for name in call.values), self.heads.d_qk
        reason = f"would bind {arrays} arrays, more than {most_arrays}" if arrays > most_arrays else ""
        reason = reason or (f"turns pairs of dims, which {d} do not make" if d % 2 else "")
        if self.rope and reason:
            require(call["rotary_mode"] != 1, f"rotary_mode 1 {reason}")
        return self.rope is not None and not reason

    def scale(self, call: Call) -> Expr:
        """Return ``sm_scale``."""
        return call["sm_scale"] if "sm_scale" in call else T.float32(number(self.sm_scale, "sm_scale", LARGEST))

    def sequence(self, call: Call, b: Expr, nodes: Nodes | None, *, moved: bool) -> SequenceRows:
        """Read a sequence's metadata."""
        q_begin, q_len = call.rows_of(b)
        kv_len = call.kv_len_of(b)
        tree_begin = let(call["tree_indptr"][b]) if nodes else i32(0)
        prefix_len = let(kv_len - (call["tree_indptr"][b + 1] - tree_begin)) if nodes else kv_len
        page_begin = let(call["page_indptr"][b]) if "page_indptr" in call else b

        def bounds(row: Expr) -> list[Expr]:
            return [bound(call, b, row, q_len, kv_len) for bound in self.leaves.values()]

        seq = SequenceRows(q_begin, q_len, kv_len, page_begin, prefix_len, bounds, tree_begin)
        return replace(seq, moves=_moves(call, b, seq, nodes)) if moved else seq


def is_above(tree: Buffer, above: Expr, node: Expr) -> Expr:
    """Return whether a node is an ancestor of another."""
    return T.And(tree[above, 0] < tree[node, 0], tree[node, 0] < tree[above, 1])


def _moves(call: Call, b: Expr, seq: SequenceRows, nodes: Nodes | None) -> tuple[Expr, Expr, Expr, Expr]:
    """Position of column 0, and where a sliding window's columns lie."""
    zero = i32(0)
    if "k_rope_pos_offset" in call:
        begin = let(call["k_rope_pos_offset"][b])
    elif nodes:  # a ragged tree: its first query tells where its root stands
        first = let(call["tree_indptr"][b + 1] - seq.q_len)
        place = seq.prefix_len + nodes.depth(b, T.max(first, 0))
        begin = let(T.if_then_else(seq.q_len > 0, call["q_rope_position"][seq.q_begin] - place, zero))
    else:
        begin = zero
    if not call.heads.sliding_window:
        return begin, zero, zero, zero
    sink, offset = let(call["length_info"][2, b]), let(call["length_info"][1, b])
    return begin, sink, zero, let(offset - sink)


def strides(call: Call) -> dict[str, int]:
    """Return the strides of q, keys, values and outputs, in elements, by the names of kernels' arguments."""
    h = call.heads
    if call.kind == "latent":
        steps = {name: (h.page_size * h.d_qk, h.d_qk, 0) for name in "kv"}
    elif "pages" in call:
        slot, head = h.d_qk, h.page_size * h.d_qk
        steps = {name: (2 * h.kv_heads * head, slot, head) for name in "kv"}
    else:
        steps = {name: (h.kv_heads * d, h.kv_heads * d, d) for name, d in (("k", h.d_qk), ("v", h.d_v))}
    found = {"q_token": h.q_heads * h.d_qk, "q_head": h.d_qk, "out_token": h.q_heads * h.d_v, "out_head": h.d_v}
    for name, sizes in steps.items():
        found |= {f"{name}_{step}": size for step, size in zip(("page", "slot", "head"), sizes, strict=True)}
    return found


def value_offset(call: Call) -> int:
    """Return how far values begin behind keys that share their array."""
    h = call.heads
    return h.kv_heads * h.page_size * h.d_qk if "pages" in call and call.kind != "latent" else 0
