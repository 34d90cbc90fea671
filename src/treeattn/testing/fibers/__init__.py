"""Run generated CUDA text on the CPU: every CUDA thread is a fiber, what a warp does together is emulated.

TVM's text is kept from its kernels on; helpers that hold PTX are replaced by those of ``cuda.h``, and one that has no
replacement is refused. Threads run in random order by seed. A launch stops at the first access outside of the arrays it
was given, race on shared memory, read of memory nobody wrote, or barrier that not all threads reach.

Not covered: wgmma, TMA, mbarriers, races on global memory between blocks, and the accuracy of fast-math functions.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import store
from ...errors import CompileError, TreeAttnError, UnsupportedError

FOLDER = Path(__file__).parent
FLAGS = ("-std=c++20", "-O1", "-march=native", "-fPIC", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")
SCALARS = {
    "int": ctypes.c_int32, "uint": ctypes.c_uint32, "int64_t": ctypes.c_int64, "float": ctypes.c_float,
    "double": ctypes.c_double,
}  # fmt: skip
_lock = threading.Lock()  # the machine has one block at work


class KernelFault(TreeAttnError):
    """A kernel did what a GPU would not forgive; the message says which thread, where, and what."""


@dataclass(frozen=True)
class FiberModule:
    """CUDA text compiled for the CPU. Made by `load`."""

    library: ctypes.CDLL
    kernels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """C types of each kernel's parameters, by its name."""

    def launch(
        self,
        name: str,
        arguments: Sequence[Any],
        grid: Sequence[int],
        block: Sequence[int],
        *,
        dynamic_bytes: int = 0,
        seed: int = 0,
    ) -> None:
        """Run a kernel to its end.

        Parameters
        ----------
        name : str
            Of the kernel.
        arguments : sequence
            A NumPy array for each pointer, which is read and written in place, and a number for each scalar.
        grid, block : sequence of 1 to 3 integers
            Blocks, and threads of a block.
        dynamic_bytes : int
            Dynamic shared memory of a block.
        seed : int
            Of the order in which threads and blocks run.

        Raises
        ------
        KernelFault
            The first fault; arrays hold what was written until then.
        """
        kinds = self.kernels[name]
        if len(arguments) != len(kinds):
            raise TypeError(f"{name} has {len(kinds)} parameters, got {len(arguments)} arguments")
        slots: list[Any] = []
        spans: list[int] = []
        for kind, argument in zip(kinds, arguments, strict=True):
            if kind.endswith("*"):
                begin = argument.__array_interface__["data"][0]
                spans += [begin, begin + argument.nbytes]
                slots.append(ctypes.c_void_p(begin))
            else:
                slots.append(SCALARS[kind](argument))
        pointers = (ctypes.c_void_p * len(slots))(*(ctypes.addressof(slot) for slot in slots))
        entry = ctypes.cast(getattr(self.library, f"enter_{name}"), ctypes.c_void_p)
        with _lock:
            fault = self.library.fiber_launch(
                entry, pointers, _three(grid), _three(block), ctypes.c_int(dynamic_bytes), ctypes.c_uint64(seed),
                (ctypes.c_void_p * len(spans))(*spans), ctypes.c_int(len(spans) // 2),
            )  # fmt: skip
        if fault:
            raise KernelFault(f"{name}, seed {seed}: {fault.decode()}")


def load(text: str) -> FiberModule:
    """Compile CUDA text as TVM prints it, once per text.

    Raises
    ------
    UnsupportedError
        The text uses what is not emulated, or this machine has no C++ compiler.
    CompileError
        The compiler's first complaint.
    """
    code, kernels = translate(text)
    name = _digest(code, "machine.h", "cuda.h", "machine.cpp")
    path = store.load(name, ".fibers.so")
    library = ctypes.CDLL(str(path)) if path else _build(code, name)
    library.fiber_launch.restype = ctypes.c_char_p
    return FiberModule(library, kernels)


def translate(text: str) -> tuple[str, dict[str, tuple[str, ...]]]:
    """Return C++ for the machine of fibers, and the types of each kernel's parameters.

    Raises
    ------
    UnsupportedError
        PTX that is not emulated.
    """
    begin = min(at for at in (text.find("tvm_builtin_"), text.find('extern "C" __global__')) if at >= 0)
    body = text[text.rfind("\n", 0, begin) + 1 :]
    emulated = set(re.findall(r"\btvm_builtin_ptx_\w+", _expanded_names()))

    def replace(helper: re.Match[str]) -> str:
        if "asm" not in helper[0]:
            return helper[0]
        if helper[1] not in emulated:
            raise UnsupportedError(f"the machine of fibers has no {helper[1]}; add it to cuda.h")
        return ""

    body = re.sub(
        r"__forceinline__ __device__ [\w ]+? (tvm_builtin_\w+)\([^)]*\) \{.*?\n\}\n", replace, body, flags=re.S
    )
    if found := re.search(r"\basm\b[^;]*", body):
        raise UnsupportedError(f"the machine of fibers has no {found[0][:80]}")
    body = re.sub(
        r"extern __shared__ (?:alignas\(\d+\) |__align__\(\d+\) )?(\w+) (\w+)\[\];",
        r"\1* const \2 = (\1*)fiber_dynamic();",
        body,
    )
    places = iter(range(1 << 30))

    def place(array: re.Match[str]) -> str:
        kind, name, size = array.groups()
        return f"{kind}* const {name} = ({kind}*)fiber_shared({next(places)}, sizeof({kind}) * {size});"

    body = re.sub(r"__shared__ (?:alignas\(\d+\) )?([\w ]+?) (\w+)\[(\d+)\];", place, body)
    kernels = {
        name: tuple(_type_of(parameter) for parameter in parameters.split(","))
        for name, parameters in re.findall(
            r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(([^)]*)\);', body
        )
    }
    entries = "".join(_entry(*kernel) for kernel in kernels.items())
    return '#include "cuda.h"\n#line 1 "kernel.cu"\n' + body + entries, kernels


