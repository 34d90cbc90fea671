"""TokenTree against the definitions: visibility by walking parents, one node at a time."""

import copy
import json
import os
import pickle
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeattn.errors import DTypeError, IndexRangeError, ShapeError, UnsupportedError
from treeattn.tree import TokenTree

SHARED = Path(os.environ.get("TREEATTN_SHARED", Path(__file__).parents[3] / "shared"))
TREES = SHARED / "data" / "trees.json"


@st.composite
def forests(draw, max_nodes=20):
    """Parents of a random forest whose nodes stand in random order."""
    n = draw(st.integers(0, max_nodes))
    ordered = [draw(st.integers(-1, node - 1)) for node in range(n)]
    place = draw(st.permutations(range(n)))
    parents = [-1] * n
    for node, parent in enumerate(ordered):
        parents[place[node]] = place[parent] if parent >= 0 else -1
    return parents


def walk(parents, node):
    """The node and its ancestors, nearest first."""
    seen = []
    while node != -1:
        seen.append(node)
        node = parents[node]
    return seen


def mask_by_walking(parents):
    mask = np.zeros((len(parents), len(parents)), bool)
    for node in range(len(parents)):
        for ancestor in walk(parents, node):
            mask[node, ancestor] = True
    return mask


def preorder(parents):
    order, stack = [], [node for node in range(len(parents)) if parents[node] == -1][::-1]
    while stack:
        order.append(stack.pop())
        stack += [node for node in range(len(parents)) if parents[node] == order[-1]][::-1]
    return order


@given(forests())
def test_everything_follows_from_the_parents(parents):
    tree = TokenTree.from_parents(parents)
    n = len(parents)
    assert tree.num_nodes == n
    assert tree.parents.tolist() == parents
    assert tree.depth.tolist() == [len(walk(parents, node)) - 1 for node in range(n)]
    assert [tree.path(node) for node in range(n)] == [walk(parents, node)[::-1] for node in range(n)]
    assert tree.leaves() == [node for node in range(n) if node not in parents]
    assert tree.mask().dtype == bool
    np.testing.assert_array_equal(tree.mask(), mask_by_walking(parents))
    assert tree.is_chain == (parents == list(range(-1, n - 1)))


@given(forests())
def test_intervals_are_preorder_numbers_and_answer_visibility(parents):
    tree = TokenTree.from_parents(parents)
    assert tree.intervals.shape == (len(parents), 2)
    enter, end = tree.intervals.T.tolist()
    assert [enter[node] for node in preorder(parents)] == list(range(len(parents)))
    for i in range(len(parents)):
        for j in range(len(parents)):
            assert (enter[j] <= enter[i] < end[j]) == (j in walk(parents, i))


def test_nodes_in_depth_first_order_keep_their_numbers():
    tree = TokenTree.from_parents([-1, 0, 1, 1, 0, 4, -1, 6])
    assert tree.intervals.tolist() == [[0, 6], [1, 4], [2, 3], [3, 4], [4, 6], [5, 6], [6, 8], [7, 8]]


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", ">i4"])
def test_any_integer_width_is_kept_as_int32(dtype):
    tree = TokenTree.from_parents(np.array([-1, 0, 0], dtype))
    assert [array.dtype for array in (tree.parents, tree.depth, tree.intervals)] == [np.dtype("int32")] * 3


def test_arrays_that_only_speak_dlpack_are_read():
    class Foreign:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    assert TokenTree.from_parents(Foreign(np.array([-1, 0, 0]))).parents.tolist() == [-1, 0, 0]


def test_arrays_on_another_device_are_refused():
    class OnDevice:
        def __array__(self, *args, **options):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

    with pytest.raises(DTypeError, match=r"^parents: expected an array on the host, got can't convert cuda:0"):
        TokenTree.from_parents(OnDevice())


# immutability -------------------------------------------------------------------------------------


def test_the_callers_array_is_copied():
    parents = np.array([-1, 0, 0], np.int32)
    tree = TokenTree.from_parents(parents)
    parents[2] = 1
    assert tree.parents.tolist() == [-1, 0, 0]


