"""What a kernel is to compute, from a description in JSON's types or from a model.

A description has the parts of `treeattn.kernels.spec.KernelSpec`, the mask as text::

    {"d_qk": 128, "q_dtype": "float16", "mask": "tree & (window | sink)", "softcap": true}

Sizes of windows, the cap and the trees are data of a call, so a description only says that they are there.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..arrays import DTYPES
from ..checks import integer
from ..errors import DTypeError, ShapeError, UnsupportedError
from ..hf import ModelSpec
from ..kernels.spec import KernelSpec
from ..masks import Causal, Full, Mask, PaddedLeft, Sink, Tree, ValidLength, Window

MASKS: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "tree": Tree(()),
    "valid_length": ValidLength(()),
    "padded_left": PaddedLeft(()),
    "window": Window(1),
    "sink": Sink(0),
}
NAMES = {form.form[0]: name for name, form in reversed(MASKS.items())}
"""The first name of each test of a mask's form: kernels do not tell ``causal`` from ``valid_length``."""
FLAGS = {"softcap": "softcap", "alibi": "alibi", "sink_logits": "sinks"}
"""Keys of a description, and what `KernelSpec.logits` calls them."""
KEYS = ("d_qk", "d_v", "q_dtype", "kv_dtype", "mask", "rope", *FLAGS, "shared", "moved")
STYLES = ("neox", "gptj")
MOST_DIMS = 4096
"""A description beyond it is a mistake: no head is so wide, and the code would grow without bound."""


def read_spec(description: Any) -> KernelSpec:
    """Return the spec that a description means.

    Parameters
    ----------
    description : dict, str, Path or KernelSpec
        A dict, the path of a JSON file, or JSON text. ``d_qk``, ``q_dtype`` and ``mask`` (names of `MASKS`, joined
        by ``&``, ``|`` and parentheses) must be there; ``d_v`` is ``d_qk`` and ``kv_dtype`` is ``q_dtype`` by default.
        ``rope`` is null, or ``{"style": "neox" or "gptj", "rotary_dim": n}`` for keys that lie unrotated; ``softcap``,
        ``alibi``, ``sink_logits``, ``shared`` and ``moved`` are true or false (`KernelSpec` says what they mean).

    Raises
    ------
    DTypeError, ShapeError, UnsupportedError
        A key that is missing or unknown, or a bad value, by name.
    """
    if isinstance(description, KernelSpec):
        return description
    if isinstance(description, str | Path):
        description = load_description(description)
    if not isinstance(description, Mapping):
        raise DTypeError(f"spec: expected a dict, a ModelSpec or a KernelSpec, got {type(description).__name__}")
    unknown = [str(key) for key in description if key not in KEYS]
    missing = [key for key in ("d_qk", "q_dtype", "mask") if key not in description]
    if unknown:
        raise UnsupportedError(f"spec: expected keys of {', '.join(KEYS)}, got {', '.join(unknown)}")
    if missing:
        raise ShapeError(
            f"spec: expected {', '.join(missing)} too, got {', '.join(map(str, description)) or 'nothing'}"
        )
    d_qk = _size("d_qk", description["d_qk"])
    d_v = _size("d_v", description.get("d_v", d_qk))
    q_dtype = _dtype("q_dtype", description["q_dtype"])
    is_shared = _flag("shared", description)
    if is_shared and d_v > d_qk:
        raise ShapeError(f"spec.d_v: expected at most d_qk ({d_qk}) of shared values, got {d_v}")
    return KernelSpec(
        d_qk, d_v, q_dtype, _dtype("kv_dtype", description.get("kv_dtype", q_dtype)),
        read_mask(description["mask"]).simplified().form, rope=_rope(description.get("rope"), d_qk),
        logits=tuple(name for key, name in FLAGS.items() if _flag(key, description)),
        shared=is_shared, moved=_flag("moved", description),
    )  # fmt: skip


