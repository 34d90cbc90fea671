"""What treeattn is timed against: functions from a problem to a call that computes the same attention.

A maker does everything that its rival may prepare once (copies, masks, compilation); the call it returns
gives ``out`` as float32 NumPy or torch values of shape ``[q_total, q_heads, d]``, which is compared before
anything is timed. Ours give ``out, lse``. A maker that cannot serve a problem raises `UnavailableError` with
the reason.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..masks import Causal, Full, Mask
from .limits import has_torch, torch_threads
from .workloads import Problem

Call = Callable[[], Any]
Maker = Callable[[Problem, int], Call]


class UnavailableError(Exception):
    """A rival that is not installed, or does not offer this problem; the message is the reason."""


def ours(problem: Problem, threads: int, mask: Mask | None = None) -> Call:
    """Make treeattn's own call: planned once, run many times."""
    plan = planned(problem, threads, mask)
    return lambda: plan.run(problem.q, problem.kv)


def planned(problem: Problem, threads: int, mask: Mask | None = None) -> Any:
    """Plan a problem, under its own mask or another."""
    import treeattn

    return treeattn.plan(
        problem.kv,
        problem.mask if mask is None else mask,
        q_indptr=problem.q_indptr,
        q_heads=problem.workload.q_heads,
        dtype=problem.dtype,
        threads=threads,
        **problem.parts,
    )


def _after_torch(problem: Problem, threads: int) -> Call:
    _torch(threads)
    return ours(problem, threads)


def _use_torch_pool() -> None:
    torch = importlib.import_module("torch")
    torch.mm(torch.ones(512, 512), torch.ones(512, 512))


def _one_thread(problem: Problem, threads: int) -> Call:
    if threads == 1:
        raise UnavailableError("the run itself has one thread")
    return ours(problem, 1)


def _gathered(problem: Problem, seq: int) -> tuple[Any, Any]:
    """Dense K and V of one sequence, ``[kv_heads, kv_len, d]`` each."""
    table = problem.kv.table
    ids = table.page_ids[table.page_indptr[seq] : table.page_indptr[seq + 1]]
    pages = problem.kv.pages[ids].transpose(1, 2, 0, 3, 4)
    _, kv_heads, _, _, d = pages.shape
    k, v = pages.reshape(2, kv_heads, -1, d)[:, :, : table.kv_len[seq]]
    return k, v


def _seen(problem: Problem, seq: int) -> Any:
    """Dense bool ``[q_len, kv_len]``."""
    tree = problem.trees[seq]
    prefix = np.ones((tree.num_nodes, int(problem.kv_len[seq]) - tree.num_nodes), np.bool_)
    return np.concatenate([prefix, tree.mask()], axis=1)


def numpy_dense(problem: Problem, threads: int) -> Call:
    """Textbook NumPy in float32, on dense copies gathered before, with a ready additive mask."""
    group, scale = problem.workload.q_heads // problem.workload.kv_heads, problem.workload.d**-0.5
    parts = []
    for seq, (begin, end) in enumerate(zip(problem.q_indptr[:-1], problem.q_indptr[1:], strict=True)):
        k, v = (np.ascontiguousarray(array, np.float32) for array in _gathered(problem, seq))
        q = problem.q[begin:end].astype(np.float32).transpose(1, 0, 2) * np.float32(scale)
        bias = np.where(np.tile(_seen(problem, seq), (group, 1)), np.float32(0), np.float32(-np.inf))
        parts.append((q.reshape(len(k), -1, q.shape[-1]), k.transpose(0, 2, 1), v, bias, end - begin))

    def attend(q: Any, k: Any, v: Any, bias: Any, rows: int) -> Any:
        scores = q @ k + bias
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        out = scores @ v / scores.sum(-1, keepdims=True)
        return out.reshape(-1, rows, out.shape[-1]).transpose(1, 0, 2)

    return lambda: np.concatenate([attend(*part) for part in parts])


def sdpa(problem: Problem, threads: int) -> Call:
    """Torch SDPA on dense copies gathered before, with a ready mask: the fastest of its spellings here."""
    torch = _torch(threads)
    calls = [_sdpa(problem, torch, expanded, additive) for expanded in (False, True) for additive in (True, False)]
    return _fastest(calls)


