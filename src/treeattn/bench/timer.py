"""Best-of-many timing of candidates that take turns.

On a shared machine the clock rate drifts and neighbours come and go, so candidates are interleaved, round
after round, and the best sample of each is kept. Two traps of thread pools are kept out: OpenMP workers spin
for a while after their work and share a core with the next candidate's workers (up to 50 % slower), so
`quiet_workers` must be called before torch is imported, and a short sleep goes before each sample.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

QUIET = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
    "GOMP_SPINCOUNT": "0",
    "OPENBLAS_THREAD_TIMEOUT": "4",  # NumPy's workers would spin for some 20 ms
}
SETTLE = 0.004  # seconds


@dataclass(frozen=True)
class Candidate:
    """Something to time; ``before`` runs untimed right before each sample, in place of the sleep."""

    name: str
    run: Callable[[], object]
    before: Callable[[], object] | None = None


@dataclass(frozen=True)
class Timing:
    """Best of ``samples`` calls, in seconds."""

    best: float
    samples: int


def quiet_workers() -> None:
    """Tell OpenMP workers not to spin; no use once torch is imported.

    Raises
    ------
    RuntimeError
        Torch is there already, and read its settings when it was imported.
    """
    if all(os.environ.get(name) == value for name, value in QUIET.items()):
        return
    if "torch" in sys.modules:
        raise RuntimeError("quiet_workers: torch is imported already; call this first, or set " + " ".join(QUIET))
    os.environ.update(QUIET)


def interleave(candidates: Iterable[Candidate], seconds: float = 3.0, rounds: int = 20) -> dict[str, Timing]:
    """Time candidates in turns.

    Parameters
    ----------
    candidates : iterable of Candidate
        Each is called once untimed first.
    seconds : float
        Stop after the round in which this much time has passed; at least two rounds are made.
    rounds : int
        Most samples of each. A candidate that has used up its own share of ``seconds`` sits out after its
        second.
    """
    candidates = list(candidates)
    for candidate in candidates:
        candidate.run()
    best = dict.fromkeys((candidate.name for candidate in candidates), float("inf"))
    samples, spent = dict.fromkeys(best, 0), dict.fromkeys(best, 0.0)
    share, start = seconds / max(len(candidates), 1), time.perf_counter()
    for turn in range(rounds):
        for candidate in random.Random(turn).sample(candidates, len(candidates)):  # nobody always follows another
            name = candidate.name
            if turn >= 2 and spent[name] > share:
                continue
            elapsed = _sample(candidate)
            best[name] = min(best[name], elapsed)
            samples[name] += 1
            spent[name] += elapsed
        if turn >= 1 and time.perf_counter() - start > seconds:
            break
    return {name: Timing(best[name], samples[name]) for name in best}


def _sample(candidate: Candidate) -> float:
    if candidate.before is None:
        time.sleep(SETTLE)
    else:
        candidate.before()
    start = time.perf_counter()
    candidate.run()
    return time.perf_counter() - start
