"""TVM's attention functions for GPUs: CUDA text from TVM's default pipeline, on CPU fibers, against float64.

float32 on the tiled template, float16 on tensor cores. Inputs, layouts and definitions are those of
``tests/run/test_tvm_differential.py``; a slot that is not used holds NaN.
"""

from __future__ import annotations

import shutil

import ml_dtypes
import numpy as np
import pytest
import tvm_launches
from test_tvm_differential import DTYPES, HEADS, PAGE, Attention, everything, int32, windowed

from treeattn import tvm_compat

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="CUDA text runs on the CPU by way of g++")
LENGTHS = (7, 1, 0, 20, 2), (69, 1, 5, 37, 2)  # 63 columns that all rows of the first see: one more would fill a block
WITH_EMPTY = (0, 7, 0, 1), (4, 20, 0, 33)


@DTYPES
def test_paged_prefill(dtype):
    function = tvm_launches.generated("_attention_prefill", *HEADS, dtype, False, "{}")
    for lengths in (LENGTHS, WITH_EMPTY):
        for rotary in (0, 1):
            for causal in (0, 1):
                case = Attention(*lengths, dtype, rotary=rotary, visible=None if causal else everything)
                zeros = np.zeros(len(lengths[0]), np.int32)
                inputs = [case.q, case.q_indptr, *case.paged(), zeros, case.positions, *case.empty]
                tvm_launches.check(case, function, inputs, (8, 9), (causal, *case.rope_scalars))


def test_arrays_that_begin_anywhere():
    """Copies of 16 bytes at once need multiples of 16: by an element further, and by pages inside of their memory."""
    function = tvm_launches.generated("_attention_prefill", *HEADS, "float16", False, "{}")
    case = Attention(*LENGTHS, "float16")
    zeros = np.zeros(5, np.int32)
    inputs = [case.q, case.q_indptr, *case.paged(), zeros, case.positions, *case.empty, 1, *case.rope_scalars]
    for skips, shift in (((), 1), (((2, 5), (7, 1)), 0), (((2, 8),), 0)):
        case.check(tvm_launches.run(function, inputs, (8, 9), skips, shift), "on fibers")


def test_offsets_past_2_31_elements(tmp_path):
    """T1, on both templates, and by what moves tokens."""
    case = Attention(LENGTHS[0], LENGTHS[1], "float16")
    near, page_indptr, ids, last = case.paged()
    first = 2**31 // near[0].size + 1
    pages = np.memmap(tmp_path / "pool", np.float16, "w+", shape=(first + len(near), *near.shape[1:]))  # sparse
    pages[first:] = near
    zeros = np.zeros(5, np.int32)
    inputs = [case.q, case.q_indptr, pages, page_indptr, ids + np.int32(first), last, zeros, case.positions]
    for arch in ("sm_75", "sm_80"):
        for_target = tvm_launches.target(arch)
        function = tvm_launches.build(
            tvm_compat._attention_prefill(*HEADS, "float16", False, {}, for_target), for_target
        )
        case.check(tvm_launches.run(function, [*inputs, *case.empty, 1, *case.rope_scalars], (8, 9)), arch)
    source, target = (first + len(near) - 1) * PAGE, first * PAGE
    function = tvm_launches.build(tvm_compat._compact_kv_copy(*near.shape[2::2], "float16", for_target), for_target)
    tvm_launches.run(
        function,
        [pages, int32(0, 3), int32(*range(source, source + 3), *range(target, target + 3)).reshape(2, 3), 1],
        (),
    )
    np.testing.assert_array_equal(pages[first, :, :, :3], near[-1, :, :, :3])


@DTYPES
def test_ragged_prefill(dtype):
    function = tvm_launches.generated("_attention_prefill_ragged", *HEADS, 32, dtype, "{}")
    for rotary, causal in ((0, 0), (1, 1)):
        starts, visible = (0, 5, 30, 0, 9), None if causal else everything
        case = Attention(*LENGTHS, dtype, 32, rotary=rotary, starts=starts, visible=visible)
        inputs = [case.q, case.q_indptr, *case.ragged, case.positions, int32(*starts), *case.empty]
        tvm_launches.check(case, function, inputs, (7, 8), (causal, *case.rope_scalars))


