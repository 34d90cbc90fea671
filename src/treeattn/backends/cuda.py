"""NVIDIA GPUs, by the CUDA driver: kernels are compiled by NVRTC or nvcc, and run on the caller's stream.

Tensors of PyTorch, CuPy and others come in by DLPack where they lie, and results of their kind go back.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import View, check_dtype, numpy_dtype
from ..devices import Device, DeviceArray, Program, itemsize
from ..errors import CompileError, DTypeError, UnsupportedError
from ..targets import GpuTraits
from .llvm import ffi

INSTALL = "install NVIDIA's driver and pip install 'treeattn[cuda]'"
BLOCKS_EACH = 1  # per multiprocessor: splitting keys further costs more in partial states than it gains
ALIGNMENT = 16  # bytes: kernels copy such pieces at once where offsets allow it, and take the base for granted
DEFAULT_SHARED = 48 << 10  # what a launch may use without asking for more


@lru_cache(maxsize=1)
def devices() -> tuple[int, ...]:
    """Return the ordinals of the GPUs.

    Raises
    ------
    UnsupportedError
        A package or the driver is missing, or there is no GPU.
    """
    try:
        from cuda.bindings import driver

        check(driver.cuInit(0))
        count = check(driver.cuDeviceGetCount())
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(f"target: cuda needs a GPU's driver and cuda-bindings ({error}); {INSTALL}") from None
    if not count:
        raise UnsupportedError("target: the CUDA driver lists no device")
    return tuple(range(count))


@lru_cache(maxsize=16)
def open_device(index: int = 0) -> CUDADevice:
    """Return device number ``index``, one of `devices`."""
    return CUDADevice(index)


def check(result: tuple[Any, ...]) -> Any:
    """Return what a call of the driver returned, without its status.

    Raises
    ------
    RuntimeError
        The call failed.
    """
    status, *values = result
    if int(status):
        raise RuntimeError(f"CUDA driver: {status.name}")
    return values[0] if values else None


def borrow(array: Any, name: str) -> View:
    """See another library's array in a GPU's memory, without a copy.

    Raises
    ------
    DTypeError
        A dtype that is not offered.
    UnsupportedError
        Rows whose elements are not neighbours.
    """
    tensor = ffi().from_dlpack(array)
    dtype = check_dtype(str(tensor.dtype), name)
    shape, strides = tuple(map(int, tensor.shape)), tuple(map(int, tensor.strides))
    if shape and shape[-1] > 1 and strides[-1] != 1:
        raise UnsupportedError(f"{name}: expected a contiguous last axis, got strides {strides}; copy it first")
    device = open_device(int(array.__dlpack_device__()[1]))
    begin, size = int(tensor.data_ptr()), itemsize(dtype)
    before = begin % ALIGNMENT
    owner = DeviceArray(device, Borrowed(begin - before, (array, tensor)), shape, dtype, before // size)
    return View(before // size, shape, strides, dtype, owner, device)


@dataclass(frozen=True)
class Borrowed:
    """Another library's memory."""

    address: int
    owner: Any


class Memory:
    """Memory of a device, given back with the last reference."""

    def __init__(self, driver: Any, size: int) -> None:
        self.driver, self.handle = driver, check(driver.cuMemAlloc(size))
        self.address = int(self.handle)

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self.driver.cuMemFree(self.handle)


