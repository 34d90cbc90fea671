"""Tree attention for language-model inference, over ragged and paged KV caches.

Importing this package loads neither TVM nor PyTorch; names are found on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .ahead.compiled import CompiledKernel as CompiledKernel
    from .ahead.compiled import compile as compile
    from .api import attention as attention
    from .api import plan as plan
    from .backends import device as device
    from .cache.manager import PagedKVCache as PagedKVCache
    from .cache.step import Step as Step
    from .errors import CacheError as CacheError
    from .errors import CacheFullError as CacheFullError
    from .errors import CompileError as CompileError
    from .errors import DTypeError as DTypeError
    from .errors import IndexRangeError as IndexRangeError
    from .errors import ShapeError as ShapeError
    from .errors import TreeAttnError as TreeAttnError
    from .errors import UnsupportedError as UnsupportedError
    from .hf import ModelSpec as ModelSpec
    from .hf import spec_from_hf_config as spec_from_hf_config
    from .masks import Causal as Causal
    from .masks import Full as Full
    from .masks import PaddedLeft as PaddedLeft
    from .masks import Sink as Sink
    from .masks import Tree as Tree
    from .masks import ValidLength as ValidLength
    from .masks import Window as Window
    from .planner import Plan as Plan
    from .rope import Rope as Rope
    from .rope import RopeScaling as RopeScaling
    from .speculate.verify import Accepted as Accepted
    from .speculate.verify import verify_greedy as verify_greedy
    from .speculate.verify import verify_sampling as verify_sampling
    from .states import merge as merge
    from .states import to_natural as to_natural
    from .storage import LatentKV as LatentKV
    from .storage import PagedKV as PagedKV
    from .storage import RaggedKV as RaggedKV
    from .tree import TokenTree as TokenTree

_HOMES = {
    "ahead.compiled": ("CompiledKernel", "compile"),
    "api": ("attention", "plan"),
    "backends": ("device",),
    "cache.manager": ("PagedKVCache",),
    "cache.step": ("Step",),
    "errors": (
        *("CacheError", "CacheFullError", "CompileError", "DTypeError"),
        *("IndexRangeError", "ShapeError", "TreeAttnError", "UnsupportedError"),
    ),
    "hf": ("ModelSpec", "spec_from_hf_config"),
    "masks": ("Causal", "Full", "PaddedLeft", "Sink", "Tree", "ValidLength", "Window"),
    "planner": ("Plan",),
    "rope": ("Rope", "RopeScaling"),
    "speculate.verify": ("Accepted", "verify_greedy", "verify_sampling"),
    "states": ("merge", "to_natural"),
    "storage": ("LatentKV", "PagedKV", "RaggedKV"),
    "tree": ("TokenTree",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'treeattn' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*{*_HOME_OF, *globals()}]
