"""One workload measured: checked first, then timed in turns with the machine's limits and the rivals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..testing import Case
from .check import sample
from .limits import Probe, read, sgemm
from .rivals import BEFORE, CANDIDATES, OTHER_RESULT, OWN_CODE, Call, UnavailableError, as_numpy, ours
from .timer import Candidate, Timing, interleave
from .workloads import Goal, Problem, Workload, build

OURS = "treeattn"


@dataclass(frozen=True)
class Result:
    """Times of one workload in one dtype, and what follows from them."""

    workload: Workload
    dtype: str
    threads: int
    flops: float
    num_bytes: float
    timings: dict[str, Timing]
    probes: dict[str, Probe]
    checked: str
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.timings[OURS].best

    def flop_rate(self, name: str = OURS) -> float:
        """Useful floating-point operations a second."""
        return self.flops / self.timings[name].best

    def byte_rate(self, name: str = OURS) -> float:
        """Bytes of K and V a second, each counted once."""
        return self.num_bytes / self.timings[name].best

    def limit(self, probe: str) -> float:
        """Rate of a probe: ``sgemm`` in operations a second, ``read`` in bytes."""
        return self.probes[probe].rate(self.timings[probe])

    def fraction(self, limit: str) -> float:
        """Fraction reached of a limit: ``compute``, ``bandwidth``, or the ``nearer`` of the two."""
        compute, bandwidth = self.flop_rate() / self.limit("sgemm"), self.byte_rate() / self.limit("read")
        return {"compute": compute, "bandwidth": bandwidth, "nearer": max(compute, bandwidth)}[limit]

    def speedup(self, name: str) -> float:
        """Time of another candidate over treeattn's."""
        return self.timings[name].best / self.seconds

    def value(self, measure: str) -> float | None:
        """Value of one measure of a goal; None where that candidate was not timed."""
        if measure in ("compute", "bandwidth", "nearer"):
            return self.fraction(measure)
        return self.speedup(measure) if measure in self.timings else None

    def goals(self) -> list[tuple[Goal, bool | None]]:
        """Goals for this dtype, and whether each is met; None where nothing in it was measured."""
        return [(goal, self._is_met(goal)) for goal in self.workload.goals if self.dtype in goal.dtypes]

    def _is_met(self, goal: Goal) -> bool | None:
        known = [(value, least) for name, least in goal.any_of if (value := self.value(name)) is not None]
        return any(value >= least for value, least in known) if known else None


def measure(
    workload: Workload, dtype: str, *, threads: int, against: Iterable[str], seconds: float, rounds: int = 20
) -> Result:
    """Check and time a workload.

    Raises
    ------
    AssertionError
        Our result, or that of a candidate, is not attention.
    """
    problem = build(workload, dtype)
    call = ours(problem, threads)
    out, checked = check(problem, call)
    calls, failures = _rivals(problem, threads, against, as_numpy(out))
    probes = {probe.name: probe for probe in (sgemm(threads), read(threads))}
    candidates = [Candidate(OURS, call), *(Candidate(*item, BEFORE.get(item[0])) for item in calls.items())]
    candidates += [probe.candidate for probe in probes.values()]
    timings = interleave(candidates, seconds, rounds)
    return Result(workload, dtype, threads, problem.flops, problem.num_bytes, timings, probes, checked, failures)


def check(problem: Problem, call: Call) -> tuple[Any, str]:
    """Compare a call's ``out, lse`` with the reference, in part; return ``out`` and what was compared."""
    out, lse = call()
    count = 0
    for piece in sample(Case(problem.q, problem.kv, problem.mask, problem.q_indptr, parts=problem.parts), problem.kv):
        piece.compare(out, lse)
        count += piece.rows.stop - piece.rows.start
    return out, f"{count} of {lse.size} rows (each of one head)"


def _rivals(problem: Problem, threads: int, names: Iterable[str], out: Any) -> tuple[dict[str, Any], dict[str, str]]:
    calls, failures = {}, {}
    tolerance = 0.02 if problem.dtype != "float32" else 2e-4
    for name in names:
        try:
            calls[name] = CANDIDATES[name](problem, threads)
        except UnavailableError as error:
            failures[name] = str(error)
            continue
        if name not in OTHER_RESULT and problem.workload.tree != "chain":
            theirs = as_numpy(calls[name]()).reshape(out.shape)
            difference = float(np.abs(theirs - out).max())
            if not difference <= tolerance:
                failures[name] = f"its result differs by {difference:.1e}"
                if name in OWN_CODE:
                    raise AssertionError(f"{name}: {failures[name]}")
                del calls[name]
    return calls, failures
