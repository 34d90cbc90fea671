"""Token trees: which draft token continues which.

A tree is its ``parents`` array. A node sees its ancestors and itself; the rest follows: depth gives
positions, and preorder ``intervals`` answer "does i see j" by two comparisons instead of a walk. Nothing
here recurses, so a chain of 100,000 nodes is as welcome as a bushy tree.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import DTypeError, IndexRangeError, ShapeError, UnsupportedError

MAX_NODES = 2**31 - 1
MAX_DRAWING = 20_000_000  # characters; a drawing grows with the sum of all depths


class TokenTree:
    """A tree or forest of draft tokens: immutable, equal and hashed by its parents.

    Parameters
    ----------
    parents
        Integers ``[n]``, kept as read-only int32: the node each node continues, in any order; -1 for a root.
    labels
        One label a node (a token, a word), kept as a tuple; no part of equality.

    Raises
    ------
    DTypeError, IndexRangeError, ShapeError
        Parents that are no ints; out of ``[-1, n)``; not one-dimensional, or in a cycle.

    Examples
    --------
    >>> tree = TokenTree.from_parents([-1, 0, 0, 1])
    >>> tree.depth.tolist(), tree.path(3), tree.leaves()
    ([0, 1, 1, 2], [0, 1, 3], [2, 3])
    >>> print(tree.render())
    0
    ├── 1
    │   └── 3
    └── 2
    """

    parents: NDArray[np.int32]
    labels: tuple[Hashable, ...] | None

    def __init__(self, parents: ArrayLike, labels: Iterable[Hashable] | None = None) -> None:
        checked = _check_parents(parents)
        kept = None if labels is None else _check_labels(labels, checked.size)
        _check_acyclic(checked)
        self.__dict__.update(parents=checked, labels=kept)

    @classmethod
    def from_parents(cls, parents: ArrayLike) -> TokenTree:
        """Tree of a parents array ``[n]``: any node order, -1 for a root, forests and ``[]`` allowed."""
        return cls(parents)

    @classmethod
    def from_paths(cls, paths: Iterable[Iterable[Hashable]]) -> TokenTree:
        """Tree (trie) of token sequences: equal prefixes become shared nodes.

        Nodes are numbered by first appearance, path after path, and ``labels`` keeps their tokens. First
        tokens are roots, so paths that begin differently give a forest; an empty path adds nothing.

        >>> tree = TokenTree.from_paths([["the", "cat"], ["the", "dog"]])
        >>> tree.parents.tolist(), tree.labels
        ([-1, 0, 0], ('the', 'cat', 'dog'))
        """
        nodes: dict[tuple[int, Hashable], int] = {}  # (parent, label): node
        for number, path in enumerate(_tuples(paths, "paths")):
            node = -1
            try:
                for label in path:
                    node = nodes.setdefault((node, label), len(nodes))
            except TypeError as error:
                raise DTypeError(_wrong(f"paths[{number}]", "hashable tokens", error, "pass it flat")) from None
        return cls([parent for parent, _ in nodes], [label for _, label in nodes])

    @classmethod
    def from_choices(cls, choices: Iterable[Iterable[int]]) -> TokenTree:
        """Tree of Medusa's rank paths: ``[0, 2]`` is the third best token after the best one.

        Node 0 is the root (the last accepted token), which choices leave out; node i + 1 is ``choices[i]``.
        Any order will do, but the parent of every path must be there.

        >>> TokenTree.from_choices([[0], [1], [0, 0], [0, 1]]).parents.tolist()
        [-1, 0, 0, 1, 1]
        """
        nodes: dict[tuple[int, ...], int] = {(): 0}
        for number, path in enumerate(_tuples(choices, "choices")):
            name = f"choices[{number}]"
            _check_ranks(path, name)
            if path in nodes:
                raise ShapeError(_wrong(name, "a new path", f"choices[{nodes[path] - 1}] again", "drop one"))
            nodes[path] = number + 1
        for path, node in nodes.items():
            if path[:-1] not in nodes:
                name, parent = f"choices[{node - 1}]", list(path[:-1])
                raise ShapeError(_wrong(name, f"its parent {parent} in choices", "none", f"add {parent}"))
        return cls([nodes[path[:-1]] if path else -1 for path in nodes])

    @classmethod
    def from_mask(cls, mask: ArrayLike) -> TokenTree:
        """Tree of a visibility mask: entry (i, j) says that node i sees node j, itself included.

        Parameters
        ----------
        mask
            Dense bool ``[n, n]``, or packed in little-endian bit order: uint8 ``[n, ceil(n / 8)]`` as from
            ``np.packbits(mask, axis=1, bitorder="little")``, or uint32 / uint64 ``[n, ceil(n / bits)]``.
            Column j is bit ``j % bits``, counted from the lowest, of word ``j // bits``; bits past n are 0.
            A mask that is no forest's is refused with a ShapeError that names the nodes at fault.
        """
        seen = _unpack_mask(mask)
        _check_pairs(seen)
        rank = seen.sum(axis=1, dtype=np.int32)  # depth + 1
        ancestors = np.where(seen & ~np.eye(rank.size, dtype=np.bool_), rank, 0)
        parents = np.where(rank > 1, ancestors.argmax(axis=1), -1) if rank.size else rank
        _check_rows(seen, parents)
        return cls(parents)

    @classmethod
    def chain(cls, num_nodes: int) -> TokenTree:
        """Tree of ``num_nodes`` tokens in a row: plain decoding."""
        return cls(np.arange(-1, _count(num_nodes) - 1))

    @classmethod
    def star(cls, num_nodes: int) -> TokenTree:
        """Tree of ``num_nodes`` nodes: root 0, and all others its children."""
        return cls(np.minimum(np.arange(_count(num_nodes)), 1) - 1)

    @property
    def num_nodes(self) -> int:
        """Number of nodes n."""
        return self.parents.size

    @property
    def depth(self) -> NDArray[np.int32]:
        """Number of ancestors of each node, read-only int32 ``[n]``; a root has depth 0."""
        return self._layout[0]

    @property
    def intervals(self) -> NDArray[np.int32]:
        """Preorder (enter, exit) of each node, read-only int32 ``[n, 2]``.

        Node i sees node j exactly if ``enter[j] <= enter[i] < exit[j]``. Siblings are numbered in node order;
        enter is a permutation of 0 .. n-1, the identity where nodes already stand in depth-first order.
        """
        return self._layout[1]

    @cached_property
    def is_chain(self) -> bool:
        """Whether node i continues node i - 1 for every i, so that the mask is the causal one."""
        return bool((self.parents == np.arange(-1, self.num_nodes - 1)).all())

    def path(self, node: int) -> list[int]:
        """Nodes from the root down to ``node``, both included."""
        node = _index(node, "node")
        if not 0 <= node < self.num_nodes:
            raise IndexRangeError(_wrong("node", f"int in [0, {self.num_nodes})", node, "nodes count from 0"))
        path = []
        while node >= 0:
            path.append(node)
            node = int(self.parents[node])
        return path[::-1]

    def leaves(self) -> list[int]:
        """Nodes without children, in node order."""
        is_leaf = np.ones(self.num_nodes + 1, np.bool_)
        is_leaf[self.parents] = False  # a root's -1 lands on the extra entry
        return [int(node) for node in np.flatnonzero(is_leaf[:-1])]

    def mask(self) -> NDArray[np.bool_]:
        """Dense bool ``[n, n]``: entry (i, j) says that node i sees node j. A new array at each call."""
        enter, exit_ = self.intervals.T
        mask: NDArray[np.bool_] = (enter <= enter[:, None]) & (enter[:, None] < exit_)
        return mask

    def render(self, labels: Iterable[Hashable] | None = None) -> str:
        """Text drawing, a line a node in depth-first order, refused past 20 million characters.

        Shows ``labels`` (one a node), or the tree's own labels, or node numbers where it has none.
        """
        if labels is None:
            labels = self.labels or range(self.num_nodes)
        texts = [_one_line(label) for label in _check_labels(labels, self.num_nodes)]
        if 4 * int(self.depth.sum(dtype=np.int64)) > MAX_DRAWING:
            raise UnsupportedError(_wrong("render", f"at most {MAX_DRAWING} characters", self, "draw a part"))
        lines = []
        enter, exit_ = self.intervals.T
        rails: list[str] = []  # what each ancestor's level shows beside the lines below it
        for node in enter.argsort():
            parent, depth = self.parents[node], self.depth[node]
            is_last = exit_[node] == exit_[parent]
            branch = "" if depth == 0 else "└── " if is_last else "├── "
            rails[max(depth - 1, 0) :] = [branch]
            lines.append("".join(rails) + texts[node])
            rails[-1] = "" if depth == 0 else "    " if is_last else "│   "
        return "\n".join(lines)

    @cached_property
    def _layout(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        return lay_out(self.parents)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenTree) and np.array_equal(self.parents, other.parents)

    def __hash__(self) -> int:
        return hash(self.parents.tobytes())

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"TokenTree is immutable; make a new one instead of setting {name}")

    def __reduce__(self) -> tuple[type[TokenTree], tuple[Any, ...]]:
        return type(self), (self.parents, self.labels)  # unpickled arrays would come back writable

    def __repr__(self) -> str:
        if self.num_nodes <= 16:
            return f"TokenTree.from_parents({self.parents.tolist()})"
        return f"<TokenTree of {self.num_nodes} nodes, {self.depth.max() + 1} deep>"


def lay_out(parents: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return depth ``[n]`` and preorder intervals ``[n, 2]`` of a forest, by pointer doubling.

    After k steps a node knows its ancestors, and its descendants, less than 2**k levels away.
    """
    n = len(parents)
    top = n  # above all roots
    parent = np.append(np.where(parents < 0, top, parents), top).astype(np.intp)
    ups, up = [], parent
    depth, size = (parent < top).astype(np.int32), np.append(np.ones(n, np.int32), np.int32(0))
    while up.min(initial=top) < top:
        ups.append(up)
        depth += depth[up]
        size[:n] += np.bincount(up, size, n + 1)[:n].astype(np.int32)
        up = up[up]
    enter = np.zeros(n + 1, np.int32)  # for now the distance from a parent's enter, later the sum of them
    siblings = parent[:-1].argsort(kind="stable")
    ends = np.cumsum(size[siblings], dtype=np.int32)
    family = parent[siblings]
    first = np.append(True, family[1:] != family[:-1])[:n]
    begins = ends - size[siblings]
    enter[siblings] = begins - np.repeat(begins[first], np.diff(np.append(np.flatnonzero(first), n)))
    enter[:-1] += parents >= 0
    for up in ups:
        enter += enter[up]
    intervals = np.stack([enter[:-1], enter[:-1] + size[:-1]], axis=1)
    return _frozen(depth[:-1]), _frozen(intervals)


