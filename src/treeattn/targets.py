"""What code is generated for: facts about a machine that may change a kernel."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
        target: dict[str, Any] = {"kind": "llvm", "mcpu": self.cpu, **COMPILER}
        if self.cpu == HOST_CPU:
            from tvm.target import codegen

            target["mcpu"] = str(codegen.llvm_get_system_cpu())
        if self.triple:
            target["mtriple"] = self.triple
        return target


COMPILER = {"opt-level": 2, "cl-opt": ["-disable-lsr", "-disable-cgp", "-unroll-threshold-default:uint=0"]}
"""Level 3, loop strength reduction, LLVM's preparation for code generation and more unrolling than ours make kernels no
faster; the latter three are two fifths of the time that compiling takes."""
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
    raise UnsupportedError(
        f"target: expected 'llvm' or one of {', '.join(KNOWN)}, or a device (cuda, opencl, webgpu), got {target!r}"
    )


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
    vector = _vector(cpu_flags())
    return TargetTraits(HOST_CPU, vector, *VECTORS[vector])


def _vector(features: frozenset[str]) -> str:
    """Return the vectors that a processor with these features has, a key of `VECTORS`."""
    if {"avx512f", "avx512vl", "avx512bw"} <= features:
        return "avx512"
    if {"avx2", "fma", "f16c"} <= features:
        return "avx2"
    return "neon" if features & {"asimd", "neon"} else "plain"


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """Return the features of this machine's processor, by the system's names for them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return _llvm_features(TargetTraits(HOST_CPU, "plain", *VECTORS["plain"]).tvm_target())
    flags = [line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))]
    return frozenset(flags[0] if flags else ())


def _llvm_features(target: dict[str, Any]) -> frozenset[str]:
    """Return LLVM's names of the features of the processor of a target in TVM's form."""
    import tvm
    from tvm.target import codegen

    return frozenset(map(str, codegen.llvm_get_cpu_features(tvm.target.Target(target))))


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
            target[ARCHS[self.kind][0]] = self.arch
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

GPU_KEYS = {"max_num_threads": "threads", "max_shared_memory_per_block": "shared_bytes"}
ARCHS = {"cuda": ("arch", r"sm_\d+[af]?"), "rocm": ("mcpu", r"gfx[0-9a-f]+")}
"""By kind: TVM's key of the processor, and what its names look like."""


def code_target(target: Any) -> TargetTraits | GpuTraits:
    """Return the traits of what code can be generated for, whether or not it is at hand.

    Parameters
    ----------
    target : str, dict or traits
        ``"llvm"``, a name of `KNOWN` or of `GPUS`, or TVM's form: ``{"kind": "cuda", "arch": "sm_90a"}``,
        ``{"kind": "rocm", "mcpu": "gfx942"}``, ``{"kind": "llvm", "mcpu": "znver4", "mtriple": "x86_64-linux-gnu"}``;
        for GPUs also ``max_num_threads`` and ``max_shared_memory_per_block``, for a block.

    Raises
    ------
    UnsupportedError
        Another target, or a key that is not known.
    """
    if isinstance(target, GpuTraits):
        return target
    if isinstance(target, Mapping):
        return _from_mapping(target)
    if isinstance(target, str) and target in GPUS:
        return GPUS[target]
    if isinstance(target, str) and target not in ("llvm", *KNOWN):
        raise UnsupportedError(f"target: expected one of llvm, {', '.join((*KNOWN, *GPUS))}, got {target!r}")
    return resolve(target)


def _from_mapping(target: Mapping[str, Any]) -> TargetTraits | GpuTraits:
    kind = str(target.get("kind"))
    if kind != "llvm" and kind not in GPUS:
        raise UnsupportedError(f"target: expected kind llvm, {', '.join(GPUS)}, got {target.get('kind')!r}")
    arch, pattern = ARCHS.get(kind, ("", ""))
    known = {"mcpu", "mtriple"} if kind == "llvm" else {*GPU_KEYS, arch} - {""}
    unknown = sorted(str(key) for key in {*target} - known - {"kind"})
    if unknown:
        raise UnsupportedError(f"target: expected {', '.join(sorted(known))} for {kind}, got {', '.join(unknown)}")
    if kind == "llvm":
        return _cpu(target.get("mcpu"), target.get("mtriple"))
    changes: dict[str, Any] = {GPU_KEYS[key]: _size(key, target[key]) for key in GPU_KEYS if key in target}
    if arch in target:
        if not re.fullmatch(pattern, str(target[arch])):
            raise UnsupportedError(f"target: expected {arch} like {GPUS[kind].arch}, got {target[arch]!r}")
        changes["arch"] = target[arch]
    return replace(GPUS[kind], **changes)


def _cpu(name: Any, triple: Any) -> TargetTraits:
    """Return the traits of a processor by LLVM's name."""
    if name is None and triple is None:
        return host()
    if not isinstance(name, str) or not isinstance(triple, str | None):
        raise UnsupportedError(f"target: expected the name of a processor as mcpu, got {name!r} (mtriple {triple!r})")
    from tvm.target import codegen

    made = TargetTraits(name, "plain", *VECTORS["plain"], triple or str(codegen.llvm_get_system_triple()))
    if not codegen.llvm_is_valid_cpu(name, made.triple):
        raise UnsupportedError(f"target: expected a processor that LLVM knows for {made.triple}, got {name!r}")
    vector = _vector(_llvm_features(made.tvm_target()))
    bits, registers = VECTORS[vector]
    return replace(made, vector=vector, vector_bits=bits, vector_registers=registers)


def _size(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedError(f"target: expected {key} to be 1 or more, got {value!r}")
    return value
