"""The manifest of an export: all that a program needs to launch its kernels, as data for JSON.

``docs/export.md`` explains it. `FORMAT` rises when a reader of the old form would go wrong.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..kernels import arguments as cpu
from ..kernels.gpu import arguments as gpu
from ..kernels.gpu.source import KernelSource
from ..kernels.spec import KernelSpec
from ..kernels.workspace import workspace_floats
from ..schedules.tiles import TileConfig
from ..targets import GpuTraits, TargetTraits
from .definitions import CPU_ITEM, GPU_ITEM, SCALARS, TESTS, argument, part
from .describe import describe, mask_text

FORMAT = 1
PASSED = {
    "cuda": "arguments of the kernel, in order",
    "rocm": "arguments of the kernel, in order",
    "opencl": "arguments of the kernel, in order",
    "metal": "buffers at indices 0 on, then one constant struct of the scalars in order, each in 8 bytes",
    "webgpu": "buffers at bindings 0 on of group 0, then one uniform of the scalars in order, 4 bytes each, and last "
    "packGridDimX = num_blocks - 1, u32",
    "llvm": "one struct, treeattn_arguments of treeattn.h",
}
"""By kind: how arguments are passed."""
GRIDS = {"webgpu": ["ceil(num_blocks / ceil(num_blocks / 65535))", "1", "ceil(num_blocks / 65535)"]}
GRID = ["num_blocks", "1", "1"]


def manifest(versions: str, target: TargetTraits | GpuTraits, kernels: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the manifest of kernels for one target."""
    kind = target.kind if isinstance(target, GpuTraits) else "llvm"
    return {
        "format": FORMAT,
        "made_by": versions,
        "target": target.tvm_target() | {"kind": kind},
        "arguments_are": PASSED[kind],
        "kernels": list(kernels),
    }


def of_cpu(name: str, spec: KernelSpec, config: TileConfig, layers: Sequence[int] | None) -> dict[str, Any]:
    """Return the entry of a kernel for the CPU."""
    dtypes = {"q": spec.q_dtype, "kv": spec.kv_dtype}
    named = [(x, dtypes.get(dtype, dtype)) for x, dtype in (cpu.POINTERS | cpu.SCALARS).items()]
    function = {
        "entry": f"treeattn_{name}",
        "symbol": f"__tvm_ffi_{name}",
        "arguments": [argument(*pair) for pair in named],
        "launch": "one call, on the threads that treeattn_set_launch gave, or else on the calling one",
    }
    tile = asdict(config) | {"rows": config.rows if config.has_many else config.few[-1]}
    return _kernel(name, spec, layers, tile, {"attention": function}) | {
        "workspace_floats": workspace_floats(spec, config),
        "parts": [part(x, CPU_ITEM) for x in cpu.POINTERS if argument(x, "")["role"] == "plan"],
    }


def of_gpu(
    name: str, spec: KernelSpec, tile: Any, traits: GpuTraits, sources: Sequence[KernelSource],
    layers: Sequence[int] | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the entry of a kernel for a GPU: attention, and merging of what it split."""
    functions = {source.name: _function(source, spec) for source in sources}
    functions["attention"]["resources"] = {"shared_bytes": tile.shared_bytes(spec, traits)}
    functions["merge"]["resources"] = {"shared_bytes": 0}
    sizes = asdict(tile) | {"rows": tile.rows, "columns": tile.columns, "threads": tile.threads}
    packed = {
        "plan": {
            "dtype": "int32",
            "header": [
                *({"name": x, "meaning": "where it begins in plan, in elements"} for x in gpu.PARTS),
                *({"name": x, "meaning": "where it begins in tables, in elements"} for x in gpu.TABLES),
                *({"name": x, "meaning": SCALARS[x]} for x in gpu.VALUES),
            ],
            "parts": [part(x, GPU_ITEM) for x in gpu.PARTS],
        },
        "tables": {
            "dtype": "float32",
            "header": [{"name": x, "meaning": SCALARS[x]} for x in gpu.TABLE_HEADER],
            "parts": [part(x) for x in gpu.TABLES],
        },
    }
    return _kernel(name, spec, layers, sizes, functions) | {"packed": packed}


def _kernel(
    name: str, spec: KernelSpec, layers: Sequence[int] | None, tile: dict[str, Any], functions: dict[str, Any]
) -> dict[str, Any]:
    layer = {} if layers is None else {"layers": list(layers)}
    return {"name": name, "spec": describe(spec)} | layer | {
        "tile": tile,
        "leaves": [dict(zip(("mask", "test", "sees", "bound"), leaf, strict=True)) for leaf in _leaves(spec.mask)],
        "functions": functions,
    }  # fmt: skip


def _leaves(form: tuple[Any, ...]) -> list[tuple[str, str, str, str]]:
    if form[0] in "&|":
        return [leaf for side in form[1:] for leaf in _leaves(side)]
    return [(mask_text(form), form[0], *TESTS[form[0]])]


def _function(source: KernelSource, spec: KernelSpec) -> dict[str, Any]:
    dtypes = {"q": spec.q_dtype, "kv": spec.kv_dtype}
    pointers = [argument(name, dtypes.get(gpu.POINTERS[name], gpu.POINTERS[name])) for name in source.pointers]
    scalars = [argument(*pair) for pair in zip(source.scalars, source.scalar_dtypes, strict=True)]
    if source.kind == "webgpu":  # a layout must repeat what the shader declares
        declared = re.findall(r"@binding\(\d+\) var<storage, (\w+)>", source.text)
        for pointer, access in zip(pointers, declared, strict=True):
            pointer["access"] = access
    return {
        "entry": source.name,
        "arguments": pointers + scalars,
        "launch": {
            "num_blocks": "num_merges" if source.name == "merge" else "num_items",
            "grid": GRIDS.get(source.kind, GRID),
            "block": [source.threads, 1, 1],
            "dynamic_shared_bytes": source.dynamic_bytes,
        },
    }
