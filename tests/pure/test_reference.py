"""The oracle against numbers worked out by hand and against PyTorch."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from treeattn import reference
from treeattn.errors import ShapeError, UnsupportedError
from treeattn.masks import Causal, Full, Mask, PaddedLeft, Sink, Tree, ValidLength, Window
from treeattn.storage import PagedKV, RaggedKV, Storage
from treeattn.testing import Case, make_case, mask_kinds, repack
from treeattn.tree import TokenTree


def picture(mask: Mask, q_len: int, kv_len: int, seq: int = 0) -> list[str]:
    seen = reference.visible(mask, seq, q_len, kv_len)
    assert seen.shape == (q_len, kv_len)
    assert seen.dtype == np.bool_
    return ["".join(".#"[int(cell)] for cell in row) for row in seen]


# 2 roots (3 and 1), children before parents: 3 -> 0 -> 2, 1 -> 4
FOREST = TokenTree.from_parents([3, -1, 0, -1, 1])


@pytest.mark.parametrize(
    ("mask", "q_len", "kv_len", "wanted"),
    [
        (Full(), 2, 3, ["###", "###"]),
        (Full(), 0, 3, []),
        (Full(), 2, 0, ["", ""]),
        (Causal(), 2, 4, ["###.", "####"]),
        (Causal(), 4, 2, ["..", "..", "#.", "##"]),
        (ValidLength([2]), 3, 4, ["##..", "##..", "...."]),
        (ValidLength([0]), 2, 2, ["..", ".."]),
        (PaddedLeft([2]), 3, 4, ["....", "..##", "..##"]),
        (PaddedLeft([3]), 3, 2, ["##", "##", "##"]),
        (PaddedLeft([0]), 2, 2, ["..", ".."]),
        (Causal() & PaddedLeft([2]), 3, 3, ["...", ".#.", ".##"]),
        (Causal() & Window(2), 3, 5, [".##..", "..##.", "...##"]),
        (Window(1), 2, 4, ["..##", "...#"]),
        (Sink(2), 2, 4, ["##..", "##.."]),
        (Sink(0), 1, 2, [".."]),
        (Causal() & (Window(1) | Sink(1)), 3, 4, ["##..", "#.#.", "#..#"]),
        (Tree([FOREST]), 5, 7, ["###..#.", "##.#...", "###.##.", "##...#.", "##.#..#"]),
        (Tree([FOREST]), 2, 6, ["#...#.", "#.#..#"]),
        (Tree([FOREST]) & Window(2), 5, 5, ["#..#.", ".#...", "#.#..", "...#.", ".#..#"]),
        (Tree([FOREST]) & (Window(1) | Sink(1)), 5, 6, ["##....", "#.#...", "#..#..", "#...#.", "#....#"]),
    ],
)
def test_visible_by_hand(mask: Mask, q_len: int, kv_len: int, wanted: list[str]) -> None:
    assert picture(mask, q_len, kv_len) == wanted


def test_siblings_do_not_see_each_other() -> None:
    assert picture(Tree([TokenTree.star(4)]), 4, 4) == ["#...", "##..", "#.#.", "#..#"]


def test_each_sequence_has_its_own_tree_and_length() -> None:
    trees = Tree([TokenTree.chain(2), TokenTree.from_parents([-1, -1])])
    assert picture(trees, 2, 3, seq=0) == ["##.", "###"]
    assert picture(trees, 2, 3, seq=1) == ["##.", "#.#"]
    assert picture(ValidLength([1, 2]), 2, 2, seq=1) == ["##", "##"]


def test_a_tree_must_fit_rows_and_columns() -> None:
    with pytest.raises(ShapeError, match=r"trees: expected q_len 2 to kv_len 4 nodes in sequence 0, got 5"):
        reference.visible(Tree([FOREST]), 0, 2, 4)
    with pytest.raises(UnsupportedError, match="at most one Tree, got 2"):
        reference.visible(Tree([FOREST]) & Tree([FOREST]), 0, 2, 6)


def two_keys(mask: Mask, values: tuple[float, float] = (1.0, 4.0)) -> tuple[np.ndarray, np.ndarray]:
    """One row with q = 1 over the keys ln 2 and 0, so with weights 2 to 1."""
    k = np.array([np.log(2), 0.0]).reshape(2, 1, 1)
    v = np.array(values).reshape(2, 1, 1)
    q = np.ones((2, 1, 1))
    return reference.attention(q, RaggedKV(k, v, [0, 2]), mask, sm_scale=1.0)


def test_attention_by_hand() -> None:
    out, lse = two_keys(Full())
    np.testing.assert_allclose(out[:, 0, 0], [2.0, 2.0], rtol=1e-15)  # (2 * 1 + 1 * 4) / 3
    np.testing.assert_allclose(lse[:, 0], np.log2(3), rtol=1e-15)
    out, lse = two_keys(Causal())
    np.testing.assert_allclose(out[:, 0, 0], [1.0, 2.0], rtol=1e-15)
    np.testing.assert_allclose(lse[:, 0], [1.0, np.log2(3)], rtol=1e-15)


def test_a_row_that_sees_nothing_is_zero_with_minus_infinity() -> None:
    out, lse = two_keys(ValidLength([0]))
    assert (out == 0).all()
    assert (lse == -np.inf).all()


def test_what_is_invisible_is_never_multiplied() -> None:
    for bad in (np.nan, np.inf):
        out, _ = two_keys(Causal(), (1.0, bad))
        assert out[0, 0, 0] == 1.0
        assert not np.isfinite(out[1, 0, 0])


def test_a_visible_logit_of_any_size_beats_a_masked_one() -> None:
    k, v = np.array([-9e4, 0.0]).reshape(2, 1, 1), np.array([7.0, 1.0]).reshape(2, 1, 1)
    out, lse = reference.attention(np.ones((2, 1, 1)), RaggedKV(k, v, [0, 2]), Causal())
    assert out[0, 0, 0] == 7.0
    np.testing.assert_allclose(lse[0, 0], -9e4 * np.log2(np.e), rtol=1e-15)


def test_gather_follows_the_page_table() -> None:
    pages = np.arange(3 * 2 * 1 * 2 * 1, dtype=np.float32).reshape(3, 2, 1, 2, 1)
    kv = PagedKV(pages, [0, 2, 2, 3], [2, 0, 1], [1, 0, 2])
    k, v = reference.gather(kv, 0)
    assert k.dtype == np.float64
    assert (k.ravel().tolist(), v.ravel().tolist()) == ([8, 9, 0], [10, 11, 2])
    assert reference.gather(kv, 1)[0].shape == (0, 1, 1)
    assert reference.gather(kv, 2)[1].ravel().tolist() == [6, 7]


def test_gather_knows_ragged_and_paged_only() -> None:
    with pytest.raises(UnsupportedError, match="expected RaggedKV or PagedKV, got Storage"):
        reference.gather(Storage(), 0)
    with pytest.raises(UnsupportedError, match="expected RaggedKV or PagedKV, got Storage"):
        reference.attention(np.zeros((1, 1, 1)), Storage(), Full())


def test_q_indptr_is_needed_for_several_sequences() -> None:
    kv = RaggedKV(np.zeros((4, 2, 3)), np.zeros((4, 2, 5)), [0, 1, 4])
    with pytest.raises(ShapeError, match=r"q_indptr: expected \[3\] integers for 2 sequences, got None"):
        reference.attention(np.zeros((2, 2, 3)), kv, Full())
    with pytest.raises(ShapeError, match=r"q_indptr: expected \[3\] integers from 0 to 2"):
        reference.attention(np.zeros((2, 2, 3)), kv, Full(), q_indptr=[0, 1, 3])
    out, lse = reference.attention(np.zeros((2, 2, 3)), kv, Full(), q_indptr=[0, 1, 2])
    assert out.shape == (2, 2, 5)
    np.testing.assert_allclose(lse, [[0, 0], [np.log2(3)] * 2])


def test_heads_must_divide() -> None:
    kv = RaggedKV(np.zeros((4, 2, 3)), np.zeros((4, 2, 3)), [0, 4])
    with pytest.raises(ShapeError, match=r"q: expected a multiple of 2 \(= kv_heads\) heads, got 3"):
        reference.attention(np.zeros((1, 3, 3)), kv, Full())


def test_batch_without_sequences() -> None:
    kv = RaggedKV(np.zeros((0, 1, 3)), np.zeros((0, 1, 5)), [0])
    out, lse = reference.attention(np.zeros((0, 2, 3)), kv, Full(), q_indptr=[0])
    assert (out.shape, lse.shape) == ((0, 2, 5), (0, 2))


def test_low_precision_returns_the_dtype_of_q() -> None:
    case = make_case(np.random.default_rng(0), dtype="bfloat16", kv_dtype="float16")
    for out, lse in case.yardsticks:
        assert (out.dtype, lse.dtype) == (np.dtype(ml_dtypes.bfloat16), np.float32)
        error = np.abs(out.astype(np.float64) - case.expected[0]).max()
        assert 0 < error < 0.05


def test_low_precision_rounds_in_four_ways() -> None:
    case = make_case(np.random.default_rng(0), d_qk=64)
    assert len({out.tobytes() for out, _ in case.yardsticks}) == 4
    for _, lse in case.yardsticks:
        np.testing.assert_allclose(lse, case.expected[1], rtol=1e-5, atol=1e-4)


def test_merge_of_parts_is_the_whole() -> None:
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 9, 2, 8)) * 4
    q = rng.standard_normal((3, 4, 8))
    cuts = [0, 4, 4, 5, 9]
    parts = [
        reference.attention(q, RaggedKV(k[begin:end], v[begin:end], [0, end - begin]), Full())
        for begin, end in pairwise(cuts)
    ]
    out, lse = reference.attention(q, RaggedKV(k, v, [0, 9]), Full())
    for states in (parts, parts[::-1]):
        merged = reference.merge(states)
        np.testing.assert_allclose(merged[0], out, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(merged[1], lse, rtol=1e-12)


def test_merge_with_the_empty_state_changes_nothing() -> None:
    some, empty = (np.array([[2.0, 3.0]]), np.array([5.0])), (np.zeros((1, 2)), np.array([-np.inf]))
    for states in ([some, empty], [empty, some], [some]):
        out, lse = reference.merge(states)
        assert (out.tolist(), lse.tolist()) == ([[2.0, 3.0]], [5.0])
    out, lse = reference.merge([empty, empty])
    assert (out.tolist(), lse.tolist()) == ([[0.0, 0.0]], [-np.inf])


def test_merge_of_two_equal_states() -> None:
    out, lse = reference.merge([(np.array([1.0]), np.array(900.0)), (np.array([3.0]), np.array(900.0))])
    assert (out.tolist(), float(lse)) == ([2.0], 901.0)


def torch_attention(case: Case) -> np.ndarray:
    """The whole case by PyTorch in float64, rows that see nothing left at 0."""
    torch = pytest.importorskip("torch")
    scale = case.q.shape[2] ** -0.5 if case.sm_scale is None else case.sm_scale
    group = case.q.shape[1] // case.kv.kv_heads
    outs = []
    for seq in range(case.num_seqs):
        q = torch.tensor(case.q[case.q_indptr[seq] : case.q_indptr[seq + 1]].astype(np.float64))
        k, v = (torch.tensor(part).repeat_interleave(group, 1) for part in reference.gather(case.kv, seq))
        seen = torch.tensor(reference.visible(case.mask, seq, len(q), len(k)))
        out = torch.nn.functional.scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in (q, k, v)), attn_mask=seen, scale=scale
        )[0].transpose(0, 1)
        outs.append(torch.where(seen.any(1)[:, None, None], out, 0.0).numpy())
    return np.concatenate(outs)


@pytest.mark.parametrize("kind", mask_kinds())
@pytest.mark.parametrize("storage", ["ragged", "paged"])
def test_attention_equals_pytorch(kind: str, storage: str) -> None:
    case = make_case(
        np.random.default_rng(7),
        mask=kind,
        storage=storage,
        d_v=5 if storage == "ragged" else None,
        d_qk=8,
        page_size=3,
    )
    np.testing.assert_allclose(case.expected[0], torch_attention(case), rtol=1e-10, atol=1e-12)


def test_storage_does_not_matter() -> None:
    case = make_case(np.random.default_rng(5), mask="tree&(window|sink)", dtype="float16")
    for storage in ("ragged", "paged"):
        other = repack(case, np.random.default_rng(6), storage=storage)
        for got, want in zip(other.expected, case.expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12)
