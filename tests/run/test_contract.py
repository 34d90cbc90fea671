"""Faults found in other kernels, by their number in the contract, and what users of other systems report."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from helpers import DTYPES, assert_same, attend, plan_of, rng

import treeattn as ta
from treeattn.arrays import numpy_dtype
from treeattn.testing import alone, assert_within_budget, make_case, pack, random_forest, repack

# T1: offsets are 64-bit ---------------------------------------------------------------------------------------


def sparse(path, shape, dtype):
    """An array of zeros in a file with a hole: only what is touched takes memory."""
    return np.memmap(path, dtype, "w+", shape=shape)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_T1_page_ids_past_2_to_31_elements(tmp_path, dtype):
    case = make_case(rng(), mask="tree", dtype=dtype)
    pages = case.kv.pages
    first = 2**31 // pages[0].size + 1
    pool = sparse(tmp_path / "pool", (first + len(pages), *pages.shape[1:]), dtype)
    pool[first:] = pages
    far = replace(case, kv=replace(case.kv, pages=pool, page_ids=case.kv.page_ids + first))
    assert int(far.kv.page_ids.min()) * pages[0].size > 2**31
    assert_same(attend(far), attend(case))


def test_T1_rows_past_2_to_31_elements(tmp_path):
    """Ragged: the second sequence begins past 2^31 elements of k."""
    case = make_case(rng(), mask="causal", lengths=[(3, 50)], storage="ragged", dtype="float16")
    first = 2**31 // case.kv.k[0].size + 1
    k = sparse(tmp_path / "k", (first + 50, *case.kv.k.shape[1:]), "float16")
    k[first:] = case.kv.k
    both = replace(case, kv=ta.RaggedKV(case.kv.k, case.kv.k, [0, 50]))
    far = ta.RaggedKV(k, k, [0, first, first + 50])
    assert_same(ta.attention(case.q, far, ta.Causal(), q_indptr=[0, 0, 3]), attend(both))


def test_T1_strides_past_2_to_31_elements(tmp_path):
    """Query and output rows, kv heads and values more than 2^31 elements apart."""
    case = make_case(rng(), mask="causal", lengths=[(2, 20)], storage="ragged", dtype="float16", q_heads=2)
    memory = sparse(tmp_path / "memory", (2**32 + 2**20,), "float16")

    def far_apart(array, place):
        view = np.ndarray(array.shape, array.dtype, memory, place * 4096, strides_of(array))
        view[...] = array
        return view

    def strides_of(array):
        rows, _, d = array.shape
        if rows == 2:
            return 2**32, 2 * d, 2
        return 2 * d, 2**32, 2

    kv = replace(case.kv, k=far_apart(case.kv.k, 0), v=far_apart(case.kv.v, 1))
    q, out = far_apart(case.q, 2), far_apart(np.zeros_like(case.q), 3)
    assert_same(ta.attention(q, kv, case.mask, out=out), attend(case))


# T2 to T4 belong to the cache, but a batch of trees of several rounds is a mask ---------------------------------


def test_T4_trees_of_several_rounds_beside_plain_sequences():
    """Half of the nodes are in the cache already; sequences with a chain and with no prefix stand beside."""
    trees = [random_forest(rng(1), 30), ta.TokenTree.chain(1), random_forest(rng(2), 20), ta.TokenTree.chain(9)]
    lengths = [(12, 90), (1, 77), (20, 20), (4, 40)]
    case = make_case(rng(), mask="tree", trees=trees, lengths=lengths)
    together = attend(case)
    assert_within_budget(*together, case)
    for seq in range(4):
        begin, end = case.q_indptr[seq : seq + 2]
        assert_same(attend(alone(case, seq, rng())), tuple(part[begin:end] for part in together))


# T5 to T8: masking --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [2, 4, 8, 40])
def test_T5_forest_without_prefix_and_large_logits(rows):
    """The first column is masked for every row but one."""
    forest = ta.TokenTree.from_parents([-1] * rows)
    case = make_case(rng(), trees=[forest], contexts=[0], q_heads=1, kv_heads=1, storage="ragged")
    case.q[...] *= 40
    out, _ = attend(case)
    np.testing.assert_allclose(out, case.kv.v, rtol=3e-7)  # each row sees itself alone
    assert_within_budget(*attend(case), case)


@pytest.mark.parametrize("logit", [-9e4, -1e6, -1e12, -1e30, 1e12, 1e30])
@pytest.mark.parametrize("rows", [1, 2, 8, 40])
def test_T6_visible_logits_far_below_zero(rows, logit):
    """The visible key's value arrives, never the masked one's."""
    tree = ta.TokenTree.from_parents([-1] * rows)
    q = np.full((rows, 1, 8), 1, np.float32)
    k = np.full((rows, 1, 8), logit / 8, np.float32)
    v = np.arange(1, rows * 8 + 1, dtype=np.float32).reshape(rows, 1, 8)
    out, lse = ta.attention(q, ta.RaggedKV(k, v, [0, rows]), ta.Tree(tree), sm_scale=1.0)
    np.testing.assert_allclose(out, v, rtol=1e-6)
    np.testing.assert_allclose(lse, np.float32(logit * np.log2(np.e)), rtol=1e-6)


def test_T6_two_visible_logits_far_below_zero():
    k = np.full((3, 1, 1), -9e4, np.float32)
    v = np.array([1, 2, 100], np.float32).reshape(3, 1, 1)
    q = np.ones((2, 1, 1), np.float32)
    out, lse = ta.attention(q, ta.RaggedKV(k, v, [0, 3]), ta.Causal(), sm_scale=1.0)
    np.testing.assert_allclose(out.ravel(), [1.5, 103 / 3], rtol=1e-5)
    np.testing.assert_allclose(lse.ravel(), -9e4 * np.log2(np.e) + np.log2([2, 3]), rtol=1e-6)


@pytest.mark.parametrize("storage", ["paged", "ragged"])
@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 3, 7, 8, 9, 40])
def test_T7_nan_in_a_masked_sibling(rows, kv_dtype, storage):
    """Node 1's key and value are NaN; only node 1 may notice."""
    case = make_case(rng(), trees=[ta.TokenTree.star(rows)], contexts=[20], kv_dtype=kv_dtype, storage="ragged")
    k, v = case.kv.k.copy(), case.kv.v.copy()
    k[21], v[21] = np.nan, np.nan
    kv = pack(rng(), k, v, case.kv.kv_indptr, storage=storage)
    others = np.arange(rows) != 1
    got = attend(replace(case, kv=kv))
    assert_same(tuple(part[others] for part in got), tuple(part[others] for part in attend(case)))
    assert np.isnan(got[0][1]).all()


