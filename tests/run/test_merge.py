"""Merging states of disjoint key sets is attention over their union."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from helpers import DTYPES, attend, rng
from hypothesis import given, settings
from hypothesis import strategies as st

import treeattn as ta
from treeattn import reference
from treeattn.arrays import numpy_dtype
from treeattn.testing import assert_within_budget, make_case
from treeattn.testing.strategies import seeds

NOTHING = np.zeros((2, 3, 4), np.float32), np.full((2, 3), -np.inf, np.float32)


def state(seed=0, shape=(2, 3, 4), spread=10.0):
    return (
        rng(seed).standard_normal(shape).astype(np.float32),
        (rng(seed + 99).standard_normal(shape[:-1]) * spread).astype(np.float32),
    )


def flat(states):
    return [array for one in states for array in one]


@settings(deadline=None, max_examples=80)
@given(st.lists(seeds(), min_size=2, max_size=6), st.sampled_from([0.0, 1.0, 30.0, 300.0]))
def test_merge_is_the_references(seeds, spread):
    states = [state(seed, spread=spread) for seed in seeds]
    out, lse = ta.merge(*flat(states))
    want_out, want_lse = reference.merge(states)
    assert (out.dtype, lse.dtype) == (np.float32, np.float32)
    np.testing.assert_allclose(out, want_out, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cuts", [[20], [0, 60], [1, 2, 33], [20, 20]])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_parts_merge_to_attention_over_the_union(cuts, dtype):
    case = make_case(rng(), mask="full", lengths=[(4, 60)], storage="ragged", dtype=dtype, logit_scale=20.0)
    edges = [0, *cuts, 60]
    parts = []
    for begin, end in pairwise(edges):
        kv = ta.RaggedKV(case.kv.k[begin:end], case.kv.v[begin:end], [0, end - begin])
        parts.append(ta.attention(case.q, kv, ta.Full()))
    merged = ta.merge(*flat(parts))
    if dtype == "float32":
        assert_within_budget(*merged, case)
    else:  # every part was rounded to float16 before
        np.testing.assert_allclose(merged[0].astype(np.float32), case.expected[0], atol=4e-3)
        np.testing.assert_allclose(merged[1], case.expected[1], rtol=1e-5)


def test_nothing_beside_a_state_is_the_state():
    one = state()
    for pair in ((one, NOTHING), (NOTHING, one), (NOTHING, NOTHING, one), (one, NOTHING, NOTHING)):
        got = ta.merge(*flat(pair))
        assert all(map(np.array_equal, got, one))


def test_nothing_and_nothing_is_nothing():
    for count in (2, 3, 5):
        out, lse = ta.merge(*flat([NOTHING] * count))
        assert (out == 0).all()
        assert np.isneginf(lse).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lse", [np.nan, np.inf])
def test_an_lse_that_is_no_number_spoils_its_row_alone(lse):
    one, other = state(0), state(1)
    want = ta.merge(*one, *other)
    other[1][0, 1] = lse
    spoilt = np.zeros((2, 3), bool)
    spoilt[0, 1] = True
    for got, right in zip(ta.merge(*one, *other), want, strict=True):
        assert np.isnan(got[spoilt]).all()
        assert np.array_equal(got[~spoilt], right[~spoilt])


@pytest.mark.filterwarnings("error")
def test_infinite_outputs_add_as_float32_does():
    one, other = state(0), state(1)
    one[0][0, 0], other[0][0, 0, :2] = np.inf, -np.inf
    out, lse = ta.merge(*one, *other)
    assert np.isnan(out[0, 0, :2]).all()
    assert np.isposinf(out[0, 0, 2:]).all()
    assert np.isfinite(out[0, 1:]).all()
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("held", [np.nan, np.inf, -np.inf])
def test_what_a_state_without_weight_holds_does_not_matter(held):
    one, other = state(0), (np.full((2, 3, 4), held, np.float32), np.full((2, 3), -np.inf, np.float32))
    assert all(map(np.array_equal, ta.merge(*one, *other), one))
    assert all(map(np.array_equal, ta.merge(*other, *one), one))
    out, lse = ta.merge(*other, *other)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


def test_each_row_and_head_on_its_own():
    one, other = state(0), state(1)
    one[1][0, 1], other[1][1, 2] = -np.inf, -np.inf
    one[0][0, 1], other[0][1, 2] = np.nan, np.nan
    out, lse = ta.merge(*one, *other)
    assert np.array_equal(out[0, 1], other[0][0, 1])
    assert np.array_equal(out[1, 2], one[0][1, 2])
    want = reference.merge([one, other])
    np.testing.assert_allclose(out, want[0], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse, want[1], rtol=1e-6, atol=1e-6)


def test_equal_states_keep_the_output_and_add_one():
    one = state(spread=3.0)
    out, lse = ta.merge(*one, *one)
    np.testing.assert_array_equal(out, one[0])
    np.testing.assert_allclose(lse, one[1] + 1, rtol=1e-6)


def test_large_and_far_apart():
    out = np.ones((1, 1, 2), np.float32)
    for low, high in ((-1e30, 1e30), (-3e38, 3e38), (1e5, 1e5 + 200), (-3e38, -3e38)):
        got, lse = ta.merge(out, np.array([[low]], np.float32), 2 * out, np.array([[high]], np.float32))
        want = 1.5 if low == high else 2
        assert (got == want).all()
        assert lse.item() == np.float32(high)


def test_inputs_are_unchanged():
    states = [state(0), state(1)]
    before = [array.tobytes() for array in flat(states)]
    ta.merge(*flat(states))
    assert [array.tobytes() for array in flat(states)] == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    kind = numpy_dtype(dtype)
    states = [(out.astype(kind), lse) for out, lse in (state(0, spread=1.0), state(1, spread=1.0))]
    out, lse = ta.merge(*flat(states))
    assert (out.dtype, lse.dtype) == (kind, np.float32)
    want = reference.merge(states)
    np.testing.assert_allclose(out.astype(np.float64), want[0], rtol=2 * float(ml_dtypes.finfo(kind).eps), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch(dtype):
    torch = pytest.importorskip("torch")
    states = [
        (torch.from_numpy(out).to(getattr(torch, dtype)), torch.from_numpy(lse)) for out, lse in (state(0), state(1))
    ]
    out, lse = ta.merge(*flat(states))
    assert (out.dtype, lse.dtype) == (getattr(torch, dtype), torch.float32)
    want = ta.merge(*[array.float().numpy() for array in flat(states)])
    np.testing.assert_allclose(out.float().numpy(), want[0], rtol=1e-2)
    np.testing.assert_array_equal(lse.numpy(), want[1])


def test_strided_and_empty():
    one, other = state(0), state(1)
    wide = np.repeat(one[0], 2, axis=2)[..., ::2]
    assert all(map(np.array_equal, ta.merge(wide, one[1], *other), ta.merge(*one, *other)))
    out, lse = ta.merge(*[array[:0] for array in (*one, *other)])
    assert (out.shape, lse.shape) == ((0, 3, 4), (0, 3))
    out, lse = ta.merge(*[array[0, 0] for array in (*one, *other)])
    assert (type(lse), out.shape, lse.shape) == (np.ndarray, (4,), ())


def test_states_of_attention_without_keys():
    case = make_case(rng(), mask="causal", lengths=[(3, 0), (2, 5)])
    result = attend(case)
    assert not np.isnan(ta.merge(*result, *result)[0]).any()


@pytest.mark.parametrize(
    "arrays",
    [
        [],
        [*state()],
        [*state(), state()[0]],
        [*state(), state()[0][:1], state()[1]],
        [*state(), state()[0], state()[1][:1]],
        [*state(), state()[0][..., :2], state()[1]],
        [state()[1], state()[0], *state()],
        [np.float32(1), np.float32(1)] * 2,
        [None] * 4,
        ["a", "b", "c", "d"],
        [*state(), *[np.array(array, object) for array in state()]],
        [*state(), state()[0].astype(np.int32), state()[1]],
        [*state(), state()[0], state()[1].astype(complex)],
        [state()[0].astype(np.float64), state()[1], *state()],
        [*state(), state()[0], state()[1].astype(np.float64)],
        [*state(), state()[0].astype(ml_dtypes.float8_e4m3fn), state()[1]],
    ],
    ids=range(16),
)
def test_bad_states(arrays):
    with pytest.raises(ta.TreeAttnError, match=r"^(merge|out|lse)[\w ]*: "):
        ta.merge(*arrays)


def test_to_natural():
    lse = np.array([[1.0, -np.inf], [0.0, 3.0]], np.float32)
    np.testing.assert_allclose(ta.to_natural(lse), [[np.log(2), -np.inf], [0, np.log(8)]], rtol=1e-6)
    assert ta.to_natural(lse).dtype == np.float32
