"""Serve requests that come and go: one cache, one model, drafts from each sequence's own text.

    python examples/serve_batch.py [MODEL.gguf | FOLDER]

Without a model, the small one of ``treeattn generate`` is fetched. Every step runs all sequences at once; a request
that comes in the middle joins the next step, and one that ends gives its pages to those that wait.
"""

from __future__ import annotations

import sys

from treeattn.download import MODELS, fetch
from treeattn.generation import Generator, Sampling
from treeattn.models import load_model
from treeattn.speculate.draft import NgramDrafter

REQUESTS = (
    (0, "Repeat this line three times: to be or not to be", Sampling()),
    (0, "Write a poem about rain.", Sampling(temperature=0.8, top_p=0.95, seed=1)),
    (4, "Count from one to twenty in words.", Sampling()),
    (9, "Name three trees.", Sampling()),
)
MAX_TOKENS = 48


def main(path: str | None = None) -> list[str]:
    """Serve the requests and return their texts."""
    model, tokenizer = load_model(path or fetch(MODELS["smollm2"]))
    assert tokenizer is not None, "put tokenizer.json into the folder"
    generator = Generator(model, capacity=1024, drafter=NgramDrafter())
    waiting, served, step = list(REQUESTS), [], 0
    while waiting or not generator.is_idle:
        while waiting and waiting[0][0] <= step:
            _, prompt, sampling = waiting.pop(0)
            tokens = tokenizer.encode(tokenizer.chat(prompt))
            served.append(generator.submit(tokens, MAX_TOKENS, sampling=sampling, stop_tokens=tokenizer.stop_tokens))
        new = generator.step()
        step += 1
        print(f"step {step}:", *(f"{len(tokens)} tokens" for tokens in new.values()), sep="  ")
    texts = [tokenizer.decode(request.tokens) for request in served]
    for (_, prompt, _), request, text in zip(REQUESTS, served, texts, strict=True):
        print(f"\n> {prompt}  [{request.finished}]\n{text}")
    print(f"\n{generator.stats.tokens_per_step:.2f} tokens a step, {generator.stats.tokens_per_second:.1f} tokens/s")
    return texts


if __name__ == "__main__":
    main(*sys.argv[1:])
