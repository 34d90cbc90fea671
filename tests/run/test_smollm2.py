"""The model that ``treeattn generate`` fetches, where it is in the cache: logits, tokens, text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from treeattn.download import MODELS
from treeattn.generation import Generator
from treeattn.models import load_model
from treeattn.speculate.draft import NgramDrafter

RECORD = json.loads((Path(__file__).parents[1] / "data" / "smollm2_logits.json").read_text())
FILE = MODELS["smollm2"].path
TOLERANCE = 1e-3

pytestmark = pytest.mark.skipif(not FILE.exists(), reason=f"no {FILE}: run treeattn generate once, online")


@pytest.fixture(scope="module")
def loaded():
    pytest.importorskip("gguf", reason="the extra models is not installed")
    return load_model(FILE)


@pytest.mark.parametrize("record", RECORD["prompts"], ids=lambda record: record["prompt"][:12])
def test_logits_are_those_of_transformers(loaded, record):
    model, tokenizer = loaded
    assert tokenizer.encode(record["prompt"]) == record["tokens"]
    cache = model.new_cache(8)
    tokens = np.array(record["tokens"], np.int32)
    logits = model.forward(cache.begin({cache.add(): len(tokens)}), tokens)
    assert np.argsort(-logits[-1])[:3].tolist() == record["top_tokens"][:3]
    np.testing.assert_allclose(logits[-1, record["top_tokens"]], record["top_logits"], rtol=0, atol=TOLERANCE)
    signs = np.random.default_rng(0).choice(np.array([-1.0, 1.0]), logits.shape[1])
    # independent errors of that size add up as the root of their number
    bound = TOLERANCE * np.sqrt(logits.shape[1])
    np.testing.assert_allclose(logits.astype(np.float64) @ signs, record["signed_sums"], rtol=0, atol=bound)


def test_drafts_change_no_token(loaded):
    model, tokenizer = loaded
    texts = [
        "one two three four one two three",
        "Repeat: the quick brown fox. the quick brown fox.",
        "Name three trees.",
    ]
    prompts = [tokenizer.encode(tokenizer.chat(text)) for text in texts]

    def run(batches, drafter):
        found = []
        for batch in batches:
            generator = Generator(model, 2048, drafter=drafter)
            requests = [generator.submit(prompt, 24, stop_tokens=tokenizer.stop_tokens) for prompt in batch]
            generator.run()
            found += [request.tokens for request in requests]
        return found

    plain = run([[prompt] for prompt in prompts], None)
    assert run([[prompt] for prompt in prompts], NgramDrafter()) == plain
    assert run([prompts], NgramDrafter()) == plain
    assert "oak" in tokenizer.decode(plain[2]).lower()