@pytest.mark.parametrize("revive", [lambda t: t, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_arrays_are_read_only_also_in_copies(revive):
    tree = revive(TokenTree.from_paths([["a", "b"], ["a", "c"]]))
    assert tree.labels == ("a", "b", "c")
    for array in (tree.parents, tree.depth, tree.intervals):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


@pytest.mark.parametrize("name", ["parents", "depth", "is_chain", "new"])
def test_attributes_cannot_be_set(name):
    with pytest.raises(AttributeError, match=f"^TokenTree is immutable; .* setting {name}$"):
        setattr(TokenTree.chain(2), name, 1)


def test_equal_and_hashed_by_parents():
    a, b = TokenTree.from_parents([-1, 0]), TokenTree.from_paths([["x", "y"]])
    assert a == b
    assert {a: 1}[b] == 1
    assert a != TokenTree.from_parents([-1, -1])
    assert a != TokenTree.from_parents([-1, 0, 1])
    assert a != [-1, 0]


def test_repr():
    assert repr(TokenTree.from_parents([-1, 0])) == "TokenTree.from_parents([-1, 0])"
    assert repr(TokenTree.star(17)) == "<TokenTree of 17 nodes, 2 deep>"


# size ---------------------------------------------------------------------------------------------

N = 100_000


@pytest.mark.parametrize(
    ("parents", "depth", "enter"),
    [
        (np.arange(-1, N - 1), np.arange(N), np.arange(N)),
        (np.append(np.arange(1, N), -1), np.arange(N)[::-1], np.arange(N)[::-1]),
    ],
    ids=["in order", "reversed"],
)
def test_chain_of_100_000_nodes(parents, depth, enter):
    start = time.process_time()
    tree = TokenTree.from_parents(parents)
    np.testing.assert_array_equal(tree.depth, depth)
    np.testing.assert_array_equal(tree.intervals, np.stack([enter, np.full(N, N)], axis=1))
    assert time.process_time() - start < 1  # takes 0.06 s; anything quadratic takes minutes
    leaf = tree.leaves()[0]
    assert len(tree.path(leaf)) == N


def test_cycle_of_100_000_nodes_is_named_in_short():
    with pytest.raises(ShapeError, match=r"-> \(99992 more\) -> ") as caught:
        TokenTree.from_parents(np.roll(np.arange(N), 1))
    assert len(str(caught.value)) < 200


def test_cycles_of_up_to_8_nodes_are_named_in_full():
    with pytest.raises(ShapeError, match=r"the cycle 7 -> 6 -> 5 -> 4 -> 3 -> 2 -> 1 -> 0 -> 7 \(node"):
        TokenTree.from_parents(np.roll(np.arange(8), 1))
    with pytest.raises(ShapeError, match=r"the cycle 8 -> 7 -> 6 -> 5 -> 4 -> 3 -> 2 -> 1 -> \(1 more\) -> 8 \("):
        TokenTree.from_parents(np.roll(np.arange(9), 1))


# parents ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parents", "error", "message"),
    [
        ([-1, 0, 0, 9, 1, 1], IndexRangeError, r"^parents: expected int in \[-1, 6\), got 9 at node 3; count"),
        ([-1, 0, -2], IndexRangeError, r"^parents: expected int in \[-1, 3\), got -2 at node 2; "),
        ([-1, 0, 3], IndexRangeError, r"^parents: expected int in \[-1, 3\), got 3 at node 2; "),
        (np.array([2**64 - 1], np.uint64), IndexRangeError, r"got 18446744073709551615 at node 0; "),
        ([-1, 2**40], IndexRangeError, r"got 1099511627776 at node 1; "),
        ([-1, 1], ShapeError, r"^parents: expected a forest, got the cycle 1 -> 1 \(node -> parent\); give one"),
        ([0], ShapeError, r"the cycle 0 -> 0 "),
        ([[-1, 0], [0, 1]], ShapeError, r"^parents: expected shape \[n\], got \[2, 2\]; pass one tree's"),
        (3, ShapeError, r"^parents: expected shape \[n\], got \[\]; "),
        ([[-1], [0, 1]], ShapeError, r"^parents: expected rows of one length, got ragged ones; "),
        ([-1.0, 0.0], DTypeError, r"^parents: expected ints, got float64; pass node numbers, -1 for a root$"),
        ([True, False], DTypeError, r"^parents: expected ints, got bool; "),
        (["a"], DTypeError, r"^parents: expected ints, got <U1; "),
        (None, DTypeError, r"^parents: expected ints, got object; "),
        ([-1, None], DTypeError, r"^parents: expected ints, got object; "),
        ([2**70], DTypeError, r"^parents: expected ints, got object; "),
    ],
)
def test_bad_parents(parents, error, message):
    with pytest.raises(error, match=message):
        TokenTree.from_parents(parents)


@given(forests(), st.data())
def test_a_cycle_is_found_wherever_it_is_and_named(parents, data):
    """Close a cycle: some node's ancestor (or the node itself) continues the node."""
    node = data.draw(st.integers(0, len(parents))) - 1
    if node < 0:
        parents, node = [*parents, -1], len(parents)
    ancestor = data.draw(st.sampled_from(walk(parents, node)))
    cycle = walk(parents, node)[: walk(parents, node).index(ancestor) + 1]
    parents[ancestor] = node
    with pytest.raises(ShapeError, match=r"^parents: expected a forest, got the cycle ") as caught:
        TokenTree.from_parents(parents)
    named = str(caught.value).split("the cycle ")[1].split(" (node")[0].split(" -> ")
    if "more)" not in str(caught.value):
        assert sorted(map(int, named[:-1])) == sorted(cycle)
        assert named[0] == named[-1]
        assert all(parents[int(a)] == int(b) for a, b in pairwise(named))
    else:
        assert len(cycle) > 8
        assert set(map(int, named[:8])) <= set(cycle)


# paths and choices --------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=8))
def test_paths_make_the_trie_in_first_appearance_order(paths):
    prefixes = list(dict.fromkeys(tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)))
    tree = TokenTree.from_paths(paths)
    assert tree.labels == tuple(prefix[-1] for prefix in prefixes)
    for node, prefix in enumerate(prefixes):
        assert tuple(tree.labels[step] for step in tree.path(node)) == prefix