def _frozen(array: NDArray[np.int32]) -> NDArray[np.int32]:
    array.setflags(write=False)
    return array


def _wrong(name: str, wanted: str, got: object, remedy: str) -> str:
    return f"{name}: expected {wanted}, got {got}; {remedy}"


def _host_array(value: Any, name: str) -> NDArray[Any]:
    try:
        if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
            return np.from_dlpack(value)
        return np.asarray(value)
    except ValueError:
        raise ShapeError(_wrong(name, "rows of one length", "ragged ones", "make them equal")) from None
    except (TypeError, BufferError, RuntimeError) as error:
        raise DTypeError(_wrong(name, "an array on the host", error, "copy it to the host")) from None


def _check_parents(parents: ArrayLike) -> NDArray[np.int32]:
    array = _host_array(parents, "parents")
    n = array.size
    if n and array.dtype.kind not in "iu":
        raise DTypeError(_wrong("parents", "ints", array.dtype, "pass node numbers, -1 for a root"))
    if array.ndim != 1:
        raise ShapeError(_wrong("parents", "shape [n]", list(array.shape), "pass one tree's parents, flat"))
    if n and (array.min() < -1 or array.max() >= n):
        node = ((array < -1) | (array >= n)).argmax()
        got = f"{array[node]} at node {node}"
        raise IndexRangeError(_wrong("parents", f"int in [-1, {n})", got, "count from each tree's first node"))
    return _frozen(np.array(array, np.int32))


