"""The matrix product: against float64, and each row by itself, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from treeattn.errors import DTypeError, ShapeError
from treeattn.products import PackedWeight
from treeattn.testing import guard

SHAPES = [(1, 1), (16, 8), (49, 37), (130, 64), (31, 200)]


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_products_are_those_of_float64(shape, threads):
    weight = random(*shape)
    packed = PackedWeight(weight, threads)
    for count in (1, 2, 5, 6, 7, 13, 64):
        x = random(count, shape[1], seed=count)
        exact = x.astype(np.float64) @ weight.T.astype(np.float64)
        # a sum of n products rounds at most n times, each within half a unit of the sum of magnitudes
        bound = shape[1] * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(weight.T)) * 1.01 + 1e-30
        assert (np.abs(packed(x) - exact) <= bound).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_depend_on_the_others_or_on_threads(shape):
    weight = random(*shape)
    packed, other = PackedWeight(weight), PackedWeight(weight, threads=2)
    x = random(23, shape[1], seed=1)
    whole = packed(x)
    for begin, end in ((0, 1), (3, 4), (5, 11), (0, 23), (22, 23)):
        np.testing.assert_array_equal(packed(x[begin:end]), whole[begin:end])
        np.testing.assert_array_equal(other(x[begin:end]), whole[begin:end])


def test_strided_input_and_no_rows():
    weight = random(20, 8)
    packed, x = PackedWeight(weight), random(6, 16)
    np.testing.assert_array_equal(packed(x[::2, 8:]), packed(x[::2, 8:].copy()))
    np.testing.assert_array_equal(packed(x[:, ::2]), packed(x[:, ::2].copy()))
    assert packed(x[:0, :8]).shape == (0, 20)


def test_rows_of_the_weight_come_back():
    weight = random(49, 37)
    outputs = np.array([48, 0, 17, 17], np.int32)
    np.testing.assert_array_equal(PackedWeight(weight).rows(outputs), weight[outputs])


def test_nothing_outside_the_input_is_read():
    packed = PackedWeight(random(17, 5))
    x = random(7, 5)
    np.testing.assert_array_equal(packed(guard.guarded(x)), packed(x))


@pytest.mark.parametrize("weight", [random(3), random(3, 4).astype(np.float64), random(2, 2, 2)])
def test_other_weights_are_refused(weight):
    with pytest.raises(DTypeError, match="weight"):
        PackedWeight(weight)


@pytest.mark.parametrize("x", [random(3), random(2, 5), random(2, 4).astype(np.float64)])
def test_other_inputs_are_refused(x):
    with pytest.raises(ShapeError, match="x: expected float32"):
        PackedWeight(random(3, 4))(x)
