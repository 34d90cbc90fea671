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
from ..rope import Rope
from ..storage import Storage
from .masks import positions, visible
from .rope import rotate
from .storage import gather, sizes
from .storage import positions as of_columns

FloatArray: TypeAlias = NDArray[np.float64]
State: TypeAlias = tuple[NDArray[Any], NDArray[Any]]

LOG2_E = 1.4426950408889634


def attention(
    q: Any, kv: Storage, mask: Mask, *, q_indptr: Any = None, sm_scale: float | None = None, **parts: Any
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
    **parts
        ``softcap``, ``alibi``, ``sink_logits``, ``rope`` as in `treeattn.attention`.

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
    how = _Arithmetic(np.float64, np.matmul)
    return _dense(to_numpy(q, "q"), kv, mask, how, _Parts(**parts), q_indptr=q_indptr, sm_scale=sm_scale)


def low_precision(
    q: Any,
    kv: Storage,
    mask: Mask,
    *,
    q_indptr: Any = None,
    sm_scale: float | None = None,
    folded: bool = False,
    backwards: bool = False,
    **parts: Any,
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """The same in float32, ``out`` rounded to the dtype of ``q``: the yardstick for the error of a kernel.

    Parameters and shapes are those of `attention`; ``lse`` is float32. Two choices round differently, neither
    better: the scale ``folded`` into ``q`` or applied to ``q . k``, and sums run ``backwards`` or forwards.
    """
    q = to_numpy(q, "q")
    arithmetic = _Arithmetic(np.float32, _backwards if backwards else _forwards, folded)
    out, lse = _dense(q, kv, mask, arithmetic, _Parts(**parts), q_indptr=q_indptr, sm_scale=sm_scale)
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

    @np.errstate(over="ignore", invalid="ignore", divide="ignore")  # a visible NaN or infinity is data, no mistake
    def attend(
        self, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], scale: float, cap: float | None, bias: Any, sink: Any
    ) -> tuple[NDArray[Any], Any]:
        """One row over its visible keys: ``q [d_qk]``, ``k [cols, d_qk]``, ``v [cols, d_v]``; logits in base 2."""
        q, k, v = (part.astype(self.work) for part in (q, k, v))
        factor = self.work(scale * LOG2_E)
        logits = self.product(k, q * factor) if self.folded else self.product(k, q) * factor
        if cap is not None:
            limit = self.work(cap * LOG2_E)
            logits = limit * np.tanh(logits / limit)
        logits = np.append(
            logits + self.work(LOG2_E) * bias.astype(self.work), np.array(sink, self.work) * self.work(LOG2_E)
        )
        top = logits.max()
        if top == -np.inf:
            return np.zeros(v.shape[1], self.work), top
        weights = np.exp2(logits - top)
        total = self.product(np.ones_like(weights)[None], weights)[0]
        return self.product(v.T, weights[: len(k)]) / total, top + np.log2(total)


@dataclass(frozen=True)
class _Parts:
    softcap: float | None = None
    alibi: Any = None
    sink_logits: Any = None
    rope: Rope | None = None

    def turned(self, x: NDArray[Any], positions: NDArray[np.int64], seq_len: int) -> NDArray[Any]:
        return x if self.rope is None else rotate(x, np.maximum(positions, 0), self.rope, seq_len)

    def bias(self, head: int, distance: NDArray[np.int64]) -> NDArray[np.float64]:
        slope = 0.0 if self.alibi is None else float(self.alibi[head])
        return slope * distance.astype(np.float64)

    def sink(self, head: int) -> list[float]:
        return [] if self.sink_logits is None else [float(self.sink_logits[head])]


def _forwards(matrix: NDArray[Any], vector: NDArray[Any]) -> NDArray[Any]:
    # One term after another, as a kernel adds: BLAS's blocked sums would ask more than a kernel can.
    products = matrix * vector
    return np.add.accumulate(products, axis=1)[:, -1] if products.size else products.sum(axis=1)


def _backwards(matrix: NDArray[Any], vector: NDArray[Any]) -> NDArray[Any]:
    return _forwards(matrix[:, ::-1], vector[::-1])


def _dense(
    q: NDArray[Any], kv: Storage, mask: Mask, how: _Arithmetic, parts: _Parts, *, q_indptr: Any, sm_scale: float | None
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
    seq_len = _longest(kv, num_seqs) if parts.rope else 0
    for seq in range(num_seqs):
        rows = slice(indptr[seq], indptr[seq + 1])
        k, v = gather(kv, seq)
        shape = seq, rows.stop - rows.start, len(k), of_columns(kv, seq, len(k))
        seen, (of_rows, of_cols) = visible(mask, *shape), positions(mask, *shape)
        k, queries = parts.turned(k, of_cols, seq_len), parts.turned(q[rows], of_rows, seq_len)
        for row, query in enumerate(queries):
            cols = np.flatnonzero(seen[row])
            for head in range(q_heads):
                sink = parts.sink(head)
                if cols.size == 0 and not sink:
                    continue
                keys, values = k[cols, head // group], v[cols, head // group]
                bias = parts.bias(head, of_cols[cols] - of_rows[row])
                state = how.attend(query[head], keys, values, scale, parts.softcap, bias, sink)
                out[rows.start + row, head], lse[rows.start + row, head] = state
    return out, lse


def _longest(kv: Storage, num_seqs: int) -> int:
    ends = [of_columns(kv, seq, len(gather(kv, seq)[0]))[-1:] for seq in range(num_seqs)]
    return 1 + max((int(end[0]) for end in ends if len(end)), default=0)


def _indptr(q_indptr: Any, q_total: int, num_seqs: int) -> list[int]:
    if q_indptr is None:
        if num_seqs != 1:
            raise ShapeError(f"q_indptr: expected [{num_seqs + 1}] integers for {num_seqs} sequences, got None")
        return [0, q_total]
    indptr = [int(offset) for offset in to_numpy(q_indptr, "q_indptr")]
    if len(indptr) != num_seqs + 1 or indptr[0] != 0 or indptr[-1] != q_total:
        raise ShapeError(f"q_indptr: expected [{num_seqs + 1}] integers from 0 to {q_total} (= q_total), got {indptr}")
    return indptr
