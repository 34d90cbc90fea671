"""TVM's paged KV cache runs with the generators of `treeattn.tvm_compat` in the place of each of its own.

`tvm_cache.CheckedCache` compares every output with float64 attention over a plain list of tokens. Its docstring lists
the faults of the runtime itself, which the scenarios stay outside of. ``TREEATTN_TEST_GENERATORS=tvm`` runs the same
scenarios with TVM's generators: those of the last section, and only those, fail then.
"""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_cache
from tvm_cache import CheckedCache, Config, assert_close, runtime

GENERATORS = tvm_cache.generators_under_test()

SMALL = Config(8, 2, 64, "float32")
HALF = Config(8, 2, 128, "float16")
CONFIGS = {
    "fp32-d64-none": SMALL.but(rope="none"),
    "fp32-d64-normal": SMALL,
    "fp32-d64-inline": SMALL.but(rope="inline"),
    "fp16-d128-none": HALF.but(rope="none"),
    "fp16-d128-normal": HALF,
    "fp16-d128-inline": HALF.but(rope="inline"),
    "fp32-d64-three-layers-scaled": SMALL.but(num_layers=3, scale=2, theta=500_000),
}
WITH_TREES = {name: config for name, config in CONFIGS.items() if config.rope != "inline"}
GROUPS = {"fp16-d64-group1": Config(2, 2, 64, "float16"), "fp32-d128-group7": Config(7, 1, 128, "float32")}

BINARY = [-1, 0, 0, 1, 1, 2, 2]
STAR = [-1, 0, 0, 0, 0]
CHAIN = [-1, 0, 1]
FOREST = [-1, -1, 0, 1, 0, 3]


def cache_of(config, **options):
    return CheckedCache(GENERATORS, config, **options)


def each(configs):
    return pytest.mark.parametrize("config", configs.values(), ids=configs)


# sequences ---------------------------------------------------------------------------------------------------------


@each(CONFIGS | GROUPS)
def test_prefill_decode_pop_and_remove(config):
    cache = cache_of(config)
    cache.add(0, 1, 2)
    cache.forward({0: 20, 1: 7, 2: 16})  # nothing cached: ragged
    cache.forward({1: 5, 0: 1})  # ragged and paged, merged
    for _ in range(3):
        cache.forward({0: 1, 1: 1, 2: 1})
    cache.check_stored()
    cache.popn(0, 9)
    cache.popn(2, 3)
    cache.popn(1, 0)
    cache.forward({2: 1, 0: 18})
    cache.remove(1)
    cache.add(1)
    cache.forward({1: 33, 2: 1})
    cache.forward({1: 1, 2: 1, 0: 1})
    cache.check_stored()
    assert cache.kernels.called >= {"rope", "append", "ragged", "prefill", "merge", "debug"}
    cache.check_empty()


@each(CONFIGS)
def test_forks_of_one_and_two_levels(config):
    cache = cache_of(config)
    cache.add(0, 1)
    cache.forward({0: 37, 1: 5})
    cache.fork(0, 2)  # at the end, inside a page: its tokens are copied
    cache.fork(0, 3, 32)  # at a page's edge
    cache.fork(0, 4, 20)
    for lengths in ({0: 1, 2: 1, 3: 1, 4: 1, 1: 1}, {3: 6, 2: 1, 1: 2}, {4: 1, 3: 1}):
        cache.forward(lengths)
    cache.fork(3, 5, 35)
    cache.fork(3, 6)
    for lengths in ({5: 1, 6: 1, 3: 1}, {6: 30, 5: 3, 1: 1}, {6: 1, 0: 1}):
        cache.forward(lengths)
    cache.popn(6, 45)  # into what is shared
    cache.forward({6: 2, 3: 1})
    cache.check_stored()
    cache.remove(0, 3)  # parents first
    cache.forward({2: 1, 4: 1, 5: 1, 6: 1})
    cache.check_stored()
    assert cache.kernels.called >= {"copy_page", "decode"}
    cache.check_empty()


