"""TVM's kernel generators, by its names and argument order, from this package's parts.

Every factory that ``tvm.relax.frontend.nn.llm.kv_cache`` lists in ``__all__`` is here under the same name with the same
parameters, and returns a ``tvm.tirx.PrimFunc``, marked as scheduled, that TVM builds and its paged KV cache calls.
docs/from-tvm.md says what differs. Those that TVM gives no target (append, fetch, RoPE) are for the GPU whose target is
in scope (``with target:``), else for the CPU.
"""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import Any

from tvm.script import tirx as T

from ..arrays import INT32_MAX
from ..checks import integer
from ..errors import ShapeError, UnsupportedError
from ..kernels.emit import Expr, i32
from ..schedules.tiles import TILES, TileConfig
from ..targets import GpuTraits, host
from . import cpu, gpu, page_ops
from .attention import ENDLESS, Attention, Call, Heads
from .fused_rope import SplitRotary
from .page_ops import MOST_DIM
from .rotation import rotation
from .target import check_dtype, device_of, in_scope
from .target import check_thread_limits as check_thread_limits
from .target import get_max_num_threads_per_block as get_max_num_threads_per_block

PAGE_SIZE = 16


class AttnKind(enum.IntEnum):
    """How a layer attends, as TVM's cache numbers it."""

    MHA = 0
    MLA = 1
    MHA_SLIDING = 3


class RopeMode(enum.IntEnum):
    """Where RoPE is applied: nowhere, before keys enter the cache, or as they are read."""

    NONE = 0
    NORMAL = 1
    INLINE = 2


def _attention_prefill_cpu(
    h_kv: int,
    h_q: int,
    d: int,
    dtype: str,
    sliding_window: bool,
    rope_scaling: dict[str, Any],
    page_size: int = PAGE_SIZE,
    sliding_window_size: int = 1024,
) -> Any:
    """`_attention_prefill` for the CPU."""
    return _attention_prefill(h_kv, h_q, d, dtype, sliding_window, rope_scaling, None, page_size, sliding_window_size)


def _attention_prefill(
    h_kv: int,
    h_q: int,
    d: int,
    dtype: str,
    sliding_window: bool,
    rope_scaling: dict[str, Any],
    target: Any,
    page_size: int = PAGE_SIZE,
    sliding_window_size: int = 1024,
) -> Any:
    """Prefill over a paged cache; with a sliding window, ``causal`` means cross attention to the past of a chunk."""
    device = device_of(target)
    heads = _heads(h_q, h_kv, d, d, dtype, page_size, sliding_window, device)
    name = _named("batch_prefill_paged_kv", device, sliding_window)

    def past(call: Call, b: Expr, row: Expr, q_len: Expr, kv_len: Expr) -> Expr:
        seen = T.max(kv_len - T.max(sliding_window_size - row - 1, 0), 0)
        return T.if_then_else(call["causal"] > 0, seen, i32(0))

    sliding_window_size = integer(sliding_window_size, "sliding_window_size", -INT32_MAX)
    leaves = {"col_from": past} if sliding_window and sliding_window_size > 0 else {"col_below": _causal}
    return _built(Attention(name, "paged", heads, leaves, rotation(rope_scaling, d)), device)


def _attention_prefill_ragged_cpu(
    h_kv: int, h_q: int, d_qk: int, d_v: int, dtype: str, rope_scaling: dict[str, Any]
) -> Any:
    """`_attention_prefill_ragged` for the CPU."""
    return _attention_prefill_ragged(h_kv, h_q, d_qk, d_v, dtype, rope_scaling, None)


def _attention_prefill_ragged(
    h_kv: int, h_q: int, d_qk: int, d_v: int, dtype: str, rope_scaling: dict[str, Any], target: Any
) -> Any:
    """Prefill over ragged keys and values."""
    device = device_of(target)
    heads, name = _heads(h_q, h_kv, d_qk, d_v, dtype, device=device), _named("batch_prefill_ragged_kv", device)
    return _built(Attention(name, "ragged", heads, {"col_below": _causal}, rotation(rope_scaling, d_qk)), device)


