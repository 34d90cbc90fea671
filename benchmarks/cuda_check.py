"""The one script for a machine with an NVIDIA GPU: is every CUDA kernel right, and how fast is it?

    python benchmarks/cuda_check.py [--emulate] [--minutes 8] [--out benchmarks/results]

Checks both templates against the float64 reference, then times verification and decoding beside PyTorch's SDPA and
FlexAttention and TVM's own kernel, each checked first. Writes ``cuda_check.csv`` (one line a check) and
``cuda_times.csv`` (one line a time). What cannot run is a line that says why. With ``--emulate`` kernels run on CPU
fibers, at tiny sizes, so that the script itself is tested where there is no GPU; times then mean nothing.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import treeattn as ta
from treeattn.bench import check, estimate, workloads
from treeattn.bench.workloads import Problem, Workload
from treeattn.devices import Device
from treeattn.testing import Case, assert_within_budget, make_case, mask_kinds

MASKS = ("full", "causal", "tree", "tree&(window|sink)", "causal&padded_left", "valid_length")
NAMES = ("verify", "verify-d64", "verify-d256", "verify-16", "small-16", "decode-1", "decode-4", "decode-8", "ragged")
TINY = Workload("tiny", 4, 2, 64, (70, 3), (5, 9))
REPEATS = 20  # runs a sample
CHECKED_ROWS = 128

Call = Callable[[], Any]


class MissingError(Exception):
    """A rival that cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Settings:
    """What the machine allows."""

    device: Device
    emulated: bool
    deadline: float


def cases(settings: Settings) -> Iterator[tuple[str, Case]]:
    """Yield what is checked: masks, sizes, dtypes, storages, groups, split keys, logit parts."""
    rng = np.random.default_rng(0)

    def case(name: str, **options: Any) -> tuple[str, Case]:
        given = {"mask": "tree", "dtype": "float16", "d_qk": 128, "q_heads": 8, "kv_heads": 2} | options
        return name, make_case(rng, **given)

    for mask in MASKS if settings.emulated else mask_kinds():
        yield case(f"mask {mask}", mask=mask, d_qk=64)
    for dtype in ("float16", "bfloat16", "float32"):
        for d in (64, 128, 256):
            yield case(f"{dtype} d {d}", dtype=dtype, d_qk=d)
    for page_size in (1, 16, 100):
        yield case(f"pages of {page_size}", page_size=page_size)
    yield case("ragged, d_qk 192, d_v 128", storage="ragged", d_qk=192, d_v=128)
    yield case("group of 71", q_heads=71, kv_heads=1)
    yield case("split keys", lengths=((1, 3000), (5, 900)))
    yield case("many rows", mask="causal", lengths=((300, 700), (64, 64)))
    parts = {"softcap": 20.0, "alibi": rng.random(8).astype("f"), "sink_logits": rng.standard_normal(8).astype("f")}
    name, plain = case("softcap, ALiBi and sinks")
    yield name, replace(plain, parts=parts)


def run_checks(settings: Settings) -> list[dict[str, Any]]:
    """Compare every case with the reference."""
    rows = []
    for name, case in cases(settings):
        begin = time.perf_counter()
        try:
            assert_within_budget(
                *ta.attention(case.q, case.kv, case.mask, **case.options, target=settings.device), case
            )
            result = "right"
        except Exception as error:  # a driver fails in its own ways; the next case may run
            result = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        rows.append({"check": name, "result": result, "seconds": f"{time.perf_counter() - begin:.2f}"})
        print(f"{name:32} {result}", flush=True)
        if time.monotonic() > settings.deadline:
            rows.append({"check": "the rest", "result": "left out: no time", "seconds": "0"})
            break
    return rows


# --- who is timed: functions from a problem to a call whose result is on the device ----------------------------------


def treeattn(problem: Problem, settings: Settings) -> Call:
    """Plan once; run on arrays of the device."""
    device, work = settings.device, problem.workload
    kv = problem.kv.to(device)
    plan = ta.plan(
        kv, problem.mask, q_indptr=problem.q_indptr, q_heads=work.q_heads, dtype=problem.dtype, target=device
    )
    if settings.emulated:
        q = device.upload(problem.q)
        return lambda: plan.run(q, kv)[0]
    try:
        q = _torch_tensor(problem.q)  # results then come from PyTorch's allocator, which CUDA graphs can record
    except MissingError:
        q = device.upload(problem.q)
    return lambda: plan.run(q, kv)[0]


