"""Moving keys and values in a pool of pages: append, copy a page, compact, gather.

``pages`` is a pool as `PagedKV` or `LatentKV` has it, ``[num_pages, 2, kv_heads, page_size, d]`` or ``[num_pages,
page_size, d]``, any strides with a contiguous last axis. A token's place is its *slot*, ``page * page_size + place``.
A pool in a device's memory (`treeattn.device`) is written there, by a kernel.

All of it is NumPy: a row of ``d`` elements moves as one element, which runs at the speed of memory and costs a few
microseconds for few rows, where a kernel of ours would first have to be compiled for every head size.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from . import device_ops
from .arrays import DTYPES, as_kind, dtype_name, indices, to_numpy
from .device_ops import check_moves, check_pool, check_slots
from .devices import DeviceArray
from .errors import DTypeError, IndexRangeError, ShapeError, UnsupportedError
from .rope import Rope

Rows: TypeAlias = NDArray[np.void]
Places: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Page of each token, and place on it."""


def append(
    pages: Any,
    slots: Any,
    k: Any,
    v: Any = None,
    *,
    rope: Rope | None = None,
    positions: Any = None,
    check: bool = True,
) -> None:
    """Write new keys and values into their slots, converted to the dtype of ``pages``.

    Parameters
    ----------
    pages : Array
        The pool, written in place.
    slots : integers
        ``[n]``, no two alike.
    k : Array
        ``[n, kv_heads, d]``; for a pool of compressed keys and values ``[n, d]``.
    v : Array
        ``[n, kv_heads, d]``; None for a pool of compressed keys and values.
    rope : Rope, optional
        Rotate the keys by ``positions`` first.
    positions : integers, optional
        ``[n]``.
    check : bool
        False skips the check of slots, for callers whose own they are.

    Raises
    ------
    TreeAttnError
        Arrays that do not fit, or slots outside the pool; nothing is written then.
    """
    if isinstance(pages, DeviceArray):
        _check_latent(pages.ndim == 3, v, rope)
        device_ops.append(pages, slots, {"k": k} if pages.ndim == 3 else {"k": k, "v": v}, rope, positions)
        return
    pool = Pool(pages, writes=True)
    places = pool.places(check_slots(slots, pool.end, "slots", distinct=True) if check else slots)
    pool.append(places, k, v, rope=rope, positions=positions)


def copy_page(pages: Any, source: int, target: int, count: int | None = None) -> None:
    """Copy the first ``count`` slots (all by default) of page ``source`` to page ``target``.

    Raises
    ------
    IndexRangeError
        A page or a count outside the pool.
    """
    array = pages if isinstance(pages, DeviceArray) else Pool(pages, writes=True).array
    check_pool(array.shape)
    num_pages, page_size = array.shape[0], array.shape[-2]
    places = indices([source, target, page_size if count is None else count], "source, target, count")
    source, target, count = places.tolist()
    for name, value, most in (
        ("source", source, num_pages - 1),
        ("target", target, num_pages - 1),
        ("count", count, page_size),
    ):
        if not 0 <= value <= most:
            raise IndexRangeError(f"{name}: expected 0 to {most}, got {value}")
    if isinstance(array, DeviceArray):
        device_ops.compact(array, *(page * page_size + np.arange(count) for page in (source, target)))
    else:
        array[target][..., :count, :] = array[source][..., :count, :]


def compact(pages: Any, source: Any, target: Any, *, check: bool = True) -> None:
    """Move tokens from slots ``source`` to slots ``target``, each token as one; the two sets may overlap.

    Parameters
    ----------
    pages : Array
        The pool, written in place.
    source, target : integers
        ``[n]``; no two targets alike. All sources are read before the first target is written.
    check : bool
        False skips the check of slots.

    Raises
    ------
    TreeAttnError
        Slots outside the pool, or lists of two lengths; nothing is written then.
    """
    if isinstance(pages, DeviceArray):
        device_ops.compact(pages, source, target)
        return
    pool = Pool(pages, writes=True)
    given = check_moves(source, target, pool.end) if check else (source, target)
    reads, writes = map(pool.places, given)
    moved = [pool.get(half, reads) for half in range(pool.halves)]
    for half, rows in enumerate(moved):
        pool.put(half, writes, rows)


