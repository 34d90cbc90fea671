"""A thin layer over TVM's IR builder: Python functions that emit statements where they are called.

``with loop(n) as i``, ``with when(condition)``, ``x = let(expression)`` and ``put(buffer, index, value)`` are all the
statements kernels use. Buffers are flat; a vector is a `span` of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import tvm
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as I

ALIGNMENT = 2  # bytes that may be assumed of a tensor's memory: the least element's

_device = ContextVar("device", default=False)
"""Whether what is being emitted runs on a GPU."""
_arena: ContextVar[_Arena | None] = ContextVar("arena", default=None)
"""Where shared memory is taken from, if not allocated piece by piece."""

Expr = Any
Buffer = Any
PrimFunc = Any


def prim_func(name: str, body: Callable[[], None]) -> PrimFunc:
    """Build a function whose arguments and statements ``body`` emits."""
    with IRBuilder() as builder, I.prim_func():
        I.func_name(name)
        body()
    return builder.get().with_attr({"global_symbol": name, "tirx.is_scheduled": True})


def device_func(name: str, body: Callable[[], None]) -> PrimFunc:
    """Build a GPU kernel whose arguments and statements ``body`` emits, one `launch` among them.

    The function is a device function from the start: its parameters stay in order and keep their names.
    """
    with IRBuilder() as builder, I.prim_func():
        I.func_name(name)
        body()
    device_kernel_launch = 2  # TVM's calling convention
    return builder.get().with_attrs({
        "global_symbol": name,
        "calling_conv": device_kernel_launch,
        "tirx.is_global_func": True,
        "tirx.is_scheduled": True,
        "tirx.kernel_launch_params": ["blockIdx.x", "threadIdx.x"],
        "tirx.noalias": True,
        "tirx.launch_bounds_min_blocks_per_sm": 2,  # or nvcc spills for the sake of blocks beyond
    })  # fmt: skip


@contextmanager
def launch(blocks: Expr, threads: int, *, arena_bytes: int = 0) -> Iterator[tuple[Expr, Expr]]:
    """Run the body in ``blocks`` blocks of ``threads`` threads; yields the index of block and thread.

    TVM's default pipeline adds a barrier wherever it cannot prove that two accesses to shared memory differ, and fails
    where one would stand under a condition. With ``arena_bytes`` of dynamic shared memory it does not see the accesses.
    """
    with I.launch_thread("blockIdx.x", blocks) as block, I.launch_thread("threadIdx.x", threads) as thread:
        arena = _Arena(arena_bytes) if arena_bytes else None
        with _held(_device, True), _held(_arena, arena):
            yield block, thread


class _Arena:
    """Dynamic shared memory seen through a pointer that does not tell what it points to, handed out in parts."""

    def __init__(self, size: int) -> None:
        memory = I.alloc_buffer((size,), "uint8", scope="shared.dyn")
        plain = tvm.ir.PointerType(tvm.ir.PrimType("uint8"))
        self.data = I.Bind(tvm.tirx.call_intrin(plain, "tirx.reinterpret", T.address_of(memory[0])))
        run(T.address_of(memory[size - 1]))  # or TVM cuts the memory down to what it sees used
        self.used, self.size = 0, size

    def take(self, size: int, dtype: str) -> Buffer:
        """Return a part, at a multiple of 16 bytes."""
        width = np.dtype(dtype).itemsize
        begin, self.used = self.used, self.used + -(-size * width // 16) * 16
        assert self.used <= self.size
        return I.decl_buffer((size,), dtype, data=self.data, elem_offset=begin // width)


def scalar(name: str, dtype: str) -> Expr:
    """Declare a scalar argument."""
    return I.arg(name, getattr(I, dtype)())


def pointer(name: str, dtype: str) -> Expr:
    """Declare a pointer argument; all arguments come before the first statement."""
    return I.arg(name, I.handle(stored_dtype(dtype)))


def flat(data: Expr, dtype: str, extent: int) -> Buffer:
    """See a pointer argument as a flat buffer of ``extent`` elements."""
    return I.decl_buffer((T.int64(extent),), stored_dtype(dtype), data=data)


def tensor(name: str) -> Expr:
    """Declare a tensor argument (DLPack), given its shape and dtype by `matched`."""
    return I.arg(name, I.handle())


def symbol(dtype: str = "int32") -> Expr:
    """Make a size or offset that `matched` finds out."""
    return getattr(I, dtype)()


def matched(handle: Expr, shape: tuple[Expr, ...], dtype: str, offset: Expr | None = None) -> Buffer:
    """Check a tensor argument's shape and dtype, and see it as a buffer that may lie anywhere an element may."""
    return I.match_buffer(handle, shape, dtype, elem_offset=offset, align=ALIGNMENT)


def flattened(buffer: Buffer, dtype: str, offset: Expr = 0, extent: int = 2**48) -> Buffer:
    """See a matched buffer as a flat one, ``offset`` elements further."""
    return I.decl_buffer((T.int64(extent),), dtype, data=buffer.data, elem_offset=buffer.ty.elem_offset + offset)


def allocate(size: Expr, dtype: str) -> Buffer:
    """Allocate scratch memory of any size."""
    return I.alloc_buffer((size,), dtype)


def stored_dtype(dtype: str) -> str:
    """Return the dtype memory is declared with: bfloat16 travels as uint16, kernels convert it themselves."""
    return "uint16" if dtype == "bfloat16" else dtype


def part(workspace: Buffer, size: int, offset: Expr, dtype: str = "float32") -> Buffer:
    """See ``size`` elements of a buffer from ``offset`` on as a buffer of its own."""
    return I.decl_buffer((size,), dtype, data=workspace.data, elem_offset=offset)


