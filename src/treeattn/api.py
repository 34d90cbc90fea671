"""The calls most people need: `attention`, `plan`, `merge`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import as_kind, to_numpy, view
from .backends import device, is_device
from .compiler import gpu_kernel, kernel
from .device_launch import DeviceLaunch
from .device_work import make_device_work
from .errors import DTypeError, ShapeError
from .kernels.spec import KernelSpec
from .launch import Launch
from .logits import check_parts
from .masks import Batch, Mask
from .planner import Plan, check_heads, check_q_dtype, check_q_indptr, check_rows, check_threads, make_work
from .storage import Storage, check_storage
from .targets import available_threads, runnable

FLOAT32_MAX = float(np.finfo(np.float32).max)


def attention(
    q: Any,
    kv: Storage,
    mask: Mask,
    *,
    q_indptr: Any = None,
    sm_scale: float | None = None,
    softcap: float | None = None,
    alibi: Any = None,
    sink_logits: Any = None,
    rope: Any = None,
    threads: int | None = None,
    target: Any = None,
    out: Any = None,
    check: bool = True,
) -> tuple[Any, Any]:
    """Compute attention of query rows over cached keys and values.

    Parameters
    ----------
    q : Array
        ``[q_total, q_heads, d_qk]``, float32, float16 or bfloat16.
    kv : RaggedKV or PagedKV
        Keys and values, the new tokens' own included.
    mask : Mask
        Which keys each row sees.
    q_indptr : integers, optional
        ``[num_seqs + 1]``: sequence ``b`` owns query rows ``q_indptr[b]`` to ``q_indptr[b + 1]``. May be left out for a
        single sequence, and for one row per sequence.
    sm_scale : float, optional
        Factor of ``q . k``; ``1 / sqrt(d_qk)`` by default.
    softcap : float, optional
        ``logit = softcap * tanh(sm_scale * q . k / softcap)``.
    alibi : Array, optional
        Slopes ``[q_heads]``: ``logit += slope * (position of key - position of query)``, after the soft-cap.
    sink_logits : Array, optional
        ``[q_heads]``, natural units: a key without value that every row sees, counted in the LSE.
    rope : Rope, optional
        Rotate q and keys by position as they are read, for caches that hold keys unrotated. Positions below 0 (more
        rows than keys) count as 0.
    threads : int, optional
        Threads to use; the processors of the affinity mask by default.
    target : str, optional
        ``"llvm"``, the machine at hand.
    out : Array, optional
        Where to write the output.
    check : bool
        False skips the checks of indices, for callers who made them once.

    Returns
    -------
    out : Array
        ``[q_total, q_heads, d_v]``, of the kind and dtype of ``q``. A row that sees nothing is 0.
    lse : Array
        ``[q_total, q_heads]`` float32, base 2; -inf for a row that sees nothing.

    Raises
    ------
    TreeAttnError
        Bad input; nothing is written then.

    Examples
    --------
    >>> import numpy as np, treeattn as ta
    >>> kv = ta.RaggedKV(np.ones((3, 1, 8), "float32"), np.ones((3, 1, 8), "float32"), [0, 3])
    >>> out, lse = ta.attention(np.ones((2, 1, 8), "float32"), kv, ta.Causal())
    >>> out.shape, lse.shape
    ((2, 1, 8), (2, 1))
    """
    queries = view(q, "q")
    if queries.ndim != 3:
        raise ShapeError(f"q: expected [q_total, q_heads, d_qk], got shape {queries.shape}")
    check_storage(kv)
    indptr = check_q_indptr(_default_indptr(q_indptr, queries.shape[0], kv.num_seqs), kv.num_seqs, queries.shape[0])
    step = plan(
        kv, mask, q_indptr=indptr, q_heads=queries.shape[1],
        dtype=queries.dtype, sm_scale=sm_scale, softcap=softcap, alibi=alibi, sink_logits=sink_logits, rope=rope,
        threads=threads, target=target, check=check,
    )  # fmt: skip
    return step.run(q, kv, out=out, check=check)


def plan(
    kv: Storage,
    mask: Mask,
    *,
    q_indptr: Any,
    q_heads: int,
    dtype: Any,
    sm_scale: float | None = None,
    softcap: float | None = None,
    alibi: Any = None,
    sink_logits: Any = None,
    rope: Any = None,
    threads: int | None = None,
    target: Any = None,
    check: bool = True,
) -> Plan:
    """Prepare a step: check every index, cut and balance the work, compile what is not compiled yet.

    Parameters
    ----------
    kv : RaggedKV or PagedKV
        The page table and the layout; the arrays of any layer with that layout.
    mask : Mask
        Which keys each row sees.
    q_indptr : integers
        ``[num_seqs + 1]``, offsets of each sequence's query rows.
    q_heads : int
        A multiple of the kv heads.
    dtype : str
        Of q and the output: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
    sm_scale, softcap, alibi, sink_logits, rope, threads, target, check
        As in `attention`.

    Returns
    -------
    Plan
        ``plan.run(q, kv_of_layer)`` computes a layer.

    Raises
    ------
    TreeAttnError
        Bad input.
    """
    check_storage(kv)
    if not isinstance(mask, Mask):
        raise DTypeError(f"mask: expected a Mask such as ta.Causal() or ta.Tree(trees), got {type(mask).__name__}")
    table, pools = kv.table, kv.pools
    q_heads = check_heads(q_heads, pools.kv_heads)
    parts = check_parts(softcap, alibi, sink_logits, rope, q_heads)
    trees, simple = mask.trees, mask.simplified()
    spec = KernelSpec(
        pools.d_qk, pools.d_v, check_q_dtype(dtype), pools.dtype, simple.form,
        rope=(parts.rope.style, parts.rope.rotary_dim or pools.d_qk) if parts.rope else None,
        logits=parts.form, shared=pools.shared, moved=table.moves is not None,
    )  # fmt: skip
    offsets = check_q_indptr(q_indptr, kv.num_seqs)
    check_rows(offsets, q_heads // pools.kv_heads)
    batch = Batch(offsets, table.kv_len, trees, table.moves)
    if check:
        kv.validate()
        mask.check(batch)
    scale, group = _scale(sm_scale, pools.d_qk), q_heads // pools.kv_heads
    if is_device(target) or (target is None and pools.k.device is not None):
        on = device(pools.k.device if target is None else target)
        rows = int(batch.q_len.max(initial=0)) * group
        made = gpu_kernel(spec, on, rows)
        items = make_device_work(
            batch, simple, table, kv_heads=pools.kv_heads, group=group, tile=made.tile,
            blocks=on.blocks if threads is None else check_threads(threads, on.blocks), positions=parts.positions,
        )  # fmt: skip
        return Plan(DeviceLaunch(made, on, kv, items, parts, int(batch.q_indptr[-1]), q_heads, scale))
    compiled = kernel(spec, runnable(target))
    count = check_threads(threads, available_threads())
    work = make_work(
        batch, simple, table, kv_heads=pools.kv_heads, group=group, config=compiled.config,
        threads=count, positions=parts.positions,
    )  # fmt: skip
    return Plan(Launch(compiled, kv, work, parts, int(batch.q_indptr[-1]), q_heads, count, scale))


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
        ``[...]`` float32, base 2. ``merge(x, nothing)`` is x, and of two empty states ``(0, -inf)``; never NaN.

    Raises
    ------
    ShapeError
        An odd number of arrays, or shapes that differ.
    """
    if len(states) < 4 or len(states) % 2:
        raise ShapeError(f"merge: expected out_a, lse_a, out_b, lse_b, ..., got {len(states)} arrays")
    outs = [_check_state(state, f"out {i}") for i, state in enumerate(states[::2])]
    lses = [_check_state(state, f"lse {i}") for i, state in enumerate(states[1::2])]
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.ndim == 0 or out.shape != outs[0].shape or lse.shape != outs[0].shape[:-1]:
            raise ShapeError(
                f"merge: expected out [..., d_v] and lse [...] of one shape in every state, "
                f"got {out.shape} and {lse.shape} in state {i}"
            )
    lses = [lse.astype(np.float32) for lse in lses]
    out, lse = _merge(outs, lses)
    return as_kind(out.astype(outs[0].dtype), states[0]), as_kind(lse, states[0])


