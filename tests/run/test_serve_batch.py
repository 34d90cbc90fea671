"""examples/serve_batch.py, on a tiny random model."""

from __future__ import annotations

import runpy
from pathlib import Path

import tiny_model

from treeattn.generation import Generator
from treeattn.models import load_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve_batch.py"


def test_requests_that_share_steps_get_the_text_they_get_alone(tmp_path, capsys):
    folder = tiny_model.write(tmp_path / "model")
    example = runpy.run_path(str(EXAMPLE))
    texts = example["main"](str(folder))
    assert "tokens a step" in capsys.readouterr().out
    model, tokenizer = load_model(folder)
    for (_, prompt, sampling), text in zip(example["REQUESTS"], texts, strict=True):
        if not sampling.is_greedy:
            continue
        generator = Generator(model)
        request = generator.submit(
            tokenizer.encode(tokenizer.chat(prompt)), example["MAX_TOKENS"], stop_tokens=tokenizer.stop_tokens
        )
        generator.run()
        assert tokenizer.decode(request.tokens) == text