@pytest.mark.parametrize("what", ["k", "v"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("rows", [2, 8, 40])
def test_T7_causal_future(rows, bad, what):
    """A NaN or infinite key or value in the last column reaches the last row only."""
    case = make_case(rng(), mask="causal", lengths=[(rows, rows + 9)], storage="ragged", q_heads=1, kv_heads=1)
    want = attend(case)
    getattr(case.kv, what)[-1] = bad
    assert_same(tuple(part[:-1] for part in attend(case)), tuple(part[:-1] for part in want))


def test_T8_no_keys():
    case = make_case(rng(), mask="causal", lengths=[(3, 0), (1, 5)])
    out, lse = attend(case)
    assert (out[:3] == 0).all()
    assert np.isneginf(lse[:3]).all()
    nothing = out[:3], lse[:3]
    assert_same(ta.merge(*nothing, *nothing), nothing)


# T9 to T14: arguments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, -(2**31), 2**31 - 1, "num_pages"])
def test_T9_bad_page_id(bad):
    case = make_case(rng(), mask="tree")
    ids, num_pages = case.kv.page_ids.copy(), len(case.kv.pages)
    ids[4] = num_pages if bad == "num_pages" else bad
    with pytest.raises(
        ta.IndexRangeError, match=rf"^page_ids: expected int32 in \[0, {num_pages}\), got {ids[4]} at index 4"
    ):
        attend(replace(case, kv=replace(case.kv, page_ids=ids)))


@pytest.mark.parametrize("page_size", [1, 5, 32, 48, 128])
def test_T10_any_page_size_with_a_tree(page_size):
    case = make_case(rng(), mask="tree", page_size=page_size)
    assert_within_budget(*attend(case), case)


@pytest.mark.parametrize("offset", [2, 4, 6, 20, 62])
def test_T11_unaligned_slices(offset):
    def shifted(array):
        raw = np.empty(array.nbytes + 64 + offset, np.uint8)
        start = -raw.ctypes.data % 64 + offset
        view = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array
        return view

    case = make_case(rng(), mask="tree", dtype="float16")
    moved = replace(case, q=shifted(case.q), kv=replace(case.kv, pages=shifted(case.kv.pages)))
    assert moved.q.ctypes.data % 64 == offset
    assert_same(attend(moved, out=shifted(case.q)), attend(case))


def seconds(call, repeats=15):
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def test_T12_time_does_not_grow_with_the_pool(tmp_path):
    case = make_case(rng(), mask="tree", lengths=[(16, 400), (1, 400)], d_qk=16, logit_scale=1.0)
    pool = sparse(tmp_path / "pool", (50 * len(case.kv.pages), *case.kv.pages.shape[1:]), "float32")
    pool[: len(case.kv.pages)] = case.kv.pages
    wide = replace(case, kv=replace(case.kv, pages=pool))
    small, large = plan_of(case, threads=1), plan_of(wide, threads=1)
    assert_same(large.run(case.q), small.run(case.q))
    ratios = []
    for _ in range(5):
        ratios.append(seconds(lambda: large.run(case.q, wide.kv)) / seconds(lambda: small.run(case.q, case.kv)))
        if ratios[-1] < 1.5:
            return
    raise AssertionError(f"50 times the pool takes {ratios} times as long")


def test_T13_group_7_with_d_512():
    """All heads are computed."""
    case = make_case(rng(), mask="tree", d_qk=512, q_heads=7, kv_heads=1, lengths=[(1, 50), (3, 20)])
    assert_within_budget(*attend(case), case)


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(3, 2), (1, 2), (7, 3)])
def test_T14_heads_that_do_not_divide(q_heads, kv_heads):
    case = make_case(rng(), mask="causal", q_heads=kv_heads, kv_heads=kv_heads)
    q = np.zeros((len(case.q), q_heads, 16), np.float32)
    with pytest.raises(
        ta.ShapeError, match=rf"q.*: expected a positive multiple of kv_heads \({kv_heads}\), got {q_heads}"
    ):
        attend(replace(case, q=q))


