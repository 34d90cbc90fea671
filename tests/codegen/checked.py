"""Kernels whose every access to scratch memory and registers is asserted to lie within its part.

Guard pages see what leaves an array; the parts of one workspace lie side by side, so this looks inside. TVM's own
bound checkers do not know buffers declared on a pointer, hence this: buffers of a known size are wrapped while the
kernel is emitted, and every index that is used emits an assertion before the statement that uses it.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import tvm
from tvm.tirx.script.builder import ir as I

from treeattn.kernels import arguments, cpu, emit, logits, rotation, rows_few, rows_many, softmax, vectors, walk

MODULES = (emit, arguments, cpu, logits, rotation, rows_few, rows_many, softmax, vectors, walk)


class Checked:
    """A buffer that asserts its indices."""

    def __init__(self, buffer, size, shrink=0):
        self.buffer, self.size = buffer, size - shrink
        self.data = buffer.data

    def require(self, index):
        lanes = int(index.lanes) if isinstance(index, tvm.tirx.Ramp) else 1
        begin = index.base if lanes > 1 else index
        inside = tvm.tirx.all(begin >= 0, begin + lanes <= self.size)
        with I.Assert(inside, f"index outside of {self.size} elements of {self.buffer.name}"):
            pass

    def __getitem__(self, index):
        self.require(index)
        return self.buffer[index]


@contextmanager
def checked(shrink=0):
    """Emit kernels with assertions; with ``shrink``, parts are said to be smaller than they are."""

    def wrap(make, size_of, less):
        return lambda *args, **names: Checked(make(*args, **names), size_of(*args), less)

    def put(buffer, index, value):
        if isinstance(buffer, Checked):
            buffer.require(index)
            buffer = buffer.buffer
        I.buffer_store(buffer, value, [index])

    changes = {
        "part": wrap(emit.part, lambda workspace, size, *_: size, shrink),
        "registers": wrap(emit.registers, lambda size, *_: size, 0),
        "put": put,
    }
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            for name, change in changes.items():
                if hasattr(module, name):
                    patch.setattr(module, name, change)
        yield
