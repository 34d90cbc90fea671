"""The conformance kit itself: cases hold what they promise, and budget, guards and canaries notice faults."""

import re
import subprocess
import sys
import unittest
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treeattn import reference
from treeattn.errors import IndexRangeError, ShapeError, UnsupportedError
from treeattn.masks import Batch as MaskBatch
from treeattn.masks import Causal, Full, Tree, ValidLength, Window
from treeattn.storage import PagedKV, RaggedKV
from treeattn.testing import (
    Case,
    alone,
    assert_within_budget,
    canaries,
    gather_path,
    guarded,
    guarded_case,
    make_case,
    mask_kinds,
    poison,
    random_forest,
    random_lengths,
    repack,
    shuffled,
)
from treeattn.testing.strategies import cases, seeds, trees
from treeattn.tree import TokenTree

DTYPES = ["float32", "float16", "bfloat16"]
EVERY_LEAF = {"Full", "Causal", "Tree", "ValidLength", "PaddedLeft", "Window", "Sink"}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def as_result(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The oracle's result as a kernel would hand it over."""
    out, lse = case.expected
    with np.errstate(over="ignore"):
        return out.astype(case.q.dtype), lse.astype(np.float32)


# cases ------------------------------------------------------------------------------------------------------


def test_kinds_cover_every_leaf() -> None:
    masks = [make_case(rng(), mask=kind).mask for kind in mask_kinds()]
    assert {type(leaf).__name__ for mask in masks for leaf in mask.leaves()} == EVERY_LEAF


@pytest.mark.parametrize("kind", mask_kinds())
@pytest.mark.parametrize("storage", ["paged", "ragged"])
def test_cases_are_valid_and_finite(kind: str, storage: str) -> None:
    for seed, dtype in enumerate(DTYPES):
        case = make_case(rng(seed), mask=kind, storage=storage, dtype=dtype, kv_dtype=DTYPES[seed - 1])
        case.kv.validate()
        case.mask.check(MaskBatch(case.q_indptr, case.kv.kv_len, case.mask.trees))
        assert (case.q.dtype.name, case.kv.dtype) == (dtype, DTYPES[seed - 1])
        assert np.isfinite(case.expected[0]).all()
        assert_within_budget(*as_result(case), case)


def test_awkward_sequences_are_always_there() -> None:
    for seed in range(5):
        plain, tree = random_lengths(rng(seed), 6), random_lengths(rng(seed), 6, tree=True)
        assert (0, 0) in plain
        assert (0, 0) in tree
        assert any(q_len and not kv_len for q_len, kv_len in plain)
        assert any(q_len > kv_len > 0 for q_len, kv_len in plain)
        assert any(kv_len and not q_len for q_len, kv_len in tree)
        assert all(q_len <= kv_len for q_len, kv_len in tree)
        assert len(random_lengths(rng(seed), 40)) == 40
    case = make_case(rng(3), mask="tree")
    firsts = [
        reference.visible(case.mask, seq, *np.diff(case.q_indptr)[seq : seq + 1], case.kv.kv_len[seq])[:, :1]
        for seq in range(case.num_seqs)
    ]
    assert any((~first).any() for first in firsts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unused_slots_are_nan_and_used_ones_are_not(dtype: str) -> None:
    case = make_case(rng(), dtype=dtype, page_size=3)
    used = np.zeros((len(case.kv.pages), 3), np.bool_)
    table = case.kv.table
    for seq, kv_len in enumerate(case.kv.kv_len):
        for position in range(kv_len):
            page, slot = table.page_ids[table.page_indptr[seq] + position // 3], position % 3
            assert not used[page, slot]
            used[page, slot] = True
    nan = np.isnan(case.kv.pages).transpose(0, 3, 1, 2, 4).reshape(*used.shape, -1)
    assert np.array_equal(nan.all(-1), ~used)
    assert np.array_equal(nan.any(-1), ~used)
    assert not used.all(axis=1).all()
    assert table.page_ids.tolist() != sorted(table.page_ids)
    assert not np.isnan(make_case(rng(), dtype=dtype, nan_unused=False).kv.pages).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("logit_scale", [1.0, 200.0])
def test_logits_reach_the_scale(dtype: str, logit_scale: float) -> None:
    case = make_case(rng(1), mask="full", dtype=dtype, logit_scale=logit_scale, num_seqs=12)
    logits = []
    for seq in range(case.num_seqs):
        q = case.q[case.q_indptr[seq] : case.q_indptr[seq + 1]].astype(np.float64)
        logits.append(np.einsum("rhd,chd->rhc", q, reference.gather(case.kv, seq)[0].repeat(2, 1)).ravel() / 4)
    assert np.abs(np.concatenate(logits)).max() == pytest.approx(logit_scale, rel=0.02)
    assert np.concatenate(logits).min() < -0.9 * logit_scale
    assert np.concatenate(logits).max() > 0.9 * logit_scale


def test_trees_and_contexts_set_the_lengths() -> None:
    given_trees = [TokenTree.star(4), TokenTree.chain(2)]
    case = make_case(rng(), trees=given_trees, contexts=[9, 0])
    assert case.mask.trees == tuple(given_trees)
    assert (case.q_indptr.tolist(), case.kv.kv_len.tolist()) == ([0, 4, 6], [13, 2])
    later = make_case(rng(), trees=given_trees, lengths=[(2, 6), (0, 3)])
    assert later.q_indptr.tolist() == [0, 2, 2]


def test_a_mask_or_a_factory_may_be_given() -> None:
    assert isinstance(make_case(rng(), mask=Window(3), lengths=[(1, 4)]).mask, Window)
    case = make_case(rng(), mask=lambda rng, batch: ValidLength([kv for _, kv in batch.lengths]), lengths=[(1, 4)])
    assert case.mask.lengths == [4]


def test_paged_storage_has_one_head_size() -> None:
    with pytest.raises(ShapeError, match=r"d_v: expected d_qk \(16\) in paged storage, got 8"):
        make_case(rng(), d_v=8)
    assert make_case(rng(), d_v=8, storage="ragged").expected[0].shape[2] == 8


def test_no_sequences_no_heads_in_common() -> None:
    case = make_case(rng(), mask="full", lengths=[])
    assert case.expected[0].shape == (0, 4, 16)
    assert_within_budget(*as_result(case), case)


def test_forests_have_roots_and_free_order() -> None:
    drawn = [random_forest(rng(seed), 9, min_roots=2) for seed in range(40)]
    assert all(tree.num_nodes == 9 and (tree.parents < 0).sum() >= 2 for tree in drawn)
    assert any((tree.parents > np.arange(9)).any() for tree in drawn)
    assert max(tree.depth.max() for tree in drawn) >= 6
    assert min(tree.depth.max() for tree in drawn) <= 2
    assert random_forest(rng(), 0).num_nodes == 0
    tree = TokenTree.from_parents([-1, 0, 0, 1])
    assert sorted(shuffled(rng(), tree).depth) == sorted(tree.depth)


def test_repack_and_alone_change_no_result() -> None:
    for kind in mask_kinds():
        case = make_case(rng(2), mask=kind)
        for seq in range(case.num_seqs):
            own = alone(case, seq, rng(seq))
            rows = slice(*case.q_indptr[seq : seq + 2])
            assert np.allclose(own.expected[0], case.expected[0][rows], rtol=1e-12, atol=1e-14)
            assert np.allclose(own.expected[1], case.expected[1][rows], rtol=1e-12)
        other = repack(case, rng(3), page_size=5)
        assert other.kv.pages.shape[3] == 5
        assert np.allclose(other.expected[0], case.expected[0], rtol=1e-12, atol=1e-14)


# verify == decode -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tree", "tree&window", "tree&sink", "tree&(window|sink)"])
@pytest.mark.parametrize("storage", ["paged", "ragged"])
def test_every_path_decoded_linearly_equals_the_tree(kind: str, storage: str) -> None:
    case = make_case(rng(4), mask=kind, storage=storage, dtype="float16")
    for seq, tree in enumerate(case.mask.trees):
        q_len = int(np.diff(case.q_indptr)[seq])
        for node in range(tree.num_nodes - q_len, tree.num_nodes):
            for only_last in (False, True):
                path, rows = gather_path(case, seq, node, rng(node), only_last=only_last)
                assert len(path.q) == len(rows) >= 1
                assert not only_last or len(rows) == 1
                assert np.array_equal(path.q, case.q[rows])
                assert np.allclose(path.expected[0], case.expected[0][rows], rtol=1e-12, atol=1e-14)
                assert np.allclose(path.expected[1], case.expected[1][rows], rtol=1e-12)


def test_path_rows_are_the_nodes_above_as_far_as_they_are_rows() -> None:
    tree = TokenTree.from_parents([4, -1, 1, 2, -1, 0, 5])  # 4 > 0 > 5 > 6 and 1 > 2 > 3
    case = make_case(rng(), trees=[tree], lengths=[(5, 20)])  # rows are nodes 2 to 6
    for node, wanted in ((6, [5, 6]), (3, [2, 3]), (4, [4])):
        path, rows = gather_path(case, 0, node, rng())
        assert (rows + 2).tolist() == wanted
        assert path.kv.kv_len.tolist() == [13 + len(tree.path(node))]
        assert isinstance(path.mask, Causal)


def test_path_refuses_what_has_none() -> None:
    case = make_case(rng(), trees=[TokenTree.chain(3)], lengths=[(2, 5)])
    with pytest.raises(IndexRangeError, match="node: expected a row, 1 or more in sequence 0, got 0"):
        gather_path(case, 0, 0, rng())
    with pytest.raises(UnsupportedError, match="expected a mask with a Tree, got none"):
        gather_path(replace(case, mask=Full()), 0, 1, rng())
    with pytest.raises(UnsupportedError, match="ValidLength counts rows"):
        gather_path(replace(case, mask=case.mask & ValidLength([2])), 0, 1, rng())


def test_a_window_by_index_would_be_noticed() -> None:
    star = TokenTree.star(8)  # node 7 has depth 1: a window of 3 by depth holds its root, by index it does not
    case = make_case(rng(), mask=lambda rng, batch: Tree(batch.trees) & Window(3), trees=[star], logit_scale=5.0)
    path, rows = gather_path(case, 0, 7, rng(), only_last=True)
    by_index = replace(case, mask=Tree([star]) & Window(1))
    assert np.allclose(path.expected[0], case.expected[0][rows])
    assert not np.allclose(path.expected[0], by_index.expected[0][rows])


# budget -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=DTYPES)
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(rng(8), mask="causal&(window|sink)", dtype=request.param, logit_scale=20.0)


def full_row(case: Case) -> int:
    return int(np.flatnonzero(np.isfinite(case.expected[1]).all(axis=1))[0])


def empty_row(case: Case) -> int:
    return int(np.flatnonzero(np.isinf(case.expected[1]).all(axis=1))[0])


def test_budget_message_has_both_errors_and_the_index(case: Case) -> None:
    out, lse = as_result(case)
    row = full_row(case)
    out[row, 2, 5] += 1
    with pytest.raises(AssertionError) as caught:
        assert_within_budget(out, lse, case)
    text = str(caught.value)
    assert re.match(rf"out\[{row}, 2, 5\]: error (1\.0|9\.9)", text)
    number = r"\d\.\d{3}e[+-]\d\d"
    assert re.search(rf"over the budget {number} = 2 \* \(yardstick error {number} \+ eps\({case.q.dtype.name}\)", text)
    assert f"1 of {out.size} entries over" in text


def test_budget_is_in_proportion_to_rounding(case: Case) -> None:
    out, lse = as_result(case)
    eps = float(ml_dtypes.finfo(case.q.dtype).eps)
    row = full_row(case)
    largest = np.abs(case.expected[0]).max()
    out[row, 0, 0] += np.asarray(1.5 * eps * largest, out.dtype)
    assert_within_budget(out, lse, case)
    out[row, 0, 0] += np.asarray(64 * eps * largest, out.dtype)
    with pytest.raises(AssertionError, match="over the budget"):
        assert_within_budget(out, lse, case)


def test_budget_of_lse(case: Case) -> None:
    out, lse = as_result(case)
    lse[full_row(case), 1] *= np.float32(np.log(2))  # base e
    with pytest.raises(AssertionError, match=r"lse\[\d+, 1\]: error"):
        assert_within_budget(out, lse, case)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_budget_refuses_what_is_not_finite(case: Case, bad: float) -> None:
    out, lse = as_result(case)
    out[full_row(case), 0, 0] = bad
    with pytest.raises(AssertionError, match=r"out\[\d+, 0, 0\]: error inf"):
        assert_within_budget(out, lse, case)
    out, lse = as_result(case)
    lse[full_row(case), 0] = bad
    with pytest.raises(AssertionError, match=r"lse\[\d+, 0\]: "):
        assert_within_budget(out, lse, case)


def test_budget_wants_empty_rows_exact(case: Case) -> None:
    row = empty_row(case)
    for bad in (1e-6, np.nan):
        out, lse = as_result(case)
        out[row, 1, 2] = bad
        with pytest.raises(AssertionError, match=rf"out\[{row}, 1, 2\]: expected 0, the row sees nothing"):
            assert_within_budget(out, lse, case)
    for bad in (-50000.0, np.nan):
        out, lse = as_result(case)
        lse[row, 1] = bad
        with pytest.raises(AssertionError, match=rf"lse\[{row}, 1\]: expected -inf, the row sees nothing"):
            assert_within_budget(out, lse, case)


def test_budget_wants_the_right_kind(case: Case) -> None:
    out, lse = as_result(case)
    with pytest.raises(AssertionError, match=r"lse: expected float32 .* got float64"):
        assert_within_budget(out, lse.astype(np.float64), case)
    with pytest.raises(AssertionError, match=r"out: expected"):
        assert_within_budget(out[:-1], lse, case)


def test_nan_may_stand_where_the_reference_has_it() -> None:
    case = make_case(rng(), mask="full", lengths=[(2, 3)], storage="ragged")
    case.kv.v[1, 0, 4] = np.nan
    out, lse = as_result(case)
    assert np.isnan(out[:, :2, 4]).all()
    with pytest.raises(AssertionError, match="out"):
        assert_within_budget(np.nan_to_num(out), lse, case)
    assert_within_budget(out, lse, case)


def test_a_case_too_hard_for_float32_has_no_budget() -> None:
    case = make_case(rng(), mask="full", lengths=[(1, 3)], logit_scale=20.0)
    hard = replace(case, q=case.q * np.float32(1e30), sm_scale=1e30)
    with pytest.raises(AssertionError, match="no budget, plain float32 code has no finite result"):
        assert_within_budget(*as_result(hard), hard)


# memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int32])
@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (), (1,), (5000,)])
@pytest.mark.parametrize("side", ["after", "before"])
def test_guarded_copies(dtype: type, shape: tuple[int, ...], side: str) -> None:
    array = rng().integers(-9, 9, shape).astype(dtype)
    copy = guarded(array, side)
    assert copy.dtype == array.dtype
    assert copy.flags.c_contiguous
    assert copy.flags.aligned
    assert np.array_equal(copy, array)
    edge = copy.ctypes.data + (copy.nbytes if side == "after" else 0)
    assert edge % 4096 == 0


def test_guarded_takes_strided_arrays() -> None:
    array = np.arange(24).reshape(4, 6)[::2, ::-1]
    assert np.array_equal(guarded(array), array)


PROBE = """
import ctypes, sys
import numpy as np
from treeattn.testing import guarded
side, offset = sys.argv[1], int(sys.argv[2])
array = guarded(np.arange(7, dtype=np.float32), side)
print(ctypes.c_float.from_address(array.ctypes.data + offset).value)
"""


@pytest.mark.parametrize(
    ("side", "offset", "dies"),
    [("after", 24, False), ("after", 28, True), ("after", -4, False), ("before", 0, False), ("before", -4, True)],
)
def test_guard_page_kills_who_touches_it(side: str, offset: int, dies: bool) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE, side, str(offset)], capture_output=True, check=False)
    assert (done.returncode < 0) == dies, done.stderr


