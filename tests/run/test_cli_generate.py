"""``treeattn generate`` with a tiny random model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import tiny_model

from treeattn.cli import main

pytest.importorskip("gguf", reason="the extra models is not installed")
PROMPT = "the cat sat on the mat, the cat sat on the"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("model"))


def generate(capsys, folder, *options, prompt=PROMPT):
    status = main(["generate", prompt, "--model", str(folder), "--max-tokens", "40", *options])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return captured.out


def test_every_drafter_gives_the_same_text(capsys, folder, tmp_path):
    plain = generate(capsys, folder, "--draft", "none")
    assert generate(capsys, folder) == plain
    draft = tiny_model.write(tmp_path / "draft", num_hidden_layers=1)
    assert generate(capsys, folder, "--draft", str(draft)) == plain


def test_json_holds_tokens_and_stats(capsys, folder):
    found = json.loads(generate(capsys, folder, "--json", "--stats", "--raw"))
    assert len(found["tokens"]) == 40
    assert found["finished"] == "length"
    for run in (found["stats"], found["plain"]):
        assert run["tokens"] == 39  # the prompt's own step gave the first
        assert run["tokens_per_second"] > 0
    assert found["plain"]["tokens_per_step"] == 1


def test_stats_compare_with_plain_decoding(capsys, folder):
    out = generate(capsys, folder, "--stats")
    for word in ("tokens/s", "tokens a step", "plain", "ratio", "attention", "matrix products", "drafting"):
        assert word in out


def test_sampling_is_seeded(capsys, folder):
    options = ("--temperature", "0.9", "--top-p", "0.9", "--seed", "7", "--draft", "none")
    first = generate(capsys, folder, *options)
    assert generate(capsys, folder, *options) == first
    assert generate(capsys, folder, *options[:-4], "--seed", "8", "--draft", "none") != first


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--model", "/nowhere/at/all.gguf"), "all.gguf"),
        (("--draft", "/nowhere/draft"), "draft"),
        (("--max-tokens", "9999999"), "prompt"),
        (("--top-p", "0"), "--top-p"),
    ],
)
def test_bad_input_is_one_line(capsys, folder, options, named):
    assert main(["generate", "x", "--model", str(folder), *options]) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert captured.err.count("\n") == 1


def test_a_draft_with_another_vocabulary_is_refused(capsys, folder, tmp_path):
    draft = tiny_model.write(tmp_path / "draft", vocab_size=300)
    assert main(["generate", "x", "--model", str(folder), "--draft", str(draft)]) == 2
    assert "same tokenizer" in capsys.readouterr().err


def test_interrupt_keeps_what_was_written(tmp_path):
    folder = tiny_model.write(tmp_path / "endless", tie_word_embeddings=False)
    weights = tiny_model.safetensors_numpy.load_file(folder / "model.safetensors")
    weights["lm_head.weight"][-1] = 0  # the end of a turn is never the likeliest
    tiny_model.safetensors_numpy.save_file(weights, folder / "model.safetensors")
    command = [sys.executable, "-m", "treeattn", "generate", PROMPT, "--model", str(folder), "--max-tokens", "1700",
               "--raw", "--draft", "none"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ) as process:
        first = process.stdout.read(1)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert first
    assert b"Traceback" not in errors


def test_demo_shows_a_generation_or_says_why_not(folder, monkeypatch):
    from treeattn.cli import demo
    from treeattn.cli import generate as command
    from treeattn.models.checkpoint import ModelFileError

    load = command.load
    monkeypatch.setattr(command, "load", lambda name: load(str(folder)))
    found = demo._generate(quiet=True)
    assert found["same"] is True
    assert found["tokens"] == demo.TOKENS

    def offline(name):
        raise ModelFileError("cannot fetch it")

    monkeypatch.setattr(command, "load", offline)
    assert demo._generate(quiet=True) == {"left_out": "cannot fetch it"}