def sdpa(problem: Problem, settings: Settings) -> Call:
    """Torch SDPA on dense copies gathered before, with a ready mask."""
    torch = _torch(settings)
    q, k, v, seen = _dense(problem)
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: _tokens(attend(q, k, v, attn_mask=seen[:, None], enable_gqa=True))


def flex(problem: Problem, settings: Settings) -> Call:
    """Torch FlexAttention, compiled, on dense copies gathered before, with a ready block mask."""
    torch = _torch(settings)
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, seen = _dense(problem)
    block_mask = create_block_mask(
        lambda b, h, row, col: seen[b, row, col], len(seen), None, q.shape[2], k.shape[2], device="cuda"
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: _tokens(compiled(q, k, v, block_mask=block_mask, enable_gqa=True))


def tvm(problem: Problem, settings: Settings) -> Call:
    """TVM 0.27's own paged tree kernel."""
    work, table = problem.workload, problem.kv.table
    if settings.emulated:
        raise MissingError("TVM's runtime needs a GPU")
    if work.page_size != 16 or problem.dtype == "bfloat16":
        raise MissingError("it offers page size 16, float32 and float16 only")
    import tvm as library
    from tvm.relax.frontend.nn.llm.tree_attn import tree_attn_with_paged_kv_cache

    target = library.target.Target({"kind": "cuda", "arch": settings.device.traits.arch}, host={"kind": "llvm"})
    function = tree_attn_with_paged_kv_cache(work.kv_heads, work.q_heads, work.d, problem.dtype, {}, target)
    kernel = library.tirx.build(library.IRModule({"main": function}), target=target)["main"]
    gpu = library.cuda()

    def array(host: Any) -> Any:
        return library.runtime.tensor(np.ascontiguousarray(host), gpu)

    out, lse = array(np.zeros_like(problem.q)), array(np.zeros(problem.q.shape[:2], np.float32))
    zeros, q_indptr = array(np.zeros(len(problem.q), np.int32)), array(problem.q_indptr)
    order = np.concatenate([*(tree.intervals for tree in problem.trees), np.zeros((32, 2), np.int32)])
    arguments = [
        array(problem.q), q_indptr, array(problem.kv.pages), array(table.page_indptr), array(table.page_ids),
        array(problem.kv.last_page_len), zeros, zeros, out, lse, 0, 1.0, 1e4, work.d**-0.5, q_indptr, array(order),
    ]  # fmt: skip

    def call() -> Any:
        kernel(*arguments)
        return out

    return call


RIVALS: dict[str, Callable[[Problem, Settings], Call]] = {
    "treeattn": treeattn, "sdpa": sdpa, "flex": flex, "tvm": tvm,
}  # fmt: skip


def _torch(settings: Settings) -> Any:
    if settings.emulated:
        raise MissingError("no GPU")
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise MissingError(f"PyTorch is not installed ({error})") from None
    if not torch.cuda.is_available():
        raise MissingError("this PyTorch has no CUDA")
    return torch


def _torch_tensor(array: Any) -> Any:
    try:
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise MissingError("this PyTorch has no CUDA")
    except ImportError as error:
        raise MissingError(str(error)) from None
    host = np.ascontiguousarray(array)
    if host.dtype.name == "bfloat16":
        return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16).cuda()
    return torch.from_numpy(host).cuda()


def _dense(problem: Problem) -> tuple[Any, Any, Any, Any]:
    """Dense ``q, k, v`` as ``[batch, heads, length, d]`` and what rows see, of a batch whose lengths are equal."""
    work, table = problem.workload, problem.kv.table
    if len(set(work.nodes)) > 1 or len(set(work.contexts)) > 1:
        raise MissingError("ragged lengths would need padding or a call for each")
    batch, kv_len = len(work.nodes), int(problem.kv_len[0])
    pages = problem.kv.pages[table.page_ids].reshape(batch, -1, 2, work.kv_heads, work.page_size, work.d)
    k, v = pages.transpose(2, 0, 3, 1, 4, 5).reshape(2, batch, work.kv_heads, -1, work.d)[:, :, :, :kv_len]
    q = problem.q.reshape(batch, -1, work.q_heads, work.d).transpose(0, 2, 1, 3)
    seen = np.ones((batch, work.nodes[0], kv_len), np.bool_)
    for own, tree in zip(seen, problem.trees, strict=True):
        own[:, kv_len - tree.num_nodes :] = tree.mask()
    return *map(_torch_tensor, (q, k, v)), _torch_tensor(seen)


