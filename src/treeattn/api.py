"""The calls most people need: `attention` and `plan`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .arrays import view
from .backends import device, is_device
from .checks import number
from .compiler import gpu_kernel, kernel
from .device_launch import DeviceLaunch
from .device_work import make_device_work
from .errors import DTypeError, ShapeError, UnsupportedError
from .kernels.spec import KernelSpec
from .launch import Launch
from .logits import LARGEST, LogitParts, check_parts
from .masks import Batch, Mask
from .planner import Plan, check_heads, check_q_dtype, check_q_indptr, check_rows, check_split, check_threads, make_work
from .split import SplitLaunch, partial_spec
from .storage import Storage, check_storage
from .targets import available_threads, runnable


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
    split_kv: int | None = None,
    target: Any = None,
    out: Any = None,
    check: bool = True,
) -> tuple[Any, Any]:
    """Compute attention of query rows over cached keys and values.

    Parameters
    ----------
    q : Array
        ``[q_total, q_heads, d_qk]``, float32, float16 or bfloat16.
    kv : RaggedKV, PagedKV or LatentKV
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
    split_kv : int, optional
        Let threads share the keys of a row, cut at multiples of this many columns: for few rows and heads beside many
        processors. Results still depend on a row's keys and this number alone, but differ from unsplit ones by
        rounding. GPUs split as they need to, without it.
    target : str or Device, optional
        ``"llvm"``, the machine at hand, or a device (`treeattn.device`): ``"cuda"``, ``"opencl"``, ``"webgpu"``. By
        default where the arrays are. Arrays of the host are copied to a device and the result back; what is on the
        device (`Device.upload`, ``kv.to(device)``) stays there. ``threads`` is then the number of blocks aimed at.
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
        threads=threads, split_kv=split_kv, target=target, check=check,
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
    split_kv: int | None = None,
    target: Any = None,
    check: bool = True,
) -> Plan:
    """Prepare a step: check every index, cut and balance the work, compile what is not compiled yet.

    Parameters
    ----------
    kv : RaggedKV, PagedKV or LatentKV
        The page table and the layout; the arrays of any layer with that layout.
    mask : Mask
        Which keys each row sees.
    q_indptr : integers
        ``[num_seqs + 1]``, offsets of each sequence's query rows.
    q_heads : int
        A multiple of the kv heads.
    dtype : str
        Of q and the output: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
    sm_scale, softcap, alibi, sink_logits, rope, threads, split_kv, target, check
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
    spec = kernel_spec(kv, simple, dtype, parts)
    offsets = check_q_indptr(q_indptr, kv.num_seqs)
    check_rows(offsets, q_heads // pools.kv_heads)
    batch = Batch(offsets, table.kv_len, trees, table.moves)
    if check:
        kv.validate()
        mask.check(batch)
    scale, group = _scale(sm_scale, pools.d_qk), q_heads // pools.kv_heads
    if is_device(target) or (target is None and pools.k.device is not None):
        if split_kv is not None:
            raise UnsupportedError("split_kv: expected None on a GPU, which splits keys as it needs to; leave it out")
        on = device(pools.k.device if target is None else target)
        rows = int(batch.q_len.max(initial=0)) * group
        made = gpu_kernel(spec, on, rows)
        items = make_device_work(
            batch, simple, table, kv_heads=pools.kv_heads, group=group, tile=made.tile,
            blocks=on.blocks if threads is None else check_threads(threads, on.blocks), positions=parts.positions,
        )  # fmt: skip
        return Plan(DeviceLaunch(made, on, kv, items, parts, int(batch.q_indptr[-1]), q_heads, scale))
    cut = check_split(split_kv)
    compiled = kernel(spec if cut is None else partial_spec(spec), runnable(target), group=group)
    count = check_threads(threads, available_threads())
    work = make_work(
        batch, simple, table, kv_heads=pools.kv_heads, group=group, config=compiled.config,
        threads=count, positions=parts.positions, cut=cut,
    )  # fmt: skip
    given = compiled, kv, work, parts, int(batch.q_indptr[-1]), q_heads, count, scale
    return Plan(Launch(*given) if cut is None else SplitLaunch(*given, spec.q_dtype))


def kernel_spec(kv: Storage, mask: Mask, dtype: Any, parts: LogitParts) -> KernelSpec:
    """Return the spec of the kernel that a call needs."""
    pools = kv.pools
    return KernelSpec(
        pools.d_qk, pools.d_v, check_q_dtype(dtype), pools.dtype, mask.simplified().form,
        rope=(parts.rope.style, parts.rope.rotary_dim or pools.d_qk) if parts.rope else None,
        logits=parts.form, shared=pools.shared, moved=kv.table.moves is not None,
    )  # fmt: skip


def _default_indptr(q_indptr: Any, q_total: int, num_seqs: int) -> Any:
    if q_indptr is not None:
        return q_indptr
    if num_seqs == 1:
        return np.array([0, q_total], np.int32)
    if q_total == num_seqs:
        return np.arange(num_seqs + 1, dtype=np.int32)
    raise ShapeError(f"q_indptr: expected [num_seqs + 1] = [{num_seqs + 1}] offsets for {q_total} query rows, got None")


def _scale(sm_scale: Any, d_qk: int) -> float:
    return 1.0 / math.sqrt(d_qk) if sm_scale is None else number(sm_scale, "sm_scale", LARGEST)
