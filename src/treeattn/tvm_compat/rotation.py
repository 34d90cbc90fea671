"""Frequencies of RoPE as TVM describes them (its ``rope_scaling`` dictionaries), in float64 inside a function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from ..errors import UnsupportedError
from ..kernels.emit import Expr
from . import page_ops
from .attention import Rotation

Frequency = Callable[[Expr, Expr], Expr]
"""Angle per position of a pair, from its index and theta."""


def rotation(rope_scaling: dict[str, Any], rotary_dim: int) -> Rotation:
    """Return the rotation of a ``rope_scaling`` dictionary; without ``rope_type``, plain RoPE of halves.

    Raises
    ------
    UnsupportedError
        An unknown ``rope_type``.
    """
    kind = rope_scaling.get("rope_type")
    makers: dict[Any, Callable[[dict[str, Any], int], Frequency]] = {
        None: _plain, "gptj": _plain, "llama3": _llama, "llama4": _llama, "yarn": _yarn, "longrope": _plain
    }  # fmt: skip
    if kind not in makers:
        known = ", ".join(name for name in makers if name)
        raise UnsupportedError(f"rope_scaling: expected a rope_type of {known}, got {kind!r}")
    style = "gptj" if kind in ("gptj", "llama4") else "neox"
    size = _longrope_size(rope_scaling) if kind == "longrope" else 1.0
    return Rotation(style, rotary_dim, makers[kind](rope_scaling, rotary_dim), size)


def f64(value: float) -> Expr:
    """Return a float64 constant."""
    return T.float64(value)


def split_rotary(
    theta: float,
    scale: float,
    d: int,
    q_heads: int,
    kv_heads: int,
    dtype: str,
    rope_scaling: dict[str, Any],
    rotary_dim: int,
) -> Any:
    """Build `page_ops.split_rotary` for a ``rope_scaling`` dictionary."""
    made = rotation(rope_scaling, rotary_dim)
    extended = rope_scaling.get("rope_type") == "longrope"
    length = int(rope_scaling.get("original_max_position_embeddings", 0))

    def cos_sin(pair: Expr, position: Expr, factors: Any, last: Expr) -> tuple[Expr, Expr]:
        frequency = made.frequency(pair, f64(theta))
        if extended:  # the long factors come first
            place = T.if_then_else(last >= length, pair, pair + rotary_dim // 2)
            frequency = frequency / T.cast(factors[place], "float64")
        turn = T.cast(position, "float64") * f64(scale) * frequency
        cos, sin = (T.cast(wave(turn) * f64(made.size), "float32") for wave in (T.cos, T.sin))
        return cos, sin

    heads = {"q": q_heads, "k": kv_heads, "v": kv_heads}
    return page_ops.split_rotary("fused_rope", heads, d, dtype, rotary_dim, made.style, cos_sin, extended=extended)


def _base(pair: Expr, theta: Expr, rotary_dim: int) -> Expr:
    return T.pow(theta, T.cast(pair, "float64") * f64(-2.0 / rotary_dim))


def _plain(_: dict[str, Any], rotary_dim: int) -> Frequency:
    return lambda pair, theta: _base(pair, theta, rotary_dim)


def _llama(scaling: dict[str, Any], rotary_dim: int) -> Frequency:
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi)

    def frequency(pair: Expr, theta: Expr) -> Expr:
        base = _base(pair, theta, rotary_dim)
        if high == low:
            kept = T.if_then_else(base * f64(turns) < f64(low), f64(0), f64(1))
        else:
            kept = T.max(f64(0), T.min(f64(1), (base * f64(turns) - f64(low)) / f64(high - low)))
        return base * (kept + (f64(1) - kept) / f64(scaling["factor"]))

    return frequency


def _yarn(scaling: dict[str, Any], rotary_dim: int) -> Frequency:
    inverse_log = scaling["inv_theta_log_scale"]  # 1 / (2 ln theta), which TVM computes beforehand

    def pair_that_turns(times: float) -> float:
        length = scaling["original_max_position_embeddings"]
        return float(rotary_dim * math.log(length / (times * 2 * math.pi)) * inverse_log)

    low = max(pair_that_turns(scaling["beta_fast"]), 0.0)
    high = min(pair_that_turns(scaling["beta_slow"]), rotary_dim - 1.0)
    width = high - low or 0.001

    def frequency(pair: Expr, theta: Expr) -> Expr:
        ramp = (T.cast(pair, "float64") - f64(low)) / f64(width)
        stretched = T.max(f64(0), T.min(f64(1), ramp))
        return _base(pair, theta, rotary_dim) * (f64(1) - stretched + stretched / f64(scaling["factor"]))

    return frequency


def _longrope_size(scaling: dict[str, Any]) -> float:
    stretch = scaling["max_position_embeddings"] / scaling["original_max_position_embeddings"]
    return (
        math.sqrt(1 + math.log(stretch) / math.log(scaling["original_max_position_embeddings"])) if stretch > 1 else 1.0
    )
