"""Every error treeattn raises for bad input or a missing capability.

Each class is also the built-in exception a caller would expect, so ``except ValueError`` keeps working.
A message names the argument, what was wanted, what came, and what to do.
"""

from __future__ import annotations


class TreeAttnError(Exception):
    """Base of all errors of this package."""


class ShapeError(TreeAttnError, ValueError):
    """An array, length or mask of the wrong size, or values that contradict each other."""


class DTypeError(TreeAttnError, TypeError):
    """An argument of the wrong type, or an array of a dtype that is not offered."""


class IndexRangeError(TreeAttnError, IndexError):
    """An index (page id, indptr, parent, length) that points outside what it indexes."""


class UnsupportedError(TreeAttnError, ValueError):
    """A valid request that this target, kernel or installation does not offer; the message says why."""


class CompileError(TreeAttnError, RuntimeError):
    """The compiler refused a kernel; the message carries its log."""


class CacheError(TreeAttnError, RuntimeError):
    """A call that the present state of a cache does not allow; the message says which call would."""


class CacheFullError(CacheError, MemoryError):
    """A step needs more pages than are free; nothing has changed."""
