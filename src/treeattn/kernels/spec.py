"""What a kernel computes: the compile-time part of an attention call. Everything else is data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class KernelSpec:
    """Dtypes, head dimensions and the form of the mask (`Mask.form`).

    Head counts, page size, strides, lengths, trees and window sizes are run-time data: one kernel serves them all.
    """

    d_qk: int
    d_v: int
    q_dtype: str
    kv_dtype: str
    mask: tuple[Any, ...]

    @property
    def num_bounds(self) -> int:
        """Number of leaves of the mask: bounds each row brings."""
        return count_leaves(self.mask)


class Sizes(Protocol):
    """What kernels read of a tile configuration (`treeattn.schedules.tiles.TileConfig`)."""

    @property
    def rows(self) -> int: ...
    @property
    def panel(self) -> int: ...
    @property
    def lanes(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def few(self) -> tuple[int, ...]: ...
    @property
    def few_columns(self) -> int: ...


def count_leaves(form: tuple[Any, ...]) -> int:
    """Count the leaves of a mask's form."""
    if form[0] in "&|":
        return count_leaves(form[1]) + count_leaves(form[2])
    return 1


def simplify(form: tuple[Any, ...]) -> tuple[Any, ...]:
    """Drop ``full`` where it decides nothing: ``full & x`` is x, ``full | x`` is full."""
    if form[0] not in "&|":
        return form
    sign, left, right = form[0], simplify(form[1]), simplify(form[2])
    for this, other in ((left, right), (right, left)):
        if this[0] == "full":
            return other if sign == "&" else this
    return sign, left, right
