"""TVM's page operations, merge and split rotary for GPUs: CUDA text on CPU fibers, against the CPU's functions."""

from __future__ import annotations

import shutil

import ml_dtypes
import numpy as np
import pytest
import tvm_cache
import tvm_launches
from test_tvm_differential import H_KV, H_Q, PAGE, SCALINGS, THETA, D, int32, normal, pool

from treeattn import tvm_compat

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="CUDA text runs on the CPU by way of g++")

GPU = tvm_launches.target("sm_75")
DTYPES = pytest.mark.parametrize("dtype", ["float32", "float16"])


def both(factory, args, inputs, outputs, scalars, skips=(), **options):
    """What the GPU's function and the CPU's leave in ``outputs``; ``options`` are of the first."""
    cpu = factory if hasattr(tvm_compat, factory) and not options else f"{factory}_cpu"
    with GPU:  # for factories that are given no target
        function = tvm_launches.build(getattr(tvm_compat, factory)(*args, **options), GPU)
    got = tvm_launches.run(function, [*inputs, *scalars], outputs, skips)
    want = tvm_cache.build(tvm_compat, cpu, *args)
    tensors = [tvm_cache.tvm.runtime.tensor(np.ascontiguousarray(array)) for array in inputs]
    want(*tensors, *scalars)
    return got, [tensors[at].numpy() for at in outputs]


def same_bits(*args, **options):
    got, want = both(*args, **options)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    return want


@DTYPES
def test_append(dtype):
    rng = np.random.default_rng(0)
    k, v = (normal(rng, 12, H_KV, D, dtype=dtype) for _ in range(2))
    where = np.append(0, 1 + rng.permutation(9 * PAGE - 1)[:11]).astype(np.int32)
    where[[2, 7]] = -1  # not kept
    before = pool(dtype)
    (after,) = same_bits("_kv_cache_transpose_append", (H_KV, D, dtype), [before, k, v, where], (0,), ())
    assert (after != before).any()
    kv, pages = normal(rng, 12, 200, dtype=dtype), normal(rng, 9, PAGE, 200, dtype=dtype)
    same_bits("_kv_cache_transpose_append_mla", (200, dtype), [pages, kv, where], (0,), ())


def test_a_block_too_many_does_nothing(monkeypatch):
    """TVM's WGSL runs one, of more than 65,535."""
    monkeypatch.setattr(tvm_launches.MACHINE, "spare", 1)
    test_append("float32")
    test_merge("float32", D)


def test_append_of_nothing_launches_nothing():
    nothing = np.zeros((0, H_KV, D), np.float32)
    same_bits(
        "_kv_cache_transpose_append", (H_KV, D, "float32"), [pool("float32"), nothing, nothing, int32()], (0,), ()
    )
    assert tvm_launches.MACHINE.launches == []


def test_a_function_for_the_cpu_takes_no_device_memory():
    """Made without a target in scope, it would read it on the host, also where TVM builds it for a GPU."""
    function = tvm_launches.build(tvm_compat._kv_cache_transpose_append(H_KV, D, "float32"), GPU)
    new = np.zeros((1, H_KV, D), np.float32)
    with pytest.raises(ValueError, match="expected cpu"):
        tvm_launches.run(function, [pool("float32"), new, new, int32(3)], (0,))


def test_pages_that_begin_anywhere_in_their_memory():
    rng = np.random.default_rng(0)
    k, v = (normal(rng, 5, H_KV, D) for _ in range(2))
    inputs, where = [pool("float32"), k, v], rng.permutation(9 * PAGE)[:5].astype(np.int32)
    same_bits("_kv_cache_transpose_append", (H_KV, D, "float32"), [*inputs, where], (0,), (), skips=((0, 7), (3, 3)))


@DTYPES
def test_debug_get(dtype):
    where = np.random.default_rng(0).permutation(9 * PAGE)[:20].astype(np.int32)
    out = np.zeros((3, 20, H_KV, D), dtype)
    same_bits("_kv_cache_debug_get_kv", (3, H_KV, D, dtype), [pool(dtype), where, out, out], (2, 3), (1,))
    pages = normal(np.random.default_rng(1), 9, PAGE, 80, dtype=dtype)
    same_bits("_kv_cache_debug_get_kv_mla", (3, 80, dtype), [pages, where, np.zeros((3, 20, 80), dtype)], (2,), (1,))


