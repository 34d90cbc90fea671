"""Numbers as arguments: `treeattn.checks`."""

from __future__ import annotations

import numpy as np
import pytest

from treeattn.checks import integer, number, positive
from treeattn.errors import DTypeError, IndexRangeError, ShapeError


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3)])
def test_integers_of_any_kind(value):
    found = integer(value, "x")
    assert (type(found), found) == (int, 3)


@pytest.mark.parametrize("value", [None, "3", 3.0, True, np.True_, [3], np.array([3, 4]), float("nan")])
def test_no_integers(value):
    with pytest.raises(DTypeError, match=r"^x: expected an integer, got "):
        integer(value, "x")


@pytest.mark.parametrize("value", [-1, 6, 2**63, np.uint64(2**63), -(10**5000)], ids=range(5))
def test_integers_out_of_bounds(value):
    with pytest.raises(IndexRangeError, match=r"^x: expected 0 to 5, got "):
        integer(value, "x", 0, 5)


def test_bounds_belong_to_the_range():
    assert [integer(value, "x", -2, 2) for value in (-2, 2)] == [-2, 2]
    assert integer(2**31 - 1, "x") == 2**31 - 1


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int8(2)])
def test_numbers_of_any_kind(value):
    assert [type(check(value, "x")) for check in (number, positive)] == [float, float]
    assert number(value, "x") == 2


def test_no_numbers():
    for value in (None, "2", True, [2.0], 2j):
        with pytest.raises(DTypeError, match=r"^x: expected a number, got "):
            number(value, "x")
    for value in (np.nan, np.inf, -np.inf, 10**400):
        with pytest.raises(ShapeError, match=r"^x: expected a finite number, got "):
            number(value, "x")
    for value in (0, -1.5):
        with pytest.raises(ShapeError, match=r"^x: expected a number above 0, got "):
            positive(value, "x")
