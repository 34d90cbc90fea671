"""Calls of `PagedKVCache` that are refused, what they leave behind, and files of sequences."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

import treeattn as ta
from treeattn.cache.pages import PagePool
from treeattn.cache.saved import SequenceFileError

TREE = ta.TokenTree.from_parents([-1, 0, 0, 1])
DTYPES = ("float32", "float16", "bfloat16")


def make(num_layers=2, kv_heads=2, head_dim=3, num_pages=8, page_size=4, dtype="float32"):
    return ta.PagedKVCache(num_layers, kv_heads, head_dim, num_pages, page_size, dtype)


def fill(cache, seq, count, seed=0):
    """Commit ``count`` random tokens."""
    rng = np.random.default_rng(seed)
    step = cache.begin({seq: count})
    for layer in range(2):
        shape = (count, *cache.pages(layer).shape[2:3], cache.pages(layer).shape[-1])
        if cache.pages(layer).ndim == 3:
            step.append(layer, rng.standard_normal((count, shape[-1]), np.float32))
        else:
            step.append(layer, *rng.standard_normal((2, *shape), np.float32))
    cache.commit(step, {seq: count})
    return seq


def state(cache):
    """Everything of a cache that a refused call must leave alone."""
    sequences = {
        seq: (entry.pages.tolist(), entry.length, entry.kept, entry.dropped, entry.pending, entry.step)
        for seq, entry in cache._sequences.items()
    }
    return sequences, cache.free_pages, [cache.pages(layer).tobytes() for layer in range(2)]


@pytest.fixture
def filled():
    """A cache with two settled sequences, and two whose trees are not committed."""
    cache = make(num_pages=16)
    for layer in range(2):
        cache.pages(layer)[...] = 0
    settled = fill(cache, cache.add(), 9), fill(cache, cache.add(), 2, seed=1)
    growing = cache.add(), cache.add()
    step = cache.begin({growing[0]: TREE, growing[1]: 3})
    return cache, *settled, *growing, step


def refusals(cache, a, b, tree, chain, step):
    foreign = make()
    other = foreign.begin({foreign.add(): TREE})
    gone = cache.add()
    cache.remove(gone)
    zeros = np.zeros((7, 2, 3), np.float32)
    index, full = ta.IndexRangeError, ta.CacheFullError
    return {
        "unknown": (index, "seq", lambda: cache.length(10**9)),
        "removed": (index, "removed", lambda: cache.begin({a: 1, gone: 1})),
        "foreign": (index, "seq", lambda: cache.fork(foreign.seqs[0])),
        "unhashable": (index, "seq", lambda: cache.length([])),
        "begin no dict": (ta.DTypeError, "new", lambda: cache.begin([a])),
        "begin too much": (full, "expected 30 free pages .* got 10 of 16", lambda: cache.begin({b: 120, a: 1})),
        "begin with a copy": (
            full,
            r"expected 11 free pages \(1 of them",
            lambda: [cache.fork(a), cache.begin({a: 43})],
        ),
        "begin less than nothing": (ta.ShapeError, "new", lambda: cache.begin({a: -1})),
        "begin a float": (ta.DTypeError, "new", lambda: cache.begin({a: 1.5})),
        "begin another tree": (ta.ShapeError, "whole tree", lambda: cache.begin({tree: ta.TokenTree.chain(4)})),
        "begin a smaller tree": (ta.ShapeError, "whole tree", lambda: cache.begin({tree: ta.TokenTree.star(3)})),
        "begin a number on a tree": (ta.ShapeError, "whole tree", lambda: cache.begin({tree: 2})),
        "commit no dict": (ta.DTypeError, "accepted", lambda: cache.commit(step, [0])),
        "commit a settled one": (ta.CacheError, "step", lambda: cache.commit(step, {tree: [0], a: 1})),
        "commit another step": (ta.CacheError, "step", lambda: cache.commit(other, {tree: [0]})),
        "commit no path": (ta.ShapeError, "path", lambda: cache.commit(step, {chain: 1, tree: [0, 3]})),
        "commit not from a root": (ta.ShapeError, "path", lambda: cache.commit(step, {tree: [1, 3]})),
        "commit no node": (index, r"\[0, 4\)", lambda: cache.commit(step, {tree: [0, 4]})),
        "commit a negative node": (index, r"\[0, 4\)", lambda: cache.commit(step, {tree: [-1]})),
        "commit no numbers": (ta.DTypeError, "node numbers", lambda: cache.commit(step, {tree: ["x"]})),
        "commit a number on a tree": (ta.DTypeError, "path", lambda: cache.commit(step, {tree: 2})),
        "commit too many": (index, "0 to 3", lambda: cache.commit(step, {chain: 4})),
        "fork uncommitted": (ta.CacheError, "uncommitted", lambda: cache.fork(tree)),
        "fork past the end": (index, "length", lambda: cache.fork(a, 10)),
        "truncate past the end": (index, "length", lambda: cache.truncate(tree, 1)),
        "truncate to no number": (ta.DTypeError, "length", lambda: cache.truncate(a, "x")),
        "drop uncommitted": (ta.CacheError, "uncommitted", lambda: cache.drop_outside(1)),
        "drop in no window": (index, "Window", lambda: cache.drop_outside(0, 0, [a])),
        "save uncommitted": (ta.CacheError, "uncommitted", lambda: cache.save(tree, "never")),
        "load nothing": (FileNotFoundError, "never", lambda: cache.load("never")),
        "layer": (index, "layer", lambda: cache.read(2, a)),
        "append to no layer": (index, "layer", lambda: step.append(-1, zeros, zeros)),
        "append no values": (ta.ShapeError, "v: ", lambda: step.append(0, zeros)),
        "append too few": (ta.ShapeError, "v: ", lambda: step.append(0, zeros, zeros[1:])),
        "append ints": (ta.DTypeError, "k: ", lambda: step.append(0, zeros.astype(int), zeros)),
        "attend before append": (ta.CacheError, "append", lambda: step.attention(0, zeros)),
        "sink alone": (ta.ShapeError, "sink", lambda: step.mask(sink=2)),
    }


NAMES = list(refusals(make(num_pages=16), *[None] * 5))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_refused_changes_nothing(filled, name):
    cache = filled[0]
    kind, message, call = refusals(*filled)[name]
    before = state(cache)
    with pytest.raises(kind, match=message):
        call()
    if name == "begin with a copy":
        cache.remove(cache.seqs[-1])
    assert state(cache) == before
    _, _, _, tree, chain, step = filled
    cache.commit(step, {tree: [0, 1, 3], chain: 2})
    assert (cache.length(tree), cache.length(chain)) == (3, 2)


@pytest.mark.parametrize(
    "sizes",
    [{"num_layers": 0}, {"kv_heads": 0}, {"head_dim": -1}, {"num_pages": -1}, {"page_size": 0}, {"page_size": 2**31}],
)
def test_sizes_that_are_refused(sizes):
    with pytest.raises(ta.IndexRangeError, match=next(iter(sizes))):
        make(**sizes)
    with pytest.raises(ta.DTypeError, match=next(iter(sizes))):
        make(**dict.fromkeys(sizes, "x"))


def test_dtypes_that_are_refused():
    with pytest.raises(ta.DTypeError, match="float64"):
        make(dtype="float64")
    assert make(dtype=np.float16).pages(0).dtype == np.float16


@pytest.mark.parametrize("end", ["commit", "begin", "truncate", "remove"])
def test_a_step_that_ended_takes_no_more(end):
    cache = make()
    seq, other = cache.add(), cache.add()
    step = cache.begin({seq: 2, other: TREE})
    ends = {
        "commit": lambda: cache.commit(step, {seq: 1}),
        "begin": lambda: cache.begin({seq: 1}),
        "truncate": lambda: cache.truncate(seq, 0),
        "remove": lambda: cache.remove(seq),
    }
    ends[end]()
    zeros = np.zeros((6, 2, 3), np.float32)
    for call in (lambda: step.append(0, zeros, zeros), lambda: step.attention(0, zeros), lambda: step.kv(0)):
        with pytest.raises(ta.CacheError, match="ended"):
            call()
    cache.commit(step, {other: [0, 2]})  # what is left of it can be committed still
    with pytest.raises(ta.CacheError, match="step"):
        cache.commit(step, {other: [0]})


def test_a_chain_grows_by_numbers_before_its_commit():
    cache = make()
    seq = cache.add()
    for count in (3, 0, 2):
        step = cache.begin({seq: count})
        assert step.q_indptr.tolist() == [0, count]
    assert step.positions.tolist() == [3, 4]
    cache.commit(step, {seq: 4})
    assert (cache.length(seq), cache.used_pages) == (4, 1)


def test_forks_of_many_levels_share_pages_until_one_writes():
    cache = make(num_pages=16)
    family = [fill(cache, cache.add(), 6)]
    for _ in range(10):
        family.append(cache.fork(family[-1]))
    assert cache.used_pages == 2
    cache.commit(cache.begin({family[5]: 1}), {family[5]: 1})
    assert cache.used_pages == 3  # a last page of its own
    cache.commit(cache.begin(dict.fromkeys(family, 1)), dict.fromkeys(family, 1))
    assert cache.used_pages == 1 + 11
    for seq in family:
        cache.remove(seq)
    assert cache.free_pages == 16


def test_the_last_of_those_that_share_a_page_copies_nothing():
    cache = make(num_pages=3)
    parent = fill(cache, cache.add(), 6)
    child = cache.fork(parent)
    cache.begin({parent: 1, child: 1})  # two pages, and one more for a copy
    assert cache.free_pages == 0


@pytest.mark.parametrize(
    ("first", "second", "left"),
    [
        ((4, 4), (9, 4), [*range(4), *range(12, 16)]),  # a wider window sees nothing less than it did
        ((4, 4), (16, 0), [*range(4), *range(12, 16)]),  # position 0 is in the window, and one gap is all there may be
        ((4, 4), (4, 0), [*range(12, 16)]),
        ((9, 0), (4, 12), [*range(8, 16)]),  # what is left before the window is a sink now
        ((9, 0), (4, 5), [*range(12, 16)]),
    ],
)
def test_dropping_twice(first, second, left):
    """Positions that are left of 16, on pages of 4, with windows and sinks that change."""
    cache = make()
    seq = fill(cache, cache.add(), 16)
    before = cache.read(0, seq)[0]
    for window, sink in (first, second):
        cache.drop_outside(window, sink)
    assert np.array_equal(cache.read(0, seq)[0], before[left])
    assert cache.used_pages == len(left) / 4


def test_page_pool_takes_what_was_given_back():
    pool = PagePool(4)
    taken = pool.take(3)
    pool.share(taken[:1])
    pool.release(taken)
    assert (pool.free, pool.used, pool.holders(taken[0])) == (3, 1, 1)
    pool.release(taken[:1])
    assert sorted(pool.take(4)) == [0, 1, 2, 3]
    assert pool.take(0) == []


# files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 9])
def test_save_and_load_in_a_cache_of_other_pages(tmp_path, dtype, count):
    cache, other = make(dtype=dtype), make(dtype=dtype, page_size=3, num_pages=5)
    seq = fill(cache, cache.add(), count)
    cache.save(seq, tmp_path / "sequence.safetensors")
    copy = other.load(str(tmp_path / "sequence.safetensors"))
    assert (other.length(copy), other.used_pages) == (count, -(-count // 3))
    for layer in range(2):
        for got, want in zip(other.read(layer, copy), cache.read(layer, seq), strict=True):
            assert got.dtype == want.dtype and np.array_equal(got, want)


def test_save_and_load_of_dropped_and_latent_sequences(tmp_path):
    path = tmp_path / "sequence"
    caches = [ta.PagedKVCache.latent(2, 5, 2, num_pages=16, page_size=size, dtype="float32") for size in (2, 8, 2)]
    seq = fill(caches[0], caches[0].add(), 21)
    caches[0].drop_outside(5, 3)
    caches[0].save(seq, path)
    with pytest.raises(SequenceFileError, match="whole pages of 8"):
        caches[1].load(path)
    copy = caches[2].load(path)
    assert caches[2].length(copy) == 21
    assert np.array_equal(caches[2].read(1, copy), caches[0].read(1, seq))
    assert caches[2].used_pages == caches[0].used_pages == 2 + 3


@pytest.mark.parametrize(
    "harm", ["empty", "short", "text", "no metadata", "another format", "lengths", "shape", "dtype"]
)
def test_damaged_and_foreign_files(tmp_path, harm):
    path, cache = tmp_path / "sequence.safetensors", make()
    cache.save(fill(cache, cache.add(), 5), path)
    whole, x = path.read_bytes(), np.zeros((2, 5, 2, 3), np.float32)
    about = '{"num_layers": 2, "kv_heads": 2, "head_dim": 3, "dtype": "float32", "d_latent": null, "length": 5, %s}'
    fine = about % '"kept": 0, "dropped": 0'
    tensors, metadata = {
        "empty": (b"", None),
        "short": (whole[:-8], None),
        "text": (b"no such thing" * 9, None),
        "no metadata": ({"k": x, "v": x}, None),
        "another format": ({"k": x, "v": x}, {"format": "pt", "about": fine}),
        "lengths": ({"k": x, "v": x}, {"format": "treeattn.sequence.1", "about": about % '"kept": 4, "dropped": 4'}),
        "shape": ({"k": x, "v": x[:, :4]}, {"format": "treeattn.sequence.1", "about": fine}),
        "dtype": ({"k": x, "v": x.astype(np.float16)}, {"format": "treeattn.sequence.1", "about": fine}),
    }[harm]
    if isinstance(tensors, bytes):
        path.write_bytes(tensors)
    else:
        save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path, metadata)
    before = state(cache)
    with pytest.raises(SequenceFileError, match=str(path)):
        cache.load(path)
    assert state(cache) == before


def test_a_file_of_another_layout_or_too_long(tmp_path):
    path, cache = tmp_path / "sequence.safetensors", make()
    cache.save(fill(cache, cache.add(), 20), path)
    for sizes, name in (({"kv_heads": 1}, "kv_heads 1"), ({"dtype": "float16"}, "dtype float16")):
        with pytest.raises(SequenceFileError, match=f"expected {name} as this cache has"):
            make(**sizes).load(path)
    small = make(num_pages=4)
    with pytest.raises(ta.CacheFullError, match="expected 5 free pages"):
        small.load(path)
    assert (small.seqs, small.free_pages) == ((), 4)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path, cache = tmp_path / "sequence.safetensors", make()
    seq = fill(cache, cache.add(), 5)
    cache.save(seq, path)
    before = path.read_bytes()
    monkeypatch.setattr("safetensors.numpy.save_file", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        cache.save(seq, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_without_safetensors_a_clear_message(tmp_path, monkeypatch):
    cache = make()
    for name in ("safetensors", "safetensors.numpy"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ta.UnsupportedError, match=r"treeattn\[safetensors\]"):
        cache.save(cache.add(), tmp_path / "x")