def registers(size: int, dtype: str = "float32") -> Buffer:
    """Allocate a small buffer that LLVM keeps in registers: of constant size, under 1024 bytes."""
    return I.alloc_buffer((size,), dtype)


def private(size: int, dtype: str = "float32") -> Buffer:
    """Allocate a GPU thread's own small buffer: indexed by constants, it is in registers."""
    return I.alloc_buffer((size,), dtype, scope="local")


def shared(size: int, dtype: str = "float32") -> Buffer:
    """Allocate memory that the threads of a GPU block share."""
    return _from_arena(size, dtype, "shared")


def dynamic(size: int, dtype: str) -> Buffer:
    """Allocate shared memory whose size is given at the launch: more than 48 KiB, one such buffer a kernel."""
    arena = _arena.get()
    assert not (arena and arena.used), (
        "dynamic memory comes first: a `part` of it is counted from the arena's beginning"
    )
    return _from_arena(size, dtype, "shared.dyn")


def _from_arena(size: int, dtype: str, scope: str) -> Buffer:
    arena = _arena.get()
    return arena.take(size, dtype) if arena else I.alloc_buffer((size,), dtype, scope=scope)


def barrier() -> None:
    """Wait for all threads of the block, and see what they wrote to shared memory."""
    run(T.tvm_storage_sync("shared"))


def loop(begin: Expr, end: Expr | None = None) -> Any:
    """Loop over ``[begin, end)``, or ``[0, begin)``."""
    return I.serial(begin) if end is None else I.serial(begin, end)


def unrolled(count: int) -> Any:
    """Loop over ``[0, count)`` that the GPU's compiler unrolls: buffers indexed by its variable stay in registers."""
    return I.unroll(count)


def parallel(count: Expr) -> Any:
    """Loop whose iterations run on TVM's threads, one contiguous range each."""
    return I.parallel(count)


def while_(condition: Expr) -> Any:
    """Loop while ``condition``, which reads a buffer the body changes."""
    return I.While(condition)


@contextmanager
def when(condition: Expr) -> Iterator[None]:
    """Emit the body under a run-time condition."""
    with I.If(condition), I.Then():
        yield


def either(condition: Expr, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """Emit two branches of a run-time condition."""
    with I.If(condition):
        with I.Then():
            then()
        with I.Else():
            otherwise()


def require(condition: Expr, message: str) -> None:
    """Raise an error with a message unless ``condition`` holds, on the host."""
    with I.Assert(condition, message):
        pass


def let(value: Expr) -> Expr:
    """Bind a value to a variable, computed once."""
    return value if isinstance(value, int) else I.Bind(value)


def put(buffer: Buffer, index: Expr, value: Expr) -> None:
    """Store ``value`` at ``index`` (a scalar's index or a `span`)."""
    I.buffer_store(buffer, value, [index])


def run(value: Expr) -> None:
    """Emit a call for its effect."""
    I.evaluate(value)


def span(begin: Expr, lanes: int) -> Expr:
    """Index of ``lanes`` elements from ``begin`` on."""
    return begin if lanes == 1 else T.Ramp(begin, 1, lanes)


def broadcast(value: Expr, lanes: int) -> Expr:
    """Repeat a scalar in every lane."""
    return value if lanes == 1 else T.Broadcast(value, lanes)


def f32(value: float, lanes: int = 1) -> Expr:
    """Return a float32 constant, in every lane."""
    if _device.get() and float(f"{value:.6e}") != float(np.float32(value)):
        bits = int(np.float32(value).view(np.uint32))
        return broadcast(T.reinterpret("float32", T.uint32(bits)), lanes)  # code generators write seven digits
    return broadcast(T.float32(value), lanes)


def i32(value: int) -> Expr:
    """Return an int32 constant."""
    return T.int32(value)


def i64(value: Expr) -> Expr:
    """Widen to int64."""
    return wide(value, "int64")


def wide(value: Expr, dtype: str) -> Expr:
    """Widen an index to ``dtype``, the integer of a target's offsets."""
    return getattr(T, dtype)(value) if isinstance(value, int) else T.cast(value, dtype)


def typed(dtype: str, lanes: int) -> str:
    """Name the vector type of ``lanes`` elements."""
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def smaller(left: Expr, right: Expr) -> Expr:
    """Return the lesser of two values; a NaN on the right stays."""
    return T.Select(left < right, left, right) if _is_device_float(left) else T.min(left, right)


def greater(left: Expr, right: Expr) -> Expr:
    """Return the greater of two values; a NaN on the right stays."""
    return T.Select(left > right, left, right) if _is_device_float(left) else T.max(left, right)


def _is_device_float(value: Expr) -> bool:
    """Whether ``value`` is compared by a GPU language whose minimum and maximum drop a NaN."""
    return _device.get() and not isinstance(value, int) and "float" in str(value.ty.dtype)


def fma(a: Expr, b: Expr, c: Expr, lanes: int) -> Expr:
    """``a * b + c``, on the CPU fused wherever the machine fuses, so that every kernel rounds alike."""
    if _device.get():
        return a * b + c
    return T.call_llvm_pure_intrin(typed("float32", lanes), "llvm.fmuladd", a, b, c)


@contextmanager
def _held(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def all_of(*conditions: Expr) -> Expr:
    """Return the conjunction of scalar conditions; all are evaluated."""
    return tvm.tirx.all(*conditions)


def any_of(*conditions: Expr) -> Expr:
    """Return the disjunction of scalar conditions; all are evaluated."""
    return tvm.tirx.any(*conditions)


def prefetch(buffer: Buffer, index: Expr) -> None:
    """Ask for the cache line that holds an element."""
    address = T.address_of(buffer[index])
    run(T.call_llvm_intrin("void", "llvm.prefetch", address, T.int32(0), T.int32(3), T.int32(1)))
