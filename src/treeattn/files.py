"""Files that are either whole or as they were, and packages that may be missing."""

from __future__ import annotations

import errno
import importlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import UnsupportedError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the block an empty temporary file beside ``path``, which takes its name when the block ends well."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None  # not the temporary file's name
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        mode = path.stat().st_mode if path.exists() else 0o666 & ~_umask()
        temporary.chmod(mode & 0o777)
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # which names no file
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None
        raise


def optional(module: str, use: str, extra: str) -> Any:
    """Import a module of an optional package.

    Raises
    ------
    UnsupportedError
        It is not installed; the message says what needs it (``use``) and which extra brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UnsupportedError(f"{use} needs the {package} package: pip install 'treeattn[{extra}]'") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
