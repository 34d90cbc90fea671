"""Rotary position embedding by its definition: pairs as complex numbers, a pair at a time, in float64.

Scalings are written from wavelengths, the positions one full turn takes: ``2 pi theta ** (2 i / rotary_dim)``.
"""

from __future__ import annotations

import cmath
import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..arrays import to_numpy
from ..rope import Rope, RopeScaling

FloatArray: TypeAlias = NDArray[np.float64]


def rotate(x: Any, positions: Any, rope: Rope, seq_len: int | None = None) -> FloatArray:
    """Turn queries or keys.

    Parameters
    ----------
    x : Array
        ``[n, heads, d]``.
    positions : integers
        ``[n]``.
    rope : Rope
        Only its plain fields are read.
    seq_len : int, optional
        Length of the whole sequence, for the scalings that depend on it; the original context by default.

    Returns
    -------
    turned : float64 ``[n, heads, d]``
    """
    turned = to_numpy(x, "x").astype(np.float64)
    dim = turned.shape[2] if rope.rotary_dim is None else rope.rotary_dim
    size = amplitude(rope.scaling)
    for row, position in enumerate(to_numpy(positions, "positions")):
        for pair in range(dim // 2):
            turn = cmath.rect(size, float(position) * rope.scale * frequency(rope, pair, dim, seq_len or 0))
            first, second = (pair, pair + dim // 2) if rope.style == "neox" else (2 * pair, 2 * pair + 1)
            numbers = (turned[row, :, first] + 1j * turned[row, :, second]) * turn
            turned[row, :, first], turned[row, :, second] = numbers.real, numbers.imag
    return turned


def frequency(rope: Rope, pair: int, dim: int, seq_len: int) -> float:
    """Angle of one pair per position."""
    scaling = rope.scaling
    plain = 2 * math.pi / _wavelength(rope.theta, pair, dim)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "dynamic":
        return 2 * math.pi / _wavelength(_grown_theta(rope.theta, scaling, dim, seq_len), pair, dim)
    if scaling.kind in ("llama3", "llama4"):
        return _llama(scaling, _wavelength(rope.theta, pair, dim))
    if scaling.kind == "yarn":
        blend = _yarn_blend(scaling, rope.theta, pair, dim)
        return blend * plain / scaling.factor + (1 - blend) * plain
    factors = scaling.long_factor if seq_len > scaling.original_max_position else scaling.short_factor
    return plain / factors[pair]


def amplitude(scaling: RopeScaling | None) -> float:
    """Length of the turned pairs over the length they had."""
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    stretch = math.log(max(scaling.factor, 1.0))
    if scaling.kind == "longrope":
        return math.sqrt(1 + stretch / math.log(scaling.original_max_position))
    if scaling.mscale and scaling.mscale_all_dim:
        return (1 + scaling.mscale * stretch / 10) / (1 + scaling.mscale_all_dim * stretch / 10)
    return 1 + stretch / 10


def _wavelength(theta: float, pair: int, dim: int) -> float:
    return 2 * math.pi * math.exp(2 * pair / dim * math.log(theta))


def _grown_theta(theta: float, scaling: RopeScaling, dim: int, seq_len: int) -> float:
    if dim == 2 or seq_len <= scaling.original_max_position:
        return theta
    growth = scaling.factor * seq_len / scaling.original_max_position - (scaling.factor - 1)
    return theta * math.pow(growth, dim / (dim - 2))


def _llama(scaling: RopeScaling, wavelength: float) -> float:
    plain = 2 * math.pi / wavelength
    if wavelength > scaling.original_max_position / scaling.low_freq_factor:
        return plain / scaling.factor
    if wavelength <= scaling.original_max_position / scaling.high_freq_factor:
        return plain
    turns = scaling.original_max_position / wavelength
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def _yarn_blend(scaling: RopeScaling, theta: float, pair: int, dim: int) -> float:
    # The (fractional) pair that turns `times` times in the original context has the wavelength original / times.
    low, high = (
        dim / 2 * math.log(scaling.original_max_position / times / (2 * math.pi), theta)
        for times in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, dim - 1.0)
    if low == high:
        high += 0.001
    return min(max((pair - low) / (high - low), 0.0), 1.0)
