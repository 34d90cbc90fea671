"""What happens to a logit besides ``sm_scale * q . k``: soft-cap, ALiBi, learned sinks; and RoPE before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import to_numpy
from .checks import number
from .errors import DTypeError, ShapeError
from .rope import Rope

FloatArray = NDArray[np.float32]

LARGEST = float(np.finfo(np.float32).max) / 2
"""Largest factor or logit: kernels multiply it by log2(e), in float32."""
SMALLEST = float(np.finfo(np.float32).tiny)
"""Smallest soft-cap, whose inverse float32 still holds."""


@dataclass(frozen=True, eq=False)
class LogitParts:
    """The optional parts of a call, checked; which are there is compile-time, their values are data.

    Parameters
    ----------
    softcap : float, optional
        ``logit = softcap * tanh(sm_scale * q . k / softcap)``, before anything else.
    alibi : Array, optional
        Slopes, float ``[q_heads]``: ``logit += slope * (position of key - position of query)``.
    sink_logits : Array, optional
        Float ``[q_heads]``, natural units: a key without value that every row sees, in the denominator and the LSE.
    rope : Rope, optional
        Keys and q come unrotated and are rotated by position as they are read.
    """

    softcap: float | None = None
    alibi: FloatArray | None = None
    sink_logits: FloatArray | None = None
    rope: Rope | None = None

    @property
    def form(self) -> tuple[str, ...]:
        """Names of the parts that change logits, in the order of `KernelSpec.logits`."""
        parts = {"softcap": self.softcap, "alibi": self.alibi, "sinks": self.sink_logits}
        return tuple(name for name, value in parts.items() if value is not None)

    @property
    def positions(self) -> bool:
        """Whether positions of rows matter beyond the mask."""
        return self.rope is not None or self.alibi is not None


def check_parts(softcap: Any, alibi: Any, sink_logits: Any, rope: Any, q_heads: int) -> LogitParts:
    """Return the parts of a call, checked.

    Raises
    ------
    DTypeError, ShapeError
        A part of the wrong type, size, or value.
    """
    if rope is not None and not isinstance(rope, Rope):
        raise DTypeError(f"rope: expected a Rope, got {type(rope).__name__}; make one with ta.Rope(theta=...)")
    return LogitParts(
        _check_softcap(softcap),
        _per_head(alibi, "alibi", q_heads, finite=True),
        _per_head(sink_logits, "sink_logits", q_heads, finite=False),
        rope,
    )


def _check_softcap(softcap: Any) -> float | None:
    if softcap is None:
        return None
    if not SMALLEST <= number(softcap, "softcap") <= LARGEST:
        raise ShapeError(
            f"softcap: expected a number from {SMALLEST:.1e} to {LARGEST:.1e}, got {softcap}; pass None for no soft-cap"
        )
    return float(softcap)


def _per_head(values: Any, name: str, q_heads: int, *, finite: bool) -> FloatArray | None:
    if values is None:
        return None
    array = to_numpy(values, name)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise DTypeError(f"{name}: expected numbers, got dtype {array.dtype}")
    if array.shape != (q_heads,):
        raise ShapeError(f"{name}: expected shape [q_heads] = [{q_heads}], got {list(array.shape)}")
    wide = array.astype(np.float64)
    fine = (abs(wide) <= LARGEST) | (~np.isfinite(wide) & (wide < 0) & (not finite))
    if not fine.all():
        head = int(np.argmin(fine))
        raise ShapeError(f"{name}: expected numbers within {LARGEST:.1e}, got {wide[head]} for head {head}")
    return wide.astype(np.float32)
