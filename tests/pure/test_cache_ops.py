"""Page operations of `treeattn.cache_ops` against loops over tokens."""

from __future__ import annotations

import numpy as np
import pytest

import treeattn as ta
from treeattn import cache_ops
from treeattn.arrays import numpy_dtype

DTYPES = ("float32", "float16", "bfloat16")
SIZES = {"pages": 5, "heads": 3, "size": 4, "d": 6}
SLOTS = np.array([7, 0, 19, 3, 12])


def pool(kind, dtype="float32", seed=0):
    pages, heads, size, d = SIZES.values()
    shape = (pages, size, d) if kind == "latent" else (pages, 2, heads, size, d)
    array = np.random.default_rng(seed).standard_normal(shape, np.float32).astype(numpy_dtype(dtype))
    if kind == "strided":  # pages of several layers, tokens before heads in memory
        wide = np.zeros((pages, 7, 2, size, heads, d + 2), array.dtype)
        wide[:, 3, ..., :d] = array.transpose(0, 1, 3, 2, 4)
        return wide[:, 3, ..., :d].transpose(0, 1, 3, 2, 4)
    return array


def token(pages, slot):
    """All that a slot holds, ``[2, heads, d]`` or ``[d]``."""
    page, place = divmod(int(slot), SIZES["size"])
    return pages[page, ..., place, :]


def rows(kind, dtype="float32", seed=1):
    shape = (len(SLOTS), SIZES["d"]) if kind == "latent" else (2, len(SLOTS), SIZES["heads"], SIZES["d"])
    array = np.random.default_rng(seed).standard_normal(shape, np.float32).astype(numpy_dtype(dtype))
    return (array,) if kind == "latent" else tuple(array)


KINDS = pytest.mark.parametrize("kind", ["paged", "strided", "latent"])


@KINDS
@pytest.mark.parametrize("dtype", DTYPES)
def test_append(kind, dtype):
    pages, new = pool(kind, dtype), rows(kind, dtype)
    want = pages.copy()
    for i, slot in enumerate(SLOTS):
        for half, array in enumerate(new):
            (token(want, slot)[half] if kind != "latent" else token(want, slot))[...] = array[i]
    cache_ops.append(pages, SLOTS.astype(np.int32), *new)
    assert np.array_equal(pages, want)


def test_append_converts():
    pages, new = pool("paged", "float16"), rows("paged")
    cache_ops.append(pages, SLOTS.tolist(), *new)
    k, _ = cache_ops.gather(pages, SLOTS)
    assert np.array_equal(k, new[0].astype(np.float16))


def test_append_turns_new_keys():
    rope, positions = ta.Rope(theta=100.0), np.array([3, 0, 50, 7, 7])
    pages, (k, v) = pool("paged"), rows("paged")
    before = k.copy()
    cache_ops.append(pages, SLOTS, k, v, rope=rope, positions=positions)
    assert np.array_equal(k, before)
    got_k, got_v = cache_ops.gather(pages, SLOTS)
    assert np.array_equal(got_k, rope.rotate(k, positions)) and np.array_equal(got_v, v)


@KINDS
@pytest.mark.parametrize("count", [None, 0, 3])
def test_copy_page(kind, count):
    pages = pool(kind)
    want = pages.copy()
    for place in range(SIZES["size"] if count is None else count):
        token(want, 3 * SIZES["size"] + place)[...] = token(pages, SIZES["size"] + place)
    cache_ops.copy_page(pages, 1, 3, count)
    assert np.array_equal(pages, want)


@KINDS
@pytest.mark.parametrize("dtype", DTYPES)
def test_compact_reads_all_before_it_writes(kind, dtype):
    source, target = [5, 6, 7, 2, 19], [4, 5, 6, 7, 2]  # in one page, over each other, and across pages
    pages = pool(kind, dtype)
    want = pages.copy()
    for start, end in zip(source, target, strict=True):
        token(want, end)[...] = token(pages, start)
    cache_ops.compact(pages, source, target)
    assert np.array_equal(pages, want)


@KINDS
def test_gather(kind):
    pages = pool(kind)
    got = cache_ops.gather(pages, SLOTS)
    want = np.array([token(pages, slot) for slot in SLOTS])
    if kind == "latent":
        assert np.array_equal(got, want)
    else:
        assert all(np.array_equal(array, want[:, half]) for half, array in enumerate(got))
    assert not np.shares_memory(got[0], pages)


