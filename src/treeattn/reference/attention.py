"""Dense attention, a row and a head at a time, over the visible columns only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..arrays import to_numpy
from ..errors import ShapeError
from ..masks import Mask
from ..storage import Storage
from .masks import visible
from .storage import gather, sizes

FloatArray: TypeAlias = NDArray[np.float64]
State: TypeAlias = tuple[NDArray[Any], NDArray[Any]]

LOG2_E = 1.4426950408889634


def attention(
    q: Any, kv: Storage, mask: Mask, *, q_indptr: Any = None, sm_scale: float | None = None
) -> tuple[FloatArray, FloatArray]:
    """Attention by its definition, in float64.

    Parameters
    ----------
    q : Array
        ``[q_total, q_heads, d_qk]``.
    kv : RaggedKV or PagedKV
        Keys and values.
    mask : Mask
        Who sees whom.
    q_indptr : integers, optional
        ``[num_seqs + 1]``; ``[0, q_total]`` where there is one sequence.
    sm_scale : float, optional
        Factor of ``q . k``; ``1 / sqrt(d_qk)`` by default.

    Returns
    -------
    out : float64 ``[q_total, q_heads, d_v]``
        0 in a row that sees nothing.
    lse : float64 ``[q_total, q_heads]``
        Base 2; ``-inf`` in a row that sees nothing.

    Raises
    ------
    ShapeError
        Heads that do not divide, or ``q_indptr`` missing or of the wrong size.
    """
    return _dense(to_numpy(q, "q"), kv, mask, _Arithmetic(np.float64, np.matmul), q_indptr=q_indptr, sm_scale=sm_scale)


def low_precision(
    q: Any,
    kv: Storage,
    mask: Mask,
    *,
    q_indptr: Any = None,
    sm_scale: float | None = None,
    folded: bool = False,
    backwards: bool = False,
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """The same in float32, ``out`` rounded to the dtype of ``q``: the yardstick for the error of a kernel.

    Parameters and shapes are those of `attention`; ``lse`` is float32. Two choices round differently, neither
    better: the scale ``folded`` into ``q`` or applied to ``q . k``, and sums run ``backwards`` or forwards.
    """
    q = to_numpy(q, "q")
    arithmetic = _Arithmetic(np.float32, _backwards if backwards else _forwards, folded)
    out, lse = _dense(q, kv, mask, arithmetic, q_indptr=q_indptr, sm_scale=sm_scale)
    return out.astype(q.dtype), lse


def merge(states: Iterable[State]) -> tuple[FloatArray, FloatArray]:
    """Attention over the union of disjoint key sets, from the ``(out, lse)`` of each.

    Parameters
    ----------
    states : iterable of ``(out, lse)``
        ``out [..., d_v]`` and ``lse [...]`` in base 2, one pair at least.

    Returns
    -------
    out : float64 ``[..., d_v]``
    lse : float64 ``[...]``
    """
    pairs = [(np.asarray(out, np.float64), np.asarray(lse, np.float64)) for out, lse in states]
    top = np.max([lse for _, lse in pairs], axis=0)
    total = np.zeros_like(top)
    out = np.zeros_like(pairs[0][0])
    for part, lse in pairs:
        some = lse > -np.inf
        weight = np.exp2(np.where(some, lse, 0) - np.where(some, top, 0))
        total += np.where(some, weight, 0)
        out += np.where(some[..., None], weight[..., None] * part, 0)
    empty = total == 0
    total[empty] = 1
    return out / total[..., None], np.where(empty, -np.inf, top + np.log2(total))


@dataclass(frozen=True)
class _Arithmetic:
    work: type[Any]
    product: Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]
    folded: bool = False

    @np.errstate(over="ignore", invalid="ignore")  # a visible NaN or infinity is data, not a mistake
    def attend(self, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], scale: float) -> tuple[NDArray[Any], Any]:
        """One row over its visible keys: ``q [d_qk]``, ``k [cols, d_qk]``, ``v [cols, d_v]``, cols >= 1."""
        q, k, v = (part.astype(self.work) for part in (q, k, v))
        factor = self.work(scale * LOG2_E)
        logits = self.product(k, q * factor) if self.folded else self.product(k, q) * factor
        top = logits.max()
        weights = np.exp2(logits - top)
        total = self.product(np.ones_like(weights)[None], weights)[0]
        return self.product(v.T, weights) / total, top + np.log2(total)


def _forwards(matrix: NDArray[Any], vector: NDArray[Any]) -> NDArray[Any]:
    # One term after another, as a kernel adds: BLAS's blocked sums would ask more than a kernel can.
    return np.add.accumulate(matrix * vector, axis=1)[:, -1]


def _backwards(matrix: NDArray[Any], vector: NDArray[Any]) -> NDArray[Any]:
    return _forwards(matrix[:, ::-1], vector[::-1])


def _dense(
    q: NDArray[Any], kv: Storage, mask: Mask, how: _Arithmetic, *, q_indptr: Any, sm_scale: float | None
) -> State:
    q_total, q_heads, d_qk = q.shape
    num_seqs, kv_heads, d_v = sizes(kv)
    if kv_heads == 0 or q_heads % kv_heads:
        raise ShapeError(f"q: expected a multiple of {kv_heads} (= kv_heads) heads, got {q_heads}")
    group = q_heads // kv_heads
    scale = d_qk**-0.5 if sm_scale is None else float(sm_scale)
    out: NDArray[Any] = np.zeros((q_total, q_heads, d_v), how.work)
    lse: NDArray[Any] = np.full((q_total, q_heads), -np.inf, how.work)
    indptr = _indptr(q_indptr, q_total, num_seqs)
    for seq in range(num_seqs):
        begin, end = indptr[seq], indptr[seq + 1]
        k, v = gather(kv, seq)
        seen = visible(mask, seq, end - begin, len(k))
        for row in range(begin, end):
            cols = np.flatnonzero(seen[row - begin])
            if cols.size == 0:
                continue
            for head in range(q_heads):
                kv_head = head // group
                keys, values = k[cols, kv_head], v[cols, kv_head]
                out[row, head], lse[row, head] = how.attend(q[row, head], keys, values, scale)
    return out, lse


def _indptr(q_indptr: Any, q_total: int, num_seqs: int) -> list[int]:
    if q_indptr is None:
        if num_seqs != 1:
            raise ShapeError(f"q_indptr: expected [{num_seqs + 1}] integers for {num_seqs} sequences, got None")
        return [0, q_total]
    indptr = [int(offset) for offset in to_numpy(q_indptr, "q_indptr")]
    if len(indptr) != num_seqs + 1 or indptr[0] != 0 or indptr[-1] != q_total:
        raise ShapeError(f"q_indptr: expected [{num_seqs + 1}] integers from 0 to {q_total} (= q_total), got {indptr}")
    return indptr
