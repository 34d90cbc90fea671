"""Moving keys and values: append, copy a page, compact, fetch, merge of states, and RoPE on fused q, k, v.

With TVM's signatures. Rows are copied as vectors; only what is worth waking other threads for runs on them. Where no
PrimFunc is asked for, `treeattn.cache_ops` does the same in NumPy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from ..kernels.emit import (
    Buffer,
    Expr,
    PrimFunc,
    allocate,
    either,
    flattened,
    i64,
    let,
    loop,
    matched,
    parallel,
    prim_func,
    put,
    scalar,
    span,
    symbol,
    tensor,
    when,
)  # fmt: skip
from ..kernels.vectors import pieces

PARALLEL_BYTES = 512 * 1024
"""A launch on all threads costs what copying about as much on one does."""


def _spread(count: Expr, rows: Expr, row_bytes: int, body: Callable[[Expr], None]) -> None:
    """Emit ``body(i)`` for ``i < count``, which in all copy ``rows`` rows: on all threads where that pays."""

    def run(over: Callable[[Expr], Any]) -> None:
        with over(count) as i:
            body(i)

    either(i64(rows) * row_bytes >= PARALLEL_BYTES, lambda: run(parallel), lambda: run(loop))


def _copy(source: Buffer, start: Expr, target: Buffer, at: Expr, size: int) -> None:
    """Copy ``size`` elements; the ranges are equal or disjoint."""
    whole = size // 64 * 64
    with loop(whole // 64) as c:
        for lane in range(0, 64, 8):
            put(target, span(at + i64(c * 64 + lane), 8), source[span(start + i64(c * 64 + lane), 8)])
    for offset, lanes in pieces(size - whole):
        put(target, span(at + i64(whole + offset), lanes), source[span(start + i64(whole + offset), lanes)])


class Slots:
    """A pool of pages ``[num_pages, halves, heads, page_size, d]``, addressed by slot; MLA has one half, one head."""

    def __init__(self, handle: Expr, halves: int, heads: int, page_size: Expr, d: int, dtype: str) -> None:
        shape = (symbol(), halves, heads, page_size, d) if halves == 2 else (symbol(), page_size, d)
        self.matched, self.dtype = matched(handle, shape, dtype, symbol("int64")), dtype
        self.halves, self.heads, self.page_size, self.d = halves, heads, page_size, d
        self.row_bytes = halves * d * (4 if dtype == "float32" else 2)

    @functools.cached_property
    def data(self) -> Buffer:
        """The pool as a flat buffer; first asked for when all arguments are matched."""
        return flattened(self.matched, self.dtype)

    def place(self, slot: Expr) -> tuple[Expr, Expr]:
        """Return a slot's page, and its place on it."""
        return let(i64(T.truncdiv(slot, self.page_size))), let(i64(T.truncmod(slot, self.page_size)))

    def row(self, place: tuple[Expr, Expr], half: int, head: Expr) -> Expr:
        """Return the offset of a vector."""
        block = (place[0] * self.halves + half) * self.heads + i64(head)
        return let((block * i64(self.page_size) + place[1]) * self.d)


def append(name: str, halves: int, heads: int, d: int, dtype: str, page_size: int) -> PrimFunc:
    """``(pages, k, v, position_map)``, or ``(pages, kv, position_map)`` with one half: -1 skips a token."""

    def body() -> None:
        pages = tensor("var_pages")
        handles = [tensor(f"var_data_{half}") for half in range(halves)]
        positions = tensor("var_position_map")
        tokens = symbol("int64")
        pool = Slots(pages, halves, heads, page_size, d, dtype)
        shape = (tokens, heads, d) if halves == 2 else (tokens, d)
        matches = [matched(handle, shape, dtype) for handle in handles]
        slots = matched(positions, (tokens,), "int32", symbol())
        new = [flattened(buffer, dtype) for buffer in matches]
        _ = pool.data

        def token(t: Expr) -> None:
            slot = let(slots[t])
            with when(slot != -1):
                place = pool.place(slot)
                with loop(heads) as head:
                    for half, source in enumerate(new):
                        _copy(source, (i64(t) * heads + i64(head)) * d, pool.data, pool.row(place, half, head), d)

        _spread(tokens, tokens * heads, pool.row_bytes, token)

    return prim_func(name, body)


