"""What `treeattn.tvm_compat` says of rope_scaling dictionaries that lack something."""

from __future__ import annotations

import pytest

from treeattn import tvm_compat
from treeattn.errors import DTypeError, TreeAttnError, UnsupportedError

LENGTH = "original_max_position_embeddings"
LLAMA = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, LENGTH: 8192}
SCALINGS = {
    "llama3": LLAMA,
    "llama4": LLAMA,
    "yarn": {"factor": 4.0, "beta_fast": 32, "beta_slow": 1, "inv_theta_log_scale": 0.05, LENGTH: 4096},
    "longrope": {"max_position_embeddings": 131072, LENGTH: 4096},
}


def make(scaling, **changes):
    arguments = {"theta": 1e4, "scale": 1.0, "head_dim": 8, "num_q_heads": 2, "num_kv_heads": 1, "dtype": "float32"}
    return tvm_compat.llama_rope_with_position_map(**arguments | {"rope_scaling": scaling} | changes)


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind, keys in SCALINGS.items() for key in keys])
def test_a_key_that_is_missing_or_no_number_is_named(kind, key):
    whole = {"rope_type": kind} | SCALINGS[kind]
    assert make(whole) is not None
    with pytest.raises(TreeAttnError, match=f"^rope_scaling: expected '{key}' beside rope_type '{kind}', got none"):
        make({name: value for name, value in whole.items() if name != key})
    for value in (None, "8", [8], True, 0, -1, float("nan"), float("inf")):
        with pytest.raises(TreeAttnError, match=rf"^rope_scaling\['{key}'\]: expected "):
            make(whole | {key: value})


def test_factors_in_the_wrong_order():
    with pytest.raises(TreeAttnError, match=r"expected low_freq_factor up to high_freq_factor 4\.0, got 9\.0"):
        make({"rope_type": "llama3"} | LLAMA | {"low_freq_factor": 9})


@pytest.mark.parametrize("scaling", [None, [], "llama3", 5])
def test_no_dictionary(scaling):
    with pytest.raises(DTypeError, match=r"^rope_scaling: expected a dict"):
        make(scaling)
    with pytest.raises(DTypeError, match=r"^rope_scaling: expected a dict"):
        tvm_compat.tree_attn_cpu(1, 2, 8, "float32", scaling)


@pytest.mark.parametrize("kind", ["default", "dynamic", ["llama3"], 3])
def test_no_rope_type(kind):
    with pytest.raises(UnsupportedError, match=r"^rope_scaling: expected a rope_type of"):
        make({"rope_type": kind})


@pytest.mark.parametrize(
    "change",
    [
        *({"theta": value} for value in (0, -1.0, None, "x")),
        *({"scale": value} for value in (0, float("nan"), None)),
        *({name: value} for name in ("head_dim", "num_q_heads") for value in (0, -2, 1.5, None)),
        {"num_kv_heads": -1},
        *({"rotary_dim": value} for value in (3, 10, -2, 2.0)),
        {"head_dim": 7},
        *({"dtype": value} for value in ("float64", "int8", None)),
    ],
    ids=str,
)
def test_bad_sizes_are_named(change):
    name = "rotary_dim" if change == {"head_dim": 7} else next(iter(change))
    with pytest.raises(TreeAttnError, match=f"^{name}: expected "):
        make({}, **change)