def test_paths_of_tokens_words_and_arrays():
    words = TokenTree.from_paths([["a", "b"], ["c"], ["a", "d"]])
    assert (words.parents.tolist(), words.labels) == ([-1, 0, -1, 0], ("a", "b", "c", "d"))
    assert TokenTree.from_paths(np.array([[5, 6], [5, 7]])).labels == (5, 6, 7)
    assert TokenTree.from_paths(iter([(1, 2), (1, 3)])).parents.tolist() == [-1, 0, 0]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([1, 2], r"^paths: expected a list of lists, got \[1, 2\]; write \[\[0\], \[0, 1\]\]$"),
        (7, r"^paths: expected a list of lists, got 7; "),
        ([[1], [[2]]], r"^paths\[1\]: expected hashable tokens, got unhashable type: 'list'; pass it flat$"),
    ],
)
def test_bad_paths(paths, message):
    with pytest.raises(DTypeError, match=message):
        TokenTree.from_paths(paths)


@given(forests(), st.data())
def test_choices_in_any_order(parents, data):
    """Name each node by the ranks on its path; the tree of these names has the forest below an added root."""
    rank = [[i for i, p in enumerate(parents) if p == parent].index(node) for node, parent in enumerate(parents)]
    choices = [[rank[step] for step in walk(parents, node)[::-1]] for node in range(len(parents))]
    assert TokenTree.from_choices(choices).parents.tolist() == [-1] + [parent + 1 for parent in parents]


def test_choices_as_arrays():
    assert TokenTree.from_choices([np.array([0]), (np.int64(0), 1)]).parents.tolist() == [-1, 0, 1]
    assert TokenTree.from_choices([]).parents.tolist() == [-1]


@pytest.mark.parametrize(
    ("choices", "error", "message"),
    [
        ([[0], [1, 0]], ShapeError, r"^choices\[1\]: expected its parent \[1\] in choices, got none; add \[1\]$"),
        ([[0, 2, 1], [0]], ShapeError, r"^choices\[0\]: expected its parent \[0, 2\] in choices, got none; "),
        ([[0], [1], [0]], ShapeError, r"^choices\[2\]: expected a new path, got choices\[0\] again; drop one$"),
        ([[0], []], ShapeError, r"^choices\[1\]: expected at least one rank, got \[\]; .*the root is added$"),
        ([[0], [0, -1]], IndexRangeError, r"^choices\[1\]: expected ranks >= 0, got -1; strip the padding$"),
        ([[0.0]], DTypeError, r"^choices\[0\]: expected int ranks, got 0.0; rank 0 is a head's best token$"),
        ([[True]], DTypeError, r"^choices\[0\]: expected int ranks, got True; "),
        (["01"], DTypeError, r"^choices\[0\]: expected int ranks, got '0'; "),
        ([0, 1], DTypeError, r"^choices: expected a list of lists, got \[0, 1\]; write \[\[0\], \[0, 1\]\]$"),
        (None, DTypeError, r"^choices: expected a list of lists, got None; "),
    ],
)
def test_bad_choices(choices, error, message):
    with pytest.raises(error, match=message):
        TokenTree.from_choices(choices)


