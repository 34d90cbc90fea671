"""The host CPU, on TVM's thread pool.

TVM's pool would take half the processors of an x86 machine; it is told to take those of the affinity mask instead,
unless ``TVM_NUM_THREADS`` says otherwise. Its workers would yield 300,000 times before they sleep, beside whatever
runs next, and a busy process would hang at its end; two thousand span the gaps between our launches
(``TVM_THREAD_POOL_SPIN_COUNT``). A kernel from disk needs only TVM's small runtime library, not its compiler.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError
from ..targets import available_threads

ENTRY = "attention"


@lru_cache(maxsize=1)
def runtime() -> None:
    """Load TVM's runtime library once, with a pool of as many threads as the affinity mask has, that sleeps soon."""
    os.environ.setdefault("TVM_NUM_THREADS", str(available_threads()))
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "2000")
    spec = importlib.util.find_spec("tvm")
    places = (spec.submodule_search_locations if spec else None) or []
    for place in places:
        library = Path(place) / "lib" / "libtvm_runtime.so"
        if library.exists():
            import tvm_ffi  # noqa: F401 - its library must be loaded first

            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
            return
    import tvm  # noqa: F401 - another layout of the wheel: let TVM find its own


def load(path: Path, entry: str = ENTRY) -> Callable[..., None]:
    """Return a function of a shared library."""
    runtime()
    import tvm_ffi

    return function(tvm_ffi.load_module(str(path)), entry)


def function(module: Any, entry: str = ENTRY) -> Callable[..., None]:
    """Return a function of a module."""
    runtime()
    found: Callable[..., None] | None = module[entry]
    if found is None:
        raise UnsupportedError(f"the module holds no function {entry!r}")
    return found
