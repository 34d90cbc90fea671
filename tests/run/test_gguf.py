"""GGUF files against folders of safetensors that hold the same tiny random model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny_model

from treeattn import Rope, RopeScaling
from treeattn.errors import UnsupportedError
from treeattn.models.checkpoint import load_checkpoint
from treeattn.models.config import ModelConfig

gguf = pytest.importorskip("gguf", reason="the extra models is not installed")

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "gemma3_text": "gemma3"}


def permuted(weight, heads):
    """Rows of q or k as llama files have them: the two members of a RoPE pair side by side."""
    rows, inputs = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, inputs).swapaxes(1, 2).reshape(rows, inputs)


def write(path, folder, kind, **extra):
    """Write the model of ``folder`` as GGUF; ``extra`` are more tensors."""
    config, weights = json.loads((folder / "config.json").read_text()), load_checkpoint(folder).weights
    writer = gguf.GGUFWriter(path, ARCHITECTURES[kind])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_context_length(config["max_position_embeddings"])
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if kind == "qwen2" else "smollm")
    writer.add_token_list([*vocabulary, *tiny_model.SPECIAL])
    writer.add_token_types([1] * len(vocabulary) + [3, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(vocabulary) + 1)
    for name, array in {**weights, **extra}.items():
        stored = array
        if kind == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            stored = permuted(array, config["num_attention_heads" if "attn_q" in name else "num_key_value_heads"])
        writer.add_tensor(name, np.ascontiguousarray(stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(params=tiny_model.CONFIGS)
def pair(request, tmp_path):
    """A kind of model and a folder with one."""
    kind = request.param
    changes = {"sliding_window_pattern": 6} if kind == "gemma3_text" else {}
    folder = tiny_model.write(tmp_path / kind, kind, **changes)
    return kind, folder


def loaded(pair, tmp_path, monkeypatch, **extra):
    kind, folder = pair
    monkeypatch.setattr("treeattn.models.tokenizer._byte_pairs", lambda *_: tiny_model.tokenizer())
    return load_checkpoint(write(tmp_path / "model.gguf", folder, kind, **extra)), load_checkpoint(folder)


def test_weights_and_attention_are_those_of_safetensors(pair, tmp_path, monkeypatch):
    ours, theirs = loaded(pair, tmp_path, monkeypatch)
    assert ours.weights.keys() == theirs.weights.keys()
    for name, array in theirs.weights.items():
        np.testing.assert_array_equal(ours.weights[name], array, err_msg=name)
    configs = [ModelConfig.from_hf(checkpoint.config) for checkpoint in (ours, theirs)]
    if pair[0] == "gemma3_text":  # files do not say the scale: the head dimension, as in all but the largest
        assert configs[0].attention.sm_scale == 8**-0.5
        assert configs[0].attention.windows == (12, 12, 12)
        configs = [config.attention.rope for config in configs]
    else:
        configs = [(c.attention.rope, c.attention.sm_scale, c.hidden_size, c.activation) for c in configs]
    assert configs[0] == configs[1]


def test_divisors_of_frequencies_are_llama3_scaling(tmp_path, monkeypatch):
    folder = tiny_model.write(tmp_path / "llama", "llama")
    scaled = Rope(1e4, scaling=RopeScaling.llama3(8.0, 1.0, 4.0, 64))
    divisors = (Rope(1e4).inv_freq(8) / scaled.inv_freq(8)).astype(np.float32)
    assert divisors.max() > 2
    ours, _ = loaded(("llama", folder), tmp_path, monkeypatch, **{"rope_freqs.weight": divisors})
    rope = ModelConfig.from_hf(ours.config).attention.rope[0]
    positions = np.arange(0, 2000, 37)
    for got, want in zip(rope.cos_sin(positions, 8, 2000), scaled.cos_sin(positions, 8), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


def test_a_cut_file_is_named(tmp_path, monkeypatch):
    folder = tiny_model.write(tmp_path / "llama", "llama")
    path = write(tmp_path / "model.gguf", folder, "llama")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"model\.gguf"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [("general.architecture", "bert", "architecture"), ("llama.rope.scaling.type", "yarn", "scaling")],
)
def test_what_is_not_offered_is_refused(field, value, named):
    from treeattn.models.gguf import SIZES, _config

    fields = {f"llama.{name}": 8 for name in SIZES.values()} | {"general.architecture": "llama", field: value}
    with pytest.raises(UnsupportedError, match=named):
        _config(fields)
