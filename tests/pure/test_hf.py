"""Attention of published models, read from what their ``config.json`` says (the keys that matter here)."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from treeattn.errors import DTypeError, IndexRangeError, ShapeError, UnsupportedError
from treeattn.hf import DEFAULTS, LatentSpec, ModelSpec, spec_from_hf_config
from treeattn.rope import Rope, RopeScaling

SHARED = Path(os.environ.get("TREEATTN_SHARED", Path(__file__).parents[3] / "shared"))


def config_of(
    model_type: str, layers: int, hidden: int, heads: int, kv_heads: int | None, **more: Any
) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    kv = {} if kv_heads is None else {"num_key_value_heads": kv_heads}
    return {"model_type": model_type, **sizes, **kv, **more}


def sizes(spec: ModelSpec) -> tuple[int, ...]:
    return spec.num_layers, spec.q_heads, spec.kv_heads, spec.d_qk, spec.d_v


def pattern(spec: ModelSpec) -> str:
    """A letter a layer: l for local (windowed), g for global."""
    return "".join("g" if window is None else "l" for window in spec.windows)


LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA_3_2_1B = config_of(
    *("llama", 16, 2048, 32, 8),
    head_dim=64,
    max_position_embeddings=131072,
    rope_scaling=LLAMA3,
    rope_theta=500000.0,
    torch_dtype="bfloat16",
)
QWEN = {"sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28, "rope_theta": 1000000.0}
QWEN_2_5_7B = config_of("qwen2", 28, 3584, 28, 4, max_position_embeddings=32768, **QWEN)
QWEN_3_06B = config_of(
    *("qwen3", 28, 1024, 16, 8),
    head_dim=128,
    max_position_embeddings=40960,
    rope_theta=1000000,
    rope_scaling=None,
    sliding_window=None,
    use_sliding_window=False,
    max_window_layers=28,
)
GEMMA_2_27B = config_of(
    *("gemma2", 46, 4608, 32, 16),
    head_dim=128,
    query_pre_attn_scalar=144,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    sliding_window=4096,
    max_position_embeddings=8192,
    rope_theta=10000.0,
    torch_dtype="float32",
)
GEMMA_3_1B = config_of(
    *("gemma3_text", 26, 1152, 4, 1),
    attn_logit_softcapping=None,
    head_dim=256,
    max_position_embeddings=32768,
    query_pre_attn_scalar=256,
    rope_local_base_freq=10000,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=512,
    sliding_window_pattern=6,
)
GEMMA_3_4B = {  # as published: what the class has by default is left out
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 27},
}
GEMMA_3_27B = {
    **GEMMA_3_4B,
    "text_config": {
        **GEMMA_3_4B["text_config"],
        "head_dim": 128,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
    },
}
GPT_OSS_20B = config_of(
    *("gpt_oss", 24, 2880, 64, 8),
    head_dim=64,
    layer_types=["sliding_attention", "full_attention"] * 12,
    max_position_embeddings=131072,
    initial_context_length=4096,
    rope_theta=150000,
    rope_scaling={
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    sliding_window=128,
)
MISTRAL_V01 = config_of(
    "mistral", 32, 4096, 32, 8, max_position_embeddings=32768, rope_theta=10000.0, sliding_window=4096
)
PHI_4 = config_of(
    *("phi3", 40, 5120, 40, 10),
    max_position_embeddings=16384,
    original_max_position_embeddings=16384,
    partial_rotary_factor=1.0,
    rope_scaling=None,
    rope_theta=250000,
    sliding_window=None,
)
PHI_4_MINI = config_of(
    *("phi3", 32, 3072, 24, 8),
    max_position_embeddings=131072,
    original_max_position_embeddings=4096,
    partial_rotary_factor=0.75,
    rope_scaling={"long_factor": [1.0] * 40 + [47.77] * 8, "short_factor": [1.0] * 48, "type": "longrope"},
    rope_theta=10000.0,
    sliding_window=262144,
)
DEEPSEEK_V3 = config_of(
    *("deepseek_v3", 61, 7168, 128, 128),
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    max_position_embeddings=163840,
    rope_theta=10000,
    rope_scaling={
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    torch_dtype="bfloat16",
)
SMOLLM2_135M = config_of(
    "llama", 30, 576, 9, 3, max_position_embeddings=8192, rope_theta=100000, rope_interleaved=False
)
SMOLLM3 = config_of(
    *("smollm3", 36, 2048, 16, 4),
    max_position_embeddings=65536,
    max_window_layers=28,
    no_rope_layer_interval=4,
    no_rope_layers=[1, 1, 1, 0] * 9,
    rope_theta=5000000.0,
    sliding_window=None,
    use_sliding_window=False,
)


def test_llama_3():
    spec = spec_from_hf_config(LLAMA_3_2_1B)
    assert sizes(spec) == (16, 32, 8, 64, 64)
    assert spec.sm_scale == 0.125 and spec.softcap is None and not spec.has_sink_logits and spec.latent is None
    assert spec.windows == (None,) * 16
    assert spec.rope == (Rope(5e5, scaling=RopeScaling.llama3(32, 1, 4, 8192)),) * 16
    assert (spec.model_type, spec.dtype, spec.max_position) == ("llama", "bfloat16", 131072)
    new = {
        key: value for key, value in LLAMA_3_2_1B.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")
    }
    new |= {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}, "dtype": "bfloat16"}
    assert spec_from_hf_config(new) == spec


def test_absent_sizes_follow_from_others():
    spec = spec_from_hf_config(config_of("llama", 32, 4096, 32, None))  # Llama 2 7B
    assert sizes(spec) == (32, 32, 32, 128, 128)
    assert spec.rope == (Rope(),) * 32 and spec.dtype is None and spec.max_position is None
    assert sizes(spec_from_hf_config(config_of("llama", 2, 64, 4, None, head_dim=None, num_key_value_heads=None)))[
        2:
    ] == (4, 16, 16)


def test_qwen_2_5_ignores_a_window_that_is_switched_off():
    spec = spec_from_hf_config(QWEN_2_5_7B)
    assert sizes(spec) == (28, 28, 4, 128, 128)
    assert spec.windows == (None,) * 28 and spec.rope[0] == Rope(1e6)
    left_out = {key: value for key, value in QWEN_2_5_7B.items() if key != "use_sliding_window"}
    assert spec_from_hf_config(left_out).windows == (None,) * 28


def test_qwen_windows_begin_at_max_window_layers():
    config = {**QWEN_2_5_7B, "use_sliding_window": True, "max_window_layers": 21, "sliding_window": 4096}
    assert spec_from_hf_config(config).windows == (None,) * 21 + (4096,) * 7
    types = ["full_attention"] * 20 + ["sliding_attention"] * 8
    assert pattern(spec_from_hf_config({**config, "layer_types": types})) == "g" * 20 + "l" * 8
    assert pattern(spec_from_hf_config({**config, "layer_types": types, "use_sliding_window": False})) == "g" * 28


def test_qwen_3_with_head_dim_apart_from_hidden_size():
    spec = spec_from_hf_config(QWEN_3_06B)
    assert sizes(spec) == (28, 16, 8, 128, 128)
    assert spec.windows == (None,) * 28 and spec.sm_scale == 128**-0.5
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert spec_from_hf_config({**QWEN_3_06B, "rope_scaling": yarn}).rope[0].scaling == RopeScaling.yarn(4, 32768)


def test_gemma_2():
    spec = spec_from_hf_config(GEMMA_2_27B)
    assert sizes(spec) == (46, 32, 16, 128, 128)
    assert spec.sm_scale == 1 / 12 and spec.softcap == 50.0
    assert pattern(spec) == "lg" * 23 and spec.windows[0] == 4096
    assert spec.rope == (Rope(),) * 46


def test_gemma_3():
    small = spec_from_hf_config(GEMMA_3_1B)
    assert sizes(small) == (26, 4, 1, 256, 256)
    assert small.sm_scale == 1 / 16 and small.softcap is None and small.windows[:6] == (512,) * 5 + (None,)
    assert pattern(small) == "lllllg" * 4 + "ll"
    assert small.rope[4:6] == (Rope(1e4), Rope(1e6))

    spec = spec_from_hf_config(GEMMA_3_4B)
    assert sizes(spec) == (34, 8, 4, 256, 256)
    assert (spec.model_type, spec.dtype, spec.max_position) == ("gemma3_text", "bfloat16", 131072)
    assert spec.rope[4:6] == (Rope(1e4), Rope(1e6, scaling=RopeScaling.linear(8)))

    large = spec_from_hf_config(GEMMA_3_27B)
    assert sizes(large) == (62, 32, 16, 128, 128)
    assert large.sm_scale == 168**-0.5 and large.windows[0] == 1024 and pattern(large).count("g") == 10


def test_gemma_3_as_transformers_5_writes_it():
    rope = {
        "full_attention": {"factor": 8.0, "rope_type": "linear", "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    types = (["sliding_attention"] * 5 + ["full_attention"]) * 5 + ["sliding_attention"] * 4
    text = {**GEMMA_3_4B["text_config"], "_sliding_window_pattern": 6, "layer_types": types, "rope_parameters": rope}
    text.pop("rope_scaling")
    assert spec_from_hf_config({**GEMMA_3_4B, "text_config": text}) == spec_from_hf_config(GEMMA_3_4B)


def test_gpt_oss():
    spec = spec_from_hf_config(GPT_OSS_20B)
    assert sizes(spec) == (24, 64, 8, 64, 64)
    assert spec.has_sink_logits and spec.sm_scale == 0.125
    assert pattern(spec) == "lg" * 12 and spec.windows[0] == 128
    assert spec.rope[0] == Rope(150000, scaling=RopeScaling.yarn(32, 4096, truncate=False))
    assert spec.rope[0].attention_factor == pytest.approx(1.3465735903)
    without = {key: value for key, value in GPT_OSS_20B.items() if key not in ("layer_types", "head_dim")}
    assert spec_from_hf_config(without) == spec


def test_mistral_with_and_without_a_window():
    spec = spec_from_hf_config(MISTRAL_V01)
    assert sizes(spec) == (32, 32, 8, 128, 128) and spec.windows == (4096,) * 32
    assert spec_from_hf_config({**MISTRAL_V01, "sliding_window": None}).windows == (None,) * 32
    nested = {"model_type": "mistral3", "text_config": {**MISTRAL_V01, "head_dim": 160}, "vision_config": {}}
    assert spec_from_hf_config(nested).d_qk == 160


def test_phi_4():
    spec = spec_from_hf_config(PHI_4)
    assert sizes(spec) == (40, 40, 10, 128, 128)
    assert spec.rope[0] == Rope(250000) and spec.windows[0] is None
    mini = spec_from_hf_config(PHI_4_MINI)
    assert sizes(mini) == (32, 24, 8, 128, 128)
    rope = mini.rope[0]
    assert rope is not None and rope.rotary_dim == 96 and rope.scaling is not None
    assert (rope.scaling.kind, rope.scaling.factor, rope.scaling.original_max_position) == ("longrope", 32.0, 4096)
    assert rope.attention_factor == pytest.approx(1.1902380714)
    assert mini.windows == (262144,) * 32  # past its longest context, so it hides nothing


def test_deepseek_v3():
    spec = spec_from_hf_config(DEEPSEEK_V3)
    assert sizes(spec) == (61, 128, 1, 576, 512)
    assert spec.latent == LatentSpec(d_latent=512, d_rope=64, d_nope=128, d_v=128)
    mscale = 0.1 * math.log(40) + 1
    assert spec.sm_scale == pytest.approx(192**-0.5 * mscale**2, rel=1e-15)
    assert spec.sm_scale == pytest.approx(0.1352337788608801)  # sm_scale of DeepSeek kernels at large
    rope = spec.rope[0]
    assert rope == Rope(style="gptj", scaling=RopeScaling.yarn(40, 4096, mscale=1, mscale_all_dim=1))
    assert rope.attention_factor == 1.0 and rope.half(spec.latent.d_rope) == 32
    plain = {**DEEPSEEK_V3, "rope_scaling": None, "q_lora_rank": None}
    assert spec_from_hf_config(plain).sm_scale == pytest.approx(192**-0.5)


def test_smollm():
    spec = spec_from_hf_config(SMOLLM2_135M)
    assert sizes(spec) == (30, 9, 3, 64, 64) and spec.rope == (Rope(1e5),) * 30
    third = spec_from_hf_config(SMOLLM3)
    assert sizes(third) == (36, 16, 4, 128, 128) and third.windows == (None,) * 36
    assert [layer for layer, rope in enumerate(third.rope) if rope is None] == list(range(3, 36, 4))
    assert third.rope[0] == Rope(5e6)
    without = {key: value for key, value in SMOLLM3.items() if not key.startswith("no_rope")}
    assert spec_from_hf_config(without) == third
    windowed = spec_from_hf_config({**SMOLLM3, "sliding_window": 512, "use_sliding_window": True})
    assert pattern(windowed) == "gggl" * 9  # its layers without RoPE take the window


def test_unknown_types_are_read_by_their_keys():
    spec = spec_from_hf_config(config_of("newmodel", 4, 512, 8, 2, rope_theta=7e5, v_head_dim=32, sliding_window=64))
    assert sizes(spec) == (4, 8, 2, 64, 32)
    assert spec.rope == (Rope(7e5),) * 4 and spec.windows == (64,) * 4
    assert spec_from_hf_config(config_of("opt", 4, 512, 8, 8, rope_theta=None)).rope == (None,) * 4
    granite = config_of("granite", 4, 2048, 32, 8, rope_theta=1e4, attention_multiplier=0.015625)
    assert spec_from_hf_config(granite).sm_scale == 0.015625
    cohere = config_of("cohere2", 8, 512, 8, 2, rope_theta=5e4, sliding_window=4096, sliding_window_pattern=4)
    spec = spec_from_hf_config(cohere)
    assert pattern(spec) == "lllg" * 2
    assert spec.rope == ((Rope(5e4, style="gptj"),) * 3 + (None,)) * 2  # its global layers have no positions


@pytest.mark.parametrize("kind", ["dict", "file", "directory"])
def test_reads_dicts_and_paths(kind, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GEMMA_3_4B))
    source = {"dict": GEMMA_3_4B, "file": str(path), "directory": tmp_path}[kind]
    before = json.dumps(GEMMA_3_4B)
    assert spec_from_hf_config(source).num_layers == 34
    assert json.dumps(GEMMA_3_4B) == before


def test_a_spec_is_a_value():
    assert hash(spec_from_hf_config(DEEPSEEK_V3)) == hash(spec_from_hf_config(dict(DEEPSEEK_V3)))
    assert spec_from_hf_config(DEEPSEEK_V3) != spec_from_hf_config(LLAMA_3_2_1B)


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        (
            {"model_type": "gpt2", "n_head": 12, "n_layer": 12},
            ShapeError,
            "config: expected num_hidden_layers, num_attention_heads, head_dim (or hidden_size), rope_theta",
        ),
        ({}, ShapeError, "config: expected num_hidden_layers"),
        (
            {**LLAMA_3_2_1B, "num_key_value_heads": 5},
            ShapeError,
            "num_attention_heads: expected a multiple of num_key_value_heads 5, got 32",
        ),
        ({**LLAMA_3_2_1B, "num_hidden_layers": "16"}, DTypeError, "num_hidden_layers: expected an integer, got '16'"),
        ({**LLAMA_3_2_1B, "num_hidden_layers": 0}, IndexRangeError, "num_hidden_layers: expected 1 to 10000, got 0"),
        (
            {**LLAMA_3_2_1B, "head_dim": None, "hidden_size": 2050},
            ShapeError,
            "hidden_size: expected a multiple of 32 heads",
        ),
        ({**LLAMA_3_2_1B, "layer_types": ["full_attention"]}, ShapeError, "layer_types: expected 16"),
        (
            {**LLAMA_3_2_1B, "layer_types": ["linear_attention"] * 16},
            UnsupportedError,
            "layer_types: expected full_attention or sliding_attention, got linear_attention",
        ),
        ({**LLAMA_3_2_1B, "alibi": True}, UnsupportedError, "alibi: expected none, got True"),
        (
            {**LLAMA_3_2_1B, "attention_chunk_size": 8192},
            UnsupportedError,
            "attention_chunk_size: expected none, got 8192",
        ),
        (
            {**GEMMA_2_27B, "attn_logit_softcapping": "50"},
            DTypeError,
            "attn_logit_softcapping: expected a number, got '50'",
        ),
        ({**GEMMA_2_27B, "query_pre_attn_scalar": -1}, ShapeError, "query_pre_attn_scalar: expected a number above 0"),
        ({**SMOLLM3, "no_rope_layers": [1, 0]}, ShapeError, "no_rope_layers: expected 36"),
        ({**DEEPSEEK_V3, "v_head_dim": None}, DTypeError, "v_head_dim: expected an integer, got None"),
        (
            {**LLAMA_3_2_1B, "rope_scaling": {"rope_type": "proportional"}},
            UnsupportedError,
            "rope_type: expected one of default",
        ),
        ([], DTypeError, "config: expected a dict or the path of config.json, got list"),
    ],
)
def test_errors_name_the_key(config, error, says):
    with pytest.raises(error) as caught:
        spec_from_hf_config(config)
    assert str(caught.value).startswith(says)


MODELS = {  # names of data/model_shapes.json
    "SmolLM2-135M": SMOLLM2_135M,
    "SmolLM3-3B": SMOLLM3,
    "Qwen2.5-7B": QWEN_2_5_7B,
    "Qwen3-0.6B": QWEN_3_06B,
    "Llama-3.2-1B": LLAMA_3_2_1B,
    "Mistral-7B-v0.3 / Mixtral-8x7B": {**MISTRAL_V01, "sliding_window": None},
    "Gemma-3-1b": GEMMA_3_1B,
    "Gemma-3-4b": GEMMA_3_4B,
    "Gemma-3-27b": GEMMA_3_27B,
    "gpt-oss-20b": GPT_OSS_20B,
    "DeepSeek-V3 (MLA, absorbed decode)": DEEPSEEK_V3,
    "Phi-4": PHI_4,
    "Phi-4-mini": {**PHI_4_MINI, "sliding_window": None},
}


@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_the_shared_table(name):
    path = SHARED / "data" / "model_shapes.json"
    if not path.exists():
        pytest.skip(f"no {path}: set TREEATTN_SHARED to the folder that has data/model_shapes.json")
    row = next(row for row in json.loads(path.read_text()) if row["name"] == name)
    spec = spec_from_hf_config(MODELS[name])
    assert sizes(spec) == tuple(row[key] for key in ("layers", "h_q", "h_kv", "d_qk", "d_v"))
    assert {window for window in spec.windows if window} == {row[key] for key in ("window",) if key in row}
    assert spec.softcap == row.get("softcap") and spec.has_sink_logits == row.get("sinks", False)


def test_defaults_are_of_types_that_are_known():
    assert all(isinstance(values, dict) and values for values in DEFAULTS.values())
