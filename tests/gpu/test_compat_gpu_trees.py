"""TVM's GPU functions for trees, latent caches and dense batches: CUDA text on CPU fibers, against float64.

float32 on the tiled template, float16 on tensor cores. Inputs, layouts and definitions are those of
``tests/run/test_tvm_differential.py``; a slot that is not used holds NaN.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import tvm
import tvm_launches
from devices import on
from test_tvm_differential import (
    BACKWARDS,
    DTYPES,
    FOREST,
    HEADS,
    PAGE,
    SM_SCALE,
    TREES,
    Attention,
    dense_columns,
    int32,
    normal,
    paged_tree,
    ragged_tree,
)
from tvm_cache import assert_close

from treeattn import tvm_compat

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="CUDA text runs on the CPU by way of g++")


@pytest.mark.parametrize(("dtype", "page_size"), [("float32", PAGE), ("float16", 3)])
def test_paged_tree(dtype, page_size):
    """First and later rounds, sequences of their own sizes, any node order; RoPE, where TVM asserts; T5, T7."""
    function = tvm_launches.generated("tree_attn_with_paged_kv_cache", *HEADS, dtype, "{}", page_size=page_size)
    options = {"page_size": page_size, "parents": TREES}
    for rotary in (0, 1):
        for q_lens in ((6, 3, 5), (2, 1, 3)):
            case = Attention(q_lens, (26, 40, 6), dtype, rotary=rotary, **options)
            tvm_launches.check(case, function, *paged_tree(case))
        backwards = Attention((4, 2), (9, 5), dtype, rotary=rotary, page_size=page_size, parents=BACKWARDS)
        tvm_launches.check(backwards, function, *paged_tree(backwards))
    options["parents"] = (FOREST, (-1, 0, -1, 2))
    tvm_launches.check(case := Attention((4, 4), (4, 4), dtype, scale=20, **options), function, *paged_tree(case))
    case = Attention((4, 4), (9, 20), dtype, **options)
    case.v[0][6] = np.nan
    tvm_launches.check(case, function, *paged_tree(case))


@DTYPES
def test_ragged_tree(dtype):
    function = tvm_launches.generated("tree_attn", *HEADS, dtype, "{}")
    case = Attention((6, 3, 5), (26, 10, 6), dtype, parents=TREES)
    tvm_launches.check(case, function, ragged_tree(case), (8, 9), case.rope_scalars)
    for kv_lens in ((6, 3, 5), (26, 10, 6)):
        case = Attention((6, 3, 5), kv_lens, dtype, rotary=1, starts=(0, 31, 8), parents=TREES)
        tvm_launches.check(case, function, ragged_tree(case), (8, 9), case.rope_scalars)


@DTYPES
def test_latent_cache(dtype):
    """One kv head whose values are the first elements of its keys."""
    q_heads, d_latent, d_rope, page_size = 8, 48, 16, 4
    function = tvm_launches.generated(
        "_attention_prefill_mla", q_heads, d_latent, d_rope, dtype, False, page_size=page_size
    )
    rng, q_lens, kv_lens = np.random.default_rng(0), (3, 1, 0), (21, 40, 2)
    counts = [-(-n // page_size) for n in kv_lens]
    ids, page_indptr = rng.permutation(sum(counts) + 2)[: sum(counts)].astype(np.int32), np.cumsum([0, *counts])
    pages = np.full((sum(counts) + 2, page_size, d_latent + d_rope), np.nan, dtype)
    keys = [normal(rng, n, d_latent + d_rope, dtype=dtype) for n in kv_lens]
    for seq, own in enumerate(keys):
        for token, key in enumerate(own):
            pages[ids[page_indptr[seq] + token // page_size], token % page_size] = key
    q, q_indptr = normal(rng, sum(q_lens), q_heads, d_latent + d_rope, dtype=dtype), np.cumsum([0, *q_lens])
    out = np.full((len(q), q_heads, d_latent), np.nan, dtype)
    tables = [indptr.astype(np.int32) for indptr in (q_indptr, page_indptr)]
    last = np.array([(n - 1) % page_size + 1 for n in kv_lens], np.int32)
    inputs = [q, tables[0], pages, tables[1], ids, last, out, np.full(out.shape[:2], np.nan, np.float32)]
    for causal in (0, 1):
        got = tvm_launches.run(function, [*inputs, causal, SM_SCALE], (6, 7))
        for seq, own in enumerate(keys):
            rows = slice(q_indptr[seq], q_indptr[seq + 1])
            n, new = kv_lens[seq], q_lens[seq]
            columns = [list(range(n - new + row + 1 if causal else n)) for row in range(new)]
            for one, part in zip(got, ("attend", "lse"), strict=True):
                k, v = own[:, None], own[:, None, :d_latent]
                parts = (q[rows], k, v) if part == "attend" else (q[rows], k)
                assert_close(one[rows], lambda how: getattr(how, part)(*parts, columns, SM_SCALE), part)  # noqa: B023


@DTYPES
@pytest.mark.parametrize("mode", ["causal", "padded", "causal_padded_left"])
def test_dense_batch(dtype, mode):
    """Rows that are padding give 0 and -inf; ``lse`` has the dtype of q."""
    batch, n, rng = 3, 19, np.random.default_rng(0)
    h_kv, h_q, d = HEADS
    q, k, v = (normal(rng, batch, n, heads, d, dtype=dtype) for heads in (h_q, h_kv, h_kv))
    valid, masked = int32(n, 7, 0), mode != "causal"
    options = {"mask_mode": mode} if masked else {"causal": 1}
    name = "_attention_sequence_prefill" + "_with_mask" * masked
    function = tvm_launches.generated(name, *HEADS, dtype, sm_scale=SM_SCALE, **options)
    out, lse = np.full(q.shape, np.nan, dtype), np.full(q.shape[:3], np.nan, dtype)
    inputs = [q, k, v, *([valid] if masked else []), out, lse]
    outputs = (len(inputs) - 2, len(inputs) - 1)
    got_out, got_lse = tvm_launches.run(function, inputs, outputs)
    for b in range(batch):
        columns = [list(dense_columns(mode, row, n, int(valid[b]))) for row in range(n)]
        assert_close(got_out[b], lambda how: how.attend(q[b], k[b], v[b], columns, SM_SCALE), "out")  # noqa: B023
        assert_close(got_lse[b], lambda how: how.lse(q[b], k[b], columns, SM_SCALE), "lse")  # noqa: B023


@pytest.mark.parametrize("target", [on("opencl")])
def test_opencl(target):
    """Another code generator, and a driver: a paged tree, with RoPE and without."""
    for_target = tvm.target.Target({"kind": target}, host={"kind": "llvm"})
    made = tvm_compat.tree_attn_with_paged_kv_cache(*HEADS, "float32", {}, for_target, page_size=3)
    function = tvm_launches.build(made, for_target)
    for rotary in (0, 1):
        case = Attention((6, 3, 5), (26, 40, 6), rotary=rotary, page_size=3, parents=TREES)
        inputs, outputs, scalars = paged_tree(case)
        arguments = [*inputs[:10], *scalars[10], *inputs[10:]]
        case.check(tvm_launches.run(function, arguments, outputs, kind=target), target)
