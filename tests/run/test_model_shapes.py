"""Head shapes of published models, each compiled and run once with a tree over pages.

The shapes of the project's data folder are read where it is there; a few of every kind stand here for where it is not.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers import attend, rng

from treeattn.testing import assert_within_budget, make_case

SHARED = Path(os.environ.get("TREEATTN_SHARED", Path(__file__).parents[3] / "shared"))
SHAPES = SHARED / "data" / "model_shapes.json"
A_FEW = {(9, 3, 64, 64), (28, 4, 128, 128), (8, 4, 256, 256), (16, 1, 576, 512), (71, 1, 64, 64)}
"""q_heads, kv_heads, d_qk, d_v."""


def shapes():
    """Distinct shapes; heads are cut down to two kv heads, which says as much of a kernel."""
    found = set(A_FEW)
    if SHAPES.exists():
        for model in json.loads(SHAPES.read_text()):
            found.add((model["h_q"], model["h_kv"], model["d_qk"], model["d_v"]))
    return sorted({(q_heads // kv_heads * min(kv_heads, 2), min(kv_heads, 2), d_qk, d_v)
                   for q_heads, kv_heads, d_qk, d_v in found}, key=lambda shape: shape[2:])  # fmt: skip


@pytest.mark.parametrize("shape", shapes(), ids=lambda shape: "{}/{}-{}-{}".format(*shape))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_shape(shape, dtype):
    q_heads, kv_heads, d_qk, d_v = shape
    for page_size in (16, 64):
        case = make_case(
            rng(q_heads), mask="tree", dtype=dtype, q_heads=q_heads, kv_heads=kv_heads, d_qk=d_qk, d_v=d_v,
            page_size=page_size, storage="paged" if d_qk == d_v else "ragged",
        )  # fmt: skip
        assert_within_budget(*attend(case), case)
