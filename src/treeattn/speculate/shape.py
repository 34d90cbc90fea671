"""The best fixed tree for a drafter whose acceptance by depth and rank has been measured."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arrays import to_numpy
from ..checks import integer
from ..errors import DTypeError, IndexRangeError, ShapeError
from ..tree import TokenTree


def best_shape(acceptance: ArrayLike, budget: int) -> TokenTree:
    """Return the tree of ``budget`` nodes with the most accepted tokens to be expected.

    A node is accepted if its whole path is, so its chance is the product of the rates along the path, and the expected
    number of accepted tokens is the sum of the nodes' chances. No node's chance exceeds its parent's: taking the
    likeliest node that can be added, over and over, therefore takes the likeliest of all, and no other tree of the
    size can have a larger sum (as for Sequoia's trees, Chen et al. 2024, arXiv:2402.12374, without its dynamic
    program, which also bounds the depth).

    Parameters
    ----------
    acceptance : floats ``[depth, rank]``
        Rate at which the drafter's guess of that rank (0 is its best) at that depth was the right token, where its
        parent was right. The rates of a depth sum to at most 1.
    budget : int
        Nodes, the root (the last accepted token) included.

    Returns
    -------
    TokenTree
        Parents before children, likeliest first; its labels are the ranks, None for the root. Smaller than ``budget``
        where no more guesses have a rate above 0.

    Raises
    ------
    ShapeError, DTypeError
        Rates that are no probabilities.
    IndexRangeError
        A budget below 1.

    Examples
    --------
    >>> best_shape([[0.6, 0.3], [0.6, 0.3]], 4).parents.tolist()
    [-1, 0, 1, 0]
    """
    rates = _check_rates(acceptance)
    budget = integer(budget, "budget")
    parents: list[int] = [-1]
    ranks: list[int | None] = [None]
    heap: list[tuple[float, int, int, int]] = []  # -chance, parent, depth, rank

    def push(parent: int, chance: float, depth: int) -> None:
        if depth < len(rates):
            for rank, rate in enumerate(rates[depth].tolist()):
                if chance * rate > 0:
                    heapq.heappush(heap, (-chance * rate, parent, depth, rank))

    push(0, 1.0, 0)
    while heap and len(parents) < budget:
        negative, parent, depth, rank = heapq.heappop(heap)
        parents.append(parent)
        ranks.append(rank)
        push(len(parents) - 1, -negative, depth + 1)
    return TokenTree(parents, ranks)


def expected_accepted(tree: TokenTree, acceptance: ArrayLike) -> float:
    """Return the accepted tokens to be expected of a tree whose labels are ranks, the root not counted.

    Raises
    ------
    TreeAttnError
        Rates that are no probabilities, or a tree whose labels are no ranks among them.
    """
    rates = _check_rates(acceptance)
    if not isinstance(tree, TokenTree) or not (tree.labels or tree.num_nodes == 0):
        raise DTypeError(f"tree: expected a TokenTree with ranks as labels, as best_shape makes them, got {tree!r:.60}")
    most = len(rates)
    if int(tree.depth.max(initial=0)) > most:
        raise IndexRangeError(f"tree: expected {most} levels below the root as acceptance has, got {tree.depth.max()}")
    chances = np.ones(tree.num_nodes)
    below = np.flatnonzero(tree.parents >= 0)
    for node in below[np.argsort(tree.depth[below], kind="stable")].tolist():
        rank = integer(tree.labels[node], f"label of node {node}", 0, rates.shape[1] - 1)  # type: ignore[index]
        chances[node] = chances[tree.parents[node]] * rates[tree.depth[node] - 1, rank]
    return float(chances[below].sum())


def _check_rates(acceptance: ArrayLike) -> NDArray[np.float64]:
    given = to_numpy(acceptance, "acceptance")
    if given.dtype.kind not in "fiub":
        raise DTypeError(f"acceptance: expected numbers, got dtype {given.dtype}")
    rates = given.astype(np.float64)
    if rates.ndim != 2 or not ((rates >= 0) & (rates <= 1)).all():
        raise ShapeError(f"acceptance: expected rates in [0, 1], [depth, rank], got shape {list(rates.shape)}")
    if rates.size and rates.sum(axis=1).max() > 1 + 1e-6:
        at = int(rates.sum(axis=1).argmax())
        raise ShapeError(
            f"acceptance: expected rates that sum to at most 1 at each depth, got {rates[at].sum()} at depth {at}; "
            "only one guess can be right"
        )
    return rates