def _attention_prefill_mla(
    h_q: int, d_latent: int, d_rope: int, dtype: str, sliding_window: bool, target: Any, page_size: int = PAGE_SIZE
) -> Any:
    """Prefill and decode over compressed keys and values (MLA, absorbed form)."""
    device = device_of(target)
    d_qk = integer(d_latent, "d_latent", most=MOST_DIM) + integer(d_rope, "d_rope", 0)
    heads = _heads(h_q, 1, d_qk, d_latent, dtype, page_size, sliding_window, device)
    name = "batch_prefill_paged_kv_mla" + ("_sliding_window" if sliding_window else "")
    return _built(Attention(name, "latent", heads, {"col_below": _causal}), device)


def _attention_decode_cpu(
    num_kv_heads: int,
    num_qo_heads: int,
    head_dim: int,
    qkv_dtype: str,
    sliding_window: bool,
    rope_scaling: dict[str, Any],
    page_size: int = PAGE_SIZE,
) -> Any:
    """`_attention_decode` for the CPU."""
    return _attention_decode(
        num_kv_heads, num_qo_heads, head_dim, qkv_dtype, sliding_window, rope_scaling, None, page_size
    )


def _attention_decode(
    num_kv_heads: int,
    num_qo_heads: int,
    head_dim: int,
    qkv_dtype: str,
    sliding_window: bool,
    rope_scaling: dict[str, Any],
    target: Any,
    page_size: int = PAGE_SIZE,
) -> Any:
    """One query token a sequence over a paged cache."""
    device = device_of(target)
    names = "num_qo_heads", "num_kv_heads", "head_dim", "qkv_dtype"
    heads = _heads(num_qo_heads, num_kv_heads, head_dim, head_dim, qkv_dtype, page_size, sliding_window, device, names)
    name = _named("batch_decode_paged_kv", device, sliding_window)
    return _built(Attention(name, "decode", heads, {"full": _nothing}, rotation(rope_scaling, head_dim)), device)


def tree_attn_cpu(h_kv: int, h_q: int, d: int, dtype: str, rope_scaling: dict[str, Any]) -> Any:
    """`tree_attn` for the CPU."""
    return tree_attn(h_kv, h_q, d, dtype, rope_scaling, None)


def tree_attn(h_kv: int, h_q: int, d: int, dtype: str, rope_scaling: dict[str, Any], target: Any) -> Any:
    """Tree attention over ragged keys and values."""
    device = device_of(target)
    heads, rope = _heads(h_q, h_kv, d, d, dtype, device=device), rotation(rope_scaling, d)
    return _built(Attention("batch_tree_attn", "tree_ragged", heads, {"tree": _enter}, rope), device)


def tree_attn_with_paged_kv_cache_cpu(
    h_kv: int, h_q: int, d: int, dtype: str, rope_scaling: dict[str, Any], page_size: int = PAGE_SIZE
) -> Any:
    """`tree_attn_with_paged_kv_cache` for the CPU."""
    return tree_attn_with_paged_kv_cache(h_kv, h_q, d, dtype, rope_scaling, None, page_size)


def tree_attn_with_paged_kv_cache(
    h_kv: int, h_q: int, d: int, dtype: str, rope_scaling: dict[str, Any], target: Any, page_size: int = PAGE_SIZE
) -> Any:
    """Tree attention over a paged cache, of any page size; inline RoPE works too."""
    device = device_of(target)
    heads, name = _heads(h_q, h_kv, d, d, dtype, page_size, device=device), _named("tree_attn_paged_kv", device)
    return _built(Attention(name, "tree_paged", heads, {"tree": _enter}, rotation(rope_scaling, d)), device)