class CUDADevice(Device):
    """A GPU, in the context that PyTorch and CuPy use too."""

    def __init__(self, index: int) -> None:
        from cuda.bindings import driver

        self.driver, self.index = driver, index
        self.handle = check(driver.cuDeviceGet(index))
        self.context = check(driver.cuDevicePrimaryCtxRetain(self.handle))
        self.name = check(driver.cuDeviceGetName(128, self.handle)).decode().rstrip("\0")
        arch = f"sm_{self._ask('COMPUTE_CAPABILITY_MAJOR')}{self._ask('COMPUTE_CAPABILITY_MINOR')}"
        self.traits = GpuTraits(
            "cuda", self._ask("MAX_THREADS_PER_BLOCK"), self._ask("MAX_SHARED_MEMORY_PER_BLOCK"), arch=arch
        )
        self.blocks = self._ask("MULTIPROCESSOR_COUNT") * BLOCKS_EACH

    def empty_like(self, array: Any, shape: tuple[int, ...], dtype: str) -> Any:
        library = sys.modules.get(type(array).__module__.partition(".")[0])
        if isinstance(array, DeviceArray) or library is None:
            return self.empty(shape, dtype)
        if library.__name__ == "torch":
            return library.empty(shape, dtype=getattr(library, dtype), device=array.device)
        if hasattr(library, "empty") and dtype != "bfloat16":  # CuPy
            return library.empty(shape, dtype)
        raise DTypeError(f"q: cannot make arrays like {type(array).__name__}; pass PyTorch or CuPy arrays")

    def download(self, array: DeviceArray) -> NDArray[Any]:
        host = np.empty(array.shape, np.dtype("int32") if array.dtype == "int32" else numpy_dtype(array.dtype))
        if host.size:
            self._enter()
            begin, stream = array.buffer.address + array.offset * host.itemsize, self._stream()
            check(self.driver.cuMemcpyDtoHAsync(host.ctypes.data, begin, host.nbytes, stream))
            check(self.driver.cuStreamSynchronize(stream))
        return host

    def finish(self) -> None:
        self._enter()
        check(self.driver.cuCtxSynchronize())

    def program(self, source: Any) -> Program:
        self._enter()
        try:
            module = check(self.driver.cuModuleLoadData(bytes(self._compile(source.text))))
            function = check(self.driver.cuModuleGetFunction(module, source.name.encode()))
        except Exception as error:  # NVRTC, nvcc and the driver each fail in their own way
            raise CompileError(f"cannot compile kernel {source.name} for {self.name}: {error}") from error
        if source.dynamic_bytes > DEFAULT_SHARED:
            attribute = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(self.driver.cuFuncSetAttribute(function, attribute, source.dynamic_bytes))

        def launch(arguments: Mapping[str, Any], blocks: int) -> None:
            self._enter()
            values = [np.array([arguments[name].buffer.address], np.uint64) for name in source.pointers]
            values += [
                np.array([blocks if name == "num_blocks" else arguments[name]], dtype)
                for name, dtype in zip(source.scalars, source.scalar_dtypes, strict=True)
            ]
            addresses = np.array([value.ctypes.data for value in values], np.uint64)
            check(
                self.driver.cuLaunchKernel(
                    function, blocks, 1, 1, source.threads, 1, 1, source.dynamic_bytes, self._stream(),
                    addresses.ctypes.data, 0,
                )
            )  # fmt: skip

        return launch

    def _allocate(self, size: int) -> Memory:
        self._enter()
        return Memory(self.driver, size)

    def _write(self, array: DeviceArray, content: NDArray[np.uint8]) -> None:
        self._enter()
        to = array.buffer.address
        check(self.driver.cuMemcpyHtoDAsync(to, content.ctypes.data, content.nbytes, self._stream()))

    def _ask(self, name: str) -> int:
        attribute = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(self.driver.cuDeviceGetAttribute(attribute, self.handle)))

    def _enter(self) -> None:
        check(self.driver.cuCtxSetCurrent(self.context))

    def _stream(self) -> int:
        """Return the stream that the caller's library works on now."""
        if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
            return int(torch.cuda.current_stream(self.index).cuda_stream)
        if cupy := sys.modules.get("cupy"):
            return int(cupy.cuda.get_current_stream().ptr)
        return 0

    def _compile(self, text: str) -> bytearray:
        from tvm.support import nvcc

        compilers = ["nvrtc", "nvcc"]
        reasons = []
        for compiler in compilers:
            try:
                made: bytearray = nvcc.compile_cuda(
                    text, target_format="cubin", arch=self.traits.arch, compiler=compiler
                )
                return made
            except Exception as error:  # a missing compiler or a text it refuses: the other one may do
                reasons.append(f"{compiler}: {error}")
        raise CompileError("; ".join(reasons))
