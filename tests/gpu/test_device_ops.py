"""Page operations and merging of states on devices against the same on the host."""

from __future__ import annotations

import numpy as np
import pytest
from devices import each_target, on
from helpers import rng

import treeattn as ta
from treeattn import cache_ops, reference
from treeattn.arrays import numpy_dtype
from treeattn.errors import DTypeError, IndexRangeError, ShapeError, TreeAttnError, UnsupportedError

SLOTS = np.array([7, 0, 19, 3, 12])
ROPE = ta.Rope(theta=1e4, style="gptj", rotary_dim=4)


def pool(kind, dtype="float32"):
    shape = (5, 4, 6) if kind == "latent" else (5, 2, 3, 4, 6)
    return rng().standard_normal(shape, np.float32).astype(numpy_dtype(dtype))


def rows(kind, dtype="float32"):
    shape = (len(SLOTS), 6) if kind == "latent" else (len(SLOTS), 3, 6)
    count = 1 if kind == "latent" else 2
    return [rng(seed).standard_normal(shape, np.float32).astype(numpy_dtype(dtype)) for seed in range(1, 1 + count)]


def on_both(target, pages, run):
    """The pool after ``run`` on the host and on a device."""
    there = ta.device(target).upload(pages)
    pages = pages.copy()
    run(pages), run(there)
    return pages, there.numpy()


KINDS = pytest.mark.parametrize("kind", ["paged", "latent"])


@KINDS
@pytest.mark.parametrize(
    ("target", "dtype", "of_rows"),
    [on("opencl", "float16", "float32"), on("opencl", "bfloat16", "bfloat16"), on("webgpu", "float16", "float16")],
)
def test_append_and_gather(kind, target, dtype, of_rows):
    new = rows(kind, of_rows)
    host, there = on_both(target, pool(kind, dtype), lambda pages: cache_ops.append(pages, SLOTS, *new))
    assert np.array_equal(host, there)
    found = cache_ops.gather(ta.device(target).upload(host), SLOTS)
    want = cache_ops.gather(host, SLOTS)
    for got, one in zip(*((found,), (want,)) if kind == "latent" else (found, want), strict=True):
        assert np.array_equal(got.numpy(), one)


@each_target
def test_append_rotates_keys(target):
    new, positions = rows("paged"), np.array([0, 1, 1023, 1024, 70000])

    def run(pages):
        cache_ops.append(pages, SLOTS, *new, rope=ROPE, positions=positions)

    host, there = on_both(target, pool("paged"), run)
    assert np.allclose(host, there, rtol=0, atol=2e-6)
    assert np.array_equal(host[:, 1], there[:, 1])


@each_target
@pytest.mark.parametrize("rope", [ROPE, ta.Rope(theta=5e5)], ids=["gptj part", "neox"])
def test_rotation(target, rope):
    x, positions = rng().standard_normal((5, 3, 6), np.float32), np.array([0, 1, 1023, 1024, 70000])
    turned = rope.rotate(ta.device(target).upload(x), positions)
    assert np.allclose(turned.numpy(), rope.rotate(x, positions), rtol=0, atol=2e-6)
    for bad, error in ((positions[1:], ShapeError), (-positions, IndexRangeError), (positions / 2, DTypeError)):
        with pytest.raises(error, match=r"^positions: expected"):
            rope.rotate(ta.device(target).upload(x), bad)


@KINDS
@each_target
def test_compact_and_copy_page(kind, target):
    """Ranges that overlap, both ways."""

    def run(pages):
        cache_ops.compact(pages, [3, 4, 5, 9], [2, 3, 4, 3 + 7])
        cache_ops.compact(pages, [12, 13, 14], [13, 14, 15])
        cache_ops.copy_page(pages, 1, 4, 3)

    assert np.array_equal(*on_both(target, pool(kind), run))


@each_target
def test_bad_slots_are_refused(target):
    pages, (k, v) = ta.device(target).upload(pool("paged")), rows("paged")
    with pytest.raises(ShapeError, match="v: expected shape"):
        cache_ops.append(pages, SLOTS, k, v[:3])
    with pytest.raises(IndexRangeError, match="slots: expected no slot twice, got 4"):
        cache_ops.append(pages, [4, 4], k[:2], v[:2])
    with pytest.raises(IndexRangeError, match="target: expected no slot twice, got 4"):
        cache_ops.compact(pages, [0, 1], [4, 4])
    for positions in (None, [1], [-1] * len(SLOTS)):
        with pytest.raises(TreeAttnError, match="positions: expected"):
            cache_ops.append(pages, SLOTS, k, v, rope=ROPE, positions=positions)
    with pytest.raises(ShapeError, match="pages: expected"):
        cache_ops.gather(pages[0], [0])
    with pytest.raises(IndexRangeError, match=r"slots: expected slots in \[0, 20\), got 20 at index 1"):
        cache_ops.append(pages, [0, 20], *(part[:2] for part in rows("paged")))
    with pytest.raises(ShapeError, match="k: expected shape"):
        cache_ops.append(pages, [0], *rows("paged"))
    with pytest.raises(IndexRangeError, match="target: expected 0 to 4, got 5"):
        cache_ops.copy_page(pages, 0, 5)
    with pytest.raises(UnsupportedError, match="rope"):
        cache_ops.append(ta.device(target).upload(pool("latent")), SLOTS, *rows("latent"), rope=ROPE)
    assert np.array_equal(pages.numpy(), pool("paged"))


@each_target
def test_merge(target):
    """Three states, rows without keys and states without weight whose output is NaN among them."""
    outs = [rng(seed).standard_normal((7, 3, 5), np.float32) for seed in range(3)]
    lses = [(rng(seed).standard_normal((7, 3)) * 30).astype(np.float32) for seed in range(3)]
    for lse in lses:
        lse[0] = -np.inf
    lses[1][1:3], outs[1][1:3] = -np.inf, np.nan
    states = [array for pair in zip(outs, lses, strict=True) for array in pair]
    want_out, want_lse = ta.merge(*states)
    device = ta.device(target)
    out, lse = ta.merge(*map(device.upload, states))
    assert np.allclose(out.numpy(), want_out, rtol=1e-5, atol=1e-6)
    assert np.allclose(lse.numpy(), want_lse, rtol=1e-6, atol=1e-5)
    assert np.array_equal(out.numpy()[0], np.zeros((3, 5)))
    halves = [array.astype(np.float16) for array in lses]
    with pytest.raises(DTypeError, match="lse 0: expected float32"):
        ta.merge(*map(device.upload, [outs[0], halves[0], outs[1], halves[1]]))


@each_target
def test_attention_over_split_storages_merges_on_the_device(target):
    """Keys in two storages, states merged where they are."""
    k, v = (rng(seed).standard_normal((40, 2, 8), np.float32) for seed in range(2))
    q = rng(2).standard_normal((3, 4, 8), np.float32)
    device = ta.device(target)
    there = device.upload(q)
    parts = [
        ta.attention(there, ta.RaggedKV(k[cut], v[cut], [0, len(k[cut])]).to(device), ta.Full())
        for cut in (slice(0, 13), slice(13, 40))
    ]
    out, _ = ta.merge(*parts[0], *parts[1])
    want, _ = reference.attention(q, ta.RaggedKV(k, v, [0, 40]), ta.Full())
    assert np.allclose(out.numpy(), want, atol=2e-6)
