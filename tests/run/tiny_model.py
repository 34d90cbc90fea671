"""Small random models in Hugging Face's files, for tests of the runner."""

from __future__ import annotations

import json

import numpy as np
import pytest

safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="the extra models is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="the extra models is not installed")

COMMON = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
CONFIGS = {
    "llama": COMMON | {"model_type": "llama", "rope_theta": 1e4, "hidden_act": "silu"},
    "qwen2": COMMON | {"model_type": "qwen2", "rope_theta": 1e5, "tie_word_embeddings": False, "hidden_act": "silu"},
    "gemma3_text": COMMON
    | {
        "model_type": "gemma3_text",
        "sliding_window": 12,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}
SPECIAL = ("<|im_start|>", "<|im_end|>")


def tokenizer():
    """One token a byte, and the two of the chat form."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    return core


def shapes(config):
    """Name and shape of every weight."""
    hidden, inner, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    found = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    gemma, norms = config["model_type"].startswith("gemma"), ["input_layernorm", "post_attention_layernorm"]
    if gemma:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        found |= {f"{name}{norm}.weight": (hidden,) for norm in norms}
        found |= {f"{name}self_attn.{p}_proj.weight": (n, hidden) for p, n in (("q", q), ("k", kv), ("v", kv))}
        found |= {f"{name}self_attn.o_proj.weight": (hidden, q)}
        found |= {f"{name}mlp.{p}_proj.weight": (inner, hidden) for p in ("gate", "up")}
        found |= {f"{name}mlp.down_proj.weight": (hidden, inner)}
        if config["model_type"] == "qwen2":
            found |= {f"{name}self_attn.{p}_proj.bias": (n,) for p, n in (("q", q), ("k", kv), ("v", kv))}
        if gemma:
            found |= {f"{name}self_attn.{p}_norm.weight": (d,) for p in "qk"}
    return found


def write(folder, kind="llama", seed=0, **changes):
    """Write a model of random weights to ``folder`` and return the folder."""
    core = tokenizer()
    config = CONFIGS[kind] | {"vocab_size": core.get_vocab_size(), "eos_token_id": None} | changes
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes(config).items():
        noise = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            weights[name] = 0.1 * noise + np.float32(0.0 if kind.startswith("gemma") or "bias" in name else 1.0)
        else:
            weights[name] = noise * np.float32(1.0 if "embed" in name else 2 / np.sqrt(shape[1]))
    folder.mkdir(parents=True, exist_ok=True)
    safetensors_numpy.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    core.save(str(folder / "tokenizer.json"))
    return folder
