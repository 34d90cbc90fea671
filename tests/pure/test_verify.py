"""Verification of draft trees: greedy from its definition, sampling by chi-square on the first two tokens."""

from __future__ import annotations

import numpy as np
import pytest

import treeattn as ta
from treeattn.testing.kinds import random_forest

DRAWS, FEWER = 100_000, 10_000
TREES = {
    "star": [-1, 0, 0, 0, 0],
    "binary": [-1, 0, 0, 1, 1, 2, 2, 3],
    "lopsided": [-1, 0, 1, 0, 1, 0, 4, 1],
    "forest": [-1, -1, 0, 0, 1, -1],
}


# sampling ----------------------------------------------------------------------------------------------------------


class World:
    """A target and a draft over a few tokens, each a table of rows by the path of tokens before."""

    def __init__(self, seed, vocab, depth, zeros=True):
        rng = np.random.default_rng(seed)
        self.vocab = vocab
        self.p = [rng.dirichlet(np.full(vocab, 0.7), vocab**level) for level in range(depth + 1)]
        self.q = [rng.dirichlet(np.full(vocab, 0.7), vocab**level) for level in range(depth + 1)]
        if zeros:  # a token the target never says, and the draft likes
            for p, q in zip(self.p, self.q, strict=True):
                p[:, 1] = 0
                p /= p.sum(axis=1, keepdims=True)
                q[:, 1] += 0.5
                q /= q.sum(axis=1, keepdims=True)

    def drafts(self, rng, parents, draws, how):
        """Tokens ``[draws, n]``, and the rows of target and draft after each node ``[draws, n + 1, vocab]``.

        The last row is the one before the roots of a forest. A single root is no draft: nothing comes before it.
        """
        n, is_forest = len(parents), parents.count(-1) > 1
        tokens, code, level = np.zeros((draws, n), int), np.zeros((draws, n + 1), int), [0] * (n + 1)
        for node in [-1, *range(n)] if is_forest else range(n):
            children = [child for child in range(n) if parents[child] == node]
            drawn = self.draw(rng, self.q[level[node]][code[:, node]], len(children), how) if children else []
            for child, column in zip(children, drawn, strict=True):
                tokens[:, child] = column
                code[:, child], level[child] = code[:, node] * self.vocab + column, level[node] + 1
        p, q = (np.stack([table[level[i]][code[:, i]] for i in range(n + 1)], axis=1) for table in (self.p, self.q))
        return tokens, p, q

    def draw(self, rng, q, count, how):
        """Token columns of siblings, in the order they are drawn."""
        if how == "best":
            return np.argsort(-q, axis=1, kind="stable")[:, :count].T
        if how in ("without", "sorted"):
            drawn = np.argsort(-(np.log(q) + rng.gumbel(size=q.shape)), axis=1)[:, :count]
            return (np.sort(drawn, axis=1) if how == "sorted" else drawn).T
        return [np.argmax(np.log(q) + rng.gumbel(size=q.shape), axis=1) for _ in range(count)]

    def first_two(self, rng, parents, draws, how, verified_as=None, allowed=None):
        """How often each pair of first tokens comes out."""
        tree, verified_as = ta.TokenTree.from_parents(parents), verified_as or how
        tokens, p, q = self.drafts(rng, parents, draws, how)
        is_forest, n = parents.count(-1) > 1, len(parents)
        seconds = rng.random(draws)
        after = self.p[1] if allowed is None else masked(self.p[1], allowed)
        upto = np.cumsum(after, axis=1)
        counts = np.zeros((self.vocab, self.vocab), int)
        options = {"rng": rng, "replacement": verified_as == "with"}
        if allowed is not None:
            options["allowed"] = lambda node: allowed
        for i in range(draws):
            if is_forest:
                options["root_probs"] = p[i, n]
                options["root_draft_probs"] = None if verified_as == "best" else q[i, n]
            got = ta.verify_sampling(tree, tokens[i], p[i, :n], None if verified_as == "best" else q[i, :n], **options)
            out = [*got.tokens, got.bonus_token]
            first = out[0]
            second = out[1] if len(out) > 1 else np.searchsorted(upto[first], seconds[i] * upto[first, -1], "right")
            counts[first, second] += 1
        return counts

    def expected(self, draws, allowed=None):
        p0, p1 = (table if allowed is None else masked(table, allowed) for table in self.p[:2])
        return draws * p0[0][:, None] * p1