def test_guard_skips_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(unittest.SkipTest, match="guard pages need mprotect of Linux or macOS, this is win32"):
        guarded(np.zeros(3))


@pytest.mark.parametrize("side", ["after", "before"])
@pytest.mark.parametrize("storage", ["paged", "ragged"])
def test_guarded_case_is_the_same_case(side: str, storage: str) -> None:
    case = make_case(rng(), storage=storage, dtype="bfloat16")
    same = guarded_case(case, side)
    same.kv.validate()
    assert type(same.kv) is type(case.kv)
    assert same.kv.pools.k.owner is (same.kv.pages if isinstance(same.kv, PagedKV) else same.kv.k)
    assert isinstance(same.kv, PagedKV | RaggedKV)
    assert np.allclose(same.expected[0], case.expected[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int32])
def test_canaries(dtype: type) -> None:
    buffer = canaries((3, 5), dtype)
    assert buffer.array.flags.aligned
    assert np.dtype(dtype).kind == "i" or np.isnan(buffer.array).all()
    buffer.array[...] = 1
    buffer.check()
    memory = buffer.surroundings
    for at, text in ((4095, "1 bytes overwritten before the start"), (4096 + buffer.array.nbytes + 3, "3 bytes off")):
        memory[at] ^= 1
        with pytest.raises(AssertionError, match=text):
            buffer.check()
        memory[at] ^= 1
    buffer.check()
    assert canaries((0,), dtype).check() is None


def test_poison() -> None:
    assert np.isnan(poison(np.zeros(3, ml_dtypes.bfloat16))).all()
    assert poison(np.zeros(3, np.int32)).tolist() == [0, 0, 0]


# strategies and documentation -------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(cases(max_seqs=2, max_context=20))
def test_drawn_cases_are_valid(case: Case) -> None:
    case.kv.validate()
    case.mask.check(MaskBatch(case.q_indptr, case.kv.kv_len, case.mask.trees))
    assert_within_budget(*case.yardsticks[-1], case)


@given(trees(min_nodes=1), seeds(), st.booleans())
def test_drawn_trees_are_trees(tree: TokenTree, seed: int, deep: bool) -> None:
    assert tree.num_nodes >= 1
    assert (tree.parents < 0).any()


def test_kit_needs_no_hypothesis() -> None:
    code = "import sys; sys.modules['hypothesis'] = None; import treeattn.testing"
    subprocess.run([sys.executable, "-c", code], check=True)
