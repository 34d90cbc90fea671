"""Model files: weights under one set of names, a configuration and a tokenizer, whatever the format.

Names are GGUF's (``blk.0.attn_q.weight``); matrices are float32 ``[outputs, inputs]`` with rows in Hugging Face's
order, so that RoPE pairs are half a head apart, and norm weights are the factor itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import numpy_dtype
from ..errors import DTypeError, TreeAttnError, UnsupportedError
from .config import GEMMA
from .packages import require
from .tokenizer import Tokenizer

Weights = dict[str, NDArray[np.float32]]
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

OUTER = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
NORMS = {"post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


class ModelFileError(TreeAttnError, ValueError):
    """A model file that is damaged, or lacks something."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model as read from disk.

    Attributes
    ----------
    config : dict
        In Hugging Face's spelling.
    weights : dict of Array
        Float32, under GGUF's names.
    tokenizer : Tokenizer or None
        None where a folder of safetensors has no ``tokenizer.json``.
    """

    config: Mapping[str, Any]
    weights: Weights = field(repr=False)
    tokenizer: Tokenizer | None = field(default=None, repr=False)


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read a ``.gguf`` file, or a folder with ``config.json`` and ``*.safetensors``.

    Raises
    ------
    ModelFileError
        Damaged, or something is missing; the message names it.
    UnsupportedError
        Another format, an architecture that is not offered, or a package that is not installed.
    """
    if not isinstance(path, str | Path):
        raise DTypeError(f"path: expected a .gguf file or a folder of safetensors, got {path!r:.60}")
    path = Path(path).expanduser()
    if path.is_dir():
        return _load_folder(path)
    if not path.exists():
        raise ModelFileError(f"{path}: no such model file; give a .gguf file, a folder of safetensors, or smollm2")
    if path.suffix != ".gguf":
        raise UnsupportedError(f"{path}: expected a .gguf file or a folder with config.json and *.safetensors")
    from .gguf import load_gguf

    try:
        config, weights, tokenizer = load_gguf(path)
    except (TreeAttnError, OSError, MemoryError):
        raise
    except Exception as error:  # the reader raises whatever damaged bytes lead it to
        raise ModelFileError(f"{path}: damaged or not a GGUF file ({' '.join(str(error).split())[:160]})") from None
    return Checkpoint(config, weights, tokenizer)


def _load_folder(folder: Path) -> Checkpoint:
    config = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.exists():
        config = {**config, "eos_token_id": _read_json(generation).get("eos_token_id", config.get("eos_token_id"))}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFileError(f"{folder}: expected *.safetensors beside config.json, got none")
    is_gemma = config.get("model_type") in GEMMA
    names = LAYER | (GEMMA_NORMS if is_gemma else NORMS)
    weights: Weights = {}
    for file in files:
        for name, array in _read_safetensors(file):
            if ours := _rename(name, names):
                is_norm = ours.endswith("norm.weight")
                weights[ours] = array + np.float32(1) if is_gemma and is_norm else array
    tokenizer = folder / "tokenizer.json"
    return Checkpoint(config, weights, Tokenizer.from_file(tokenizer, config) if tokenizer.exists() else None)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}; a model folder needs it") from None
    except ValueError as error:
        raise ModelFileError(f"{path}: expected JSON ({error}); is the download complete?") from None
    if not isinstance(found, dict):
        raise ModelFileError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def _read_safetensors(path: Path) -> list[tuple[str, NDArray[np.float32]]]:
    safetensors = require("safetensors", f"reading {path.name}")
    try:
        tensors = safetensors.deserialize(path.read_bytes())
    except safetensors.SafetensorError as error:
        raise ModelFileError(f"{path}: damaged or not a safetensors file ({error})") from None
    found = []
    for name, tensor in tensors:
        if tensor["dtype"] not in DTYPES:
            raise UnsupportedError(f"{path}: expected {', '.join(DTYPES)}, got {tensor['dtype']} in {name}")
        array = np.frombuffer(tensor["data"], numpy_dtype(DTYPES[tensor["dtype"]]))
        found.append((name, array.reshape(tensor["shape"]).astype(np.float32, copy=False)))
    return found


def _rename(name: str, layer_names: Mapping[str, str]) -> str | None:
    """Return GGUF's name of a Hugging Face tensor, or None for one that text generation does not need."""
    place, _, kind = name.rpartition(".")
    place = place.removeprefix("language_model.").removeprefix("model.").removeprefix("language_model.")
    if place in OUTER:
        return f"{OUTER[place]}.{kind}"
    if place.startswith("layers."):
        _, layer, part = place.split(".", 2)
        if part in layer_names:
            return f"blk.{layer}.{layer_names[part]}.{kind}"
    return None
