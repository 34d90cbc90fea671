"""Results as a table, a CSV file, JSON records and a roofline plot."""

from __future__ import annotations

import csv
import io
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.table import Table

from ..errors import UnsupportedError
from .measure import OURS, Result
from .workloads import LIMITS

PACKAGES = ("treeattn", "numpy", "apache-tvm", "torch")


def environment() -> dict[str, str]:
    """What a figure depends on: commit, versions, processor, time."""
    found = {"commit": _commit(), "python": platform.python_version(), "cpu": cpu_name()}
    found |= {package.replace("-", "_"): version(package) or "" for package in PACKAGES}
    return found | {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def version(package: str) -> str | None:
    """Version of an installed package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """Name of the processor as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.machine()


def records(results: Iterable[Result]) -> list[dict[str, Any]]:
    """One flat record for each candidate of each result."""
    return [_record(result, name) for result in results for name in result.timings]


def _record(result: Result, name: str) -> dict[str, Any]:
    timing, probe = result.timings[name], result.probes.get(name)
    record: dict[str, Any] = {
        "workload": result.workload.name,
        "dtype": result.dtype,
        "threads": result.threads,
        "candidate": name,
        "source": probe.source if probe else "",
        "seconds": timing.best,
        "samples": timing.samples,
        "over_treeattn": timing.best / result.seconds if probe is None else None,
    }
    if probe is not None:
        key = "gflops" if name == "sgemm" else "gbytes_per_s"
        return record | {"gflops": None, "gbytes_per_s": None} | {key: result.limit(name) / 1e9}
    record |= {"gflops": result.flop_rate(name) / 1e9, "gbytes_per_s": result.byte_rate(name) / 1e9}
    if name == OURS:
        record |= {limit: result.fraction(limit) for limit in LIMITS}
        record["goals_met"] = all(met is not False for _, met in result.goals())
    return record


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """Write every candidate of every result, with the environment in each row."""
    rows, surroundings = records(results), environment()
    fields = list(dict.fromkeys(key for row in rows for key in row)) + list(surroundings)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fields)
    writer.writeheader()
    writer.writerows(row | surroundings for row in rows)
    path.write_text(buffer.getvalue())


def table(results: Iterable[Result]) -> Table:
    """Give a line to each result: rates, fractions of the limits, speed-ups, goals."""
    title = "treeattn bench: useful work only; of sgemm and of a memory read timed in turns with it"
    shown = Table("workload", "dtype", title=title, box=None, pad_edge=False, collapse_padding=True)
    for heading in ("ms", "GFLOP/s", "of sgemm", "GB/s", "of read"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("times faster than")
    shown.add_column("goal")
    for result in results:
        shown.add_row(*_cells(result))
    return shown


def _cells(result: Result) -> list[str]:
    others = [name for name in result.timings if name != OURS and name not in result.probes]
    return [
        result.workload.name,
        result.dtype,
        f"{result.seconds * 1e3:.2f}",
        f"{result.flop_rate() / 1e9:.1f}",
        f"{result.fraction('compute'):.0%}",
        f"{result.byte_rate() / 1e9:.1f}",
        f"{result.fraction('bandwidth'):.0%}",
        "  ".join(f"{name} {result.speedup(name):.3g}" for name in others),
        "  ".join(_goal(result, index) for index in range(len(result.goals()))),
    ]


def _goal(result: Result, index: int) -> str:
    goal, met = result.goals()[index]
    wanted = " or ".join(f"{name} {least:.2g}" for name, least in goal.any_of)
    if met is None:
        return f"[dim]{wanted} ?[/dim]"
    return f"[green]{wanted} ok[/green]" if met else f"[red]{wanted} missed[/red]"


def notes(results: Iterable[Result]) -> list[str]:
    """Say what the limits were measured with, and which rivals are missing and why."""
    found: dict[str, None] = {}
    for result in results:
        for name, probe in result.probes.items():
            found[f"{name}: {probe.source}"] = None
        for name, reason in result.failures.items():
            found[f"{name} left out of {result.workload.name} {result.dtype}: {reason}"] = None
    return list(found)


def plot_roofline(path: Path, results: Sequence[Result]) -> None:
    """Draw useful work against intensity, under the limits that were measured.

    Raises
    ------
    UnsupportedError
        matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError("--plot needs matplotlib: pip install 'treeattn[plot]'") from None
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    compute = max(result.limit("sgemm") for result in results) / 1e9
    bandwidth = max(result.limit("read") for result in results) / 1e9
    intensities = [result.flops / result.num_bytes for result in results]
    ends = [min(*intensities, 1) / 2, max(*intensities, compute / bandwidth) * 2]
    corner = [ends[0], compute / bandwidth, ends[1]]
    axes.loglog(corner, [min(compute, bandwidth * x) for x in corner], color="black", label="measured limits")
    for dtype, mark in (("float32", "o"), ("float16", "s"), ("bfloat16", "^")):
        points = [
            (x, result.flop_rate() / 1e9)
            for x, result in zip(intensities, results, strict=True)
            if result.dtype == dtype
        ]
        if points:
            axes.loglog(*zip(*points, strict=True), mark, label=dtype)
    for x, result in zip(intensities, results, strict=True):
        axes.annotate(
            result.workload.name, (x, result.flop_rate() / 1e9), fontsize=6, xytext=(3, -7), textcoords="offset points"
        )
    axes.set(xlabel="useful operations a byte of K and V", ylabel="GFLOP/s", title=f"treeattn on {cpu_name()}")
    axes.legend()
    FigureCanvasAgg(figure).print_png(os.fspath(path))


def _commit() -> str:
    command = ["git", "-C", os.fspath(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
