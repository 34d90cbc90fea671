"""Page operations and merging of states on arrays in a device's memory; `treeattn.cache_ops` and `merge` come here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import INT32_MAX, View, check_dtype, to_numpy, view
from .compiler import gpu_program
from .devices import Device, DeviceArray
from .errors import DTypeError, IndexRangeError, ShapeError, UnsupportedError
from .rope import Rope, check_positions

THREADS = 128  # as in `treeattn.kernels.gpu.rows`


@dataclass(frozen=True)
class Rows:
    """Rows of ``d`` elements, addressed by slot and head: one half of a pool, or tokens one after another."""

    array: View
    at: int
    heads: int
    page: int
    slot: int
    head: int
    page_size: int = 1

    def arguments(self, side: str) -> dict[str, Any]:
        """Return the kernel's arguments for this side of a move."""
        steps = {"at": self.at, "page": self.page, "slot": self.slot, "head": self.head, "page_size": self.page_size}
        return {side: self.array.owner} | {f"{side}_{name}": value for name, value in steps.items()}


def halves(pages: DeviceArray) -> list[Rows]:
    """Return keys and values of a pool ``[num_pages, 2, heads, page_size, d]``, or the one half of a latent one."""
    pool = view(pages, "pages")
    if pool.ndim == 3:
        page, slot, _ = pool.strides
        return [Rows(pool, pool.pointer, 1, page, slot, 0, pool.shape[1])]
    page, half, head, slot, _ = pool.strides
    return [Rows(pool, pool.pointer + i * half, pool.shape[2], page, slot, head, pool.shape[3]) for i in range(2)]


def tokens(array: Any, name: str, device: Device, like: Rows, count: int) -> Rows:
    """Return rows ``[n, heads, d]`` or ``[n, d]`` on the device, whose slot is their index.

    Raises
    ------
    ShapeError
        Another shape than the pool's rows have.
    """
    given = view(array, name)
    rows = given if given.device is device else view(device.upload(array), name)
    latent = like.array.ndim == 3
    d = like.array.shape[-1]
    wanted = (count, d) if latent else (count, like.heads, d)
    if rows.shape != wanted:
        raise ShapeError(f"{name}: expected shape {list(wanted)}, got {list(rows.shape)}")
    return _tokens(rows)


