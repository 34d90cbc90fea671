"""A plan whose keys are cut, so that threads can share a row: every part is a state, and the states are merged.

Parts end at multiples of a fixed number of columns, so what a row gets does not depend on the batch, the pages or the
threads. The kernel is the ordinary one: q comes repeated, once a part, and in float32, and so do the states.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .arrays import as_kind, numpy_dtype, to_numpy, view
from .kernels.spec import KernelSpec
from .launch import LOG2_E, Launch, LayerCheck
from .logits import LogitParts
from .states import merge_states
from .storage import Storage, check_storage

SINKS = "sinks"


def partial_spec(spec: KernelSpec) -> KernelSpec:
    """Return the spec of the parts: float32 states, and no sink, which counts once."""
    return replace(spec, q_dtype="float32", logits=tuple(part for part in spec.logits if part != SINKS))


class SplitLaunch(LayerCheck):
    """A `Launch` of all parts and the merge of their states."""

    def __init__(
        self, kernel: Any, storage: Storage, work: Any, parts: LogitParts, q_total: int, q_heads: int, threads: int,
        sm_scale: float, q_dtype: str,
    ) -> None:  # fmt: skip
        self.q_total, self.q_heads, self.q_dtype, self.pools = q_total, q_heads, q_dtype, storage.pools
        self.sink_logits, self.parts, self.threads = parts.sink_logits, work.parts, threads
        inner = replace(parts, sink_logits=None)
        self.launch = Launch(kernel, storage, work, inner, q_total * work.parts, q_heads, threads, sm_scale)

    @property
    def num_items(self) -> int:
        return self.launch.num_items

    @property
    def template(self) -> str:
        """Which kernel template runs."""
        return self.launch.template

    def run(self, q: Any, kv: Storage | None, out: Any, check: bool) -> tuple[Any, Any]:
        """Launch with the arrays of one layer."""
        if kv is not None:
            check_storage(kv)
        queries, pools = view(q, "q"), self.pools if kv is None else kv.pools
        if check:
            self.check_layer(queries, pools)
        shape = (self.q_total, self.q_heads, pools.d_v)
        if out is not None:
            self.check_out(view(out, "out"), out, shape)
        repeated = np.tile(to_numpy(q, "q").astype(np.float32), (self.parts, 1, 1))
        outs, lses = self.launch.run(repeated, kv, None, check)
        states = [*outs.reshape(self.parts, *shape)], [*lses.reshape(self.parts, *shape[:2])]
        if self.sink_logits is not None:
            states[0].append(np.zeros(shape, np.float32))
            states[1].append(np.broadcast_to(self.sink_logits * np.float32(LOG2_E), shape[:2]))
        merged, lse = merge_states(*states)
        merged = merged.astype(numpy_dtype(self.q_dtype))
        if out is None:
            return as_kind(merged, q), as_kind(lse, q)
        to_numpy(out, "out")[...] = merged
        return out, as_kind(lse, q)
