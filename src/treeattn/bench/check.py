"""Results against the float64 reference, a head of a sequence at a time: part of a large result can do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import IntArray
from ..masks import And, Leaf, Mask, Or, Tree
from ..reference import gather
from ..storage import RaggedKV, Storage
from ..testing import Case, assert_within_budget


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows of one head of one sequence, as a case of its own."""

    rows: slice
    head: int
    case: Case

    def compare(self, out: NDArray[Any], lse: NDArray[Any]) -> None:
        """Raise ``AssertionError`` unless this piece of ``out`` and ``lse`` is within the budget."""
        part = self.rows, slice(self.head, self.head + 1)
        try:
            assert_within_budget(out[part], lse[part], self.case)
        except AssertionError as error:
            raise AssertionError(f"rows {self.rows.start}:{self.rows.stop}, head {self.head}: {error}") from None


def pieces(case: Case, seqs: Iterable[int], heads: Iterable[int], max_rows: int | None = None) -> Iterator[Piece]:
    """Cut a case up: each head of each sequence, of it the last ``max_rows`` rows.

    The mask must be made of leaves that give the last rows of a sequence what they gave them among all its
    rows: `Full`, `Causal`, `Tree`, `Window`, `Sink`.
    """
    group = case.q.shape[1] // case.kv.kv_heads
    heads = list(heads)
    for seq in seqs:
        begin, end = (int(offset) for offset in case.q_indptr[seq : seq + 2])
        rows = slice(begin if max_rows is None else max(begin, end - max_rows), end)
        if rows.start == rows.stop:
            continue
        k, v = gather(case.kv, seq)
        mask, kv_indptr, q_indptr = _alone(case.mask, seq), _ends(len(k)), _ends(rows.stop - rows.start)
        for head in heads:
            kv = RaggedKV(k[:, head // group, None], v[:, head // group, None], kv_indptr)
            yield Piece(rows, head, Case(case.q[rows, head, None], kv, mask, q_indptr, case.sm_scale, case.parts))


def sample(case: Case, kv: Storage, max_rows: int = 32) -> Iterator[Piece]:
    """Cut out a few pieces: of the first, the last and the longest sequence, each of another head."""
    q_heads, last = case.q.shape[1], len(kv.kv_len) - 1
    for number, seq in enumerate(sorted({0, last, int(np.argmax(kv.kv_len))})):
        yield from pieces(case, [seq], [(number * (q_heads // 2 + 1) + number) % q_heads], max_rows)


def _alone(mask: Mask, seq: int) -> Mask:
    def own(leaf: Leaf) -> Mask:
        return Tree(leaf.trees_of[seq]) if isinstance(leaf, Tree) else leaf

    alone: Mask = mask.fold(own, And, Or)
    return alone


def _ends(length: int) -> IntArray:
    return np.array([0, length], np.int32)
