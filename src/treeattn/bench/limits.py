"""What the machine can give: arithmetic (an sgemm) and memory (a read of more than its caches hold).

A probe is timed in turns with the candidates, in the same process: only so is a fraction of a limit worth
anything. Results keep their probes, whose arrays are large, so all share the last one made.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .timer import Candidate, Timing, interleave

SGEMM_SIZE = 2048
READ_BYTES = 1 << 28


@dataclass(frozen=True)
class Probe:
    """A limit to measure: ``amount`` floating-point operations or bytes in one call, and what does them."""

    name: str
    amount: float
    source: str
    run: Callable[[], object]

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.name, self.run)

    def rate(self, timing: Timing) -> float:
        """Operations or bytes a second."""
        return self.amount / timing.best


def has_torch() -> bool:
    """Whether torch is installed; does not import it."""
    return importlib.util.find_spec("torch") is not None


def torch_threads(threads: int) -> Any:
    """Import torch with its pool set to ``threads``."""
    torch = importlib.import_module("torch")
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    return torch


@lru_cache(maxsize=1)
def sgemm(threads: int) -> Probe:
    """Arithmetic: a square float32 product, by torch where it is installed and by NumPy otherwise."""
    size, flop = SGEMM_SIZE, 2.0 * SGEMM_SIZE**3
    if has_torch():
        torch = torch_threads(threads)
        a, b, c = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
        return Probe("sgemm", flop, f"torch.mm {size}, {threads} threads", lambda: torch.mm(a, b, out=c))
    x, y = np.random.default_rng(0).standard_normal((2, size, size), np.float32)
    z = np.empty_like(x)
    return Probe("sgemm", flop, f"numpy.matmul {size}, its own threads", lambda: np.matmul(x, y, out=z))


@lru_cache(maxsize=1)
def read(threads: int) -> Probe:
    """Memory: one pass over a large float32 array, by torch where it is installed and by NumPy otherwise."""
    size = READ_BYTES // 4
    if has_torch():
        data = torch_threads(threads).ones(size)
        return Probe("read", READ_BYTES, f"torch sum of {READ_BYTES >> 20} MiB, {threads} threads", data.sum)
    parts = np.array_split(np.ones(size, np.float32), threads)
    pool = ThreadPoolExecutor(threads)
    source = f"numpy max of {READ_BYTES >> 20} MiB, {threads} threads"
    return Probe("read", READ_BYTES, source, lambda: list(pool.map(np.max, parts)))


def measure(threads: int, seconds: float = 2.0) -> dict[str, tuple[float, str]]:
    """Measure both limits alone: name to (operations or bytes a second, source)."""
    probes = [sgemm(threads), read(threads)]
    timings = interleave([probe.candidate for probe in probes], seconds)
    return {probe.name: (probe.rate(timings[probe.name]), probe.source) for probe in probes}