@DTYPES
def test_nothing_to_see(dtype):
    """T8: queries of a sequence without keys."""
    case = Attention((2, 1, 3), (0, 5, 0), dtype, visible=everything)
    zeros, positions = np.zeros(3, np.int32), np.arange(6, dtype=np.int32)
    inputs = [case.q, case.q_indptr, *case.paged(), zeros, positions, *case.empty]
    function = tvm_launches.generated("_attention_prefill", *HEADS, dtype, False, "{}")
    out, lse = tvm_launches.run(function, [*inputs, 0, *case.rope_scalars], (8, 9))
    assert (out[[0, 1, 3, 4, 5]] == 0).all() and (lse[[0, 1, 3, 4, 5]] == -np.inf).all()
    assert np.isfinite(lse[2]).all()


@DTYPES
def test_prefill_of_a_cache_that_has_moved(dtype):
    """A sliding window: its own slots and, with ``causal``, the past of a chunk."""
    window = 8
    function = tvm_launches.generated("_attention_prefill", *HEADS, dtype, True, "{}", sliding_window_size=window)
    for rotary in (0, 1):
        case = Attention((3, 1, 2), (20, 30, 9), dtype, rotary=rotary, visible=everything)
        table = windowed(case, (9, 18, 0), (4, 0, 0))
        inputs = [case.q, case.q_indptr, *table, int32(0, 0, 0), case.positions, *case.empty]
        tvm_launches.check(case, function, inputs, (8, 9), (0, *case.rope_scalars))

    def past(row, column, q_len, kv_len):
        return column >= kv_len - max(window - row - 1, 0)

    case = Attention((3, 12), (20, 30), dtype, visible=past)
    inputs = [case.q, case.q_indptr, *windowed(case, (0, 0), (0, 0)), int32(0, 0), int32(*range(15)), *case.empty]
    tvm_launches.check(case, function, inputs, (8, 9), (1, *case.rope_scalars))


@pytest.mark.parametrize(("dtype", "page_size", "sliding"), [("float32", 1, False), ("float16", PAGE, True)])
def test_decode(dtype, page_size, sliding):
    function = tvm_launches.generated("_attention_decode", *HEADS, dtype, sliding, "{}", page_size=page_size)
    for rotary in (0, 1):
        case = Attention((1, 1, 1), (20, 1, 47), dtype, rotary=rotary, page_size=page_size)
        table = windowed(case, (9, 0, 33), (4, 0, 2)) if sliding else case.paged()
        inputs = [case.q, *table, int32(0, 0, 0), case.positions, *case.empty]
        tvm_launches.check(case, function, inputs, (7, 8), case.rope_scalars)


def test_a_block_too_many_does_nothing(monkeypatch):
    """TVM's WGSL runs one, of more than 65,535."""
    monkeypatch.setattr(tvm_launches.MACHINE, "spare", 1)
    test_decode("float32", 1, sliding=False)
    test_ragged_prefill("float32")


def test_bfloat16():
    """On GPUs only, where the templates have it: as the float32 function on the same numbers, but for rounding."""
    case = Attention(*LENGTHS, "float32")
    inputs = [case.q, case.q_indptr, *case.paged(), np.zeros(5, np.int32), case.positions, *case.empty]
    low = [array.astype(ml_dtypes.bfloat16) if array.dtype == np.float32 else array for array in inputs[:9]]
    same = [array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array for array in low]
    got, want = (
        tvm_launches.run(
            tvm_launches.generated("_attention_prefill", *HEADS, dtype, False, "{}"),
            [*arrays, inputs[9], 1, *case.rope_scalars],
            (8, 9),
        )
        for dtype, arrays in (("bfloat16", low), ("float32", same))
    )
    np.testing.assert_allclose(got[0].astype(np.float32), want[0], rtol=2**-7, atol=2**-8)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-5)
