"""Which nodes of a draft tree the target accepts.

Both functions walk from the root down. `verify_greedy` follows the target's best token; `verify_sampling` tries the
children of a node one after another by rejection sampling, so that what comes out is distributed exactly as the target
samples, however bad the draft. Only the rows of visited nodes are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..arrays import to_numpy
from ..errors import DTypeError, IndexRangeError, ShapeError
from ..tree import TokenTree

Probs: TypeAlias = NDArray[np.float64]
Allowed: TypeAlias = "NDArray[np.bool_] | Callable[[int], Any] | None"

VIRTUAL_ROOT = -1
SUM_TOLERANCE = 1e-2  # of probabilities rounded to half precision


@dataclass(frozen=True)
class Accepted:
    """What the target accepts of one tree.

    Attributes
    ----------
    nodes : list of int
        The accepted path from the root down, for `PagedKVCache.commit`. The root is always in it, unless the roots are
        draft tokens themselves (``root_logits``, ``root_probs``).
    tokens : list of int
        The accepted draft tokens: those of ``nodes`` without the root, which was accepted before.
    bonus_token : int
        The target's own token after them: the root of the next tree.
    """

    nodes: list[int]
    tokens: list[int]
    bonus_token: int


def verify_greedy(
    tree: Any, draft_tokens: Any, target_logits: Any, *, allowed: Any = None, root_logits: Any = None
) -> Any:
    """Accept draft tokens while each is the target's most likely one.

    Parameters
    ----------
    tree : TokenTree, or a sequence of them
        Its root is the last accepted token. For a sequence, each other argument is a sequence too, or one array with
        the rows of all trees one after another.
    draft_tokens : integers ``[n]``
        Token of each node.
    target_logits : Array ``[n, vocab]``
        The target's logits for the token after each node. Of equal ones the first counts.
    allowed : bool ``[n, vocab]`` or callable, optional
        Tokens a grammar allows after each node; a callable gets the node and returns bool ``[vocab]``.
    root_logits : Array ``[vocab]``, optional
        For trees whose roots are draft tokens, one or several: the logits for the token before any node. ``allowed``
        then has a last row for it, or is called with -1.

    Returns
    -------
    Accepted, or a list of them for a sequence of trees

    Raises
    ------
    TreeAttnError
        Arrays that do not fit the tree, a visited row with NaN, several roots without ``root_logits``, or a node after
        which nothing is allowed.
    """
    if not isinstance(tree, TokenTree):
        batch = _batch(tree, draft_tokens=draft_tokens, target_logits=target_logits, allowed=allowed)
        roots = _per_tree(root_logits, len(tree), "root_logits")
        return [verify_greedy(**one, root_logits=root) for one, root in zip(batch, roots, strict=True)]
    draft = _Draft(tree, draft_tokens, _Rows(target_logits, "target_logits", tree, root_logits), allowed)

    def choose(node: int, children: list[int]) -> tuple[int | None, int]:
        logits = draft.target.row(node)
        if np.isnan(logits).any():
            raise ShapeError(f"target_logits: expected numbers, got NaN after node {node}")
        kept = draft.allowed_after(node)
        best = int(np.argmax(logits if kept is None else np.where(kept, logits, -np.inf)))
        if kept is not None and not kept[best]:  # what is allowed has logits of minus infinity
            best = int(np.argmax(kept))
        return next((child for child in children if draft.tokens[child] == best), None), best

    return draft.descend(choose)


def verify_sampling(
    tree: Any,
    draft_tokens: Any,
    target_probs: Any,
    draft_probs: Any = None,
    *,
    rng: Any = None,
    replacement: bool = False,
    allowed: Any = None,
    root_probs: Any = None,
    root_draft_probs: Any = None,
) -> Any:
    """Accept draft tokens so that the tokens that come out are distributed exactly as the target samples.

    Siblings are tried in node order. A token x is accepted with probability ``min(1, p(x) / q(x))``; if it is not, the
    target p becomes ``max(p - q, 0)``, normalised, and the next sibling is tried (recursive rejection sampling:
    Leviathan et al. 2023, arXiv:2211.17192, for one draft token; Miao et al. 2024, arXiv:2305.09781, for several). If
    all are rejected, the bonus token is drawn from what is left of p.

    Children must have been chosen without a look at the target's row of their parent; with ``draft_probs``, in one of
    two ways:

    - ``draft_probs=None``: chosen in any way (the best k, an n-gram, drawn, pruned). A token is accepted with
      probability p(x), else removed from p: q is taken to be certain of it.
    - ``draft_probs``: drawn one after another from the row of their parent *without* replacement, each from the row
      with those before it removed, normalised (as Gumbel-top-k does); all that were drawn are in the tree, siblings in
      the order they were drawn.
    - ``draft_probs`` and ``replacement=True``: the same, but drawn independently.

    Parameters
    ----------
    tree : TokenTree, or a sequence of them
        As in `verify_greedy`.
    draft_tokens : integers ``[n]``
        Token of each node.
    target_probs : Array ``[n, vocab]``
        The target's probabilities of the token after each node, as it would sample (temperature, top-k and top-p done).
    draft_probs : Array ``[n, vocab]``, optional
        The probabilities each node's children were drawn from; rows of leaves are not read.
    rng : numpy.random.Generator or seed
        Where chance comes from.
    replacement : bool
        How children were drawn.
    allowed : bool ``[n, vocab]`` or callable, optional
        As in `verify_greedy`; the target is normalised over what is allowed.
    root_probs, root_draft_probs : Array ``[vocab]``, optional
        As ``root_logits`` in `verify_greedy`: the target's row, and the one the roots were drawn from.

    Returns
    -------
    Accepted, or a list of them for a sequence of trees

    Raises
    ------
    TreeAttnError
        Arrays that do not fit the tree, a visited row that holds no probabilities, a token its draft cannot have drawn,
        several roots without ``root_probs``, or a node after which nothing is allowed.
    """
    rng = _generator(rng)
    if not isinstance(tree, TokenTree):
        batch = _batch(
            tree, draft_tokens=draft_tokens, target_probs=target_probs, draft_probs=draft_probs, allowed=allowed
        )
        roots = _per_tree(root_probs, len(tree), "root_probs")
        of_draft = _per_tree(root_draft_probs, len(tree), "root_draft_probs")
        return [
            verify_sampling(**one, rng=rng, replacement=replacement, root_probs=root, root_draft_probs=q)
            for one, root, q in zip(batch, roots, of_draft, strict=True)
        ]
    draft = _Draft(tree, draft_tokens, _Rows(target_probs, "target_probs", tree, root_probs), allowed)
    drawn_from = None if draft_probs is None else _Rows(draft_probs, "draft_probs", tree, root_draft_probs)
    if drawn_from and drawn_from.vocab != draft.target.vocab:
        raise ShapeError(
            f"draft_probs: expected shape [{tree.num_nodes}, {draft.target.vocab}] as target_probs has, got "
            f"[{tree.num_nodes}, {drawn_from.vocab}]; give tokens that one of the models lacks probability 0"
        )

    def choose(node: int, children: list[int]) -> tuple[int | None, int]:
        p = draft.target.probabilities(node, draft.allowed_after(node))
        q = drawn_from.probabilities(node) if drawn_from and children else None
        for child in children:
            token = draft.tokens[child]
            chance = 1.0 if q is None else q[token]
            if chance == 0:
                raise ShapeError(
                    f"draft_probs: expected more than 0 for token {token} of node {child} after node {node} and the "
                    "siblings before it, got 0; siblings drawn with replacement need replacement=True"
                )
            if rng.random() * chance < p[token]:
                return child, token
            p = _normalised(_without(p, token) if q is None else np.maximum(p - q, 0), p)
            if q is not None and not replacement:
                q = _normalised(_without(q, token))
        return None, _draw(p, rng)

    return draft.descend(choose)


class _Rows:
    """A row of numbers after each node, and after the virtual root where there is one."""

    def __init__(self, values: Any, name: str, tree: TokenTree, root: Any) -> None:
        self.array, self.name = to_numpy(values, name), name
        if self.array.ndim != 2 or len(self.array) != tree.num_nodes or self.array.shape[1] == 0:
            raise ShapeError(f"{name}: expected shape [{tree.num_nodes}, vocab], got {list(self.array.shape)}")
        self.vocab = self.array.shape[1]
        self.root = None if root is None else to_numpy(root, name)
        for rows in (self.array, self.root):
            if rows is not None and rows.dtype.kind not in "fiu" and rows.dtype.name != "bfloat16":
                raise DTypeError(f"{name}: expected floating-point numbers, got dtype {rows.dtype}; convert it first")
        if self.root is not None and self.root.shape != (self.vocab,):
            raise ShapeError(f"{name}: expected [{self.vocab}] for the root, got {list(self.root.shape)}")

    def row(self, node: int) -> Probs:
        row = self.root if node == VIRTUAL_ROOT else self.array[node]
        if row is None:
            raise ShapeError(f"{self.name}: expected a row before the roots, got none; pass root_draft_probs too")
        wide: Probs = row.astype(np.float64)
        return wide

    def probabilities(self, node: int, allowed: NDArray[np.bool_] | None = None) -> Probs:
        row = self.row(node)
        total = row.sum()
        if not abs(total - 1) <= SUM_TOLERANCE or row.min() < 0:
            raise ShapeError(
                f"{self.name}: expected probabilities 0 or more that sum to 1 after node {node}, got least {row.min()} "
                f"and sum {total}; apply softmax first"
            )
        if allowed is not None:
            row = np.where(allowed, row, 0.0)
            total = row.sum()
            if total == 0:
                raise ShapeError(f"allowed: expected a token that the target can sample after node {node}, got none")
        row /= total
        return row


class _Draft:
    """A tree with its tokens and what the target says of it."""

    def __init__(self, tree: TokenTree, tokens: Any, target: _Rows, allowed: Allowed) -> None:
        self.target, self.allowed = target, allowed
        self.num_nodes = n = tree.num_nodes
        self.children: list[list[int]] = [[] for _ in range(n + 1)]  # the last is the virtual root's
        for node, parent in enumerate(tree.parents.tolist()):
            self.children[parent].append(node)
        self.is_rooted = target.root is None
        roots = self.children[VIRTUAL_ROOT]
        if self.is_rooted and len(roots) != 1:
            raise ShapeError(
                f"tree: expected one root, the last accepted token, got {len(roots)}; if roots are draft tokens, pass "
                "root_logits or root_probs"
            )
        array = to_numpy(tokens, "draft_tokens")
        if array.shape != (n,) or (n and array.dtype.kind not in "iu"):
            raise ShapeError(f"draft_tokens: expected integers [{n}], got {array.dtype} {list(array.shape)}")
        self.tokens: list[int] = array.tolist()
        for node, token in enumerate(self.tokens):
            if not 0 <= token < target.vocab and not (self.is_rooted and node == roots[0]):
                raise IndexRangeError(
                    f"draft_tokens: expected tokens in [0, {target.vocab}), got {token} at node {node}"
                )
        if allowed is not None and not callable(allowed):
            self.allowed = to_numpy(allowed, "allowed")
            wanted = (n if self.is_rooted else n + 1, target.vocab)
            if self.allowed.shape != wanted or self.allowed.dtype != np.bool_:
                raise ShapeError(
                    f"allowed: expected bool {list(wanted)}, got {self.allowed.dtype} {list(self.allowed.shape)}"
                )

    def allowed_after(self, node: int) -> NDArray[np.bool_] | None:
        if self.allowed is None:
            return None
        row = to_numpy(self.allowed(node), "allowed") if callable(self.allowed) else self.allowed[node]
        if row.shape != (self.target.vocab,) or row.dtype != np.bool_:
            raise ShapeError(
                f"allowed: expected bool [{self.target.vocab}] after node {node}, got {row.dtype} {row.shape}"
            )
        if not row.any():
            raise ShapeError(f"allowed: expected a token that is allowed after node {node}, got none")
        return row

    def descend(self, choose: Callable[[int, list[int]], tuple[int | None, int]]) -> Accepted:
        """Follow the child that ``choose`` accepts, with its token, until it returns None and the bonus token."""
        node = self.children[VIRTUAL_ROOT][0] if self.is_rooted else VIRTUAL_ROOT
        nodes = [node] if self.is_rooted else []
        tokens: list[int] = []
        while True:
            child, token = choose(node, self.children[node])
            if child is None:
                return Accepted(nodes, tokens, token)
            nodes.append(child)
            tokens.append(token)
            node = child


def _generator(rng: Any) -> np.random.Generator:
    try:
        return np.random.default_rng(rng)
    except (TypeError, ValueError) as error:
        raise DTypeError(f"rng: expected a numpy.random.Generator or a seed, got {rng!r:.60} ({error})") from None


def _without(p: Probs, token: int) -> Probs:
    rest: Probs = p.copy()
    rest[token] = 0
    return rest


def _normalised(rest: Probs, otherwise: Probs | None = None) -> Probs:
    """Divide by the sum. What is left of a target sums to 0 only where it equals the draft up to rounding: then the
    rejection was one of rounding, and the target stays as it was (``otherwise``).
    """
    total = rest.sum()
    if total > 0:
        rest /= total
        return rest
    return rest if otherwise is None else otherwise


def _draw(p: Probs, rng: np.random.Generator) -> int:
    """Draw a token; one of probability 0 never comes, since a sum does not grow at it."""
    upto = np.cumsum(p)
    token = int(np.searchsorted(upto, rng.random() * upto[-1], side="right"))
    return token if token < len(p) else int(np.flatnonzero(p)[-1])  # the coin was rounded up to 1


def _batch(trees: Any, **arguments: Any) -> Iterator[dict[str, Any]]:
    """Split arguments by tree: sequences as they are, arrays by the number of nodes."""
    if not isinstance(trees, Sequence) or not all(isinstance(tree, TokenTree) for tree in trees):
        raise DTypeError(f"tree: expected a TokenTree or a list of them, got {type(trees).__name__}")
    ends = np.cumsum([tree.num_nodes for tree in trees])
    parts = {name: _split(value, ends, name) for name, value in arguments.items()}
    return ({"tree": tree} | {name: part[i] for name, part in parts.items()} for i, tree in enumerate(trees))


def _split(value: Any, ends: NDArray[Any], name: str) -> Sequence[Any]:
    if value is None or isinstance(value, list | tuple):
        return _per_tree(value, len(ends), name)
    array = to_numpy(value, name)
    total = int(ends[-1]) if len(ends) else 0
    if array.ndim == 0 or len(array) != total:
        raise ShapeError(f"{name}: expected a list of {len(ends)}, or {total} rows, got shape {list(array.shape)}")
    return np.split(array, ends[:-1])


def _per_tree(value: Any, count: int, name: str) -> Sequence[Any]:
    values: Sequence[Any] = [None] * count if value is None else value
    try:
        got = len(values)
    except TypeError:
        raise DTypeError(f"{name}: expected a list with one of each tree, got {type(value).__name__}") from None
    if got != count:
        raise ShapeError(f"{name}: expected one of each of {count} trees, got {got}")
    return values
