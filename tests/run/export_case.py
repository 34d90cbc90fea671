"""The case that the examples of exports compute, and their results."""

from __future__ import annotations

import numpy as np

import treeattn as ta
from treeattn.testing import Case

PARENTS, PREFIX, WINDOW = [-1, 0, 0, 1, 1, 2], 41, 20


def fill(shape, seed):
    hashed = (np.arange(np.prod(shape), dtype=np.uint64) + seed) * 2654435761 % 2**32 >> 16
    return (hashed.astype(np.float32) / np.float32(32768) - 1).reshape(shape)


def example_case():
    kv = ta.PagedKV(fill((5, 2, 2, 16, 32), 100003), [0, 3], [3, 0, 4], [15])
    mask = ta.Tree([ta.TokenTree.from_parents(PARENTS)]) & ta.Window(WINDOW)
    return Case(fill((6, 6, 32), 1), kv, mask, np.array([0, 6], np.int32))


def example_result(path):
    """``out, lse`` of the file that an example writes."""
    values = np.fromfile(path, np.float32)
    return values[: 6 * 6 * 32].reshape(6, 6, 32), values[6 * 6 * 32 :].reshape(6, 6)