def masked(table, allowed):
    kept = np.where(allowed, table, 0)
    return kept / kept.sum(axis=1, keepdims=True)


def chi_square(counts, expected):
    """The statistic over its quantile at 0.999 (Wilson and Hilferty's approximation), rare cells together."""
    assert not counts[expected == 0].any()
    rare = expected < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    df = len(wanted) - 1
    quantile = df * (1 - 2 / (9 * df) + 3.09 * np.sqrt(2 / (9 * df))) ** 3
    return ((seen - wanted) ** 2 / wanted).sum() / quantile


CASES = [
    ("star", "without", 6), ("binary", "without", 5), ("binary", "with", 4),
    ("forest", "without", 5), ("lopsided", "best", 5),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "how", "vocab"), CASES)
def test_what_comes_out_is_distributed_as_the_target(shape, how, vocab):
    world = World(len(shape) + vocab, vocab, depth=4)
    counts = world.first_two(np.random.default_rng(1), TREES[shape], DRAWS, how)
    assert counts.sum() == DRAWS
    assert chi_square(counts, world.expected(DRAWS)) < 1


@pytest.mark.parametrize("how", ["without", "best"])
def test_what_a_grammar_forbids_never_comes_and_the_rest_is_normalised(how):
    world, allowed = World(3, 5, depth=4), np.array([True, True, False, True, True])
    counts = world.first_two(np.random.default_rng(2), TREES["star"], FEWER, how, allowed=allowed)
    assert chi_square(counts, world.expected(FEWER, allowed)) < 1


@pytest.mark.parametrize("how", ["without", "with", "sorted"])
def test_without_draft_probs_any_way_of_drawing_is_exact(how):
    world = World(5, 5, depth=4)
    counts = world.first_two(np.random.default_rng(3), TREES["star"], FEWER, how, verified_as="best")
    assert chi_square(counts, world.expected(FEWER)) < 1


@pytest.mark.parametrize(("how", "verified_as"), [("without", "with"), ("sorted", "without")])
def test_chi_square_sees_a_draft_drawn_in_another_way(how, verified_as):
    world = World(5, 5, depth=4, zeros=False)
    counts = world.first_two(np.random.default_rng(3), TREES["star"], FEWER, how, verified_as)
    assert chi_square(counts, world.expected(FEWER)) > 2


class Coin:
    """A generator whose coin is always the same."""

    def __init__(self, value):
        self.value = value

    def random(self):
        return self.value


@pytest.mark.parametrize("draft", [None, [0.25, 0.25, 0.25, 0.25]])
def test_a_zero_probability_token_is_not_accepted_at_coin_0(monkeypatch, draft):
    monkeypatch.setattr(np.random, "default_rng", lambda rng: rng)
    probs = np.array([[0, 0, 0.5, 0.5]] * 3)
    got = ta.verify_sampling(ta.TokenTree.star(3), [0, 0, 1], probs, draft and [draft] * 3, rng=Coin(0.0))
    assert (got.nodes, got.tokens, got.bonus_token) == ([0], [], 2)
    top = ta.verify_sampling(ta.TokenTree.star(2), [0, 0], probs[:2], rng=Coin(1 - 2**-53))
    assert top.bonus_token == 3


def test_a_certain_target_accepts_its_path_and_a_draft_like_it_is_always_accepted():
    rng = np.random.default_rng(0)
    tree = ta.TokenTree.from_parents(TREES["binary"])
    certain = np.eye(5)[[2, 3, 1, 4, 0, 0, 0, 2]]
    got = ta.verify_sampling(tree, [9, 1, 2, 0, 0, 3, 1, 0], certain, rng=0)
    assert (got.nodes, got.tokens, got.bonus_token) == ([0, 2, 6], [2, 1], 0)
    probs = rng.dirichlet(np.ones(50), 2)
    for seed in range(200):
        token = rng.choice(50, p=probs[0])
        assert ta.verify_sampling(ta.TokenTree.chain(2), [0, token], probs, probs, rng=seed).nodes == [0, 1]


