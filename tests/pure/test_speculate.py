"""Drafters, what they may spend, and the best fixed tree: all without a model."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from treeattn.cache.manager import PagedKVCache
from treeattn.errors import CacheFullError, ShapeError, TreeAttnError
from treeattn.speculate.budget import KNOTS, Proposal, StepCost, choose
from treeattn.speculate.draft import ModelDrafter, NgramDrafter, most_likely
from treeattn.speculate.shape import best_shape, expected_accepted
from treeattn.tree import TokenTree

FREE = StepCost(per_token=0.0, learns=False)


def drafted(tokens, **options):
    drafter = NgramDrafter(**options)
    drafter.add(0, tokens)
    return drafter.propose([0])[0]


def paths(proposal):
    """The tokens from the root to every leaf, the root left out."""
    tree = proposal.tree
    return {tuple(proposal.tokens[node] for node in tree.path(leaf)[1:]) for leaf in tree.leaves()}


def random_proposal(rng, nodes):
    parents, chances = [-1], [1.0]
    for node in range(1, nodes):
        parents.append(int(rng.integers(0, node)))
        chances.append(chances[parents[-1]] * float(rng.random()))
    return Proposal(list(range(nodes)), parents, chances)


# the n-gram drafter


def test_what_followed_before_is_proposed():
    text = [1, 2, 3, 4, 5, 6, 9, 1, 2, 3]
    assert (4, 5, 6, 9, 1, 2, 3) in {path[:7] for path in paths(drafted(text))}


def test_two_continuations_make_a_branch():
    found = drafted([7, 8, 1, 7, 8, 2, 7, 8], depth=1)
    assert paths(found) == {(1,), (2,)}
    assert found.tokens[1] == 2  # the later one first
    assert sum(found.chances[1:]) <= 1


def test_a_longer_match_comes_first():
    found = drafted([5, 6, 7, 1, 0, 7, 2, 5, 6, 7], depth=1)
    assert found.tokens == [7, 1, 2]


def test_nothing_is_proposed_of_new_text():
    assert drafted(list(range(50))).tokens == [49]
    assert drafted([3]).tokens == [3]


def test_a_proposal_keeps_its_limits_and_is_a_tree():
    rng = np.random.default_rng(0)
    for seed in range(50):
        tokens = np.random.default_rng(seed).integers(0, 3, 200).tolist()
        most, depth = int(rng.integers(1, 40)), int(rng.integers(1, 9))
        found = drafted(tokens, most=most, depth=depth)
        assert len(found.tokens) <= most
        assert max(found.tree.depth) <= depth
        for node in range(1, len(found.tokens)):
            assert found.parents[node] < node
            assert 0 < found.chances[node] <= found.chances[found.parents[node]]
        siblings = list(zip(found.parents, found.tokens, strict=True))
        assert len(set(siblings)) == len(siblings)


def test_chances_follow_what_comes_true():
    def first_chance(follows):
        drafter, rng = NgramDrafter(), np.random.default_rng(1)
        drafter.add(0, [1, 2, 3, 4])
        for _ in range(30):
            drafter.extend(0, [1, 2, 3, 4] if follows else [1, *rng.integers(10, 10**6, 3).tolist()])
        drafter.extend(0, [1])
        return drafter.propose([0])[0].chances[1]

    assert first_chance(follows=True) > 0.9
    assert first_chance(follows=False) < 0.1


def test_sequences_do_not_disturb_each_other():
    alone, both = NgramDrafter(), NgramDrafter()
    text = [1, 2, 3, 1, 2, 4, 1, 2]
    alone.add(5, text)
    both.add(7, [2, 9] * 4)
    both.add(5, text)
    both.extend(7, [2, 9, 9])
    assert both.propose([7, 5])[1].tokens == alone.propose([5])[0].tokens
    both.remove(7)
    assert both.propose([5])[0].parents == alone.propose([5])[0].parents


@pytest.mark.parametrize("value", [0, -1, 1.5, None, "3", True, float("nan")])
@pytest.mark.parametrize("name", ["most", "depth", "width", "budget"])
def test_bad_limits_are_refused(name, value):
    makers = {"width": lambda: model_drafter(width=value), "budget": lambda: best_shape([[0.5]], value)}
    with pytest.raises(TreeAttnError, match=rf"^{name}: expected "):
        makers.get(name, lambda: NgramDrafter(**{name: value}))()


class Sure:
    """A draft model of four tokens that always says the same."""

    vocab_size = 4

    def __init__(self, logits=(3.0, 2.0, 1.0, 0.0)):
        self.logits = np.array(logits, np.float32)

    def new_cache(self, num_pages):
        return PagedKVCache(1, 1, 8, num_pages, 16, "float32")

    def forward(self, step, tokens, rows=None):
        return np.tile(self.logits, (len(tokens if rows is None else rows), 1))


def model_drafter(num_pages=8, logits=(3.0, 2.0, 1.0, 0.0), **options):
    return ModelDrafter(Sure(logits), num_pages, **options)


@pytest.mark.parametrize("make", [NgramDrafter, model_drafter])
def test_drafters_refuse_what_they_cannot_follow(make):
    drafter = make()
    drafter.add(1, [1, 2, 1, 2])
    kept = drafter.propose([1])[0]
    refused = [
        lambda: drafter.add(1, [3]),
        *(lambda call=call: call(7) for call in (drafter.remove, lambda seq: drafter.propose([seq]))),
        lambda: drafter.extend(7, [1]),
        *(lambda bad=bad: drafter.add(2, bad) for bad in (None, 5, [1.5], [None], ["a"], [[1]], [2**40])),
        *(lambda bad=bad: drafter.extend(1, bad) for bad in (None, [0.5], "ab", [[1, 2]])),
    ]
    for call in refused:
        with pytest.raises(TreeAttnError, match=r"^(seq|tokens): "):
            call()
    drafter.add(2, [7])  # the refused ones left nothing behind
    drafter.add(3, [])
    with pytest.raises(ShapeError, match=r"^seqs: expected new tokens of each sequence, got none of 3"):
        drafter.propose([3])
    drafter.extend(1, np.array([1, 2]))
    tokens = drafter.propose([1])[0].tokens
    assert tokens[: len(kept.tokens)] == kept.tokens
    assert {type(token) for token in tokens} == {int}


def test_a_model_drafter_with_little_room_grows_smaller_trees():
    drafter = model_drafter(num_pages=2)
    drafter.add(1, [1] * 31)
    assert len(drafter.propose([1])[0].tokens) == 1 + 4  # the second level found no page
    drafter.add(2, [1])
    with pytest.raises(CacheFullError):
        drafter.propose([2])
    drafter.remove(1)
    assert len(drafter.propose([2])[0].tokens) > 1 + 4
    drafter.remove(2)
    assert drafter._cache.used_pages == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_draft_model_without_probabilities_is_found_out(bad):
    drafter = model_drafter(logits=(0.0, bad, 1.0, 2.0))
    drafter.add(1, [1, 2])
    with pytest.raises(ShapeError, match=r"^logits: expected numbers, the largest finite"):
        drafter.propose([1])


@pytest.mark.parametrize(
    ("tokens", "parents", "chances"),
    [
        ([1, 2], [-1, 0], [1.0, np.nan]),
        ([1, 2, 3], [-1, 0, 1], [1.0, 0.1, 0.9]),
        ([1, 2], [-1, 0], [1.0, -0.1]),
        ([1, 2, 3], [-1, 2, 0], [1.0, 0.5, 0.5]),
        ([1, 2], [-1, -1], [1.0, 0.5]),
        ([1, 2], [-1], [1.0, 0.5]),
        ([1], [-1], [0.5]),
        ([], [], []),
    ],
    ids=range(8),
)
def test_proposals_of_other_drafters_are_checked(tokens, parents, chances):
    with pytest.raises(ShapeError, match=r"^proposals: expected "):
        choose([Proposal.root(5), Proposal(tokens, parents, chances)], StepCost(1e-9))


def test_bad_costs_are_refused():
    for call in (
        *(lambda bad=bad: StepCost(bad) for bad in (-1, np.nan, None, "1")),
        *(lambda bad=bad: StepCost().record(4, bad) for bad in (-1.0, np.nan, np.inf, None)),
        *(lambda bad=bad: StepCost().record(bad, 0.1) for bad in (-1, 1.5, None)),
        *(lambda bad=bad: choose([], StepCost(), bad) for bad in (-1, 1.5, None)),
    ):
        with pytest.raises(TreeAttnError, match=r"^(per_token|seconds|tokens|most): expected "):
            call()
    cost = StepCost()
    before = cost([1, 64])
    cost.record(4, 0.0)
    cost.record(0, 1.0)
    assert np.array_equal(cost([1, 64]), before)


def test_most_likely_is_the_top_of_a_softmax():
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((5, 40)).astype(np.float32) * 3
    probs = np.exp(logits.astype(np.float64))
    probs /= probs.sum(axis=1, keepdims=True)
    tokens, chances = most_likely(logits, 6)
    np.testing.assert_array_equal(tokens, np.argsort(-probs, axis=1)[:, :6])
    np.testing.assert_allclose(chances, -np.sort(-probs, axis=1)[:, :6])
    assert most_likely(np.zeros((1, 5), np.float32), 9)[0].tolist() == [[0, 1, 2, 3, 4]]


# the budget


def best_rate(proposals, cost):
    """The most tokens a second of any choice of nodes whose parents are chosen too, by trying all."""
    nodes = [(i, n) for i, proposal in enumerate(proposals) for n in range(1, len(proposal.tokens))]
    best = 0.0
    for bits in itertools.product([False, True], repeat=len(nodes)):
        chosen = {node for node, bit in zip(nodes, bits, strict=True) if bit} | {(i, 0) for i in range(len(proposals))}
        if all((i, proposals[i].parents[n]) in chosen for i, n in chosen if n):
            best = max(best, sum(proposals[i].chances[n] for i, n in chosen) / float(cost(len(chosen))))
    return best


@pytest.mark.parametrize("per_token", [0.02, 0.1, 0.3, 1.0])
def test_choice_is_the_best_of_all_subtrees(per_token):
    rng, cost = np.random.default_rng(3), StepCost(per_token, learns=False)
    for sizes in ([5], [9], [4, 5], [3, 3, 4]):
        proposals = [random_proposal(rng, size) for size in sizes]
        chosen = choose(proposals, cost)
        rate = sum(sum(kept.chances) for kept in chosen) / float(cost(sum(len(kept.tokens) for kept in chosen)))
        assert rate * 1.03 >= best_rate(proposals, cost) * (1 - 1e-12)  # the margin against drafting in vain


def test_choice_keeps_trees_whole_and_the_limit():
    rng = np.random.default_rng(4)
    for _ in range(30):
        proposals = [random_proposal(rng, int(rng.integers(1, 30))) for _ in range(4)]
        most = int(rng.integers(0, 40))
        chosen = choose(proposals, FREE, most)
        assert sum(len(kept.tokens) - 1 for kept in chosen) <= most
        for kept, proposal in zip(chosen, proposals, strict=True):
            assert kept.tokens[0] == proposal.tokens[0]
            for node in range(1, len(kept.tokens)):
                assert kept.tokens[kept.parents[node]] == proposal.parents[kept.tokens[node]]  # tokens are node numbers


def test_no_drafts_where_they_do_not_pay():
    hopeless = Proposal([0, 1, 2], [-1, 0, 1], [1.0, 0.04, 0.01])
    assert choose([hopeless], StepCost(0.06, learns=False))[0].tokens == [0]
    assert choose([], FREE) == []


def test_cost_learns_and_more_tokens_never_take_less():
    cost = StepCost()
    for tokens, seconds in ((1, 0.03), (8, 0.04), (32, 0.09), (32, 0.07)):
        for _ in range(40):
            cost.record(tokens, seconds)
    assert cost([1, 8, 32]) == pytest.approx([0.03, 0.04, 0.07], rel=0.05)
    assert (np.diff(cost(np.arange(1, 1200))) >= 0).all()
    cost.record(8, 30.0)  # the machine slept
    assert cost(8) < 0.06


def test_one_slow_first_timing_of_a_size_does_not_end_drafting():
    cost = StepCost()
    for _ in range(5):
        cost.record(1, 0.03)
    before = float(cost(8))
    cost.record(8, 20.0)  # a kernel was compiled
    assert cost(8) < 1.5 * before


def test_a_slow_first_step_is_found_out_by_larger_ones():
    cost = StepCost()
    cost.record(1, 1.0)
    for _ in range(8):
        cost.record(4, 0.04)
    assert cost(1) <= 0.05


def test_a_cost_that_does_not_learn_stays():
    before = FREE(KNOTS)
    FREE.record(4, 9.0)
    np.testing.assert_array_equal(FREE(KNOTS), before)
    with pytest.raises(ShapeError, match="per_token"):
        StepCost(-1)


# the best fixed tree


def all_trees(rates, budget):
    """Every tree of ``budget`` nodes as a set of rank paths."""
    depth, ranks = rates.shape
    trees = {frozenset([()])}
    for _ in range(budget - 1):
        trees = {
            tree | {(*path, rank)}
            for tree in trees
            for path in tree
            if len(path) < depth
            for rank in range(ranks)
            if (*path, rank) not in tree
        }
    return trees


@pytest.mark.parametrize("budget", [1, 2, 4, 5])
def test_no_tree_is_expected_to_do_better(budget):
    rng = np.random.default_rng(budget)
    for _ in range(5):
        rates = rng.dirichlet(np.ones(4), 3)[:, :3]
        tree = best_shape(rates, budget)
        best = max(
            sum(np.prod([rates[depth, rank] for depth, rank in enumerate(path)]) for path in paths if path)
            for paths in all_trees(rates, budget)
        )
        assert tree.num_nodes == budget
        assert expected_accepted(tree, rates) == pytest.approx(best)


def test_a_drafter_that_is_always_right_gets_a_chain():
    assert best_shape(np.ones((6, 1)), 5).parents.tolist() == [-1, 0, 1, 2, 3]
    assert best_shape(np.ones((3, 1)), 9).num_nodes == 4  # no guesses are left
    assert best_shape([[0.3, 0.3, 0.3]], 4).parents.tolist() == [-1, 0, 0, 0]


@pytest.mark.parametrize(
    ("rates", "budget", "named"),
    [
        ([[0.5]], 0, "budget"),
        ([0.5], 2, "acceptance"),
        ([[1.5]], 2, "acceptance"),
        ([[0.7, 0.7]], 2, "sum"),
        ([[0.5], [0.1, 0.2]], 2, "acceptance"),
        ([["a"]], 2, "acceptance"),
        (None, 2, "acceptance"),
        ([[np.nan]], 2, "acceptance"),
    ],
)
def test_bad_rates_are_refused(rates, budget, named):
    with pytest.raises(TreeAttnError, match=named):
        best_shape(rates, budget)


def test_expectation_of_any_node_order_and_of_forests():
    rates = [[0.5, 0.25], [0.5, 0.1]]
    assert expected_accepted(TokenTree([2, 0, -1], [1, 0, None]), rates) == 0.25 + 0.25 * 0.5
    assert expected_accepted(TokenTree([-1, -1, 0], [None, None, 0]), rates) == 0.5
    for tree in ([-1], TokenTree.from_parents([-1, 0]), TokenTree([-1, 0], [None, 2]), best_shape([[0.9]] * 3, 4)):
        with pytest.raises(TreeAttnError, match=r"^(tree|label of node 1): expected "):
            expected_accepted(tree, rates)