def test_ready_made_functions_and_clear():
    cache = cache_of(SMALL, direct=True)
    for _ in range(2):
        cache.add(0, 1)
        cache.forward({0: 20, 1: 3})
        cache.forward({0: 4, 1: 6}, [[-1, 0, 0, 1], FOREST])
        cache.commit({0: 3, 1: 5})
        cache.forward({0: 1, 1: 1})
        cache.check_stored()
        cache.runtime.clear()
        cache.model.sequences.clear()
        assert cache.runtime.empty


# trees -------------------------------------------------------------------------------------------------------------


@each(WITH_TREES | {"fp32-d128-group7": GROUPS["fp32-d128-group7"]})
def test_tree_then_commit(config):
    cache = cache_of(config)
    cache.add(0, 1, 2)
    cache.forward({0: 17, 1: 40, 2: 2})
    cache.forward({0: 7, 2: 3, 1: 6}, [BINARY, CHAIN, FOREST])
    cache.commit({0: 6, 2: 1, 1: 5})
    cache.check_stored()
    cache.forward({0: 1, 1: 1, 2: 1})
    cache.forward({1: 5, 0: 5}, [STAR, STAR])
    cache.commit({1: 4, 0: -1})
    cache.check_stored()
    cache.forward({0: 3, 1: 3, 2: 3})
    cache.check_stored()
    assert cache.kernels.called >= {"tree", "compact"}
    cache.check_empty()


@each(WITH_TREES)
def test_tree_of_several_rounds(config):
    cache = cache_of(config)
    cache.add(0, 1)
    cache.forward({0: 33, 1: 6})
    cache.forward({0: 1, 1: 2}, [[-1], [-1, -1]])
    cache.forward({0: 2, 1: 3}, [[0, 0], [1, 0, 1]])
    cache.forward({1: 1, 0: 4}, [[4], [1, 1, 2, 2]])
    cache.commit({1: -1, 0: -1})
    assert cache.kernels.called >= {"tree_paged"}
    cache.popn(0, 3)  # what the commit left of the tree
    cache.popn(1, 5)
    cache.forward({0: 1, 1: 4})
    cache.check_stored()


def test_tree_whose_first_rounds_are_a_chain_is_committed_so_far():
    cache = cache_of(SMALL)
    cache.add(0)
    cache.forward({0: 14})
    cache.forward({0: 3}, [CHAIN])
    cache.forward({0: 4}, [[2, 2, 3, 0]])
    cache.commit({0: -1})
    cache.check_stored()
    cache.forward({0: 2})
    cache.check_stored()


@each(WITH_TREES)
def test_trees_on_forks(config):
    cache = cache_of(config)
    cache.add(0, 1)
    cache.forward({0: 48, 1: 30})
    cache.fork(0, 2, 40)
    cache.fork(0, 3, 32)
    cache.fork(2, 4)
    cache.forward({2: 7, 4: 5, 1: 6, 3: 6, 0: 3}, [BINARY, STAR, FOREST, FOREST, [-1, 0, 0]])
    cache.commit({2: 4, 4: 3, 1: 3, 3: 5, 0: 2})
    cache.check_stored()
    cache.forward({0: 1, 1: 1, 2: 1, 3: 1, 4: 1})
    cache.forward({2: 3, 3: 2}, [[-1, 0, 0], [-1, 0]])
    cache.forward({2: 4, 3: 2}, [[1, 1, 2, 2], [0, 1]])
    cache.forward({2: 2, 3: 1}, [[3, 6], [2]])
    cache.commit({2: -1, 3: -1})
    cache.check_empty()


