"""Rotary position embedding (RoPE): by which angle each pair of a head's dimensions turns at each position.

At position ``p`` pair ``i`` of the first ``rotary_dim`` dimensions turns by ``p * scale * inv_freq[i]``; the other
dimensions stay. Pairs are ``(i, i + rotary_dim / 2)`` in style "neox" and ``(2 i, 2 i + 1)`` in style "gptj".
All numbers are made in float64 on the host; kernels read them as `Rope.tables`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .arrays import IntArray, as_kind, check_dtype, empty_like_kind, indices, to_numpy
from .checks import integer, number, positive
from .devices import DeviceArray
from .errors import DTypeError, IndexRangeError, ShapeError, UnsupportedError

Float32Array: TypeAlias = NDArray[np.float32]
Float64Array: TypeAlias = NDArray[np.float64]

TABLE_LOW = 1024  # positions of the low table: p = high * TABLE_LOW + low
STYLES = ("neox", "gptj")


@dataclass(frozen=True)
class RopeScaling:
    """How a model stretches RoPE past the context it was trained on; make one with the constructors.

    Attributes
    ----------
    kind : str
        "linear", "dynamic", "llama3", "llama4", "yarn" or "longrope".
    factor : float
        Ratio of the stretched context to the original one.
    original_max_position : int
        The original context; 0 where the kind does not use it.
    low_freq_factor, high_freq_factor, beta_fast, beta_slow, truncate, attention_factor, mscale, mscale_all_dim
        What the constructors say of them.
    short_factor, long_factor : tuple of float
        Divisor of each pair's frequency (longrope), ``[rotary_dim / 2]``.
    """

    kind: str
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in _INV_FREQ:
            raise UnsupportedError(f"kind: expected one of {', '.join(_INV_FREQ)}, got {self.kind!r}")
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            object.__setattr__(self, name, positive(getattr(self, name), name))
        for name, check in (("attention_factor", positive), ("mscale", number), ("mscale_all_dim", number)):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else check(value, name))
        for name in ("short_factor", "long_factor"):
            object.__setattr__(self, name, _positives(getattr(self, name), name))
        length = int(number(self.original_max_position, "original_max_position"))
        if self.kind != "linear" and length < 2:
            raise ShapeError(f"original_max_position: expected 2 tokens or more, got {self.original_max_position}")
        object.__setattr__(self, "original_max_position", length)
        if self.low_freq_factor > self.high_freq_factor:
            raise ShapeError(
                f"low_freq_factor: expected at most high_freq_factor {self.high_freq_factor}, got "
                f"{self.low_freq_factor}; swap them"
            )

    @classmethod
    def linear(cls, factor: float) -> RopeScaling:
        """Position interpolation (Chen et al. 2023, arXiv:2306.15595): every frequency divided by ``factor``."""
        return cls("linear", factor)

    @classmethod
    def dynamic(cls, factor: float, original_max_position: int) -> RopeScaling:
        """Dynamic NTK, as Hugging Face has it: past the original context, theta grows with the sequence's length n.

        ``theta * (factor * n / original - (factor - 1)) ** (d / (d - 2))``; n is the ``seq_len`` of `Rope`'s methods.
        """
        return cls("dynamic", factor, original_max_position)

    @classmethod
    def llama3(
        cls, factor: float, low_freq_factor: float, high_freq_factor: float, original_max_position: int
    ) -> RopeScaling:
        """Llama 3.1: pairs that turn fewer than ``low_freq_factor`` times in the original context are divided by
        ``factor``, those that turn more than ``high_freq_factor`` times stay, those between are blended linearly
        in the number of turns. Equal factors make a step.
        """
        return cls("llama3", factor, original_max_position, low_freq_factor, high_freq_factor)

    @classmethod
    def llama4(
        cls, factor: float, low_freq_factor: float, high_freq_factor: float, original_max_position: int
    ) -> RopeScaling:
        """TVM's name for the scaling of `llama3` in Llama 4, whose pairs are adjacent: use style "gptj" with it."""
        return cls("llama4", factor, original_max_position, low_freq_factor, high_freq_factor)

    @classmethod
    def yarn(
        cls,
        factor: float,
        original_max_position: int,
        beta_fast: float = 32,
        beta_slow: float = 1,
        attention_factor: float | None = None,
        mscale: float | None = None,
        mscale_all_dim: float | None = None,
        truncate: bool = True,
    ) -> RopeScaling:
        """YaRN (Peng et al. 2023, arXiv:2309.00071), as Hugging Face has it.

        Parameters
        ----------
        factor, original_max_position : float, int
            Stretch, and the context it starts from.
        beta_fast, beta_slow : float
            Pairs that turn more than ``beta_fast`` times in the original context stay, fewer than ``beta_slow``
            times are divided by ``factor``; between the two, linear in the pair's index.
        attention_factor : float, optional
            Factor of cosine and sine; by default ``0.1 ln(factor) + 1``.
        mscale, mscale_all_dim : float, optional
            DeepSeek's: with both, the default is ``(0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)``.
        truncate : bool
            Round the two ends of the ramp outwards to whole pairs (gpt-oss does not).
        """
        names = ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")
        values = (beta_fast, beta_slow, truncate, attention_factor, mscale, mscale_all_dim)
        given: dict[str, Any] = dict(zip(names, values, strict=True))
        return cls("yarn", factor, original_max_position, **given)

    @classmethod
    def longrope(
        cls,
        short_factor: Iterable[float],
        long_factor: Iterable[float],
        original_max_position: int,
        factor: float = 1.0,
        attention_factor: float | None = None,
    ) -> RopeScaling:
        """LongRoPE (Ding et al. 2024, arXiv:2402.13753): each pair's frequency is divided by its own factor.

        The long ones serve sequences over ``original_max_position``. Cosine and sine are multiplied by
        ``attention_factor``, by default ``sqrt(1 + ln(factor) / ln(original_max_position))``.
        """
        short, long = _positives(short_factor, "short_factor"), _positives(long_factor, "long_factor")
        given: dict[str, Any] = {"attention_factor": attention_factor, "short_factor": short, "long_factor": long}
        return cls("longrope", factor, original_max_position, **given)


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of queries and keys; immutable and hashable.

    Parameters
    ----------
    theta : float
        Base of the frequencies ``theta ** (-2 i / rotary_dim)``.
    style : str
        "neox": pairs ``(i, i + rotary_dim / 2)``; "gptj": pairs ``(2 i, 2 i + 1)``.
    rotary_dim : int, optional
        Dimensions that turn, an even number; all of d by default.
    scale : float
        Factor of positions (TVM's ``rope_scale``).
    scaling : RopeScaling, optional
        How frequencies are stretched.
    """

    theta: float = 10000.0
    style: str = "neox"
    rotary_dim: int | None = None
    scale: float = 1.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "theta", positive(self.theta, "theta"))
        object.__setattr__(self, "scale", positive(self.scale, "scale"))
        if self.style not in STYLES:
            raise UnsupportedError(f"style: expected one of {', '.join(STYLES)}, got {self.style!r}")
        if self.rotary_dim is not None:
            object.__setattr__(self, "rotary_dim", _even(self.rotary_dim, "rotary_dim"))
        if not isinstance(self.scaling, RopeScaling | None):
            raise DTypeError(
                f"scaling: expected RopeScaling or None, got {type(self.scaling).__name__}; "
                "make one with RopeScaling.llama3, ..."
            )
        if self.scaling is not None and self.scaling.kind == "yarn" and self.theta <= 1:
            raise ShapeError(f"theta: expected above 1 for yarn, got {self.theta}; the ramp is logarithmic in it")

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any] | str | Path, layer_type: str | None = None) -> Rope:
        """Rope of a Hugging Face model configuration, in its old and new spellings.

        Parameters
        ----------
        config : dict or path
            The configuration, or its ``config.json`` (or the directory of it); a nested ``text_config`` is found.
        layer_type : str, optional
            For models whose layers differ (Gemma 3): "full_attention" or "sliding_attention".

        Raises
        ------
        UnsupportedError
            A scaling that is not offered, by name, or layers that differ and no ``layer_type``.
        ShapeError, DTypeError
            Values that are missing, contradict each other or have the wrong type.
        """
        from .hf import rope_from_hf_config  # hf makes Ropes, so it cannot be imported on load

        return rope_from_hf_config(config, layer_type)

    @property
    def attention_factor(self) -> float:
        """Factor of every cosine and sine (yarn, longrope); 1 otherwise."""
        return 1.0 if self.scaling is None else _attention_factor(self.scaling)

    @property
    def needs_seq_len(self) -> bool:
        """Whether frequencies depend on the sequence's length (dynamic, longrope)."""
        return self.scaling is not None and self.scaling.kind in ("dynamic", "longrope")

    def half(self, d: int) -> int:
        """Number of pairs that turn in a head of ``d`` dimensions: ``rotary_dim / 2``."""
        dim = _even(d, "d") if self.rotary_dim is None else self.rotary_dim
        if dim > d:
            raise ShapeError(f"d: expected at least rotary_dim {dim}, got {d}; lower rotary_dim")
        return dim // 2

    def pairs(self, d: int) -> tuple[slice, slice]:
        """Dimensions of the pairs' first and second members in a head of ``d`` dimensions."""
        half = self.half(d)
        if self.style == "neox":
            return slice(0, half), slice(half, 2 * half)
        return slice(0, 2 * half, 2), slice(1, 2 * half, 2)

    def inv_freq(self, d: int, seq_len: int | None = None) -> Float64Array:
        """Angle of each pair per position, float64 ``[rotary_dim / 2]``, without ``scale``.

        ``seq_len`` is the whole length of the sequence, for the scalings that depend on it; without it they give the
        frequencies of the original context. Sequences that share a batch may need different ones.
        """
        dim = 2 * self.half(d)
        if self.scaling is None:
            return _frequencies(self.theta, dim)
        return _INV_FREQ[self.scaling.kind](self.scaling, self.theta, dim, seq_len or 0)

    def cos_sin(self, positions: Any, d: int, seq_len: int | None = None) -> tuple[Float32Array, Float32Array]:
        """Cosine and sine at ``positions``, each float32 ``[n, rotary_dim / 2]``, rounded from float64.

        Both are multiplied by `attention_factor`.
        """
        where = check_positions(positions)
        cos, sin = _turn(self, where, d, seq_len)
        factor = self.attention_factor
        return (factor * cos).astype(np.float32), (factor * sin).astype(np.float32)

    def tables(self, d: int, max_position: int, seq_len: int | None = None) -> Float32Array:
        """Cosines and sines of every position up to ``max_position``, in two levels, for kernels.

        Parameters
        ----------
        d : int
            Dimensions of a head.
        max_position : int
            Largest position to serve.
        seq_len : int, optional
            As in `inv_freq`.

        Returns
        -------
        tables : float32 ``[TABLE_LOW + max_position // TABLE_LOW + 1, 2, rotary_dim / 2]``, read-only, contiguous
            Row r below ``TABLE_LOW``: cosines (entry 0) and sines (entry 1) of position r, times `attention_factor`.
            Row ``TABLE_LOW + h``: those of position ``h * TABLE_LOW``, without it. So for position p, with the rows
            ``a = p % TABLE_LOW`` and ``b = TABLE_LOW + p // TABLE_LOW``::

                cos = cos_a * cos_b - sin_a * sin_b
                sin = sin_a * cos_b + cos_a * sin_b

            which float32 computes to within 3e-7 (times the attention factor) of float64 up to position 1,000,000.
        """
        if max_position < 0:
            raise IndexRangeError(f"max_position: expected 0 or more, got {max_position}")
        return _tables(self, d, int(max_position) // TABLE_LOW, seq_len if self.needs_seq_len else None)

    def rotate(self, x: Any, positions: Any, seq_len: int | None = None) -> Any:
        """Turn queries or keys where they are, computing in float32.

        Parameters
        ----------
        x : Array
            ``[n, heads, d]``, float32, float16 or bfloat16; not written to.
        positions : integers
            ``[n]``.
        seq_len : int, optional
            As in `inv_freq`.

        Returns
        -------
        turned : Array
            ``[n, heads, d]``, of the kind and dtype of ``x``.
        """
        if isinstance(x, DeviceArray):
            from . import device_ops

            return device_ops.rotate(x, self, positions, seq_len)
        source = to_numpy(x, "x")
        dtype = check_dtype(source.dtype.name, "x")
        if source.ndim != 3:
            raise ShapeError(f"x: expected shape [n, heads, d], got {list(source.shape)}; reshape it")
        n, _, d = source.shape
        cos, sin = (part[:, None] for part in self.cos_sin(check_positions(positions, n), d, seq_len))
        turned = source.astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity are data, not mistakes
            turn_pairs(turned, cos, sin, self.pairs(d))
            out = empty_like_kind(x, source.shape, dtype)
            to_numpy(out, "out")[...] = turned.astype(source.dtype)
        return as_kind(out, x)


def turn_pairs(x: NDArray[Any], cos: NDArray[Any], sin: NDArray[Any], pairs: tuple[slice, slice]) -> None:
    """Turn ``x [n, heads, d]`` in place by angles ``[n, 1, rotary_dim / 2]``, for callers who keep those of a step."""
    first, second = (x[..., part] for part in pairs)
    first[...], second[...] = first * cos - second * sin, second * cos + first * sin


def _turn(rope: Rope, positions: NDArray[Any], d: int, seq_len: int | None) -> tuple[Float64Array, Float64Array]:
    angle = positions.astype(np.float64)[:, None] * rope.scale * rope.inv_freq(d, seq_len)
    return np.cos(angle), np.sin(angle)


@lru_cache(maxsize=16)
def _tables(rope: Rope, d: int, top: int, seq_len: int | None) -> Float32Array:
    low = np.stack(_turn(rope, np.arange(TABLE_LOW), d, seq_len), axis=1) * rope.attention_factor
    high = np.stack(_turn(rope, np.arange(top + 1) * TABLE_LOW, d, seq_len), axis=1)
    tables = np.concatenate([low, high]).astype(np.float32)
    tables.setflags(write=False)
    return tables


def _frequencies(theta: float, dim: int) -> Float64Array:
    powers: Float64Array = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    return powers


def _linear(scaling: RopeScaling, theta: float, dim: int, seq_len: int) -> Float64Array:
    return _frequencies(theta, dim) / scaling.factor


def _dynamic(scaling: RopeScaling, theta: float, dim: int, seq_len: int) -> Float64Array:
    stretch = max(seq_len, scaling.original_max_position) / scaling.original_max_position
    growth = scaling.factor * (stretch - 1) + 1
    return _frequencies(theta * growth ** (dim / max(dim - 2, 1)), dim)  # one pair alone has frequency 1 anyway


def _llama(scaling: RopeScaling, theta: float, dim: int, seq_len: int) -> Float64Array:
    frequencies = _frequencies(theta, dim)
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1) if low < high else turns >= low
    scaled: Float64Array = frequencies * (kept + (1 - kept) / scaling.factor)
    return scaled


def _yarn(scaling: RopeScaling, theta: float, dim: int, seq_len: int) -> Float64Array:
    def pair_that_turns(times: float) -> float:
        return dim * math.log(scaling.original_max_position / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    stretched = np.clip((np.arange(dim // 2) - low) / width, 0, 1)
    scaled: Float64Array = _frequencies(theta, dim) * (1 - stretched + stretched / scaling.factor)
    return scaled


def _longrope(scaling: RopeScaling, theta: float, dim: int, seq_len: int) -> Float64Array:
    is_long = seq_len > scaling.original_max_position
    name, factors = ("long_factor", scaling.long_factor) if is_long else ("short_factor", scaling.short_factor)
    if len(factors) != dim // 2:
        raise ShapeError(f"{name}: expected {dim // 2} numbers (rotary_dim / 2), got {len(factors)}; check rotary_dim")
    scaled: Float64Array = _frequencies(theta, dim) / np.array(factors, np.float64)
    return scaled


_INV_FREQ: dict[str, Callable[[RopeScaling, float, int, int], Float64Array]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama,
    "llama4": _llama,
    "yarn": _yarn,
    "longrope": _longrope,
}


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's growth of attention with the stretch: ``0.1 mscale ln(factor) + 1``, and 1 where nothing is stretched."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def _attention_factor(scaling: RopeScaling) -> float:
    factor = scaling.factor
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "yarn":
        if scaling.mscale and scaling.mscale_all_dim:
            return yarn_mscale(factor, scaling.mscale) / yarn_mscale(factor, scaling.mscale_all_dim)
        return yarn_mscale(factor)
    if scaling.kind == "longrope" and factor > 1:
        return math.sqrt(1 + math.log(factor) / math.log(scaling.original_max_position))
    return 1.0


def _positives(values: Any, name: str) -> tuple[float, ...]:
    try:
        items = tuple(values)
    except TypeError:
        raise DTypeError(f"{name}: expected a list of numbers, got {values!r:.60}") from None
    return tuple(positive(value, f"{name}[{index}]") for index, value in enumerate(items))


def check_positions(positions: Any, count: int | None = None) -> IntArray:
    """Return positions as int32 ``[count]``, checked."""
    where = indices(positions, "positions")
    if count is not None and len(where) != count:
        raise ShapeError(f"positions: expected shape [{count}] (one a row), got [{len(where)}]")
    if where.size and where.min() < 0:
        at = int(np.argmin(where))
        raise IndexRangeError(f"positions: expected 0 or more, got {where[at]} at index {at}; count from 0")
    return where


def _even(value: Any, name: str) -> int:
    found = integer(value, name)
    if found % 2:
        raise ShapeError(f"{name}: expected an even number above 0, got {found}; pairs of dimensions turn together")
    return found
