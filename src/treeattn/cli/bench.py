"""``treeattn bench``: speed as a fraction of what the machine gives, next to other kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..bench.measure import Result
    from ..bench.workloads import Workload


def _writable(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Look at a path before anything is measured, not after."""
    if path and (path.is_dir() or not path.parent.is_dir()):
        raise click.BadParameter(f"expected a file in a folder that is there, got {path}")
    return path


FILE: dict[str, Any] = {"type": click.Path(path_type=Path), "callback": _writable}
QUICK, THOROUGH = (0.5, 4), (4.0, 20)  # seconds and rounds a measurement


@click.command("bench", short_help="Speed, as a fraction of what the machine gives, next to other kernels.")
@click.option("--workload", "-w", "patterns", multiple=True, metavar="W", help="Name or pattern (verify*); repeatable.")
@click.option(
    "--dtype", "dtypes", multiple=True, type=click.Choice(["float32", "float16", "bfloat16"]), help="Only these."
)
@click.option(
    "--against",
    metavar="A,B",
    help="torch (sdpa, sdpa+gather, flex), tvm, numpy, none, ...; by default what goals name.",
)
@click.option("--csv", "csv_file", help="Write all times, with versions and commit.", **FILE)
@click.option("--plot", "plot_file", help="Draw a roofline (needs matplotlib).", **FILE)
@click.option("--threads", type=click.IntRange(min=1), help="Number of threads; by default all this process has.")
@click.option("--quick", is_flag=True, help="Fewer samples: a look, not a figure to quote.")
@click.option("--as-is", is_flag=True, help="Leave OpenMP's settings alone, so that its workers may spin.")
@click.option("--list", "only_list", is_flag=True, help="List the workloads.")
@click.option("--target", type=click.Choice(["llvm", "cuda"]), default="llvm", help="cuda: with --estimate only.")
@click.option("--estimate", is_flag=True, help="Not measured: what a GPU must take, by plan and data sheet.")
@click.option("--gpu", type=click.Choice(["h200", "h100", "a100"]), help="The GPU of --estimate; by default h200.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON records, one for each candidate.")
def command(
    *,
    patterns: Sequence[str],
    dtypes: Sequence[str],
    against: str | None,
    csv_file: Path | None,
    plot_file: Path | None,
    threads: int | None,
    quick: bool,
    as_is: bool,
    only_list: bool,
    target: str,
    estimate: bool,
    gpu: str | None,
    as_json: bool,
) -> int:
    """Time workloads in turns with an sgemm, a memory read and rivals, each checked before it is timed.

    Exit status 1 where a result is not attention; a missed goal is only shown.
    """
    if estimate != (target == "cuda") or (gpu and not estimate):
        raise click.UsageError(
            "--target cuda, --estimate and --gpu go together: nothing is timed; benchmarks/cuda_check.py times a GPU"
        )
    from ..bench.timer import quiet_workers

    if not (as_is or estimate):
        quiet_workers()
    from ..bench import report, rivals, workloads
    from ..targets import available_threads

    chosen = workloads.select(patterns)
    if only_list:
        click.echo("\n".join(map(_describe, chosen)))
        return 0
    if estimate:
        _estimate(chosen, dtypes, gpu or "h200", as_json)
        return 0
    try:
        named = None if against is None else rivals.resolve(against.split(","))
    except rivals.UnavailableError as error:
        raise click.BadParameter(str(error), param_hint="--against") from None
    results, wrong = _measure(chosen, dtypes, threads or available_threads(), named, quick)
    if csv_file:
        report.write_csv(csv_file, results)
    if plot_file and results:
        report.plot_roofline(plot_file, results)
    if as_json:
        click.echo(
            json.dumps({"environment": report.environment(), "results": report.records(results), "wrong": wrong})
        )
    else:
        _print(results, wrong)
    return 1 if wrong else 0


def _measure(
    chosen: Sequence[Workload], dtypes: Sequence[str], threads: int, named: tuple[str, ...] | None, quick: bool
) -> tuple[list[Result], list[str]]:
    from ..bench.measure import measure
    from .terminal import progress

    seconds, rounds = QUICK if quick else THOROUGH
    jobs = [(work, dtype) for work in chosen for dtype in work.dtypes if not dtypes or dtype in dtypes]
    results, wrong = [], []
    for work, dtype in progress(jobs, len(jobs), "measuring"):
        against = work.own_candidates + (work.rivals if named is None else named)
        try:
            results.append(
                measure(work, dtype, threads=threads, against=dict.fromkeys(against), seconds=seconds, rounds=rounds)
            )
        except AssertionError as error:
            wrong.append(f"{work.name} {dtype}: {error}")
    return results, wrong


def _estimate(chosen: Sequence[Workload], dtypes: Sequence[str], gpu: str, as_json: bool) -> None:
    from ..bench import estimate
    from ..bench.workloads import HALF_DTYPES
    from ..errors import UnsupportedError
    from .terminal import console

    wanted = dtypes or HALF_DTYPES[:1]
    found, notes = [], []
    for work, dtype in ((work, dtype) for work in chosen for dtype in wanted):
        try:
            found.append(estimate.estimate(work, dtype, estimate.KNOWN[gpu]))
        except UnsupportedError as error:
            notes.append(str(error))
    if as_json:
        click.echo(json.dumps({"estimates": estimate.records(found), "notes": notes}))
        return
    screen = console()
    if found:
        screen.print(estimate.table(found))
    for note in notes:
        screen.print(note, markup=False)


def _describe(work: Workload) -> str:
    low, high = min(work.contexts), max(work.contexts)
    context = f"{low}" if low == high else f"{low} to {high}"
    nodes = f"{max(work.nodes)}" if len(set(work.nodes)) == 1 else f"{min(work.nodes)} to {max(work.nodes)}"
    return (
        f"{work.name:14} {len(work.nodes)} x {nodes} nodes ({work.tree}), context {context}, "
        f"{work.q_heads}/{work.kv_heads} heads, d {work.d}, page {work.page_size}"
    )


def _print(results: Sequence[Result], wrong: Sequence[str]) -> None:
    from ..bench import report
    from .terminal import console

    screen = console()
    screen.print(report.table(results))
    for note in report.notes(results):
        screen.print(note, markup=False)
    for line in wrong:
        screen.print(f"WRONG {line}", markup=False, style="red")
