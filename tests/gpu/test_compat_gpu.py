"""TVM's attention functions for GPUs: CUDA text from TVM's default pipeline, on CPU fibers, against float64.

Inputs, layouts and definitions are those of ``tests/run/test_tvm_differential.py``; a slot that is not used holds NaN.
"""

from __future__ import annotations

import shutil
from functools import cache

import numpy as np
import pytest
import tvm_on_fibers
from test_tvm_differential import (
    FOREST,
    HEADS,
    PAGE,
    SM_SCALE,
    TREES,
    Attention,
    dense_columns,
    everything,
    int32,
    normal,
    paged_tree,
    ragged_tree,
    windowed,
)
from tvm_cache import assert_close

from treeattn import tvm_compat

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="CUDA text runs on the CPU by way of g++")

TILED = tvm_on_fibers.target("sm_75")
TENSOR_CORES = tvm_on_fibers.target("sm_80")
LENGTHS = (7, 1, 0, 20, 2), (20, 1, 5, 37, 2)
WITH_EMPTY = (7, 0, 0, 1), (20, 4, 0, 33)


def target_of(dtype):
    return TILED if dtype == "float32" else TENSOR_CORES


@cache
def built(factory, *args, **options):
    """A factory's function, compiled; ``{}`` is for the RoPE scaling."""
    args = [{} if arg == "{}" else arg for arg in args]
    dtype = next(arg for arg in args if arg in ("float32", "float16"))
    options = {"target": target_of(dtype), **options}
    return tvm_on_fibers.build(getattr(tvm_compat, factory)(*args, **options), options["target"])


def check(case, function, inputs, outputs, scalars):
    """Scalars come last, or in a dict, before position 10."""
    at, values = (10, scalars[10]) if isinstance(scalars, dict) else (len(inputs), scalars)
    got = tvm_on_fibers.run(function, [*inputs[:at], *values, *inputs[at:]], outputs)
    case.check(got, "on fibers")


DTYPES = pytest.mark.parametrize("dtype", ["float32", "float16"])


@DTYPES
def test_paged_prefill(dtype):
    function = built("_attention_prefill", *HEADS, dtype, False, "{}")
    for lengths in (LENGTHS, WITH_EMPTY):
        for rotary in (0, 1):
            for causal in (0, 1):
                case = Attention(*lengths, dtype, rotary=rotary, visible=None if causal else everything)
                zeros = np.zeros(len(lengths[0]), np.int32)
                inputs = [case.q, case.q_indptr, *case.paged(), zeros, case.positions, *case.empty]
                check(case, function, inputs, (8, 9), (causal, *case.rope_scalars))


def test_arrays_that_begin_anywhere():
    """Copies of 16 bytes at once need multiples of 16: by an element further, and by pages inside of their memory."""
    function = built("_attention_prefill", *HEADS, "float16", False, "{}")
    case = Attention(*LENGTHS, "float16")
    zeros = np.zeros(5, np.int32)
    inputs = [case.q, case.q_indptr, *case.paged(), zeros, case.positions, *case.empty, 1, *case.rope_scalars]
    for skips, shift in (((), 1), (((2, 5), (7, 1)), 0), (((2, 8),), 0)):
        case.check(tvm_on_fibers.run(function, inputs, (8, 9), skips, shift), "on fibers")


@DTYPES
def test_ragged_prefill(dtype):
    function = built("_attention_prefill_ragged", *HEADS, 32, dtype, "{}")
    for rotary, causal in ((0, 0), (1, 1)):
        starts, visible = (0, 5, 30, 0, 9), None if causal else everything
        case = Attention(*LENGTHS, dtype, 32, rotary=rotary, starts=starts, visible=visible)
        inputs = [case.q, case.q_indptr, *case.ragged, case.positions, int32(*starts), *case.empty]
        check(case, function, inputs, (7, 8), (causal, *case.rope_scalars))


@DTYPES
def test_nothing_to_see(dtype):
    """T8: queries of a sequence without keys."""
    case = Attention((2, 1, 3), (0, 5, 0), dtype, visible=everything)
    zeros, positions = np.zeros(3, np.int32), np.arange(6, dtype=np.int32)
    inputs = [case.q, case.q_indptr, *case.paged(), zeros, positions, *case.empty]
    function = built("_attention_prefill", *HEADS, dtype, False, "{}")
    out, lse = tvm_on_fibers.run(function, [*inputs, 0, *case.rope_scalars], (8, 9))
    assert (out[[0, 1, 3, 4, 5]] == 0).all() and (lse[[0, 1, 3, 4, 5]] == -np.inf).all()
    assert np.isfinite(lse[2]).all()