@pytest.mark.skipif(not TREES.exists(), reason=f"no {TREES}; set TREEATTN_SHARED to the shared folder")
def test_trees_of_published_systems():
    entries = {k: v for k, v in json.loads(TREES.read_text()).items() if "paths" in v}
    assert "medusa/mc_sim_7b_63" in entries
    for entry in entries.values():
        tree = TokenTree.from_choices(entry["paths"])
        assert tree.num_nodes == entry["n_with_root"]
        assert np.bincount(tree.depth).tolist() == entry["widths"]
        assert len(tree.leaves()) == entry["leaves"]
        ranks = {tuple(path): i + 1 for i, path in enumerate(entry["paths"])}
        for path, node in ranks.items():
            assert tree.path(node) == [0] + [ranks[path[:end]] for end in range(1, len(path) + 1)]


# masks --------------------------------------------------------------------------------------------


def packed(mask, bits):
    """Rows of words by the definition: column j is bit j % bits of word j // bits."""
    n = len(mask)
    words = [[0] * -(-n // bits) for _ in range(n)]
    for i, j in np.argwhere(mask):
        words[i][j // bits] |= 1 << int(j % bits)
    return np.array(words, f"uint{bits}").reshape(n, -(-n // bits))


@given(forests(max_nodes=70))
def test_masks_dense_and_packed_give_the_tree_back(parents):
    mask = mask_by_walking(parents)
    assert TokenTree.from_mask(mask).parents.tolist() == parents
    for bits in (8, 32, 64):
        assert TokenTree.from_mask(packed(mask, bits)).parents.tolist() == parents
    assert TokenTree.from_mask(np.packbits(mask, axis=1, bitorder="little")).parents.tolist() == parents
    assert TokenTree.from_mask(packed(mask, 32).astype(">u4")).parents.tolist() == parents


def test_strided_and_listed_masks():
    mask = mask_by_walking([-1, 0, 0, 1])
    wide = np.zeros((4, 8), bool)
    wide[:, ::2] = mask
    assert TokenTree.from_mask(wide[:, ::2]).parents.tolist() == [-1, 0, 0, 1]
    assert TokenTree.from_mask(mask.tolist()).parents.tolist() == [-1, 0, 0, 1]
    assert TokenTree.from_mask(np.repeat(packed(mask, 32), 2, axis=1)[:, ::2]).parents.tolist() == [-1, 0, 0, 1]


@st.composite
def square_masks(draw):
    """A forest's mask with a few entries flipped: close to being one, often still one."""
    mask = mask_by_walking(draw(forests(max_nodes=7)))
    for i, j in draw(st.lists(st.tuples(*[st.integers(0, 6)] * 2), max_size=3)):
        if max(i, j) < len(mask):
            mask[i, j] ^= True
    return mask


@given(square_masks())
def test_a_mask_is_taken_exactly_if_it_is_a_forests(mask):
    """A forest's mask is a partial order in which what a node sees is a total one."""
    nodes = range(len(mask))
    forest = (
        all(mask[i, i] for i in nodes)
        and not any(mask[i, j] and mask[j, i] for i in nodes for j in range(i))
        and all(mask[i, k] for i in nodes for j in nodes for k in nodes if mask[i, j] and mask[j, k])
        and all(mask[j, k] or mask[k, j] for i in nodes for j in nodes for k in nodes if mask[i, j] and mask[i, k])
    )
    if forest:
        np.testing.assert_array_equal(TokenTree.from_mask(mask).mask(), mask)
    else:
        with pytest.raises(ShapeError, match=r"^mask: "):
            TokenTree.from_mask(mask)


def flipped(parents, *entries):
    mask = mask_by_walking(parents)
    for entry in entries:
        mask[entry] ^= True
    return mask


NO_WORDS = np.zeros((3, 2), np.uint32)
PADDED = np.packbits(mask_by_walking([-1, 0, 1]), axis=1)  # NumPy's default order: the high bits first


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (
            flipped([-1, 0, 0], (1, 1), (2, 2)),
            ShapeError,
            r"^mask: expected nodes that see themselves, got 2 that do not, \[1, 2\] first; set",
        ),
        (
            flipped([-1, 0, 1], (0, 2)),
            ShapeError,
            r"^mask: expected a forest, got nodes 0 and 2 that see each other; clear one of the two$",
        ),
        (
            flipped([-1, 0, 1, 2], (3, 1)),
            ShapeError,
            r"^mask: expected a forest, got node 3 that sees 2, but not 1 that 2 sees; set mask\[3, 1\]$",
        ),
        (
            flipped([-1, 0, 0, 1], (3, 2)),
            ShapeError,
            r"^mask: expected a forest, got node 3 that sees 1 and 2, not on one path; clear one of the two$",
        ),
        (np.ones((2, 3), bool), ShapeError, r"^mask: expected bool \[2, 2\], got \[2, 3\]; pass bool \[n, n\]"),
        (np.array(True), ShapeError, r"^mask: expected bool \[0, 0\], got \[\]; "),
        (NO_WORDS, ShapeError, r"^mask: expected uint32 \[3, 1\], got \[3, 2\]; .*packed \[n, ceil\(n / bits\)\]$"),
        (
            PADDED,
            ShapeError,
            r'^mask: expected 0 in the bits from 3 on, got 1 in bit 7 of node 0; pack .*bitorder="little"\)$',
        ),
        (np.eye(3), DTypeError, r"^mask: expected bool, or packed uint8, .*, got float64; use mask.astype\(bool\)"),
        (np.eye(3, dtype=np.int32), DTypeError, r"got int32; .* or words.view\(np.uint32\)$"),
        ([[True], [True, True]], ShapeError, r"^mask: expected rows of one length, got ragged ones; "),
    ],
)
def test_bad_masks(mask, error, message):
    with pytest.raises(error, match=message):
        TokenTree.from_mask(mask)


# shapes with names, paths, drawings ---------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_chain_and_star(n):
    assert TokenTree.chain(n).parents.tolist() == list(range(-1, n - 1))
    assert TokenTree.star(n).parents.tolist() == ([-1] + [0] * (n - 1))[:n]
    assert TokenTree.chain(np.int32(n)).is_chain
    assert TokenTree.star(n).is_chain == (n <= 2)


@pytest.mark.parametrize("make", [TokenTree.chain, TokenTree.star])
def test_bad_counts(make):
    with pytest.raises(ShapeError, match=r"^num_nodes: expected int >= 0, got -1; 0 makes an empty tree$"):
        make(-1)
    with pytest.raises(DTypeError, match=r"^num_nodes: expected int, got 2.5; pass a whole number$"):
        make(2.5)


@pytest.mark.parametrize("node", [-1, 3, 10**12])
def test_path_out_of_range(node):
    with pytest.raises(IndexRangeError, match=rf"^node: expected int in \[0, 3\), got {node}; nodes count from 0$"):
        TokenTree.chain(3).path(node)


def test_path_of_no_int():
    with pytest.raises(DTypeError, match=r"^node: expected int, got 'a'; pass a whole number$"):
        TokenTree.chain(3).path("a")


def test_render():
    assert TokenTree.from_parents([-1, 0, 0, 1, 5, 2, -1, 6]).render().splitlines() == [
        "0",
        "├── 1",
        "│   └── 3",
        "└── 2",
        "    └── 5",
        "        └── 4",
        "6",
        "└── 7",
    ]
    assert TokenTree.from_parents([]).render() == ""


@given(forests())
def test_render_draws_nodes_depth_first_and_indented_by_depth(parents):
    tree = TokenTree.from_parents(parents)
    lines = tree.render().splitlines()
    nodes = [int(line.lstrip(" │├└─")) for line in lines]
    assert nodes == preorder(parents)
    assert [len(line) - len(str(node)) for line, node in zip(lines, nodes, strict=True)] == [
        4 * (len(walk(parents, node)) - 1) for node in nodes
    ]


def test_render_labels():
    tree = TokenTree.from_paths([["the", "\n"], ["the", "cat"]])
    assert tree.render().splitlines() == ["the", "├── \\n", "└── cat"]
    assert tree.render([7, 8, 9]).splitlines() == ["7", "├── 8", "└── 9"]
    with pytest.raises(ShapeError, match=r"^labels: expected 3 of them, got 2; pass one a node, in order$"):
        tree.render(["a", "b"])
    with pytest.raises(ShapeError, match=r"^labels: expected 1 of them, got 2; "):
        TokenTree([-1], labels=["a", "b"])


def test_a_drawing_that_would_fill_the_memory_is_refused():
    with pytest.raises(UnsupportedError, match=r"^render: .* got <TokenTree of 100000 nodes, 100000 deep>; draw"):
        TokenTree.chain(N).render()
