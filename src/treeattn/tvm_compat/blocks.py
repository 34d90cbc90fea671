"""Launches of GPU blocks from a function that the host runs, one row or tile a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm.script import tirx as T

from ..kernels.emit import Expr, launch, let, loop, private, put, when


@dataclass(frozen=True)
class Lanes:
    """The threads of a block, which deal the elements of a row among themselves."""

    thread: Expr
    count: int

    @contextmanager
    def elements(self, size: Expr) -> Iterator[Expr]:
        """Run the body for every element of a row that is this thread's."""
        with loop(T.truncdiv(size + (self.count - 1), self.count)) as step:
            i = let(step * self.count + self.thread)
            with when(i < size):
                yield i


@contextmanager
def over_blocks(count: Expr, threads: int, *, arena_bytes: int = 0) -> Iterator[tuple[Expr, Expr]]:
    """Run the body in ``count`` blocks, which may be none; yields the index of block and thread.

    Indices are checked: of a launch of more than 65,535 blocks TVM's WGSL runs one too many.
    """
    with when(count > 0), launch(count, threads, arena_bytes=arena_bytes) as (index, thread):
        block = held(index)
        with when(block < count):
            yield block, thread


def held(value: Expr) -> Expr:
    """Keep an int32 in a register: TVM's simplifier writes out a `let` of integers, and drops checks it can prove."""
    cell = private(1, "int32")
    put(cell, 0, value)
    return let(cell[0])