def test_torch_pools_are_written_in_place():
    torch = pytest.importorskip("torch")
    pages = torch.zeros(5, 2, 3, 4, 6, dtype=torch.bfloat16)
    k, v = torch.randn(2, 5, 3, 6, dtype=torch.bfloat16)
    cache_ops.append(pages, torch.tensor(SLOTS), k, v)
    got = cache_ops.gather(pages, SLOTS)
    assert torch.equal(got[0], k) and torch.equal(got[1], v)


def test_nothing_to_move():
    pages = pool("paged")
    before = pages.copy()
    cache_ops.append(pages, [], np.zeros((0, 3, 6), "f4"), np.zeros((0, 3, 6), "f4"))
    cache_ops.compact(pages, [], [])
    assert cache_ops.gather(pages, [])[0].shape == (0, 3, 6)
    assert np.array_equal(pages, before)
    assert cache_ops.gather(np.zeros((0, 2, 3, 4, 6), "f4"), [])[1].shape == (0, 3, 6)


def test_what_is_refused_writes_nothing():
    pages, (k, v) = pool("paged"), rows("paged")
    frozen = pages.copy()
    frozen.setflags(write=False)
    append, index, shape, dtype = cache_ops.append, ta.IndexRangeError, ta.ShapeError, ta.DTypeError
    refused = [
        (index, "slots: .* got 20 at index 1", lambda: append(pages, [0, 20, 1, 2, 3], k, v)),
        (index, "slots: .* got -1 at index 0", lambda: append(pages, [-1, 0, 1, 2, 3], k, v)),
        (shape, "slots", lambda: append(pages, [[0, 1]], k, v)),
        (shape, "slots", lambda: append(pages, [0.5] * 5, k, v)),
        (shape, "k: expected", lambda: append(pages, SLOTS, k[:4], v)),
        (shape, "v: expected", lambda: append(pages, SLOTS, k, v[..., :3])),
        (shape, "v: expected", lambda: append(pages, SLOTS, k)),
        (dtype, "v: expected", lambda: append(pages, SLOTS, k, v.astype(np.float64))),
        (shape, "v: expected None", lambda: append(pool("latent"), SLOTS, k[:, 0], v[:, 0])),
        (ta.UnsupportedError, "rope", lambda: append(pool("latent"), SLOTS, k[:, 0], rope=ta.Rope(), positions=SLOTS)),
        (shape, "read-only", lambda: append(frozen, SLOTS, k, v)),
        (shape, "contiguous", lambda: append(pages[..., ::2], SLOTS, k[..., ::2], v[..., ::2])),
        (shape, "pages: expected", lambda: append(pages[0], SLOTS, k, v)),
        (dtype, "pages: expected", lambda: append(pages.astype(int), SLOTS, k, v)),
        (index, "source: expected 0 to 4", lambda: cache_ops.copy_page(pages, 5, 0)),
        (index, "target: expected 0 to 4", lambda: cache_ops.copy_page(pages, 0, -1)),
        (index, "count: expected 0 to 4", lambda: cache_ops.copy_page(pages, 0, 1, 5)),
        (index, "target: .* got 20", lambda: cache_ops.compact(pages, [0], [20])),
        (shape, "target: expected 2", lambda: cache_ops.compact(pages, [0, 1], [2])),
        (index, "slots", lambda: cache_ops.gather(pages, [99])),
        (index, "slots: expected no slot twice, got 7", lambda: append(pages, [7, 0, 7, 3, 12], k, v)),
        (index, "target: expected no slot twice, got 2", lambda: cache_ops.compact(pages, [0, 1], [2, 2])),
        (dtype, "^k: expected", lambda: append(pages, SLOTS, k.astype(int), v, rope=ta.Rope(), positions=SLOTS)),
        (shape, "positions: expected", lambda: append(pages, SLOTS, k, v, rope=ta.Rope(), positions=[1])),
        (index, "positions: expected", lambda: append(pages, SLOTS, k, v, rope=ta.Rope(), positions=-SLOTS)),
    ]
    before = pages.copy()
    for kind, message, call in refused:
        with pytest.raises(kind, match=message):
            call()
        assert np.array_equal(pages, before), message
