"""Every CPU kernel of TVM's ``relax.frontend.nn.llm`` against `treeattn.tvm_compat`, same arguments, interleaved.

    python benchmarks/tvm_family.py [--quick] [--dtype float32 float16] [--only tree] [--samples 5] [--json]

Prints a table: kernel, ours ms, theirs ms, ratio, and the largest difference of their outputs. Times are the best of
``--samples``. ``--ours MODULE`` compares another module with the same names (TVM's own, to see the noise).
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

os.environ.setdefault("TVM_NUM_THREADS", str(len(os.sched_getaffinity(0))))  # TVM takes half of them otherwise

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm.relax.frontend.nn.llm import kv_cache as theirs
from tvm.target.codegen import llvm_get_system_cpu

PAGE = 16
CPU = {"kind": "llvm", "mcpu": llvm_get_system_cpu()}
SHORTEST_SAMPLE = 2e-3  # seconds; faster kernels are called several times


@dataclass(frozen=True)
class Shape:
    """What the kernels work on."""

    batch: int = 4
    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    nodes: int = 32  # of each tree; new tokens of a paged prefill
    context: int = 512
    prompt: int = 256  # of a ragged prefill

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.kv_heads, self.q_heads, self.dim


QUICK = Shape(batch=2, q_heads=8, kv_heads=2, dim=64, nodes=16, context=128, prompt=48)


@dataclass(frozen=True)
class Work:
    """One call: a factory with its arguments, inputs, which of them are written, and scalars at a position."""

    name: str
    factory: str
    args: tuple[Any, ...]
    inputs: list[NDArray[Any]]
    outputs: tuple[int, ...]
    scalars: tuple[float, ...] = ()
    scalars_at: int | None = None
    options: tuple[tuple[str, Any], ...] = ()


def works(shape: Shape, dtype: str) -> Iterator[Work]:
    """Every kernel of the family, on random data."""
    yield from attention_works(shape, dtype)
    yield from page_works(shape, dtype)


def attention_works(s: Shape, dtype: str) -> Iterator[Work]:
    rng = np.random.default_rng(0)

    def normal(*dims: int) -> NDArray[Any]:
        return rng.standard_normal(dims, np.float32).astype(dtype)

    def results(rows: int) -> list[NDArray[Any]]:
        return [np.zeros((rows, s.q_heads, s.dim), dtype), np.zeros((rows, s.q_heads), np.float32)]

    pages, page_indptr, ids, last = page_table(s, normal)
    offsets, rope = np.zeros(s.batch, np.int32), (0, 1.0, 1e4, s.dim**-0.5)
    moved = np.stack([last, np.full(s.batch, PAGE, np.int32), np.full(s.batch, 4, np.int32)])
    sliding = (("sliding_window_size", s.context),)

    rows = s.batch * s.nodes
    q, q_indptr = normal(rows, s.q_heads, s.dim), steps(s.batch, s.nodes)
    positions = np.tile(np.arange(s.context, s.context + s.nodes, dtype=np.int32), s.batch)
    tree = [q_indptr, np.tile(binary_tree(s.nodes), (s.batch, 1))]
    table = [pages, page_indptr, ids, last, offsets]

    whole = [normal(s.batch * s.prompt, heads, s.dim) for heads in (s.q_heads, s.kv_heads, s.kv_heads)]
    prompts = steps(s.batch, s.prompt)
    at = np.tile(np.arange(s.prompt, dtype=np.int32), s.batch)
    ragged = [whole[0], prompts, *whole[1:], prompts, at, offsets, *results(len(whole[0]))]
    name = "_attention_prefill_ragged_cpu"
    yield Work("prefill ragged", name, (*s.heads, s.dim, dtype, {}), ragged, (7, 8), (1, *rope))

    paged, name = [q, q_indptr, *table, positions, *results(rows)], "_attention_prefill_cpu"
    yield Work("prefill paged", name, (*s.heads, dtype, False, {}), paged, (8, 9), (0, *rope))
    paged = [q, q_indptr, *table[:3], moved, offsets, positions, *results(rows)]
    yield Work("prefill window", name, (*s.heads, dtype, True, {}), paged, (8, 9), (0, *rope), None, sliding)

    one, name = normal(s.batch, s.q_heads, s.dim), "_attention_decode_cpu"
    now = np.full(s.batch, s.context, np.int32)
    yield Work("decode", name, (*s.heads, dtype, False, {}), [one, *table, now, *results(s.batch)], (7, 8), rope)
    table_moved = [*table[:3], moved, offsets]
    args = (*s.heads, dtype, True, {})
    yield Work("decode window", name, args, [one, *table_moved, now, *results(s.batch)], (7, 8), rope)

    keys, values = (normal(rows, s.kv_heads, s.dim) for _ in range(2))
    inputs = [q, q_indptr, keys, values, q_indptr, positions, *tree, *results(rows)]
    yield Work("tree ragged", "tree_attn_cpu", (*s.heads, dtype, {}), inputs, (8, 9), rope)
    inputs, name = [q, q_indptr, *table, positions, *results(rows), *tree], "tree_attn_with_paged_kv_cache_cpu"
    yield Work("tree paged", name, (*s.heads, dtype, {}), inputs, (8, 9), rope, 10)

    states = [normal(rows, s.q_heads, s.dim), rng.standard_normal((rows, s.q_heads), np.float32)]
    others = [normal(rows, s.q_heads, s.dim), rng.standard_normal((rows, s.q_heads), np.float32)]
    yield Work("merge", "_merge_state_inplace_cpu", (dtype,), [*states, *others], (0, 1))

    qkv = normal(rows, s.q_heads + 2 * s.kv_heads, s.dim)
    parts = [np.zeros((rows, heads, s.dim), dtype) for heads in (s.q_heads, s.kv_heads, s.kv_heads)]
    args = (1e4, 1.0, s.dim, s.q_heads, s.kv_heads, dtype, {}, s.dim)
    yield Work("rope", "llama_rope_with_position_map", args, [qkv, positions, *parts], (2, 3, 4), (1,))


def page_works(s: Shape, dtype: str) -> Iterator[Work]:
    rng = np.random.default_rng(1)

    def normal(*dims: int) -> NDArray[Any]:
        return rng.standard_normal(dims, np.float32).astype(dtype)

    pages, *_ = page_table(s, normal)
    slots = len(pages) * PAGE
    rows = s.batch * s.nodes
    where = rng.permutation(slots)[:rows].astype(np.int32)
    keys, values = (normal(rows, s.kv_heads, s.dim) for _ in range(2))
    args = (s.kv_heads, s.dim, dtype)
    yield Work("append", "_kv_cache_transpose_append", args, [pages, keys, values, where], (0,))
    args = (s.kv_heads, PAGE, s.dim, dtype)
    yield Work("copy page", "_copy_single_page_cpu", args, [pages], (0,), (1, 2, PAGE))
    moves = np.stack([np.arange(1, rows + 1), np.arange(rows)]).astype(np.int32)
    moves = [steps(s.batch, s.nodes), moves]
    yield Work("compact", "_compact_kv_copy_cpu", (s.kv_heads, s.dim, dtype), [pages, *moves], (0,), (s.batch,))
    out = np.zeros((2, s.context, s.kv_heads, s.dim), dtype)
    where = rng.permutation(slots)[: s.context].astype(np.int32)
    args = (2, s.kv_heads, s.dim, dtype)
    yield Work("debug get", "_kv_cache_debug_get_kv", args, [pages, where, out, out.copy()], (2, 3), (1,))


def page_table(s: Shape, normal: Callable[..., NDArray[Any]]) -> list[NDArray[Any]]:
    """Pages, page_indptr, page ids in random order, last page lengths."""
    each = math.ceil(s.context / PAGE)
    ids = np.random.default_rng(2).permutation(s.batch * each).astype(np.int32)
    last = np.full(s.batch, s.context - (each - 1) * PAGE, np.int32)
    return [normal(s.batch * each, 2, s.kv_heads, PAGE, s.dim), steps(s.batch, each), ids, last]


def steps(count: int, size: int) -> NDArray[np.int32]:
    return np.arange(0, (count + 1) * size, size, dtype=np.int32)


def binary_tree(nodes: int) -> NDArray[np.int32]:
    """(enter, exit) of each node of a complete binary tree in level order."""
    order = np.zeros((nodes, 2), np.int32)

    def visit(node: int, enter: int) -> int:
        leave = enter + 1
        for child in (2 * node + 1, 2 * node + 2):
            if child < nodes:
                leave = visit(child, leave)
        order[node] = enter, leave
        return leave

    visit(0, 0)
    return order


# measuring ---------------------------------------------------------------------------------------------------------


class Kernel:
    """A compiled kernel with arrays of its own."""

    def __init__(self, generators: ModuleType, work: Work) -> None:
        func = getattr(generators, work.factory)(*work.args, **dict(work.options)).with_attr("global_symbol", "main")
        self.call = tvm.tirx.build(tvm.IRModule({"main": func}), target=tvm.target.Target(CPU))["main"]
        self.arrays = [tvm.runtime.tensor(array) for array in work.inputs]
        at = len(self.arrays) if work.scalars_at is None else work.scalars_at
        self.operands = [*self.arrays[:at], *work.scalars, *self.arrays[at:]]
        self.repeat = 1
        self.call(*self.operands)
        self.first = [self.arrays[index].numpy().astype(np.float64) for index in work.outputs]
        self.repeat = max(1, math.ceil(SHORTEST_SAMPLE / max(self.sample(), 1e-7)))

    def sample(self) -> float:
        """Seconds a call."""
        start = time.perf_counter()
        for _ in range(self.repeat):
            self.call(*self.operands)
        return (time.perf_counter() - start) / self.repeat


def measure(ours: ModuleType, work: Work, dtype: str, samples: int) -> dict[str, Any]:
    kernels = [Kernel(generators, work) for generators in (ours, theirs)]
    times = np.array([[kernel.sample() for kernel in kernels] for _ in range(samples)]).min(axis=0)
    difference = max(float(np.abs(a - b).max()) for a, b in zip(*(kernel.first for kernel in kernels), strict=True))
    return {
        "kernel": work.name,
        "dtype": dtype,
        "ours_ms": times[0] * 1e3,
        "theirs_ms": times[1] * 1e3,
        "ratio": times[1] / times[0],
        "difference": difference,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small shapes, a few seconds in all")
    parser.add_argument("--dtype", nargs="+", default=["float32", "float16"], choices=["float32", "float16"])
    parser.add_argument("--only", default="", help="kernels whose name has this in it")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the table")
    parser.add_argument("--ours", default="treeattn.tvm_compat", metavar="MODULE")
    options = parser.parse_args()
    try:
        ours = importlib.import_module(options.ours)
    except ImportError as error:
        print(f"{options.ours} cannot be imported: {error}", file=sys.stderr)
        return 2

    shape = QUICK if options.quick else Shape()
    if not options.json:
        print(f"{shape}\n{os.environ['TVM_NUM_THREADS']} threads, {CPU['mcpu']}, best of {options.samples}\n")
        print(f"{'kernel':<16}{'dtype':<9}{'ours ms':>10}{'theirs ms':>12}{'ratio':>9}{'difference':>12}")
    for dtype in options.dtype:
        for work in works(shape, dtype):
            if options.only not in work.name:
                continue
            row = measure(ours, work, dtype, options.samples)
            if options.json:
                print(json.dumps(row), flush=True)
                continue
            print(
                f"{row['kernel']:<16}{dtype:<9}{row['ours_ms']:>10.4f}{row['theirs_ms']:>12.4f}"
                f"{row['ratio']:>9.1f}{row['difference']:>12.1e}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
