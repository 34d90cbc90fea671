"""Moving keys and values: append, copy a page, compact, fetch; and merge of states. One text for CPU and GPU.

With TVM's signatures. On the CPU rows are copied as vectors; only what is worth waking other threads for runs on them.
On a GPU a block copies a row. Where no PrimFunc is asked for, `treeattn.cache_ops` does the same in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import tvm
from tvm.script import tirx as T

from ..checks import integer
from ..kernels.emit import (
    Buffer,
    Expr,
    PrimFunc,
    barrier,
    either,
    f32,
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
)
from ..kernels.gpu.arguments import extent_of
from ..kernels.gpu.elements import Elements, declared
from ..kernels.softmax import MASKED
from ..kernels.vectors import pieces
from ..targets import GpuTraits
from .blocks import Lanes, over_blocks
from .target import CPU, check_dtype

PARALLEL_BYTES = 512 * 1024
"""A launch on all threads costs what copying about as much on one does."""
MOST_LANES = 128
MOST_DIM = 2**16  # of a head: the text of a kernel grows with it


def spread(
    device: GpuTraits | None, count: Expr, size: int, body: Callable[[Expr, Lanes | None], None], work: Expr = 0
) -> None:
    """Emit ``body(i, lanes)`` for ``i < count``.

    On a GPU by a block each, of as many threads as ``size`` elements keep busy; on the CPU, where there are no lanes,
    on all threads if ``work``, in bytes, pays for waking them.
    """
    if device:
        threads = min(size, MOST_LANES, device.threads)
        with over_blocks(let(T.cast(count, "int32")), threads) as (block, thread):
            body(block, Lanes(thread, threads))
        return

    def run(over: Callable[[Expr], Any]) -> None:
        with over(count) as i:
            body(i, None)

    either(work >= PARALLEL_BYTES, lambda: run(parallel), lambda: run(loop))


def elements(size: Expr, lanes: Lanes | None) -> Any:
    """Run the body for every element of a row that is this thread's."""
    return lanes.elements(size) if lanes else loop(size)


