"""What a sequence brings to its row tiles, and the columns a tile visits, worked out inside a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..kernels.emit import Buffer, Expr, greater, i32, let, put, smaller, when
from ..kernels.walk import SPAN_FIELDS

MOST_SPANS = 3


@dataclass(frozen=True)
class SequenceRows:
    """What is known of a sequence; ``bounds(row)`` are those of the mask's leaves, each rising or falling with rows."""

    q_begin: Expr
    q_len: Expr
    kv_len: Expr
    page_begin: Expr
    prefix_len: Expr
    bounds: Callable[[Expr], Sequence[Expr]]
    node_begin: Expr = 0
    moves: tuple[Expr, Expr, Expr, Expr] | None = None


def tile_spans(tests: Sequence[str], seq: SequenceRows, first: Expr, last: Expr) -> list[tuple[Expr, Expr, int]]:
    """Return the columns the tile of rows ``first .. last`` visits: ``(begin, end, full)``, as `masks.tile_spans`."""
    leaves = [_leaf_spans(k, test, seq, first, last) for k, test in enumerate(tests)]
    begin, end, full_begin, full_end = leaves[0]
    for other in leaves[1:]:
        begin, full_begin = greater(begin, other[0]), greater(full_begin, other[2])
        end, full_end = smaller(end, other[1]), smaller(full_end, other[3])
    full_begin = let(greater(begin, smaller(full_begin, end)))
    full_end = let(smaller(end, greater(full_end, full_begin)))
    return [(begin, full_begin, 0), (full_begin, full_end, 1), (full_end, end, 0)]


def _leaf_spans(k: int, test: str, seq: SequenceRows, first: Expr, last: Expr) -> tuple[Expr, Expr, Expr, Expr]:
    """Columns some row may see, and columns every row sees."""
    if test == "full":
        return i32(0), seq.kv_len, i32(0), seq.kv_len
    if test == "tree":
        return i32(0), seq.kv_len, i32(0), seq.prefix_len
    ends = [let(seq.bounds(row)[k]) for row in (first, last)]
    low, high = (let(smaller(greater(edge, i32(0)), seq.kv_len)) for edge in (smaller(*ends), greater(*ends)))
    return (i32(0), high, i32(0), low) if test == "col_below" else (low, seq.kv_len, high, seq.kv_len)


def store_spans(spans: Sequence[tuple[Expr, Expr, int]], table: Buffer, count: Buffer, at: int) -> None:
    """Append the spans that are not empty to ``table``, which has ``count[at]`` of them."""
    for start, end, full in spans:
        with when(start < end):
            for i, value in enumerate((start, end, i32(full))):
                put(table, count[at] * SPAN_FIELDS + i, value)
            put(count, at, count[at] + 1)
