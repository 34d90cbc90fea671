"""Arrays in a device's memory, and what a device can do: copy arrays in and out, and run kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .targets import GpuTraits

WORD = 4  # bytes: buffers hold whole words, which some devices ask for
Program = Callable[[Mapping[str, Any], int], None]
"""Runs a kernel: its arguments by name (`DeviceArray`, int or float), and the number of blocks."""


@dataclass(frozen=True, eq=False)
class DeviceArray:
    """A contiguous array in the memory of a device; made by `Device.upload` and by attention on such arrays.

    ``array[i]`` is a view of its part ``i`` along the first axis, ``array.numpy()`` a copy on the host.
    """

    device: Device
    buffer: Any
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0
    """Elements of the buffer before the array."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """Steps in elements."""
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(self.ndim))

    @property
    def reach(self) -> int:
        """Elements of the buffer up to the array's end."""
        return self.offset + self.size

    def __getitem__(self, index: int) -> DeviceArray:
        place = range(self.shape[0])[index]
        return DeviceArray(
            self.device, self.buffer, self.shape[1:], self.dtype, self.offset + place * math.prod(self.shape[1:])
        )

    def __len__(self) -> int:
        return self.shape[0]

    def numpy(self) -> NDArray[Any]:
        """Copy to the host, when all work given to the device so far is done."""
        return self.device.download(self)


class Device:
    """Base of the devices of all backends; made by `treeattn.device`."""

    name: str
    traits: GpuTraits
    blocks: int
    """Blocks that keep the whole device busy: with fewer row tiles, their keys are split."""

    def upload(self, array: Any) -> DeviceArray:
        """Copy an array to the device, contiguous.

        Parameters
        ----------
        array : Array
            NumPy, or anything with ``__dlpack__`` on the host; float32, float16, bfloat16 or int32.
        """
        from .arrays import dtype_name, to_numpy

        host = np.asarray(to_numpy(array, "array"), order="C")
        made = self.empty(host.shape, _offered(dtype_name(host.dtype), "array"))
        if host.size:
            content = host.reshape(-1).view(np.uint8)
            self._write(made, np.pad(content, (0, -len(content) % WORD)))
        return made

    def empty(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Allocate an array whose elements are undefined; dtypes as for `upload`."""
        from .checks import integer

        count = math.prod(integer(size, "shape", 0) for size in shape)
        size = max(count, 1) * itemsize(_offered(dtype, "dtype"))
        return DeviceArray(self, self._allocate(-(-size // WORD) * WORD), shape, dtype)

    def empty_like(self, array: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """Allocate an array on the device, of the kind of ``array``, which is there too."""
        return self.empty(shape, dtype)

    def _allocate(self, size: int) -> Any:
        """Return a buffer of ``size`` bytes, a multiple of four."""
        raise NotImplementedError

    def _write(self, array: DeviceArray, content: NDArray[np.uint8]) -> None:
        """Fill an array's whole buffer."""
        raise NotImplementedError

    def download(self, array: DeviceArray) -> NDArray[Any]:
        """Copy an array to the host."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until all work is done."""
        raise NotImplementedError

    def program(self, source: Any) -> Program:
        """Compile a kernel (`treeattn.kernels.gpu.source.KernelSource`) for the device.

        Raises
        ------
        CompileError
            With the driver's log.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{self.traits.kind} device {self.name!r}>"


def _offered(dtype: str, name: str) -> str:
    from .arrays import check_dtype

    return dtype if dtype == "int32" else check_dtype(dtype, name)


def itemsize(dtype: str) -> int:
    """Return the bytes of an element."""
    return 4 if dtype in ("float32", "int32") else 2
