"""Where kernels run: the CPU, and devices with memory of their own."""

from __future__ import annotations

import importlib
from typing import Any

from ..devices import Device
from ..errors import UnsupportedError

DEVICES = ("opencl", "webgpu")
"""Kinds of devices this package can run kernels on: a module each, with `open_device`."""


def device(target: Any) -> Device:
    """Open a device.

    Parameters
    ----------
    target : str
        ``"opencl"``, or ``"opencl:1"`` for the second one that `treeattn info` lists.

    Returns
    -------
    Device
        Pass it, or its name, as ``target`` of `treeattn.attention` and `treeattn.plan`; ``device.upload(array)`` puts
        an array in its memory, ``array.numpy()`` brings it back.

    Raises
    ------
    UnsupportedError
        There is no such device, or a package is missing; the message says what to install.
    """
    if isinstance(target, Device):
        return target
    kind, _, index = str(target).partition(":")
    if kind not in DEVICES or not (index.isdigit() or not index):
        raise UnsupportedError(f"target: expected one of {', '.join(DEVICES)}, or opencl:0 and so on, got {target!r}")
    opened: Device = importlib.import_module(f".{kind}", __name__).open_device(int(index or 0))
    return opened


def is_device(target: Any) -> bool:
    """Whether ``target`` means a device rather than this machine's processor."""
    return isinstance(target, Device) or (isinstance(target, str) and target.partition(":")[0] in DEVICES)
