"""Tile sizes of the GPU template: data, legal for a spec on a target or with the reasons why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ..errors import UnsupportedError
from ..kernels.spec import KernelSpec
from ..targets import GpuTraits
from . import mma

MOST_SUMS = 64
"""Accumulators of a thread: more would leave the registers of most GPUs."""
FLOAT = 4  # bytes


@dataclass(frozen=True)
class GpuTile:
    """Sizes of a row tile and of its blocks of columns.

    Parameters
    ----------
    row_threads, column_threads : int
        The grid of threads of a block.
    rows_each, columns_each : int
        Rows of a thread, and columns of a block of columns whose scores it computes.
    dims : int
        The most dims of keys that lie in shared memory at a time.
    holds_query : bool
        Whether the queries stay in shared memory; otherwise they pass through it with the keys.
    """

    row_threads: int
    column_threads: int
    rows_each: int
    columns_each: int
    dims: int = 32
    holds_query: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.row_threads * self.column_threads

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.row_threads * self.rows_each

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return self.column_threads * self.columns_each

    def chunk(self, spec: KernelSpec) -> int:
        """Dims of a chunk of keys: even ones, at most ``dims``."""
        return -(-spec.d_qk // -(-spec.d_qk // self.dims))

    def dims_each(self, spec: KernelSpec) -> int:
        """Dims of the output that a thread accumulates, for each of its rows."""
        return -(-spec.d_v // self.column_threads)

    def query_stride(self, spec: KernelSpec) -> int:
        """Floats between two rows of queries in shared memory; odd steps spread them over its banks."""
        chunk = self.chunk(spec)
        return (-(-spec.d_qk // chunk) * chunk if self.holds_query else chunk) + 1

    def stage_floats(self, spec: KernelSpec) -> int:
        """Floats of shared memory that chunks of keys pass through."""
        return self.columns * (self.chunk(spec) + 1)

    def shared_bytes(self, spec: KernelSpec, traits: GpuTraits) -> int:
        """Bytes of shared memory of a block."""
        floats = self.rows * (self.query_stride(spec) + self.columns + 1 + self.column_threads)
        addresses = self.columns * (1 + 2 * (8 if traits.index == "int64" else 4) // FLOAT)
        return FLOAT * (floats + self.stage_floats(spec) + addresses)

    def legal(self, spec: KernelSpec, traits: GpuTraits) -> list[str]:
        """Return the reasons why this tile cannot run ``spec``; none if it can."""
        sums = self.rows_each * self.dims_each(spec)
        needed = self.shared_bytes(spec, traits)
        rules = {
            f"{spec.q_dtype} output, which the target has no type to write": spec.q_dtype != "float32"
            and not traits.int16
            and not (traits.float16 and spec.q_dtype == "float16"),
            f"{self.threads} threads a block of {traits.threads}": self.threads > traits.threads,
            f"{needed} bytes of shared memory of {traits.shared_bytes}": needed > traits.shared_bytes,
            f"{sums} accumulators a thread of {MOST_SUMS}": sums > MOST_SUMS,
        }
        return [reason for reason, broken in rules.items() if broken]


AnyTile: TypeAlias = GpuTile | mma.MmaTile
TILES = (
    GpuTile(row_threads=4, column_threads=32, rows_each=1, columns_each=1),
    GpuTile(row_threads=8, column_threads=16, rows_each=2, columns_each=2),
    GpuTile(row_threads=8, column_threads=16, rows_each=4, columns_each=2),
)
"""By rising number of rows."""


def choose(spec: KernelSpec, traits: GpuTraits, rows: int) -> AnyTile:
    """Return a tile for tensor cores where one is legal, else the smallest that holds ``rows`` rows, or the largest.

    Raises
    ------
    UnsupportedError
        None is legal; the message gives the reasons.
    """
    if tensor_cores := mma.choose(spec, traits, rows):
        return tensor_cores
    reasons = {tile: tile.legal(spec, traits) for tile in TILES}
    legal = [tile for tile in TILES if not reasons[tile]]
    if not legal:
        listed = "; ".join(dict.fromkeys(", ".join(why) for why in reasons.values()))
        raise UnsupportedError(f"{traits.kind}: no kernel for q of {spec.q_dtype} with d {spec.d_qk}: {listed}")
    return next((tile for tile in legal if tile.rows >= rows), legal[-1])


def explain(spec: KernelSpec, tile: AnyTile, traits: GpuTraits) -> str:
    """Say which template a tile belongs to, and on CUDA why it is not the one for tensor cores."""
    if isinstance(tile, mma.MmaTile):
        return f"tensor cores, {tile.rows} rows x {tile.columns} columns"
    reasons = mma.MmaTile().legal(spec, traits) if traits.kind == "cuda" else []
    return f"tiled, {tile.rows} rows x {tile.columns} columns" + "".join(f"; no tensor cores: {why}" for why in reasons)
