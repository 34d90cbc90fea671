"""What a CUDA GPU should take for a workload, from the plan and the tile alone: no GPU is needed, none is timed.

Two limits are computed for the work as it is really dealt out, with its padding and its imbalance: bytes that must come
from memory over the bandwidth, and products of the busiest multiprocessor over its rate. The estimate is the larger.
It leaves out launches, latencies, softmax and whatever else does not overlap, so a kernel that is timed takes longer;
what it tells is how much of the limit the plan gives away. The limit itself counts useful work only.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from ..arrays import numpy_dtype
from ..device_work import DeviceWork, make_device_work
from ..errors import UnsupportedError
from ..kernels.spec import KernelSpec
from ..masks import Batch
from ..schedules.gpu import choose
from ..schedules.mma import MmaTile
from ..targets import GPUS, GpuTraits
from .workloads import Problem, Workload, build

PRODUCT_FLOPS = 2 * 16 * 8 * 16  # of one mma.m16n8k16
REGISTERS = 65536  # of a multiprocessor
CORES = 4  # tensor cores of a multiprocessor; a warp works on one of them
RESERVED_BYTES = 1024  # shared memory that a block takes besides its own
STATE_FIELDS = 2  # of a row's partial state, after its sums
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Gpu:
    """Published figures of a GPU.

    Parameters
    ----------
    name : str
    multiprocessors : int
    bytes_per_second : float
        Of memory.
    flops : float
        Dense float16 products with float32 sums, per second.
    shared_bytes : int
        Shared memory of a multiprocessor.
    traits : GpuTraits
        What code is generated for.
    source : str
        Where the figures are published.
    """

    name: str
    multiprocessors: int
    bytes_per_second: float
    flops: float
    shared_bytes: int
    traits: GpuTraits
    source: str


def _traits(arch: str) -> GpuTraits:
    return GpuTraits("cuda", 1024, GPUS["cuda"].shared_bytes, arch=arch)


KNOWN = {
    "h200": Gpu("H200 SXM", 132, 4.8e12, 989e12, 228 << 10, _traits("sm_90a"), "NVIDIA H200 data sheet, 2024"),
    "h100": Gpu("H100 SXM", 132, 3.35e12, 989e12, 228 << 10, _traits("sm_90a"), "NVIDIA H100 data sheet, 2023"),
    "a100": Gpu("A100 SXM 80 GB", 108, 2.039e12, 312e12, 164 << 10, _traits("sm_80"), "NVIDIA A100 data sheet, 2021"),
}


@dataclass(frozen=True)
class Estimate:
    """What a plan makes a GPU do, and how long that must take at least."""

    workload: Workload
    dtype: str
    gpu: Gpu
    tile: MmaTile
    items: int
    resident: int
    """Blocks a multiprocessor holds at once, by shared memory."""
    memory_bytes: float
    """Each key, value, query and result once, and partial states twice."""
    cache_bytes: float
    """Keys and values once a row tile: what the L2 cache must give."""
    products: int
    """``mma`` instructions of all warps."""
    busiest: int
    """Those of the busiest multiprocessor, or as many as it could do while its longest warp works."""
    useful_bytes: float
    useful_flops: float

    @property
    def memory_seconds(self) -> float:
        return self.memory_bytes / self.gpu.bytes_per_second

    @property
    def product_seconds(self) -> float:
        return self.busiest * PRODUCT_FLOPS * self.gpu.multiprocessors / self.gpu.flops

    @property
    def seconds(self) -> float:
        """The estimate."""
        return max(self.memory_seconds, self.product_seconds)

    @property
    def limit(self) -> float:
        """What no kernel can beat: useful bytes over bandwidth or useful operations over the rate."""
        return max(self.useful_bytes / self.gpu.bytes_per_second, self.useful_flops / self.gpu.flops)


def estimate(workload: Workload, dtype: str, gpu: Gpu) -> Estimate:
    """Estimate a workload on a GPU.

    Raises
    ------
    UnsupportedError
        The tensor-core template does not serve it; the message gives the reasons.
    """
    problem = build(workload, dtype)
    if workload.rope or workload.d_latent:
        raise UnsupportedError(
            f"estimate: {workload.name} rotates keys, or has values within them: not for tensor cores"
        )
    spec = KernelSpec(workload.d, workload.d, dtype, dtype, problem.mask.form)
    tile = choose(spec, gpu.traits, workload.rows)
    if not isinstance(tile, MmaTile):
        reasons = "; ".join(MmaTile().legal(spec, gpu.traits))
        raise UnsupportedError(f"estimate: {workload.name} {dtype} is not for tensor cores ({reasons})")
    work = plan_of(problem, tile, gpu)
    products, chain = _products(work, tile, workload.d)
    element = numpy_dtype(dtype).itemsize
    rows = len(problem.q) * workload.q_heads
    items = work.parts["items"]
    states = int(items[items[:, 0] >= 0, 4].sum()) * (workload.d + STATE_FIELDS) * FLOAT_BYTES
    results = rows * (2 * workload.d * element + FLOAT_BYTES)
    columns = _columns(work)
    return Estimate(
        workload, dtype, gpu, tile,
        items=work.num_items,
        resident=_resident(tile, spec, gpu),
        memory_bytes=problem.num_bytes + results + 2 * states,
        cache_bytes=2.0 * int(columns.sum()) * workload.d * element,
        products=int(products.sum()),
        busiest=max(_busiest(products, gpu.multiprocessors), chain * CORES),
        useful_bytes=problem.num_bytes,
        useful_flops=problem.flops,
    )  # fmt: skip


def plan_of(problem: Problem, tile: MmaTile, gpu: Gpu) -> DeviceWork:
    """Deal the work of a problem to the multiprocessors of a GPU."""
    work, table = problem.workload, problem.kv.table
    batch = Batch(problem.q_indptr, table.kv_len, problem.mask.trees)
    group = work.q_heads // work.kv_heads
    return make_device_work(
        batch, problem.mask, table, kv_heads=work.kv_heads, group=group, tile=tile, blocks=gpu.multiprocessors,
        positions=False,
    )  # fmt: skip


def _columns(work: DeviceWork) -> Any:
    """Columns that each item visits."""
    spans = work.parts["spans"].astype(np.int64)
    before = np.concatenate([[0], np.cumsum(spans[:, 1] - spans[:, 0])])
    items = work.parts["items"]
    return before[items[:, 6]] - before[items[:, 5]]


def _products(work: DeviceWork, tile: MmaTile, d: int) -> tuple[Any, int]:
    """``mma`` instructions of each item (whole blocks of columns, for every warp that has rows), and most of a warp."""
    spans, items = work.parts["spans"].astype(np.int64), work.parts["items"]
    blocks = np.concatenate([[0], np.cumsum(-(-(spans[:, 1] - spans[:, 0]) // tile.columns))])
    warps = -(-items[:, 4] // 16)
    each = tile.columns // 8 * (d // 16) + tile.columns // 16 * (d // 8)
    visited = blocks[items[:, 6]] - blocks[items[:, 5]]
    return visited * warps * each, int(visited.max(initial=0)) * each // tile.column_warps


def _busiest(products: Any, multiprocessors: int) -> int:
    """Products of the busiest multiprocessor when each takes the next item as it gets free."""
    loads = [0] * multiprocessors
    for count in products.tolist():
        heapq.heapreplace(loads, loads[0] + count)
    return max(loads)


def _resident(tile: MmaTile, spec: KernelSpec, gpu: Gpu) -> int:
    by_shared = gpu.shared_bytes // (tile.shared_bytes(spec, gpu.traits) + RESERVED_BYTES)
    return min(by_shared, REGISTERS // (tile.threads * 256))


def table(estimates: list[Estimate]) -> Table:
    """Show estimates as a table."""
    gpu = estimates[0].gpu
    title = (
        f"{gpu.name}: {gpu.bytes_per_second / 1e12:.2f} TB/s, {gpu.flops / 1e12:.0f} TFLOP/s float16 dense, "
        f"{gpu.multiprocessors} multiprocessors ({gpu.source})"
    )
    shown = Table("workload", "dtype", "tile", title=title, box=None, pad_edge=False, collapse_padding=True)
    counted, timed = (
        ("items", "blocks/SM", "memory MB", "L2 MB", "mma"),
        ("memory us", "mma us", "estimate us", "limit us"),
    )
    for name in (*counted, *timed, "x"):
        shown.add_column(name, justify="right")
    for row in estimates:
        shown.add_row(
            row.workload.name, row.dtype, f"{row.tile.rows} x {row.tile.columns}", f"{row.items}", f"{row.resident}",
            f"{row.memory_bytes / 1e6:.1f}", f"{row.cache_bytes / 1e6:.1f}", f"{row.products}",
            f"{row.memory_seconds * 1e6:.1f}", f"{row.product_seconds * 1e6:.1f}", f"{row.seconds * 1e6:.1f}",
            f"{row.limit * 1e6:.1f}", f"{row.seconds / row.limit:.2f}",
        )  # fmt: skip
    return shown


def records(estimates: list[Estimate]) -> list[dict[str, Any]]:
    """One flat record for each estimate."""
    return [
        {
            "workload": row.workload.name, "dtype": row.dtype, "gpu": row.gpu.name, "items": row.items,
            "blocks_per_multiprocessor": row.resident, "memory_bytes": row.memory_bytes, "cache_bytes": row.cache_bytes,
            "products": row.products, "memory_seconds": row.memory_seconds, "product_seconds": row.product_seconds,
            "seconds": row.seconds, "limit_seconds": row.limit,
        }
        for row in estimates
    ]  # fmt: skip
