"""The mask algebra on the host against the oracle's visibility: bounds, spans, checks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeattn import reference
from treeattn.errors import DTypeError, IndexRangeError, ShapeError, UnsupportedError
from treeattn.masks import Batch, Causal, Full, Mask, PaddedLeft, Sink, Tree, ValidLength, Window, tile_spans
from treeattn.testing import Batch as Drawn
from treeattn.testing import mask_kinds, random_lengths
from treeattn.testing.strategies import lengths as draw_lengths
from treeattn.testing.strategies import seeds
from treeattn.tree import TokenTree

TESTS = {
    "full": lambda bound, col, pos, enter, exit_, is_node: np.ones_like(col + bound, np.bool_),
    "col_below": lambda bound, col, pos, enter, exit_, is_node: col < bound,
    "col_from": lambda bound, col, pos, enter, exit_, is_node: col >= bound,
    "pos_from": lambda bound, col, pos, enter, exit_, is_node: pos >= bound,
    "pos_below": lambda bound, col, pos, enter, exit_, is_node: pos < bound,
    "tree": lambda bound, col, pos, enter, exit_, is_node: ~is_node | ((enter <= bound) & (bound < exit_)),
}


def batch_of(lengths: tuple[tuple[int, int], ...], mask: Mask) -> Batch:
    q_len, kv_len = np.array(lengths, np.int32).reshape(-1, 2).T
    q_indptr = np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32)
    return Batch(q_indptr, np.ascontiguousarray(kv_len), mask.trees)


def evaluate(form: tuple, bounds: np.ndarray, columns: tuple) -> np.ndarray:
    if form[0] in ("&", "|"):
        join = np.logical_and if form[0] == "&" else np.logical_or
        return join(evaluate(form[1], bounds, columns), evaluate(form[2], bounds, columns))
    return TESTS[form[0]](bounds[form[1]][:, None], *columns)


def columns_of(batch: Batch, seq: int) -> tuple:
    """``col, pos, enter, exit, is_node``, each ``[1, kv_len]``, as the module's table defines them."""
    col = np.arange(batch.kv_len[seq])[None]
    prefix_len = batch.prefix_len[seq]
    nodes = batch.nodes[batch.node_indptr[seq] : batch.node_indptr[seq + 1]]
    pos, enter, exit_ = col.copy(), np.zeros_like(col), np.zeros_like(col)
    if len(nodes):
        enter[0, prefix_len:], exit_[0, prefix_len:], pos[0, prefix_len:] = nodes.T
        pos[0, prefix_len:] += prefix_len
    return col, pos, enter, exit_, col >= prefix_len


def check_bounds(mask: Mask, lengths: tuple[tuple[int, int], ...]) -> None:
    batch = batch_of(lengths, mask)
    mask.check(batch)
    bounds = mask.bounds(batch)
    assert bounds.dtype == np.int32
    assert bounds.shape == (len(list(mask.leaves())), batch.q_indptr[-1])
    for seq, (q_len, kv_len) in enumerate(lengths):
        own = bounds[:, batch.q_indptr[seq] : batch.q_indptr[seq + 1]]
        got = evaluate(mask.form, own, columns_of(batch, seq))
        assert np.array_equal(got, reference.visible(mask, seq, q_len, kv_len)), (seq, q_len, kv_len)


def check_spans(mask: Mask, lengths: tuple[tuple[int, int], ...], tile: int) -> None:
    batch = batch_of(lengths, mask)
    bounds = mask.bounds(batch)
    tiles = [(seq, row) for seq, (q_len, _) in enumerate(lengths) for row in range(0, q_len, tile)]
    if not tiles:
        return
    seqs = np.array([seq for seq, _ in tiles])
    rows = [
        slice(batch.q_indptr[seq] + row, batch.q_indptr[seq] + min(row + tile, lengths[seq][0])) for seq, row in tiles
    ]
    low = np.stack([bounds[:, own].min(axis=1) for own in rows], axis=1)
    high = np.stack([bounds[:, own].max(axis=1) for own in rows], axis=1)
    begin, end, visit, full = tile_spans(mask, low, high, batch.prefix_len[seqs], batch.kv_len[seqs])
    assert (begin[:, 0] == 0).all()
    assert (end[:, -1] == batch.kv_len[seqs]).all()
    assert (begin[:, 1:] == end[:, :-1]).all()
    assert (visit | ~full).all()
    for index, (seq, row) in enumerate(tiles):
        seen = reference.visible(mask, seq, *lengths[seq])[row : row + tile]
        visited = np.zeros(seen.shape[1], np.bool_)
        for piece in range(begin.shape[1]):
            cols = slice(begin[index, piece], end[index, piece])
            visited[cols] |= visit[index, piece]
            assert not full[index, piece] or seen[:, cols].all(), (seq, row, cols)
        assert not seen[:, ~visited].any(), (seq, row)


