"""Online softmax in base 2 with an integer running maximum.

The maximum kept is rounded up to an integer, so every rescale factor is a power of two and nothing is rounded by
rescaling: a row's result depends on its visible keys in order, not on where blocks begin. Scores are in base-2 units
(scale and log2(e) are folded into q) from the first product on.
"""

from __future__ import annotations

import numpy as np
from tvm.script import tirx as T

from .emit import Expr, broadcast, f32, fma, greater, let, typed

LOG2_E = float(np.log2(np.e))
MASKED = float(np.finfo(np.float32).min)
"""The score of an invisible key; `NOTHING`, one step above, is the maximum of a row that has seen none."""
NOTHING = float(np.nextafter(np.float32(MASKED), np.float32(0)))

EXP2 = (1.8775767e-3, 8.9893397e-3, 5.5826318e-2, 2.4015361e-1, 6.9315308e-1, 9.9999994e-1)
"""2^f on [0, 1) to 1.5e-7 (minimax, degree 5)."""
BIAS = 127.0


def power_of_two(biased: Expr, lanes: int) -> Expr:
    """``2^(biased - 127)`` for an integer-valued float; exactly 0 for ``biased <= 0``."""
    bits = greater(biased, f32(0.0, lanes)).astype(typed("int32", lanes))
    return T.reinterpret(typed("float32", lanes), T.shift_left(bits, broadcast(T.int32(23), lanes)))


def rescale(old: Expr, new: Expr, lanes: int) -> Expr:
    """Return the factor ``2^(old - new)`` that moves sums from one running maximum to the next, exactly."""
    return power_of_two(old - new + f32(BIAS, lanes), lanes)


def weight(score: Expr, maximum: Expr, lanes: int) -> Expr:
    """``2^(score - maximum)``; exactly 0 for a masked score.

    The fraction is taken before the maximum is known, so the same score gives the same mantissa in every block.
    """
    score = greater(f32(MASKED, lanes), score)  # minus infinity would make the fraction NaN; NaN stays
    whole = T.floor(score)
    fraction = score - whole
    power = f32(EXP2[0], lanes)
    for coefficient in EXP2[1:]:
        power = fma(power, fraction, f32(coefficient, lanes), lanes)
    return power * rescale(whole, maximum, lanes)


def start(sink: Expr | None) -> tuple[Expr, Expr]:
    """Return the maximum and denominator of a row before its first key: those of its sink logit, if it has one."""
    if sink is None:
        return f32(NOTHING), f32(0.0)
    score = let(sink * f32(LOG2_E))
    maximum = let(T.ceil(greater(f32(NOTHING), score)))
    return maximum, weight(score, maximum, 1)


def normaliser(denominator: Expr, lanes: int) -> Expr:
    """Return ``1 / denominator``, and 0 for a row that saw nothing."""
    return T.Select(denominator == f32(0.0, lanes), f32(0.0, lanes), f32(1.0, lanes) / denominator)
