"""Tile sizes of the CPU template.

A configuration is legal or says why not; `select` takes the row of the table that fits the machine's vectors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import UnsupportedError
from ..kernels.spec import KernelSpec
from ..targets import TargetTraits

STACK_BYTES = 1024
"""TVM keeps a buffer on the stack, and so in registers, only below this size."""


@dataclass(frozen=True)
class TileConfig:
    """Sizes of the row tiles.

    Parameters
    ----------
    rows : int
        Rows of the largest tile, a multiple of ``panel``.
    panel : int
        Rows that are lanes of one register tile.
    lanes : int
        Lanes of a vector there; LLVM splits vectors wider than the machine's.
    tokens : int
        Keys (or dims) beside a panel in the register tile.
    columns : int
        Columns of a block; twice that must fit the stack as addresses.
    few : tuple of int
        Rows of the tiles for decode and small trees, rising.
    few_columns : int
        Columns of a block there, a multiple of 32.
    """

    rows: int = 128
    panel: int = 16
    lanes: int = 8
    tokens: int = 6
    columns: int = 60
    few: tuple[int, ...] = (1, 4, 8)
    few_columns: int = 32

    @property
    def many(self) -> int:
        """The ``kind`` of the tile for many rows: the one after the few."""
        return len(self.few)

    @property
    def has_many(self) -> bool:
        """Whether there is a tile for many rows; a kernel for decode alone has none."""
        return self.rows > max(self.few, default=0)

    def legal(self, spec: KernelSpec, traits: TargetTraits) -> list[str]:
        """Return the reasons why this configuration cannot run ``spec``; none if it can."""
        width = traits.vector_bits // 32
        needed = self.panel // width * (self.tokens + 1) + 1
        half = self.columns // 2
        rules = {
            f"panel {self.panel} is no multiple of lanes {self.lanes} and 8": self.panel % self.lanes or self.panel % 8,
            f"rows {self.rows} is no multiple of panel {self.panel}": self.rows < 1 or self.rows % self.panel,
            f"columns {self.columns} is not twice a multiple of tokens {self.tokens}": half < 1
            or self.columns != 2 * half
            or half % self.tokens,
            f"few_columns {self.few_columns} is no multiple of 32, or more than columns": self.few_columns < 1
            or self.few_columns % 32
            or self.few_columns > self.columns,
            f"columns {self.columns} need {self.columns * 16} bytes of stack of {STACK_BYTES}": self.columns * 16
            >= STACK_BYTES,
            f"the register tile needs {needed} vector registers of {traits.vector_registers}": needed
            > traits.vector_registers,
            f"few {self.few} must rise, from 1 to at most 8 rows": not self.few
            or list(self.few) != sorted({*self.few} & set(range(1, 9))),
        }
        return [reason for reason, broken in rules.items() if broken]


TILES = {
    "avx512": TileConfig(panel=32, lanes=16, tokens=12, columns=48),
    "avx2": TileConfig(),
    "neon": TileConfig(),
    "plain": TileConfig(panel=8),
}


def few_rows(group: int) -> tuple[int, ...]:
    """Rows of one token, and the most tokens in 4 and in 8 rows, where a kv head has ``group`` query heads."""
    return tuple(sorted({group, 4 // group * group, 8 // group * group} - {0})) if group <= 8 else (1,)


def select(spec: KernelSpec, traits: TargetTraits, group: int | None = None) -> TileConfig:
    """Return the configuration for a spec on a machine, where known for ``group`` query heads a kv head.

    Raises
    ------
    UnsupportedError
        None is legal; the message gives the reasons.
    """
    table = TILES[traits.vector]
    config = replace(table, few=few_rows(group)) if group else table
    reasons = config.legal(spec, traits)
    if reasons:
        raise UnsupportedError(f"no tile for {spec} on {traits}: {'; '.join(reasons)}")
    return config
