"""The shapes that are timed, and what is wanted of each.

A workload is data; `build` makes its arrays. Paged K and V lie in a permuted pool that has no spare pages.
Useful work counts visible (row, column) pairs only, and bytes count K and V once, so no candidate is credited
for what it wastes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import IntArray, numpy_dtype
from ..errors import UnsupportedError
from ..masks import Causal, Full, Mask, Tree, Window
from ..rope import Rope
from ..storage import LatentKV, PagedKV
from ..tree import TokenTree

ALL_DTYPES = ("float32", "float16", "bfloat16")
HALF_DTYPES = ("float16", "bfloat16")
LIMITS = ("compute", "bandwidth", "nearer")
OWN = ("one thread", "causal", "full")


@dataclass(frozen=True)
class Goal:
    """At least one of ``any_of``: a fraction of the named limit, or a speed-up over the named candidate."""

    any_of: tuple[tuple[str, float], ...]
    dtypes: tuple[str, ...] = ALL_DTYPES


@dataclass(frozen=True)
class Workload:
    """One attention call: sequence ``b`` has a tree of ``nodes[b]`` tokens after ``contexts[b]`` others."""

    name: str
    q_heads: int
    kv_heads: int
    d: int
    contexts: tuple[int, ...]
    nodes: tuple[int, ...]
    goals: tuple[Goal, ...] = ()
    tree: str = "random"
    page_size: int = 16
    dtypes: tuple[str, ...] = ALL_DTYPES
    causal: bool = False
    """`Causal` in place of `Tree`, for chains."""
    window: int = 0
    """Join a `Window` of so many positions."""
    d_latent: int = 0
    """Keys of ``d`` elements whose first ``d_latent`` are the value (`LatentKV`)."""
    rope: bool = False
    """Rotate q and keys as they are read."""

    @property
    def d_v(self) -> int:
        """Elements of a value."""
        return self.d_latent or self.d

    @property
    def rows(self) -> int:
        """Most rows of one kv head in one sequence: what decides between few-row and many-row kernels."""
        return max(self.nodes) * self.q_heads // self.kv_heads

    @property
    def own_candidates(self) -> tuple[str, ...]:
        """Other ways to call treeattn that the goals compare with."""
        return self._named(lambda name: name in OWN)

    @property
    def rivals(self) -> tuple[str, ...]:
        """Other kernels that the goals compare with."""
        return self._named(lambda name: name not in OWN and name not in LIMITS)

    def _named(self, wanted: Callable[[str], bool]) -> tuple[str, ...]:
        names = (name for goal in self.goals for name, _ in goal.any_of)
        return tuple(dict.fromkeys(filter(wanted, names)))


@dataclass(frozen=True, eq=False)
class Problem:
    """The arrays of a workload in one dtype."""

    workload: Workload
    dtype: str
    q: NDArray[Any]
    q_indptr: IntArray
    kv: PagedKV | LatentKV
    trees: tuple[TokenTree, ...]

    @cached_property
    def mask(self) -> Mask:
        mask: Mask = Causal() if self.workload.causal else Tree(self.trees)
        return mask & Window(self.workload.window) if self.workload.window else mask

    @property
    def parts(self) -> dict[str, Any]:
        """Options of `attention` beside masks and arrays."""
        return {"rope": Rope()} if self.workload.rope else {}

    @property
    def kv_len(self) -> IntArray:
        return self.kv.table.kv_len

    @property
    def flops(self) -> float:
        """Useful floating-point operations: both products, visible pairs only."""
        return self.flops_of(self.mask)

    def flops_of(self, mask: Mask) -> float:
        """Useful operations of these arrays under `Tree`, `Causal` or `Full`, with the workload's window."""
        work = self.workload
        visible = sum(map(_count(mask, work.window), self.trees, map(int, self.kv_len)))
        return 2.0 * visible * work.q_heads * (work.d + work.d_v)

    @property
    def num_bytes(self) -> float:
        """Bytes of K and V, each read once; of a window, what some row sees."""
        work = self.workload
        lengths = [int(n) if not work.window else min(int(n), work.window + max(work.nodes)) for n in self.kv_len]
        slot = work.d if work.d_latent else 2 * work.d
        return float(sum(lengths) * work.kv_heads * slot * numpy_dtype(self.dtype).itemsize)