def sdpa_with_gather(problem: Problem, threads: int) -> Call:
    """Torch SDPA that first gathers K and V from the pages, as it must where the cache is paged."""
    torch = _torch(threads)
    work, table = problem.workload, problem.kv.table
    pages = _tensor(torch, problem.kv.pages)
    groups = []
    for seqs in _alike(problem):
        ids = torch.from_numpy(np.concatenate([_page_ids(table, seq) for seq in seqs]).astype(np.int64))
        bias = _bias(torch, problem, seqs, additive=True)
        groups.append((_queries(torch, problem, seqs), ids, int(problem.kv_len[seqs[0]]), bias, len(seqs)))

    def attend(q: Any, ids: Any, kv_len: int, bias: Any, batch: int) -> Any:
        dense = pages.index_select(0, ids).view(batch, -1, 2, work.kv_heads, work.page_size, work.d)
        k, v = dense.permute(2, 0, 3, 1, 4, 5).reshape(2, batch, work.kv_heads, -1, work.d)[:, :, :, :kv_len]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)

    return lambda: _joined(torch, problem, [attend(*group) for group in groups])


def flex_attention(problem: Problem, threads: int) -> Call:
    """Torch FlexAttention, compiled, on dense copies gathered before, with a ready block mask."""
    torch = _torch(threads)
    groups = _alike(problem)
    if len(groups) > 1:
        raise UnavailableError("ragged lengths would need a compilation for each")
    try:
        from torch.nn.attention.flex_attention import create_block_mask
        from torch.nn.attention.flex_attention import flex_attention as flex

        (seqs,) = groups
        q, (k, v) = _queries(torch, problem, seqs), _dense(torch, problem, seqs)
        seen = torch.from_numpy(np.stack([_seen(problem, seq) for seq in seqs]))
        block_mask = create_block_mask(
            lambda b, h, row, col: seen[b, row, col], len(seqs), None, q.shape[2], k.shape[2], device="cpu"
        )
        torch.compiler.reset()  # or the eighth problem runs uncompiled
        compiled = torch.compile(flex, dynamic=False)
        compiled(q, k, v, block_mask=block_mask, enable_gqa=True)
    except Exception as error:  # torch.compile fails in as many ways as there are toolchains
        raise UnavailableError(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}") from None
    return lambda: _joined(torch, problem, [compiled(q, k, v, block_mask=block_mask, enable_gqa=True)])


def tvm_kernel(problem: Problem, threads: int) -> Call:
    """TVM 0.27's own paged kernel: the tree one, or its decode one for single tokens."""
    try:
        import tvm
        from tvm.relax.frontend.nn.llm.tree_attn import tree_attn_with_paged_kv_cache_cpu
    except ImportError as error:
        raise UnavailableError(f"not installed ({error})") from None
    work, table = problem.workload, problem.kv.table
    if work.page_size != 16 or problem.dtype == "bfloat16":
        raise UnavailableError("it offers page size 16, float32 and float16 only")
    from tvm.relax.frontend.nn.llm._decode_kernels import _attention_decode_cpu

    is_decode = set(work.nodes) == {1}
    make = _attention_decode_cpu if is_decode else tree_attn_with_paged_kv_cache_cpu
    last: tuple[Any, ...] = (False, {}) if is_decode else ({},)
    function = make(work.kv_heads, work.q_heads, work.d, problem.dtype, *last).with_attr("global_symbol", "main")
    kernel = tvm.tirx.build(tvm.IRModule({"main": function}), target=_host_target(tvm))["main"]
    array, zeros = tvm.runtime.tensor, np.zeros
    out, lse = array(zeros(problem.q.shape, problem.dtype)), array(zeros(problem.q.shape[:2], np.float32))
    positions = array(zeros(len(problem.q), np.int32)), array(zeros(len(problem.kv_len), np.int32))
    q, q_indptr, pages = array(problem.q), array(problem.q_indptr), array(problem.kv.pages)
    paged = [pages, array(table.page_indptr), array(table.page_ids), array(problem.kv.last_page_len)]
    scales = [0, 1.0, 1e4, work.d**-0.5]
    if is_decode:
        arguments = [q, *paged, positions[1], positions[0], out, lse, *scales]
    else:
        order = array(np.concatenate([tree.intervals for tree in problem.trees]))
        arguments = [q, q_indptr, *paged, positions[1], positions[0], out, lse, *scales, q_indptr, order]

    def call() -> Any:
        kernel(*arguments)
        return out

    return call


CANDIDATES: dict[str, Maker] = {
    "one thread": _one_thread,
    "after torch": _after_torch,
    "causal": lambda problem, threads: ours(problem, threads, Causal()),
    "full": lambda problem, threads: ours(problem, threads, Full()),
    "numpy": numpy_dense,
    "sdpa": sdpa,
    "sdpa+gather": sdpa_with_gather,
    "flex": flex_attention,
    "tvm": tvm_kernel,
}
BEFORE: dict[str, Call] = {"after torch": _use_torch_pool}
"""What runs untimed right before a candidate: torch's workers may still be spinning then."""
OWN_CODE = frozenset({"one thread", "after torch", "numpy"})
"""Candidates whose results are ours to answer for: a difference is a fault, not a note."""
OTHER_RESULT = frozenset({"full"})
"""Candidates whose mask differs from the problem's, so that their result does too; chains are causal."""