def _check_acyclic(parents: NDArray[np.int32]) -> None:
    if (parents < np.arange(parents.size, dtype=np.int32)).all():
        return
    # Pointer doubling: after k steps up[i] is the 2**k-th ancestor; the entry at -1 stays above all roots.
    up = np.append(parents, np.int32(-1))
    for _ in range(parents.size.bit_length() + 1):
        if up.max() < 0:
            return
        up = up[up]
    cycle = f"the cycle {_cycle(parents, int(up.max()))} (node -> parent)"
    raise ShapeError(_wrong("parents", "a forest", cycle, "give one of its nodes the parent -1"))


def _cycle(parents: NDArray[np.int32], start: int) -> str:
    nodes, node = [start], int(parents[start])
    while node != start:
        nodes.append(node)
        node = int(parents[node])
    more = f" -> ({len(nodes) - 8} more)" if len(nodes) > 8 else ""
    return " -> ".join(map(str, nodes[:8])) + f"{more} -> {start}"


def _tuples(paths: Iterable[Any], name: str) -> list[tuple[Any, ...]]:
    # tolist, because the elements of a torch row are tensors, which hash by identity
    try:
        return [tuple(path.tolist() if hasattr(path, "tolist") else path) for path in paths]
    except TypeError:
        raise DTypeError(_wrong(name, "a list of lists", f"{paths!r:.60}", "write [[0], [0, 1]]")) from None


