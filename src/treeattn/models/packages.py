"""Optional packages of the extra ``models``."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import UnsupportedError


def require(module: str, purpose: str) -> Any:
    """Import an optional package.

    Raises
    ------
    UnsupportedError
        It is not installed; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"{purpose} needs the package {module.partition('.')[0]} ({error}); pip install 'treeattn[models]'"
        ) from None
