"""What a kernel computes: the compile-time part of an attention call. Everything else is data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class KernelSpec:
    """The parts that are present, their dtypes, and the head dimensions.

    Parameters
    ----------
    d_qk, d_v : int
        Head dimensions.
    q_dtype, kv_dtype : str
        Of q and the output, and of keys and values.
    mask : tuple
        The form of the mask (`Mask.form`).
    rope : (style, rotary_dim), optional
        Keys lie unrotated, and q comes unrotated: both are rotated by position while they are read.
    logits : tuple of str
        Of ``"softcap"``, ``"alibi"``, ``"sinks"``.
    shared : bool
        Values are the first ``d_v`` elements of their key's slot (MLA): read once.
    moved : bool
        Some sequence has dropped columns, or begins at another position than 0.

    Head counts, page size, strides, lengths, trees, window sizes, soft-cap and angles are run-time data: one kernel is
    right for them all.
    """

    d_qk: int
    d_v: int
    q_dtype: str
    kv_dtype: str
    mask: tuple[Any, ...]
    rope: tuple[str, int] | None = None
    logits: tuple[str, ...] = ()
    shared: bool = False
    moved: bool = False

    @property
    def num_bounds(self) -> int:
        """Number of leaves of the mask: bounds each row brings."""
        return count_leaves(self.mask)

    @property
    def masks(self) -> bool:
        """Whether any column can be invisible to a row that visits it."""
        return bool(self.mask[0] != "full")

    @property
    def values_are_keys(self) -> bool:
        """Whether a key as it is multiplied holds its value too: rotated, it no longer does."""
        return self.shared and self.rope is None

    @property
    def adjusts(self) -> bool:
        """Whether scores change between product and mask."""
        return "softcap" in self.logits or "alibi" in self.logits


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
    @property
    def has_many(self) -> bool: ...


def count_leaves(form: tuple[Any, ...]) -> int:
    """Count the leaves of a mask's form."""
    if form[0] in "&|":
        return count_leaves(form[1]) + count_leaves(form[2])
    return 1