def test_equal_seeds_give_equal_results_and_batches_those_of_single_trees():
    world, parents = World(1, 5, 4), TREES["binary"]
    tree, (tokens, p, q) = (
        ta.TokenTree.from_parents(parents),
        world.drafts(np.random.default_rng(0), parents, 6, "without"),
    )
    batch = ta.verify_sampling([tree] * 6, list(tokens), list(p[:, :8]), list(q[:, :8]), rng=7)
    packed = ta.verify_sampling([tree] * 6, tokens.ravel(), p[:, :8].reshape(48, 5), q[:, :8].reshape(48, 5), rng=7)
    rng = np.random.default_rng(7)
    assert batch == packed == [ta.verify_sampling(tree, tokens[i], p[i, :8], q[i, :8], rng=rng) for i in range(6)]


# greedy ------------------------------------------------------------------------------------------------------------


def test_greedy_accepts_exactly_the_targets_own_continuation():
    """By definition: the longest path whose every token is the best after the one before; the first of equal nodes."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        n, vocab = int(rng.integers(1, 12)), 3
        tree = random_forest(rng, n)
        logits, tokens = rng.integers(0, 3, (n + 1, vocab)).astype(np.float32), rng.integers(0, vocab, n)
        roots = (tree.parents == -1).sum()
        path, at = [], -1
        if roots == 1 and rng.random() < 0.5:
            path = [at := int(np.flatnonzero(tree.parents == -1)[0])]
        is_rooted = bool(path)
        while True:
            best = int(np.argmax(logits[at]))
            fits = [node for node in range(n) if tree.parents[node] == at and tokens[node] == best]
            if not fits:
                break
            path.append(at := fits[0])
        got = ta.verify_greedy(tree, tokens, logits[:n], root_logits=None if is_rooted else logits[n])
        assert (got.nodes, got.bonus_token) == (path, best)
        assert got.tokens == tokens[path[is_rooted:]].tolist()


def test_greedy_batches_and_grammars():
    tree = ta.TokenTree.from_parents(TREES["star"])
    logits = np.random.default_rng(0).standard_normal((10, 4)).astype(np.float16)
    tokens = np.array([0, 0, 1, 2, 3] * 2)
    allowed = np.ones((10, 4), bool)
    allowed[0, np.argmax(logits[0])] = False
    singles = [ta.verify_greedy(tree, tokens[:5], logits[i : i + 5], allowed=allowed[i : i + 5]) for i in (0, 5)]
    assert ta.verify_greedy([tree, tree], tokens, logits, allowed=allowed) == singles
    assert ta.verify_greedy([tree, tree], tokens, logits, allowed=[lambda node: allowed[node], None]) == singles
    assert singles[0].tokens == [int(np.argsort(logits[0])[-2])]


def test_a_grammar_that_allows_only_what_the_target_excludes_is_obeyed_by_greedy():
    got = ta.verify_greedy(
        ta.TokenTree.chain(1), [0], np.array([[0, -np.inf, -np.inf]]), allowed=np.eye(3, dtype=bool)[1:2]
    )
    assert got.bonus_token == 1


def test_torch_rows():
    torch = pytest.importorskip("torch")
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 1.0, 3.0]], dtype=torch.bfloat16)
    got = ta.verify_greedy(ta.TokenTree.chain(2), torch.tensor([7, 1]), logits)
    assert (got.nodes, got.tokens, got.bonus_token) == ([0, 1], [1], 2)


# refusals ----------------------------------------------------------------------------------------------------------

CHAIN, STAR, FLAT = ta.TokenTree.chain(2), ta.TokenTree.star(3), np.full((3, 4), 0.25)
REFUSED = {
    "tree": (ta.DTypeError, "tree", lambda: ta.verify_greedy([[0]], [0], FLAT)),
    "several roots": (ta.ShapeError, "root_probs", lambda: ta.verify_greedy(ta.TokenTree([-1, -1]), [0, 0], FLAT[:2])),
    "no nodes": (ta.ShapeError, "one root", lambda: ta.verify_greedy(ta.TokenTree([]), [], FLAT[:0])),
    "rows": (ta.ShapeError, r"target_logits: .*\[2, vocab\]", lambda: ta.verify_greedy(CHAIN, [0, 0], FLAT)),
    "tokens": (ta.ShapeError, "draft_tokens", lambda: ta.verify_greedy(CHAIN, [0], FLAT[:2])),
    "floats": (ta.ShapeError, "draft_tokens", lambda: ta.verify_greedy(CHAIN, [0.0, 1.0], FLAT[:2])),
    "vocabulary": (ta.IndexRangeError, "got 4 at node 1", lambda: ta.verify_greedy(CHAIN, [0, 4], FLAT[:2])),
    "nan": (ta.ShapeError, "NaN after node 0", lambda: ta.verify_greedy(CHAIN, [0, 1], FLAT[:2] * np.nan)),
    "allowed shape": (ta.ShapeError, "allowed", lambda: ta.verify_greedy(CHAIN, [0, 1], FLAT[:2], allowed=FLAT > 0)),
    "allowed none": (ta.ShapeError, "none", lambda: ta.verify_greedy(CHAIN, [0, 1], FLAT[:2], allowed=FLAT[:2] > 1)),
    "allowed row": (
        ta.ShapeError, "allowed", lambda: ta.verify_greedy(CHAIN, [0, 1], FLAT[:2], allowed=lambda node: FLAT[node])
    ),
    "logits for probs": (ta.ShapeError, "softmax", lambda: ta.verify_sampling(CHAIN, [0, 1], FLAT[:2] * 3)),
    "negative": (ta.ShapeError, "softmax", lambda: ta.verify_sampling(CHAIN, [0, 1], [[1.5, -0.5]] * 2)),
    "nan probs": (ta.ShapeError, "softmax", lambda: ta.verify_sampling(CHAIN, [0, 1], [[np.nan, 1]] * 2)),
    "impossible draw": (
        ta.ShapeError, "token 1 of node 1", lambda: ta.verify_sampling(CHAIN, [0, 1], FLAT[:2], [[1, 0, 0, 0]] * 2)
    ),
    "twins": (
        ta.ShapeError, "replacement=True",
        lambda: ta.verify_sampling(STAR, [0, 1, 1], [[1, 0, 0, 0]] * 3, FLAT),
    ),
    "only what is excluded": (
        ta.ShapeError, "can sample",
        lambda: ta.verify_sampling(ta.TokenTree.chain(1), [0], [[1.0, 0]], allowed=np.array([[False, True]])),
    ),
    "draft before roots": (
        ta.ShapeError, "root_draft_probs",
        lambda: ta.verify_sampling(CHAIN, [0, 1], FLAT[:2], FLAT[:2], root_probs=FLAT[0]),
    ),
    "root row": (ta.ShapeError, "target_logits", lambda: ta.verify_greedy(CHAIN, [0, 1], FLAT[:2], root_logits=[1.0])),
    "batch": (ta.ShapeError, "draft_tokens", lambda: ta.verify_greedy([CHAIN, CHAIN], [[0, 1]], FLAT)),
    "batch rows": (ta.ShapeError, "target_logits", lambda: ta.verify_greedy([CHAIN] * 2, [[0, 1]] * 2, FLAT)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_by_name(name):
    kind, message, call = REFUSED[name]
    with pytest.raises(kind, match=message):
        call()


def test_a_draft_of_another_vocabulary_is_refused():
    """One column would broadcast against every token of the target."""
    tree = ta.TokenTree.star(3)
    with pytest.raises(ta.ShapeError, match=r"draft_probs: expected shape \[3, 5\] as target_probs has, got \[3, 1\]"):
        ta.verify_sampling(tree, [0, 0, 0], np.full((3, 5), 0.2), np.ones((3, 1)), rng=0, replacement=True)


def test_complex_numbers_are_no_probabilities():
    with pytest.raises(ta.DTypeError, match="target_probs: expected floating-point"):
        ta.verify_sampling(ta.TokenTree.chain(1), [0], np.ones((1, 1), complex), rng=0)