def _expanded_names() -> str:
    """Return the text of ``cuda.h`` with the names that its macros make."""
    text = (FOLDER / "cuda.h").read_text()
    made = [
        f"tvm_builtin_ptx_ldmatrix_sync_aligned_m8n8_{count}_{suffix}"
        for count in ("x1", "x2", "x4")
        for suffix in re.findall(r"LDMATRIX_HELPERS\((\w+), LD", text)
    ]
    return "\n".join([text, *made])


def _type_of(parameter: str) -> str:
    return re.sub(r"\s*(?:__restrict__\s+)?\w+$", "", parameter.strip()).replace("const ", "").strip()


def _entry(name: str, kinds: tuple[str, ...]) -> str:
    values = ", ".join(f"*({kind}*)arguments[{i}]" for i, kind in enumerate(kinds))
    head = f'extern "C" __attribute__((no_sanitize("thread"))) void enter_{name}(void** arguments)'
    return f"{head} {{ {name}({values}); }}\n"


def _digest(code: str, *files: str) -> str:
    texts = [code, *((FOLDER / file).read_text() for file in files), *FLAGS, platform.node()]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:40]


def _build(code: str, name: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="treeattn") as folder:
        source, kernel, library = (Path(folder) / f"kernel.{suffix}" for suffix in ("cpp", "o", "so"))
        source.write_text(code)
        _compile("-fsanitize=thread", f"-I{FOLDER}", "-c", source, "-o", kernel)
        _compile("-shared", kernel, _machine(Path(folder)), "-o", library)
        kept = store.save(name, ".fibers.so", library.read_bytes())
        return ctypes.CDLL(str(kept or library))


def _machine(folder: Path) -> Path:
    """Return the compiled machine, from the cache of kernels where it is there."""
    name = _digest("", "machine.h", "machine.cpp")
    if path := store.load(name, ".fibers.o"):
        return path
    built = folder / "machine.o"
    _compile("-c", FOLDER / "machine.cpp", "-o", built)
    return store.save(name, ".fibers.o", built.read_bytes()) or built


def _compile(*arguments: Any) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        raise UnsupportedError("CUDA text runs on the CPU by way of g++, which this machine lacks")
    command = [compiler, *FLAGS, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise CompileError("cannot compile CUDA text for the CPU: " + "; ".join(lines[:3]))


def _three(extents: Sequence[int]) -> Any:
    return (ctypes.c_int * 3)(*extents, *(1,) * (3 - len(extents)))
