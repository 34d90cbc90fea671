"""What a warp of an NVIDIA GPU does together, from sm_80 on: matrix products, loads of fragments, copies to come.

Fragments are those of ``mma.m16n8k16`` (PTX manual): of a result, lane ``l`` holds rows ``l // 4`` and ``l // 4 + 8``,
columns ``2 * (l % 4)`` and the next, four values in the order of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from ..emit import Buffer, Expr, run

WARP = 32
ALL_LANES = 0xFFFFFFFF
QUAD = 4  # lanes that hold a row together
CHUNK = 8  # 16-bit elements that are copied, and rows that are loaded, at once
TYPES = {"float16": "f16", "bfloat16": "bf16"}


def address(buffer: Buffer) -> Expr:
    """Return where an array begins in global memory."""
    return T.call_pure_extern("uint64", "__cvta_generic_to_global", T.address_of(buffer[0]))


def copy_async(target: Buffer, at: Expr, source: Buffer, begin: Expr, real: Expr) -> None:
    """Begin to copy `CHUNK` elements to shared memory, zeros where not ``real``; both ends at multiples of 16 bytes."""
    size = T.Select(real, T.uint32(16), T.uint32(0))
    addresses = T.address_of(target[at]), T.address_of(source[begin])
    run(T.ptx["cp.async.cg.shared.global"](*addresses, 16, size))


def commit() -> None:
    """Close a group of copies."""
    run(T.ptx["cp.async.commit_group"]())


def wait(pending: int) -> None:
    """Wait until all of this thread's groups but the last ``pending`` have landed; a `barrier` tells the others."""
    run(T.ptx["cp.async.wait_group"](pending))


def load_fragments(words: Buffer, at: Expr, source: Buffer, begin: Expr, *, transposed: bool = False) -> None:
    """Load four 8 x 8 matrices to ``words[at : at + 4]``; each lane gives the beginning of one of their 32 rows."""
    form = ".trans" if transposed else ""
    instruction = T.ptx[f"ldmatrix.sync.aligned.m8n8.x4{form}.shared.b16"]
    run(instruction(*(words[at + i] for i in range(4)), T.address_of(source[begin])))


def multiply(dtype: str, sums: Buffer, at: Expr, left: Buffer, row: Expr, right: Buffer, column: Expr) -> None:
    """``sums += left . right``: 16 x 16 by 16 x 8 elements of ``dtype``, float32 sums."""
    kind = TYPES[dtype]
    instruction = T.ptx[f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"]
    accumulators = [sums[at + i] for i in range(4)]
    operands = [*(left[row + i] for i in range(4)), *(right[column + i] for i in range(2))]
    run(instruction(*accumulators, *operands, *accumulators))


def pack(dtype: str, words: Buffer, at: Expr, low: Expr, high: Expr) -> None:
    """Round two float32 to ``dtype``, in one word."""
    run(T.ptx[f"cvt.rn.{TYPES[dtype]}x2.f32"](words[at], high, low))


def power(values: Buffer, at: Expr, exponent: Expr) -> None:
    """``values[at] = 2^exponent`` to 2 ulp; 0 for minus infinity, NaN stays."""
    run(T.ptx["ex2.approx.ftz.f32"](values[at], exponent))


def over_row(value: Expr, join: Callable[[Expr, Expr], Any], let: Callable[[Expr], Expr]) -> Expr:
    """Join a value over the four lanes that hold a row; all get the result."""
    for step in (1, 2):
        value = let(value)
        value = join(value, T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), value, step, WARP, WARP))
    return value


def any_thread(flag: Expr) -> Expr:
    """Return whether ``flag`` is not 0 in any thread of the block, after a `barrier`."""
    return T.cuda.syncthreads_or(flag)