def fetch(name: str, layers: int, halves: int, heads: int, d: int, dtype: str) -> PrimFunc:
    """``(pages, position_map, k, v, layer_id)``: gather a sequence's keys and values, for debugging."""

    def body() -> None:
        pages, positions = tensor("var_pages"), tensor("var_position_map")
        handles = [tensor(f"var_data_{half}") for half in range(halves)]
        layer = scalar("layer_id", "int64")
        tokens, page_size = symbol("int64"), symbol("int64")
        pool = Slots(pages, halves, heads, page_size, d, dtype)
        shape = (layers, tokens, heads, d) if halves == 2 else (layers, tokens, d)
        matches = [matched(handle, shape, dtype) for handle in handles]
        slots = matched(positions, (tokens,), "int32", symbol("int64"))
        targets = [flattened(buffer, dtype) for buffer in matches]
        _ = pool.data

        def token(t: Expr) -> None:
            place = pool.place(let(i64(slots[t])))
            with loop(heads) as head:
                for half, target in enumerate(targets):
                    at = ((layer * tokens + t) * heads + i64(head)) * d
                    _copy(pool.data, pool.row(place, half, head), target, at, d)

        _spread(tokens, tokens * heads, pool.row_bytes, token)

    return prim_func(name, body)


def copy_page(name: str, halves: int, heads: int, page_size: int, d: int, dtype: str) -> PrimFunc:
    """``(pages, source page, target page, slots)``: copy the first slots of a page."""

    def body() -> None:
        pages = tensor("var_pages")
        source, target, count = (scalar(name, "int64") for name in ("src_page_id", "tgt_page_id", "copy_length"))
        pool = Slots(pages, halves, heads, page_size, d, dtype)
        _ = pool.data

        def token(slot: Expr) -> None:
            with loop(heads) as head:
                for half in range(halves):
                    start, at = (pool.row((page, i64(slot)), half, head) for page in (source, target))
                    _copy(pool.data, start, pool.data, at, d)

        _spread(count, count * heads, pool.row_bytes, token)

    return prim_func(name, body)


def compact(name: str, heads: int, d: int, dtype: str, page_size: int) -> PrimFunc:
    """``(pages, copy_length_indptr, copy_src_dst_pos, batch_size)``: move tokens within sequences, in order."""

    def body() -> None:
        pages, indptr, moves = tensor("var_pages"), tensor("var_copy_length_indptr"), tensor("var_copy_src_dst_pos")
        batch = scalar("batch_size", "int32")
        pool = Slots(pages, 2, heads, page_size, d, dtype)
        lengths = matched(indptr, (batch + 1,), "int32", symbol())
        places = matched(moves, (2, symbol()), "int32", symbol())
        _ = pool.data

        def sequence(i: Expr) -> None:
            b, head = let(T.truncdiv(i, heads)), let(T.truncmod(i, heads))
            with loop(lengths[b], lengths[b + 1]) as move:
                source, target = (pool.place(let(places[side, move])) for side in range(2))
                for half in range(2):
                    _copy(pool.data, pool.row(source, half, head), pool.data, pool.row(target, half, head), d)

        _spread(batch * heads, lengths[batch] * heads, pool.row_bytes, sequence)

    return prim_func(name, body)


