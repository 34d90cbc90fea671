"""TVM functions built for CUDA by TVM's own pipeline, run on CPU fibers.

TVM's host code checks arguments, works out launches and calls a function named as the kernel, which it finds in the
global registry: here one that launches the kernel's text on fibers. Arrays are NumPy's, in tensors that
say they are CUDA's.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np
import tvm
import tvm_ffi

from treeattn import tvm_compat
from treeattn.testing import fibers

CUDA = 2  # of DLDeviceType
CODES = {"i": 0, "u": 1, "f": 2, "V": 4}  # ml_dtypes' bfloat16 is of NumPy's kind V


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class OnDevice:
    """A NumPy array that says it is in CUDA memory.

    ``skip`` elements of its memory come before it; that memory begins ``shift`` elements after a multiple of 256 bytes.
    """

    def __init__(self, array, skip=0, shift=0):
        item = array.itemsize
        memory = np.empty(array.nbytes + (skip + shift) * item + 256, np.uint8)
        start = -memory.ctypes.data % 256 + shift * item
        self.whole = memory[start : start + array.nbytes + skip * item].view(array.dtype)
        self.whole[:skip] = 0
        self.array = self.whole[skip:].reshape(array.shape)
        self.array[...] = array
        self.shape = (ctypes.c_int64 * max(array.ndim, 1))(*array.shape)
        kind = CODES[array.dtype.kind], item * 8, 1
        self.managed = DLManagedTensor(
            DLTensor(
                self.whole.ctypes.data, CUDA, 0, array.ndim, *kind, ctypes.addressof(self.shape), None, skip * item
            )
        )

    def __dlpack__(self, **_):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.managed), b"dltensor", None)

    def __dlpack_device__(self):
        return CUDA, 0


@dataclass
class Machine:
    """What is at work: the arrays host code may hand over, by address, and the launches it made."""

    arrays: dict[int, np.ndarray] = field(default_factory=dict)
    launches: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """CUDA texts of functions that are being built, in order."""
    builds: bool = False
    seed: int = 0

    @cached_property
    def installed(self):
        """Take the place of TVM's CUDA compiler and launcher."""
        compile_cuda, set_device = tvm.get_global_func("target.build.cuda"), tvm.get_global_func("__tvm_set_device")

        def build_cuda(module, target):
            made = compile_cuda(module, target)
            if not self.builds:
                return made
            self.texts.append(str(made.inspect_source()))
            loaded = fibers.load(self.texts[-1])
            for function in module.functions.values():
                self._register(function, loaded)
            return None  # nothing to import: launches go through the registry

        def choose_device(kind, index):
            return None if kind == CUDA else set_device(kind, index)

        tvm_ffi.register_global_func("target.build.cuda", build_cuda, override=True)
        tvm_ffi.register_global_func("__tvm_set_device", choose_device, override=True)
        return True

    def _register(self, function, loaded):
        name, count = str(function.attrs["global_symbol"]), len(function.params)
        tags = [str(tag) for tag in function.attrs["tirx.kernel_launch_params"]]
        pointers = [isinstance(parameter.ty, tvm.ir.PointerType) for parameter in function.params]

        def launch(*arguments):
            extents = dict(zip(tags, map(int, arguments[count:]), strict=True))
            values = [
                self.arrays[int(getattr(value, "value", value))] if is_pointer else value
                for value, is_pointer in zip(arguments[:count], pointers, strict=True)
            ]
            grid, block = ([extents.get(f"{of}Idx.{axis}", 1) for axis in "xyz"] for of in ("block", "thread"))
            self.launches.append((name, grid, block))
            self.seed += 1
            dynamic_bytes = extents.get("tirx.use_dyn_shared_memory", 0)
            loaded.launch(name, values, grid, block, dynamic_bytes=dynamic_bytes, seed=self.seed)

        tvm_ffi.register_global_func(name, launch, override=True)


MACHINE = Machine()


def target(arch):
    """TVM's target of a CUDA architecture."""
    return tvm.target.Target({"kind": "cuda", "arch": arch}, host={"kind": "llvm"})


def build(function, for_target, pipeline="default"):
    """Compile a `PrimFunc` by a pipeline of TVM's."""
    assert MACHINE.installed
    symbol = str(function.attrs["global_symbol"])
    name = f"{symbol}_{hashlib.sha256((function.script() + str(for_target)).encode()).hexdigest()[:12]}"
    module = tvm.IRModule({name: function.with_attr("global_symbol", name)})
    MACHINE.builds = True
    os.environ["TVM_COMPILE_FORCE_FALLBACK"] = "1"  # text alone, where there is a driver too
    try:
        return tvm.tirx.build(module, target=for_target, pipeline=pipeline)[name]
    finally:
        MACHINE.builds = False
        del os.environ["TVM_COMPILE_FORCE_FALLBACK"]


def run(function, arguments, outputs, skips=(), shift=0):
    """Call a built function on NumPy arrays and numbers; return the arrays at ``outputs`` afterwards.

    ``skips``: of some arguments, how many elements of their memory come before them.
    """
    held = [
        OnDevice(value, dict(skips).get(i, 0), shift) if isinstance(value, np.ndarray) else value
        for i, value in enumerate(arguments)
    ]
    MACHINE.arrays = {one.whole.ctypes.data: one.whole for one in held if isinstance(one, OnDevice)}
    MACHINE.launches.clear()
    function(*(tvm_ffi.from_dlpack(one) if isinstance(one, OnDevice) else one for one in held))
    return [held[i].array.copy() for i in outputs]


ARCHS = {"float32": "sm_75", "float16": "sm_80", "bfloat16": "sm_80"}
"""Tensor cores for what they take."""


@cache
def generated(factory, *args, **options):
    """A function of `treeattn.tvm_compat`, compiled; ``"{}"`` stands for no RoPE scaling."""
    for_target = target(next(ARCHS[arg] for arg in args if arg in ARCHS))
    made = getattr(tvm_compat, factory)(*({} if arg == "{}" else arg for arg in args), target=for_target, **options)
    return build(made, for_target)


def check(case, function, inputs, outputs, scalars):
    """Run a function and compare; scalars come last, or in a dict, before position 10."""
    at, values = (10, scalars[10]) if isinstance(scalars, dict) else (len(inputs), scalars)
    case.check(run(function, [*inputs[:at], *values, *inputs[at:]], outputs), "on fibers")
