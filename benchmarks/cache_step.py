"""What `PagedKVCache` costs beside the kernels, for a batch of sequences: milliseconds, best of several.

python benchmarks/cache_step.py [--seqs 64] [--context 1000] [--layers 32]
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

import treeattn as ta

KV_HEADS, Q_HEADS, DIM, PAGE_SIZE, NODES = 8, 32, 128, 16, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("seqs", 64), ("context", 1000), ("layers", 32), ("samples", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    num_pages = options.seqs * (-(-(options.context + NODES) // PAGE_SIZE))
    cache = ta.PagedKVCache(options.layers, KV_HEADS, DIM, num_pages, PAGE_SIZE, "float16")
    seqs = [cache.add() for _ in range(options.seqs)]
    cache.commit(cache.begin(dict.fromkeys(seqs, options.context)), dict.fromkeys(seqs, options.context))
    rng = np.random.default_rng(0)
    parents = [[-1, *(int(rng.integers(0, node)) for node in range(1, NODES))] for _ in seqs]
    print(f"{'':<28}{'begin':>9}{'plan':>9}{'append':>9}{'commit':>9}   append: a layer")
    for name, is_tree in ((f"trees of {NODES}, all new", True), ("one token each", False)):
        times = defaultdict(list)
        for _ in range(options.samples):
            trees = [ta.TokenTree.from_parents(some) if is_tree else 1 for some in parents]
            sample(cache, dict(zip(seqs, trees, strict=True)), options.context, times)
        print(f"{name:<28}" + "".join(f"{min(some) * 1e3:>9.3f}" for some in times.values()))


def sample(cache: ta.PagedKVCache, new: dict[int, Any], context: int, times: dict[str, list[float]]) -> None:
    def timed(name: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        times[name].append(time.perf_counter() - start)
        return result

    step = timed("begin", lambda: cache.begin(new))
    rows = np.zeros((int(step.q_indptr[-1]), KV_HEADS, DIM), "float16")
    timed(
        "plan",
        lambda: ta.plan(step.kv(0), step.mask(), q_indptr=step.q_indptr, q_heads=Q_HEADS, dtype="float16", check=False),
    )
    timed("append", lambda: step.append(0, rows, rows))
    accepted = {
        seq: tree.path(tree.num_nodes - 1) if isinstance(tree, ta.TokenTree) else 1 for seq, tree in new.items()
    }
    timed("commit", lambda: cache.commit(step, accepted))
    for seq in new:
        cache.truncate(seq, context)


if __name__ == "__main__":
    main()