def test_T15_padded_rows_of_the_last_tile():
    """A batch of small trees: no row reads the next tree, no output the next row."""
    trees = [random_forest(rng(n), n) for n in (1, 9, 10, 33, 3, 129)]
    case = make_case(rng(), trees=trees, contexts=[0, 5, 0, 40, 1, 2], q_heads=1, kv_heads=1)
    assert_within_budget(*attend(case), case)


# T18 to T20: trees and windows ------------------------------------------------------------------------------------
# T18, a read before the table of nodes, is in test_memory.py beside the guard pages.


@pytest.mark.parametrize("window", [1, 2, 5, 16])
def test_T19_window_with_the_first_tokens_outside(window):
    """Prefill: the first columns are outside of every later row's window."""
    for storage in ("paged", "ragged"):
        case = make_case(
            rng(window), mask=ta.Causal() & ta.Window(window), lengths=[(100, 100), (30, 130)], storage=storage
        )
        out, lse = attend(case)
        assert np.isfinite(lse).all()
        assert_within_budget(out, lse, case)


def test_T20_trees_over_256_nodes_and_deep_forks():
    """1,300 nodes; a binary tree of ten levels of forks."""
    binary = ta.TokenTree.from_parents([(node - 1) // 2 if node else -1 for node in range(1023)])
    trees = [random_forest(rng(), 1300), binary]
    lengths = [(20, 1320), (12, 1030)]
    case = make_case(rng(), mask="tree", trees=trees, lengths=lengths, q_heads=2, kv_heads=1)
    assert binary.depth.max() == 9
    assert_within_budget(*attend(case), case)
    whole = make_case(rng(), trees=[binary], contexts=[5], q_heads=1, kv_heads=1, d_qk=16)
    assert_within_budget(*attend(whole), whole)


# What users of other systems report -------------------------------------------------------------------------------


def uniform(trees, contexts, mask, **sizes):
    """Keys of zero, so that every visible key weighs the same; value ``j`` of a sequence is the one-hot of ``j``."""
    kv_len = [tree.num_nodes + context for tree, context in zip(trees, contexts, strict=True)]
    total = sum(kv_len)
    d = 16
    assert max(kv_len) <= d
    k = np.zeros((total, 1, d), np.float32)
    v = np.concatenate([np.eye(n, d, dtype=np.float32) for n in kv_len])[:, None]
    q = np.zeros((sum(tree.num_nodes for tree in trees), 1, d), np.float32)
    kv = ta.RaggedKV(k, v, np.cumsum([0, *kv_len]))
    q_indptr = np.cumsum([0, *(tree.num_nodes for tree in trees)])
    out, _ = ta.attention(q, kv, mask, q_indptr=q_indptr)
    return [np.flatnonzero(row[0]).tolist() for row in out]


TREE = ta.TokenTree.from_parents([-1, 0, 0, 1, 2, 3])


def test_siblings_do_not_see_each_other():
    assert uniform([ta.TokenTree.star(4)], [2], ta.Tree(ta.TokenTree.star(4))) == [
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 1, 2, 4],
        [0, 1, 2, 5],
    ]


def test_window_counts_depth_not_slots():
    """TREE's paths after a prefix of 4: positions are 4 + depth, whatever the node's number."""
    seen = uniform([TREE], [4], ta.Tree(TREE) & ta.Window(3))
    assert seen == [[2, 3, 4], [3, 4, 5], [3, 4, 6], [4, 5, 7], [4, 6, 8], [5, 7, 9]]


def test_window_and_sinks_with_a_tree():
    seen = uniform([TREE], [4], ta.Tree(TREE) & (ta.Window(2) | ta.Sink(1)))
    assert seen == [[0, 3, 4], [0, 4, 5], [0, 4, 6], [0, 5, 7], [0, 6, 8], [0, 7, 9]]


def test_sinks_within_the_tree():
    """With a prefix of 1, positions 0, 1 and 2 are the prefix, the root and its children."""
    seen = uniform([TREE], [1], ta.Tree(TREE) & (ta.Window(1) | ta.Sink(3)))
    assert seen == [[0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 2, 4], [0, 1, 3, 5], [0, 1, 2, 6]]


def test_parents_after_their_children():
    backwards = ta.TokenTree.from_parents([1, 2, 3, -1])
    assert uniform([backwards], [1], ta.Tree(backwards) & ta.Window(2)) == [[1, 2], [2, 3], [3, 4], [0, 4]]


def test_each_sequence_has_its_own_tree():
    star, chain = ta.TokenTree.star(3), ta.TokenTree.chain(3)
    seen = uniform([star, chain, star], [0, 1, 2], ta.Tree([star, chain, star]))
    assert seen == [[0], [0, 1], [0, 2], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4]]


