"""Compiled kernels on disk: one file per key, written whole or not at all, checked before it is loaded.

The key covers what is computed, the tile, the target, the versions of compiler and interface, and the source of the
kernels. Processes may share a folder; a damaged entry is dropped and built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from .files import replacing

DIGEST_BYTES = 32


def folder() -> Path:
    """Return the cache folder: ``TREEATTN_CACHE_DIR``, or ``treeattn`` in the user's cache folder."""
    if given := os.environ.get("TREEATTN_CACHE_DIR"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "treeattn"


def key(*parts: object) -> str:
    """Return the key of a kernel made of ``parts``, each with a stable ``repr``."""
    text = "\n".join([*map(repr, parts), versions(), source_fingerprint()])
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def load(name: str, suffix: str) -> Path | None:
    """Return the path of a sound entry, or None; an entry whose digest does not match is removed."""
    path = folder() / (name + suffix)
    try:
        content, digest = path.read_bytes(), path.with_suffix(".sha256").read_bytes()
    except OSError:
        return None
    if hashlib.sha256(content).digest() == digest:
        return path
    discard(path)
    return None


def save(name: str, suffix: str, content: bytes) -> Path | None:
    """Write an entry; return its path, or None where the folder cannot be written."""
    path = folder() / (name + suffix)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for part, data in ((path, content), (path.with_suffix(".sha256"), hashlib.sha256(content).digest())):
            with replacing(part) as temporary:
                temporary.write_bytes(data)
    except OSError:
        return None
    return path


def discard(path: Path) -> None:
    """Remove an entry."""
    for part in (path, path.with_suffix(".sha256")):
        with contextlib.suppress(OSError):
            part.unlink()


def size() -> int:
    """Return the bytes all entries take."""
    try:
        return sum(path.stat().st_size for path in folder().iterdir())
    except OSError:
        return 0


@lru_cache(maxsize=1)
def versions() -> str:
    """Return the versions a compiled kernel depends on."""
    return " ".join(f"{name} {metadata.version(name)}" for name in ("apache-tvm", "apache-tvm-ffi"))


@lru_cache(maxsize=1)
def source_fingerprint() -> str:
    """Return a digest of every source file that can change a kernel."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*(root / "kernels").rglob("*.py"), *(root / "schedules").glob("*.py"), root / "compiler.py"]):
        digest.update(path.read_bytes())
    return digest.hexdigest()
