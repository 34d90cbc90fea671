"""Devices that tests run kernels on, those at hand; a missing one skips its tests and says why."""

from __future__ import annotations

import pytest

import treeattn as ta
from treeattn.errors import UnsupportedError

TARGETS = ("opencl", "webgpu")


def missing(target):
    """Why a target cannot run here, or None."""
    try:
        ta.device(target)
    except UnsupportedError as error:
        return str(error)
    return None


def on(target, *values):
    """Parameters ``(target, *values)`` that are skipped where the target is missing."""
    reason = missing(target)
    return pytest.param(target, *values, marks=pytest.mark.skipif(reason is not None, reason=f"{target}: {reason}"))


each_target = pytest.mark.parametrize("target", [on(target) for target in TARGETS])
