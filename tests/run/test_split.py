"""Keys split over threads: states of parts merge to what the whole gives, and parts depend on columns alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers import DTYPES, assert_same, attend, plan_of, rng

import treeattn as ta
from treeattn.errors import DTypeError, IndexRangeError
from treeattn.testing import alone, assert_within_budget, make_case, mask_kinds


@pytest.mark.parametrize("mask", mask_kinds())
def test_split_keys_against_the_oracle(mask):
    case = make_case(rng(1), mask=mask, lengths=[(5, 300), (1, 129), (0, 7), (40, 64), (0, 0)])
    for cut in (64, 100, 1000):
        assert_within_budget(*plan_of(case, split_kv=cut).run(case.q), case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_split_keys_with_every_part_of_a_logit(dtype):
    case = make_case(
        rng(2), mask="tree", dtype=dtype, lengths=[(5, 300), (9, 129)], q_heads=6, kv_heads=2, logit_scale=30
    )
    parts = {
        "softcap": 20.0,
        "alibi": np.linspace(0.1, 0.5, 6, dtype=np.float32),
        "sink_logits": np.linspace(-2, 2, 6, dtype=np.float32),
        "rope": ta.Rope(),
    }
    case = replace(case, parts=parts)
    assert_within_budget(*plan_of(case, split_kv=64, **parts).run(case.q), case)


def test_split_results_depend_on_the_row_alone():
    """Not on threads, nor on the batch beside it."""
    case = make_case(rng(3), mask="tree", lengths=[(5, 300), (1, 129), (2, 700)])
    want = plan_of(case, split_kv=128, threads=1).run(case.q)
    for threads in (2, 3):
        assert_same(plan_of(case, split_kv=128, threads=threads).run(case.q), want)
    for seq in range(3):
        one = alone(case, seq, rng(seq))
        rows = slice(int(case.q_indptr[seq]), int(case.q_indptr[seq + 1]))
        assert_same(plan_of(one, split_kv=128).run(one.q), [array[rows] for array in want])


def test_one_part_is_the_whole():
    case = make_case(rng(4), mask="causal", lengths=[(5, 300), (1, 129)])
    whole, split = plan_of(case).run(case.q), plan_of(case, split_kv=4096).run(case.q)
    np.testing.assert_allclose(split[0], whole[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(split[1], whole[1], rtol=1e-6)


def test_there_are_items_for_every_thread():
    """One sequence, one kv head, one row: a single item unsplit, eight with eight parts."""
    k = np.random.default_rng(0).standard_normal((1024, 1, 64)).astype(np.float32)
    kv = ta.RaggedKV(k, k, [0, 1024])
    given = {"q_indptr": [0, 1], "q_heads": 1, "dtype": "float32"}
    assert ta.plan(kv, ta.Full(), **given).num_items == 1
    assert ta.plan(kv, ta.Full(), split_kv=128, **given).num_items == 8


def test_output_given():
    case = make_case(rng(5), mask="causal")
    want, out = plan_of(case, split_kv=64).run(case.q), np.empty_like(attend(case)[0])
    got = plan_of(case, split_kv=64).run(case.q, out=out)
    assert got[0] is out
    assert np.array_equal(out, want[0])


@pytest.mark.parametrize(
    ("value", "error"), [(0, IndexRangeError), (-64, IndexRangeError), (1.5, DTypeError), (True, DTypeError)]
)
def test_wrong_split(value, error):
    case = make_case(rng(6), mask="causal")
    with pytest.raises(error, match="split_kv"):
        plan_of(case, split_kv=value)
