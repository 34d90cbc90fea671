"""``treeattn info``: what this installation and this machine offer, and why something is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
from dataclasses import asdict
from typing import Any

import click

EXTRAS = {
    "tvm": ("apache-tvm", "every kernel"),
    "torch": ("torch", "PyTorch tensors; bench --against torch"),
    "matplotlib": ("matplotlib", "show --png, bench --plot"),
    "safetensors": ("safetensors", "case files in .safetensors, saved sequences, model folders"),
    "gguf": ("gguf", "generate with a GGUF file"),
    "tokenizers": ("tokenizers", "generate"),
    "pyopencl": ("pyopencl", "OpenCL devices"),
    "wgpu": ("wgpu", "WebGPU devices"),
    "cuda": ("cuda-bindings", "CUDA devices"),
}


@click.command("info", short_help="Version, CPU features, cache, and why something is missing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Show version, targets, CPU features, kernel cache, and which extras are installed."""
    found = _collect()
    click.echo(json.dumps(found) if as_json else "\n".join(_lines(found)))


def _collect() -> dict[str, Any]:
    from ..backends import describe
    from ..bench.report import cpu_name, version
    from ..targets import GPUS, KNOWN, available_threads

    packages = {module: _package(module, *entry) for module, entry in EXTRAS.items()}
    return {
        "version": version("treeattn"),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "cpu": cpu_name(),
        "threads": available_threads(),
        "targets": _targets() | describe(),
        "compile": ["llvm", *KNOWN, *GPUS],
        "cache": _cache(),
        "packages": packages,
    }


def _package(module: str, distribution: str, purpose: str) -> dict[str, Any]:
    from ..bench.report import version

    installed = importlib.util.find_spec(module) is not None
    missing = None if installed else f"not installed: pip install {distribution}"
    return {"version": version(distribution), "for": purpose, "missing": missing}


def _targets() -> dict[str, Any]:
    """Facts about this machine as a target, or why it cannot be one."""
    from ..targets import host

    if importlib.util.find_spec("tvm") is None:
        return {"llvm": {"missing": "apache-tvm, which compiles every kernel, is not installed"}}
    try:
        traits = asdict(host())
    except Exception as error:  # a broken TVM fails in its own ways, and this command is there to tell
        return {"llvm": {"missing": f"{type(error).__name__}: {' '.join(str(error).split())}"}}
    return {"llvm": {name: value for name, value in traits.items() if value}}


def _cache() -> dict[str, Any]:
    from .. import store

    return {"folder": os.fspath(store.folder()), "bytes": store.size()}


def _lines(found: dict[str, Any]) -> list[str]:
    lines = [
        "treeattn {version} on Python {python}, NumPy {numpy}".format(**found),
        "cpu      {cpu}, {threads} threads for this process".format(**found),
    ]
    for name, traits in found["targets"].items():
        facts = ", ".join(f"{key} {value}" for key, value in traits.items() if key != "missing")
        lines.append(f"{name:8} {facts or 'missing: ' + traits['missing']}")
    lines.append(f"compile  for {', '.join(found['compile'])}")
    lines.append(
        "cache    {folder}, {megabytes:.1f} MB".format(**found["cache"], megabytes=found["cache"]["bytes"] / 1e6)
    )
    for module, package in found["packages"].items():
        state = package["missing"] or package["version"] or "installed"
        lines.append(f"{module:12} {state} ({package['for']})")
    return lines
