"""Sequences as the cache keeps them, and the page table of several at one moment."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..arrays import IntArray
from ..checks import integer
from ..errors import CacheError
from ..tree import TokenTree

if TYPE_CHECKING:
    from .step import Step

chain = lru_cache(maxsize=256)(TokenTree.chain)
"""Chains of a few lengths come up in every step."""


@dataclass(slots=True)
class CachedSequence:
    """Tokens of a sequence: committed ones, and behind them the nodes of a tree that is not committed yet.

    ``length`` counts committed tokens by position. Of those, ``dropped`` are gone after the first ``kept``, in whole
    pages, so a *column* (place among what is left) is a position less what was dropped before it.
    """

    pages: array[int] = field(default_factory=lambda: array("i"))
    length: int = 0
    kept: int = 0
    dropped: int = 0
    pending: TokenTree | None = None
    step: Step | None = None

    @property
    def num_pending(self) -> int:
        """Number of uncommitted tokens."""
        return self.pending.num_nodes if self.pending else 0

    @property
    def prefix_len(self) -> int:
        """Number of committed columns."""
        return self.length - self.dropped

    @property
    def kv_len(self) -> int:
        """Number of columns, uncommitted ones included."""
        return self.prefix_len + self.num_pending

    def all_slots(self, page_size: int) -> NDArray[np.int64]:
        """Return the slots of the committed columns, int64 ``[prefix_len]``."""
        pages = np.array(self.pages, np.int64)[:, None] * page_size
        return (pages + np.arange(page_size)).ravel()[: self.prefix_len]

    def slots(self, columns: NDArray[np.int64], page_size: int) -> list[int]:
        """Return the slots of a few columns."""
        return [self.pages[column // page_size] * page_size + column % page_size for column in columns.tolist()]

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` committed tokens, or raise and change nothing."""
        length = integer(length, "length", 0, self.length)
        end = self.kept + self.dropped
        if self.kept < length < end:
            raise CacheError(
                f"length: expected at most {self.kept} or at least {end}, got {length}; the tokens between were dropped"
            )
        if length <= self.kept:
            self.kept = self.dropped = 0
        self.length = length

    def drop_outside(self, window: int, sink: int, page_size: int) -> list[int]:
        """Drop the whole pages that the next tokens, in a window and with a sink, see nothing of; return them."""
        begin = -(-sink // page_size) * page_size
        end = (self.length - window + 1) // page_size * page_size
        if begin >= end:
            return []
        if self.dropped:
            gap = self.kept, self.kept + self.dropped
            if begin > gap[1] or end < gap[0]:
                return []  # there may be one gap only
            begin, end = min(begin, gap[0]), max(end, gap[1])
        gone = slice(begin // page_size, (end - self.dropped) // page_size)
        pages = self.pages[gone].tolist()
        del self.pages[gone]
        self.kept, self.dropped = begin, end - begin
        return pages

    def trim(self, page_size: int) -> list[int]:
        """Let go of the pages behind the columns there are, and return them."""
        needed = -(-self.kv_len // page_size)
        excess = self.pages[needed:].tolist()
        del self.pages[needed:]
        return excess


@dataclass(frozen=True)
class Snapshot:
    """The page table, lengths and trees of several sequences when a step begins, its new rows included."""

    page_size: int
    page_ids: IntArray
    num_pages: tuple[int, ...]
    lengths: tuple[int, ...]
    kept: tuple[int, ...]
    dropped: tuple[int, ...]
    trees: tuple[TokenTree, ...]
    q_len: tuple[int, ...]

    @classmethod
    def of(cls, sequences: Sequence[CachedSequence], q_len: Sequence[int], page_size: int) -> Snapshot:
        """Copy what the cache knows of ``sequences``, of which the last ``q_len`` columns are new."""
        return cls(
            page_size=page_size,
            page_ids=np.frombuffer(b"".join([seq.pages for seq in sequences]), np.int32),
            num_pages=tuple([len(seq.pages) for seq in sequences]),
            lengths=tuple([seq.length for seq in sequences]),
            kept=tuple([seq.kept for seq in sequences]),
            dropped=tuple([seq.dropped for seq in sequences]),
            trees=tuple([seq.pending or chain(0) for seq in sequences]),
            q_len=tuple(q_len),
        )

    @cached_property
    def page_indptr(self) -> IntArray:
        """Offsets of each sequence's pages, int32 ``[num_seqs + 1]``."""
        return offsets(self.num_pages)

    @cached_property
    def q_indptr(self) -> IntArray:
        """Offsets of each sequence's new rows, int32 ``[num_seqs + 1]``."""
        return offsets(self.q_len)

    @cached_property
    def kv_len(self) -> IntArray:
        """Columns of each sequence, int32 ``[num_seqs]``."""
        nodes = [tree.num_nodes for tree in self.trees]
        return np.array(self.lengths, np.int32) - np.array(self.dropped, np.int32) + np.array(nodes, np.int32)

    @cached_property
    def last_page_len(self) -> IntArray:
        """Slots used of each last page, int32 ``[num_seqs]``; 0 without pages."""
        last: IntArray = np.where(self.kv_len > 0, (self.kv_len - 1) % self.page_size + 1, 0).astype(np.int32)
        return last

    @cached_property
    def positions(self) -> IntArray:
        """Position of each new row, int32 ``[q_total]``: the committed length plus the depth in the tree."""
        parts = [
            length + tree.depth[tree.num_nodes - new :]
            for length, tree, new in zip(self.lengths, self.trees, self.q_len, strict=True)
        ]
        return np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)

    @cached_property
    def slots(self) -> NDArray[np.int64]:
        """Slot of each new row, int64 ``[q_total]``."""
        q_len = np.array(self.q_len, np.int64)
        index = np.arange(self.q_indptr[-1]) - np.repeat(self.q_indptr[1:] - self.kv_len, q_len)
        page, place = np.divmod(index, self.page_size)
        ids = self.page_ids[np.repeat(self.page_indptr[:-1], q_len) + page].astype(np.int64)
        slots: NDArray[np.int64] = ids * self.page_size + place
        return slots

    @property
    def is_causal(self) -> bool:
        """Whether every tree is a chain."""
        return all(tree.is_chain for tree in self.trees)


def offsets(counts: Sequence[int]) -> IntArray:
    """Return where each of consecutive parts begins, and the end: int32 ``[len(counts) + 1]``."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int32)
