"""What a Hugging Face ``config.json`` says about a model's attention.

Configurations leave out what their model class has as a default and spell one thing in several ways; what is known
about that lies in the tables below. Whatever would change attention and is not offered is refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from .arrays import INT32_MAX
from .checks import integer, positive
from .errors import DTypeError, ShapeError, UnsupportedError
from .rope import Rope, RopeScaling, yarn_mscale

Config: TypeAlias = Mapping[str, Any]

MOST_LAYERS = 10_000  # a larger number is damage, and would be a list as long
MOST_GROWTH = 1e6

GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "max_position_embeddings": 131072,
}
# What the model classes take for keys that a configuration leaves out, where published ones do leave them out.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
    },
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3,
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2, "rope_theta": 150000.0},
    "mistral": {"sliding_window": 4096},
    "qwen2": {"use_sliding_window": False, "max_window_layers": 28},
    "qwen3": {"use_sliding_window": False, "max_window_layers": 28, "head_dim": 128},
    "smollm3": {"use_sliding_window": False, "no_rope_layer_interval": 4, "rope_theta": 2e6},
}
# Types whose RoPE turns adjacent pairs. GGUF files of llama models, whose rows are permuted, do so too.
ADJACENT_PAIRS = {"codegen", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "glm", "glm4", "gptj", "llama4_text"}
KNOWN_TYPES = {*DEFAULTS, "deepseek_v2", "deepseek_v3", "gemma", "llama", "mixtral", "phi3", "qwen2_moe", "qwen3_moe"}
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "rotary_emb_base", "rotary_dim")
LAYER_WINDOWED = {"full_attention": False, "sliding_attention": True}
# Keys that change attention in a way no part of this package has.
REFUSED = {
    "add_swa_attention_sink_bias": "sink logits in some layers only",
    "alibi": "ALiBi slopes; pass alibi= to attention yourself",
    "attention_chunk_size": "attention in chunks",
    "index_topk": "sparse attention by an indexer",
    "multi_query": "Falcon's head layout; give num_key_value_heads in a llama-like configuration",
    "num_kv_shared_layers": "layers that share keys and values",
}
REFUSED_ROPE = {
    "alpha": "the NTK-alpha variant; multiply rope_theta by alpha ** (d / (d - 2)) and drop the scaling",
    "mrope_section": "positions on several axes; delete the key to run text alone, whose axes agree",
}

HF_NAMES = {"original_max_position": "original_max_position_embeddings"}
LLAMA_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position")
YARN_KEYS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
SCALING_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # required and optional, by our names
    "linear": (("factor",), ()),
    "dynamic": (("factor", "original_max_position"), ()),
    "llama3": (LLAMA_KEYS, ()),
    "llama4": (LLAMA_KEYS, ()),
    "yarn": (("factor", "original_max_position"), YARN_KEYS),
    "longrope": (("short_factor", "long_factor", "original_max_position"), ("factor", "attention_factor")),
}


@dataclass(frozen=True)
class LatentSpec:
    """Sizes of multi-head latent attention (MLA).

    Attributes
    ----------
    d_latent, d_rope : int
        A slot of the cache holds the latent (``kv_lora_rank``), then the rotated key shared by all heads.
    d_nope, d_v : int
        A head's unrotated key and its value, as the latent expands to them.
    """

    d_latent: int
    d_rope: int
    d_nope: int
    d_v: int


@dataclass(frozen=True)
class ModelSpec:
    """Attention of a model, layer by layer.

    Attributes
    ----------
    model_type : str
        Of the text model.
    num_layers, q_heads, kv_heads, d_qk, d_v : int
        Sizes. With ``latent`` those of the absorbed form: one kv head, ``d_latent + d_rope`` and ``d_latent``.
    sm_scale : float
        Factor of ``q . k``; for MLA it includes the square of YaRN's mscale.
    softcap : float or None
        Cap of the attention logits.
    windows : tuple of int or None, ``[num_layers]``
        Window of each layer; None where a layer sees everything.
    has_sink_logits : bool
        Whether each head has a learned sink logit.
    rope : tuple of Rope or None, ``[num_layers]``
        None where a layer has no positions (NoPE). With ``latent``, of the ``d_rope`` dimensions.
    latent : LatentSpec or None
        Set for MLA.
    dtype : str or None
        Of the weights.
    max_position : int or None
        Longest context the configuration names.
    """

    model_type: str
    num_layers: int
    q_heads: int
    kv_heads: int
    d_qk: int
    d_v: int
    sm_scale: float
    softcap: float | None
    windows: tuple[int | None, ...]
    has_sink_logits: bool
    rope: tuple[Rope | None, ...]
    latent: LatentSpec | None = None
    dtype: str | None = None
    max_position: int | None = None


def spec_from_hf_config(config: Config | str | Path) -> ModelSpec:
    """Attention of the model that a Hugging Face configuration describes.

    Llama 3.x, Qwen 2.5 and 3, Gemma 2 and 3, gpt-oss, Mistral, Phi-3 and 4, DeepSeek-V2 and V3, SmolLM 2 and 3 are
    known; another ``model_type`` is read by the same keys, if they are there. Changes to q and k before attention
    (QK-norm, temperature by position) are the caller's and not described.

    Parameters
    ----------
    config : dict or path
        The configuration, or its ``config.json`` (or the directory of it); a nested ``text_config`` is found.

    Raises
    ------
    ShapeError
        Keys missing, named, or values that contradict each other.
    UnsupportedError
        Attention that is not offered, by the key that asks for it.
    DTypeError
        Values of a wrong type.
    """
    config = _read(config)
    _check_keys(config)
    num_layers, q_heads = _count(config, "num_hidden_layers", most=MOST_LAYERS), _count(config, "num_attention_heads")
    latent, head_dim = _latent(config), _head_dim(config)
    kv_heads = 1 if latent else _count(config, "num_key_value_heads", q_heads)
    if q_heads % kv_heads:
        raise ShapeError(f"num_attention_heads: expected a multiple of num_key_value_heads {kv_heads}, got {q_heads}")
    dtype = config.get("dtype") or config.get("torch_dtype")
    return ModelSpec(
        model_type=config["model_type"],
        num_layers=num_layers,
        q_heads=q_heads,
        kv_heads=kv_heads,
        d_qk=latent.d_latent + latent.d_rope if latent else head_dim,
        d_v=latent.d_latent if latent else _count(config, "v_head_dim", head_dim),
        sm_scale=_sm_scale(config, head_dim, latent),
        softcap=_real(config, "attn_logit_softcapping"),
        windows=_windows(config, num_layers),
        has_sink_logits=config["model_type"] == "gpt_oss",
        rope=_ropes(config, num_layers),
        latent=latent,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        max_position=_count(config, "max_position_embeddings") if config.get("max_position_embeddings") else None,
    )


def rope_from_hf_config(config: Config | str | Path, layer_type: str | None = None) -> Rope:
    """Rope of a configuration: `Rope.from_hf_config`, where it is described."""
    config = _read(config)
    parameters = _rope_parameters(config, layer_type)
    theta = _first(parameters.get("rope_theta"), config.get("rope_theta"), config.get("rotary_emb_base"), 10000.0)
    is_adjacent = config.get("rope_interleave", config["model_type"] in ADJACENT_PAIRS)
    return Rope(
        theta=theta,
        style="gptj" if is_adjacent else "neox",
        rotary_dim=_rotary_dim(config, parameters),
        scaling=_scaling(config, parameters),
    )


def _read(config: Config | str | Path) -> dict[str, Any]:
    """The text model's part, completed with what its class takes by default."""
    if isinstance(config, str | Path):
        config = _load(Path(config))
    if not isinstance(config, Mapping):
        raise DTypeError(f"config: expected a dict or the path of config.json, got {type(config).__name__}")
    outer, text = config, config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise DTypeError(f"text_config: expected a dict, got {type(text).__name__}")
    model_type = str(text.get("model_type") or outer.get("model_type") or "unknown")
    dtypes = {key: outer[key] for key in ("dtype", "torch_dtype") if key in outer}
    return {**DEFAULTS.get(model_type, {}), **dtypes, **text, "model_type": model_type}