@pytest.mark.parametrize("kind", mask_kinds())
def test_bounds_and_spans_agree_with_the_oracle(kind: str) -> None:
    for seed in range(12):
        rng = np.random.default_rng(seed)
        lengths = random_lengths(rng, 8, tree="tree" in kind)
        mask = mask_kinds()[kind](rng, Drawn(lengths))
        check_bounds(mask, lengths)
        check_spans(mask, lengths, tile=1 + seed % 7)


@settings(deadline=None, max_examples=150)
@given(st.data(), st.sampled_from(list(mask_kinds())), seeds(), st.integers(1, 16))
def test_bounds_and_spans_agree_on_any_batch(data: st.DataObject, kind: str, seed: int, tile: int) -> None:
    lengths = data.draw(draw_lengths(tree="tree" in kind))
    mask = mask_kinds()[kind](np.random.default_rng(seed), Drawn(lengths))
    check_bounds(mask, lengths)
    check_spans(mask, lengths, tile)


def spans_of_one_tile(mask: Mask, q_len: int, kv_len: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Columns to test and columns known full, as merged-by-kind lists of ``(begin, end)``."""
    batch = batch_of(((q_len, kv_len),), mask)
    bounds = mask.bounds(batch)
    spans = tile_spans(mask, bounds.min(1)[:, None], bounds.max(1)[:, None], batch.prefix_len, batch.kv_len)
    begin, end, visit, full = (part[0].tolist() for part in spans)
    pieces = list(zip(begin, end, visit, full, strict=True))
    partial = [(first, last) for first, last, some, every in pieces if some and not every]
    return partial, [(first, last) for first, last, some, every in pieces if every]


@pytest.mark.parametrize(
    ("mask", "partial", "full"),
    [
        (Full(), [], [(0, 100)]),
        (Causal(), [(97, 100)], [(0, 97)]),
        (Causal() & Window(10), [(87, 90), (97, 100)], [(90, 97)]),
        (Causal() & (Window(10) | Sink(4)), [(87, 90), (97, 100)], [(0, 4), (90, 97)]),
        (Tree([TokenTree.chain(4)]), [(96, 100)], [(0, 96)]),
        (Tree([TokenTree.chain(4)]) & (Window(10) | Sink(4)), [(87, 90), (96, 100)], [(0, 4), (90, 96)]),
        (ValidLength([50]), [], [(0, 50)]),
        (PaddedLeft([50]), [], [(50, 100)]),
        (ValidLength([2]), [(0, 2)], []),
        (ValidLength([0]), [], []),
    ],
)
def test_long_contexts_are_mostly_full_or_skipped(mask: Mask, partial: list, full: list) -> None:
    assert spans_of_one_tile(mask, 4, 100) == (partial, full)


def test_form_is_the_shape_and_not_the_values() -> None:
    one = Causal() & (Window(3) | Sink(1))
    other = Causal() & (Window(300) | Sink(4))
    assert one.form == other.form == ("&", ("col_below", 0), ("|", ("pos_from", 1), ("pos_below", 2)))
    assert hash(one.form) == hash(other.form)
    trees = Tree([TokenTree.star(3)]), Tree([TokenTree.chain(9), TokenTree.chain(2)])
    assert trees[0].form == trees[1].form == ("tree", 0)


def test_one_leaf_may_stand_in_two_places() -> None:
    window = Window(3)
    check_bounds((Causal() & window) | (window & Sink(2)), ((4, 9), (0, 3), (3, 3)))


def test_a_single_tree_needs_no_list() -> None:
    assert Tree(TokenTree.chain(2)).trees == (TokenTree.chain(2),)
    assert (Causal() & Window(2)).trees is None


def test_the_largest_window_sees_everything() -> None:
    check_bounds(Causal() & Window(2**31 - 1), ((2, 5), (1, 1)))


def test_the_largest_window_with_more_rows_than_keys() -> None:
    check_bounds(Causal() & Window(2**31 - 1), ((5, 1),))
    check_bounds(Window(2**31 - 1), ((5, 1),))


def test_numpy_integers_are_sizes() -> None:
    assert Window(np.int64(4)).size == 4
    assert Sink(np.int32(0)).size == 0


LENGTHS = ((2, 5), (3, 3))


@pytest.mark.parametrize(
    ("mask", "error", "text"),
    [
        (lambda: Window(0), IndexRangeError, "Window: expected 1 to 2147483647, got 0"),
        (lambda: Window(2**31), IndexRangeError, "Window: expected 1 to 2147483647, got 2147483648"),
        (lambda: Window(4.0), DTypeError, "Window: expected an integer, got 4.0"),
        (lambda: Window(True), DTypeError, "Window: expected an integer, got True"),
        (lambda: Sink(-1), IndexRangeError, "Sink: expected 0 to 2147483647, got -1"),
        (lambda: Sink("4"), DTypeError, "Sink: expected an integer, got '4'"),
        (lambda: Tree([[-1, 0]]), DTypeError, "trees: expected a TokenTree per sequence, got list at index 0"),
        (lambda: Causal() & np.ones(3), DTypeError, "mask: expected a Mask beside & or |, got ndarray"),
        (lambda: Causal() | None, DTypeError, "mask: expected a Mask beside & or |, got NoneType"),
        (lambda: (Tree([]) & Tree([])).trees, UnsupportedError, "mask: expected at most one Tree, got 2"),
        (lambda: Tree([TokenTree.chain(2)]), ShapeError, "trees: expected one per sequence (2), got 1"),
        (
            lambda: Tree([TokenTree.chain(2), TokenTree.chain(2)]),
            ShapeError,
            "trees: expected at least q_len nodes, got 2 for sequence 1 with q_len 3",
        ),
        (
            lambda: Tree([TokenTree.chain(6), TokenTree.chain(3)]),
            ShapeError,
            "trees: expected at most kv_len nodes (the tree's own keys are in the cache), "
            "got 6 for sequence 0 with kv_len 5",
        ),
        (lambda: ValidLength([1]), ShapeError, "ValidLength lengths: expected one per sequence (2), got 1"),
        (lambda: PaddedLeft([1, 2, 3]), ShapeError, "PaddedLeft lengths: expected one per sequence (2), got 3"),
        (
            lambda: ValidLength([5, 4]),
            ShapeError,
            "ValidLength lengths: expected 0 to max(q_len, kv_len), got 4 for sequence 1 with limit 3",
        ),
        (
            lambda: Causal() & PaddedLeft([-1, 0]),
            ShapeError,
            "PaddedLeft lengths: expected 0 to max(q_len, kv_len), got -1 for sequence 0 with limit 5",
        ),
        (lambda: ValidLength([1.5, 2.0]), DTypeError, "lengths: expected integers, got dtype float64"),
        (lambda: ValidLength([[1, 2]]), ShapeError, "lengths: expected one dimension, got shape (1, 2)"),
        (lambda: ValidLength([1, 2**40]), IndexRangeError, "lengths: expected values that int32 holds"),
    ],
)
def test_checks_say_what_is_wrong(mask: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        made = mask()
        made.check(batch_of(LENGTHS, made))
    assert text in str(caught.value)


def test_fitting_sizes_pass() -> None:
    for mask in (
        Tree([TokenTree.chain(5), TokenTree.star(3)]) & Window(1),
        ValidLength(np.array([5, 0], np.uint8)) & PaddedLeft([0, 3]),
        Full() | Causal(),
    ):
        mask.check(batch_of(LENGTHS, mask))
