"""From compiled kernels to a folder: source, binaries, headers and the manifest, whole or not at all."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__, store
from ..errors import UnsupportedError
from ..targets import HOST_CPU, GpuTraits, TargetTraits
from . import c_interface, vendor
from .manifest import manifest, of_cpu, of_gpu

if TYPE_CHECKING:
    from .compiled import CompiledKernel

MANIFEST = "manifest.json"
LIBRARY = "libtreeattn.so"
SUFFIXES = {"cuda": ".cu", "opencl": ".cl", "webgpu": ".wgsl", "metal": ".metal", "rocm": ".s"}


def export(kernels: Sequence[CompiledKernel], folder: str | Path, *, force: bool = False) -> Path:
    """Write kernels of one target to a folder.

    Parameters
    ----------
    kernels : sequence of CompiledKernel
        With names that differ.
    folder : path
        Where to; it must be empty or not be there.
    force : bool
        Write into a folder that holds files: those of an earlier export go, others stay. Its manifest comes last.

    Returns
    -------
    Path
        Of the manifest.

    Raises
    ------
    UnsupportedError
        The folder holds files.
    CompileError
        A vendor's compiler that is found refused the source.
    """
    folder = Path(folder).resolve()
    check_folder(folder, force)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.", suffix=".part") as temporary:
        made = Path(temporary) / "export"
        made.mkdir()
        entries = [write(kernel, made) for kernel in kernels]
        traits = kernels[0].traits
        found = manifest(f"treeattn {__version__} {store.versions()}", traits, entries)
        if not isinstance(traits, GpuTraits):
            found["c"] = _write_c(entries, traits, made)
        found["files"] = sorted(path.name for path in made.iterdir())
        (made / MANIFEST).write_text(json.dumps(found, indent=1) + "\n")
        _move(made, folder)
    return folder / MANIFEST


def check_folder(folder: Path, force: bool) -> None:
    """Refuse a folder that an export would mix with what is there."""
    if folder.exists() and not folder.is_dir():
        raise UnsupportedError(f"folder: expected a folder, got the file {folder}")
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise UnsupportedError(f"folder: expected an empty or new folder, got {folder}, which holds files; use --force")


def write(kernel: CompiledKernel, folder: Path) -> dict[str, Any]:
    """Write source and binaries of a kernel; return its entry of the manifest."""
    if isinstance(kernel.traits, GpuTraits):
        return _write_gpu(kernel, kernel.traits, folder)
    entry = of_cpu(kernel.name, kernel.spec, kernel.tile, kernel.layers)
    (folder / f"{kernel.name}.ll").write_text(kernel.source)
    kernel.code.write_to_file(str(folder / f"{kernel.name}.o"), "o")
    entry["functions"]["attention"] |= {"source": f"{kernel.name}.ll", "object": f"{kernel.name}.o"}
    return entry


def _write_gpu(kernel: CompiledKernel, traits: GpuTraits, folder: Path) -> dict[str, Any]:
    entry = of_gpu(kernel.name, kernel.spec, kernel.tile, traits, kernel.code, kernel.layers)
    for source in kernel.code:
        function = entry["functions"][source.name]
        name = kernel.name if source.name == "attention" else f"{kernel.name}_{source.name}"
        function["source"] = name + SUFFIXES[traits.kind]
        (folder / function["source"]).write_text(source.text)
        binaries, resources = _compile(source.text, traits)
        for suffix, content in binaries.items():
            function[suffix[1:]] = name + suffix
            (folder / (name + suffix)).write_bytes(content)
        function["resources"] |= resources
    return entry


def _compile(text: str, traits: GpuTraits) -> tuple[dict[str, bytes], dict[str, int]]:
    if traits.kind == "cuda":
        return vendor.nvcc(text, traits.arch)
    return {}, vendor.amdgcn_resources(text) if traits.kind == "rocm" else {}


def _write_c(entries: list[dict[str, Any]], traits: TargetTraits, folder: Path) -> dict[str, Any]:
    """Write header, glue and, where this machine can link for the target, a library."""
    (folder / "treeattn.h").write_text(c_interface.header(entries))
    (folder / "treeattn.c").write_text(c_interface.source(entries))
    found = {"header": "treeattn.h", "source": "treeattn.c", "link": "-lm"}
    objects = [folder / entry["functions"]["attention"]["object"] for entry in entries]
    is_here = traits.cpu == HOST_CPU
    if is_here and vendor.shared_library([*objects, folder / "treeattn.c"], folder / LIBRARY):
        found["library"] = LIBRARY
    return found


def _move(made: Path, folder: Path) -> None:
    """Bring a finished export to its place, in one step where nothing is there."""
    if not folder.exists():
        made.rename(folder)
        return
    with contextlib.suppress(OSError, ValueError, TypeError):
        earlier = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).unlink()
        for name in earlier["files"]:
            (folder / Path(name).name).unlink(missing_ok=True)
    for path in sorted(made.iterdir(), key=lambda path: path.name == MANIFEST):
        path.replace(folder / path.name)