def _load(path: Path) -> Any:
    path = path / "config.json" if path.is_dir() else path
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedError(f"config: expected a readable file, got {path}: {error.strerror}") from None
    except ValueError as error:
        raise ShapeError(f"config: expected JSON, got {path}: {error}; is the download complete?") from None


def _check_keys(config: Config) -> None:
    model_type = config["model_type"]
    missing = [key for key in ("num_hidden_layers", "num_attention_heads") if config.get(key) is None]
    if all(config.get(key) is None for key in ("head_dim", "hidden_size", "kv_lora_rank")):
        missing.append("head_dim (or hidden_size)")
    if model_type not in KNOWN_TYPES and not any(key in config for key in ROPE_KEYS):
        missing.append("rope_theta (null if the model has no RoPE)")
    if missing:
        raise ShapeError(
            f"config: expected {', '.join(missing)}, got none for model_type {model_type!r}; "
            "add them, or build the ModelSpec yourself"
        )
    for key, what in REFUSED.items():
        if config.get(key):
            raise UnsupportedError(f"{key}: expected none, got {config[key]!r}: {what}")


def _count(config: Config, key: str, default: int | None = None, most: int = INT32_MAX) -> int:
    value = config.get(key)
    value = default if value is None else value
    return integer(value, key, most=most)


