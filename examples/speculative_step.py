"""Speculative decoding in NumPy: draft a tree, attend to it, keep what the target agrees with.

The target is a toy of one attention layer with random weights, the draft is the target without attention.
"""

from __future__ import annotations

import numpy as np

import treeattn as ta

VOCAB, HEADS, DIM = 50, 2, 16
rng = np.random.default_rng(0)
embed = rng.standard_normal((VOCAB, HEADS, DIM), "float32")
unembed = rng.standard_normal((HEADS * DIM, VOCAB), "float32")
rope, tree = ta.Rope(), ta.TokenTree.from_choices([[0], [1], [0, 0], [0, 1]])  # node 0 is the last accepted token


def forward(cache: ta.PagedKVCache, new: dict, tokens: list[int]) -> tuple[ta.Step, np.ndarray]:
    """Run the target on new tokens of the cache's sequences; return the step and the logits after each token."""
    step, x = cache.begin(new), embed[tokens]
    step.append(0, x, x, rope=rope)
    out, _ = step.attention(0, rope.rotate(x[:, ::-1], step.positions))
    return step, (x + 2 * out).reshape(len(tokens), -1) @ unembed


def guess(token: int) -> list[int]:
    """Return the draft's two best tokens after ``token``."""
    return np.argsort(embed[token].ravel() @ unembed)[:-3:-1].tolist()


def main(length: int = 40) -> tuple[list[int], int]:
    """Return a text and the steps it took."""
    cache = ta.PagedKVCache(num_layers=1, kv_heads=HEADS, head_dim=DIM, num_pages=64, dtype="float32")
    seq, text, steps = cache.add(), [3, 1, 4, 1, 5], 0
    step, _ = forward(cache, {seq: 4}, text[:4])  # all but the last token, which is the first root
    cache.commit(step, {seq: 4})
    while len(text) < length:
        best = guess(text[-1])
        tokens = [text[-1], *best, *guess(best[0])]
        step, logits = forward(cache, {seq: tree}, tokens)
        accepted = ta.verify_greedy(tree, tokens, logits)
        cache.commit(step, {seq: accepted.nodes})
        text, steps = [*text, *accepted.tokens, accepted.bonus_token], steps + 1
    return text, steps


if __name__ == "__main__":
    print("{} in {} steps".format(*main()))
