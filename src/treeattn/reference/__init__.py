"""The oracle: dense float64 NumPy with loops, written from the definitions, sharing nothing with kernels."""

from .attention import attention, low_precision, merge
from .masks import visible
from .storage import gather

__all__ = ["attention", "gather", "low_precision", "merge", "visible"]