FAMILIES = {"torch": ("sdpa", "sdpa+gather", "flex"), "none": ()}


def resolve(names: Iterable[str]) -> tuple[str, ...]:
    """Candidates of an ``--against`` list; ``torch`` stands for all of torch's, ``none`` for none."""
    found: list[str] = []
    for name in names:
        members = FAMILIES.get(name, (name,))
        for member in members:
            if member not in CANDIDATES:
                raise UnavailableError(f"no rival {member!r}; there are {', '.join([*FAMILIES, *CANDIDATES])}")
        found.extend(members)
    return tuple(dict.fromkeys(found))


def as_numpy(out: Any) -> Any:
    """Give a candidate's ``out`` as float32 NumPy."""
    out = out[0] if isinstance(out, tuple) else out
    if hasattr(out, "detach"):
        return out.detach().float().numpy()
    return (out if isinstance(out, np.ndarray) else out.numpy()).astype(np.float32)


def _torch(threads: int) -> Any:
    if not has_torch():
        raise UnavailableError("torch is not installed: pip install 'treeattn[torch]'")
    return torch_threads(threads)


def _host_target(tvm: Any) -> Any:
    cpu = tvm.target.codegen.llvm_get_system_cpu()
    return tvm.target.Target({"kind": "llvm", "mcpu": cpu})


def _tensor(torch: Any, array: Any) -> Any:
    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _page_ids(table: Any, seq: int) -> Any:
    return table.page_ids[table.page_indptr[seq] : table.page_indptr[seq + 1]]


def _alike(problem: Problem) -> list[list[int]]:
    """Sequences grouped by lengths: each group is one dense batch."""
    groups: dict[tuple[int, int], list[int]] = {}
    for seq, (nodes, kv_len) in enumerate(zip(problem.workload.nodes, problem.kv_len.tolist(), strict=True)):
        groups.setdefault((nodes, kv_len), []).append(seq)
    return list(groups.values())


def _queries(torch: Any, problem: Problem, seqs: list[int]) -> Any:
    indptr = problem.q_indptr
    return _tensor(torch, np.stack([problem.q[indptr[seq] : indptr[seq + 1]].transpose(1, 0, 2) for seq in seqs]))


def _dense(torch: Any, problem: Problem, seqs: list[int]) -> tuple[Any, Any]:
    k, v = zip(*(_gathered(problem, seq) for seq in seqs), strict=True)
    return _tensor(torch, np.stack(k)), _tensor(torch, np.stack(v))


def _bias(torch: Any, problem: Problem, seqs: list[int], *, additive: bool) -> Any:
    """Mask ``[batch, 1, q_len, kv_len]`` as SDPA takes it, or None where everything is seen."""
    seen = torch.from_numpy(np.stack([_seen(problem, seq) for seq in seqs]))[:, None]
    if bool(seen.all()):
        return None
    dtype = getattr(torch, problem.dtype)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf")) if additive else seen


def _sdpa(problem: Problem, torch: Any, expanded: bool, additive: bool) -> Call:
    group = problem.workload.q_heads // problem.workload.kv_heads
    parts = []
    for seqs in _alike(problem):
        q, (k, v) = _queries(torch, problem, seqs), _dense(torch, problem, seqs)
        if expanded:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        parts.append((q, k, v, _bias(torch, problem, seqs, additive=additive)))
    attend, enable_gqa = torch.nn.functional.scaled_dot_product_attention, not expanded
    return lambda: _joined(
        torch, problem, [attend(q, k, v, attn_mask=bias, enable_gqa=enable_gqa) for q, k, v, bias in parts]
    )


def _joined(torch: Any, problem: Problem, outs: list[Any]) -> Any:
    """Batches of ``_alike`` in the order of sequences; one dense batch needs no copy."""
    if len(outs) == 1:
        return outs[0].transpose(1, 2).flatten(0, 1) if outs[0].shape[2] == 1 else outs[0].transpose(1, 2)
    by_seq = {
        seq: out
        for seqs, batch in zip(_alike(problem), outs, strict=True)
        for seq, out in zip(seqs, batch, strict=True)
    }
    return torch.cat([by_seq[seq].transpose(0, 1) for seq in range(len(by_seq))])


def _fastest(calls: list[Call]) -> Call:
    def seconds(call: Call) -> float:
        call()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return min(calls, key=seconds)
