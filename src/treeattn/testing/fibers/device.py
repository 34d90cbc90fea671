"""A CUDA device made of fibers: treeattn's GPU kernels run on it as on any other, only checked, and slowly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arrays import numpy_dtype, to_numpy
from ...devices import Device, DeviceArray, Program
from ...targets import GPUS, GpuTraits
from ..guard import poison
from . import load


class FiberDevice(Device):
    """A CUDA device of a few multiprocessors.

    Parameters
    ----------
    seed : int
        Of the order in which threads and blocks run; every launch takes another.
    blocks : int
        As in `Device`: keys are split where there are fewer row tiles.
    traits : GpuTraits
        Of the device it stands for.
    """

    def __init__(self, seed: int = 0, blocks: int = 4, traits: GpuTraits = GPUS["cuda"]) -> None:
        self.name, self.blocks, self.traits = "CPU fibers", blocks, traits
        self.seed, self.launches = seed, 0

    def upload(self, array: Any) -> DeviceArray:
        """Copy an array, contiguous, to memory that begins at a multiple of 256 bytes, as a GPU's does."""
        host = np.ascontiguousarray(to_numpy(array, "array"))
        copy = self.empty(host.shape, host.dtype.name)
        copy.buffer[...] = host.reshape(-1)
        return copy

    def empty(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Allocate an array of NaN."""
        kind = np.dtype(dtype) if dtype == "int32" else numpy_dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64))
        memory = np.empty(size * kind.itemsize + 256, np.uint8)
        skip = -memory.ctypes.data % 256
        flat = poison(memory[skip : skip + size * kind.itemsize].view(kind))
        return DeviceArray(self, flat, tuple(shape), dtype)

    def download(self, array: DeviceArray) -> NDArray[Any]:
        """Copy an array out of the device's memory."""
        flat: NDArray[Any] = array.buffer[array.offset : array.offset + array.size]
        host: NDArray[Any] = flat.reshape(array.shape).copy()
        return host

    def finish(self) -> None:
        """Return at once: launches end before they return."""

    def program(self, source: Any) -> Program:
        """Compile a kernel for the fibers."""
        module = load(source.text)

        def run(arguments: Mapping[str, Any], blocks: int) -> None:
            self.launches += 1
            values = [arguments[name].buffer for name in source.pointers]
            values += [blocks if name == "num_blocks" else arguments[name] for name in source.scalars]
            module.launch(
                source.name, values, [blocks], [source.threads], dynamic_bytes=source.dynamic_bytes,
                seed=self.seed + self.launches,
            )  # fmt: skip

        return run
