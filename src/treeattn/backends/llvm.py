"""The host CPU, on TVM's thread pool.

TVM's pool would take half the processors of an x86 machine; it is told to take those of the affinity mask instead,
unless ``TVM_NUM_THREADS`` says otherwise. Its workers would yield 300,000 times before they sleep, beside whatever
runs next, and a busy process would hang at its end; two thousand span the gaps between our launches
(``TVM_THREAD_POOL_SPIN_COUNT``). A kernel from disk needs only TVM's small runtime library, not its compiler.

Each thread that launches a kernel gets workers of its own, which TVM neither ends with the thread nor makes again in a
forked child. So only the first few threads launch by themselves; others, and children, do through a few that stay.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import itertools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError
from ..targets import available_threads

ENTRY = "attention"
MOST_POOLS = 4
"""Threads that launch by themselves, and threads that launch for all others."""

_order = itertools.count()


class _Thread(threading.local):
    """Whether the calling thread launches by itself (None before its first launch), and who else does."""

    launches: bool | None = None
    helpers = ThreadPoolExecutor(MOST_POOLS)


_this = _Thread()


def _after_fork() -> None:
    _Thread.helpers = ThreadPoolExecutor(MOST_POOLS)
    if _this.launches is not None:
        _this.launches = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class _WithoutTorch:
    """A finder of modules that finds no torch for one thread."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torch" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("torch is not needed here", name=name)


@lru_cache(maxsize=1)
def ffi() -> Any:
    """Import and return ``tvm_ffi``, without PyTorch unless it is there: alone it would import that first, for seconds.

    Tensors of a PyTorch imported later go through DLPack.
    """
    finder: Any = _WithoutTorch()
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module("tvm_ffi")
    finally:
        sys.meta_path.remove(finder)


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
            ffi()  # its library must be loaded first
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
            return
    import tvm  # noqa: F401 - another layout of the wheel: let TVM find its own


def load(path: Path, entry: str = ENTRY) -> Callable[..., None]:
    """Return a function of a shared library."""
    runtime()
    return function(ffi().load_module(str(path)), entry)


def function(module: Any, entry: str = ENTRY) -> Callable[..., None]:
    """Return a function of a module."""
    runtime()
    found: Callable[..., None] | None = module[entry]
    if found is None:
        raise UnsupportedError(f"the module holds no function {entry!r}")
    launch = found

    def call(*args: Any) -> None:
        if _this.launches is None:
            _this.launches = next(_order) < MOST_POOLS
        if _this.launches:
            launch(*args)
        else:
            _this.helpers.submit(launch, *args).result()

    return call
