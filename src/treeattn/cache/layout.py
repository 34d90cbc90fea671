"""The sizes of a cache, and the storage that goes with them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import numpy_dtype
from ..checks import integer
from ..devices import itemsize
from ..errors import CacheFullError
from ..planner import check_q_dtype
from ..storage import LatentKV, PagedKV
from .table import Snapshot


@dataclass(frozen=True)
class Layout:
    """Sizes of a cache; with ``d_latent`` a slot holds compressed keys and values of ``head_dim`` elements (MLA)."""

    num_layers: int
    kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int
    dtype: str
    d_latent: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "kv_heads", "head_dim", "num_pages", "page_size"):
            object.__setattr__(self, name, integer(getattr(self, name), name, 0 if name == "num_pages" else 1))
        object.__setattr__(self, "dtype", check_q_dtype(self.dtype))

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of what a layer keeps of one token, keys or values."""
        return (self.head_dim,) if self.d_latent else (self.kv_heads, self.head_dim)

    def allocate(self) -> NDArray[Any]:
        """Return the pools of all layers, uninitialised: the system provides a page of memory when it is first used."""
        halves = () if self.d_latent else (2, self.kv_heads)
        shape = (self.num_layers, self.num_pages, *halves, self.page_size, self.head_dim)
        try:
            return np.empty(shape, numpy_dtype(self.dtype))
        except (MemoryError, ValueError):  # ValueError where the size passes 2^63 bytes
            size = math.prod(shape) * itemsize(self.dtype) >> 20
            raise CacheFullError(
                f"num_pages: expected a cache that fits memory, got {size} MiB for {self.num_pages} pages of "
                f"{self.page_size} tokens in {self.num_layers} layers; take fewer pages"
            ) from None

    def storage(self, pages: NDArray[Any], table: Snapshot | None = None) -> PagedKV | LatentKV:
        """Return one layer's pool as a storage: of the sequences of a table, or of none."""
        arrays: dict[str, Any] = {"page_indptr": [0], "page_ids": [], "last_page_len": []}
        if table:
            names = ("page_indptr", "page_ids", "last_page_len")
            arrays = {name: getattr(table, name) for name in names}
            if any(table.dropped):
                arrays |= {"kept": table.kept, "dropped": table.dropped}
        return LatentKV(pages, **arrays, d_latent=self.d_latent) if self.d_latent else PagedKV(pages, **arrays)