def _count_or_none(config: Config, key: str) -> int | None:
    return _count(config, key) if config.get(key) else None


def _listed(config: Config, key: str, num_layers: int) -> list[Any]:
    """The entry of each layer, or nothing where the configuration lists none."""
    values = config.get(key) or []
    if not isinstance(values, list | tuple):
        raise DTypeError(f"{key}: expected a list with an entry a layer, got {values!r:.60}")
    if values and len(values) < num_layers:
        raise ShapeError(f"{key}: expected {num_layers} (num_hidden_layers), got {len(values)}")
    return list(values[:num_layers])


def _real(config: Config, key: str) -> float | None:
    value = config.get(key)
    return None if value is None else positive(value, key)


def _head_dim(config: Config) -> int:
    if config.get("head_dim") is not None or config.get("hidden_size") is None:
        return _count(config, "head_dim", config.get("qk_rope_head_dim"))
    hidden_size, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    if hidden_size % heads:
        raise ShapeError(f"hidden_size: expected a multiple of {heads} heads, got {hidden_size}; give head_dim")
    return hidden_size // heads


def _latent(config: Config) -> LatentSpec | None:
    if config.get("kv_lora_rank") is None:
        return None
    keys = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    return LatentSpec(*[_count(config, key) for key in keys])


def _sm_scale(config: Config, head_dim: int, latent: LatentSpec | None) -> float:
    if latent:
        scaling = rope_from_hf_config(config).scaling
        growth = yarn_mscale(scaling.factor, scaling.mscale_all_dim or 0) if scaling else 1.0
        if not growth < MOST_GROWTH:
            raise ShapeError(f"mscale_all_dim: expected a scale of attention under {MOST_GROWTH:.0e}, got {growth}")
        return growth**2 / math.sqrt(latent.d_nope + latent.d_rope)
    scale: float = (_real(config, "query_pre_attn_scalar") or head_dim) ** -0.5
    return _real(config, "attention_multiplier") or scale  # Granite's


def _layer_types(config: Config, num_layers: int) -> list[str]:
    """Name of each layer's attention: as listed, or by the pattern that the model's class has for it."""
    every = _count_or_none(config, "sliding_window_pattern") or _count_or_none(config, "_sliding_window_pattern")
    has_window = _window(config) is not None
    if listed := _listed(config, "layer_types", num_layers):
        names = [str(name) for name in listed]
    elif every:
        names = [_layer_name((layer + 1) % every != 0) for layer in range(num_layers)]
    elif config["model_type"] == "smollm3":
        names = [_layer_name(not has_rope) for has_rope in _has_rope(config, num_layers)]
    else:
        first = _count_or_none(config, "max_window_layers") or 0 if config.get("use_sliding_window") else 0
        names = [_layer_name(has_window and layer >= first) for layer in range(num_layers)]
    unknown = set(names) - set(LAYER_WINDOWED)
    if unknown:
        raise UnsupportedError(
            f"layer_types: expected {' or '.join(LAYER_WINDOWED)}, got {', '.join(sorted(unknown))}; "
            "layers of other kinds are not offered"
        )
    return names


def _layer_name(is_windowed: bool) -> str:
    return "sliding_attention" if is_windowed else "full_attention"


def _windows(config: Config, num_layers: int) -> tuple[int | None, ...]:
    window = _window(config)
    return tuple(window if LAYER_WINDOWED[name] else None for name in _layer_types(config, num_layers))


