"""Many shapes through few kernels: heads, groups, page sizes, lengths and splits are data."""

from __future__ import annotations

import numpy as np
import pytest
from devices import each_target
from helpers import plan_of

from treeattn import compiler
from treeattn.testing import assert_within_budget, make_case

SHAPES = 30


@each_target
@pytest.mark.parametrize("mask", ["tree", "causal&(window|sink)"])
def test_shapes_are_data(target, mask):
    """At most a kernel for every tile is compiled, whatever the batch."""
    before = len(compiler._gpu_kernels)
    for seed in range(SHAPES):
        rng = np.random.default_rng(seed)
        kv_heads = int(rng.integers(1, 4))
        lengths = [
            (q_len, q_len + int(rng.integers(0, 300))) for q_len in rng.integers(0, 40, rng.integers(1, 5)).tolist()
        ]
        case = make_case(
            rng, mask=mask, lengths=lengths, d_qk=16, kv_heads=kv_heads,
            q_heads=kv_heads * int(rng.choice([1, 2, 3, 5, 7, 9, 71])), page_size=int(rng.integers(1, 40)),
            storage=str(rng.choice(["paged", "ragged"])),
        )  # fmt: skip
        plan = plan_of(case, target=target, threads=int(rng.choice([1, 16, 64])))
        assert_within_budget(*plan.run(case.q), case)
    assert len(compiler._gpu_kernels) - before <= 3