def _tokens(out: Any) -> Any:
    return out.transpose(1, 2).flatten(0, 1)


# --- timing ----------------------------------------------------------------------------------------------------------


def run_times(settings: Settings, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Time every rival on every workload."""
    rows = []
    works = [TINY] if settings.emulated else workloads.select(names)
    for work in works:
        for dtype in ("float16", "bfloat16"):
            problem = workloads.build(work, dtype)
            for name, make in RIVALS.items():
                row = {"workload": work.name, "dtype": dtype, "candidate": name} | _timed(problem, settings, make)
                rows.append(row)
                print(*row.values(), flush=True)
                if time.monotonic() > settings.deadline:
                    return rows
    return rows


def _timed(problem: Problem, settings: Settings, make: Callable[[Problem, Settings], Call]) -> dict[str, Any]:
    row = {"microseconds": "", "how": "", "estimate": "", "gflops": "", "gbytes_per_s": "", "note": ""}
    try:
        call = make(problem, settings)
        _compare(problem, call())
        seconds, how = (_wall(call, settings, 1), "emulated") if settings.emulated else _on_gpu(call, settings)
    except Exception as error:  # not installed, not offered, or wrong: a line of the table either way
        return row | {"note": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    rates = problem.flops / seconds / 1e9, problem.num_bytes / seconds / 1e9
    row |= {"microseconds": f"{seconds * 1e6:.2f}", "how": how}
    row |= {"gflops": f"{rates[0]:.1f}", "gbytes_per_s": f"{rates[1]:.1f}"}
    if make is treeattn:
        expected = estimate.estimate(problem.workload, problem.dtype, estimate.KNOWN["h200"])
        row["estimate"] = f"{expected.seconds * 1e6:.2f}"
    return row


def _compare(problem: Problem, out: Any) -> None:
    """Raise ``AssertionError`` unless a result is attention, a head of the first and of the last sequence."""
    host = out.detach().float().cpu().numpy() if hasattr(out, "detach") else out.numpy()
    case = Case(problem.q, problem.kv, problem.mask, problem.q_indptr)
    for seq in {0, len(problem.trees) - 1}:
        for piece in check.pieces(case, [seq], [problem.workload.q_heads - 1], CHECKED_ROWS):
            want = piece.case.expected
            got = host.astype(problem.q.dtype)[piece.rows, piece.head : piece.head + 1]
            assert_within_budget(got, want[1].astype(np.float32), piece.case)


def _wall(call: Call, settings: Settings, repeats: int = REPEATS) -> float:
    """Seconds of a call, its launch by Python included."""
    call()
    settings.device.finish()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    settings.device.finish()
    return (time.perf_counter() - begin) / repeats


def _on_gpu(call: Call, settings: Settings) -> tuple[float, str]:
    """Seconds of a call on the GPU alone, by a CUDA graph of many where PyTorch can record one."""
    try:
        torch = _torch(settings)
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(REPEATS):
                call()
    except Exception as error:
        return min(_wall(call, settings) for _ in range(5)), f"wall ({type(error).__name__})"
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / REPEATS)
    return min(times), "graph"


def write(path: Path, rows: list[dict[str, Any]], device: Device) -> None:
    """Write rows as CSV, with the device in each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], "device", "arch"])
        writer.writeheader()
        writer.writerows(row | {"device": device.name, "arch": device.traits.arch} for row in rows)


def main() -> int:
    """Check, time, write; return 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--emulate", action="store_true", help="Run on CPU fibers, at tiny sizes.")
    parser.add_argument("--minutes", type=float, default=8.0, help="Begin nothing new after this time.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="Folder of the CSV files.")
    parser.add_argument("--workloads", nargs="*", default=NAMES, help="Names or patterns, as treeattn bench has them.")
    given = parser.parse_args()
    if given.emulate:
        from treeattn.testing.fibers.device import FiberDevice

        device: Device = FiberDevice(blocks=8)
    else:
        device = ta.device("cuda")
    settings = Settings(device, given.emulate, time.monotonic() + 60 * given.minutes)
    checks = run_checks(settings)
    write(given.out / "cuda_check.csv", checks, device)
    times = run_times(settings, tuple(given.workloads))
    write(given.out / "cuda_times.csv", times, device)
    wrong = [row for row in checks if row["result"] != "right"]
    print(f"{len(checks) - len(wrong)} of {len(checks)} checks right; {given.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