def move(
    source: Rows,
    target: Rows,
    reads: Any,
    writes: Any,
    rope: Rope | None = None,
    positions: Any = None,
    seq_len: int | None = None,
) -> None:
    """Copy rows from slots ``reads`` to slots ``writes``, rotated by ``positions`` where ``rope`` is given.

    Raises
    ------
    UnsupportedError
        A target whose elements the device cannot write, or more elements than it can count.
    """
    device, d = _device_of(target), target.array.shape[-1]
    count = len(reads) * target.heads * d
    places = np.zeros(len(reads), np.int32) if rope is None else check_positions(positions, len(reads))
    if count == 0:
        return
    moves = np.stack([np.asarray(reads), np.asarray(writes), places], axis=1).astype(np.int32)
    dtypes = source.array.dtype, target.array.dtype
    _check_writable(device, dtypes[1], count)
    tables = np.zeros(1, np.float32)
    form = None
    if rope is not None:
        form = rope.style, rope.rotary_dim or d
        tables = rope.tables(d, int(places.max()), seq_len)
    blocks = -(-count // THREADS)
    arguments = source.arguments("given") | target.arguments("made")
    arguments |= {"moves": device.upload(moves), "tables": device.upload(tables)}
    arguments |= {"num_blocks": blocks, "count": count, "heads": target.heads}
    gpu_program(device, "move_rows", dtypes, d, form)(arguments, blocks)


def append(
    pages: DeviceArray, slots: Any, new: dict[str, Any], rope: Rope | None = None, positions: Any = None
) -> None:
    """Write new keys and values (``new``, by name) into their slots of a pool."""
    check_pool(pages.shape)
    places = check_slots(slots, _end(pages), "slots", distinct=True)
    targets = halves(pages)
    sources = [
        tokens(array, name, pages.device, half, len(places))
        for half, (name, array) in zip(targets, new.items(), strict=True)
    ]
    for source, target, turned in zip(sources, targets, (rope, None), strict=False):
        move(source, target, np.arange(len(places)), places, turned, positions)


def rotate(x: DeviceArray, rope: Rope, positions: Any, seq_len: int | None = None) -> DeviceArray:
    """Turn rows ``[n, heads, d]`` by position; see `Rope.rotate`.

    Raises
    ------
    ShapeError
        Not such rows, or another number of positions.
    """
    if x.ndim != 3:
        raise ShapeError(f"x: expected [n, heads, d], got {list(x.shape)}; reshape it")
    turned, order = x.device.empty(x.shape, x.dtype), np.arange(len(x))
    move(_tokens(view(x, "x")), _tokens(view(turned, "x")), order, order, rope, positions, seq_len)
    return turned


def compact(pages: DeviceArray, source: Any, target: Any) -> None:
    """Move tokens from slots to slots; all are read before the first is written."""
    check_pool(pages.shape)
    reads, writes = check_moves(source, target, _end(pages))
    for half, held in zip(halves(pages), gather(pages, reads), strict=True):
        move(tokens(held, "pages", pages.device, half, len(reads)), half, np.arange(len(reads)), writes)


def gather(pages: DeviceArray, slots: Any) -> list[DeviceArray]:
    """Read tokens back: ``[n, heads, d]`` for keys and values each, or ``[n, d]`` of a latent pool."""
    check_pool(pages.shape)
    places = check_slots(slots, _end(pages), "slots")
    found = []
    for half in halves(pages):
        d = pages.shape[-1]
        shape = (len(places), d) if pages.ndim == 3 else (len(places), half.heads, d)
        held = pages.device.empty(shape, pages.dtype)
        move(half, tokens(held, "pages", pages.device, half, len(places)), places, np.arange(len(places)))
        found.append(held)
    return found


def merge(states: list[tuple[DeviceArray, DeviceArray]]) -> tuple[DeviceArray, DeviceArray]:
    """Merge states ``(out, lse)`` of one shape on one device, in their order."""
    (out, lse), *others = states
    device, d = out.device, out.shape[-1]
    check_dtype(out.dtype, "out 0")
    if lse.dtype != "float32":
        raise DTypeError(f"lse 0: expected float32 on a device, got {lse.dtype}; convert it first")
    _check_writable(device, out.dtype, out.size)
    program = gpu_program(device, "merge_states", out.dtype, d)
    blocks = -(-out.size // THREADS)
    for other, other_lse in others:
        for name, array, like in (("out", other, out), ("lse", other_lse, lse)):
            if array.device is not device or array.dtype != like.dtype or array.offset or like.offset:
                raise UnsupportedError(f"merge: expected whole arrays of {device!r} and one dtype in every {name}")
        made, made_lse = device.empty(out.shape, out.dtype), device.empty(lse.shape, "float32")
        arguments = {
            "out_a": out, "lse_a": lse, "out_b": other, "lse_b": other_lse, "out": made, "lse": made_lse,
            "num_blocks": blocks, "count": out.size,
        }  # fmt: skip
        if blocks:
            program(arguments, blocks)
        out, lse = made, made_lse
    return out, lse


def _tokens(rows: View) -> Rows:
    heads, step = (1, 0) if rows.ndim == 2 else (rows.shape[1], rows.strides[1])
    return Rows(rows, rows.pointer, heads, rows.strides[0], 0, step)


def _device_of(rows: Rows) -> Device:
    assert rows.array.device is not None
    return rows.array.device


def _end(pages: DeviceArray) -> int:
    """Return the number of slots of a pool."""
    return pages.shape[0] * pages.shape[-2]


def check_pool(shape: tuple[int, ...]) -> None:
    """Check the shape of a pool."""
    if not (len(shape) == 3 or (len(shape) == 5 and shape[1] == 2)) or 0 in shape[1:]:
        raise ShapeError(
            "pages: expected [num_pages, 2, kv_heads, page_size, d] or [num_pages, page_size, d], "
            f"got shape {list(shape)}"
        )


def check_slots(values: Any, end: int, name: str, *, distinct: bool = False) -> NDArray[Any]:
    """Return slots as an array of integers below ``end``; ``distinct`` where they are written to."""
    slots = to_numpy(values, name)
    if slots.ndim != 1 or (slots.dtype.kind not in "iu" and slots.size):
        raise ShapeError(f"{name}: expected integers [n], got {slots.dtype} {list(slots.shape)}")
    outside = (slots < 0) | (slots >= end)
    if outside.any():
        at = int(outside.argmax())
        raise IndexRangeError(f"{name}: expected slots in [0, {end}), got {slots[at]} at index {at}")
    if distinct and len(found := np.sort(slots)) and (again := found[1:] == found[:-1]).any():
        raise IndexRangeError(f"{name}: expected no slot twice, got {found[int(again.argmax())]} twice or more")
    return slots


def check_moves(source: Any, target: Any, end: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the slots that tokens move from and to, checked."""
    reads, writes = check_slots(source, end, "source"), check_slots(target, end, "target", distinct=True)
    if len(reads) != len(writes):
        raise ShapeError(f"target: expected {len(reads)} slots as source has, got {len(writes)}")
    return reads, writes


def _check_writable(device: Device, dtype: str, count: int) -> None:
    traits = device.traits
    if dtype != "float32" and not traits.int16 and not (traits.float16 and dtype == "float16"):
        raise UnsupportedError(f"pages: expected a dtype that {device!r} can write, got {dtype}")
    if count > INT32_MAX:
        raise UnsupportedError(f"pages: expected at most {INT32_MAX} elements to move at once, got {count}")