@DTYPES
def test_copy_page(dtype):
    for length in (1, PAGE):
        same_bits("_copy_single_page", (H_KV, PAGE, D, dtype), [pool(dtype)], (0,), (3, 5, length), target=GPU)
    pages = normal(np.random.default_rng(0), 5, PAGE, 80, dtype=dtype)
    function = tvm_launches.build(tvm_compat._copy_single_page_mla(PAGE, 80, dtype, GPU), GPU)
    (got,) = tvm_launches.run(function, [pages, 1, 4, 7], (0,))
    pages[4, :7] = pages[1, :7]
    np.testing.assert_array_equal(got, pages)


@DTYPES
def test_compact(dtype):
    """Ranges that overlap, moved in ascending order; a sequence without any."""
    sources, targets = int32(3, 5, 6, 40, 41, 60, 70), int32(2, 3, 5, 17, 40, 59, 60)
    inputs = [pool(dtype), int32(0, 3, 3, 7), np.stack([sources, targets])]
    same_bits("_compact_kv_copy", (H_KV, D, dtype), inputs, (0,), (3,), target=GPU)


@DTYPES
@pytest.mark.parametrize("d", [D, 200])
def test_merge(dtype, d):
    """In place; two empty states stay ``(0, -inf)``, an empty one changes nothing, its NaN least."""
    rng = np.random.default_rng(0)
    a, b = (normal(rng, 9, H_Q, d, dtype=dtype) for _ in range(2))
    s, t = (normal(rng, 9, H_Q, scale=20) for _ in range(2))
    t[3], s[4], t[5] = s[3], -np.inf, -np.inf
    s[6] = t[6] = -np.inf
    a[4] = b[5] = a[6] = np.nan
    function = tvm_launches.build(tvm_compat._merge_state_inplace(H_Q, d, dtype, GPU), GPU)
    out, lse = tvm_launches.run(function, [a, s, b, t], (0, 1))
    cpu = tvm_cache.build(tvm_compat, "_merge_state_inplace_cpu", dtype)
    state = [tvm_cache.tvm.runtime.tensor(array) for array in (a, s, b, t)]
    cpu(*state)
    np.testing.assert_allclose(out, state[0].numpy(), rtol=4 * np.finfo(dtype).eps, atol=4 * np.finfo(dtype).eps)
    np.testing.assert_allclose(lse, state[1].numpy(), rtol=1e-6)
    np.testing.assert_array_equal(out[[4, 5]], np.stack([b[4], a[5]]))
    assert (out[6] == 0).all() and (lse[6] == -np.inf).all()


LONGROPE = {"rope_type": "longrope", "max_position_embeddings": 4096, "original_max_position_embeddings": 50}


@pytest.mark.parametrize("scaling", [*SCALINGS, "longrope"])
def test_split_and_rotate(scaling):
    """To position 300,000: angles are double, whole turns are dropped, the rest is float32."""
    rng, tokens = np.random.default_rng(0), 11
    dtype = {"gptj": "float16", "llama3": "bfloat16"}.get(scaling, "float32")
    rotary_dim = D if scaling in ("default", "longrope") else 32
    qkv = normal(rng, tokens, H_Q + 2 * H_KV, D, dtype=dtype)
    positions = rng.integers(0, 300_000, tokens).astype(np.int32)
    parts = [np.full((tokens, n, D), np.nan, dtype) for n in (H_Q, H_KV, H_KV)]
    kind = LONGROPE if scaling == "longrope" else SCALINGS[scaling]
    args = (THETA, 1.0, D, H_Q, H_KV, dtype, frozenset(kind.items()), rotary_dim)
    inputs = [qkv, positions, *parts]
    if scaling == "longrope":
        inputs.append(rng.uniform(1, 8, D).astype(np.float32))
    for scalars in ((),) if scaling == "longrope" else ((0,), (1,)):
        with GPU:
            made = tvm_compat.llama_rope_with_position_map(*args[:6], kind, rotary_dim)
        got = tvm_launches.run(tvm_launches.build(made, GPU), [*inputs, *scalars], (2, 3, 4))
        cpu = tvm_cache.build(tvm_compat, "llama_rope_with_position_map", *args)
        tensors = [tvm_cache.tvm.runtime.tensor(array) for array in inputs]
        cpu(*tensors, *scalars)
        eps = float(ml_dtypes.finfo(dtype).eps) + np.finfo(np.float32).eps
        atol = 4 * eps * np.abs(qkv.astype(float)).max()
        for one, other in zip(got, (tensor.numpy() for tensor in tensors[2:5]), strict=True):
            np.testing.assert_allclose(one.astype(float), other.astype(float), atol=atol, rtol=0)
        np.testing.assert_array_equal(got[2], qkv[:, H_Q + H_KV :])
