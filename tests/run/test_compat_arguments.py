"""Factories of `treeattn.tvm_compat` name the argument that is wrong, before anything is built."""

from __future__ import annotations

import pytest

import treeattn.tvm_compat as compat
from treeattn.errors import TreeAttnError

MERGE = "_merge_state_inplace"
FACTORIES = {
    "tree_attn": ("h_kv", "h_q", "d", "dtype", "rope_scaling", "target"),
    "tree_attn_with_paged_kv_cache": ("h_kv", "h_q", "d", "dtype", "rope_scaling", "target", "page_size"),
    "_attention_prefill": (
        "h_kv", "h_q", "d", "dtype", "sliding_window", "rope_scaling", "target", "page_size", "sliding_window_size"
    ),
    "_attention_sequence_prefill": ("h_kv", "h_q", "d", "dtype", "target", "causal", "sm_scale"),
    "_kv_cache_transpose_append": ("num_heads", "head_dim", "dtype", "page_size"),
    "_kv_cache_debug_get_kv": ("num_hidden_layers", "num_heads", "head_dim", "dtype"),
    "_copy_single_page": ("num_heads", "page_size", "head_dim", "dtype", "target"),
    "_compact_kv_copy": ("num_heads", "head_dim", "dtype", "target", "page_size"),
    MERGE: ("num_heads", "head_dim", "v_dtype", "target"),
}  # fmt: skip
GOOD = {
    "h_kv": 1, "h_q": 2, "d": 8, "dtype": "float32", "v_dtype": "float32", "rope_scaling": {}, "target": "llvm",
    "page_size": 4, "sliding_window": True, "sliding_window_size": 8, "causal": 0, "sm_scale": 1.0, "num_heads": 1,
    "head_dim": 8, "num_hidden_layers": 1,
}  # fmt: skip
SIZES = ("h_kv", "h_q", "d", "page_size", "num_heads", "head_dim", "num_hidden_layers")
WRONG = {name: (0, -1, 1.5, None, "a", True, 2**40) for name in SIZES} | {
    "dtype": ("float64", None, "x", 5),
    "v_dtype": ("float64", None, "x", 5),
    "sm_scale": (None, "a", float("nan"), True),
    "sliding_window_size": (1.5, None, "a"),
}


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_wrong_argument_is_named(factory):
    names = FACTORIES[factory]
    good = [GOOD[name] for name in names]
    getattr(compat, factory)(*good)
    for at, name in enumerate(names):
        for value in WRONG.get(name, ()):
            if factory == MERGE and value is None and name != "v_dtype":
                continue  # of any size, as in TVM's factory for the CPU
            with pytest.raises(TreeAttnError, match=f"^{name}: "):
                getattr(compat, factory)(*good[:at], value, *good[at + 1 :])