def _attention_sequence_prefill(
    h_kv: int, h_q: int, d: int, dtype: str, target: Any, causal: int = 0, sm_scale: float = 1.0
) -> Any:
    """Prefill of a dense batch."""
    heads = _heads(h_q, h_kv, d, d, dtype)

    leaves = {"col_below": _diagonal} if causal else {"full": _nothing}
    made = Attention("batch_sequence_prefill_kv", "dense", heads, leaves, sm_scale=sm_scale)
    return _built(made, device_of(target))


def _attention_sequence_prefill_with_mask(
    h_kv: int, h_q: int, d: int, dtype: str, target: Any, sm_scale: float = 1.0, *, mask_mode: str = "padded"
) -> Any:
    """Prefill of a dense batch with padding: ``"padded"`` on the right, or ``"causal_padded_left"``."""
    if mask_mode not in ("padded", "causal_padded_left"):
        raise UnsupportedError(f"mask_mode: expected 'padded' or 'causal_padded_left', got {mask_mode!r}")
    heads = _heads(h_q, h_kv, d, d, dtype)

    def right(call: Call, b: Expr, row: Expr, q_len: Expr, kv_len: Expr) -> Expr:
        return T.if_then_else(row < call["valid_lens"][b], call["valid_lens"][b], 0)

    def left(call: Call, b: Expr, row: Expr, q_len: Expr, kv_len: Expr) -> Expr:
        valid = call["valid_lens"][b]
        return T.if_then_else(row >= q_len - valid, kv_len - valid, kv_len)

    leaves = {"col_below": right} if mask_mode == "padded" else {"col_from": left, "col_below": _diagonal}
    made = Attention("batch_sequence_prefill_kv_masked", "dense_masked", heads, leaves, sm_scale=sm_scale)
    return _built(made, device_of(target))


def _merge_state_inplace_cpu(v_dtype: str) -> Any:
    """Merge two attention states, into the first."""
    return page_ops.merge("merge_state_inplace_cpu", v_dtype)


def _merge_state_inplace(
    num_heads: int, head_dim: int, v_dtype: str, target: Any, global_symbol: str | None = None
) -> Any:
    """`_merge_state_inplace_cpu` for a target and fixed heads."""
    return page_ops.merge(global_symbol or "merge_state_inplace", v_dtype, num_heads, head_dim, device_of(target))


def _kv_cache_transpose_append(num_key_value_heads: int, head_dim: int, dtype: str, page_size: int = PAGE_SIZE) -> Any:
    """Append new keys and values to the pages."""
    return in_scope(
        lambda device: page_ops.append(
            "tir_kv_cache_transpose_append", 2, num_key_value_heads, head_dim, dtype, page_size, device
        )
    )


def _kv_cache_transpose_append_mla(d_qk: int, dtype: str, page_size: int = PAGE_SIZE) -> Any:
    """Append new compressed keys and values to the pages."""
    return in_scope(
        lambda device: page_ops.append("tir_kv_cache_transpose_append_mla", 1, 1, d_qk, dtype, page_size, device)
    )


def _kv_cache_debug_get_kv(num_hidden_layers: int, num_key_value_heads: int, head_dim: int, dtype: str) -> Any:
    """Fetch a sequence's keys and values of a layer."""
    return in_scope(
        lambda device: page_ops.fetch(
            "tir_kv_cache_debug_get_kv", num_hidden_layers, 2, num_key_value_heads, head_dim, dtype, device
        )
    )


def _kv_cache_debug_get_kv_mla(num_hidden_layers: int, d_qk: int, dtype: str) -> Any:
    """Fetch a sequence's compressed keys and values of a layer."""
    return in_scope(
        lambda device: page_ops.fetch("tir_kv_cache_debug_get_kv_mla", num_hidden_layers, 1, 1, d_qk, dtype, device)
    )


def _copy_single_page_cpu(num_heads: int, page_size: int, head_dim: int, dtype: str) -> Any:
    """Copy the first slots of a page to another."""
    return page_ops.copy_page("copy_single_page_cpu", 2, num_heads, page_size, head_dim, dtype, None)


