"""TVM functions built by TVM's own pipeline: for CUDA, run on CPU fibers; for OpenCL, by its driver.

TVM's host code checks arguments, works out launches and calls a function named as the kernel, which it finds in the
global registry: here one that launches the kernel's text. Arrays are NumPy's, in tensors that say they are a device's.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import tvm
import tvm_ffi

from treeattn import tvm_compat
from treeattn.testing import fibers

DEVICES = {"cuda": 2, "opencl": 4}  # of DLDeviceType
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
    """A NumPy array that says it is in a device's memory.

    ``skip`` elements of its memory come before it; that memory begins ``shift`` elements after a multiple of 256 bytes.
    An array of over a GiB is sparse: it is not copied.
    """

    def __init__(self, array, skip=0, shift=0, kind="cuda"):
        item = array.itemsize
        if array.nbytes > 2**30:
            self.whole = self.array = array
        else:
            self._copy(array, skip, shift)
        self.device = DEVICES[kind], 0
        self.shape = (ctypes.c_int64 * max(array.ndim, 1))(*array.shape)
        kind = CODES[array.dtype.kind], item * 8, 1
        self.managed = DLManagedTensor(
            DLTensor(
                self.whole.ctypes.data, *self.device, array.ndim, *kind, ctypes.addressof(self.shape), None, skip * item
            )
        )

    def _copy(self, array, skip, shift):
        item = array.itemsize
        memory = np.empty(array.nbytes + (skip + shift) * item + 256, np.uint8)
        start = -memory.ctypes.data % 256 + shift * item
        self.whole = memory[start : start + array.nbytes + skip * item].view(array.dtype)
        self.whole[:skip] = 0
        self.array = self.whole[skip:].reshape(array.shape)
        self.array[...] = array

    def __dlpack__(self, **_):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.managed), b"dltensor", None)

    def __dlpack_device__(self):
        return self.device


@dataclass
class Machine:
    """What is at work: the arrays host code may hand over, by address, and the launches it made."""

    arrays: dict[int, np.ndarray] = field(default_factory=dict)
    launches: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    builds: bool = False
    installed: set[str] = field(default_factory=set)
    seed: int = 0
    spare: int = 0  # blocks more than asked for

    def install(self, kind):
        """Take the place of TVM's compiler and launcher of a kind of device, once."""
        if kind in self.installed:
            return
        self.installed.add(kind)
        generate, set_device = tvm.get_global_func(f"target.build.{kind}"), tvm.get_global_func("__tvm_set_device")

        def build_device(module, target):
            made = generate(module, target)
            if not self.builds:
                return made
            loaded = LOADERS[kind](str(made.inspect_source()))
            for function in module.functions.values():
                self._register(function, loaded)
            return None  # nothing to import: launches go through the registry

        def choose_device(device, index):
            return None if device == DEVICES[kind] else set_device(device, index)

        tvm_ffi.register_global_func(f"target.build.{kind}", build_device, override=True)
        tvm_ffi.register_global_func("__tvm_set_device", choose_device, override=True)

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
            grid[0] += self.spare
            self.launches.append((name, grid, block))
            self.seed += 1
            dynamic_bytes = extents.get("tirx.use_dyn_shared_memory", 0)
            loaded.launch(name, values, grid, block, dynamic_bytes=dynamic_bytes, seed=self.seed)

        tvm_ffi.register_global_func(name, launch, override=True)


class OpenCLText:
    """OpenCL text compiled by the first device's driver; arrays go there and back at every launch."""

    def __init__(self, text):
        import pyopencl as cl

        self.cl, self.text = cl, text
        device = next(device for platform in cl.get_platforms() for device in platform.get_devices())
        self.context = cl.Context([device])
        self.queue, self.program = cl.CommandQueue(self.context), cl.Program(self.context, text).build()

    def launch(self, name, values, grid, block, **_):
        """Run a kernel to its end."""
        cl, flags = self.cl, self.cl.mem_flags.READ_WRITE | self.cl.mem_flags.COPY_HOST_PTR
        kinds = re.findall(r"(\w+)\*? (?:restrict )?\w+[,)]", re.search(rf"void {name}\(.*?\);", self.text)[0])
        scalars = {"int": np.int32, "long": np.int64, "float": np.float32}
        held = {i: cl.Buffer(self.context, flags, hostbuf=value) for i, value in enumerate(values) if is_array(value)}
        arguments = [held[i] if i in held else scalars[kinds[i]](value) for i, value in enumerate(values)]
        sizes = [blocks * threads for blocks, threads in zip(grid, block, strict=True)]
        cl.Kernel(self.program, name)(self.queue, sizes, block, *arguments)
        for i, buffer in held.items():
            cl.enqueue_copy(self.queue, values[i], buffer)


def is_array(value):
    return isinstance(value, np.ndarray)


LOADERS = {"cuda": fibers.load, "opencl": OpenCLText}
MACHINE = Machine()


def target(arch):
    """TVM's target of a CUDA architecture."""
    return tvm.target.Target({"kind": "cuda", "arch": arch}, host={"kind": "llvm"})


def build(function, for_target, pipeline="default"):
    """Compile a `PrimFunc` by a pipeline of TVM's."""
    MACHINE.install(for_target.kind.name)
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


def run(function, arguments, outputs, skips=(), shift=0, kind="cuda"):
    """Call a built function on NumPy arrays and numbers; return the arrays at ``outputs`` afterwards.

    ``skips``: of some arguments, how many elements of their memory come before them.
    """
    held = [
        OnDevice(value, dict(skips).get(i, 0), shift, kind) if isinstance(value, np.ndarray) else value
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
