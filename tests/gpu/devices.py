"""Devices that tests run kernels on, those at hand; a missing one skips its tests and says why."""

from __future__ import annotations

import os

import pytest

import treeattn as ta
from treeattn.errors import UnsupportedError

os.environ.setdefault("XDG_RUNTIME_DIR", "/tmp")  # Mesa complains without one

TARGETS = ("opencl", "webgpu")


def missing(target):
    """Why a target cannot run here, or None."""
    try:
        ta.device(target)
    except UnsupportedError as error:
        return str(error)
    return None


def each_target(*values):
    """Parameters ``(target, *value)`` for every target and value; without values, the targets."""
    return [
        pytest.param(*((target, *value) if values else (target,)), marks=_skip(target))
        for value in (values or [()])
        for target in TARGETS
    ]


def _skip(target):
    reason = missing(target)
    return pytest.mark.skipif(reason is not None, reason=f"{target}: {reason}")
