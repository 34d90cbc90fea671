"""What a model is beside its attention, read from a Hugging Face configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ShapeError, UnsupportedError
from ..hf import ModelSpec, spec_from_hf_config

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
GEMMA = ("gemma3", "gemma3_text")
MODEL_TYPES = ("llama", "qwen2", *GEMMA)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a model; parts that some models lack (biases, extra norms) are there if their weights are.

    Attributes
    ----------
    attention : ModelSpec
        Heads, windows and RoPE of every layer.
    hidden_size : int
        Width of the residual stream.
    rms_eps : float
        Added to the mean square in every norm.
    activation : str
        Of the feed-forward gate: "silu" or "gelu_tanh".
    embedding_scale : float
        Factor of the token embeddings.
    """

    attention: ModelSpec
    hidden_size: int
    rms_eps: float
    activation: str = "silu"
    embedding_scale: float = 1.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face configuration.

        Raises
        ------
        UnsupportedError
            An architecture or activation that is not offered.
        ShapeError
            A size that is missing.
        """
        text = config.get("text_config") or config
        spec = spec_from_hf_config(config)
        if spec.model_type not in MODEL_TYPES:
            raise UnsupportedError(f"model_type: expected one of {', '.join(MODEL_TYPES)}, got {spec.model_type!r}")
        if not isinstance(hidden_size := text.get("hidden_size"), int) or hidden_size < 1:
            raise ShapeError(f"hidden_size: expected an integer above 0 in the configuration, got {hidden_size!r:.60}")
        rms_eps = text.get("rms_norm_eps", 1e-6)
        if not isinstance(rms_eps, int | float) or not 0 <= rms_eps < 1:
            raise ShapeError(f"rms_norm_eps: expected a small number, 0 or more, got {rms_eps!r:.60}")
        for scaling in {rope.scaling for rope in spec.rope if rope}:
            if scaling and (scaling.kind == "dynamic" or scaling.short_factor != scaling.long_factor):
                raise UnsupportedError(
                    f"rope_scaling: expected one that no sequence's length changes, got {scaling.kind}"
                )
        is_gemma = spec.model_type in GEMMA
        named = text.get("hidden_activation") or text.get("hidden_act") or ("gelu_pytorch_tanh" if is_gemma else "silu")
        if not isinstance(named, str) or named not in ACTIVATIONS:
            raise UnsupportedError(f"hidden_act: expected one of {', '.join(ACTIVATIONS)}, got {named!r:.60}")
        return cls(
            attention=spec,
            hidden_size=hidden_size,
            rms_eps=float(rms_eps),
            activation=ACTIVATIONS[named],
            embedding_scale=math.sqrt(hidden_size) if is_gemma else 1.0,
        )
