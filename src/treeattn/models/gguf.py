"""GGUF files (llama.cpp's format), read with the ``gguf`` package and dequantised to float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedError
from .packages import require
from .tokenizer import Tokenizer

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "gemma3": "gemma3_text"}
SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "max_position_embeddings": "context_length",
}
ROPE_FACTORS = "rope_freqs.weight"
GEMMA_27B_LAYERS = 62


def load_gguf(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]], Tokenizer]:
    """Read configuration (in Hugging Face's spelling), weights and tokenizer of a GGUF file.

    Raises
    ------
    UnsupportedError
        An architecture, tokenizer or RoPE scaling that is not offered.
    """
    gguf = require("gguf", f"reading {path.name}")
    reader = _plain_reader(gguf.GGUFReader)(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    weights = {
        tensor.name: np.ascontiguousarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        for tensor in reader.tensors
    }
    if config["model_type"] == "llama":
        for layer in range(config["num_hidden_layers"]):
            for part, heads in (("attn_q", "num_attention_heads"), ("attn_k", "num_key_value_heads")):
                name = f"blk.{layer}.{part}.weight"
                weights[name] = _halves_apart(weights[name], config[heads])
    if ROPE_FACTORS in weights:
        config["rope_scaling"] = _divided(weights.pop(ROPE_FACTORS), config)
    return config, weights, Tokenizer.from_gguf(fields, path)


def _plain_reader(base: Any) -> Any:
    """Return the reader with the file as a plain array: every slice of a `numpy.memmap` costs microseconds."""

    class PlainReader(base):  # type: ignore[misc]
        @property
        def data(self) -> NDArray[np.uint8]:
            return self._data

        @data.setter
        def data(self, mapped: NDArray[np.uint8]) -> None:
            self._data = mapped.view(np.ndarray)

    return PlainReader


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    architecture = str(fields.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(f"architecture: expected one of {', '.join(ARCHITECTURES)}, got {architecture!r}")
    named = {key: fields.get(f"{architecture}.{name}") for key, name in SIZES.items()}
    config = {key: value for key, value in named.items() if value is not None}
    config["model_type"] = ARCHITECTURES[architecture]
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    if architecture == "gemma3":
        is_largest = config["num_hidden_layers"] == GEMMA_27B_LAYERS
        per_head = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = per_head if is_largest else config["head_dim"]
    kind = fields.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": fields[f"{architecture}.rope.scaling.factor"]}
    elif kind != "none":
        raise UnsupportedError(f"rope.scaling.type: expected none or linear, got {kind!r}")
    return config


def _halves_apart(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo the row order of llama files, whose RoPE pairs stand side by side."""
    rows, inputs = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, inputs)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, inputs)


def _divided(factors: NDArray[np.float32], config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3.1's scaling, which GGUF stores as one divisor a pair; longrope with equal lists says the same."""
    divisors = [float(factor) for factor in factors]
    length = config["max_position_embeddings"]
    return {
        "rope_type": "longrope",
        "short_factor": divisors,
        "long_factor": divisors,
        "original_max_position_embeddings": length,
        "factor": 1.0,
    }
