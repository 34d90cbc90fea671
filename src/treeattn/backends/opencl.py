"""OpenCL devices, by PyOpenCL: GPUs, and CPUs through PoCL."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import numpy_dtype
from ..devices import Device, DeviceArray, Program
from ..errors import CompileError, UnsupportedError
from ..targets import GPUS, GpuTraits

INSTALL = "pip install 'treeattn[opencl]', or 'treeattn[pocl]' for this machine's CPU as a device"
BLOCKS_EACH = 4  # per compute unit


@lru_cache(maxsize=1)
def devices() -> tuple[Any, ...]:
    """Return PyOpenCL's devices, of all platforms.

    Raises
    ------
    UnsupportedError
        PyOpenCL is not installed, or there is no device.
    """
    try:
        import pyopencl as cl
    except ImportError as error:
        raise UnsupportedError(f"target: opencl needs PyOpenCL ({error}); {INSTALL}") from None
    try:
        found = tuple(device for platform in cl.get_platforms() for device in platform.get_devices())
    except cl.Error as error:
        raise UnsupportedError(
            f"target: no OpenCL platform ({error}); install your GPU's driver, or {INSTALL}"
        ) from None
    if not found:
        raise UnsupportedError(f"target: no OpenCL device; install your GPU's driver, or {INSTALL}")
    return found


@lru_cache(maxsize=8)
def open_device(index: int = 0) -> OpenCLDevice:
    """Return device number ``index``, one of `devices`."""
    return OpenCLDevice(devices()[index])


def traits_of(device: Any) -> GpuTraits:
    """Return what kernels may use of a device."""
    return GpuTraits(
        "opencl",
        threads=min(int(device.max_work_group_size), GPUS["opencl"].threads),
        shared_bytes=int(device.local_mem_size),
        float16="cl_khr_fp16" in device.extensions.split(),
    )


class OpenCLDevice(Device):
    """A device with a context and one queue, in order."""

    def __init__(self, device: Any) -> None:
        import pyopencl as cl

        self.cl, self.name, self.traits = cl, str(device.name), traits_of(device)
        self.blocks = int(device.max_compute_units) * BLOCKS_EACH
        self.context = cl.Context([device])
        self.queue = cl.CommandQueue(self.context)

    def _allocate(self, size: int) -> Any:
        return self.cl.Buffer(self.context, self.cl.mem_flags.READ_WRITE, size)

    def _write(self, array: DeviceArray, content: NDArray[np.uint8]) -> None:
        self.cl.enqueue_copy(self.queue, array.buffer, content)

    def download(self, array: DeviceArray) -> NDArray[Any]:
        host = np.empty(array.shape, numpy_dtype(array.dtype))
        if host.size:
            self.cl.enqueue_copy(self.queue, host, array.buffer, src_offset=array.offset * host.itemsize)
        return host

    def finish(self) -> None:
        self.queue.finish()

    def program(self, source: Any) -> Program:
        try:
            built = self.cl.Program(self.context, source.text).build()
            kernel = self.cl.Kernel(built, source.name)
        except self.cl.Error as error:
            raise CompileError(f"the OpenCL driver of {self.name} refused kernel {source.name}: {error}") from error
        kinds = dict(zip(source.scalars, source.scalar_dtypes, strict=True))
        lock = threading.Lock()

        def launch(arguments: Mapping[str, Any], blocks: int) -> None:
            with lock:  # a kernel object holds the arguments of one launch
                for i, name in enumerate(source.pointers):
                    kernel.set_arg(i, arguments[name].buffer)
                for i, (name, dtype) in enumerate(kinds.items(), len(source.pointers)):
                    kernel.set_arg(i, np.dtype(dtype).type(arguments[name]))
                size = blocks * source.threads
                self.cl.enqueue_nd_range_kernel(self.queue, kernel, (size,), (source.threads,))

        return launch
