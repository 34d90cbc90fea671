"""A sequence of a cache in a ``.safetensors`` file.

Tensors ``k`` and ``v`` of shape ``[num_layers, tokens, kv_heads, head_dim]``, or ``latent`` of shape ``[num_layers,
tokens, head_dim]``; bfloat16 as ``uint16``, which every version of safetensors reads. The metadata hold the layout and
the lengths.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import INT32_MAX, numpy_dtype
from ..errors import TreeAttnError
from ..files import optional, replacing
from .layout import Layout

FORMAT = "treeattn.sequence.1"
MUST_AGREE = ("num_layers", "kv_heads", "head_dim", "dtype", "d_latent")

Lengths = tuple[int, int, int]
"""Committed tokens, and ``kept`` and ``dropped`` as in `CachedSequence`."""


class SequenceFileError(TreeAttnError, ValueError):
    """A file that holds no sequence, or one of another layout."""


def write(path: Path, layout: Layout, lengths: Lengths, layers: Sequence[Any]) -> None:
    """Write a sequence's arrays of every layer, as `cache_ops.gather` gives them."""
    module = optional("safetensors.numpy", "saving a sequence", "safetensors")
    halves = [(layer,) if layout.d_latent else layer for layer in layers]
    tensors = {
        name: np.stack([arrays[half] for arrays in halves]).view(_stored(layout))
        for half, name in enumerate(_names(layout))
    }
    about = {name: getattr(layout, name) for name in MUST_AGREE} | dict(
        zip(("length", "kept", "dropped"), lengths, strict=True)
    )
    with replacing(path) as temporary:
        module.save_file(tensors, temporary, metadata={"format": FORMAT, "about": json.dumps(about)})


def read(path: Path, layout: Layout) -> tuple[Lengths, list[tuple[NDArray[Any], ...]]]:
    """Read what `write` wrote: the lengths, and each layer's arrays.

    Raises
    ------
    SequenceFileError
        Anything else.
    """
    safe_open = optional("safetensors", "loading a sequence", "safetensors").safe_open
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with safe_open(path, "numpy") as file:
            about = _about(file.metadata())
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except Exception as error:  # safetensors, json and the lines above, over bytes from anywhere
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise SequenceFileError(f"{path}: damaged, or not a sequence that PagedKVCache.save wrote ({reason})") from None
    for name in MUST_AGREE:
        wanted = getattr(layout, name)
        if about.get(name) != wanted:
            raise SequenceFileError(f"{path}: expected {name} {wanted} as this cache has, got {about.get(name)}")
    lengths = _lengths(path, about, layout.page_size)
    shape = (layout.num_layers, lengths[0] - lengths[2], *layout.token_shape)
    for name in _names(layout):
        got = tensors.get(name)
        if got is None or got.shape != shape or got.dtype != _stored(layout):
            raise SequenceFileError(
                f"{path}: expected {name} of shape {list(shape)}, {_stored(layout)}, got "
                + ("none" if got is None else f"{list(got.shape)}, {got.dtype}")
            )
    arrays = [tensors[name].view(numpy_dtype(layout.dtype)) for name in _names(layout)]
    return lengths, list(zip(*arrays, strict=True))


def _names(layout: Layout) -> tuple[str, ...]:
    return ("latent",) if layout.d_latent else ("k", "v")


def _stored(layout: Layout) -> np.dtype[Any]:
    return np.dtype(np.uint16) if layout.dtype == "bfloat16" else np.dtype(layout.dtype)


def _about(metadata: dict[str, str] | None) -> dict[str, Any]:
    if not metadata or metadata.get("format") != FORMAT:
        raise ValueError(f"its format is {(metadata or {}).get('format')}, not {FORMAT}")
    return dict(json.loads(metadata["about"]))


def _lengths(path: Path, about: dict[str, Any], page_size: int) -> Lengths:
    lengths = [about.get(name) for name in ("length", "kept", "dropped")]
    length, kept, dropped = (value if type(value) is int and 0 <= value <= INT32_MAX else -1 for value in lengths)
    if min(length, kept, dropped) < 0 or kept + dropped > length:
        raise SequenceFileError(
            f"{path}: expected length, kept and dropped that agree, got length {length}, kept {kept}, dropped {dropped}"
        )
    if kept % page_size or dropped % page_size:
        raise SequenceFileError(
            f"{path}: expected dropped tokens in whole pages of {page_size}, got {kept} kept and {dropped} dropped; "
            "load it in a cache of the page size it was saved from"
        )
    return length, kept, dropped