def build(workload: Workload, dtype: str, seed: int = 0) -> Problem:
    """Make the arrays of a workload: standard normal values, trees by ``workload.tree``."""
    rng = np.random.default_rng(seed)
    trees = tuple(TREES[workload.tree](count, rng) for count in workload.nodes)
    kv_len = np.array(workload.contexts) + [tree.num_nodes for tree in trees]
    used = -(-kv_len // workload.page_size)
    slots = workload.page_size, workload.d
    shape = (int(used.sum()), *slots) if workload.d_latent else (int(used.sum()), 2, workload.kv_heads, *slots)
    table = {
        "pages": rng.standard_normal(shape, np.float32).astype(numpy_dtype(dtype)),
        "page_indptr": _indptr(used),
        "page_ids": rng.permutation(shape[0]).astype(np.int32),
        "last_page_len": ((kv_len - 1) % workload.page_size + 1).astype(np.int32),
    }
    kv = LatentKV(**table, d_latent=workload.d_latent) if workload.d_latent else PagedKV(**table)
    q_indptr = _indptr([tree.num_nodes for tree in trees])
    q = rng.standard_normal((int(q_indptr[-1]), workload.q_heads, workload.d), np.float32)
    return Problem(workload, dtype, q.astype(numpy_dtype(dtype)), q_indptr, kv, trees)


def select(patterns: Iterable[str]) -> list[Workload]:
    """Workloads whose names match any of the shell patterns, in their own order; all without a pattern.

    Raises
    ------
    UnsupportedError
        A pattern that matches none.
    """
    patterns = list(patterns) or ["*"]
    for pattern in patterns:
        if not any(fnmatchcase(workload.name, pattern) for workload in WORKLOADS):
            raise UnsupportedError(f"workload: no {pattern!r}; there are {', '.join(work.name for work in WORKLOADS)}")
    return [work for work in WORKLOADS if any(fnmatchcase(work.name, pattern) for pattern in patterns)]


def likely_tree(num_nodes: int) -> TokenTree:
    """Build a tree as Medusa has them: the paths of ranks most likely to be accepted, and their root.

    The chance of a path is the product over its tokens of ``0.6 * 0.45 ** rank``, lower with each head.
    """
    choices: list[list[int]] = []
    heap = [(-0.6, [0])]
    while len(choices) < num_nodes - 1:
        chance, path = heapq.heappop(heap)
        choices.append(path)
        heapq.heappush(heap, (chance * 0.45, [*path[:-1], path[-1] + 1]))
        heapq.heappush(heap, (chance * 0.6 * 0.9 ** len(path), [*path, 0]))
    return TokenTree.from_choices(choices)


def _random_tree(num_nodes: int, rng: np.random.Generator) -> TokenTree:
    nodes = np.arange(num_nodes)
    return TokenTree.from_parents(np.where(nodes, rng.integers(np.maximum(nodes - 8, 0), np.maximum(nodes, 1)), -1))


def _branches(num_nodes: int, rng: np.random.Generator) -> TokenTree:
    """Make a forest of chains of 16 nodes."""
    nodes = np.arange(num_nodes)
    return TokenTree.from_parents(np.where(nodes % 16, nodes - 1, -1))


TREES: dict[str, Callable[[int, np.random.Generator], TokenTree]] = {
    "random": _random_tree,
    "likely": lambda num_nodes, rng: likely_tree(num_nodes),
    "chain": lambda num_nodes, rng: TokenTree.chain(num_nodes),
    "star": lambda num_nodes, rng: TokenTree.star(num_nodes),
    "branches": _branches,
}


def _count(mask: Mask, window: int) -> Callable[[TokenTree, int], int]:
    """Count visible pairs of one sequence whose rows are all the nodes of its tree."""
    leaf = next(mask.leaves())

    def count(tree: TokenTree, kv_len: int) -> int:
        rows = tree.num_nodes
        if isinstance(leaf, Full):
            return rows * kv_len
        if not isinstance(leaf, Tree | Causal):
            raise UnsupportedError(f"mask: expected Tree, Causal or Full, got {type(leaf).__name__}")
        path = tree.depth if isinstance(leaf, Tree) else np.arange(rows)
        seen = kv_len - rows + path.astype(np.int64) + 1
        return int(np.minimum(seen, window or kv_len).sum())

    return count


def _indptr(lengths: Iterable[int]) -> IntArray:
    return np.concatenate([[0], np.cumsum(list(lengths))]).astype(np.int32)


def _uniform(
    name: str, heads: tuple[int, int], nodes: int, context: int, *goals: Goal, d: int = 128, batch: int = 4
) -> Workload:
    return Workload(name, *heads, d, (context,) * batch, (nodes,) * batch, goals)


def _ragged(*goals: Goal) -> Workload:
    rng = np.random.default_rng(32)
    contexts = rng.permutation(np.geomspace(16, 8192, 32).round().astype(int)).tolist()
    nodes = rng.permutation(np.linspace(1, 64, 32).round().astype(int)).tolist()
    return Workload("ragged", 32, 8, 128, tuple(contexts), tuple(nodes), goals)


def _limit(name: str, at_least: float, dtypes: tuple[str, ...] = ALL_DTYPES) -> Goal:
    return Goal(((name, at_least),), dtypes)


def _decode(rows: int, heads: tuple[int, int], nodes: int = 1) -> Workload:
    if rows <= 4:
        goals = [_limit("bandwidth", 0.62, ("float32",)), _limit("bandwidth", 0.45, HALF_DTYPES)]
        if rows == 4:  # with fewer rows SDPA expands less, and reads almost as little as must be read
            goals += [_limit("sdpa", 2.8, ("float32",)), _limit("sdpa", 18, ("float16",))]
    else:
        goals = [Goal((("bandwidth", 0.50), ("compute", 0.55)), ("float32",))]
        goals += [Goal((("bandwidth", 0.30), ("compute", 0.55)), HALF_DTYPES)]
    return _uniform(f"decode-{rows}", heads, nodes, 4096, *goals)


VERIFY_GOALS = (
    _limit("compute", 0.88),
    _limit("sdpa", 1.1, ("float32",)),
    _limit("sdpa", 2.2, HALF_DTYPES),
    _limit("tvm", 50, ("float32", "float16")),
)
MOST = _limit("compute", 0.82)
SMALL = _limit("nearer", 0.68)
VISIBLE = _limit("compute", 1 / 1.5)
PREFIX_256 = Workload("", 32, 8, 128, (256,), (1024,), (VISIBLE,))

WORKLOADS: tuple[Workload, ...] = (
    _uniform("verify", (32, 8), 64, 1024, *VERIFY_GOALS),
    _uniform("verify-d64", (32, 8), 64, 1024, MOST, d=64),
    _uniform("verify-d256", (16, 4), 64, 1024, MOST, d=256),
    _uniform("verify-group1", (32, 32), 64, 1024, MOST, batch=2),
    _uniform("verify-group7", (28, 4), 64, 1024, MOST),
    _uniform("verify-16", (32, 8), 16, 1024, MOST),
    _uniform("small-16", (32, 8), 4, 4096, SMALL),
    _uniform("small-28", (28, 4), 4, 4096, SMALL),
    _uniform("small-32", (32, 8), 8, 4096, SMALL),
    _decode(1, (8, 8)),
    _decode(2, (16, 8)),
    _decode(3, (24, 8)),
    _decode(4, (32, 8)),
    _decode(5, (40, 8)),
    _decode(6, (48, 8)),
    _decode(7, (28, 4)),
    _decode(8, (32, 8), nodes=2),
    _ragged(_limit("one thread", 1.85)),
    replace(_uniform("chain", (32, 8), 64, 1024, _limit("causal", 1 / 1.05)), tree="chain"),
    _uniform("full", (32, 8), 64, 1024, _limit("full", 1 / 1.05)),
    replace(PREFIX_256, name="star", tree="star"),
    replace(PREFIX_256, name="branches", tree="branches"),
    replace(_uniform("prefill", (32, 8), 2048, 0, _limit("compute", 0.80), batch=1), tree="chain", causal=True),
    _uniform("decode-batch1", (32, 8), 1, 4096, batch=1),
    _uniform("decode-batch8", (32, 8), 1, 4096, batch=8),
    _uniform("decode-batch64", (32, 8), 1, 1024, batch=64),
    replace(_uniform("mla", (128, 1), 1, 1024, d=576), d_latent=512),
    replace(_uniform("mla-tree", (16, 1), 64, 1024, d=576), d_latent=512),
    replace(_uniform("window", (32, 8), 64, 4096), window=1024),
    replace(_uniform("rope", (32, 8), 64, 1024), rope=True),
)