def _copy_single_page(num_heads: int, page_size: int, head_dim: int, dtype: str, target: Any) -> Any:
    """`_copy_single_page_cpu` for a target."""
    return page_ops.copy_page("copy_single_page", 2, num_heads, page_size, head_dim, dtype, device_of(target))


def _copy_single_page_mla(page_size: int, head_dim: int, dtype: str, target: Any) -> Any:
    """Copy the first slots of a page of compressed keys and values."""
    return page_ops.copy_page("copy_single_page_mla", 1, 1, page_size, head_dim, dtype, device_of(target))


def _compact_kv_copy_cpu(num_heads: int, head_dim: int, dtype: str, page_size: int = PAGE_SIZE) -> Any:
    """Move accepted tokens together, token by token."""
    return page_ops.compact("compact_kv_copy_cpu", num_heads, head_dim, dtype, page_size, None)


def _compact_kv_copy(num_heads: int, head_dim: int, dtype: str, target: Any, page_size: int = PAGE_SIZE) -> Any:
    """`_compact_kv_copy_cpu` for a target."""
    return page_ops.compact("compact_kv_copy", num_heads, head_dim, dtype, page_size, device_of(target))


def llama_rope_with_position_map(
    theta: float,
    scale: float,
    head_dim: int,
    num_q_heads: int,
    num_kv_heads: int,
    dtype: str,
    rope_scaling: dict[str, Any],
    rotary_dim: int | None = None,
) -> Any:
    """Split fused q, k, v and rotate q and k by position."""
    heads, d = {"q": num_q_heads, "k": num_kv_heads, "v": num_kv_heads}, head_dim
    given = theta, scale, d, heads, dtype, rope_scaling, d if rotary_dim is None else rotary_dim
    return in_scope(lambda device: SplitRotary(*given, device).function("fused_rope"))


def _heads(
    h_q: int,
    h_kv: int,
    d_qk: int,
    d_v: int,
    dtype: str,
    page_size: int = ENDLESS,
    sliding_window: bool = False,
    device: GpuTraits | None = None,
    names: tuple[str, str, str, str] = ("h_q", "h_kv", "d", "dtype"),
) -> Heads:
    h_q, h_kv = integer(h_q, names[0]), integer(h_kv, names[1])
    d_qk, d_v = integer(d_qk, names[2], most=MOST_DIM), integer(d_v, "d_v", most=MOST_DIM)
    if h_q % h_kv:
        raise ShapeError(f"{names[0]}: expected a multiple of {names[1]} ({h_kv}), got {h_q}")
    check_dtype(dtype, names[3], device, ("float32", "float16"))
    return Heads(h_q, h_kv, d_qk, d_v, dtype, integer(page_size, "page_size"), sliding_window)


def _named(name: str, device: GpuTraits | None, sliding_window: bool = False) -> str:
    """Return TVM's name of a function."""
    return name + ("" if device else "_cpu") + ("_sliding_window" if sliding_window else "")


def _built(made: Attention, device: GpuTraits | None) -> Any:
    if device:
        return gpu.attention_function(made, device)
    table, group = TILES[host().vector], made.heads.group
    if made.kind == "decode" and group <= 8:
        return cpu.attention_function(made, TileConfig(rows=group, few=(group,)))
    return cpu.attention_function(made, replace(table, few=()))


def _causal(call: Call, b: Expr, row: Expr, q_len: Expr, kv_len: Expr) -> Expr:
    return T.if_then_else(call["causal"] > 0, _diagonal(call, b, row, q_len, kv_len), kv_len)


def _diagonal(call: Call, b: Expr, row: Expr, q_len: Expr, kv_len: Expr) -> Expr:
    return kv_len - q_len + row + 1


def _nothing(call: Call, b: Expr, row: Expr, q_len: Expr, kv_len: Expr) -> Expr:
    return i32(0)


def _enter(call: Call, b: Expr, row: Expr, q_len: Expr, kv_len: Expr) -> Expr:
    first = call["tree_indptr"][b + 1] - q_len
    return call["tree"][first + row, 0]
