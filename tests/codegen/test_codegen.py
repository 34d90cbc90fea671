"""Properties of generated code: what it computes with, where it reaches, and that it does not change by itself."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
import pytest
from checked import checked

import treeattn as ta
from treeattn import api
from treeattn.backends import llvm
from treeattn.compiler import CpuKernel, build
from treeattn.kernels import cpu
from treeattn.kernels.spec import KernelSpec
from treeattn.schedules.tiles import TileConfig, select
from treeattn.targets import KNOWN, host
from treeattn.testing import assert_within_budget, make_case

TREE = ta.Tree([])
SPECS = [
    KernelSpec(64, 64, "float32", "float32", TREE.form),
    KernelSpec(46, 46, "float16", "bfloat16", (TREE & (ta.Window(1) | ta.Sink(1))).form),
]
AVX2 = KNOWN["llvm-avx2"]


@lru_cache
def module(spec, target="llvm-avx2"):
    return build(spec, select(spec, KNOWN[target]), KNOWN[target])


@lru_cache
def source(spec, kind, target="llvm-avx2"):
    return module(spec, target).inspect_source(kind)


@pytest.mark.parametrize("target", KNOWN)
def test_no_double_arithmetic(target):
    """Doubles only carry 64 bits from memory to a vector."""
    used = re.findall(r"= f(?:add|sub|mul|div|cmp|pext|ptrunc|neg)\b.*\bdouble\b", source(SPECS[0], "ll", target))
    assert used in ([], ["= fptrunc double"])  # the argument sm_scale arrives as one


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_no_fast_math(spec):
    """Reordered or assumed-finite arithmetic would cost exactness and NaN safety."""
    flags = r"\b(fast|nnan|ninf|nsz|arcp|contract|afn|reassoc)\b"
    assert re.findall(rf"= (?:tail )?(?:f\w+|call|select)\b[^=]*{flags}", source(spec, "ll")) == []


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_sums_are_fused(spec):
    """Every product that is added to a sum of products is one instruction: ``llvm.fmuladd`` in the source."""
    assert len(re.findall(r"\bvfmadd\w+ps\b.*%ymm", source(spec, "asm"))) > 100
    assert "@llvm.fmuladd.v8f32" in source(spec, "ll")


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_no_memory_is_allocated(spec):
    """Accumulators are registers or stack slots, never a workspace allocation."""
    assert not re.search(r"Alloc(ate)?Workspace|TVMBackendAlloc|malloc", source(spec, "ll"))


@pytest.mark.parametrize("target", KNOWN)
def test_frames_are_small(target):
    """Spilled accumulators would show as kilobytes of stack."""
    frames = [
        int(size)
        for size in re.findall(
            r"\bsub\w*\s+(?:sp, sp, #|\$)(\d+)(?:, %rsp)?\s*$", source(SPECS[0], "asm", target), re.MULTILINE
        )
    ]
    assert frames
    assert max(frames) < 8192


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_second_build_gives_the_same_code(spec):
    config = select(spec, AVX2)
    assert cpu.attention(spec, config).script() == cpu.attention(spec, config).script()
    assert build(spec, config, AVX2).inspect_source("asm") == source(spec, "asm")


def test_threads_work_on_their_own():
    """One parallel region and no barrier in it."""
    assert source(SPECS[0], "ll").count("call i32 @TVMBackendParallelLaunch") <= 1
    assert "TVMBackendParallelBarrier" not in source(SPECS[0], "ll")


# every index, checked while kernels run --------------------------------------------------------------------------

CHECKED = [
    ("tree", 16, "float32", TileConfig()),
    ("tree&(window|sink)", 46, "float16", TileConfig()),
    ("full", 7, "bfloat16", TileConfig()),
    ("causal", 80, "float32", TileConfig()),
    ("full&window", 16, "float32", TileConfig()),
    ("tree", 16, "float32", TileConfig(rows=256, columns=60, few=(1, 2, 4, 8))),
    ("causal", 16, "float16", TileConfig(rows=48, tokens=3, columns=42, few=(1, 2, 3, 5, 6, 7))),
]


def checked_kernel(case, config, shrink=0):
    pools = case.kv.pools
    spec = KernelSpec(pools.d_qk, pools.d_v, case.q.dtype.name, pools.dtype, case.mask.simplified().form)
    with checked(shrink):
        made = build(spec, config, host())
    return CpuKernel(spec, config, host(), llvm.function(made))


def run_checked(case, made, monkeypatch):
    monkeypatch.setattr(api, "kernel", lambda spec, target=None, group=None: made)
    return ta.attention(case.q, case.kv, case.mask, q_indptr=case.q_indptr, threads=1)


@pytest.mark.parametrize(("mask", "d", "dtype", "config"), CHECKED, ids=str)
def test_every_index_lies_within_its_part(mask, d, dtype, config, monkeypatch):
    lengths = [(1, 90), (2, 60), (4, 130), (5, 49), (8, 48), (9, 200), (40, 90), (130, 170), (0, 3)]
    cases = [
        make_case(
            np.random.default_rng(heads), mask=mask, lengths=lengths, d_qk=d, dtype=dtype, kv_heads=1, q_heads=heads
        )
        for heads in (1, 3)
    ]
    made = checked_kernel(cases[0], config)
    for case in cases:
        assert_within_budget(*run_checked(case, made, monkeypatch), case)


def test_an_index_outside_is_noticed(monkeypatch):
    """With parts said to be 16 elements smaller than they are, the same assertions fail."""
    case = make_case(np.random.default_rng(0), mask="tree")
    made = checked_kernel(case, TileConfig(), shrink=16)
    with pytest.raises(RuntimeError, match="index outside of"):
        run_checked(case, made, monkeypatch)
