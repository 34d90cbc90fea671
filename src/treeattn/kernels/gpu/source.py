"""From a device function to its source text, without a device, a driver or the vendor's compiler."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm.tirx import transform

from ..emit import PrimFunc

FORMATS = {"rocm": "asm"}
"""Of a kernel's text, where it is not the code generator's own (LLVM's, for rocm)."""
PASSES = (transform.FlattenBuffer, transform.LowerIntrin)  # simplifying would write every `let` out where it is used


@dataclass(frozen=True)
class KernelSource:
    """A kernel as a driver takes it.

    Parameters
    ----------
    kind : str
        The language's target: ``"opencl"``, ``"cuda"`` ...
    name : str
        The kernel's name in ``text``.
    threads : int
        Threads of a block.
    pointers, scalars : tuple of str
        Names of its parameters: buffers, then scalars.
    scalar_dtypes : tuple of str
        Of the scalars.
    """

    kind: str
    name: str
    text: str
    threads: int
    pointers: tuple[str, ...]
    scalars: tuple[str, ...]
    scalar_dtypes: tuple[str, ...]
    dynamic_bytes: int = 0
    """Dynamic shared memory of a block (CUDA)."""

    def to_json(self) -> bytes:
        """Return the whole as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, content: bytes) -> KernelSource:
        """Read what `to_json` wrote."""
        values = json.loads(content)
        fields: dict[str, Any] = {x: tuple(value) if isinstance(value, list) else value for x, value in values.items()}
        return cls(**fields)


def generate(function: PrimFunc, threads: int, target: dict[str, Any], dynamic_bytes: int = 0) -> KernelSource:
    """Lower a device function and write it in the language of a target."""
    kind, name = str(target["kind"]), str(function.attrs["global_symbol"])
    for_target = tvm.target.Target(target)
    module = tvm.IRModule({name: function.with_attr("target", for_target)})
    for make in PASSES:
        module = make()(module)
    with without_vendor_tools(kind):
        text = str(
            tvm.get_global_func(f"target.build.{kind}")(module, for_target).inspect_source(FORMATS.get(kind, ""))
        )
    if kind == "webgpu":  # TVM lists its shaders one after another, under a rule
        text = text.rpartition("//----------------------------------------\n")[2]
    if kind == "rocm":  # TVM's triple has an environment that assemblers do not know
        text = text.replace("amdgcn-amd-amdhsa-hcc-", "amdgcn-amd-amdhsa--")
    parameters = [(str(p.name), p.ty) for p in module[name].params]
    pointers = [label for label, ty in parameters if isinstance(ty, tvm.ir.PointerType)]
    scalars = [(label, str(ty.dtype)) for label, ty in parameters if not isinstance(ty, tvm.ir.PointerType)]
    return KernelSource(
        kind,
        name,
        text,
        threads,
        tuple(pointers),
        tuple(label for label, _ in scalars),
        tuple(d for _, d in scalars),
        dynamic_bytes,
    )


@contextmanager
def without_vendor_tools(kind: str) -> Iterator[None]:
    """Ask for source alone: no NVRTC where there is a driver, no search for ROCm's libraries, which go unused."""
    before = os.environ.get("TVM_COMPILE_FORCE_FALLBACK")
    os.environ["TVM_COMPILE_FORCE_FALLBACK"] = "1"
    if kind == "rocm":
        tvm_ffi.register_global_func(
            "tvm_callback_rocm_bitcode_path", lambda *_: tvm.runtime.convert([]), override=True
        )
        tvm_ffi.register_global_func("tvm_callback_rocm_link", bytearray, override=True)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TVM_COMPILE_FORCE_FALLBACK"]
        else:
            os.environ["TVM_COMPILE_FORCE_FALLBACK"] = before
