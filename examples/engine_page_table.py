"""An engine with page tables of its own: `PagedKV` reads its pool, `cache_ops` writes it, nothing is copied.

The pool is laid out as the engine likes (tokens before heads); a transposed view is what treeattn takes.
"""

from __future__ import annotations

import numpy as np

import treeattn as ta
from treeattn import cache_ops

NUM_PAGES, PAGE_SIZE, KV_HEADS, Q_HEADS, DIM = 32, 16, 2, 8, 64
rng = np.random.default_rng(0)


def main() -> np.ndarray:
    engine_pool = np.zeros((NUM_PAGES, 2, PAGE_SIZE, KV_HEADS, DIM), "float16")
    pages = engine_pool.transpose(0, 1, 3, 2, 4)  # [num_pages, 2, kv_heads, page_size, d]

    block_table = [[7, 3, 21], [12], [4, 30]]  # pages of each request
    lengths = [41, 9, 20]  # keys of each request, the new tokens' own included
    trees = [ta.TokenTree.from_parents(p) for p in ([-1, 0, 0, 1], [-1], [-1, 0, 1])]

    # The new tokens are the last keys of each request: write theirs into the pool.
    places = [
        [blocks[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for at in range(length - tree.num_nodes, length)]
        for blocks, length, tree in zip(block_table, lengths, trees, strict=True)
    ]
    slots = np.concatenate(places)
    cache_ops.append(pages, slots, *rng.standard_normal((2, len(slots), KV_HEADS, DIM), "float32"))

    kv = ta.PagedKV(
        pages,
        page_indptr=np.cumsum([0, *map(len, block_table)]),
        page_ids=np.concatenate(block_table),
        last_page_len=[(length - 1) % PAGE_SIZE + 1 for length in lengths],
    )
    q = rng.standard_normal((len(slots), Q_HEADS, DIM), "float32").astype("float16")
    q_indptr = np.cumsum([0, *[tree.num_nodes for tree in trees]])
    out, _ = ta.attention(q, kv, ta.Tree(trees), q_indptr=q_indptr)

    # The first request accepts nodes 0, 2: node 2 moves up by one slot.
    cache_ops.compact(pages, source=places[0][2:3], target=places[0][1:2])
    return out


if __name__ == "__main__":
    print(main().shape)