def test_causal_is_aligned_at_the_bottom_right():
    k = np.zeros((5, 1, 8), np.float32)
    v = np.eye(5, 8, dtype=np.float32)[:, None]
    for q_len in (1, 3, 5, 7):
        out, _ = ta.attention(np.zeros((q_len, 1, 8), np.float32), ta.RaggedKV(k, v, [0, 5]), ta.Causal())
        assert (out[:, 0] != 0).sum(axis=1).tolist() == [max(0, 5 - q_len + row + 1) for row in range(q_len)]


@pytest.mark.parametrize("page_size", [4, 5])
def test_window_at_the_page_edge(page_size):
    """Windows of one less, exactly, and one more than pages hold."""
    for window in range(page_size - 1, 3 * page_size + 2):
        k = np.zeros((4 * page_size, 1, 32), np.float32)
        v = np.eye(4 * page_size, 32, dtype=np.float32)[:, None]
        kv = pack(rng(), k, v, np.array([0, 4 * page_size], np.int32), page_size=page_size)
        rows = 2 * page_size
        out, _ = ta.attention(np.zeros((rows, 1, 32), np.float32), kv, ta.Causal() & ta.Window(window))
        for row in range(rows):
            last = 4 * page_size - rows + row
            assert np.flatnonzero(out[row, 0]).tolist() == list(range(max(0, last - window + 1), last + 1))


