"""Drafters: guesses of what comes next, as trees of tokens with the chance of each.

A drafter follows sequences: `add` with the prompt, `extend` with every accepted token, `remove` at the end. `propose`
gives a tree for each; `treeattn.speculate.budget.choose` cuts them to what pays.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..arrays import indices
from ..checks import integer
from ..errors import CacheFullError, DTypeError, IndexRangeError, ShapeError
from ..tree import TokenTree
from .budget import Proposal

ORDERS = (1, 2, 3, 4, 6)
"""Lengths of the n-grams that are indexed."""
LONGEST = 16
"""Longer matches count as this long."""
FEW_MATCHES = 8
LEAST_CHANCE = 0.03


class Drafter(Protocol):
    """What a generator asks of a drafter; sequences are named by any ints."""

    def add(self, seq: int, tokens: Sequence[int]) -> None:
        """Follow a new sequence that begins with ``tokens``."""
        ...

    def extend(self, seq: int, tokens: Sequence[int]) -> None:
        """Add accepted tokens."""
        ...

    def propose(self, seqs: Sequence[int]) -> list[Proposal]:
        """Return a tree of guesses for each sequence, its last token as node 0."""
        ...

    def remove(self, seq: int) -> None:
        """Forget a sequence."""
        ...


class NgramDrafter:
    """Continuations of earlier occurrences of a sequence's last tokens, from its prompt and its own text.

    Needs no second model. What follows a match of n tokens is right at a rate that is learned for each n, drafting or
    not: every token that comes is compared with what would have been proposed. So where a text does not repeat
    itself chances fall at once, `choose` drafts nothing, and it drafts again as soon as matches come true.

    Parameters
    ----------
    most : int
        Most nodes of a proposal, node 0 included.
    depth : int
        Most tokens in a row.

    Its methods are those of `Drafter`.

    Examples
    --------
    >>> drafter = NgramDrafter()
    >>> drafter.add(0, [5, 6, 7, 8, 5, 6])  # sequence 0 begins with these tokens
    >>> proposal = drafter.propose([0])[0]
    >>> proposal.tokens, proposal.tree  # node 0 is the last token; 7, 8, 5, 6 followed it before
    ([6, 7, 8, 5, 6], TokenTree.from_parents([-1, 0, 1, 2, 3]))
    """

    def __init__(self, most: int = 64, depth: int = 16) -> None:
        self._most, self._depth = integer(most, "most"), integer(depth, "depth")
        self._texts: _Followed[_Text] = _Followed()

    def add(self, seq: int, tokens: Sequence[int]) -> None:
        listed, text = token_list(tokens, "tokens"), self._texts.begin(seq, _Text())
        for token in listed:
            text.append(token)

    def extend(self, seq: int, tokens: Sequence[int]) -> None:
        text = self._texts[seq]
        for token in token_list(tokens, "tokens"):
            text.learn(token)
            text.append(token)

    def propose(self, seqs: Sequence[int]) -> list[Proposal]:
        return [self._propose(self._texts[seq], _last(self._texts[seq].tokens, seq)) for seq in seqs]

    def remove(self, seq: int) -> None:
        self._texts.end(seq)

    def _propose(self, text: _Text, last: int) -> Proposal:
        proposal = Proposal.root(last)
        order = itertools.count()  # between equal chances the first found comes first
        heap: list[tuple[float, int, int, int, int, list[_Match]]] = []

        def push(node: int, depth: int, matches: list[_Match]) -> None:
            for token, share, following in text.children(matches):
                chance = proposal.chances[node] * share
                if chance >= LEAST_CHANCE:
                    heapq.heappush(heap, (-chance, next(order), node, depth, token, following))

        push(0, 1, text.matches())
        while heap and len(proposal.tokens) < self._most:
            negative, _, parent, depth, token, following = heapq.heappop(heap)
            proposal.tokens.append(token)
            proposal.parents.append(parent)
            proposal.chances.append(-negative)
            if depth < self._depth:
                push(len(proposal.tokens) - 1, depth + 1, following)
        return proposal


State = TypeVar("State")


class _Followed(dict[int, State]):
    """What a drafter knows of each sequence it follows."""

    def __missing__(self, seq: int) -> State:
        raise IndexRangeError(f"seq: expected a sequence that is followed, got {seq!r:.60}; add it first")

    def begin(self, seq: int, state: State) -> State:
        if seq in self:
            raise IndexRangeError(f"seq: expected a new sequence, got {seq!r:.60}, which is followed; remove it first")
        self[seq] = state
        return state

    def end(self, seq: int) -> State:
        state = self[seq]
        del self[seq]
        return state


def token_list(values: Iterable[int], name: str) -> list[int]:
    """Return tokens of any kind of list as ints, checked."""
    try:
        listed = values if hasattr(values, "dtype") else list(values)
    except TypeError:
        raise DTypeError(f"{name}: expected a list of tokens, got {type(values).__name__}") from None
    tokens: list[int] = indices(listed, name).tolist()
    return tokens


def _last(tokens: Sequence[int], seq: int) -> int:
    if not tokens:
        raise ShapeError(f"seqs: expected new tokens of each sequence, got none of {seq}; extend it first")
    return tokens[-1]


_Match = tuple[int, int]
"""Where the token after a match lies, and how many tokens before it match."""


class _Text:
    """Tokens, where each n-gram occurred, and how often matches of each length came true."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._rates = [_Rate(length / (length + 1.5)) for length in range(LONGEST + 1)]

    def append(self, token: int) -> None:
        """Add a token, and index it as what follows the n-grams before it."""
        place = len(self.tokens)
        for order in ORDERS:
            if order <= place:
                self._places.setdefault(tuple(self.tokens[place - order :]), []).append(place)
        self.tokens.append(token)

    def learn(self, token: int) -> None:
        """Compare the token that comes next with the guesses for it, in their order, up to the right one."""
        for guess, _, following in self.children(self.matches()):
            self._rates[following[0][1] - 1].record(guess == token)
            if guess == token:
                return

    def matches(self) -> list[_Match]:
        """Return earlier places that the last tokens lead to: longest match first, then latest."""
        found: dict[int, int] = {}
        for order in reversed(ORDERS):
            for place in self._places.get(tuple(self.tokens[-order:]), ())[-FEW_MATCHES:]:
                found.setdefault(place, 0)
            if len(found) >= FEW_MATCHES:
                break
        matches = [(place, self._length(place)) for place in found]
        return sorted(matches, key=lambda match: (-match[1], -match[0]))[:FEW_MATCHES]

    def children(self, matches: list[_Match]) -> Iterator[tuple[int, float, list[_Match]]]:
        """Yield the tokens that follow some matches, each with its chance and the matches one token further.

        The first token takes the rate of its match, the next its own rate of what is left, and so on: the escape of
        prediction by partial matching (Cleary and Witten 1984).
        """
        groups: dict[int, list[_Match]] = {}
        for place, length in matches:
            if place < len(self.tokens):
                groups.setdefault(self.tokens[place], []).append((place + 1, min(length + 1, LONGEST)))
        left = 1.0
        for token, following in groups.items():
            rate = self._rates[following[0][1] - 1].value
            yield token, left * rate, following
            left *= 1 - rate

    def _length(self, place: int) -> int:
        end, length = len(self.tokens), 0
        while length < min(place, LONGEST - 1) and self.tokens[place - 1 - length] == self.tokens[end - 1 - length]:
            length += 1
        return length


