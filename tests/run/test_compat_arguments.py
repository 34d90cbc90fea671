"""Factories of `treeattn.tvm_compat` name the argument that is wrong, before anything is built."""

from __future__ import annotations

import pytest
import tvm

import treeattn.tvm_compat as compat
from treeattn.errors import TreeAttnError, UnsupportedError

MERGE = "_merge_state_inplace"
FACTORIES = {
    "tree_attn": ("h_kv", "h_q", "d", "dtype", "rope_scaling", "target"),
    "tree_attn_with_paged_kv_cache": ("h_kv", "h_q", "d", "dtype", "rope_scaling", "target", "page_size"),
    "_attention_prefill": (
        "h_kv", "h_q", "d", "dtype", "sliding_window", "rope_scaling", "target", "page_size", "sliding_window_size"
    ),
    "_attention_decode": (
        "num_kv_heads", "num_qo_heads", "head_dim", "qkv_dtype", "sliding_window", "rope_scaling", "target", "page_size"
    ),
    "_attention_sequence_prefill": ("h_kv", "h_q", "d", "dtype", "target", "causal", "sm_scale"),
    "_kv_cache_transpose_append": ("num_heads", "head_dim", "dtype", "page_size"),
    "_kv_cache_debug_get_kv": ("num_hidden_layers", "num_heads", "head_dim", "dtype"),
    "_copy_single_page": ("num_heads", "page_size", "head_dim", "dtype", "target"),
    "_compact_kv_copy": ("num_heads", "head_dim", "dtype", "target", "page_size"),
    MERGE: ("num_heads", "head_dim", "v_dtype", "target"),
    "_attention_prefill_mla": ("h_q", "d_latent", "d_rope", "dtype", "sliding_window", "target", "page_size"),
    "llama_rope_with_position_map": (
        "theta", "scale", "head_dim", "num_q_heads", "num_kv_heads", "dtype", "rope_scaling", "rotary_dim"
    ),
}  # fmt: skip
GOOD = {
    "h_kv": 1, "h_q": 2, "d": 8, "d_latent": 8, "d_rope": 4, "num_q_heads": 2, "num_kv_heads": 1, "num_heads": 1,
    "num_qo_heads": 2, "head_dim": 8, "rotary_dim": 8, "page_size": 4, "num_hidden_layers": 1, "dtype": "float32",
    "v_dtype": "float32", "qkv_dtype": "float32", "target": "llvm", "sliding_window": True, "sliding_window_size": 8,
    "causal": 0, "sm_scale": 1.0, "theta": 1e4, "scale": 1.0, "rope_scaling": {},
}  # fmt: skip
SIZES = (
    "h_kv", "h_q", "d", "page_size", "num_heads", "head_dim", "num_hidden_layers", "d_latent", "num_q_heads",
    "num_qo_heads",
)  # fmt: skip
NUMBERS = {name: (None, "a", float("nan"), True, 1e300) for name in ("sm_scale", "theta", "scale")}
WRONG = {name: (0, -1, 1.5, None, "a", True, 2**40) for name in SIZES} | {
    "dtype": ("float64", None, "x", 5),
    "v_dtype": ("float64", None, "x", 5),
    "qkv_dtype": ("float64", None, "x", 5),
    "d_rope": (-1, 1.5, None, "a", True, 2**40),
    "rotary_dim": (0, -2, 3, 10, 1.5, "a", True),
    "rope_scaling": (None, 5, {"rope_type": "x"}, {"rope_type": []}, {"rope_type": "yarn"}),
    "target": (
        "", "vulkanish", "cuda -arch=sm_80", 5, [], object(), {}, {"kind": 5}, {"kind": "cuda", "arch": "none"},
        {"kind": "cuda", "color": "red"}, "hexagon",
        {"kind": "opencl", "max_num_threads": 0, "max_threads_per_block": 0},
    ),
    "sliding_window_size": (1.5, None, "a"),
} | NUMBERS  # fmt: skip


@pytest.mark.parametrize("target", ["llvm", {"kind": "opencl"}], ids=["cpu", "gpu"])
@pytest.mark.parametrize("factory", FACTORIES)
def test_a_wrong_argument_is_named(factory, target):
    names = FACTORIES[factory]
    good = [target if name == "target" else GOOD[name] for name in names]
    with tvm.target.Target(target):  # for factories that are given none
        getattr(compat, factory)(*good)
        for at, name in enumerate(names):
            for value in WRONG.get(name, ()):
                if factory == MERGE and value is None and name != "v_dtype":
                    continue  # of any size, as in TVM's factory for the CPU
                with pytest.raises(TreeAttnError, match=f"^{name}: "):
                    getattr(compat, factory)(*good[:at], value, *good[at + 1 :])


LLAMA = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("key", LLAMA)
@pytest.mark.parametrize("value", [None, "a", 0, True, 1e300])
def test_a_wrong_entry_of_rope_scaling_is_named(key, value):
    with pytest.raises(TreeAttnError, match=f"^rope_scaling.*{key}"):
        compat.tree_attn(1, 2, 8, "float32", {"rope_type": "llama3"} | LLAMA | {key: value}, "llvm")


@pytest.mark.parametrize("factory", [name for name in FACTORIES if "sequence" not in name])
def test_bfloat16_is_refused_where_memory_cannot_be_declared_so(factory):
    """WGSL has no 16-bit integers: what TVM writes for them compiles nowhere."""
    bad = dict.fromkeys(("dtype", "v_dtype", "qkv_dtype"), "bfloat16") | {"target": "webgpu"}
    made = [bad.get(name, GOOD[name]) for name in FACTORIES[factory]]
    with (
        tvm.target.Target("webgpu"),
        pytest.raises(UnsupportedError, match="dtype: expected float32 or float16 on this"),
    ):
        getattr(compat, factory)(*made)
