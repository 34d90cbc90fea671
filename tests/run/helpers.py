"""What the tests of kernels share: run a `Case`, with any tile configuration, and compare bit for bit."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

import treeattn as ta
from treeattn import api, compiler

DTYPES = ("float32", "float16", "bfloat16")


def attend(case, **options):
    return ta.attention(case.q, case.kv, case.mask, **case.options, **options)


def plan_of(case, **options):
    return api.plan(
        case.kv,
        case.mask,
        q_indptr=case.q_indptr,
        q_heads=case.q.shape[1],
        dtype=case.q.dtype,
        sm_scale=case.sm_scale,
        **options,
    )


@contextmanager
def tile(config):
    """Make every plan within the block use one tile configuration."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "kernel", lambda spec, target=None, group=None: compiler.kernel(spec, target, config))
        yield


def bits(array):
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def assert_same(got, want):
    """The very same bits in ``out`` and in ``lse``."""
    for name, one, other in zip(("out", "lse"), got, want, strict=True):
        assert one.dtype == other.dtype
        differing = np.argwhere(bits(one) != bits(other))
        assert not len(differing), f"{name} differs in {len(differing)} of {one.size} entries, first {differing[0]}"


def rng(seed=0):
    return np.random.default_rng(seed)


def renumbered(tree, order):
    """The same forest with node ``order[i]`` as node ``i``."""
    rank = np.append(np.argsort(order), -1)
    return ta.TokenTree.from_parents(rank[tree.parents[order]])


def parents_first(tree, depth_first=False):
    """The same forest, every path in rising node order: that of decoding."""
    return renumbered(tree, np.argsort(tree.intervals[:, 0] if depth_first else tree.depth, kind="stable"))
