"""Who sees whom, by the definitions: one small function a leaf mask, trees walked from child to parent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError, UnsupportedError
from ..masks import And, Causal, Full, Mask, Or, PaddedLeft, Sink, Tree, ValidLength, Window
from ..tree import TokenTree

BoolArray: TypeAlias = NDArray[np.bool_]
Index: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class _Sequence:
    seq: int
    q_len: int
    kv_len: int
    parents: list[int] | None
    of_prefix: Index

    @property
    def rows(self) -> Index:
        return np.arange(self.q_len)[:, None]

    @property
    def cols(self) -> Index:
        return np.arange(self.kv_len)[None, :]

    @property
    def positions(self) -> tuple[Index, Index]:
        """Positions of rows ``[q_len, 1]`` and columns ``[1, kv_len]``: by index, and in a tree by depth."""
        of_cols = self.of_prefix
        if self.parents is not None:
            prefix_len = self.kv_len - len(self.parents)
            depths = [len(_path(self.parents, node)) - 1 for node in range(len(self.parents))]
            first = int(of_cols[prefix_len]) if self.parents else 0
            of_cols = np.array([*of_cols[:prefix_len], *(first + depth for depth in depths)], np.int64)
        if self.q_len <= self.kv_len:
            return of_cols[self.kv_len - self.q_len :, None], of_cols[None, :]
        return self.rows + self.kv_len - self.q_len, of_cols[None, :]


def visible(mask: Mask, seq: int, q_len: int, kv_len: int, of_prefix: Index | None = None) -> BoolArray:
    """Whether each row of a sequence sees each column.

    Parameters
    ----------
    mask : Mask
        The expression, for the whole batch.
    seq : int
        Sequence of the batch: which tree, which lengths.
    q_len, kv_len : int
        Rows and columns of this sequence.
    of_prefix : int64 ``[kv_len]``, optional
        Positions of the columns were there no tree; their indices by default.

    Returns
    -------
    visible : bool ``[q_len, kv_len]``
    """
    return _evaluate(mask, _sequence(mask, seq, q_len, kv_len, of_prefix))


def positions(
    mask: Mask, seq: int, q_len: int, kv_len: int, of_prefix: Index | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions of rows ``[q_len]`` and columns ``[kv_len]``; parameters as in `visible`."""
    of_rows, of_cols = _sequence(mask, seq, q_len, kv_len, of_prefix).positions
    return of_rows[:, 0], of_cols[0]


def _sequence(mask: Mask, seq: int, q_len: int, kv_len: int, of_prefix: Index | None) -> _Sequence:
    columns = np.arange(kv_len) if of_prefix is None else of_prefix
    return _Sequence(seq, q_len, kv_len, _parents(mask, seq, q_len, kv_len), columns)


def _evaluate(mask: Mask, at: _Sequence) -> BoolArray:
    if isinstance(mask, And):
        return _evaluate(mask.left, at) & _evaluate(mask.right, at)
    if isinstance(mask, Or):
        return _evaluate(mask.left, at) | _evaluate(mask.right, at)
    return LEAVES[type(mask)](mask, at)


def _full(mask: Full, at: _Sequence) -> BoolArray:
    return np.ones((at.q_len, at.kv_len), np.bool_)


def _causal(mask: Causal, at: _Sequence) -> BoolArray:
    return at.cols <= at.kv_len - at.q_len + at.rows


def _valid_length(mask: ValidLength, at: _Sequence) -> BoolArray:
    length = int(mask.lengths[at.seq])
    return (at.rows < length) & (at.cols < length)


def _padded_left(mask: PaddedLeft, at: _Sequence) -> BoolArray:
    length = int(mask.lengths[at.seq])
    return (at.rows >= at.q_len - length) & (at.cols >= at.kv_len - length)


def _window(mask: Window, at: _Sequence) -> BoolArray:
    of_rows, of_cols = at.positions
    return of_cols > of_rows - mask.size


def _sink(mask: Sink, at: _Sequence) -> BoolArray:
    of_rows, of_cols = at.positions
    return (of_cols < mask.size) | np.zeros_like(of_rows, np.bool_)


def _tree(mask: Tree, at: _Sequence) -> BoolArray:
    parents = at.parents or []
    prefix_len, first_node = at.kv_len - len(parents), len(parents) - at.q_len
    seen = np.zeros((at.q_len, at.kv_len), np.bool_)
    seen[:, :prefix_len] = True
    for row in range(at.q_len):
        for node in _path(parents, first_node + row):
            seen[row, prefix_len + node] = True
    return seen


LEAVES: dict[type[Mask], Callable[[Any, _Sequence], BoolArray]] = {
    Full: _full,
    Causal: _causal,
    ValidLength: _valid_length,
    PaddedLeft: _padded_left,
    Window: _window,
    Sink: _sink,
    Tree: _tree,
}


def _path(parents: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path


def _parents(mask: Mask, seq: int, q_len: int, kv_len: int) -> list[int] | None:
    found = [trees[seq] for trees in _trees(mask)]
    if not found:
        return None
    if len(found) > 1:
        raise UnsupportedError(f"mask: expected at most one Tree, got {len(found)}; join their nodes in one forest")
    parents: list[int] = found[0].parents.tolist()
    if not q_len <= len(parents) <= kv_len:
        raise ShapeError(
            f"trees: expected q_len {q_len} to kv_len {kv_len} nodes in sequence {seq}, got {len(parents)}; "
            "rows are the last nodes, nodes the last columns"
        )
    return parents


def _trees(mask: Mask) -> Iterator[tuple[TokenTree, ...]]:
    if isinstance(mask, And | Or):
        yield from _trees(mask.left)
        yield from _trees(mask.right)
    elif isinstance(mask, Tree):
        yield mask.trees_of
