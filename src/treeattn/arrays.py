"""Arrays of any library, seen as pointer, shape, strides and dtype name.

NumPy and PyTorch are looked at directly; whatever else has ``__dlpack__`` comes through DLPack. Nothing is copied
unless the kernel cannot read the memory as it lies (last axis not contiguous, elements unaligned, bytes swapped).
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from .devices import Device, DeviceArray
from .errors import DTypeError, IndexRangeError, ShapeError, UnsupportedError

DTYPES = ("float32", "float16", "bfloat16")
INT32_MAX = 2**31 - 1
CUDA = 2  # of DLPack's devices

IntArray = NDArray[np.int32]


@runtime_checkable
class Array(Protocol):
    """Anything that exports its memory by DLPack (NumPy, PyTorch, JAX, CuPy, TVM)."""

    def __dlpack__(self, **kwargs: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class View:
    """Memory as a kernel sees it: strides in elements, last axis contiguous; ``owner`` keeps it alive."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    owner: Any
    device: Device | None = None
    """Where the memory is, None for the host's. Otherwise ``pointer`` counts elements of the buffer of ``owner``."""

    @property
    def ndim(self) -> int:
        return len(self.shape)


def view(array: Any, name: str) -> View:
    """See ``array`` as a `View`; ``name`` is the argument's name for messages.

    Raises
    ------
    DTypeError
        Not an array, or a dtype other than float32, float16, bfloat16.
    UnsupportedError
        Memory that is not on the CPU.
    """
    if isinstance(array, np.ndarray):
        return _view_numpy(array, name)
    if _is_torch(array):
        return _borrow(array, name) if array.is_cuda else _view_torch(array, name)
    if isinstance(array, DeviceArray):
        return View(array.offset, array.shape, array.strides, array.dtype, array, array.device)
    if hasattr(array, "__dlpack__"):
        if _dlpack_device(array, name)[0] == CUDA:
            return _borrow(array, name)
        return _view_numpy(_import_dlpack(array, name), name)
    raise DTypeError(
        f"{name}: expected an array (NumPy, or anything with __dlpack__), got {type(array).__name__}; "
        f"pass numpy.asarray({name})"
    )


def to_numpy(array: Any, name: str) -> NDArray[Any]:
    """Return ``array`` as NumPy sees it, without a copy; bfloat16 is ``ml_dtypes.bfloat16``."""
    if isinstance(array, np.ndarray):
        return array
    if isinstance(array, DeviceArray):
        return array.numpy()
    if _is_torch(array):
        return _torch_to_numpy(array, name)
    if hasattr(array, "__dlpack__"):
        return _import_dlpack(array, name)
    try:
        return np.asarray(array)
    except (ValueError, TypeError) as error:
        raise ShapeError(f"{name}: cannot make an array of it ({error}); pass a flat list or a NumPy array") from None