@pytest.mark.parametrize(
    ("mask", "name"),
    [
        (ta.Tree([TREE]), "trees"),
        (ta.Tree([TREE] * 3), "trees"),
        (ta.Tree([ta.TokenTree.chain(5), TREE]), "trees"),
        (ta.Tree([ta.TokenTree.chain(31), TREE]), "trees"),
        (ta.ValidLength([3]), "ValidLength lengths"),
        (ta.ValidLength([3, -1]), "ValidLength lengths"),
        (ta.ValidLength([31, 3]), "ValidLength lengths"),
        (ta.PaddedLeft([1, 2, 3]), "PaddedLeft lengths"),
    ],
    ids=str,
)
def test_masks_of_a_wrong_size(mask, name):
    case = make_case(rng(), mask="full", lengths=[(6, 30), (6, 30)])
    with pytest.raises(ta.ShapeError, match=rf"^{name}: expected .* got"):
        attend(replace(case, mask=mask))
    with pytest.raises(ta.ShapeError, match=rf"^{name}: "):
        attend(replace(case, mask=ta.Full() & mask))


def test_stale_workspace():
    """NaN in the scratch memory of every thread between runs, and what a larger run left there."""
    for mask in ("tree&(window|sink)", "full"):
        case = make_case(rng(), mask=mask)
        plan = plan_of(case)
        want = plan.run(case.q)
        for junk in (np.nan, np.inf, 1e30):
            floats, bounds = plan._launch.workspace()
            floats[...], bounds[...] = junk, -(2**31)
            assert_same(plan.run(case.q), want)


def test_outputs_do_not_depend_on_what_memory_held():
    case = make_case(rng(), mask="causal", lengths=[(5, 3), (2, 0), (9, 30)])
    plan, want = plan_of(case), attend(case)
    for junk in (np.nan, 7.0):
        assert_same(plan.run(case.q, out=np.full_like(case.q, junk)), want)


def test_more_than_32_mask_words():
    """Depth-first and breadth-first trees of 1,025 nodes and more: no packed words, no limit."""
    star = ta.TokenTree.star(1100)
    case = make_case(rng(), mask="tree", trees=[star], lengths=[(9, 1200)], q_heads=1, kv_heads=1)
    assert_within_budget(*attend(case), case)


def test_padded_block_table():
    """Rows of -1-padded block tables: as they are, they are refused; their used entries work."""
    case = make_case(rng(), mask="causal", lengths=[(1, 40), (2, 10), (0, 0)])
    used = np.diff(case.kv.page_indptr)
    table = np.full((3, 4), -1, np.int32)
    table[np.arange(4) < used[:, None]] = case.kv.page_ids
    with pytest.raises(ta.ShapeError, match=r"^page_ids: expected one dimension, got shape \(3, 4\)"):
        attend(replace(case, kv=replace(case.kv, page_ids=table)))
    with pytest.raises(ta.IndexRangeError, match=r"^page_ids: .* got -1 at index 3 \(sequence 0\)"):
        attend(
            replace(
                case, kv=replace(case.kv, page_ids=table.ravel(), page_indptr=[0, 4, 8, 12], last_page_len=[1, 1, 1])
            )
        )
    flat = replace(case.kv, page_ids=table[table >= 0])
    assert_same(attend(replace(case, kv=flat)), attend(case))