def _window(config: Config) -> int | None:
    if config.get("sliding_window") is None or not config.get("use_sliding_window", True):
        return None
    return _count(config, "sliding_window")


def _has_rope(config: Config, num_layers: int) -> list[bool]:
    every = _count_or_none(config, "no_rope_layer_interval")
    if listed := _listed(config, "no_rope_layers", num_layers):  # despite its name, 1 marks a layer with RoPE
        return [bool(flag) for flag in listed]
    return [not every or (layer + 1) % every != 0 for layer in range(num_layers)]


def _ropes(config: Config, num_layers: int) -> tuple[Rope | None, ...]:
    if config["model_type"] not in KNOWN_TYPES and all(config.get(key) is None for key in ROPE_KEYS):
        return (None,) * num_layers
    types = _layer_types(config, num_layers)
    ropes = {name: rope_from_hf_config(config, name) for name in set(types)}
    has_rope = _has_rope(config, num_layers)
    if config["model_type"] == "cohere2":
        has_rope = [LAYER_WINDOWED[name] for name in types]
    return tuple(ropes[name] if has else None for name, has in zip(types, has_rope, strict=True))


def _rope_parameters(config: Config, layer_type: str | None) -> Config:
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    parameters = config.get(key) or {}
    if not isinstance(parameters, Mapping):
        raise DTypeError(f"{key}: expected a dict or null, got {parameters!r:.60}")
    local = {"rope_theta": config.get("rope_local_base_freq")} if layer_type == "sliding_attention" else {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        if layer_type not in parameters:
            names = ", ".join(parameters)
            raise UnsupportedError(
                f"layer_type: expected one of {names}, got {layer_type}; layers differ, so say which"
            )
        return {**local, **(parameters[layer_type] or {})}
    return local if local.get("rope_theta") is not None else parameters


def _rotary_dim(config: Config, parameters: Config) -> int | None:
    if config.get("kv_lora_rank") is not None:
        return None  # of qk_rope_head_dim dimensions, all turn
    if config.get("rotary_dim") is not None:
        return _count(config, "rotary_dim")
    part = _first(*(_real(of, "partial_rotary_factor") for of in (parameters, config)), _real(config, "rotary_pct"), 1)
    if part > 1:
        raise ShapeError(f"partial_rotary_factor: expected at most 1, got {part}; it is a part of head_dim")
    return None if part == 1 else int(_head_dim(config) * part)


def _scaling(config: Config, parameters: Config) -> RopeScaling | None:
    kind = str(_first(parameters.get("rope_type"), parameters.get("type"), "default"))
    if kind == "su" or (kind == "yarn" and parameters.get("short_factor")):  # Phi-3's early names
        kind = "longrope"
    for key, what in REFUSED_ROPE.items():
        if parameters.get(key):
            raise UnsupportedError(f"{key}: expected none, got {parameters[key]!r}: {what}")
    if kind == "default":
        return None
    if kind not in SCALING_KEYS:
        raise UnsupportedError(
            f"rope_type: expected one of default, {', '.join(SCALING_KEYS)}, got {kind!r}; "
            "give another configuration, or build the Rope yourself"
        )
    given = _scaling_values(config, parameters, kind)
    required, optional = SCALING_KEYS[kind]
    missing = [HF_NAMES.get(key, key) for key in required if given.get(key) is None]
    if missing:
        raise ShapeError(f"rope_parameters: expected {', '.join(missing)} for {kind}, got {', '.join(parameters)}")
    values = {key: given[key] for key in (*required, *optional) if given.get(key) is not None}
    scaling: RopeScaling = getattr(RopeScaling, kind)(**values)
    return scaling


def _scaling_values(config: Config, parameters: Config, kind: str) -> dict[str, Any]:
    """Values under our names, with what may stand outside ``parameters`` or follow from other values."""
    values = dict(parameters)
    key, longest = "original_max_position_embeddings", config.get("max_position_embeddings")
    original = _first(parameters.get(key), config.get(key), longest)
    values["original_max_position"] = original
    if kind in ("yarn", "longrope") and values.get("factor") is None and original and longest:
        both = {key: original, "max_position_embeddings": longest}
        values["factor"] = _count(both, "max_position_embeddings") / _count(both, key)
    return values


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