def empty_like_kind(array: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Return an uninitialised array of ``shape``: PyTorch if ``array`` is, NumPy otherwise."""
    if _is_torch(array):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return np.empty(shape, numpy_dtype(dtype))


def address(array: Any) -> int:
    """Return where the first element of a NumPy or PyTorch array on the host lies."""
    pointer: int = array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data_ptr()
    return pointer


def as_kind(result: Any, array: Any) -> Any:
    """Hand ``result`` back as the caller's kind of array: PyTorch in, PyTorch out, and JAX likewise."""
    if isinstance(array, np.ndarray):
        return result
    if _is_torch(array) and isinstance(result, np.ndarray):
        torch = sys.modules["torch"]
        if result.dtype.name == "bfloat16":
            return torch.from_numpy(result.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(result)
    if type(array).__module__.startswith("jax"):
        return sys.modules["jax"].numpy.asarray(result)
    return result


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a dtype name."""
    if dtype == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(dtype)


@lru_cache(maxsize=64)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a NumPy dtype."""
    return str(dtype.name)  # computed anew by NumPy at every access, slowly


def check_dtype(dtype: str, name: str) -> str:
    """Return ``dtype`` if kernels offer it; say why not otherwise."""
    if dtype in DTYPES:
        return dtype
    if dtype == "float64":
        raise DTypeError(
            f"{name}: float64 is not offered, since every kernel accumulates in float32; pass {name}.astype('float32')"
        )
    raise DTypeError(f"{name}: expected dtype float32, float16 or bfloat16, got {dtype}; convert it first")


def indices(values: Any, name: str, shape: tuple[int, ...] | None = None) -> IntArray:
    """Return a copy of host integers of any width as contiguous int32, exactly.

    A copy, so that what was checked stays what the kernel follows.

    Raises
    ------
    DTypeError
        Values that are not integers.
    ShapeError
        Not one-dimensional, or not of ``shape``.
    IndexRangeError
        A value that int32 cannot hold.
    """
    array = to_numpy(values, name)
    if array.ndim != 1:
        raise ShapeError(f"{name}: expected one dimension, got shape {array.shape}; pass a flat list or array")
    if array.dtype.kind not in "iu":
        if array.size:
            raise DTypeError(f"{name}: expected integers, got dtype {array.dtype}; pass an integer array")
        array = array.astype(np.int32)
    if shape is not None and array.shape != shape:
        raise ShapeError(
            f"{name}: expected shape {list(shape)}, got {list(array.shape)}; it needs one entry per sequence"
        )
    if array.dtype != np.int32 and array.size and (int(array.max()) > INT32_MAX or int(array.min()) < -INT32_MAX):
        at = int(np.argmax((array > INT32_MAX) | (array < -INT32_MAX)))
        raise IndexRangeError(f"{name}: expected values that int32 holds, got {array[at]} at index {at}")
    return np.array(array, np.int32)


def _view_numpy(array: NDArray[Any], name: str) -> View:
    dtype = array.dtype
    if not dtype.isnative:
        array = array.astype(dtype.newbyteorder("="))
        dtype = array.dtype
    label = check_dtype(dtype_name(dtype), name)
    itemsize = dtype.itemsize
    strides = array.strides
    readable = array.flags.aligned and (not strides or strides[-1] == itemsize or array.shape[-1] <= 1)
    if not readable or any([stride % itemsize for stride in strides]):
        array = np.array(array, order="C")
        strides = array.strides
    steps = tuple([stride // itemsize for stride in strides])
    return View(address(array), array.shape, steps, label, array)


def _view_torch(tensor: Any, name: str) -> View:
    label = check_dtype(str(tensor.dtype).rpartition(".")[2], name)
    place = _torch_pointer(tensor, name)
    gaps = tensor.shape and tensor.shape[-1] > 1 and tensor.stride(-1) != 1
    if gaps or place % tensor.element_size() or tensor.is_neg():  # memory of a negated view has the other sign
        tensor = tensor.clone(memory_format=sys.modules["torch"].contiguous_format).resolve_neg()
        place = tensor.data_ptr()
    return View(place, tuple(tensor.shape), tuple(tensor.stride()), label, tensor)


def _torch_to_numpy(tensor: Any, name: str) -> NDArray[Any]:
    _torch_pointer(tensor, name)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if str(tensor.dtype) == "torch.bfloat16":
        bits: NDArray[Any] = tensor.view(sys.modules["torch"].int16).numpy()
        return bits.view(numpy_dtype("bfloat16"))
    result: NDArray[Any] = tensor.numpy()
    return result


def _import_dlpack(array: Any, name: str) -> NDArray[Any]:
    device = _dlpack_device(array, name)
    if device[0] != 1:
        raise UnsupportedError(f"{name}: expected memory on the CPU, got DLPack device {device}; copy it to the host")
    try:
        return np.from_dlpack(array)
    except Exception as error:  # an exporter's own code may raise anything
        reason = error
    with contextlib.suppress(Exception):  # NumPy cannot import bfloat16 by DLPack; JAX exports it as ml_dtypes
        bits = np.asarray(array)
        if bits.dtype.name in DTYPES:
            return bits
    raise DTypeError(f"{name}: cannot import this array by DLPack ({reason}); pass a NumPy array")


def _dlpack_device(array: Any, name: str) -> tuple[int, int]:
    try:
        kind, index = array.__dlpack_device__()
        return int(kind), int(index)
    except Exception as error:  # as above
        raise DTypeError(f"{name}: cannot tell its DLPack device ({error!r}); pass a NumPy array") from None


def _torch_pointer(tensor: Any, name: str) -> int:
    """Return where a tensor's memory is; refuse one that has none here, which is never to be read."""
    if tensor.device.type != "cpu":
        raise UnsupportedError(f"{name}: expected a tensor on the CPU, got {tensor.device}; pass {name}.cpu()")
    if str(tensor.layout) != "torch.strided" or tensor.is_nested:
        raise UnsupportedError(f"{name}: expected a dense tensor, got layout {tensor.layout}; pass {name}.to_dense()")
    try:
        pointer: int = tensor.data_ptr()
    except RuntimeError as error:  # inside torch.func transforms
        raise UnsupportedError(f"{name}: expected a tensor with memory of its own, got one without ({error})") from None
    if pointer == 0 and tensor.numel():
        raise UnsupportedError(f"{name}: expected a tensor with memory, got {type(tensor).__name__} without any")
    return pointer


def _borrow(array: Any, name: str) -> View:
    from .backends import cuda

    return cuda.borrow(array, name)


def _is_torch(array: Any) -> bool:
    return isinstance(array, getattr(sys.modules.get("torch"), "Tensor", ()))  # which may be half imported
