"""Frequencies of RoPE as TVM describes them (its ``rope_scaling`` dictionaries), in float64 inside a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tvm.script import tirx as T

from ..arrays import DTYPES
from ..checks import integer, positive
from ..errors import DTypeError, ShapeError, UnsupportedError
from ..kernels.emit import Expr
from . import page_ops
from .attention import Rotation

Frequency = Callable[[Expr, Expr], Expr]
"""Angle per position of a pair, from its index and theta."""


def rotation(rope_scaling: Mapping[str, Any], rotary_dim: int) -> Rotation:
    """Return the rotation of a ``rope_scaling`` dictionary; without ``rope_type``, plain RoPE of halves.

    Raises
    ------
    UnsupportedError
        An unknown ``rope_type``.
    ShapeError, DTypeError, IndexRangeError
        A key that its type needs and that is missing or no such number; the message names it.
    """
    if not isinstance(rope_scaling, Mapping):
        raise DTypeError(f"rope_scaling: expected a dict, got {rope_scaling!r:.60}; pass {{}} for plain RoPE")
    kind = rope_scaling.get("rope_type")
    makers: dict[Any, Callable[[Mapping[str, Any], int], Frequency]] = {
        None: _plain, "gptj": _plain, "llama3": _llama, "llama4": _llama, "yarn": _yarn, "longrope": _plain
    }  # fmt: skip
    if not isinstance(kind, str | None) or kind not in makers:
        known = ", ".join(name for name in makers if name)
        raise UnsupportedError(f"rope_scaling: expected a rope_type of {known}, got {kind!r:.60}")
    integer(rotary_dim, "rotary_dim")
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
    most = integer(d, "head_dim")
    made = rotation(rope_scaling, rotary_dim)
    theta, scale = positive(theta, "theta"), positive(scale, "scale")
    if integer(rotary_dim, "rotary_dim", most=most) % 2:
        raise ShapeError(f"rotary_dim: expected an even number, got {rotary_dim}; pairs of dimensions turn together")
    integer(q_heads, "num_q_heads"), integer(kv_heads, "num_kv_heads", 0)
    if dtype not in DTYPES:
        raise DTypeError(f"dtype: expected {', '.join(DTYPES)}, got {dtype!r:.60}")
    extended = rope_scaling.get("rope_type") == "longrope"
    length = _original(rope_scaling) if extended else 0

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


def _plain(_: Mapping[str, Any], rotary_dim: int) -> Frequency:
    return lambda pair, theta: _base(pair, theta, rotary_dim)


def _llama(scaling: Mapping[str, Any], rotary_dim: int) -> Frequency:
    low, high, factor = (_value(scaling, key) for key in ("low_freq_factor", "high_freq_factor", "factor"))
    if low > high:
        raise ShapeError(f"rope_scaling: expected low_freq_factor up to high_freq_factor {high}, got {low}; swap them")
    turns = _original(scaling) / (2 * math.pi)

    def frequency(pair: Expr, theta: Expr) -> Expr:
        base = _base(pair, theta, rotary_dim)
        if high == low:
            kept = T.if_then_else(base * f64(turns) < f64(low), f64(0), f64(1))
        else:
            kept = T.max(f64(0), T.min(f64(1), (base * f64(turns) - f64(low)) / f64(high - low)))
        return base * (kept + (f64(1) - kept) / f64(factor))

    return frequency


def _yarn(scaling: Mapping[str, Any], rotary_dim: int) -> Frequency:
    inverse_log = _value(scaling, "inv_theta_log_scale")  # 1 / (2 ln theta), which TVM computes beforehand
    length, factor = _original(scaling), _value(scaling, "factor")

    def pair_that_turns(key: str) -> float:
        return rotary_dim * math.log(length / (_value(scaling, key) * 2 * math.pi)) * inverse_log

    low = max(pair_that_turns("beta_fast"), 0.0)
    high = min(pair_that_turns("beta_slow"), rotary_dim - 1.0)
    width = high - low or 0.001

    def frequency(pair: Expr, theta: Expr) -> Expr:
        ramp = (T.cast(pair, "float64") - f64(low)) / f64(width)
        stretched = T.max(f64(0), T.min(f64(1), ramp))
        return _base(pair, theta, rotary_dim) * (f64(1) - stretched + stretched / f64(factor))

    return frequency


def _longrope_size(scaling: Mapping[str, Any]) -> float:
    length = _original(scaling)
    stretch = _value(scaling, "max_position_embeddings") / length
    return math.sqrt(1 + math.log(stretch) / math.log(length)) if stretch > 1 else 1.0


def _original(scaling: Mapping[str, Any]) -> int:
    key = "original_max_position_embeddings"
    return integer(_entry(scaling, key), f"rope_scaling[{key!r}]", 2)


def _value(scaling: Mapping[str, Any], key: str) -> float:
    return positive(_entry(scaling, key), f"rope_scaling[{key!r}]")


def _entry(scaling: Mapping[str, Any], key: str) -> Any:
    if key not in scaling:
        raise ShapeError(f"rope_scaling: expected {key!r} beside rope_type {scaling['rope_type']!r}, got none; add it")
    return scaling[key]
