"""Junk in every argument beside attention's own: a TreeAttnError, or an answer; never another exception, and no change.

`test_bad_calls` does the same for `attention` and `plan`.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest

import treeattn as ta
from treeattn import cache_ops
from treeattn.generation.sampling import Sampling
from treeattn.models.config import ModelConfig

JUNK = [
    None, 3, -1, 0, 1.5, float("nan"), 2**70, -(2**70), "x", b"x", object(), (), {}, {1: 2}, {3}, [None], ["a"],
    [[1], [2, 3]], [2**70], [1.5], range(3), len, int, np.float32(1), np.array(None, object), np.array(["abc"]),
    np.zeros(3, complex), np.zeros((3, 5), complex), np.full((3, 5), "a"), np.zeros(3, bool), np.zeros((2, 2), int),
    np.zeros((0, 2, 16)), np.zeros((3, 1, 8), np.float32), np.full((3, 1), 1.0), np.full((3, 5), np.nan), ta.Full(),
    slice(3), 1j, True, ta.TokenTree.chain(3), ta.TokenTree.star(200),
]  # fmt: skip
SIZES = {"num_layers": 1, "kv_heads": 1, "head_dim": 8, "num_pages": 4, "page_size": 2, "dtype": "float32"}
ROWS = np.ones((3, 1, 8), np.float32)


def outcome(call):
    """None where a call answers or refuses properly, else what it raised instead."""
    try:
        call()
    except ta.TreeAttnError as error:
        return None if len(str(error)) > 20 else f"says too little: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def faults(calls):
    return [f"{name}: {found}" for name, call in calls if (found := outcome(call))]


CACHE_CALLS = {
    "length": lambda cache, seq, step, junk: cache.length(junk),
    "remove": lambda cache, seq, step, junk: cache.remove(junk),
    "fork": lambda cache, seq, step, junk: cache.fork(junk),
    "fork length": lambda cache, seq, step, junk: cache.fork(seq, junk),
    "truncate": lambda cache, seq, step, junk: cache.truncate(seq, junk),
    "drop_outside window": lambda cache, seq, step, junk: cache.drop_outside(junk),
    "drop_outside sink": lambda cache, seq, step, junk: cache.drop_outside(1, junk),
    "drop_outside seqs": lambda cache, seq, step, junk: cache.drop_outside(1, 0, junk),
    "drop_outside seq": lambda cache, seq, step, junk: cache.drop_outside(1, 0, [seq, junk]),
    "pages": lambda cache, seq, step, junk: cache.pages(junk),
    "read": lambda cache, seq, step, junk: cache.read(junk, seq),
    "begin": lambda cache, seq, step, junk: cache.begin(junk),
    "begin value": lambda cache, seq, step, junk: cache.begin({seq: junk}),
    "commit step": lambda cache, seq, step, junk: cache.commit(junk, {seq: 1}),
    "commit": lambda cache, seq, step, junk: cache.commit(step, junk),
    "commit value": lambda cache, seq, step, junk: cache.commit(step, {seq: junk}),
    "commit node": lambda cache, seq, step, junk: cache.commit(step, {seq: [0, junk]}),
    "append layer": lambda cache, seq, step, junk: step.append(junk, ROWS, ROWS),
    "append k": lambda cache, seq, step, junk: step.append(0, junk, ROWS),
    "append v": lambda cache, seq, step, junk: step.append(0, ROWS, junk),
    "append rope": lambda cache, seq, step, junk: step.append(0, ROWS, ROWS, rope=junk),
    "mask": lambda cache, seq, step, junk: step.mask(junk),
    "mask sink": lambda cache, seq, step, junk: step.mask(3, junk),
}


def filled(pending):
    cache = ta.PagedKVCache(**SIZES)
    seq = cache.add()
    step = cache.begin({seq: 3})
    step.append(0, ROWS, ROWS)
    if not pending:
        cache.commit(step, {seq: 3})
    return cache, seq, step


def state(cache):
    lengths = [(seq, cache.length(seq), cache.read(0, seq)[0].tobytes()) for seq in cache.seqs]
    return lengths, cache.free_pages


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("name", CACHE_CALLS)
def test_cache(name, pending):
    found = []
    for junk in JUNK:
        cache, seq, step = filled(pending)
        before = state(cache)
        try:
            CACHE_CALLS[name](cache, seq, step, junk)
        except ta.TreeAttnError:
            found += [f"changed by {junk!r:.40}"] * (state(cache) != before)
        except Exception as error:
            found.append(f"{junk!r:.40}: {type(error).__name__}: {error}")
    assert not found


def test_sizes_of_a_cache():
    calls = [(name, lambda n=name, j=junk: ta.PagedKVCache(**SIZES | {n: j})) for name in SIZES for junk in JUNK]
    large = {"num_layers": 2**31 - 1, "page_size": 2**31 - 1, "head_dim": 2**31 - 1}
    calls += [("petabytes", lambda: ta.PagedKVCache(**SIZES | {"num_layers": 2**20, "page_size": 2**30}))]
    assert not faults([*calls, ("more than 2^63 bytes", lambda: ta.PagedKVCache(**SIZES | large))])


def test_attention_of_a_step():
    cache, _, step = filled(pending=True)
    names = ("sm_scale", "softcap", "alibi", "sink_logits", "rope", "target", "window")
    junk = [value for value in JUNK if not isinstance(value, int | float)]  # each finite number is a kernel or a plan
    calls = [(name, lambda n=name, j=j: step.attention(0, ROWS, **{n: j})) for name in names for j in junk]
    calls += [("sink", lambda j=j: step.attention(0, ROWS, window=3, sink=j)) for j in junk]
    assert not faults([*calls, *(("q", lambda j=j: step.attention(0, j)) for j in junk)])
    assert cache.used_pages == 2


def test_cache_ops():
    pages, rows = np.zeros((2, 2, 1, 2, 8), np.float32), np.ones((2, 1, 8), np.float32)
    calls = []
    for junk in JUNK:
        calls += [
            ("append pages", lambda j=junk: cache_ops.append(j, [0, 1], rows, rows)),
            ("append slots", lambda j=junk: cache_ops.append(pages, j, rows, rows)),
            (
                "append positions",
                lambda j=junk: cache_ops.append(pages, [0, 1], rows, rows, rope=ta.Rope(), positions=j),
            ),
            ("copy_page source", lambda j=junk: cache_ops.copy_page(pages, j, 0)),
            ("copy_page count", lambda j=junk: cache_ops.copy_page(pages, 0, 1, j)),
            ("compact", lambda j=junk: cache_ops.compact(pages, j, [0, 1])),
            ("gather", lambda j=junk: cache_ops.gather(pages, j)),
        ]
    assert not faults(calls)


def test_verification():
    tree, tokens, rows = ta.TokenTree.star(3), [0, 1, 2], np.full((3, 5), 0.2)
    greedy = {"tree": tree, "draft_tokens": tokens, "target_logits": rows, "allowed": rows > 0}
    drawn = {"tree": tree, "draft_tokens": tokens, "target_probs": rows, "draft_probs": rows, "rng": 0}
    calls = []
    for junk in [value for value in JUNK if not callable(value)]:  # what a callable raises is its own
        calls += [
            (name, lambda n=name, j=junk: ta.verify_greedy(**greedy | {n: j})) for name in (*greedy, "root_logits")
        ]
        calls += [
            (name, lambda n=name, j=junk: ta.verify_sampling(**drawn | {n: j})) for name in (*drawn, "root_probs")
        ]
        calls += [("roots", lambda j=junk: ta.verify_greedy([tree], [tokens], [rows], root_logits=j))]
    assert not faults(calls)


def test_trees_and_sampling():
    makers = ("from_parents", "from_paths", "from_choices", "from_mask", "chain", "star")
    calls = [(name, lambda n=name, j=junk: getattr(ta.TokenTree, n)(j)) for name in makers for junk in JUNK]
    calls += [("labels", lambda j=junk: ta.TokenTree([-1], j)) for junk in JUNK]
    names = ("temperature", "top_k", "top_p", "seed")
    calls += [(name, lambda n=name, j=junk: Sampling(**{n: j})) for name in names for junk in JUNK]
    assert not faults(calls)


CONFIGS = [
    {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "rope_theta": 1e4},
    {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
     "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
    {"model_type": "deepseek_v3", "num_hidden_layers": 2, "num_attention_heads": 4, "kv_lora_rank": 16,
     "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "max_position_embeddings": 128,
     "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}},
    {"model_type": "phi3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
     "max_position_embeddings": 128, "original_max_position_embeddings": 64,
     "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}},
]  # fmt: skip
KEYS = (
    "layer_types", "sliding_window", "sliding_window_pattern", "max_window_layers", "no_rope_layers", "rms_norm_eps",
    "no_rope_layer_interval", "rope_parameters", "rope_scaling", "partial_rotary_factor", "hidden_act", "text_config",
    "attn_logit_softcapping",
)  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["model_type"])
def test_configurations(config):
    ta.spec_from_hf_config(config)
    values = [None, 0, -1, 3, 2**70, 1e308, float("nan"), float("inf"), "x", [], [1], [None], {}, {"a": {}}, True, 1.5]
    changed = [config | {key: value} for key in dict.fromkeys([*config, *KEYS]) for value in values]
    for key in config.get("rope_scaling", ()):
        for value in values:
            other = copy.deepcopy(config)
            other["rope_scaling"][key] = value
            changed.append(other)
    calls = [(str(c), lambda c=c, f=f: f(c)) for c in changed for f in (ta.spec_from_hf_config, ModelConfig.from_hf)]
    assert not faults(calls)
