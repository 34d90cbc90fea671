"""What happens to a logit between the product and the mask: soft-cap, then ALiBi, in base-2 units.

A learned sink logit is not here: it is the first entry of a row's denominator (`softmax.start`).
"""

from __future__ import annotations

from .emit import Expr, broadcast, f32, fma, greater, smaller

SATURATED = 7.9  # tanh is 1 in float32 from here on
NUMERATOR = (
    -2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08, 1.48572235717979e-05,
    6.37261928875436e-04, 4.89352455891786e-03,
)  # fmt: skip
DENOMINATOR = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)
"""tanh(x) = x N(x^2) / D(x^2), to a few ulp (the rational approximation of the Eigen library)."""


def tanh(x: Expr, lanes: int) -> Expr:
    """Hyperbolic tangent; NaN stays NaN."""
    x = greater(f32(-SATURATED, lanes), smaller(f32(SATURATED, lanes), x))
    square = x * x

    def polynomial(coefficients: tuple[float, ...]) -> Expr:
        value = f32(coefficients[0], lanes)
        for coefficient in coefficients[1:]:
            value = fma(value, square, f32(coefficient, lanes), lanes)
        return value

    return x * polynomial(NUMERATOR) / polynomial(DENOMINATOR)


def cap(score: Expr, limit: Expr, inverse: Expr, lanes: int) -> Expr:
    """Soft-cap: ``limit * tanh(score / limit)``, with ``limit`` in base-2 units."""
    return broadcast(limit, lanes) * tanh(score * broadcast(inverse, lanes), lanes)


def bias(score: Expr, slope: Expr, distance: Expr, lanes: int) -> Expr:
    """ALiBi: add ``slope * distance``, the slope in base-2 units and the distance key minus query."""
    return fma(slope, distance, score, lanes)
