"""Where key and value of (sequence, position, kv head) lie.

A storage is data: arrays and a page table, checked by `validate`. Kernels see every storage the same way, as two
pools with strides and a page table (`Pools` and `PageTable`): ragged memory is one endless page per sequence.

==================  ==================  =================  =======================
here                FlashInfer          vLLM               TVM
==================  ==================  =================  =======================
``page_ids``        ``kv_indices``      ``block_table``    ``page_values``
``page_indptr``     ``kv_indptr``       (padded rows)      ``page_indptr``
``last_page_len``   ``kv_last_page_len``  ``seq_lens``     ``length_info``
==================  ==================  =================  =======================
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import numpy as np

from .arrays import INT32_MAX, IntArray, View, indices, view
from .checks import integer
from .devices import Device, itemsize
from .errors import DTypeError, IndexRangeError, ShapeError, UnsupportedError

ENDLESS_PAGE = INT32_MAX


@dataclass(frozen=True, slots=True)
class PageTable:
    """Positions to slots.

    Position ``p`` of sequence ``b`` is slot ``p % page_size`` of page ``page_ids[page_indptr[b] + p // page_size]``.
    """

    page_indptr: IntArray
    page_ids: IntArray
    page_size: int
    kv_len: IntArray
    moves: IntArray | None = None
    """Where columns have moved, int32 ``[num_seqs, 4]``: position of column 0, and, from column ``kept`` on, the
    further positions and further slots (position_begin, kept, gap, skip)."""


@dataclass(frozen=True, slots=True)
class Pools:
    """Keys and values as a kernel reads them; strides in elements, as (page, slot, kv head)."""

    k: View
    v: View
    k_strides: tuple[int, int, int]
    v_strides: tuple[int, int, int]
    num_pages: int
    kv_heads: int
    d_qk: int
    d_v: int
    shared: bool = False
    """Values are the first elements of their key's slot."""

    @property
    def dtype(self) -> str:
        return self.k.dtype


AnyStorage = TypeVar("AnyStorage", bound="Storage")


class Storage:
    """Base of `RaggedKV`, `PagedKV` and `LatentKV`."""

    table: PageTable
    pools: Pools
    data: ClassVar[tuple[str, ...]]
    """Names of the fields that hold keys and values."""

    @property
    def num_seqs(self) -> int:
        """Number of sequences."""
        return len(self.table.kv_len)

    @property
    def kv_len(self) -> IntArray:
        """Number of keys of each sequence, int32 ``[num_seqs]``."""
        return self.table.kv_len

    @property
    def kv_heads(self) -> int:
        return self.pools.kv_heads

    @property
    def dtype(self) -> str:
        return self.pools.dtype

    def __repr__(self) -> str:
        shapes = (f"{name}={list(getattr(getattr(self, name), 'shape', ()))}" for name in self.data)
        return f"{type(self).__name__}({', '.join(shapes)}, ...)"

    def validate(self) -> None:
        """Check every index a kernel will follow, in O(page table)."""
        raise NotImplementedError

    def to(self: AnyStorage, device: Device) -> AnyStorage:
        """Return the same keys and values in a device's memory; what is there already is not copied."""
        if self.pools.k.device is device:
            return self
        arrays = {name: device.upload(getattr(self, name)) for name in self.data}
        return replace(self, **arrays)  # type: ignore[type-var]


@dataclass(frozen=True, eq=False, repr=False)
class RaggedKV(Storage):
    """Keys and values of all sequences, one after another.

    Parameters
    ----------
    k : Array
        ``[kv_total, kv_heads, d_qk]``, any strides with a contiguous last axis.
    v : Array
        ``[kv_total, kv_heads, d_v]``, of the dtype of ``k``.
    kv_indptr : integers
        ``[num_seqs + 1]``: sequence ``b`` owns rows ``kv_indptr[b]`` to ``kv_indptr[b + 1]``.
    """

    k: Any
    v: Any
    kv_indptr: Any
    data: ClassVar[tuple[str, ...]] = ("k", "v")

    @cached_property
    def table(self) -> PageTable:  # type: ignore[override]
        """The page table kernels walk: one endless page per sequence."""
        indptr = indices(self.kv_indptr, "kv_indptr")
        check_indptr(indptr, self.pools.num_pages, "kv_indptr", "k")
        pages = np.arange(len(indptr), dtype=np.int32)
        return PageTable(pages, indptr[:-1], ENDLESS_PAGE, np.diff(indptr))

    @cached_property
    def pools(self) -> Pools:  # type: ignore[override]
        """Keys and values as kernels read them."""
        k, v = view(self.k, "k"), view(self.v, "v")
        for array, name in ((k, "k"), (v, "v")):
            if array.ndim != 3:
                raise ShapeError(f"{name}: expected [kv_total, kv_heads, d], got shape {array.shape}")
        if k.shape[:2] != v.shape[:2]:
            raise ShapeError(f"v: expected [{k.shape[0]}, {k.shape[1]}, d_v] as k has, got {v.shape}")
        _check_alike(k, v)
        token_k, head_k, _ = k.strides
        token_v, head_v, _ = v.strides
        strides = (token_k, token_k, head_k), (token_v, token_v, head_v)
        return _pools(k, v, *strides, num_pages=k.shape[0], kv_heads=k.shape[1])

    def validate(self) -> None:
        """Nothing is left to check: ``kv_indptr`` was, when the page table was made."""
        _ = self.table


class PageTableStorage(Storage):
    """Base of storages with a page table: what `PagedKV` and `LatentKV` share.

    Sequences may have dropped tokens that no window sees any more: after the first ``kept[b]`` tokens, ``dropped[b]``
    tokens are gone from the pages, and the tokens behind them keep their positions.
    """

    page_indptr: Any
    page_ids: Any
    last_page_len: Any
    kept: Any
    dropped: Any
    data: ClassVar[tuple[str, ...]] = ("pages",)

    @cached_property
    def table(self) -> PageTable:  # type: ignore[override]
        """The page table kernels walk."""
        indptr = indices(self.page_indptr, "page_indptr")
        ids = indices(self.page_ids, "page_ids")
        check_indptr(indptr, len(ids), "page_indptr", "page_ids")
        last, page_size = self._last_page_len, self.page_size
        num_pages = np.diff(indptr).astype(np.int64)
        kv_len = np.where(num_pages > 0, (num_pages - 1) * page_size + last, last)
        if kv_len.size and int(kv_len.max()) > INT32_MAX:
            raise IndexRangeError(f"page_indptr: a sequence of {kv_len.max()} keys; at most {INT32_MAX} are offered")
        return PageTable(indptr, ids, page_size, kv_len.astype(np.int32), self._moves(len(kv_len)))

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        raise NotImplementedError

    @cached_property
    def _last_page_len(self) -> IntArray:
        return indices(self.last_page_len, "last_page_len", (len(indices(self.page_indptr, "page_indptr")) - 1,))

    def _moves(self, num_seqs: int) -> IntArray | None:
        if self.dropped is None:
            if self.kept is not None:
                raise ShapeError("kept: expected dropped beside it, got kept alone; pass both, or neither")
            return None
        dropped = indices(self.dropped, "dropped", (num_seqs,))
        kept = np.zeros_like(dropped) if self.kept is None else indices(self.kept, "kept", (num_seqs,))
        zero = np.zeros_like(dropped)
        return np.stack([zero, kept, dropped, zero], axis=1)

    def validate(self) -> None:
        """Check the page table: indptr, page ids in used slots, lengths of last pages, dropped tokens."""
        table, num_pages = self.table, self.pools.num_pages
        _check_page_ids(table, num_pages)
        _check_last_page_len(table, self._last_page_len)
        _check_moves(table)


@dataclass(frozen=True, eq=False, repr=False)
class PagedKV(PageTableStorage):
    """Keys and values in pages of one pool.

    Parameters
    ----------
    pages : Array
        ``[num_pages, 2, kv_heads, page_size, d]``: keys at index 0 of the second axis, values at 1. Any strides with a
        contiguous last axis, so a transposed view of an NHD pool works without a copy.
    page_indptr : integers
        ``[num_seqs + 1]``: sequence ``b`` uses ``page_ids[page_indptr[b]:page_indptr[b + 1]]`` in order.
    page_ids : integers
        ``[page_indptr[-1]]``, each in ``[0, num_pages)``.
    last_page_len : integers
        ``[num_seqs]``: slots used in the last page, 1 to ``page_size``; 0 for a sequence without pages.
    kept, dropped : integers, optional
        ``[num_seqs]``: after the first ``kept[b]`` tokens (0 by default), ``dropped[b]`` tokens are gone from the
        pages; the tokens behind them keep their positions.
    """

    pages: Any
    page_indptr: Any
    page_ids: Any
    last_page_len: Any
    kept: Any = None
    dropped: Any = None

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self._pages.shape[3]

    @cached_property
    def pools(self) -> Pools:  # type: ignore[override]
        """Keys and values as kernels read them."""
        pages = self._pages
        page, kv, head, slot, _ = pages.strides
        step = kv if pages.device else kv * itemsize(pages.dtype)
        k = replace(pages, shape=(pages.shape[0], *pages.shape[2:]), strides=(page, head, slot, 1))
        v = replace(k, pointer=k.pointer + step)
        order = (page, slot, head)
        return _pools(k, v, order, order, num_pages=pages.shape[0], kv_heads=pages.shape[2])

    @cached_property
    def _pages(self) -> View:
        pages = view(self.pages, "pages")
        if pages.ndim != 5 or pages.shape[1] != 2 or pages.shape[3] < 1:
            raise ShapeError(
                f"pages: expected [num_pages, 2, kv_heads, page_size, d], got shape {pages.shape}; "
                "keys and values are indices 0 and 1 of the second axis"
            )
        return pages


@dataclass(frozen=True, eq=False, repr=False)
class LatentKV(PageTableStorage):
    """Compressed keys and values (MLA, absorbed form): one slot holds both, for all heads.

    The key is the whole slot, the value its first ``d_latent`` elements; there is one kv head. ``sm_scale`` of such a
    model belongs to the uncompressed heads (192 ** -0.5 in DeepSeek-V3), so pass it.

    Parameters
    ----------
    pages : Array
        ``[num_pages, page_size, d_latent + d_rope]``, any strides with a contiguous last axis.
    page_indptr, page_ids, last_page_len, kept, dropped
        As in `PagedKV`.
    d_latent : int
        Elements of the value.
    """

    pages: Any
    page_indptr: Any
    page_ids: Any
    last_page_len: Any
    d_latent: int = 512
    kept: Any = None
    dropped: Any = None

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self._pages.shape[1]

    @cached_property
    def pools(self) -> Pools:  # type: ignore[override]
        """Keys and values as kernels read them."""
        pages = self._pages
        page, slot, _ = pages.strides
        k = replace(pages, shape=(pages.shape[0], 1, *pages.shape[1:]), strides=(page, 0, slot, 1))
        v = replace(k, shape=(*k.shape[:-1], int(self.d_latent)))
        order = (page, slot, 0)
        return _pools(k, v, order, order, num_pages=pages.shape[0], kv_heads=1, shared=True)

    @cached_property
    def _pages(self) -> View:
        pages = view(self.pages, "pages")
        if pages.ndim != 3 or pages.shape[1] < 1:
            raise ShapeError(f"pages: expected [num_pages, page_size, d_latent + d_rope], got shape {pages.shape}")
        integer(self.d_latent, "d_latent", most=pages.shape[2])
        return pages


def check_storage(kv: Any) -> None:
    """Check that ``kv`` is one of this module's storages."""
    if not isinstance(kv, Storage):
        raise DTypeError(
            f"kv: expected RaggedKV, PagedKV or LatentKV, got {type(kv).__name__}; wrap the arrays in one of them"
        )


def check_indptr(indptr: IntArray, total: int, name: str, of: str) -> None:
    """Check that ``indptr`` starts at 0, never falls and ends at ``total``, the length of ``of``."""
    if len(indptr) == 0 or indptr[0] != 0:
        got = indptr[0] if len(indptr) else "an empty array"
        raise IndexRangeError(f"{name}: expected [num_seqs + 1] integers with 0 at index 0, got {got}")
    fall = indptr[1:] < indptr[:-1]
    if fall.any():
        at = int(fall.argmax())
        raise IndexRangeError(
            f"{name}: expected values that never fall, got {indptr[at + 1]} after {indptr[at]} at index {at + 1}"
        )
    if indptr[-1] != total:
        raise IndexRangeError(
            f"{name}: expected to end at {total} (= the length of {of}), got {indptr[-1]} at index {len(indptr) - 1}"
        )


def _check_page_ids(table: PageTable, num_pages: int) -> None:
    ids = table.page_ids
    if len(ids) == 0 or (int(ids.min()) >= 0 and int(ids.max()) < num_pages):
        return
    at = int(((ids < 0) | (ids >= num_pages)).argmax())
    seq = int(np.searchsorted(table.page_indptr, at, side="right")) - 1
    raise IndexRangeError(
        f"page_ids: expected int32 in [0, {num_pages}), got {ids[at]} at index {at} (sequence {seq}); "
        f"the pool has {num_pages} pages"
    )


def _check_last_page_len(table: PageTable, last: IntArray) -> None:
    has_pages = table.page_indptr[1:] > table.page_indptr[:-1]
    wrong = np.where(has_pages, (last < 1) | (last > table.page_size), last != 0)
    if wrong.any():
        seq = int(wrong.argmax())
        wanted = f"1 to {table.page_size} (= page_size)" if has_pages[seq] else "0 (the sequence has no pages)"
        raise IndexRangeError(f"last_page_len: expected {wanted}, got {last[seq]} at index {seq}")


def _check_moves(table: PageTable) -> None:
    if table.moves is None:
        return
    kept, dropped = table.moves[:, 1], table.moves[:, 2]
    for name, fine, got in (
        ("kept", (kept >= 0) & (kept <= table.kv_len), kept),
        ("dropped", (dropped >= 0) & (dropped.astype(np.int64) + table.kv_len <= INT32_MAX), dropped),
    ):
        if not fine.all():
            seq = int(np.argmin(fine))
            raise IndexRangeError(
                f"{name}: expected 0 or more, within the sequence of {table.kv_len[seq]} keys, "
                f"got {got[seq]} at index {seq}"
            )


def _pools(
    k: View,
    v: View,
    k_strides: tuple[int, int, int],
    v_strides: tuple[int, int, int],
    *,
    num_pages: int,
    kv_heads: int,
    shared: bool = False,
) -> Pools:
    if kv_heads < 1 or k.shape[-1] < 1 or v.shape[-1] < 1:
        raise ShapeError(f"k, v: expected at least one kv head and d >= 1, got shapes {k.shape} and {v.shape}")
    return Pools(k, v, k_strides, v_strides, num_pages, kv_heads, k.shape[-1], v.shape[-1], shared)


def _check_alike(k: View, v: View) -> None:
    if k.dtype != v.dtype:
        raise DTypeError(f"v: expected dtype {k.dtype} as k has, got {v.dtype}")
    if k.device is not v.device:
        raise UnsupportedError(f"v: expected memory where k is, {k.device or 'the host'}, got {v.device or 'the host'}")