class _Rate:
    """A rate of success: a guess that counts as some trials, and trials of which old ones count less and less."""

    GUESS_COUNTS, FADES, HIGHEST = 2.0, 0.9, 0.97

    def __init__(self, guess: float) -> None:
        self._guess, self._hits, self._trials = guess, 0.0, 0.0
        self.value = min(guess, self.HIGHEST)

    def record(self, hit: bool) -> None:
        self._hits = self._hits * self.FADES + hit
        self._trials = self._trials * self.FADES + 1
        rate = (self._hits + self._guess * self.GUESS_COUNTS) / (self._trials + self.GUESS_COUNTS)
        self.value = min(rate, self.HIGHEST)


class ModelDrafter:
    """A smaller model with the same tokenizer, and a tree that grows where it is sure (EAGLE-2, arXiv:2406.16858).

    Level after level, the ``width`` nodes with the highest product of the draft's probabilities get their ``width``
    most likely successors. The product is the estimate of a node's chance. The draft's own cache holds the tree while
    it grows, in rounds.

    Parameters
    ----------
    model : Model
        The draft: `treeattn.models.Model`, or anything with its ``new_cache`` and ``forward``.
    num_pages : int
        Pages of its cache: those of the generator's will do.
    width : int
        Nodes that grow at each level, and successors of each.
    depth : int
        Levels.
    """

    def __init__(self, model: Any, num_pages: int, width: int = 4, depth: int = 6) -> None:
        self._width, self._depth = integer(width, "width"), integer(depth, "depth")
        self._model, self._cache = model, model.new_cache(num_pages)
        self.vocab_size: int | None = getattr(model, "vocab_size", None)
        self._own: dict[int, int] = {}
        self._new: _Followed[list[int]] = _Followed()

    def add(self, seq: int, tokens: Sequence[int]) -> None:
        self._new.begin(seq, token_list(tokens, "tokens"))
        self._own[seq] = self._cache.add()

    def extend(self, seq: int, tokens: Sequence[int]) -> None:
        self._new[seq].extend(token_list(tokens, "tokens"))

    def remove(self, seq: int) -> None:
        self._new.end(seq)
        self._cache.remove(self._own.pop(seq))

    def propose(self, seqs: Sequence[int]) -> list[Proposal]:
        grown = [_Growing(_last(self._new[seq], seq)) for seq in seqs]
        try:
            self._first_level(seqs, grown)
            self._grow_levels(seqs, grown)
        finally:
            for seq in seqs:
                self._cache.truncate(self._own[seq], self._cache.length(self._own[seq]))
        return [tree.proposal for tree in grown]

    def _grow_levels(self, seqs: Sequence[int], grown: list[_Growing]) -> None:
        for _ in range(self._depth - 1):
            for tree in grown:
                tree.pick(self._width)
            growing = {self._own[seq]: tree for seq, tree in zip(seqs, grown, strict=True) if tree.picked}
            if not growing:
                return
            try:
                step = self._cache.begin({own: tree.forest() for own, tree in growing.items()})
            except CacheFullError:  # smaller trees, then
                return
            tokens = [tree.proposal.tokens[node] for tree in growing.values() for node in tree.picked]
            self._grow(list(growing.values()), self._model.forward(step, np.array(tokens, np.int32)))

    def _first_level(self, seqs: Sequence[int], grown: list[_Growing]) -> None:
        """Bring the draft's cache up to date; the logits after the last token give the first level."""
        new = {self._own[seq]: self._new[seq] for seq in seqs}
        step = self._cache.begin({own: len(tokens) for own, tokens in new.items()})
        tokens = np.array([token for part in new.values() for token in part], np.int32)
        logits = self._model.forward(step, tokens, step.q_indptr[1:] - 1)
        self._cache.commit(step, {own: len(tokens) for own, tokens in new.items()})
        for seq in seqs:
            self._new[seq] = []
        for tree in grown:
            tree.picked = [0]
        self._grow(grown, logits)

    def _grow(self, trees: list[_Growing], logits: NDArray[np.float32]) -> None:
        best, chances = most_likely(logits, self._width)
        row = 0
        for tree in trees:
            for node in tree.picked:
                tree.add(node, best[row], chances[row])
                row += 1


