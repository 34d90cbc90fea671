"""Attention states: an output and its base-2 log-sum-exp, and how states of disjoint keys merge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import as_kind, check_dtype, dtype_name, to_numpy
from .devices import DeviceArray
from .errors import ShapeError


def merge(*states: Any) -> tuple[Any, Any]:
    """Merge attention states of disjoint sets of keys.

    Parameters
    ----------
    *states : Array
        ``out_a, lse_a, out_b, lse_b, ...``: outputs ``[..., d_v]`` with their base-2 LSE ``[...]``, two states or more.

    Returns
    -------
    out : Array
        ``[..., d_v]``, of the kind and dtype of ``out_a``.
    lse : Array
        ``[...]`` float32, base 2. ``merge(x, nothing)`` is x, and of two empty states ``(0, -inf)``. No NaN comes of
        LSEs that are finite or -inf; a row with an LSE of NaN or +inf is NaN, and no other row is.

    Raises
    ------
    ShapeError
        An odd number of arrays, or shapes that differ.
    DTypeError
        Elements other than float32, float16 or bfloat16: states are merged in float32.
    """
    if len(states) < 4 or len(states) % 2:
        raise ShapeError(f"merge: expected out_a, lse_a, out_b, lse_b, ..., got {len(states)} arrays")
    if all(isinstance(state, DeviceArray) for state in states):
        from . import device_ops

        _check_shapes(states[::2], states[1::2])
        return device_ops.merge(list(zip(states[::2], states[1::2], strict=True)))
    outs = [_check_state(state, f"out {i}") for i, state in enumerate(states[::2])]
    lses = [_check_state(state, f"lse {i}") for i, state in enumerate(states[1::2])]
    _check_shapes(outs, lses)
    lses = [lse.astype(np.float32) for lse in lses]
    out, lse = merge_states(outs, lses)
    return as_kind(out.astype(outs[0].dtype), states[0]), as_kind(lse, states[0])


def _check_shapes(outs: Sequence[Any], lses: Sequence[Any]) -> None:
    """Check that all outputs have one shape, and that it goes with that of every LSE."""
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.ndim == 0 or out.shape != outs[0].shape or lse.shape != outs[0].shape[:-1]:
            raise ShapeError(
                f"merge: expected out [..., d_v] and lse [...] of one shape in every state, "
                f"got {out.shape} and {lse.shape} in state {i}"
            )


def to_natural(lse: Any) -> Any:
    """Turn a base-2 log-sum-exp into a natural one: ``lse * ln 2``."""
    return as_kind(_check_state(lse, "lse") * np.float32(math.log(2.0)), lse)


def _check_state(array: Any, name: str) -> NDArray[Any]:
    state = to_numpy(array, name)
    check_dtype(dtype_name(state.dtype), name)
    return state


def merge_states(
    outs: Sequence[NDArray[Any]], lses: Sequence[NDArray[np.float32]]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Merge states in their order, in float32; see `merge`."""
    stacked = np.stack(lses)
    highest = stacked.max(axis=0)
    out = np.zeros(outs[0].shape, np.float32)
    with np.errstate(all="ignore"):  # infinities and NaN of a state are its own
        weights = np.exp2(stacked - np.where(np.isneginf(highest), np.float32(0), highest))
        total = weights.sum(axis=0)
        share = np.divide(weights, total, out=np.zeros_like(weights), where=total != 0)
        for part, weight in zip(outs, share, strict=True):
            held = weight[..., None] != 0  # a state without weight adds nothing, whatever it holds
            out += np.where(held, part.astype(np.float32), np.float32(0)) * weight[..., None]
        return out, np.asarray(highest + np.log2(total), np.float32)
