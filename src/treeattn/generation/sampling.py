"""From logits to the probabilities tokens are drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..checks import integer, number
from ..errors import ShapeError

FEW = 1024
"""Tokens that are sorted first for top-p; the whole vocabulary only where these fall short."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Parameters
    ----------
    temperature : float
        Divides logits; 0 takes the likeliest token.
    top_k : int
        Draw from the ``top_k`` likeliest tokens; 0 from all.
    top_p : float
        Draw from the fewest tokens that together have this probability.
    seed : int
        Of the draws.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            number(getattr(self, name), name)
        integer(self.top_k, "top_k", 0)
        integer(self.seed, "seed", 0, 2**64 - 1)
        if self.temperature < 0:
            raise ShapeError(f"temperature: expected 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ShapeError(f"top_p: expected more than 0 and at most 1, got {self.top_p}")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0 or self.top_k == 1

    def probabilities(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return what to draw from, float64 ``[n, vocab]``, of logits of that shape; not for greedy choice."""
        scaled = logits.astype(np.float64) / self.temperature
        if 0 < self.top_k < scaled.shape[1]:
            least = np.partition(scaled, -self.top_k, axis=1)[:, -self.top_k, None]
            scaled[scaled < least] = -np.inf
        probs: NDArray[np.float64] = np.exp(scaled - scaled.max(axis=1, keepdims=True))
        probs /= probs.sum(axis=1, keepdims=True)
        if self.top_p < 1:
            for row in probs:
                row[row < _least_of_nucleus(row, self.top_p)] = 0
            probs /= probs.sum(axis=1, keepdims=True)
        return probs


def _least_of_nucleus(probs: NDArray[np.float64], top_p: float) -> float:
    """Return the smallest probability among the fewest tokens that together have ``top_p``."""
    for count in (min(FEW, len(probs)), len(probs)):
        likely = -np.sort(-np.partition(probs, -count)[-count:])
        upto = likely.cumsum()
        if upto[-1] >= top_p:
            break
    return float(likely[min(int(np.searchsorted(upto, top_p)), len(likely) - 1)])