class _Growing:
    """A tree that grows level by level; nodes that have been run are numbered in the order they ran."""

    def __init__(self, token: int) -> None:
        self.proposal = Proposal.root(token)
        self.picked: list[int] = []
        self._level: list[int] = []
        self._run: list[int] = []

    def add(self, parent: int, tokens: NDArray[Any], chances: NDArray[Any]) -> None:
        for token, chance in zip(tokens.tolist(), chances.tolist(), strict=True):
            self._level.append(len(self.proposal.tokens))
            self.proposal.tokens.append(token)
            self.proposal.parents.append(parent)
            self.proposal.chances.append(self.proposal.chances[parent] * chance)

    def pick(self, width: int) -> None:
        """Take the likeliest nodes of the last level as the ones to grow."""
        chances = self.proposal.chances
        likely = [node for node in self._level if chances[node] >= LEAST_CHANCE]
        self.picked = sorted(sorted(likely, key=lambda node: (-chances[node], node))[:width])
        self._run.extend(self.picked)
        self._level = []

    def forest(self) -> TokenTree:
        """Return the tree of the nodes that have run or run now, below node 0, which is committed."""
        place = {node: index for index, node in enumerate(self._run)} | {0: -1}
        return TokenTree.from_parents([place[self.proposal.parents[node]] for node in self._run])


def most_likely(logits: NDArray[np.float32], count: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return the ``count`` likeliest tokens of each row, best first, and their probabilities: ``[n, count]`` each.

    Raises
    ------
    ShapeError
        A row with NaN, or without a largest finite logit.
    """
    count = min(count, logits.shape[1])
    highest = logits.max(axis=1, keepdims=True).astype(np.float64)
    if not np.isfinite(highest).all():
        row = int(np.argmin(np.isfinite(highest)))
        raise ShapeError(f"logits: expected numbers, the largest finite, got {highest[row, 0]} in row {row} of a draft")
    top = np.sort(np.argpartition(-logits, count - 1, axis=1)[:, :count], axis=1)  # equal ones by number
    values = np.take_along_axis(logits, top, axis=1).astype(np.float64)
    order = np.argsort(-values, axis=1, kind="stable")
    total = np.exp(logits - highest).sum(axis=1, keepdims=True)
    chances = np.exp(np.take_along_axis(values, order, axis=1) - highest) / total
    return np.take_along_axis(top, order, axis=1), chances
