"""Every example runs, and does what it says."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np

import treeattn as ta
from treeattn import cache_ops, reference

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_speculative_step_writes_what_plain_decoding_writes():
    example = load("speculative_step")
    text, steps = example["main"]()
    assert len(set(text)) > 10 and steps < 25
    cache = ta.PagedKVCache(1, example["HEADS"], example["DIM"], num_pages=64, dtype="float32")
    seq, plain, new = cache.add(), text[:5], text[:5]
    while len(plain) < len(text):
        step, logits = example["forward"](cache, {seq: len(new)}, new)
        cache.commit(step, {seq: len(new)})
        new = [int(np.argmax(logits[-1]))]
        plain += new
    assert plain == text


def test_engine_page_table_attends_as_the_oracle_does(monkeypatch):
    example, calls, moves = load("engine_page_table"), [], []
    attention, compact = ta.attention, cache_ops.compact

    def recorded(q, kv, mask, **options):
        calls.append((q, ta.PagedKV(kv.pages.copy(), kv.page_indptr, kv.page_ids, kv.last_page_len), mask, options))
        return attention(q, kv, mask, **options)

    monkeypatch.setattr(ta, "attention", recorded)
    monkeypatch.setattr(cache_ops, "compact", lambda pages, **slots: moves.append(slots) or compact(pages, **slots))
    out = example["main"]()
    ((*arguments, options),) = calls
    want, _ = reference.attention(*arguments, **options)
    assert np.abs(out - want).max() < 2e-3
    assert moves == [{"source": [21 * 16 + 7], "target": [21 * 16 + 6]}]
