"""Targets other than the host's: run where this machine can, otherwise their assembly is looked at."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import lru_cache

import pytest
from helpers import assert_same, attend, parents_first, rng

import treeattn as ta
from treeattn.compiler import build
from treeattn.errors import UnsupportedError
from treeattn.kernels.spec import KernelSpec
from treeattn.schedules.tiles import select
from treeattn.targets import KNOWN, TargetTraits, cpu_flags, resolve
from treeattn.testing import assert_within_budget, gather_path, make_case, random_forest

IS_X86 = bool(cpu_flags() & {"sse2"})
HAS_AVX2 = {"avx2", "fma", "f16c"} <= cpu_flags()
RUNS = [
    pytest.param(target, *rest, marks=pytest.mark.skipif(not runs, reason=f"this processor cannot run {target}"))
    for target, runs in (("llvm-plain", IS_X86), ("llvm-avx2", HAS_AVX2))
    for rest in (("tree", "float32", "float32"), ("tree&(window|sink)", "float16", "bfloat16"))
]


@pytest.mark.parametrize(("target", "mask", "dtype", "kv_dtype"), RUNS)
def test_results_of_a_named_target(target, mask, dtype, kv_dtype):
    """Many, few and no rows, paged and ragged."""
    for seed, storage in enumerate(("paged", "ragged")):
        case = make_case(rng(seed), mask=mask, dtype=dtype, kv_dtype=kv_dtype, storage=storage)
        assert_within_budget(*attend(case, target=target), case)
    lengths = [(1, 90), (3, 90), (7, 90), (8, 90), (150, 190), (0, 4)]
    case = make_case(rng(2), mask=mask, dtype=dtype, kv_dtype=kv_dtype, lengths=lengths, q_heads=1, kv_heads=1)
    assert_within_budget(*attend(case, target=target), case)


@pytest.mark.skipif(not IS_X86, reason="this processor cannot run llvm-plain")
def test_verify_equals_decode_without_fused_multiplies():
    tree = parents_first(random_forest(rng(), 30))
    case = make_case(rng(), trees=[tree], contexts=[60])
    verified = attend(case, target="llvm-plain")
    for node in range(30):
        path, at = gather_path(case, 0, node, rng(), only_last=True)
        assert_same(attend(path, target="llvm-plain"), tuple(part[at] for part in verified))


FOREIGN = [
    name
    for name, alien in (
        ("llvm-neon", IS_X86),
        ("llvm-avx512", IS_X86 and "avx512f" not in cpu_flags()),
        ("llvm-plain", not IS_X86),
    )
    if alien
]
PROGRAM = """
import sys
import numpy as np
import treeattn as ta
k = np.zeros((9, 1, 16), np.float32)
try:
    ta.attention(k, ta.RaggedKV(k, k, [0, 9]), ta.Full(), target=sys.argv[1])
except ta.UnsupportedError as error:
    print(error)
"""


@pytest.mark.parametrize("target", FOREIGN)
def test_a_target_this_machine_cannot_run_is_refused(target):
    """An error, not an illegal instruction."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, target], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr[-500:]}"
    assert done.stdout.startswith("target: ")
    assert target in done.stdout


# assembly ---------------------------------------------------------------------------------------------------


@lru_cache
def assembly(target, dtype="float32"):
    spec = KernelSpec(64, 64, dtype, dtype, ta.Tree([]).form)
    return build(spec, select(spec, KNOWN[target]), KNOWN[target]).inspect_source("asm")


MULTIPLY = {
    "llvm-avx512": r"\bvfmadd\w+ps\b.*%zmm",
    "llvm-avx2": r"\bvfmadd\w+ps\b.*%ymm",
    "llvm-neon": r"\bfmla\b.*\.4s",
    "llvm-plain": r"\bmulps\b",
}
SPILL = r"\bv?mov\w+\s+%[xyz]mm\d+, -?\d*\(%rsp|\bst[rp]\s+q\d+.*\[sp\b"


def innermost_loops(asm):
    """Blocks that jump back to their own label."""
    pieces = re.split(r"^(\.LBB\d+_\d+):", asm, flags=re.MULTILINE)
    for label, body in zip(pieces[1::2], pieces[2::2], strict=True):
        if re.search(rf"\s{re.escape(label)}\b", body):
            yield [line for line in body.splitlines() if re.match(r"\s+[a-z]", line)]


@pytest.mark.parametrize("target", ["llvm-avx512", "llvm-avx2", "llvm-neon"])
def test_the_register_tile_stays_in_registers(target):
    """The tightest loop that does a whole register tile a step stores no accumulator to the stack."""

    def multiplications(loop):
        return sum(bool(re.search(MULTIPLY[target], line)) for line in loop)

    traits = KNOWN[target]
    config = select(KernelSpec(64, 64, "float32", "float32", ta.Tree([]).form), traits)
    tile = config.panel // (traits.vector_bits // 32) * config.tokens
    loops = [loop for loop in innermost_loops(assembly(target)) if multiplications(loop) == tile]
    assert loops, f"no innermost loop with {tile} multiplications"
    tight = min(loops, key=len)
    assert not [line for line in tight if re.search(SPILL, line)]


@pytest.mark.parametrize("target", KNOWN)
def test_no_library_is_called_for_exponentials(target):
    """Only the logarithm, once a row, is the library's."""
    calls = set(re.findall(r"\b(?:callq?|bl)\s+([\w.]+)", assembly(target)))
    maths = {name for name in calls if re.match(r"(exp|pow|ldexp|scalbn|fma|log)", name)}
    assert maths <= {"log2f"}


@pytest.mark.parametrize("target", ["llvm-avx512", "llvm-avx2", "llvm-neon"])
def test_no_conversion_is_called(target):
    calls = set(re.findall(r"\b(?:callq?|bl)\s+([\w.]+)", assembly(target, "float16")))
    assert not {name for name in calls if re.match(r"(__(ext|trunc|gnu)|floorf|ceilf)", name)}


@pytest.mark.parametrize("target", ["llvm-avx512", "llvm-avx2", "llvm-neon"])
def test_sixteen_bit_values_are_converted_by_instructions(target):
    convert = {"llvm-neon": r"\bfcvtl2?\b"}.get(target, r"\bvcvtph2ps\b")
    assert re.search(convert, assembly(target, "float16"))


# names ------------------------------------------------------------------------------------------------------


def test_names():
    assert resolve(None) == resolve("llvm")
    assert resolve("llvm-neon").triple.startswith("aarch64")
    mine = TargetTraits("haswell", "avx2", 256, 16)
    assert resolve(mine) is mine
    with pytest.raises(UnsupportedError, match=r"^target: expected 'llvm' or one of llvm-avx512.*, got 'abacus'"):
        resolve("abacus")