def load_description(source: str | Path) -> Any:
    """Read a description from JSON text, which begins with a brace, or from a file of it.

    Raises
    ------
    ShapeError
        No JSON.
    """
    is_text = isinstance(source, str) and source.lstrip().startswith("{")
    try:
        return json.loads(str(source) if is_text else Path(source).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ShapeError(f"spec: expected a JSON object, got {source!s:.80}: {error}") from None


def describe(spec: KernelSpec) -> dict[str, Any]:
    """Return the description of a spec, complete; `read_spec` turns it back."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name in KEYS}
    rope = None if spec.rope is None else dict(zip(("style", "rotary_dim"), spec.rope, strict=True))
    flags = {key: name in spec.logits for key, name in FLAGS.items()}
    found = values | {"mask": mask_text(spec.mask), "rope": rope} | flags
    return {key: found[key] for key in KEYS}


def mask_text(form: tuple[Any, ...]) -> str:
    """Return a mask's form as text."""
    if form[0] not in "&|":
        return NAMES[form[0]]
    sides = [mask_text(side) if side[0] not in "&|" else f"({mask_text(side)})" for side in form[1:]]
    return f" {form[0]} ".join(sides)


def read_mask(text: Any) -> Mask:
    """Return a mask of the form that ``text`` means; what it holds as data is of no meaning.

    Raises
    ------
    DTypeError, UnsupportedError
        No text, or one that is no expression over names of masks.
    """
    if not isinstance(text, str):
        raise DTypeError(f"spec.mask: expected text such as 'tree & (window | sink)', got {type(text).__name__}")
    try:
        mask = _mask(ast.parse(text.strip(), mode="eval").body)
        mask.trees  # noqa: B018 - refuses a second tree
        return mask
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = str(error) if isinstance(error, UnsupportedError) else "no such expression"
        raise UnsupportedError(
            f"spec.mask: expected {', '.join(MASKS)} joined by & and |, got {text!r:.80} ({reason})"
        ) from None


def specs_of_model(
    model: ModelSpec, mask: str = "tree", dtype: str | None = None, rotate: bool = False
) -> dict[KernelSpec, tuple[int, ...]]:
    """Return the distinct kernels of a model, each with its layers.

    Parameters
    ----------
    model : ModelSpec
        From `treeattn.spec_from_hf_config`.
    mask : str
        Of layers that see everything; those with a window get ``& window``.
    dtype : str, optional
        Of q and the cache; the model's own by default.
    rotate : bool
        Whether keys lie unrotated in the cache, so that kernels rotate q and keys.

    Raises
    ------
    UnsupportedError
        ``rotate`` with multi-head latent attention, whose rotated dimensions are the last.
    """
    if rotate and model.latent:
        raise UnsupportedError("rope: expected rotated keys with latent attention (MLA), got rotation in the kernel")
    layers: dict[KernelSpec, tuple[int, ...]] = {}
    for layer, (window, rope) in enumerate(zip(model.windows, model.rope, strict=True)):
        spec = read_spec({
            "d_qk": model.d_qk, "d_v": model.d_v, "q_dtype": dtype or model.dtype or "float16",
            "mask": mask if window is None else f"({mask}) & window",
            "rope": {"style": rope.style, "rotary_dim": rope.rotary_dim or model.d_qk} if rope and rotate else None,
            "softcap": model.softcap is not None, "sink_logits": model.has_sink_logits,
            "shared": model.latent is not None,
        })  # fmt: skip
        layers[spec] = (*layers.get(spec, ()), layer)
    return layers


def _mask(node: ast.expr) -> Mask:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        left, right = _mask(node.left), _mask(node.right)
        return left & right if isinstance(node.op, ast.BitAnd) else left | right
    if isinstance(node, ast.Name) and node.id.lower() in MASKS:
        return _fresh(MASKS[node.id.lower()])
    if isinstance(node, ast.Call):
        raise UnsupportedError(f"write {ast.unparse(node.func)} alone: sizes are data of a call")
    raise UnsupportedError(f"{ast.unparse(node)} is none of them")


def _fresh(mask: Mask) -> Mask:
    """Return a copy: a mask tells its leaves apart by identity."""
    return type(mask)(**vars(mask))


def _size(key: str, value: Any) -> int:
    return integer(value, f"spec.{key}", most=MOST_DIMS)


def _dtype(key: str, value: Any) -> str:
    if value not in DTYPES:
        raise DTypeError(f"spec.{key}: expected {', '.join(DTYPES)}, got {value!r:.60}")
    return str(value)


def _flag(key: str, description: Mapping[str, Any]) -> bool:
    value = description.get(key)
    if value is not None and not isinstance(value, bool):
        raise DTypeError(f"spec.{key}: expected true or false (its values are data of a call), got {value!r:.60}")
    return bool(value)


def _rope(value: Any, d_qk: int) -> tuple[str, int] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or set(value) - {"style", "rotary_dim"}:
        raise DTypeError(f'spec.rope: expected null or {{"style": "neox", "rotary_dim": {d_qk}}}, got {value!r:.80}')
    style = value.get("style", STYLES[0])
    rotary_dim = _size("rope.rotary_dim", value.get("rotary_dim", d_qk))
    if style not in STYLES:
        raise UnsupportedError(f"spec.rope.style: expected {' or '.join(STYLES)}, got {style!r:.60}")
    if rotary_dim % 2 or rotary_dim > d_qk:
        raise ShapeError(f"spec.rope.rotary_dim: expected an even number up to d_qk ({d_qk}), got {rotary_dim}")
    return style, rotary_dim
