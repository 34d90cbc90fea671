"""GPU kernels on devices against the oracle: masks, storages, dtypes, shapes, split keys."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from devices import each_target

import treeattn as ta
from treeattn import api
from treeattn.testing import assert_within_budget, make_case, mask_kinds

sys.path.append(str(Path(__file__).parents[1] / "run"))
from helpers import attend, rng


@pytest.mark.parametrize(("target", "mask"), each_target(*((name,) for name in mask_kinds())))
@pytest.mark.parametrize("storage", ["paged", "ragged"])
def test_masks(target, mask, storage):
    for seed in range(2):
        case = make_case(rng(seed), mask=mask, storage=storage)
        assert_within_budget(*attend(case, target=target), case)


SPLIT = [(1, 700), (1, 0), (0, 4), (3, 333), (9, 222), (40, 130)]


@pytest.mark.parametrize(("target", "mask"), each_target(("causal",), ("full&window",), ("window|sink",)))
def test_split_keys(target, mask):
    case = make_case(rng(), mask=mask, lengths=SPLIT, q_heads=6)
    plan = api.plan(case.kv, case.mask, q_indptr=case.q_indptr, q_heads=6, dtype="float32", target=target, threads=64)
    assert plan.num_items > 10
    assert_within_budget(*plan.run(case.q), case)


@pytest.mark.parametrize(("target",), each_target())
def test_arrays_stay_on_the_device(target):
    case = make_case(rng(), mask="tree")
    device = ta.device(target)
    kv = case.kv.to(device)
    out, lse = ta.attention(device.upload(case.q), kv, case.mask, **case.options)
    assert out.device is lse.device is device
    assert_within_budget(out.numpy(), lse.numpy(), case)
    again, _ = ta.attention(case.q, kv, case.mask, **case.options, target=target)
    assert np.array_equal(again, out.numpy())
