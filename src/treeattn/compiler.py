"""From a spec to a callable: the compiler, and the caches in memory and on disk."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from . import store
from .backends import llvm
from .devices import Device, Program
from .errors import CompileError
from .kernels.spec import KernelSpec
from .kernels.workspace import workspace_floats
from .schedules.gpu import AnyTile, choose
from .schedules.mma import MmaTile
from .schedules.tiles import TILES, TileConfig, select
from .targets import GpuTraits, TargetTraits, host, resolve


@dataclass(frozen=True)
class CpuKernel:
    """The kernel of a spec ready to run on the CPU, with what it was made from."""

    spec: KernelSpec
    config: TileConfig
    traits: TargetTraits
    function: Callable[..., None]

    @property
    def workspace_floats(self) -> int:
        """Floats of scratch memory each thread needs."""
        return workspace_floats(self.spec, self.config)

    def __call__(self, *args: Any) -> None:
        """Run with the arguments of `treeattn.kernels.cpu`, in their order."""
        self.function(*args)


@dataclass(frozen=True)
class GpuKernel:
    """The kernels of a spec ready to run on a device: attention, and merging of what it split."""

    spec: KernelSpec
    tile: AnyTile
    traits: GpuTraits
    attention: Program
    merge: Program


_kernels: dict[tuple[KernelSpec, TileConfig, TargetTraits], CpuKernel] = {}
_gpu_programs: dict[tuple[Device, str, tuple[Any, ...]], Program] = {}
_gpu_kernels: dict[tuple[KernelSpec, AnyTile, Device], GpuKernel] = {}
_lock = threading.Lock()
compilations = 0
"""How many kernels this process has compiled (loads from disk are not counted)."""


def kernel(
    spec: KernelSpec, target: Any = None, config: TileConfig | None = None, *, group: int | None = None
) -> CpuKernel:
    """Return the kernel of a spec, compiling it at most once per machine; it suits ``group`` and is right for any.

    Raises
    ------
    UnsupportedError
        No tile fits the target.
    CompileError
        The compiler refused it.
    """
    traits = resolve(target)
    config = config or select(spec, traits, group)
    place = spec, config, traits
    found = _kernels.get(place)
    if found is None:
        with _lock:
            found = _kernels.get(place) or CpuKernel(*place, _load_or_compile(*place))
            _kernels[place] = found
    return found


@lru_cache(maxsize=1)
def product() -> tuple[Callable[..., None], TileConfig]:
    """Return the matrix product of `treeattn.kernels.linear` for this machine, and its tile.

    Raises
    ------
    CompileError
        The compiler refused it.
    """
    traits = host()
    config = TILES[traits.vector]

    def make() -> Any:
        from .kernels import linear

        return linear.product(config)

    key = store.key("product", config, traits, traits.fingerprint())
    with _lock:
        return _load_or_build(key, "product", lambda: _build("product", make, traits)), config


def _load_or_compile(spec: KernelSpec, config: TileConfig, traits: TargetTraits) -> Callable[..., None]:
    key = store.key(spec, config, traits, traits.fingerprint())
    return _load_or_build(key, llvm.ENTRY, lambda: build(spec, config, traits))


def _load_or_build(key: str, entry: str, build_module: Callable[[], Any]) -> Callable[..., None]:
    global compilations  # noqa: PLW0603 - a counter that tests read
    if path := store.load(key, ".so"):
        try:
            return llvm.load(path, entry)
        except Exception:  # whatever the loader dislikes, building again mends it
            store.discard(path)
    module = build_module()
    compilations += 1
    if (content := _link(module)) and (path := store.save(key, ".so", content)):
        return llvm.load(path, entry)
    return llvm.function(module, entry)


def build(spec: KernelSpec, config: TileConfig, traits: TargetTraits, name: str = llvm.ENTRY) -> Any:
    """Compile a spec to a TVM module with a function ``name``.

    Raises
    ------
    CompileError
        With the compiler's message.
    """

    def make() -> Any:
        from .kernels import cpu

        return cpu.attention(spec, config).with_attr("global_symbol", name)

    return _build(spec, make, traits)


def _build(what: object, make: Callable[[], Any], traits: TargetTraits) -> Any:
    llvm.runtime()
    import tvm

    from .kernels.lowering import PIPELINE

    try:
        function = make()
        module = tvm.IRModule({function.attrs["global_symbol"]: function})
        return tvm.tirx.build(module, target=tvm.target.Target(traits.tvm_target()), pipeline=PIPELINE)
    except Exception as error:
        raise CompileError(f"cannot compile {what} for {traits}: {error}") from error


def gpu_kernel(spec: KernelSpec, device: Device, rows: int, tile: AnyTile | None = None) -> GpuKernel:
    """Return the kernels of a spec for a device, compiled at most once; ``rows`` is how many a sequence has at most.

    Raises
    ------
    UnsupportedError
        No tile fits the device.
    CompileError
        The code generator or the driver refused it.
    """
    tile = tile or choose(spec, device.traits, rows)
    place = spec, tile, device
    found = _gpu_kernels.get(place)
    if found is None:
        with _lock:
            found = _gpu_kernels.get(place)
            if found is None:
                programs = [device.program(source) for source in gpu_sources(spec, tile, device.traits)]
                found = _gpu_kernels[place] = GpuKernel(spec, tile, device.traits, *programs)
    return found


def gpu_sources(spec: KernelSpec, tile: AnyTile, traits: GpuTraits) -> list[Any]:
    """Return the sources of attention and merge (`treeattn.kernels.gpu.source.KernelSource`), from disk or generated.

    Raises
    ------
    CompileError
        With the code generator's message.
    """
    return [
        _source(partial(_generate, name, spec, tile, traits), spec, tile, traits, name)
        for name in ("attention", "merge")
    ]


def gpu_program(device: Device, name: str, *parameters: Any) -> Program:
    """Return a kernel of `treeattn.kernels.gpu.rows` by name, compiled at most once for a device.

    Raises
    ------
    CompileError
        The code generator or the driver refused it.
    """
    place = device, name, parameters
    found = _gpu_programs.get(place)
    if found is None:

        def make() -> Any:
            from .kernels.gpu import rows, source

            function = getattr(rows, name)(device.traits, *parameters)
            return source.generate(function, rows.THREADS, device.traits.tvm_target())

        with _lock:
            made = _source(make, name, parameters, device.traits)
            found = _gpu_programs[place] = device.program(made)
    return found


def _source(make: Callable[[], Any], *parts: object) -> Any:
    """Return a kernel's source from disk, or made and kept there."""
    from .kernels.gpu.source import KernelSource

    key = store.key(*parts)
    if path := store.load(key, ".json"):
        return KernelSource.from_json(path.read_bytes())
    source = make()
    store.save(key, ".json", source.to_json())
    return source


def _generate(name: str, spec: KernelSpec, tile: AnyTile, traits: GpuTraits) -> Any:
    from .kernels.gpu import attention, merge, mma, source

    dynamic_bytes = 0
    if name == "merge":
        template = merge.merge
    elif isinstance(tile, MmaTile):
        template, dynamic_bytes = mma.attention, tile.dynamic_bytes(spec)
    else:
        template = attention.attention
    try:
        return source.generate(template(spec, tile, traits), tile.threads, traits.tvm_target(), dynamic_bytes)
    except Exception as error:
        raise CompileError(f"cannot generate {name} of {spec} for {traits}: {error}") from error


def _link(module: Any) -> bytes | None:
    """Return a shared library, or None on a machine without a linker (the kernel then lives in memory)."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="treeattn") as folder:
        source, library = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        module.write_to_file(str(source), "o")
        linked = subprocess.run([compiler, "-shared", "-o", library, source], capture_output=True, check=False)
        return library.read_bytes() if linked.returncode == 0 else None
