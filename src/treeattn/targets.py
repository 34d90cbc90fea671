"""What code is generated for: facts about a machine that may change a kernel."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .errors import UnsupportedError


@dataclass(frozen=True)
class TargetTraits:
    """A CPU as a schedule sees it; part of the key of compiled kernels.

    Parameters
    ----------
    cpu : str
        LLVM's name of the processor; ``"host"`` for the one at hand.
    vector : str
        ``"avx2"``, ``"avx512"``, ``"neon"`` or ``"plain"``.
    vector_bits, vector_registers : int
        Size and number of its vector registers.
    triple : str
        LLVM's target triple; empty for the machine at hand.
    """

    cpu: str
    vector: str
    vector_bits: int
    vector_registers: int
    triple: str = ""

    def fingerprint(self) -> str:
        """Return what tells this machine's code from another's, for the key of compiled kernels."""
        return " ".join(sorted(cpu_flags())) if self.cpu == HOST_CPU else ""

    def tvm_target(self) -> dict[str, Any]:
        """Return the target in TVM's form."""
        target: dict[str, Any] = {"kind": "llvm", "mcpu": self.cpu, "opt-level": 2}  # 3 compiles longer, runs no faster
        if self.cpu == HOST_CPU:
            from tvm.target import codegen

            target["mcpu"] = str(codegen.llvm_get_system_cpu())
        if self.triple:
            target["mtriple"] = self.triple
        return target


VECTORS = {"avx512": (512, 32), "avx2": (256, 16), "neon": (128, 32), "plain": (128, 16)}

KNOWN = {
    "llvm-avx512": TargetTraits("skylake-avx512", "avx512", 512, 32, "x86_64-linux-gnu"),
    "llvm-avx2": TargetTraits("haswell", "avx2", 256, 16, "x86_64-linux-gnu"),
    "llvm-neon": TargetTraits("neoverse-n1", "neon", 128, 32, "aarch64-linux-gnu"),
    "llvm-plain": TargetTraits("x86-64", "plain", 128, 16, "x86_64-linux-gnu"),
}


def resolve(target: Any) -> TargetTraits:
    """Return the traits of ``target``: None or ``"llvm"`` for this machine, a name of `KNOWN`, or traits.

    Raises
    ------
    UnsupportedError
        A target no kernel is generated for.
    """
    if isinstance(target, TargetTraits):
        return target
    if target is None or (isinstance(target, str) and target == "llvm"):
        return host()
    if isinstance(target, str) and target in KNOWN:
        return KNOWN[target]
    raise UnsupportedError(f"target: expected 'llvm' or one of {', '.join(KNOWN)}, got {target!r}")


def runnable(target: Any) -> TargetTraits:
    """Return the traits of ``target`` if this machine can run its code.

    Raises
    ------
    UnsupportedError
        Code for another kind of processor, or for vectors this one lacks.
    """
    traits, here = resolve(target), host()
    arm = platform.machine().lower() in ("aarch64", "arm64")
    if traits.cpu != HOST_CPU and (arm != (traits.vector == "neon") or traits.vector_bits > here.vector_bits):
        raise UnsupportedError(
            f"target: expected code that this {platform.machine()} machine with {here.vector} vectors runs, "
            f"got {target!r} for {traits.cpu}; compile for it with treeattn.compiler.build"
        )
    return traits


HOST_CPU = "host"


@lru_cache(maxsize=1)
def host() -> TargetTraits:
    """Return the traits of the machine at hand, without loading the compiler where the system tells them."""
    flags = cpu_flags()
    if {"avx512f", "avx512vl", "avx512bw"} <= flags:
        vector = "avx512"
    elif {"avx2", "fma", "f16c"} <= flags:
        vector = "avx2"
    elif flags & {"asimd", "neon"}:
        vector = "neon"
    else:
        vector = "plain"
    return TargetTraits(HOST_CPU, vector, *VECTORS[vector])


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """Return the features of this machine's processor, by the system's names for them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        from tvm.target import codegen

        return frozenset(str(name) for name, has in dict(codegen.llvm_get_cpu_features(None)).items() if has)
    flags = [line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))]
    return frozenset(flags[0] if flags else ())


def available_threads() -> int:
    """Return the number of processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class GpuTraits:
    """A GPU, or whatever runs its languages, as a schedule sees it; part of the key of compiled kernels.

    Parameters
    ----------
    kind : str
        Code generator: ``"cuda"``, ``"rocm"``, ``"metal"``, ``"opencl"`` or ``"webgpu"``.
    threads, shared_bytes : int
        The most a block may have.
    float16, int16 : bool
        Whether memory can be declared with such elements.
    index : str
        Integer type of offsets.
    arch : str
        The code generator's name of the processor; empty where there is none.
    storage_buffers : int
        The most a kernel may bind.
    """

    kind: str
    threads: int
    shared_bytes: int
    float16: bool = True
    int16: bool = True
    index: str = "int64"
    arch: str = ""
    storage_buffers: int = 31

    @property
    def sm(self) -> int:
        """Number of an NVIDIA architecture (``sm_90a`` is 90), 0 for others."""
        digits = re.match(r"sm_(\d+)", self.arch) if self.kind == "cuda" else None
        return int(digits[1]) if digits else 0

    @property
    def has_mma(self) -> bool:
        """Whether warps multiply 16 x 16 by 16 x 8 matrices of 16-bit floats, and copy to shared memory meanwhile."""
        return self.sm >= 80

    @property
    def dynamic_bytes(self) -> int:
        """Shared memory that a block may have if its launch asks for it."""
        return MOST_DYNAMIC.get(self.sm, DYNAMIC_OF_LATER) if self.has_mma else self.shared_bytes

    def tvm_target(self) -> dict[str, Any]:
        """Return the target in TVM's form."""
        target: dict[str, Any] = {"kind": self.kind, "max_num_threads": self.threads}
        if self.arch:
            target["mcpu" if self.kind == "rocm" else "arch"] = self.arch
        return target


MOST_DYNAMIC = {80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""By compute capability (CUDA programming guide, technical specifications)."""
DYNAMIC_OF_LATER = 99 << 10

GPUS = {
    "cuda": GpuTraits("cuda", 1024, 48 * 1024, arch="sm_80"),
    "rocm": GpuTraits("rocm", 1024, 64 * 1024, arch="gfx90a"),
    "metal": GpuTraits("metal", 1024, 32 * 1024),
    "opencl": GpuTraits("opencl", 256, 16 * 1024),
    "webgpu": GpuTraits("webgpu", 256, 16 * 1024, int16=False, index="int32", storage_buffers=8),
}
"""What every device of a kind has."""
