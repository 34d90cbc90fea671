"""What the vendors' tools make of a kernel's text, and what the text itself tells of the resources it takes."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from ..errors import CompileError

NVCC = ("nvcc", "/usr/local/cuda/bin/nvcc")


def nvcc(text: str, arch: str) -> tuple[dict[str, bytes], dict[str, int]]:
    """Compile CUDA text, where nvcc is found.

    Returns
    -------
    files : dict
        By suffix: ``.ptx`` and ``.cubin``; empty without nvcc.
    resources : dict
        Registers, static shared memory and spilled bytes, as ptxas reports them.

    Raises
    ------
    CompileError
        nvcc refused the text or the architecture; with its message.
    """
    compiler = next(filter(None, map(shutil.which, NVCC)), None)
    if compiler is None:
        return {}, {}
    with tempfile.TemporaryDirectory(prefix="treeattn") as folder:
        source, made = Path(folder) / "kernel.cu", {}
        source.write_text(text)
        for suffix, options in ((".ptx", ["-ptx"]), (".cubin", ["-cubin", "-Xptxas", "-v"])):
            out = source.with_suffix(suffix)
            command = [compiler, "-O3", "-std=c++17", f"-arch={arch}", *options, "-o", str(out), str(source)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise CompileError(f"nvcc refused the kernel for {arch}: {done.stderr.strip() or done.stdout.strip()}")
            made[suffix] = out.read_bytes()
    return made, ptxas_resources(done.stderr)


def ptxas_resources(log: str) -> dict[str, int]:
    """Read what ``ptxas -v`` reports of a kernel."""
    patterns = {"registers": r"Used (\d+) registers", "static_shared_bytes": r"(\d+) bytes smem"}
    found = {name: re.search(pattern, log) for name, pattern in patterns.items()}
    spilled = sum(int(size) for size in re.findall(r"(\d+) bytes spill", log))
    return {name: int(match[1]) if match else 0 for name, match in found.items()} | {"spilled_bytes": spilled}


def amdgcn_resources(text: str) -> dict[str, int]:
    """Read the metadata of a kernel at the end of its assembly."""
    names = {
        "vector_registers": "vgpr_count", "scalar_registers": "sgpr_count",
        "static_shared_bytes": "group_segment_fixed_size", "spilled_registers": "vgpr_spill_count",
    }  # fmt: skip
    found = {name: re.search(rf"\.{key}:\s+(\d+)", text) for name, key in names.items()}
    return {name: int(match[1]) for name, match in found.items() if match}


def shared_library(sources: list[Path], out: Path) -> bool:
    """Link objects and C files to a library; False where there is no C compiler, or it refuses."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return False
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(out), *map(str, sources), "-lm"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
