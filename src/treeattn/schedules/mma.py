"""Tile sizes of the tensor-core template."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.spec import KernelSpec
from ..targets import GpuTraits

CHUNK = 8  # elements of 16 bits that are copied at once, and by which rows in shared memory are longer
ELEMENT, FLOAT = 2, 4  # bytes
WARP, WARP_ROWS = 32, 16
MOST_KEPT = 128  # dims of queries that registers hold beside everything else
MOST_FRAGMENTS = 160  # registers of a thread; with more, the rest spills
DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class MmaTile:
    """Sizes of a row tile and of its blocks of columns.

    Parameters
    ----------
    row_warps : int
        Warps of a block that have rows of their own, 16 each.
    column_warps : int
        Warps that share those rows and take turns at the columns of a block: with few rows, all of a
        multiprocessor's tensor cores have work. They merge at the end.
    columns : int
        Of a block of columns, a multiple of 16.
    """

    row_warps: int = 4
    column_warps: int = 1
    columns: int = 64

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.row_warps * self.column_warps

    @property
    def own_columns(self) -> int:
        """Columns of a block that are a warp's."""
        return self.columns // self.column_warps

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * WARP

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.row_warps * WARP_ROWS

    def keeps_query(self, spec: KernelSpec) -> bool:
        """Whether queries stay in registers; then they pass through the stage of the second block of keys."""
        return spec.d_qk <= MOST_KEPT and self.rows <= self.columns

    def query_words(self, spec: KernelSpec) -> int:
        """Registers of a thread that hold queries."""
        return spec.d_qk // 4 if self.keeps_query(spec) else 4

    def query_at(self, spec: KernelSpec) -> int:
        """First element of the queries in shared memory."""
        keys, values = (self.columns * (d + CHUNK) for d in (spec.d_qk, spec.d_v))
        return keys if self.keeps_query(spec) else 2 * (keys + values)

    def fragments(self, spec: KernelSpec) -> int:
        """Registers of a thread that hold sums, scores, weights and queries."""
        return spec.d_v // 2 + self.own_columns // 2 + self.own_columns // 4 + self.query_words(spec)

    def stage_elements(self, spec: KernelSpec) -> int:
        """Elements of dynamic shared memory: two blocks of keys and values, and queries that are not kept."""
        blocks = 2 * self.columns * (spec.d_qk + spec.d_v + 2 * CHUNK)
        return blocks if self.keeps_query(spec) else blocks + self.rows * (spec.d_qk + CHUNK)

    def merge_elements(self, spec: KernelSpec) -> int:
        """Elements of that memory which merging takes, after the last block."""
        return self.warps * WARP_ROWS * (spec.d_v + 1) * (FLOAT // ELEMENT)

    def dynamic_bytes(self, spec: KernelSpec) -> int:
        """Bytes of dynamic shared memory of a block."""
        return self.stage_elements(spec) * ELEMENT

    def shared_bytes(self, spec: KernelSpec, traits: GpuTraits) -> int:
        """Bytes of shared memory of a block."""
        index = 8 if traits.index == "int64" else 4
        peaks = self.warps * WARP_ROWS * FLOAT if self.column_warps > 1 else 0
        return self.dynamic_bytes(spec) + 2 * self.columns * 2 * index + peaks

    def legal(self, spec: KernelSpec, traits: GpuTraits) -> list[str]:
        """Return the reasons why this tile cannot run ``spec``; none if it can."""
        needed, sizes = self.shared_bytes(spec, traits), (spec.d_qk, spec.d_v)
        rules = {
            f"{traits.kind} {traits.arch} has no mma.m16n8k16 (sm_80 and later have)": not traits.has_mma,
            f"q {spec.q_dtype} and keys {spec.kv_dtype} are not both one of {', '.join(DTYPES)}": spec.q_dtype
            not in DTYPES
            or spec.q_dtype != spec.kv_dtype,
            f"head sizes {sizes} are not multiples of 16 up to 256": any(d % 16 or d > 256 for d in sizes),
            "keys are rotated as they are read": spec.rope is not None,
            "values are parts of keys (MLA)": spec.shared,
            f"{self.columns} columns are no multiple of 16 a warp up to {self.threads}, one a thread": self.columns
            % (16 * self.column_warps)
            or self.columns > self.threads,
            "merging takes more memory than the blocks": self.merge_elements(spec) > self.stage_elements(spec),
            f"{self.fragments(spec)} registers of fragments of {MOST_FRAGMENTS}": self.fragments(spec) > MOST_FRAGMENTS,
            f"{needed} bytes of shared memory of {traits.dynamic_bytes}": needed > traits.dynamic_bytes,
        }
        return [reason for reason, broken in rules.items() if broken]


TILES = (MmaTile(1, 4), MmaTile(2, 2), MmaTile(), MmaTile(1, 2, 32), MmaTile(columns=32))
"""In order of preference, by rising rows; queries of more than 128 dims leave room for fewer columns."""


def choose(spec: KernelSpec, traits: GpuTraits, rows: int) -> MmaTile | None:
    """Return the first legal tile that holds ``rows`` rows, or the legal one with most rows; None without any."""
    legal = [tile for tile in TILES if not tile.legal(spec, traits)]
    return next((tile for tile in legal if tile.rows >= rows), max(legal, key=lambda tile: tile.rows, default=None))
