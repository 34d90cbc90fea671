"""Conversion of stored elements on devices, by a kernel that only copies: all 65536 halves, ties, NaN."""

from __future__ import annotations

import numpy as np
import pytest
from devices import on

import treeattn as ta
from treeattn.arrays import numpy_dtype
from treeattn.kernels.emit import device_func, flat, launch, let, pointer, scalar, wide
from treeattn.kernels.gpu.elements import Elements, declared
from treeattn.kernels.gpu.source import generate

THREADS = 64


def copied(target, values, source_dtype, target_dtype):
    """``values`` loaded and stored by a kernel; their number is a multiple of the block."""
    device = ta.device(target)
    traits = device.traits

    def body():
        dtypes = {"given": source_dtype, "made": target_dtype}
        handles = {name: pointer(name, declared(dtype, traits)) for name, dtype in dtypes.items()}
        num_blocks = scalar("num_blocks", "int32")
        given, made = (
            Elements(flat(handles[name], declared(dtype, traits), 2**31 - 1), dtype, traits)
            for name, dtype in dtypes.items()
        )
        with launch(num_blocks, THREADS) as (block, thread):
            at = let(wide(block * THREADS + thread, traits.index))
            made.store(at, given[at])

    blocks = values.size // THREADS
    program = device.program(generate(device_func("copy", body), THREADS, traits.tvm_target()))
    out = device.empty(values.shape, target_dtype)
    program({"given": device.upload(values), "made": out, "num_blocks": blocks}, blocks)
    return out.numpy()


@pytest.mark.parametrize(
    ("target", "dtype"), [on(target, dtype) for target in ("opencl", "webgpu") for dtype in ("float16", "bfloat16")]
)
def test_every_16_bit_number_is_loaded_exactly(target, dtype):
    values = np.arange(2**16, dtype=np.uint16).view(numpy_dtype(dtype))
    got, want = copied(target, values, dtype, "float32"), values.astype(np.float32)
    exact = np.ones(values.shape, bool)
    if dtype == "bfloat16":
        exact = (np.abs(want) >= np.finfo(np.float32).tiny) | (want == 0) | np.isnan(want)  # a device may flush
    assert np.array_equal(got[exact], want[exact], equal_nan=True)


@pytest.mark.parametrize(
    ("target", "dtype"), [on("opencl", "float16"), on("opencl", "bfloat16"), on("webgpu", "float16")]
)
def test_numbers_are_stored_to_nearest_even(target, dtype):
    kind = numpy_dtype(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = np.arange(0, 2**15, 7, dtype=np.uint16).view(kind).astype(np.float64)
        exact = exact[np.isfinite(exact)]
        ties = (exact[1:] + exact[:-1]) / 2
        numbers = np.concatenate(
            [exact, ties, ties * (1 + 1e-6), ties * (1 - 1e-6), [np.inf, 1e30, 65519, 65520, 65536]]
        )
        values = np.concatenate([numbers, -numbers, [np.nan]]).astype(np.float32)
        values = values[(np.abs(values) >= np.finfo(np.float32).tiny) | (values == 0) | np.isnan(values)]
        values = np.resize(values, -(-values.size // THREADS) * THREADS)
        want = values.astype(kind).astype(np.float32)
    got = copied(target, values, "float32", dtype).astype(np.float32)
    assert np.array_equal(got, want, equal_nan=True)