def copy(source: Buffer, start: Expr, target: Buffer, at: Expr, size: int, lanes: Lanes | None) -> None:
    """Copy ``size`` elements; the ranges are equal or disjoint."""
    if lanes:
        with elements(size, lanes) as i:
            put(target, at + i64(i), source[start + i64(i)])
        return
    whole = size // 64 * 64
    with loop(whole // 64) as c:
        for lane in range(0, 64, 8):
            put(target, span(at + i64(c * 64 + lane), 8), source[span(start + i64(c * 64 + lane), 8)])
    for offset, width in pieces(size - whole):
        put(target, span(at + i64(whole + offset), width), source[span(start + i64(whole + offset), width)])


def stored(buffer: Buffer, dtype: str, device: GpuTraits | None) -> Elements:
    """See a matched buffer as a flat one; bfloat16 as bits, which TVM would take for numbers in such a view."""
    traits = device or CPU
    return Elements(flattened(buffer, declared(dtype, traits), extent=extent_of(device)), dtype, traits)


class Slots:
    """A pool of pages ``[num_pages, halves, heads, page_size, d]``, addressed by slot; MLA has one half, one head."""

    def __init__(
        self, handle: Expr, halves: int, heads: int, page_size: Expr, d: int, dtype: str, device: GpuTraits | None
    ) -> None:
        check_dtype(dtype, "dtype", device)
        integer(heads, "num_heads"), integer(d, "head_dim", most=MOST_DIM)
        if not isinstance(page_size, tvm.tirx.Var):
            integer(page_size, "page_size")
        shape = (symbol(), halves, heads, page_size, d) if halves == 2 else (symbol(), page_size, d)
        self.matched, self.dtype, self.device = matched(handle, shape, dtype, symbol("int64")), dtype, device
        self.halves, self.heads, self.page_size, self.d = halves, heads, page_size, d
        self.row_bytes = halves * d * (4 if dtype == "float32" else 2)

    @property
    def data(self) -> Buffer:
        """The pool as a flat buffer, to be asked for when all arguments are matched."""
        return stored(self.matched, self.dtype, self.device).buffer

    def place(self, slot: Expr) -> tuple[Expr, Expr]:
        """Return a slot's page, and its place on it."""
        return let(i64(T.truncdiv(slot, self.page_size))), let(i64(T.truncmod(slot, self.page_size)))

    def row(self, place: tuple[Expr, Expr], half: int, head: Expr) -> Expr:
        """Return the offset of a vector."""
        block = (place[0] * self.halves + half) * self.heads + i64(head)
        return let((block * i64(self.page_size) + place[1]) * self.d)


def append(
    name: str, halves: int, heads: int, d: int, dtype: str, page_size: int, device: GpuTraits | None
) -> PrimFunc:
    """``(pages, k, v, position_map)``, or ``(pages, kv, position_map)`` with one half: -1 skips a token."""

    def body() -> None:
        pages = tensor("var_pages")
        handles = [tensor(f"var_data_{half}") for half in range(halves)]
        positions = tensor("var_position_map")
        tokens = symbol("int64")
        pool = Slots(pages, halves, heads, page_size, d, dtype, device)
        shape = (tokens, heads, d) if halves == 2 else (tokens, d)
        matches = [matched(handle, shape, dtype) for handle in handles]
        slots = matched(positions, (tokens,), "int32", symbol())

        def row(i: Expr, lanes: Lanes | None) -> None:
            token, head = let(T.truncdiv(i, heads)), let(T.truncmod(i, heads))
            slot = let(slots[token])
            with when(slot != -1):
                place = pool.place(slot)
                for half, buffer in enumerate(matches):
                    new = stored(buffer, dtype, device).buffer
                    copy(new, let(i64(i) * d), pool.data, pool.row(place, half, head), d, lanes)

        spread(device, tokens * heads, d, row, tokens * heads * pool.row_bytes)

    return prim_func(name, body)


def fetch(name: str, layers: int, halves: int, heads: int, d: int, dtype: str, device: GpuTraits | None) -> PrimFunc:
    """``(pages, position_map, k, v, layer_id)``: gather a sequence's keys and values, for debugging."""
    integer(layers, "num_hidden_layers")

    def body() -> None:
        pages, positions = tensor("var_pages"), tensor("var_position_map")
        handles = [tensor(f"var_data_{half}") for half in range(halves)]
        layer = scalar("layer_id", "int64")
        tokens, page_size = symbol("int64"), symbol("int64")
        pool = Slots(pages, halves, heads, page_size, d, dtype, device)
        shape = (layers, tokens, heads, d) if halves == 2 else (layers, tokens, d)
        matches = [matched(handle, shape, dtype) for handle in handles]
        slots = matched(positions, (tokens,), "int32", symbol("int64"))

        def row(i: Expr, lanes: Lanes | None) -> None:
            token, head = let(T.truncdiv(i, heads)), let(T.truncmod(i, heads))
            place = pool.place(let(i64(slots[token])))
            for half, target in enumerate(matches):
                at = let((layer * tokens * heads + i64(i)) * d)
                out = stored(target, dtype, device).buffer
                copy(pool.data, pool.row(place, half, head), out, at, d, lanes)

        spread(device, tokens * heads, d, row, tokens * heads * pool.row_bytes)

    return prim_func(name, body)


def copy_page(
    name: str, halves: int, heads: int, page_size: int, d: int, dtype: str, device: GpuTraits | None
) -> PrimFunc:
    """``(pages, source page, target page, slots)``: copy the first slots of a page."""

    def body() -> None:
        pages = tensor("var_pages")
        source, target, count = (scalar(name, "int64") for name in ("src_page_id", "tgt_page_id", "copy_length"))
        pool = Slots(pages, halves, heads, page_size, d, dtype, device)

        def row(i: Expr, lanes: Lanes | None) -> None:
            slot, head = let(i64(T.truncdiv(i, heads))), let(T.truncmod(i, heads))
            for half in range(halves):
                start, at = (pool.row((page, slot), half, head) for page in (source, target))
                copy(pool.data, start, pool.data, at, d, lanes)

        spread(device, count * heads, d, row, count * heads * pool.row_bytes)

    return prim_func(name, body)


def compact(name: str, heads: int, d: int, dtype: str, page_size: int, device: GpuTraits | None) -> PrimFunc:
    """``(pages, copy_length_indptr, copy_src_dst_pos, batch_size)``: move tokens within sequences, in order.

    A thread moves the same elements of all of a head's tokens, so overlapping ranges are right on a GPU too.
    """

    def body() -> None:
        pages, indptr, moves = tensor("var_pages"), tensor("var_copy_length_indptr"), tensor("var_copy_src_dst_pos")
        batch = scalar("batch_size", "int32")
        pool = Slots(pages, 2, heads, page_size, d, dtype, device)
        lengths = matched(indptr, (batch + 1,), "int32", symbol())
        places = matched(moves, (2, symbol()), "int32", symbol())

        def sequence(i: Expr, lanes: Lanes | None) -> None:
            b, head = let(T.truncdiv(i, heads)), let(T.truncmod(i, heads))
            with loop(lengths[b], lengths[b + 1]) as move:
                source, target = (pool.place(let(places[side, move])) for side in range(2))
                for half in range(2):
                    copy(pool.data, pool.row(source, half, head), pool.data, pool.row(target, half, head), d, lanes)

        spread(device, batch * heads, d, sequence, i64(lengths[batch] * heads) * pool.row_bytes)

    return prim_func(name, body)


def merge(
    name: str, dtype: str, heads: int | None = None, d: int | None = None, device: GpuTraits | None = None
) -> PrimFunc:
    """``(v, s, v_other, s_other)``: merge a state into the first, in place; two empty states stay ``(0, -inf)``."""
    check_dtype(dtype, "v_dtype", device)
    for value, size_name in ((heads, "num_heads"), (d, "head_dim")):
        if value is not None:
            integer(value, size_name, most=MOST_DIM)

    def body() -> None:
        handles = [tensor(f"var_{name}") for name in ("v", "s", "v_other", "s_other")]
        rows, h, size = symbol(), heads or symbol(), d or symbol()
        shapes = [((rows, h, size), dtype), ((rows, h), "float32")] * 2
        matches = [matched(handle, *shape) for handle, shape in zip(handles, shapes, strict=True)]

        def merge_row(row: Expr, lanes: Lanes | None) -> None:
            out, lse, other, other_lse = (
                stored(buffer, kind, device) for buffer, (_, kind) in zip(matches, shapes, strict=True)
            )
            first, second = let(lse[row]), let(other_lse[row])
            base = let(T.max(T.max(first, second), f32(MASKED)))
            weights = [let(T.exp2(part - base)) for part in (first, second)]
            total = let(weights[0] + weights[1])
            shares = [let(T.if_then_else(total == f32(0), f32(0), weight / total)) for weight in weights]
            with elements(size, lanes) as i:
                at = let(i64(row) * i64(size) + i64(i))
                parts = [
                    T.if_then_else(share == f32(0), f32(0), source[at] * share)
                    for source, share in ((out, shares[0]), (other, shares[1]))
                ]
                out.store(at, parts[0] + parts[1])
            if lanes:
                barrier()  # all have read what the first overwrites
            with when(lanes.thread == 0) if lanes else nullcontext():
                lse.store(row, T.Select(total == f32(0), first, base + T.log2(total)))

        spread(device, rows * h, d or 1, merge_row, i64(rows * h) * i64(size) * 4)

    return prim_func(name, body)