def _check_ranks(path: tuple[Any, ...], name: str) -> None:
    if not path:
        raise ShapeError(_wrong(name, "at least one rank", "[]", "leave it out, the root is added"))
    for rank in path:
        if not isinstance(rank, (int, np.integer)) or isinstance(rank, bool):
            raise DTypeError(_wrong(name, "int ranks", repr(rank), "rank 0 is a head's best token"))
        if rank < 0:
            raise IndexRangeError(_wrong(name, "ranks >= 0", rank, "strip the padding"))


def _index(value: int, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise DTypeError(_wrong(name, "int", f"{value!r:.60}", "pass a whole number")) from None


def _count(num_nodes: int) -> int:
    if (count := _index(num_nodes, "num_nodes")) < 0:
        raise ShapeError(_wrong("num_nodes", "int >= 0", count, "0 makes an empty tree"))
    if count > MAX_NODES:
        raise IndexRangeError(_wrong("num_nodes", f"at most {MAX_NODES}", count, "nodes are counted in int32"))
    return count


def _check_labels(labels: Iterable[Hashable], num_nodes: int) -> tuple[Hashable, ...]:
    try:
        checked = tuple(labels)
    except TypeError:
        raise DTypeError(_wrong("labels", "a list", f"{labels!r:.60}", "pass one a node, in order")) from None
    if len(checked) != num_nodes:
        raise ShapeError(_wrong("labels", f"{num_nodes} of them", len(checked), "pass one a node, in order"))
    return checked


def _one_line(label: Hashable) -> str:
    text = str(label)
    return text if text.isprintable() else repr(text)[1:-1]


def _unpack_mask(mask: ArrayLike) -> NDArray[np.bool_]:
    array = _host_array(mask, "mask")
    bits = {"bool": 1, "uint8": 8, "uint32": 32, "uint64": 64}.get(array.dtype.name)
    if bits is None:
        wanted, remedy = ("bool, or packed uint8, uint32 or uint64", "use mask.astype(bool) or words.view(np.uint32)")
        raise DTypeError(_wrong("mask", wanted, array.dtype, remedy))
    n = len(array) if array.ndim else 0
    shape = [n, -(-n // bits)]
    if list(array.shape) != shape:
        remedy = "pass bool [n, n], or packed [n, ceil(n / bits)]"
        raise ShapeError(_wrong("mask", f"{array.dtype} {shape}", list(array.shape), remedy))
    if bits == 1:
        return array
    rows = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).view(np.uint8)
    seen = np.unpackbits(rows, axis=1, bitorder="little").astype(np.bool_)
    if seen[:, n:].any():
        node, bit = np.argwhere(seen[:, n:])[0]
        got, remedy = f"1 in bit {n + bit} of node {node}", 'pack with np.packbits(..., bitorder="little")'
        raise ShapeError(_wrong("mask", f"0 in the bits from {n} on", got, remedy))
    return seen[:, :n]


def _check_pairs(seen: NDArray[np.bool_]) -> None:
    blind = np.flatnonzero(~seen.diagonal())
    if blind.size:
        got = f"{blind.size} that do not, {blind[:8].tolist()} first"
        raise ShapeError(_wrong("mask", "nodes that see themselves", got, "set the diagonal"))
    mutual = np.argwhere(np.triu(seen & seen.T, 1))
    if len(mutual):
        got = f"nodes {mutual[0, 0]} and {mutual[0, 1]} that see each other"
        raise ShapeError(_wrong("mask", "a forest", got, "clear one of the two"))


def _check_rows(seen: NDArray[np.bool_], parents: NDArray[Any]) -> None:
    """Check that each row is its parent's plus the node itself; the parent is the deepest node it sees."""
    children = np.flatnonzero(parents >= 0)
    own, inherited = seen[children], seen[parents[children]]
    own[np.arange(children.size), children] = False
    for fault, got, remedy in (
        (inherited & ~own, "node {0} that sees {1}, but not {2} that {1} sees", "set mask[{0}, {2}]"),
        (own & ~inherited, "node {0} that sees {1} and {2}, not on one path", "clear one of the two"),
    ):
        if fault.any():
            row, other = np.argwhere(fault)[0]
            names = children[row], parents[children[row]], other
            raise ShapeError(_wrong("mask", "a forest", got.format(*names), remedy.format(*names)))