def test_parent_cycles_end_in_an_error():
    for parents in ([0], [1, 0], [-1, 2, 3, 1], [1, 2, 0, -1, 3]):
        with pytest.raises(ta.ShapeError, match=r"^parents: expected a forest, got the cycle"):
            ta.TokenTree.from_parents(parents)


def test_lse_merges_in_its_own_base():
    """Prefix and tree apart, merged, are attention over both; in base e they would be 12 % off."""
    case = make_case(rng(), mask="full", lengths=[(4, 60)], storage="ragged", logit_scale=5.0)
    k, v = case.kv.k, case.kv.v
    parts = [
        ta.attention(case.q, ta.RaggedKV(k[cut], v[cut], [0, len(k[cut])]), ta.Full())
        for cut in (slice(25), slice(25, 60))
    ]
    assert_within_budget(*ta.merge(*parts[0], *parts[1]), case)


@pytest.mark.parametrize("group", [5, 6, 7, 71])
def test_odd_groups_in_decode_and_prefill(group):
    for lengths in ([(1, 70)], [(40, 70)]):
        case = make_case(rng(group), mask="causal", lengths=lengths, q_heads=2 * group, kv_heads=2)
        assert_within_budget(*attend(case), case)


def test_kernel_cache_key_has_every_parameter():
    """Calls that differ in one compile-time parameter each, back to back, twice."""
    base = dict(mask="causal", lengths=[(3, 20)], storage="ragged", logit_scale=1.0)
    changes = [
        {},
        {"d_qk": 8},
        {"d_qk": 8, "d_v": 46},
        {"d_qk": 46, "d_v": 1},
        {"dtype": "bfloat16"},
        {"kv_dtype": "bfloat16"},
        {"dtype": "bfloat16", "kv_dtype": "float16"},
        {"mask": "full"},
        {"mask": "padded_left"},
        {"mask": "causal&window"},
        {"mask": "window|sink"},
    ]
    for _ in range(2):
        for change in changes:
            case = make_case(rng(), **(base | change))
            assert_within_budget(*attend(case), case)


@pytest.mark.parametrize("mask", ["tree", "causal"])
def test_every_length_from_1_to_300(mask):
    """Decode at every context length, in one batch."""
    lengths = [(1, length) for length in range(1, 301)]
    case = make_case(rng(), mask=mask, lengths=lengths, q_heads=1, kv_heads=1, dtype="float16", logit_scale=20.0)
    got = attend(case)
    assert_within_budget(*got, case)
    assert_same(attend(repack(case, rng(), page_size=64)), got)


def test_float64_is_refused_with_the_reason():
    case = make_case(rng(), mask="causal")
    with pytest.raises(ta.DTypeError, match=r"^q: float64 is not offered, since every kernel accumulates in float32"):
        attend(replace(case, q=case.q.astype(np.float64)))
    with pytest.raises(ta.DTypeError, match=r"^pages: float64 is not offered"):
        attend(replace(case, kv=replace(case.kv, pages=case.kv.pages.astype(np.float64))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_near_the_end_of_the_dtype(dtype):
    """A mean of equal large values is that value: no overflow on the way."""
    large = np.asarray(6e4 if dtype == "float16" else 1e30, numpy_dtype(dtype))
    k = np.zeros((300, 1, 16), numpy_dtype(dtype))
    v = np.full_like(k, large)
    for rows in (1, 8, 40):
        out, _ = ta.attention(np.zeros((rows, 1, 16), numpy_dtype(dtype)), ta.RaggedKV(k, v, [0, 300]), ta.Full())
        np.testing.assert_allclose(out.astype(np.float64), float(large), rtol=1e-5)


def test_plan_after_attention_is_a_function():
    """``ta.plan`` is the function whatever was imported before."""
    case = make_case(rng(), mask="causal")
    attend(case)
    import treeattn.planner

    plan = treeattn.plan(case.kv, case.mask, q_indptr=case.q_indptr, q_heads=4, dtype="float32")
    assert_same(plan.run(case.q), attend(case))
