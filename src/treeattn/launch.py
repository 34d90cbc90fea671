"""One layer of a plan: compare the arrays with what was planned, and call the kernel."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .arrays import IntArray, View, address, as_kind, empty_like_kind, view
from .errors import DTypeError, ShapeError, UnsupportedError
from .logits import LogitParts
from .rope import TABLE_LOW, Rope
from .storage import Pools, Storage, check_storage

if TYPE_CHECKING:
    from .planner import Work

LOG2_E = float(np.log2(np.e))


class LayerCheck:
    """What arrays of a layer must have in common with the plan, on every device."""

    pools: Pools
    q_dtype: str
    q_total: int
    q_heads: int

    def check_layer(self, q: View, pools: Pools) -> None:
        """Compare q, keys and values with what was planned."""
        wanted = (self.q_total, self.q_heads, self.pools.d_qk)
        if q.shape != wanted:
            raise ShapeError(
                f"q: expected shape [q_total, q_heads, d_qk of k] = {list(wanted)} as planned, got {list(q.shape)}"
            )
        if q.dtype != self.q_dtype:
            raise DTypeError(
                f"q: expected dtype {self.q_dtype} as planned, got {q.dtype}; make a plan with dtype={q.dtype!r}"
            )
        if pools is self.pools:
            return
        for name in ("kv_heads", "d_qk", "d_v", "dtype", "shared"):
            got, planned = getattr(pools, name), getattr(self.pools, name)
            if got != planned:
                raise ShapeError(f"kv: expected {name} {planned} as planned, got {got}; make a plan for this layout")
        if pools.num_pages < self.pools.num_pages:
            raise ShapeError(
                f"kv: expected at least {self.pools.num_pages} pages or rows as planned, got {pools.num_pages}"
            )
        size, planned_size = pools.k.shape, self.pools.k.shape
        if len(size) != len(planned_size) or size[1:] != planned_size[1:]:
            raise ShapeError(
                f"kv: expected keys {list(planned_size)} as planned, got {list(size)}; make a plan for this layout"
            )

    def check_out(self, target: View, out: Any, shape: tuple[int, ...]) -> None:
        """Check that a given output can be written in place."""
        if target.shape != shape:
            raise ShapeError(f"out: expected shape {list(shape)}, got {list(target.shape)}")
        self.check_out_dtype(target)
        if target.owner is not out:
            raise ShapeError(
                "out: expected aligned memory with a contiguous last axis, got another layout; pass out=None"
            )
        token, head = target.strides[:2]
        tokens, heads, d = shape
        if not (_apart(token, head, tokens, heads, d) or _apart(head, token, heads, tokens, d)):
            raise ShapeError("out: expected rows in places of their own, got strides that overlap; pass out=None")
        if isinstance(out, np.ndarray) and not out.flags.writeable:
            raise ShapeError("out: expected writable memory, got a read-only array; pass out=None")

    def check_out_dtype(self, out: View) -> None:
        """Compare the dtype of a given output with that of q."""
        if out.dtype != self.q_dtype:
            raise DTypeError(f"out: expected dtype {self.q_dtype} as q has, got {out.dtype}")


@dataclass
class Launch(LayerCheck):
    """A compiled kernel with the constants of a plan."""

    kernel: Any
    storage: Storage
    work: Work
    parts: LogitParts
    q_total: int
    q_heads: int
    threads: int
    sm_scale: float

    def __post_init__(self) -> None:
        self.local = threading.local()
        self.pools, self.table = self.storage.pools, self.storage.table
        self.q_dtype = self.kernel.spec.q_dtype
        self.static = self._static()
        self.pointers = tuple(_pointer(array) for array in self.static)
        cap = (self.parts.softcap or 1.0) * LOG2_E
        self.scalars = (
            self.threads, self.q_heads // self.pools.kv_heads, self.table.page_size, self.work.bounds.shape[1],
            self.sm_scale, cap, 1 / cap,
        )  # fmt: skip

    @property
    def num_items(self) -> int:
        return len(self.work.items)

    @property
    def template(self) -> str:
        """Which kernel template runs."""
        return f"CPU, {self.kernel.traits.vector} vectors"

    def run(self, q: Any, kv: Storage | None, out: Any, check: bool) -> tuple[Any, Any]:
        """Launch with the arrays of one layer."""
        if kv is not None:
            check_storage(kv)
        queries, pools = view(q, "q"), self.pools if kv is None else kv.pools
        if queries.device is not None or pools.k.device is not None:
            raise UnsupportedError(
                f"q, kv: expected memory on the CPU as planned, got {queries.device or pools.k.device}"
            )
        if check:
            self.check_layer(queries, pools)
        shape = (self.q_total, self.q_heads, pools.d_v)
        result = empty_like_kind(q, shape, self.q_dtype) if out is None else out
        lse = empty_like_kind(q, shape[:2], "float32")
        if out is None:
            place, strides = address(result), (self.q_heads * pools.d_v, pools.d_v)
        else:
            target = view(out, "out")
            self.check_out(target, out, shape)
            place, strides = target.pointer, (target.strides[0], target.strides[1])
        if self.work.items.size:
            layer = map(ctypes.c_void_p, (queries.pointer, pools.k.pointer, pools.v.pointer, place, address(lse)))
            self.kernel(
                *layer, *self.pointers, *self._scratch(), *self.scalars, *queries.strides[:2], *strides, self.q_heads,
                *pools.k_strides, *pools.v_strides,
            )  # fmt: skip
        return (as_kind(result, q) if out is None else out), as_kind(lse, q)

    def _static(self) -> tuple[NDArray[Any], ...]:
        """Arrays of the plan, in the order of the kernel's arguments; an absent part is never read."""
        work, parts, absent = self.work, self.parts, np.zeros(1, np.float32)
        low, high = (absent, absent)
        if parts.rope is not None:
            low, high = angles(parts.rope, self.pools.d_qk, work.last_position)
        alibi, sinks = (absent if part is None else part for part in (parts.alibi, parts.sink_logits))
        return (
            work.items, work.item_indptr, work.seqs, work.spans, self.table.page_ids, work.bounds, work.positions,
            work.nodes, low, high, alibi, sinks,
        )  # fmt: skip

    def workspace(self) -> tuple[NDArray[np.float32], IntArray]:
        """Return the scratch memory of the calling thread, made at its first call."""
        if not hasattr(self.local, "arrays"):
            leaves, rows = self.kernel.spec.num_bounds, max(self.kernel.config.rows, 8)
            floats = np.empty(self.threads * self.kernel.workspace_floats + 16, np.float32)
            skip = -floats.ctypes.data % 64 // 4
            self.use_workspace(floats[skip:], np.empty(self.threads * leaves * rows, np.int32))
        arrays: tuple[NDArray[np.float32], IntArray] = self.local.arrays
        return arrays

    def use_workspace(self, floats: NDArray[np.float32], bounds: IntArray) -> None:
        """Give the calling thread other scratch memory, of the sizes of `workspace`."""
        self.local.arrays = floats, bounds
        self.local.pointers = _pointer(floats), _pointer(bounds)

    def _scratch(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        try:
            pointers: tuple[ctypes.c_void_p, ctypes.c_void_p] = self.local.pointers
        except AttributeError:
            self.workspace()
            pointers = self.local.pointers
        return pointers


def angles(rope: Rope, d_qk: int, last_position: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the two tables of angles for every position that occurs.

    Scalings that depend on the length of a sequence take the longest of the batch, as in a padded batch.
    """
    tables = rope.tables(d_qk, last_position, last_position + 1)
    return tables[:TABLE_LOW], tables[TABLE_LOW:]


def _apart(outer: int, inner: int, count: int, inner_count: int, size: int) -> bool:
    """Whether rows of ``size`` elements, ``inner`` apart within ``outer`` steps, never overlap."""
    fine = inner_count <= 1 or abs(inner) >= size
    return fine and (count <= 1 or abs(outer) >= abs(inner) * (inner_count - 1) + size)


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(address(array))
