"""Where kernels run: the CPU, and devices with memory of their own."""

from __future__ import annotations

import importlib
from dataclasses import asdict
from typing import Any

from ..devices import Device
from ..errors import UnsupportedError

DEVICES = ("cuda", "opencl", "webgpu")
"""Kinds of devices this package can run kernels on: a module each, with `devices` and `open_device`."""


def device(target: Any) -> Device:
    """Open a device.

    Parameters
    ----------
    target : str
        ``"cuda"``, ``"opencl"`` or ``"webgpu"``; ``"opencl:1"`` is the second one that ``treeattn info`` lists.

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
    backend, number = importlib.import_module(f".{kind}", __name__), int(index or 0)
    if number >= (count := len(backend.devices())):
        raise UnsupportedError(f"target: expected {kind}:0 to {kind}:{count - 1}, got {kind}:{number}")
    opened: Device = backend.open_device(number)
    return opened


def describe() -> dict[str, dict[str, Any]]:
    """Return facts about every device found, by target name; of a kind without any, why it is missing."""
    found: dict[str, dict[str, Any]] = {}
    for kind in DEVICES:
        try:
            count = len(importlib.import_module(f".{kind}", __name__).devices())
            opened = [device(f"{kind}:{index}") for index in range(count)]
        except UnsupportedError as error:
            found[kind] = {"missing": str(error).removeprefix("target: ")}
            continue
        for index, one in enumerate(opened):
            facts = {"device": one.name, "blocks": one.blocks, "tensor_cores": one.traits.has_mma} | asdict(one.traits)
            found[f"{kind}:{index}"] = {name: value for name, value in facts.items() if name != "kind" and value != ""}
    return found


def is_device(target: Any) -> bool:
    """Whether ``target`` means a device rather than this machine's processor."""
    return isinstance(target, Device) or (isinstance(target, str) and target.partition(":")[0] in DEVICES)