def merge(name: str, dtype: str, heads: int | None = None, d: int | None = None) -> PrimFunc:
    """``(v, s, v_other, s_other)``: merge a state into the first, in place; two empty states stay ``(0, -inf)``."""

    def body() -> None:
        handles = [tensor(f"var_{name}") for name in ("v", "s", "v_other", "s_other")]
        rows, h, size = symbol(), heads or symbol(), d or symbol()
        shapes = [((rows, h, size), dtype), ((rows, h), "float32")] * 2
        buffers = [matched(handle, *shape) for handle, shape in zip(handles, shapes, strict=True)]
        out, lse, other, other_lse = (
            flattened(buffer, kind) for buffer, (_, kind) in zip(buffers, shapes, strict=True)
        )
        with parallel(rows * h) as row:
            first, second = let(lse[row]), let(other_lse[row])
            top = let(T.max(first, second))
            base = let(T.if_then_else(top == T.min_value("float32") * 2, T.float32(0), top))
            weights = [let(T.exp2(part - base)) for part in (first, second)]
            total = let(weights[0] + weights[1])
            shares = [let(T.if_then_else(total == 0, T.float32(0), weight / total)) for weight in weights]
            with loop(size) as i:
                at = let(i64(row) * i64(size) + i64(i))
                parts = [
                    T.if_then_else(share == 0, T.float32(0), T.cast(source[at], "float32") * share)
                    for source, share in ((out, shares[0]), (other, shares[1]))
                ]
                put(out, at, (parts[0] + parts[1]).astype(dtype))
            put(lse, row, base + T.log2(total))

    return prim_func(name, body)


def split_rotary(
    name: str,
    heads: dict[str, int],
    d: int,
    dtype: str,
    rotary_dim: int,
    style: str,
    cos_sin: Callable[[Expr, Expr, Buffer | None, Expr], tuple[Expr, Expr]],
    *,
    extended: bool,
) -> PrimFunc:
    """``(qkv, position_map, q, k, v, apply_rope)``, or ``ext_factors`` last: split fused rows, rotate q and k.

    ``cos_sin(pair, position, factors, last)`` gives the angle of a pair; ``last`` is the greatest position.
    """
    half = rotary_dim // 2
    firsts = {"q": 0, "k": heads["q"], "v": heads["q"] + heads["k"]}
    fused = firsts["v"] + heads["v"]

    def body() -> None:
        names = ("qkv", "position_map", "q", "k", "v", *(["ext_factors"] if extended else []))
        handles = {name: tensor(f"var_{name}") for name in names}
        apply = None if extended else scalar("apply_rope", "int64")
        tokens = symbol("int64")
        shapes = {"qkv": fused, **heads}
        matches = {n: matched(handles[n], (tokens, h, d), dtype) for n, h in shapes.items()}
        positions = matched(handles["position_map"], (tokens,), "int32", symbol())
        factors = matched(handles["ext_factors"], (rotary_dim,), "float32") if extended else None
        data = {n: flattened(buffer, dtype) for n, buffer in matches.items()}
        last = allocate(1, "int32")
        put(last, 0, T.int32(0))
        if extended:
            with loop(tokens) as t:
                put(last, 0, T.max(last[0], positions[t]))
        with parallel(tokens) as t:
            angles = allocate(2 * half, "float32")
            with loop(half) as pair:
                turn = cos_sin(pair, positions[t], factors, last[0])
                for place, value in enumerate(turn):
                    still = T.float32(1 - place)
                    angle = value if apply is None else T.if_then_else(apply > 0, value, still)
                    put(angles, place * half + pair, angle)
            for part, first in firsts.items():
                with loop(heads[part]) as head:
                    source = let((t * fused + i64(first + head)) * d)
                    target = let((t * heads[part] + i64(head)) * d)
                    if part == "v":
                        _copy(data["qkv"], source, data[part], target, d)
                    else:
                        _turn(data["qkv"], source, data[part], target, angles, half, style, dtype)
                        with loop(rotary_dim, d) as dim:
                            put(data[part], target + i64(dim), data["qkv"][source + i64(dim)])

    return prim_func(name, body)


def _turn(
    source: Buffer, start: Expr, target: Buffer, at: Expr, angles: Buffer, half: int, style: str, dtype: str
) -> None:
    with loop(half) as pair:
        i, j = (pair, pair + half) if style == "neox" else (2 * pair, 2 * pair + 1)
        cos, sin = let(angles[pair]), let(angles[half + pair])
        x, y = (let(T.cast(source[start + i64(place)], "float32")) for place in (i, j))
        put(target, at + i64(i), (x * cos - y * sin).astype(dtype))
        put(target, at + i64(j), (y * cos + x * sin).astype(dtype))
