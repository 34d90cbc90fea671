"""Memory that notices wrong accesses: guard pages at inputs, canaries around outputs, NaN in workspaces."""

from __future__ import annotations

import ctypes
import mmap
import sys
import unittest
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .cases import Case

Side: TypeAlias = Literal["after", "before"]

CANARY = 0xA5
CANARY_BYTES = 4096


def guarded(array: NDArray[Any], side: Side = "after") -> NDArray[Any]:
    """Copy ``array`` to memory that ends (or begins) at an inaccessible page.

    Parameters
    ----------
    array : NDArray
        Any shape and dtype.
    side : "after" or "before"
        ``"after"``: the byte after the last element is inaccessible, so that a read past the end kills the
        process. ``"before"``: the byte before the first is. A page at the other end is inaccessible too, only
        further off.

    Returns
    -------
    copy : NDArray
        C-contiguous, aligned to the element and to no more than that.

    Raises
    ------
    unittest.SkipTest
        On a system without ``mprotect``; pytest reports the test as skipped, with the reason.
    """
    array = np.asarray(array)
    page = mmap.PAGESIZE
    body = -(-array.nbytes // page) * page
    memory = mmap.mmap(-1, body + 2 * page)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    _forbid(start, page)
    _forbid(start + page + body, page)
    offset = page + (body - array.nbytes if side == "after" else 0)
    copy: NDArray[Any] = np.ndarray(array.shape, array.dtype, memory, offset)
    copy[...] = array
    return copy


def guarded_case(case: Case, side: Side = "after") -> Case:
    """The same case with every array of it `guarded`, page tables and ``q_indptr`` included."""
    given = {field.name: getattr(case.kv, field.name) for field in fields(case.kv)}
    arrays: dict[str, Any] = {
        name: guarded(value, side) for name, value in given.items() if value is not None and name != "d_latent"
    }
    return replace(case, q=guarded(case.q, side), kv=replace(case.kv, **arrays), q_indptr=guarded(case.q_indptr, side))


@dataclass(frozen=True, eq=False)
class Canaries:
    """An output buffer between two margins of known bytes.

    Attributes
    ----------
    array : NDArray
        What to write into, full of NaN (or of the canary's bytes, for integers).
    surroundings : uint8 NDArray
        The whole memory.
    """

    array: NDArray[Any]
    surroundings: NDArray[np.uint8]

    def check(self) -> None:
        """Raise ``AssertionError`` if a byte around the array was written."""
        before, after = (self.surroundings[:CANARY_BYTES], self.surroundings[CANARY_BYTES + self.array.nbytes :])
        for margin, where in ((before[::-1], "before the start"), (after, "after the end")):
            harmed = np.flatnonzero(margin != CANARY)
            if harmed.size:
                raise AssertionError(
                    f"{harmed.size} bytes overwritten {where} of an output of shape {self.array.shape}, "
                    f"{harmed[0]} bytes off at the nearest"
                )


def canaries(shape: tuple[int, ...], dtype: DTypeLike) -> Canaries:
    """Buffer of ``shape`` inside a bigger one; ``check()`` tells whether the surroundings are intact."""
    kind = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    surroundings = np.full(nbytes + 2 * CANARY_BYTES, CANARY, np.uint8)
    array: NDArray[Any] = np.ndarray(shape, kind, surroundings.data, CANARY_BYTES)
    poison(array)
    return Canaries(array, surroundings)


def poison(array: NDArray[Any]) -> NDArray[Any]:
    """Fill ``array`` with NaN where its dtype has one, and return it: for workspaces and outputs."""
    if array.dtype.kind not in "iub":
        array[...] = np.nan
    return array


def _forbid(address: int, length: int) -> None:
    if sys.platform not in ("linux", "darwin"):
        raise unittest.SkipTest(f"guard pages need mprotect of Linux or macOS, this is {sys.platform}")
    libc = ctypes.CDLL(None, use_errno=True)
    no_access = 0
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(length), no_access):
        raise OSError(ctypes.get_errno(), "mprotect failed")
