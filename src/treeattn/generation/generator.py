"""Generation for many prompts at once: sequences join and leave between steps, and drafts are verified as trees.

A step runs, for every sequence, either the next part of its prompt or a tree whose root is its last token; without
drafts the tree is that root alone, so plain decoding and speculative decoding are one path.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cache.manager import PagedKVCache
from ..checks import integer
from ..errors import DTypeError, IndexRangeError, ShapeError
from ..models.network import PAGE_SIZE, Model
from ..speculate.budget import Proposal, StepCost, choose
from ..speculate.draft import Drafter, token_list
from ..speculate.verify import Accepted, verify_greedy, verify_sampling
from .sampling import Sampling
from .stats import Stats

PREFILL = 512
"""Most prompt tokens in a step: others wait for it."""


@dataclass(eq=False)
class Request:
    """A prompt and what has come of it.

    Attributes
    ----------
    prompt : list of int
        Its tokens.
    max_tokens : int
        Most tokens to generate.
    sampling : Sampling
        How they are chosen.
    stop_tokens : frozenset of int
        Generation ends after one of these, which is the last of ``tokens``.
    tokens : list of int
        Generated so far.
    finished : str
        ``""`` while it runs, then ``"stop"``, ``"length"`` or ``"cancelled"``.
    """

    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stop_tokens: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    finished: str = ""

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.sampling.seed)

    def take(self, tokens: Sequence[int]) -> list[int]:
        """Append tokens up to the end of the request, and return those."""
        room = self.max_tokens - len(self.tokens)
        stop = next((i + 1 for i, token in enumerate(tokens) if token in self.stop_tokens), len(tokens) + 1)
        taken = list(tokens[: min(room, stop)])
        self.tokens.extend(taken)
        if taken and taken[-1] in self.stop_tokens:
            self.finished = "stop"
        elif len(self.tokens) == self.max_tokens:
            self.finished = "length"
        return taken


class Generator:
    """A model, its cache, and the requests in it.

    Parameters
    ----------
    model : Model
        The target.
    capacity : int
        Tokens of all sequences together that the cache holds; requests past it wait.
    drafter : Drafter, optional
        Where drafts come from; plain decoding without one.
    cost : StepCost, optional
        What a step of so many tokens costs; learned while running by default.
    most_drafts : int
        Most draft tokens in a step, of all sequences together.
    page_size, cache_dtype : int, str
        Of the cache. Small pages are read a quarter slower; half precision halves the memory. Neither changes a token
        between plain decoding and drafts.

    Raises
    ------
    TreeAttnError
        A bad size, or a drafter whose vocabulary is another.
    """

    def __init__(
        self,
        model: Model,
        capacity: int = 8192,
        *,
        drafter: Drafter | None = None,
        cost: StepCost | None = None,
        most_drafts: int = 64,
        page_size: int = PAGE_SIZE,
        cache_dtype: str = "float32",
    ) -> None:
        self._model, self._drafter, self._most = model, drafter, integer(most_drafts, "most_drafts", 0)
        capacity, page_size = integer(capacity, "capacity"), integer(page_size, "page_size")
        vocab = getattr(drafter, "vocab_size", None)
        if vocab not in (None, model.vocab_size):
            raise ShapeError(
                f"drafter: expected a model with the same tokenizer, of {model.vocab_size} tokens, got one of {vocab}"
            )
        self._cost = cost or StepCost()
        self._page_size, self._num_pages = page_size, -(-capacity // page_size)
        model.warm_up(cache_dtype)
        self._cache: PagedKVCache = model.new_cache(self._num_pages, page_size, cache_dtype)
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self.stats = Stats()

    @property
    def is_idle(self) -> bool:
        """Whether every request is finished."""
        return not self._waiting and not self._running

    def submit(
        self,
        prompt: Iterable[int],
        max_tokens: int = 128,
        *,
        sampling: Sampling | None = None,
        stop_tokens: Iterable[int] = (),
    ) -> Request:
        """Add a request; it starts in the next step with room for it.

        Raises
        ------
        ShapeError
            An empty prompt, or more tokens than the cache holds or the model was made for.
        IndexRangeError
            A token outside the vocabulary.
        """
        tokens, stops = token_list(prompt, "prompt"), frozenset(token_list(stop_tokens, "stop_tokens"))
        if not tokens:
            raise ShapeError("prompt: expected one token or more, got none; begin with the model's first token")
        max_tokens = integer(max_tokens, "max_tokens")
        if not isinstance(sampling, Sampling | None):
            raise DTypeError(f"sampling: expected a Sampling or None, got {type(sampling).__name__}")
        outside = [token for token in tokens if not 0 <= token < self._model.vocab_size]
        if outside:
            raise IndexRangeError(f"prompt: expected tokens in [0, {self._model.vocab_size}), got {outside[0]}")
        request = Request(tokens, max_tokens, sampling or Sampling(), stops)
        longest = self._model.config.attention.max_position
        if longest is not None and len(tokens) + max_tokens > longest:
            raise ShapeError(
                f"prompt: expected at most {longest} tokens with those to generate, got {len(tokens)} and {max_tokens}"
            )
        if self._pages(request) > self._num_pages:
            raise ShapeError(
                f"prompt: expected to fit the cache of {self._num_pages * self._page_size} tokens, got "
                f"{len(tokens)}, {max_tokens} to generate and room for {self._most} drafts; raise capacity"
            )
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request as it is, and free its room."""
        if request.finished:
            return
        request.finished = "cancelled"
        if request in self._waiting:
            self._waiting.remove(request)
        for seq in [seq for seq, running in self._running.items() if running is request]:
            self._leave(seq)

    def run(self) -> None:
        """Step until every request is finished."""
        while not self.is_idle:
            self.step()

    def step(self) -> dict[Request, list[int]]:
        """Run one step.

        Returns
        -------
        dict from Request to list of int
            The new tokens of the requests that got some.
        """
        start = time.perf_counter()
        self._admit()
        if not self._running:
            return {}
        prompts = self._prompt_parts()
        roots = {seq: self._last(seq) for seq in self._running if self._is_ready(seq, prompts)}
        drafts = self._draft([seq for seq in roots if seq not in prompts], start)
        try:
            accepted = self._verify(prompts, roots, drafts)
        except BaseException:  # back to what was committed, so that another step may follow
            for seq in self._running:
                self._cache.truncate(seq, self._cache.length(seq))
            raise
        new = self._hand_out(accepted)
        seconds = time.perf_counter() - start
        if not prompts:
            self._cost.record(sum(len(draft.tokens) for draft in drafts.values()), seconds)
        self.stats.step(seconds, sum(map(len, new.values())), sum(prompts.values()))
        return new

    def _admit(self) -> None:
        reserved = sum(map(self._pages, self._running.values()))
        while self._waiting and reserved + self._pages(self._waiting[0]) <= self._num_pages:
            request = self._waiting.popleft()
            reserved += self._pages(request)
            seq = self._cache.add()
            self._running[seq] = request
            if self._drafter:
                self._drafter.add(seq, request.prompt)

    def _pages(self, request: Request) -> int:
        return -(-(len(request.prompt) + request.max_tokens + self._most) // self._page_size)

    def _prompt_parts(self) -> dict[int, int]:
        """Return how many tokens of its prompt each sequence runs in this step, where more than the last are left."""
        parts, room = {}, PREFILL
        for seq, request in self._running.items():
            left = len(request.prompt) - self._cache.length(seq)
            if (left > 1 or not request.tokens) and room > 0:
                parts[seq] = min(left, room)
                room -= parts[seq]
        return parts

    def _is_ready(self, seq: int, prompts: dict[int, int]) -> bool:
        """Whether a sequence gets tokens in this step: its prompt is in, or will be."""
        request = self._running[seq]
        return bool(request.tokens) or self._cache.length(seq) + prompts.get(seq, 0) == len(request.prompt)

    def _last(self, seq: int) -> int:
        request = self._running[seq]
        return (request.tokens or request.prompt)[-1]

    def _draft(self, seqs: list[int], start: float) -> dict[int, Proposal]:
        if not self._drafter or not seqs or self._most == 0:
            return {seq: Proposal.root(self._last(seq)) for seq in seqs}
        chosen = choose(self._drafter.propose(seqs), self._cost, self._most)
        self.stats.seconds["drafting"] += time.perf_counter() - start
        return dict(zip(seqs, chosen, strict=True))

    def _verify(
        self, prompts: dict[int, int], roots: dict[int, int], drafts: dict[int, Proposal]
    ) -> dict[int, Accepted]:
        """Run the model on parts of prompts and on trees, and keep what is accepted."""
        step = self._cache.begin(prompts | {seq: draft.tree for seq, draft in drafts.items()})
        tokens = [self._prompt_tokens(seq, count) for seq, count in prompts.items()]
        tokens += [draft.tokens for draft in drafts.values()]
        last = dict(zip(prompts, step.q_indptr[1:].tolist(), strict=False))
        rows = [last[seq] - 1 for seq in prompts if seq in roots]
        rows += range(int(step.q_indptr[len(prompts)]), int(step.q_indptr[-1]))
        logits = self._timed_forward(step, [token for part in tokens for token in part], rows)
        trees = {seq: Proposal.root(roots[seq]) for seq in prompts if seq in roots} | drafts
        accepted, row = {}, 0
        for seq, draft in trees.items():
            accepted[seq] = self._accept(self._running[seq], draft, logits[row : row + len(draft.tokens)])
            row += len(draft.tokens)
            self.stats.verified(draft, accepted[seq])
        self._cache.commit(step, prompts | {seq: accepted[seq].nodes for seq in drafts})
        return accepted

    def _prompt_tokens(self, seq: int, count: int) -> list[int]:
        length = self._cache.length(seq)
        return self._running[seq].prompt[length : length + count]

    def _timed_forward(self, step: Any, tokens: list[int], rows: list[int]) -> NDArray[np.float32]:
        before = dict(self._model.seconds)
        logits = self._model.forward(step, np.array(tokens, np.int32), rows)
        for name, seconds in self._model.seconds.items():
            self.stats.seconds[name] += seconds - before[name]
        return logits

    def _accept(self, request: Request, draft: Proposal, logits: NDArray[np.float32]) -> Accepted:
        tokens = np.array(draft.tokens)
        found: Accepted
        if request.sampling.is_greedy:
            found = verify_greedy(draft.tree, tokens, logits)
        else:
            found = verify_sampling(draft.tree, tokens, request.sampling.probabilities(logits), rng=request.rng)
        return found

    def _hand_out(self, accepted: dict[int, Accepted]) -> dict[Request, list[int]]:
        new = {}
        for seq, found in accepted.items():
            request = self._running[seq]
            new[request] = request.take([*found.tokens, found.bonus_token])
            if request.finished:
                self._leave(seq)
            elif self._drafter:
                self._drafter.extend(seq, new[request])
        return new

    def _leave(self, seq: int) -> None:
        del self._running[seq]
        self._cache.remove(seq)
        if self._drafter:
            self._drafter.remove(seq)