@DTYPES
def test_prefill_of_a_cache_that_has_moved(dtype):
    """A sliding window: its own slots and, with ``causal``, the past of a chunk."""
    window = 8
    function = built("_attention_prefill", *HEADS, dtype, True, "{}", sliding_window_size=window)
    for rotary in (0, 1):
        case = Attention((3, 1, 2), (20, 30, 9), dtype, rotary=rotary, visible=everything)
        table = windowed(case, (9, 18, 0), (4, 0, 0))
        inputs = [case.q, case.q_indptr, *table, int32(0, 0, 0), case.positions, *case.empty]
        check(case, function, inputs, (8, 9), (0, *case.rope_scalars))

    def past(row, column, q_len, kv_len):
        return column >= kv_len - max(window - row - 1, 0)

    case = Attention((3, 12), (20, 30), dtype, visible=past)
    inputs = [case.q, case.q_indptr, *windowed(case, (0, 0), (0, 0)), int32(0, 0), int32(*range(15)), *case.empty]
    check(case, function, inputs, (8, 9), (1, *case.rope_scalars))


@pytest.mark.parametrize(("dtype", "page_size", "sliding"), [("float32", 1, False), ("float16", PAGE, True)])
def test_decode(dtype, page_size, sliding):
    function = built("_attention_decode", *HEADS, dtype, sliding, "{}", page_size=page_size)
    for rotary in (0, 1):
        case = Attention((1, 1, 1), (20, 1, 47), dtype, rotary=rotary, page_size=page_size)
        table = windowed(case, (9, 0, 33), (4, 0, 2)) if sliding else case.paged()
        inputs = [case.q, *table, int32(0, 0, 0), case.positions, *case.empty]
        check(case, function, inputs, (7, 8), case.rope_scalars)


@pytest.mark.parametrize(("dtype", "page_size"), [("float32", PAGE), ("float16", 3)])
def test_paged_tree(dtype, page_size):
    """First and later rounds, sequences of their own sizes; RoPE at depths, where TVM asserts; T5 and T7."""
    function = built("tree_attn_with_paged_kv_cache", *HEADS, dtype, "{}", page_size=page_size)
    options = {"page_size": page_size, "parents": TREES}
    for rotary in (0, 1):
        for q_lens in ((6, 3, 5), (2, 1, 3)):
            case = Attention(q_lens, (26, 40, 6), dtype, rotary=rotary, **options)
            check(case, function, *paged_tree(case))
    options["parents"] = (FOREST, (-1, 0, -1, 2))
    check(case := Attention((4, 4), (4, 4), dtype, scale=20, **options), function, *paged_tree(case))
    case = Attention((4, 4), (9, 20), dtype, **options)
    case.v[0][6] = np.nan
    check(case, function, *paged_tree(case))


@DTYPES
def test_ragged_tree(dtype):
    function = built("tree_attn", *HEADS, dtype, "{}")
    case = Attention((6, 3, 5), (26, 10, 6), dtype, parents=TREES)
    check(case, function, ragged_tree(case), (8, 9), case.rope_scalars)
    case = Attention((6, 3, 5), (6, 3, 5), dtype, rotary=1, starts=(0, 31, 8), parents=TREES)
    check(case, function, ragged_tree(case), (8, 9), case.rope_scalars)


@DTYPES
def test_latent_cache(dtype):
    """One kv head whose values are the first elements of its keys."""
    q_heads, d_latent, d_rope, page_size = 8, 48, 16, 4
    function = built("_attention_prefill_mla", q_heads, d_latent, d_rope, dtype, False, page_size=page_size)
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
        got = tvm_on_fibers.run(function, [*inputs, causal, SM_SCALE], (6, 7))
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
    function = built(name, *HEADS, dtype, sm_scale=SM_SCALE, **options)
    out, lse = np.full(q.shape, np.nan, dtype), np.full(q.shape[:3], np.nan, dtype)
    inputs = [q, k, v, *([valid] if masked else []), out, lse]
    outputs = (len(inputs) - 2, len(inputs) - 1)
    got_out, got_lse = tvm_on_fibers.run(function, inputs, outputs)
    for b in range(batch):
        columns = [list(dense_columns(mode, row, n, int(valid[b]))) for row in range(n)]
        assert_close(got_out[b], lambda how: how.attend(q[b], k[b], v[b], columns, SM_SCALE), "out")  # noqa: B023
        assert_close(got_lse[b], lambda how: how.lse(q[b], k[b], columns, SM_SCALE), "lse")  # noqa: B023