def gather(pages: Any, slots: Any, *, check: bool = True) -> Any:
    """Read tokens back, one after another.

    Parameters
    ----------
    pages : Array
        The pool.
    slots : integers
        ``[n]``.
    check : bool
        False skips the check of slots.

    Returns
    -------
    k, v : Array
        ``[n, kv_heads, d]`` each, of the kind and dtype of ``pages``; one array ``[n, d]`` for a pool of compressed
        keys and values.
    """
    if isinstance(pages, DeviceArray):
        found = device_ops.gather(pages, slots)
        return found[0] if len(found) == 1 else tuple(found)
    pool = Pool(pages)
    places = pool.places(check_slots(slots, pool.end, "slots") if check else slots)
    read = [pool.get(half, places) for half in range(pool.halves)]
    arrays = [as_kind(rows[..., None].view(pool.array.dtype), pages) for rows in read]
    return arrays[0] if pool.is_latent else tuple(arrays)


def _check_latent(is_latent: bool, v: Any, rope: Rope | None) -> None:
    """Refuse what a pool of compressed keys cannot take, and a rope that is none."""
    if rope is not None and not isinstance(rope, Rope):
        raise DTypeError(f"rope: expected a Rope, got {type(rope).__name__}; make one with ta.Rope(theta=...)")
    if is_latent and rope is not None:
        raise UnsupportedError("rope: a compressed key turns in its last elements only; rotate those and append")
    if is_latent and v is not None:
        raise ShapeError("v: expected None, since a pool of compressed keys holds both in one row, got an array")


class Pool:
    """A pool on the host, checked once, whose rows of ``d`` elements are single elements."""

    def __init__(self, pages: Any, writes: bool = False) -> None:
        array = to_numpy(pages, "pages")
        if dtype_name(array.dtype) not in DTYPES:
            raise DTypeError(f"pages: expected dtype float32, float16 or bfloat16, got {array.dtype}")
        check_pool(array.shape)
        if array.strides[-1] != array.itemsize and array.shape[-1] > 1 and array.size:
            raise ShapeError(
                "pages: expected a contiguous last axis, got a strided one; pass the array it is a view of"
            )
        if writes and not array.flags.writeable:
            raise ShapeError("pages: expected writable memory, got a read-only array")
        self.array, self.is_latent = array, array.ndim == 3
        self.rows, self.halves = _as_rows(array), 1 if self.is_latent else 2
        self.page_size, self.end = array.shape[-2], array.shape[0] * array.shape[-2]

    def places(self, slots: Any) -> Places:
        return np.divmod(to_numpy(slots, "slots").astype(np.int64, copy=False), self.page_size)

    def append(self, places: Places, k: Any, v: Any = None, *, rope: Rope | None = None, positions: Any = None) -> None:
        """Do as `append` for places that are known to be the caller's own."""
        _check_latent(self.is_latent, v, rope)
        names = ("k",) if self.is_latent else ("k", "v")
        new = [self._check_new(array, name, len(places[0])) for array, name in zip((k, v), names, strict=False)]
        if rope is not None:
            new[0] = rope.rotate(new[0], positions)
        new = [_as_rows(np.ascontiguousarray(array, self.array.dtype)) for array in new]
        for half, rows in enumerate(new):
            self.put(half, places, rows)

    def _check_new(self, array: Any, name: str, count: int) -> NDArray[Any]:
        new = to_numpy(array, name)
        heads = () if self.is_latent else self.array.shape[2:3]
        wanted = (count, *heads, self.array.shape[-1])
        if new.shape != wanted:
            raise ShapeError(f"{name}: expected shape {list(wanted)}, got {list(new.shape)}")
        if dtype_name(new.dtype) not in DTYPES:
            raise DTypeError(f"{name}: expected dtype float32, float16 or bfloat16, got {new.dtype}; convert it first")
        return new

    def get(self, half: int, places: Places) -> Rows:
        page, place = places
        return self.rows[page, place] if self.is_latent else self.rows[page, half, :, place]

    def put(self, half: int, places: Places, rows: Rows) -> None:
        page, place = places
        if self.is_latent:
            self.rows[page, place] = rows
        else:
            self.rows[page, half, :, place] = rows


def _as_rows(array: NDArray[Any]) -> Rows:
    row = np.dtype((np.void, array.shape[-1] * array.itemsize))
    return array.view(row)[..., 0] if array.size else np.empty(array.shape[:-1], row)  # no size, no strides
