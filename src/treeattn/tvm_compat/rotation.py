"""Angles of RoPE as TVM describes them (its ``rope_scaling`` dictionaries), inside a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ..checks import integer, positive
from ..errors import DTypeError, ShapeError, UnsupportedError
from ..kernels.emit import Expr, f32, let, private, put
from ..logits import LARGEST

TURN = 0.5 / math.pi

Frequency = Callable[[Expr, Expr], Expr]
"""Angle per position of a pair, from its index and theta, in the float type of theta."""


@dataclass(frozen=True)
class Rotation:
    """RoPE of a function with ``rotary_mode``: ``frequency(pair, theta)``, and the size of cos and sin."""

    style: str
    rotary_dim: int
    frequency: Frequency
    size: float


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


def constants(like: Expr) -> Callable[[float], Expr]:
    """Return the maker of constants of another value's float type."""
    return T.float64 if str(like.ty.dtype) == "float64" else f32


def cos_sin_of_turns(turns: Expr, size: float) -> tuple[Expr, Expr]:
    """Return cosine and sine of an angle given in turns, times ``size``: of its part of a turn, which float32 holds."""
    cell = private(1, turns.ty.dtype)  # TVM's analyser refuses a variable of this type
    put(cell, 0, turns)
    rest = T.cast(cell[0] - T.floor(cell[0] + constants(turns)(0.5)), "float32")
    angle = let(rest * f32(2 * math.pi))
    return T.cos(angle) * f32(size), T.sin(angle) * f32(size)


def _base(pair: Expr, theta: Expr, rotary_dim: int) -> Expr:
    return T.pow(theta, T.cast(pair, theta.ty.dtype) * constants(theta)(-2.0 / rotary_dim))


def _plain(_: Mapping[str, Any], rotary_dim: int) -> Frequency:
    return lambda pair, theta: _base(pair, theta, rotary_dim)


def _llama(scaling: Mapping[str, Any], rotary_dim: int) -> Frequency:
    low, high, factor = (_value(scaling, key) for key in ("low_freq_factor", "high_freq_factor", "factor"))
    if low > high:
        raise ShapeError(f"rope_scaling: expected low_freq_factor up to high_freq_factor {high}, got {low}; swap them")
    turns = original_length(scaling) / (2 * math.pi)

    def frequency(pair: Expr, theta: Expr) -> Expr:
        real, base = constants(theta), _base(pair, theta, rotary_dim)
        if high == low:
            kept = T.if_then_else(base * real(turns) < real(low), real(0), real(1))
        else:
            kept = T.max(real(0), T.min(real(1), (base * real(turns) - real(low)) / real(high - low)))
        return base * (kept + (real(1) - kept) / real(factor))

    return frequency


def _yarn(scaling: Mapping[str, Any], rotary_dim: int) -> Frequency:
    inverse_log = _value(scaling, "inv_theta_log_scale")  # 1 / (2 ln theta), which TVM computes beforehand
    length, factor = original_length(scaling), _value(scaling, "factor")

    def pair_that_turns(key: str) -> float:
        return rotary_dim * math.log(length / (_value(scaling, key) * 2 * math.pi)) * inverse_log

    low = max(pair_that_turns("beta_fast"), 0.0)
    high = min(pair_that_turns("beta_slow"), rotary_dim - 1.0)
    width = high - low or 0.001

    def frequency(pair: Expr, theta: Expr) -> Expr:
        real = constants(theta)
        ramp = (T.cast(pair, theta.ty.dtype) - real(low)) / real(width)
        stretched = T.max(real(0), T.min(real(1), ramp))
        return _base(pair, theta, rotary_dim) * (real(1) - stretched + stretched / real(factor))

    return frequency


def _longrope_size(scaling: Mapping[str, Any]) -> float:
    length = original_length(scaling)
    stretch = _value(scaling, "max_position_embeddings") / length
    return math.sqrt(1 + math.log(stretch) / math.log(length)) if stretch > 1 else 1.0


def original_length(scaling: Mapping[str, Any]) -> int:
    """Return how many positions a model was trained with."""
    key = "original_max_position_embeddings"
    return integer(_entry(scaling, key), f"rope_scaling[{key!r}]", 2)


def _value(scaling: Mapping[str, Any], key: str) -> float:
    return positive(_entry(scaling, key), f"rope_scaling[{key!r}]", LARGEST)


def _entry(scaling: Mapping[str, Any], key: str) -> Any:
    if key not in scaling:
        raise ShapeError(f"rope_scaling: expected {key!r} beside rope_type {scaling['rope_type']!r}, got none; add it")
    return scaling[key]
