"""Keys and values of one sequence, fetched token by token from the caller's own arrays."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..arrays import to_numpy
from ..errors import UnsupportedError
from ..storage import LatentKV, PagedKV, RaggedKV, Storage

FloatArray: TypeAlias = NDArray[np.float64]


def gather(kv: Storage, seq: int) -> tuple[FloatArray, FloatArray]:
    """Keys and values of sequence ``seq``, in order of position.

    Parameters
    ----------
    kv : RaggedKV or PagedKV
        The storage.
    seq : int
        The sequence.

    Returns
    -------
    k : float64 ``[kv_len, kv_heads, d_qk]``
    v : float64 ``[kv_len, kv_heads, d_v]``

    Raises
    ------
    UnsupportedError
        A storage the oracle has no definition for.
    """
    if isinstance(kv, RaggedKV):
        return _gather_ragged(kv, seq)
    if isinstance(kv, PagedKV):
        return _gather_paged(kv, seq)
    if isinstance(kv, LatentKV):
        return _gather_latent(kv, seq)
    raise _unknown(kv)


def sizes(kv: Storage) -> tuple[int, int, int]:
    """Number of sequences, number of kv heads, and ``d_v``."""
    if isinstance(kv, RaggedKV):
        v = to_numpy(kv.v, "v")
        return len(to_numpy(kv.kv_indptr, "kv_indptr")) - 1, v.shape[1], v.shape[2]
    if isinstance(kv, PagedKV):
        pages = to_numpy(kv.pages, "pages")
        return len(to_numpy(kv.page_indptr, "page_indptr")) - 1, pages.shape[2], pages.shape[4]
    if isinstance(kv, LatentKV):
        return len(to_numpy(kv.page_indptr, "page_indptr")) - 1, 1, kv.d_latent
    raise _unknown(kv)


def positions(kv: Storage, seq: int, count: int) -> NDArray[np.int64]:
    """Positions of the first ``count`` columns of a sequence: those past ``kept`` follow the dropped tokens."""
    kept, dropped = (getattr(kv, name, None) for name in ("kept", "dropped"))
    gap = 0 if dropped is None else int(dropped[seq])
    first = 0 if kept is None else int(kept[seq])
    return np.array([column if column < first else column + gap for column in range(count)], np.int64)


def _gather_latent(kv: LatentKV, seq: int) -> tuple[FloatArray, FloatArray]:
    pages, page_ids = to_numpy(kv.pages, "pages"), to_numpy(kv.page_ids, "page_ids")
    begin, end = (int(offset) for offset in to_numpy(kv.page_indptr, "page_indptr")[seq : seq + 2])
    page_size = pages.shape[1]
    kv_len = (end - begin - 1) * page_size + int(to_numpy(kv.last_page_len, "last_page_len")[seq]) if end > begin else 0
    k = _empty(kv_len, (1, pages.shape[2]))
    for position in range(kv_len):
        k[position, 0] = pages[page_ids[begin + position // page_size], position % page_size]
    return k, k[..., : kv.d_latent]


def _gather_ragged(kv: RaggedKV, seq: int) -> tuple[FloatArray, FloatArray]:
    all_k, all_v = to_numpy(kv.k, "k"), to_numpy(kv.v, "v")
    begin, end = (int(offset) for offset in to_numpy(kv.kv_indptr, "kv_indptr")[seq : seq + 2])
    k, v = _empty(end - begin, all_k.shape[1:]), _empty(end - begin, all_v.shape[1:])
    for position in range(end - begin):
        k[position] = all_k[begin + position]
        v[position] = all_v[begin + position]
    return k, v


def _gather_paged(kv: PagedKV, seq: int) -> tuple[FloatArray, FloatArray]:
    pages, page_ids = to_numpy(kv.pages, "pages"), to_numpy(kv.page_ids, "page_ids")
    begin, end = (int(offset) for offset in to_numpy(kv.page_indptr, "page_indptr")[seq : seq + 2])
    _, _, kv_heads, page_size, d = pages.shape
    last_page_len = int(to_numpy(kv.last_page_len, "last_page_len")[seq])
    kv_len = (end - begin - 1) * page_size + last_page_len if end > begin else 0
    k, v = _empty(kv_len, (kv_heads, d)), _empty(kv_len, (kv_heads, d))
    for position in range(kv_len):
        page = int(page_ids[begin + position // page_size])
        k[position] = pages[page, 0, :, position % page_size]
        v[position] = pages[page, 1, :, position % page_size]
    return k, v


def _empty(kv_len: int, shape: tuple[int, ...]) -> FloatArray:
    return np.empty((kv_len, *shape), np.float64)


def _unknown(kv: Any) -> UnsupportedError:
    return UnsupportedError(
        f"kv: expected RaggedKV or PagedKV, got {type(kv).__name__}; the oracle has no definition for it"
    )