def test_tree_of_256_nodes():
    cache = cache_of(SMALL)
    cache.add(0)
    cache.forward({0: 50})
    cache.forward({0: 256}, [[-1, *((node - 1) // 3 for node in range(1, 256))]])
    cache.commit({0: 255})
    cache.forward({0: 1})
    cache.check_stored()


# windows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink", [0, 4])
@each({name: c.but(sliding=True) for name, c in CONFIGS.items() if c.rope != "normal" and c.num_layers == 2})
def test_window_of_a_sequence(config, sink):
    """With windows TVM turns RoPE inline and renumbers what is left in the cache."""
    cache = cache_of(config)
    cache.add(0, 1, 2)
    cache.slide(0, 20, sink)
    cache.slide(1, 33, sink)
    cache.forward({0: 12, 1: 18, 2: 9})
    cache.forward({0: 9, 1: 15, 2: 4})
    cache.check_stored()
    for _ in range(4):
        cache.forward({0: 3, 1: 5, 2: 1})
    cache.check_stored()
    for _ in range(18):
        cache.forward({0: 1, 1: 1, 2: 1})
    cache.forward({0: 30, 2: 2})  # more than the window at once
    cache.forward({0: 1, 1: 1})
    cache.check_stored()
    assert cache.kernels.called >= {"prefill_window", "decode_window"}
    cache.check_empty()


@pytest.mark.parametrize("rope", ["none", "inline"])
def test_window_on_a_fork_keeps_the_shared_prefix(rope):
    cache = cache_of(SMALL.but(rope=rope, sliding=True))
    cache.add(0)
    cache.forward({0: 40})
    cache.fork(0, 1, 32)
    cache.fork(0, 2, 37)
    cache.slide(1, 45, 4, own_sink=32)
    cache.slide(2, 48, 34)
    for new in (5, 9, 1, 1, 3, 1):
        cache.forward({1: new, 0: 1, 2: new})
        cache.check_stored()


# the fine-grained functions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", ["none", "inline"])
def test_self_and_cross_attention_merge_to_the_fused_result(rope):
    cache = cache_of(SMALL.but(rope=rope))
    cache.add(0, 1)
    cache.forward({0: 20, 1: 17})
    qkv = cache.draw(7)
    q, k, v = np.split(qkv, [8, 10], axis=2)
    handle, sm_scale = cache.runtime.cache, 64**-0.5
    cache.runtime.begin_forward([0, 1], [5, 2])
    for layer in range(2):
        arrays = [tvm.runtime.tensor(part[layer]) for part in (q, k, v)]
        own, past, shared = ((empty(7, 8, 64), empty(7, 8)) for _ in range(3))
        runtime("attention_kv_cache_self_attention")(handle, layer, sm_scale, *arrays, *own)
        runtime("attention_kv_cache_cross_attention")(handle, layer, sm_scale, arrays[0], *past)
        runtime("attention_kv_cache_merge_attn_output_inplace")(handle, *own, *past)
        fused = cache.runtime.attention(layer, qkv[layer], sm_scale)
        runtime("attention_kv_cache_attention_with_shared_kv")(handle, layer, sm_scale, *arrays, shared[0])
        np.testing.assert_array_equal(own[0].numpy(), fused)
        np.testing.assert_array_equal(shared[0].numpy(), fused)
    cache.runtime.end_forward()


def empty(*dims, dtype="float32"):
    return tvm.runtime.tensor(np.full(dims, np.nan, dtype))


@pytest.mark.parametrize("dtype", ["float16"])
def test_latent_cache(dtype):
    """MLA, absorbed: TVM has no CPU kernel for it, its cache object runs with ours."""
    heads, latent, rope, page, layers = 4, 64, 16, 16, 2
    width = latent + rope
    run = LatentRun(GENERATORS, heads, latent, rope, page, layers, dtype)
    for lengths in ({0: 20, 1: 9}, {0: 1, 1: 1}, {0: 1, 1: 1}, {1: 12}, {0: 1, 1: 1}):
        run.forward(lengths)
    run.fork(0, 2)
    run.fork(1, 3, 16)
    run.forward({2: 1, 3: 1, 0: 1})
    for seq, kv in run.kv.items():
        got = empty(layers, kv.shape[1], width, dtype=dtype)
        runtime("attention_kv_cache_debug_get_kv_mla")(run.cache, seq, 0, kv.shape[1], got)
        np.testing.assert_array_equal(got.numpy(), kv)


class LatentRun:
    """A cache of kind MLA, each row ``[latent | rope]``, and the plain list of what it holds."""

    def __init__(self, generators, heads, latent, rope, page, layers, dtype):
        self.heads, self.latent, self.layers, self.dtype = heads, latent, layers, dtype
        self.rng, self.kv, width = np.random.default_rng(0), {}, latent + rope
        self.width = width
        build, cpu = tvm_cache.build, tvm.target.Target(tvm_cache.CPU)
        merge = build(generators, "_merge_state_inplace_cpu", dtype)
        ragged = build(generators, "_attention_prefill_ragged_cpu", heads, heads, width, latent, dtype, frozenset())
        mla = build(generators, "_attention_prefill_mla", heads, latent, rope, dtype, False, cpu)
        rotary = build(
            generators, "llama_rope_with_position_map", 10_000, 1, width, heads, 1, dtype, frozenset(), width
        )
        self.cache = runtime("paged_attention_kv_cache_create")(
            tvm_cache.shape([8, 512, 128, page, 0, 1024]),
            tvm_cache.shape([0, layers]),
            heads,
            1,
            width,
            latent,
            tvm_cache.shape([int(tvm_cache.AttnKind.MLA)] * layers),
            False,
            int(tvm_cache.RopeMode.NONE),
            1,
            10_000,
            None,
            tvm.runtime.tensor(np.zeros((), dtype)),
            None,
            build(generators, "_kv_cache_transpose_append_mla", width, dtype),
            ["tirx", ragged],
            *([] for _ in range(6)),
            ["tirx", mla],
            [merge, merge],
            rotary,
            build(generators, "_copy_single_page_mla", page, width, dtype, cpu),
            build(generators, "_kv_cache_debug_get_kv_mla", layers, width, dtype),
            merge,  # compaction, never called
        )
        for seq in range(2):
            runtime("kv_state_add_sequence")(self.cache, seq)
            self.kv[seq] = np.zeros((layers, 0, width), dtype)

    def fork(self, parent, child, position=-1):
        runtime("kv_state_fork_sequence")(self.cache, parent, child, position)
        self.kv[child] = self.kv[parent][:, : None if position < 0 else position].copy()

    def forward(self, lengths):
        """A decode step appends first and sees all; a longer one attends to the past, then appends."""
        total, decode = sum(lengths.values()), max(lengths.values()) == 1
        new = self.rng.standard_normal((self.layers, total, self.width)).astype(self.dtype)
        q = self.rng.standard_normal((self.layers, total, self.heads, self.width)).astype(self.dtype)
        past = self.kv.copy()
        rows = np.split(new, np.cumsum(list(lengths.values()))[:-1], axis=1)
        for seq, part in zip(lengths, rows, strict=True):
            self.kv[seq] = np.concatenate([self.kv[seq], part], axis=1)
        seen = self.kv if decode else past
        runtime("kv_state_begin_forward")(self.cache, tvm_cache.shape(lengths), tvm_cache.shape(lengths.values()))
        for layer in range(self.layers):
            kv = tvm.runtime.tensor(new[layer])
            if decode:
                runtime("attention_kv_cache_append_mla_kv")(self.cache, layer, kv)
            if any(seen[seq].shape[1] for seq in lengths):
                self.check(layer, lengths, q[layer], seen)
            if not decode:
                runtime("attention_kv_cache_append_mla_kv")(self.cache, layer, kv)
        runtime("kv_state_end_forward")(self.cache)

    def check(self, layer, lengths, q, seen):
        out, lse = empty(len(q), self.heads, self.latent, dtype=self.dtype), empty(len(q), self.heads)
        scale = self.width**-0.5
        runtime("attention_kv_cache_cross_attention")(self.cache, layer, scale, tvm.runtime.tensor(q), out, lse)
        ends = np.cumsum(list(lengths.values()))
        rows = dict(zip(lengths, np.split(q, ends[:-1]), strict=True))

        def definition(how):
            parts = []
            for seq, queries in rows.items():
                kv = seen[seq][layer][:, None]
                visible = [list(range(len(kv)))] * len(queries)
                parts.append(how.attend(queries, kv, kv[..., : self.latent], visible, scale))
            return np.concatenate(parts)

        assert_close(out.numpy(), definition, f"layer {layer}")


# any order of calls ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["fp32-d64-normal", "fp16-d128-normal", "fp32-d64-inline"])
def test_random_walk(name, seed):
    cache, rng = cache_of(CONFIGS[name], seed=seed, capacity=2048), np.random.default_rng(seed)
    fresh = iter(range(1000))
    cache.add(next(fresh))
    cache.forward({0: int(rng.integers(1, 50))})
    for _ in range(25):
        seqs = [int(seq) for seq in rng.permutation(list(cache.model.sequences))]
        some = seqs[: int(rng.integers(1, len(seqs) + 1))]
        kind = rng.choice(["add", "fork", "fork", "decode", "decode", "prefill", "pop", "remove", "tree", "tree"])
        if kind == "add" and len(seqs) < 7:
            cache.add(new := next(fresh))
            cache.forward({new: int(rng.integers(1, 40))})
        elif kind == "fork" and len(seqs) < 7:
            length = len(cache.model.sequences[seqs[0]])
            cache.fork(seqs[0], next(fresh), int(rng.choice([-1, length // 16 * 16, rng.integers(1, length + 1)])))
        elif kind == "decode":
            cache.forward(dict.fromkeys(some, 1))
        elif kind == "prefill":
            cache.forward({seq: int(rng.integers(1, 20)) for seq in some})
        elif kind == "pop":
            cache.popn(seqs[0], int(rng.integers(0, len(cache.model.sequences[seqs[0]]))))
        elif kind == "remove" and len(seqs) > 2:
            cache.remove(seqs[0])
        elif kind == "tree" and cache.config.rope != "inline":
            random_trees(cache, rng, some)
        if len(cache.model.sequences) > 5:
            cache.remove(seqs[-1])
    cache.check_stored()
    cache.check_empty()


def random_trees(cache, rng, seqs):
    sizes = [int(rng.integers(4, 12)) for _ in seqs]
    trees = [[int(rng.integers(-1, node)) for node in range(size)] for size in sizes]
    trees[-1][:3] = [-1, 0, 0]  # T2: the last tree must not be a chain
    cache.forward(dict(zip(seqs, sizes, strict=True)), trees)
    cache.commit({seq: int(rng.integers(-1, size)) for seq, size in zip(seqs, sizes, strict=True)})


# data that break careless kernels ----------------------------------------------------------------------------------


def test_stale_nan_in_reused_pages():
    cache = cache_of(SMALL, capacity=128)
    cache.add(0)
    qkv = cache.draw(120)
    qkv[:, :, 8:] = np.nan
    cache.forward({0: 120}, qkv=qkv, check=False)
    cache.remove(0)
    cache.add(1, 2)
    cache.forward({1: 20, 2: 5})
    cache.forward({1: 3, 2: 3}, [[-1, 0, 0], [-1, -1, 1]])
    cache.commit({1: 2, 2: 0})
    for lengths in ({1: 1, 2: 1}, {1: 3, 2: 1}):
        cache.forward(lengths)
    cache.check_stored()


@pytest.mark.parametrize("scale", [1e-3, 4])
def test_tiny_and_large_logits(scale):
    cache = cache_of(SMALL)
    cache.add(0, 1)
    for lengths in ({0: 40, 1: 3}, {0: 4, 1: 5}, {0: 1, 1: 1}):
        cache.forward(lengths, qkv=cache.draw(sum(lengths.values()), scale))
    cache.fork(0, 2)
    cache.forward({2: 4, 0: 4}, [[-1, 0, 0, 1], [-1, 0, 0, 1]], cache.draw(8, scale))


# what fails with TVM's own generators ------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("forked", [False, True])
def test_forest_without_a_prefix_and_large_logits(forked, rounds):
    """T5: the first column a row visits is masked; theirs give NaN."""
    cache = cache_of(SMALL)
    cache.add(0)
    if forked:
        cache.forward({0: 32})
        cache.fork(0, 1, 32)
    seq = int(forked)
    cache.forward({seq: 4}, [[-1, -1, 0, 1]], cache.draw(4, 20))
    if rounds == 2:
        cache.forward({seq: 3}, [[1, -1, 2]], cache.draw(3, 20))


@pytest.mark.parametrize("steps", [[20], [20, 4], [20, 1], "tree", "tree twice"])
def test_visible_logits_below_minus_50000(steps):
    """T6: theirs let the masked token, or nothing, win."""
    cache = cache_of(SMALL.but(rope="none"))
    cache.add(0)
    for new in steps if isinstance(steps, list) else ():
        cache.forward({0: new}, qkv=very_negative(cache, new))
    if isinstance(steps, str):
        cache.forward({0: 4}, [[-1, -1, 0, 1]], very_negative(cache, 4))
    if steps == "tree twice":
        cache.forward({0: 2}, [[1, 2]], very_negative(cache, 2))


def very_negative(cache, tokens):
    qkv = cache.draw(tokens)
    qkv[:, :, :8] = 40 + qkv[:, :, :8] / 10
    qkv[:, :, 8:10] = -400 + qkv[:, :, 8:10] / 100
    return qkv


@pytest.mark.parametrize("what", ["value", "key"])
@pytest.mark.parametrize("rounds", [1, 2])
def test_nan_in_a_rejected_sibling(rounds, what):
    """T7: NaN reaches the node's own row and its descendants' only, and is gone with it."""
    cache = cache_of(SMALL)
    cache.add(0)
    cache.forward({0: 20})
    qkv = cache.draw(4)
    qkv[:, 1, slice(10, 12) if what == "value" else slice(8, 10)] = np.nan
    cache.forward({0: 4}, [[-1, -1, 0, 1]], qkv)
    if rounds == 1:
        cache.commit({0: 2})
        cache.forward({0: 1})
        cache.check_stored()
    else:
        cache.forward({0: 2}, [[0, 2]])


@pytest.mark.parametrize("rope", ["none", "normal", "inline"])
def test_layers_with_windows_of_their_own(rope):
    """T19: theirs give NaN now and then where the first tokens of the past are outside a row's window."""
    cache = cache_of(SMALL.but(rope=rope, layers="fsf", num_layers=3, layer_window=32))
    cache.add(0, 1)
    for new in (20, 9, 32, 7, 1, 1, 17, *[1] * 20, 3):
        cache.forward({0: new, 1: max(new // 2, 1)})
    cache.check_empty()


def test_pages_of_32_with_trees():
    """T10: theirs know pages of 16 only when a tree takes several rounds."""
    cache = cache_of(SMALL.but(page_size=32), capacity=256)
    cache.add(0)
    cache.forward({0: 37})
    cache.fork(0, 1)
    cache.forward({0: 4, 1: 1})
    cache.forward({0: 7, 1: 5}, [BINARY, STAR])
    cache.commit({0: 6, 1: 3})
    cache.check_stored()
    cache.forward({0: 1}, [[-1]])
    cache.forward({0: 3}, [[0, 0, 1]])
