"""Numbers that are arguments: of the right type and within bounds, or an error that names the argument."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from .arrays import INT32_MAX
from .errors import DTypeError, IndexRangeError, ShapeError


def integer(value: Any, name: str, least: int = 1, most: int = INT32_MAX) -> int:
    """Return an integer, NumPy's and PyTorch's included, as an int in ``[least, most]``.

    Raises
    ------
    DTypeError
        Anything else, a bool too.
    IndexRangeError
        An integer outside the bounds.
    """
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool):
        raise DTypeError(f"{name}: expected an integer, got {value!r:.60}")
    if not least <= found <= most:
        shown = found if abs(found) < 2**64 else "one of more digits"  # Python refuses to print thousands of them
        raise IndexRangeError(f"{name}: expected {least} to {most}, got {shown}")
    return found


def number(value: Any, name: str, most: float = math.inf) -> float:
    """Return a finite number as a float, of a size up to ``most``.

    Raises
    ------
    DTypeError
        No number; a bool too.
    ShapeError
        NaN, an infinity, an integer beyond float64, or a number beyond ``most``.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise DTypeError(f"{name}: expected a number, got {value!r:.60}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise ShapeError(f"{name}: expected a finite number, got {found}")
    if abs(found) > most:
        raise ShapeError(f"{name}: expected a number within {most:.1e}, got {found}; float32 holds few larger ones")
    return found


def positive(value: Any, name: str, most: float = math.inf) -> float:
    """Return a finite number above 0 as a float; errors as in `number`."""
    found = number(value, name, most)
    if found <= 0:
        raise ShapeError(f"{name}: expected a number above 0, got {value}")
    return found
