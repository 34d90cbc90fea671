"""How many draft tokens pay: nodes in order of their chance, against what a step of so many tokens costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checks import integer, number
from ..errors import ShapeError
from ..tree import TokenTree

KNOTS = np.array([1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024])
PRIOR_PER_TOKEN = 0.06
"""What a token adds to a step, as a part of the step of one token, until steps have been timed."""
RISES, FALLS = 0.2, 0.5
"""Weight of the newest timing of a size, slower or faster than the last: what disturbs a step only ever slows it."""
OUTLIER = 3.0
MARGIN = 1.03
"""What a draft must promise over none: chances are estimates, and the best of many is taken."""


@dataclass(frozen=True, eq=False)
class Proposal:
    """A draft tree before it is cut: parents come before children.

    Attributes
    ----------
    tokens : list of int
        Token of each node; node 0 is the last accepted token.
    parents : list of int
        -1 for node 0.
    chances : list of float
        Estimated probability that each node is accepted: 1 for node 0, never more than the parent's.
    """

    tokens: list[int]
    parents: list[int]
    chances: list[float]

    @classmethod
    def root(cls, token: int) -> Proposal:
        """Return the proposal without drafts: plain decoding."""
        return cls([token], [-1], [1.0])

    @cached_property
    def tree(self) -> TokenTree:
        """The tree of `parents`."""
        return TokenTree.from_parents(self.parents)

    def check(self) -> None:
        """Check what a drafter made.

        Raises
        ------
        ShapeError
            Lists of different lengths, a parent that does not come first, or a chance that exceeds it.
        """
        chances, parents = np.array(self.chances, np.float64), np.array(self.parents)
        fine = 0 < len(self.tokens) == len(chances) == len(parents) and (chances[0], parents[0]) == (1, -1)
        fine = fine and bool(((parents[1:] >= 0) & (parents[1:] < np.arange(1, len(parents)))).all())
        if not fine or not ((chances[1:] >= 0) & (chances[1:] <= chances[parents[1:]])).all():
            raise ShapeError(
                "proposals: expected a token, a parent before it and a chance up to the parent's of every node, node 0 "
                f"with parent -1 and chance 1, got {self!r:.200}"
            )

    def keep(self, nodes: Sequence[int]) -> Proposal:
        """Return the proposal with these nodes only: rising, node 0 and every parent among them."""
        place = {node: index for index, node in enumerate(nodes)} | {-1: -1}
        return Proposal(
            [self.tokens[node] for node in nodes],
            [place[self.parents[node]] for node in nodes],
            [self.chances[node] for node in nodes],
        )


class StepCost:
    """Time of a step by its number of tokens, learned from steps that were timed.

    Parameters
    ----------
    per_token : float
        What a token adds, as a part of a step of one token: the curve until timings correct it.
    learns : bool
        False keeps that curve, so that the same input gives the same trees on any machine.
    """

    def __init__(self, per_token: float = PRIOR_PER_TOKEN, learns: bool = True) -> None:
        if number(per_token, "per_token") < 0:
            raise ShapeError(f"per_token: expected 0 or more, got {per_token}")
        self._learns = learns
        self._prior = 1 + per_token * (KNOTS - 1)
        self._factor = np.full(len(KNOTS), np.nan)

    def __call__(self, tokens: Any) -> NDArray[np.float64]:
        """Return the time of steps of ``tokens`` tokens: seconds once one was timed, until then in any unit."""
        curve: NDArray[np.float64] = np.interp(tokens, KNOTS, self._curve())
        return curve

    def record(self, tokens: int, seconds: float) -> None:
        """Learn from a step; one that took far longer than expected counts as a pause, and only in part.

        One without tokens, or too short for the clock, teaches nothing.
        """
        if number(seconds, "seconds") < 0:
            raise ShapeError(f"seconds: expected 0 or more, got {seconds}")
        if integer(tokens, "tokens", 0) == 0 or seconds == 0 or not self._learns:
            return
        nearest = int(np.abs(KNOTS - tokens).argmin())
        prior = float(np.interp(tokens, KNOTS, self._prior))
        factor = seconds / prior
        if np.isnan(self._factor).all():
            self._factor[nearest] = factor
            return
        known = self._factor[nearest]
        if np.isnan(known):  # what the sizes timed so far promise
            known = float(self(tokens)) / prior
        weight = FALLS if factor < known else RISES
        self._factor[nearest] = known + weight * (min(factor, OUTLIER * known) - known)

    def _curve(self) -> NDArray[np.float64]:
        known = np.flatnonzero(~np.isnan(self._factor))
        if len(known) == 0:
            return self._prior
        nearest = known[np.abs(np.arange(len(KNOTS))[:, None] - known).argmin(axis=1)]
        curve = self._prior * self._factor[nearest]
        rising: NDArray[np.float64] = np.minimum.accumulate(curve[::-1])[::-1]  # more tokens never take less
        return rising


def choose(proposals: Sequence[Proposal], cost: StepCost, most: int = 64) -> list[Proposal]:
    """Cut the proposals of a batch to the nodes that maximise the expected tokens a second.

    Every sequence gives one token and one more for each accepted node, so a set of nodes is worth the sum of their
    chances. As no node's chance exceeds its parent's, the best set of a size is the first so many in falling order,
    and it is a tree; what is left is one maximum over sizes.

    Parameters
    ----------
    proposals : sequence of Proposal
        One a sequence.
    cost : StepCost
        Of the whole batch's tokens.
    most : int
        Most draft tokens in the step.

    Returns
    -------
    list of Proposal
        In the same order; with node 0 alone where drafting does not pay.

    Raises
    ------
    ShapeError
        A proposal that is not as `Proposal` says.
    """
    most = integer(most, "most", 0)
    for proposal in proposals:
        proposal.check()
    chances = np.array([chance for proposal in proposals for chance in proposal.chances[1:]])
    owner = np.repeat(np.arange(len(proposals)), [len(proposal.tokens) - 1 for proposal in proposals])
    node = np.concatenate([np.arange(1, len(proposal.tokens)) for proposal in proposals] or [np.zeros(0, int)])
    order = np.argsort(-chances, kind="stable")[:most]
    base = len(proposals)
    promised = base + np.concatenate([[0.0], np.cumsum(chances[order])])
    rates = promised / cost(base + np.arange(len(order) + 1))
    best = int(rates.argmax())
    if rates[best] < MARGIN * rates[0]:
        best = 0
    kept = order[:best]
    return [proposal.keep([0, *sorted(node[kept[owner[kept] == i]])]) for i, proposal in enumerate(proposals)]
