"""`compile`: a kernel for any target, its source, its files, and calls of it where this machine can run it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..api import attention, kernel_spec
from ..arrays import INT32_MAX, view
from ..checks import integer
from ..compiler import build, gpu_sources
from ..errors import UnsupportedError
from ..hf import ModelSpec
from ..kernels.spec import KernelSpec
from ..logits import check_parts
from ..masks import Mask
from ..schedules.gpu import choose
from ..schedules.tiles import select
from ..storage import check_storage
from ..targets import HOST_CPU, GpuTraits, TargetTraits, code_target
from .describe import describe, read_spec, specs_of_model
from .export import export

NAME = "attention"
MOST_ROWS = INT32_MAX


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel compiled ahead of time; made by `treeattn.compile`.

    Attributes
    ----------
    spec : KernelSpec
        What it computes.
    traits : TargetTraits or GpuTraits
        What it is compiled for.
    name : str
        Of its files, and of its C function.
    layers : tuple of int, optional
        Layers of the model it serves.
    """

    spec: KernelSpec
    traits: TargetTraits | GpuTraits
    tile: Any
    code: Any
    name: str = NAME
    layers: tuple[int, ...] | None = None

    @property
    def source(self) -> str:
        """Text in the target's language: LLVM IR for ``llvm``, else that of attention, then that of merging."""
        if isinstance(self.traits, GpuTraits):
            return "\n".join(source.text for source in self.code)
        return str(self.code.inspect_source("ll"))

    def export(self, folder: str | Path, *, force: bool = False) -> Path:
        """Write source, binaries and manifest; see `treeattn.ahead.export.export`."""
        return export([self], folder, force=force)

    def __call__(self, q: Any, kv: Any, mask: Any, **options: Any) -> tuple[Any, Any]:
        """Compute attention as `treeattn.attention` does, and take its arguments, for calls of this kernel's spec.

        Raises
        ------
        UnsupportedError
            A call that needs another kernel, or a target that this machine cannot run.
        """
        if "target" in options:
            raise UnsupportedError("target: expected none, since the kernel has its own; compile one for another")
        queries = view(q, "q")
        check_storage(kv)
        if queries.ndim == 3 and isinstance(mask, Mask):  # of what else is wrong, attention tells
            softcap, alibi, sinks, rope = map(options.get, ("softcap", "alibi", "sink_logits", "rope"))
            parts = check_parts(softcap, alibi, sinks, rope, queries.shape[1])
            asked = kernel_spec(kv, mask, queries.dtype, parts)
            if asked != self.spec:
                raise UnsupportedError(
                    f"kernel: expected a call of {describe(self.spec)}, got one of {describe(asked)}"
                )
        return attention(q, kv, mask, **options, target=self._run_target)

    @property
    def _run_target(self) -> Any:
        if isinstance(self.traits, GpuTraits):
            return self.traits.kind
        return None if self.traits.cpu == HOST_CPU else self.traits


def compile(spec: Any, target: Any = "llvm", *, rows: int | None = None, layer: int | None = None) -> CompiledKernel:
    """Compile a kernel ahead of time.

    Parameters
    ----------
    spec : dict, str, Path, ModelSpec or KernelSpec
        What it computes: a description (`treeattn.ahead.describe.read_spec` has its keys; JSON text or a file will
        do), such as ``{"d_qk": 128, "q_dtype": "float16", "mask": "tree & (window | sink)"}``, or a model from
        `treeattn.spec_from_hf_config`.
    target : str or dict
        ``"llvm"``, ``"cuda"``, ``"opencl"``, ``"webgpu"``, ``"metal"``, ``"rocm"``, a name of
        `treeattn.targets.KNOWN`, or TVM's form, such as ``{"kind": "cuda", "arch": "sm_90a"}``. It need not be at hand.
    rows : int, optional
        Rows (query tokens times heads of a group) that a sequence has at most, which the tile of a GPU is chosen by;
        without, it is the largest.
    layer : int, optional
        Of a model whose layers need several kernels: which.

    Returns
    -------
    CompiledKernel
        With ``source`` and ``export(folder)``; a call computes attention where this machine can run the target.

    Raises
    ------
    TreeAttnError
        A bad description or target, or a kernel that the target cannot have.
    """
    if not isinstance(spec, ModelSpec):
        if layer is not None:
            raise UnsupportedError(f"layer: expected one with a ModelSpec alone, got {layer!r}")
        return compile_spec(read_spec(spec), target, rows=rows)
    kernels = specs_of_model(spec)
    if layer is None and len(kernels) > 1:
        groups = "; ".join(f"{describe(found)['mask']}: {len(layers)} layers" for found, layers in kernels.items())
        raise UnsupportedError(f"layer: expected one of {spec.num_layers}, since they need several kernels ({groups})")
    for found, layers in kernels.items():
        if layer is None or layer in layers:
            return compile_spec(found, target, rows=rows, layers=layers)
    raise UnsupportedError(f"layer: expected 0 to {spec.num_layers - 1}, got {layer!r}")


def compile_spec(
    spec: KernelSpec, target: Any, *, rows: int | None = None, name: str = NAME, layers: tuple[int, ...] | None = None
) -> CompiledKernel:
    """Compile a spec; ``name`` must differ between kernels of one export."""
    traits = code_target(target)
    rows = MOST_ROWS if rows is None else integer(rows, "rows")
    if isinstance(traits, GpuTraits):
        tile = choose(spec, traits, rows)
        return CompiledKernel(spec, traits, tile, gpu_sources(spec, tile, traits), name, layers)
    config = select(spec, traits)
    return CompiledKernel(spec, traits, config, build(spec, config, traits, name), name, layers)


def kernel_names(specs: dict[KernelSpec, tuple[int, ...]]) -> list[str]:
    """Name the kernels of a model by what tells them apart: a window, and rotation."""
    windowed = {spec: "window" in describe(spec)["mask"] for spec in specs}
    rotated = {spec: spec.rope is not None for spec in specs}

    def suffix(spec: KernelSpec) -> str:
        window = ("_window" if windowed[spec] else "_full") if len(set(windowed.values())) > 1 else ""
        rope = ("_rope" if rotated[spec] else "_nope") if len(set(rotated.values())) > 1 else ""
        return window + rope

    names = [NAME + suffix(spec) for spec in specs]
    return names if len(set(names)) == len(names) else [f"{NAME}_{i}" for i in range(len(specs))]
