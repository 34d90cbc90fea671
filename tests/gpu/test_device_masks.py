"""Every mask on every storage, on a device, against the oracle."""

from __future__ import annotations

import pytest
from devices import on
from helpers import attend, rng

from treeattn.testing import assert_within_budget, make_case, mask_kinds

WEBGPU = ("tree", "causal", "full&window", "tree&(window|sink)", "causal&padded_left&(window|sink)", "window|sink")
RUNS = [
    *(on("opencl", mask, "float32") for mask in mask_kinds()),
    *(on("webgpu", mask, dtype) for mask, dtype in zip(WEBGPU, ("float32", "float16") * 3, strict=True)),
]


@pytest.mark.parametrize(("target", "mask", "dtype"), RUNS)
def test_masks(target, mask, dtype):
    """With empty sequences, rows that see nothing, a masked first column, permuted pages, NaN in unused slots."""
    for seed, storage in enumerate(("paged", "ragged")):
        case = make_case(rng(seed), mask=mask, storage=storage, dtype=dtype)
        assert_within_budget(*attend(case, target=target), case)
