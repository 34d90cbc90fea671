"""What TVM's targets say of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tvm

from ..arrays import DTYPES
from ..checks import integer
from ..errors import UnsupportedError
from ..targets import ARCHS, GPUS, GpuTraits

CPU_KINDS = ("llvm", "c")
CPU = GpuTraits("llvm", 1, 0)
"""A CPU, as far as the types of memory go."""


def get_max_num_threads_per_block(target: Any) -> int:
    """Return the most threads of a block on a GPU target: the greater of its two attributes."""
    attrs = target.attrs
    return max(int(attrs["max_num_threads"]), int(attrs.get("max_threads_per_block") or 0))


def check_thread_limits(target: Any, bdx: int, bdy: int, bdz: int, gdz: int) -> None:
    """Check a GPU block against its target.

    Raises
    ------
    UnsupportedError
        More threads than the target has, or a third dimension that WebGPU does not offer.
    """
    most = get_max_num_threads_per_block(target)
    if bdx * bdy * bdz > most:
        raise UnsupportedError(f"block: expected at most {most} threads on {target.kind.name}, got {bdx}*{bdy}*{bdz}")
    if target.kind.name == "webgpu" and (bdz > 64 or gdz != 1):
        raise UnsupportedError(f"block: expected threadIdx.z <= 64 and blockIdx.z = 1 on webgpu, got {bdz} and {gdz}")


def device_of(target: Any) -> GpuTraits | None:
    """Return the GPU that a target is, or None for a CPU.

    Parameters
    ----------
    target : tvm.target.Target, str or dict, optional
        None is a CPU.

    Raises
    ------
    UnsupportedError
        Another kind of target.
    """
    if target is None:
        return None
    try:
        target = target if isinstance(target, tvm.target.Target) else tvm.target.Target(target)
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"target: expected a target of TVM, got {target!r:.60}: {error}") from None
    kind = target.kind.name
    if kind in CPU_KINDS:
        return None
    if kind not in GPUS:
        raise UnsupportedError(f"target: expected one of {', '.join((*CPU_KINDS, *GPUS))}, got {kind}")
    traits, attrs = GPUS[kind], target.attrs
    arch = attrs.get(ARCHS[kind][0]) if kind in ARCHS else None
    return replace(
        traits,
        threads=integer(get_max_num_threads_per_block(target), "target: max_num_threads"),
        shared_bytes=int(attrs.get("max_shared_memory_per_block") or traits.shared_bytes),
        arch=str(arch or traits.arch),
    )


def check_dtype(dtype: Any, name: str, device: GpuTraits | None, on_cpu: Sequence[str] = tuple(DTYPES)) -> None:
    """Refuse a dtype that is not offered on a device, or on CPUs is not in ``on_cpu``."""
    known = on_cpu if device is None else [kind for kind in DTYPES if device.int16 or kind != "bfloat16"]
    if dtype not in known:
        raise UnsupportedError(f"{name}: expected {' or '.join(known)} on this target, got {dtype!r:.60}")


def in_scope(make: Callable[[GpuTraits | None], Any]) -> Any:
    """Make a function for the GPU whose target is in scope (``with target:``), else for the CPU.

    That one is bound to the CPU: TVM would build it for a GPU too, and hand it device memory.
    """
    device = device_of(tvm.target.Target.current(allow_none=True))
    function = make(device)
    return function if device else function.with_attr("target", tvm.target.Target("llvm"))


def angle_dtype(device: GpuTraits | None) -> str:
    """Return the float type of angles: double on CPUs and CUDA; others lack it, or TVM lacks their functions of it."""
    return "float64" if device is None or device.kind == "cuda" else "float32"