def to_natural(lse: Any) -> Any:
    """Turn a base-2 log-sum-exp into a natural one: ``lse * ln 2``."""
    return lse * math.log(2.0)


def _check_state(array: Any, name: str) -> NDArray[Any]:
    state = to_numpy(array, name)
    if state.dtype.kind != "f" and state.dtype.name != "bfloat16":
        raise DTypeError(f"{name}: expected floating-point numbers, got dtype {state.dtype}")
    return state


def _merge(
    outs: list[NDArray[Any]], lses: list[NDArray[np.float32]]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    stacked = np.stack(lses)
    highest = stacked.max(axis=0)
    weights = np.exp2(stacked - np.where(np.isneginf(highest), np.float32(0), highest))
    total = weights.sum(axis=0)
    share = np.divide(weights, total, out=np.zeros_like(weights), where=total != 0)
    out = np.zeros(outs[0].shape, np.float32)
    for part, weight in zip(outs, share, strict=True):
        held = weight[..., None] != 0  # a state without weight adds nothing, whatever it holds
        out += np.where(held, part.astype(np.float32), np.float32(0)) * weight[..., None]
    with np.errstate(divide="ignore"):
        return out, (highest + np.log2(total)).astype(np.float32)


def _default_indptr(q_indptr: Any, q_total: int, num_seqs: int) -> Any:
    if q_indptr is not None:
        return q_indptr
    if num_seqs == 1:
        return np.array([0, q_total], np.int32)
    if q_total == num_seqs:
        return np.arange(num_seqs + 1, dtype=np.int32)
    raise ShapeError(f"q_indptr: expected [num_seqs + 1] = [{num_seqs + 1}] offsets for {q_total} query rows, got None")


def _scale(sm_scale: Any, d_qk: int) -> float:
    if sm_scale is None:
        return 1.0 / math.sqrt(d_qk)
    if isinstance(sm_scale, bool) or not isinstance(sm_scale, int | float | np.integer | np.floating):
        raise DTypeError(f"sm_scale: expected a number, got {type(sm_scale).__name__}")
    if not abs(sm_scale) <= FLOAT32_MAX:
        raise ShapeError(f"sm_scale: expected a finite float32 number, got {sm_scale}")
    return float(sm_scale)
