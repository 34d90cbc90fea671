"""Random forests, lengths and masks: the shapes of a case, with the awkward ones always among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..masks import Causal, Full, Mask, PaddedLeft, Sink, Tree, ValidLength, Window
from ..tree import TokenTree

Lengths: TypeAlias = tuple[tuple[int, int], ...]
"""``(q_len, kv_len)`` of each sequence."""

AWKWARD: Lengths = ((3, 41), (4, 0), (0, 5), (6, 4), (0, 0), (1, 33))
AWKWARD_TREES: Lengths = ((5, 5), (0, 7), (6, 38), (0, 0), (1, 34), (9, 20))


@dataclass(frozen=True)
class Batch:
    """What a mask is made for: lengths, and trees where they are given.

    Attributes
    ----------
    lengths : ``(q_len, kv_len)`` of each sequence
    trees : TokenTree of each sequence, or None to draw them
    """

    lengths: Lengths
    trees: tuple[TokenTree, ...] | None = None


MaskFactory: TypeAlias = Callable[[np.random.Generator, Batch], Mask]


def random_forest(rng: np.random.Generator, num_nodes: int, min_roots: int = 1) -> TokenTree:
    """Forest of ``num_nodes`` nodes in any order: deep, bushy or flat, ``min_roots`` roots at least."""
    is_flat, reach = rng.random() < 0.3, int(rng.choice([1, 2, 8]))
    parents = []
    for node in range(num_nodes):
        if node < min_roots or rng.random() < 0.05:
            parents.append(-1)
            continue
        distance = int(rng.integers(1, min(reach, node) + 1))
        parents.append(distance - 1 if is_flat else node - distance)
    return shuffled(rng, TokenTree.from_parents(np.array(parents, np.int32)))


def shuffled(rng: np.random.Generator, tree: TokenTree) -> TokenTree:
    """The same tree with its nodes in another order, parents after their children included."""
    order = np.append(rng.permutation(tree.num_nodes), -1)
    parents = np.empty(tree.num_nodes, np.int32)
    parents[order[:-1]] = order[tree.parents]
    return TokenTree.from_parents(parents)


def random_lengths(rng: np.random.Generator, num_seqs: int, *, tree: bool = False) -> Lengths:
    """Lengths of a batch in random order, with as many awkward ones as there is room for.

    Awkward are an empty sequence, rows without keys, keys without rows, and more rows than keys (not with
    ``tree``) or a tree without a prefix (with it): rows that see nothing, rows whose first columns are
    masked.
    """
    lengths = list(AWKWARD_TREES if tree else AWKWARD)[:num_seqs]
    while len(lengths) < num_seqs:
        q_len = int(rng.integers(0, 12))
        lengths.append((q_len, q_len + int(rng.integers(0, 60))))
    return tuple(lengths[index] for index in rng.permutation(num_seqs))


def random_trees(rng: np.random.Generator, lengths: Sequence[tuple[int, int]]) -> tuple[TokenTree, ...]:
    """Tree of each sequence: its last ``q_len`` nodes are the rows, up to 8 more are of earlier rounds."""
    trees = []
    for q_len, kv_len in lengths:
        num_nodes = int(rng.integers(q_len, min(kv_len, q_len + 8) + 1))
        trees.append(random_forest(rng, num_nodes, min_roots=2 if num_nodes == kv_len else 1))
    return tuple(trees)


def mask_kinds() -> dict[str, MaskFactory]:
    """Named factories of masks, ``(rng, batch) -> Mask``, that cover every leaf and the usual expressions.

    A name is the expression; those that contain ``tree`` need ``q_len <= kv_len``.
    """
    return dict(_KINDS)


def _full(rng: np.random.Generator, batch: Batch) -> Mask:
    return Full()


def _causal(rng: np.random.Generator, batch: Batch) -> Mask:
    return Causal()


def _tree(rng: np.random.Generator, batch: Batch) -> Mask:
    return Tree(random_trees(rng, batch.lengths) if batch.trees is None else batch.trees)


def _valid_length(rng: np.random.Generator, batch: Batch) -> Mask:
    return ValidLength(_random_lengths(rng, batch))


def _padded_left(rng: np.random.Generator, batch: Batch) -> Mask:
    return PaddedLeft(_random_lengths(rng, batch))


def _random_lengths(rng: np.random.Generator, batch: Batch) -> list[int]:
    return [int(rng.integers(0, max(lengths) + 1)) for lengths in batch.lengths]


def _window(rng: np.random.Generator, batch: Batch) -> Mask:
    return Window(int(rng.integers(1, 20)))


def _sink(rng: np.random.Generator, batch: Batch) -> Mask:
    return Sink(int(rng.integers(0, 6)))


def _both(left: MaskFactory, right: MaskFactory) -> MaskFactory:
    return lambda rng, batch: left(rng, batch) & right(rng, batch)


def _either(left: MaskFactory, right: MaskFactory) -> MaskFactory:
    return lambda rng, batch: left(rng, batch) | right(rng, batch)


_KINDS: dict[str, MaskFactory] = {
    "full": _full,
    "causal": _causal,
    "tree": _tree,
    "valid_length": _valid_length,
    "padded_left": _padded_left,
    "window": _window,
    "sink": _sink,
    "causal&window": _both(_causal, _window),
    "causal&(window|sink)": _both(_causal, _either(_window, _sink)),
    "causal&padded_left": _both(_causal, _padded_left),
    "causal&valid_length": _both(_causal, _valid_length),
    "causal&padded_left&(window|sink)": _both(_both(_causal, _padded_left), _either(_window, _sink)),
    "tree&window": _both(_tree, _window),
    "tree&sink": _both(_tree, _sink),
    "tree&(window|sink)": _both(_tree, _either(_window, _sink)),
    "tree&causal": _both(_tree, _causal),
    "window|sink": _either(_window, _sink),
    "full&window": _both(_full, _window),
}
