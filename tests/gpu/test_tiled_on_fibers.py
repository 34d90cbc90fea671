"""The tiled template's CUDA text on CPU fibers: bounds, races and barriers that other devices cannot report."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

import treeattn as ta
from treeattn.targets import GPUS
from treeattn.testing import assert_within_budget, make_case
from treeattn.testing.fibers.device import FiberDevice

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="CUDA text runs on the CPU by way of g++")

NO_TENSOR_CORES = replace(GPUS["cuda"], arch="sm_75")


def attend(case, seed=0, blocks=8):
    device = FiberDevice(seed, blocks, NO_TENSOR_CORES)
    return ta.attention(case.q, case.kv, case.mask, **case.options, target=device)


@pytest.mark.parametrize(
    ("mask", "dtype", "d", "storage"),
    [
        ("tree", "float32", 64, "paged"),
        ("tree&(window|sink)", "float16", 46, "paged"),
        ("causal&padded_left", "bfloat16", 128, "ragged"),
        ("full", "float16", 80, "ragged"),
    ],
)
def test_masks_and_storages(mask, dtype, d, storage):
    for seed in range(2):
        rng = np.random.default_rng(seed)
        case = make_case(rng, mask=mask, dtype=dtype, d_qk=d, storage=storage, q_heads=4, kv_heads=2)
        assert_within_budget(*attend(case, seed * 50), case)


def test_split_keys_and_many_rows():
    rng = np.random.default_rng(2)
    case = make_case(rng, mask="causal", lengths=((40, 300), (1, 500)), d_qk=64, q_heads=4, kv_heads=2)
    assert_within_budget(*attend(case, blocks=64), case)


@pytest.mark.parametrize("array", ["k", "v"])
def test_nan_reaches_the_rows_that_see_it(array):
    """The maximum of two floats in CUDA drops a NaN; the kernel must not."""
    case = make_case(
        np.random.default_rng(3), mask="tree", storage="ragged", lengths=((20, 60),), d_qk=64, q_heads=2, kv_heads=1
    )
    changed = getattr(case.kv, array).copy()
    changed[[45, 50]] = np.nan
    case = replace(case, kv=replace(case.kv, **{array: changed}))
    want = np.isnan(case.expected[0])
    assert 0 < want.mean() < 1
    np.testing.assert_array_equal(np.isnan(attend(case)[0]), want)
