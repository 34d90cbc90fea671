"""Faults put into the tensor-core kernel's text on purpose: the machine of fibers or the oracle must notice each."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

import treeattn as ta
from treeattn.compiler import gpu_sources
from treeattn.kernels.spec import KernelSpec
from treeattn.schedules.mma import MmaTile
from treeattn.targets import GPUS
from treeattn.testing import assert_within_budget, make_case
from treeattn.testing.fibers import KernelFault
from treeattn.testing.fibers.device import FiberDevice

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="CUDA text runs on the CPU by way of g++")

TREE = ta.Tree([]).form
TEXT = gpu_sources(KernelSpec(64, 64, "float16", "float16", TREE), MmaTile(), GPUS["cuda"])[0].text
SEEDS = range(3)


class Mutant(FiberDevice):
    """A device whose compiler changes the kernel before it compiles it."""

    def __init__(self, change, seed):
        super().__init__(seed=seed, blocks=1)
        self.change = change

    def program(self, source):
        return super().program(replace(source, text=self.change(source.text)) if source.name == "attention" else source)


def case_of(seed):
    """Trees over several blocks of columns, with rows in more than one tile."""
    lengths = ((40, 290), (7, 90), (0, 5), (3, 3))
    rng = np.random.default_rng(seed)
    return make_case(rng, mask="tree", lengths=lengths, dtype="float16", d_qk=64, q_heads=4, kv_heads=2)


def with_infinity(case, column):
    """The case with an infinite value in a column of the first sequence."""
    kv = case.kv
    pages = kv.pages.copy()
    pages[kv.page_ids[kv.page_indptr[0] + column // kv.page_size], 1, 0, column % kv.page_size, 5] = np.inf
    return replace(case, kv=replace(kv, pages=pages))


CASES = [case_of(seed) for seed in SEEDS]
FLAT = replace(CASES[0], q=CASES[0].q / 100)
LAST_NODE, LAST_OF_PREFIX = 289, 290 - CASES[0].mask.trees[0].num_nodes - 1  # few rows see it, and all of them


def attend(case, change, seed):
    return ta.attention(case.q, case.kv, case.mask, **case.options, target=Mutant(change, seed))


def check(change):
    for seed, case in zip(SEEDS, CASES, strict=True):
        assert_within_budget(*attend(case, change, seed * 100), case)
    for column in (LAST_NODE, LAST_OF_PREFIX):
        special = with_infinity(FLAT, column)
        out, want = attend(special, change, 0)[0], special.expected[0]
        np.testing.assert_array_equal(np.isinf(out), np.isinf(want))
        np.testing.assert_array_equal(np.isnan(out), np.isnan(want))


def occurrences(pattern):
    body = TEXT.index("{\n", TEXT.rindex('extern "C" __global__'))
    return [match.span() for match in re.finditer(pattern, TEXT) if match.start() > body]


def changed(span, new):
    def change(text):
        assert text == TEXT
        return text[: span[0]] + new + text[span[1] :]

    return change


def everywhere(pattern, new):
    assert occurrences(pattern), pattern
    spans = occurrences(pattern)

    def change(text):
        for begin, end in reversed(spans):
            text = text[:begin] + re.sub(pattern, new, TEXT[begin:end]) + text[end:]
        return text

    return change


def test_the_unchanged_kernel_passes():
    check(lambda text: text)


BARRIERS = occurrences(r"__syncthreads\(\);")
WAITS = occurrences(r"tvm_builtin_ptx_cp_async_wait_group\w+\(\);")
ROWS = re.search(r"\(\(v_\d+ \* 16\) < (v_\d+)\)", TEXT)[1]
STAGE, _, OTHER = re.search(r"int (v_\d+) = (_ptr_\d+)\[0\];\s+int (v_\d+) = \(1 - \2\[0\]\);", TEXT).groups()
SCALE = re.search(r"float (v_\d+) = \(v_\d+ \* \(\*\(float", TEXT)[1]
PAGE = r"plan\[\(\((v_\d+) \+ (v_\d+)\) \+ (v_\d+)\)\];\s+int64_t"
SHUFFLE = r"__shfl_xor_sync\(\(uint\)4294967295, (\w+), 2,"
TEXTUAL = {
    "waits for one group too few": (r"wait_group_0\(", "wait_group_1("),
    "commits missing": (r"tvm_builtin_ptx_cp_async_commit_group\w+\(\);", ""),
    "values not transposed": (r"x4_trans_shared", "x4_shared"),
    "keys transposed": (r"m8n8_x4_shared", "m8n8_x4_trans_shared"),
    "a node does not see itself": (r">= (v_\d+)\) && \(_ptr", r"> \1) && (_ptr"),
    "a node sees the next in order": (r"(_ptr_\d+\[\d\]) < (v_\d+)\)\)\) \?", r"\1 <= \2))) ?"),
    "columns past the last are seen": (r"\(\((v_\d+) < (v_\d+)\) && \(\(_ptr", r"((\1 <= \2) && ((_ptr"),
    "values past the last are copied": (r"\? \(uint\)16 : \(uint\)0", "? (uint)16 : (uint)16"),
    "the other stage is read": (rf"\({STAGE} \* 64\)", f"({OTHER} * 64)"),
    "maxima of two lanes": (SHUFFLE, r"__shfl_xor_sync((uint)4294967295, \1, 1,"),
    "sums are not rescaled": (r"(_ptr_\d+\[[^\]]*\* 4[^\]]*\]) = \(\1 \* _ptr_\d+\[\d\]\)", r"\1 = \1"),
    "infinities are not looked for": (r"\(\(int\)tvm_builtin_cuda_sync", "(0*(int)tvm_builtin_cuda_sync"),
    "rows past the last are stored": (rf"if \((v_\d+) < {ROWS}\)", "if (true)"),
    "one page too far": (PAGE, r"plan[((\1 + \2) + \3) + 1]; int64_t"),
    "slots past the page": (r"(v_\d+) = \((v_\d+) - \((v_\d+) \* v_\d+\)\)", r"\1 = \2"),
    "the scale is forgotten": (rf"\* {SCALE}\)", "* 1.0f)"),
    "a span is skipped": (r"(_ptr_\d+\[0\]) = \(\1 \+ 1\);", r"\1 = (\1 + 2);"),
}
FAULTS = {
    **{f"barrier {i} missing": changed(span, "") for i, span in enumerate(BARRIERS)},
    **{f"wait {i} missing": changed(span, "") for i, span in enumerate(WAITS)},
    **{what: everywhere(*change) for what, change in TEXTUAL.items()},
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_noticed(what):
    with pytest.raises((KernelFault, AssertionError)):
        check(FAULTS[what])
