"""One step of inference over a cache: new rows go in and attend, a layer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import api, cache_ops
from ..arrays import IntArray, to_numpy, view
from ..checks import integer
from ..errors import CacheError, ShapeError
from ..masks import Causal, Mask, Sink, Tree, Window
from ..planner import Plan
from ..rope import Rope
from ..storage import LatentKV, PagedKV
from .layout import Layout
from .table import Snapshot


class Step:
    """What `PagedKVCache.begin` returns: room for the new rows, and the page table with them.

    Rows are those of the sequences in the order given to `begin`. A step ends when one of its sequences is committed,
    begun anew, truncated or removed; `append` and `attention` are refused from then on.

    Attributes
    ----------
    seqs : tuple of int
        The sequences.
    """

    def __init__(
        self,
        seqs: tuple[int, ...],
        table: Snapshot,
        layout: Layout,
        layers: Sequence[PagedKV | LatentKV],
        pools: Sequence[cache_ops.Pool],
    ) -> None:
        self.seqs = seqs
        self._table, self._layout, self._layers, self._pools = table, layout, layers, pools
        self._appended = [False] * len(layers)
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self.is_open = True

    @property
    def q_indptr(self) -> IntArray:
        """Offsets of each sequence's rows, int32 ``[num_seqs + 1]``."""
        return self._table.q_indptr

    @property
    def positions(self) -> IntArray:
        """Position of each row, int32 ``[q_total]``: committed length plus depth in the tree."""
        return self._table.positions

    @property
    def slots(self) -> NDArray[np.int64]:
        """Slot of each row, ``page * page_size + place``, int64 ``[q_total]``."""
        return self._table.slots

    @cached_property
    def _places(self) -> cache_ops.Places:
        return self._pools[0].places(self.slots)

    def kv(self, layer: int) -> PagedKV | LatentKV:
        """Return a layer's keys and values with the page table of this step, for callers that plan themselves."""
        return self._layout.storage(self._layers[self._index(layer)].pages, self._table)

    def mask(self, window: int | None = None, sink: int = 0) -> Mask:
        """Return who sees whom: trees or, where all are chains, `Causal`; within a window and the first ``sink``."""
        mask: Mask = Causal() if self._table.is_causal else Tree(self._table.trees)
        if window is None:
            if Sink(sink).size:
                raise ShapeError(f"sink: expected a window beside it, got sink={sink} alone; without one all is seen")
            return mask
        return mask & (Window(window) | Sink(sink) if Sink(sink).size else Window(window))

    def append(self, layer: int, k: Any, v: Any = None, *, rope: Rope | None = None) -> None:
        """Write the new rows' keys and values.

        Parameters
        ----------
        layer : int
            Which layer.
        k, v : Array
            ``[q_total, kv_heads, head_dim]`` each, converted to the dtype of the cache; in a cache of compressed keys
            and values ``k`` alone, ``[q_total, d_latent + d_rope]``.
        rope : Rope, optional
            Rotate the keys by `positions` first.

        Raises
        ------
        TreeAttnError
            Arrays that do not fit, or a step that has ended; nothing is written then.
        """
        index = self._index(layer)
        if self._layout.d_latent is None and v is None:
            raise ShapeError("v: expected the values of the new rows, got None")
        self._pools[index].append(self._places, k, v, rope=rope, positions=self.positions)
        self._appended[index] = True

    def attention(
        self,
        layer: int,
        q: Any,
        *,
        window: int | None = None,
        sink: int = 0,
        sm_scale: float | None = None,
        softcap: float | None = None,
        alibi: Any = None,
        sink_logits: Any = None,
        rope: Rope | None = None,
        threads: int | None = None,
        target: Any = None,
    ) -> tuple[Any, Any]:
        """Compute attention of the new rows over their sequences, themselves included.

        Layers with equal options share one plan.

        Parameters
        ----------
        layer : int
            Which layer; its keys and values are appended already.
        q : Array
            ``[q_total, q_heads, head_dim]``.
        window, sink : int
            A row at position p sees positions ``> p - window`` and those below ``sink``; all by default.
        sm_scale, softcap, alibi, sink_logits, rope, threads, target
            As in `treeattn.attention`.

        Returns
        -------
        out : Array
            ``[q_total, q_heads, head_dim]`` (``d_latent`` for compressed values), of the kind and dtype of ``q``.
        lse : Array
            ``[q_total, q_heads]`` float32, base 2.

        Raises
        ------
        TreeAttnError
            Bad input, or a step that has ended.
        """
        index = self._index(layer)
        if not self._appended[index]:
            raise CacheError(f"layer: expected a layer whose new keys are in, got {layer}; call step.append first")
        queries = view(q, "q")
        if queries.ndim != 3:
            raise ShapeError(f"q: expected [q_total, q_heads, head_dim], got shape {list(queries.shape)}")
        options = {"sm_scale": sm_scale, "softcap": softcap, "rope": rope, "threads": threads, "target": target}
        arrays = {"alibi": alibi, "sink_logits": sink_logits}
        key = (queries.shape[1], queries.dtype, window, sink, *options.values(), *map(_content, arrays.items()))
        try:
            plan = self._plans.get(key)
        except TypeError:  # an option that does not hash is none that a plan takes: let it say so
            plan = None
        if plan is None:
            plan = self._plan(index, queries.shape[1], queries.dtype, window, sink, **options, **arrays)
            self._plans[key] = plan
        return plan.run(q, self._layers[index])

    def close(self) -> None:
        """End the step: its pages may hold other rows from now on."""
        self.is_open = False

    def _plan(self, layer: int, q_heads: int, dtype: str, window: int | None, sink: int, **options: Any) -> Plan:
        mask = self.mask(window, sink)
        self._check_dropped(window, sink)
        return api.plan(
            self.kv(layer), mask, q_indptr=self.q_indptr, q_heads=q_heads, dtype=dtype, check=False, **options
        )

    def _check_dropped(self, window: int | None, sink: int) -> None:
        """Check that no row sees a token that was dropped."""
        table = self._table
        for seq, length, kept, dropped, new in zip(
            self.seqs, table.lengths, table.kept, table.dropped, table.q_len, strict=True
        ):
            first = 0 if window is None else length - window + 1
            if dropped and new and (first < kept + dropped or sink > kept):
                raise CacheError(
                    f"window: expected one that sees none of the positions {kept} to {kept + dropped - 1} dropped from "
                    f"sequence {seq}, got window={window}, sink={sink} at position {length}"
                )

    def _index(self, layer: int) -> int:
        if not self.is_open:
            raise CacheError("step: expected an open step, got one that ended; begin another")
        return integer(layer, "layer", 0, len(self._layers) - 1)


def _content(item: tuple[str, Any]) -> tuple[Any, ...] | None:
    """Return what tells one array from another, by value: callers may reuse its memory for the next layer."""
    name, values = item
    if values is None:
        return None
    array = to_numpy(values, name)
    return array.dtype.str, array.shape, array.tobytes()
