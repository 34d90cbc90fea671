"""Attention through `PagedKVCache` against the float64 oracle over a plain record of what every path saw.

`Engine` keeps, for every sequence, the keys and values it should hold and attends to them as ragged arrays: no page, no
slot and no step of the cache is in the record. Faults of TVM's cache are tests here, by the names of docs/from-tvm.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

import treeattn as ta
from treeattn.arrays import numpy_dtype
from treeattn.testing import Case, assert_within_budget

TREE = ta.TokenTree.from_parents([-1, 0, 0, 1, 1, 2])
FOREST = ta.TokenTree.from_parents([-1, -1, 0, 1, 0, 3])
BACKWARDS = ta.TokenTree.from_parents([3, 0, 3, -1, 1])  # parents behind their children
SIZES = {"kv_heads": 2, "head_dim": 24, "page_size": 4}


@dataclass
class Record:
    """What a sequence should hold: rows of each layer."""

    committed: list = field(default_factory=list)
    pending: list = field(default_factory=list)
    tree: object = None


class Engine:
    """A cache with random keys and values, and the record beside it."""

    def __init__(self, num_layers=2, num_pages=64, group=2, dtype="float32", d_latent=None, seed=0):
        self.rng, self.num_layers, self.dtype, self.d_latent = np.random.default_rng(seed), num_layers, dtype, d_latent
        if d_latent:
            self.cache = ta.PagedKVCache.latent(num_layers, d_latent, 8, num_pages, 4, dtype)
            self.heads, self.dim = 1, d_latent + 8
        else:
            self.cache = ta.PagedKVCache(num_layers, num_pages=num_pages, dtype=dtype, **SIZES)
            self.heads, self.dim = SIZES["kv_heads"], SIZES["head_dim"]
        self.q_heads, self.records = self.heads * group, {}
        for layer in range(num_layers):
            self.cache.pages(layer)[...] = np.nan

    def normal(self, *shape):
        return self.rng.standard_normal(shape, np.float32).astype(numpy_dtype(self.dtype))

    def add(self):
        self.records[seq := self.cache.add()] = Record()
        return seq

    def fork(self, seq, length=None):
        self.records[child := self.cache.fork(seq, length)] = Record(self.records[seq].committed[:length])
        return child

    def remove(self, seq):
        self.cache.remove(seq)
        del self.records[seq]

    def truncate(self, seq, length):
        self.cache.truncate(seq, length)
        record = self.records[seq]
        record.committed, record.pending, record.tree = record.committed[:length], [], None

    def forward(self, new, windows=(None,), sink=0, attend=True, **parts):
        """Begin a step, append, attend in every layer, compare with the oracle."""
        step = self.cache.begin(new)
        for seq, given in new.items():
            record = self.records[seq]
            old = len(record.pending)
            tree = given if isinstance(given, ta.TokenTree) else ta.TokenTree.chain(old + given)
            for _ in range(tree.num_nodes - old):
                record.pending.append([self.normal(2, self.heads, self.dim) for _ in range(self.num_layers)])
            record.tree = tree
        for layer in range(self.num_layers):
            self.layer(step, layer, new, windows[layer % len(windows)], sink, attend, parts)
        return step

    def layer(self, step, layer, seqs, window, sink, attend, parts):
        records = [self.records[seq] for seq in seqs]
        counts = np.diff(step.q_indptr)
        new = [
            row[layer]
            for record, n in zip(records, counts, strict=True)
            for row in record.pending[len(record.pending) - n :]
        ]
        k, v = (np.array([row[half] for row in new], numpy_dtype(self.dtype)) for half in (0, 1))
        shape = (-1, self.heads, self.dim)
        if self.d_latent:
            step.append(layer, k.reshape(-1, self.dim))
        else:
            step.append(layer, k.reshape(shape), v.reshape(shape))
        if not attend:
            return
        q = self.normal(int(counts.sum()), self.q_heads, self.dim)
        out, lse = step.attention(layer, q, window=window, sink=sink, **parts)
        rows = [[row[layer] for row in record.committed + record.pending] for record in records]
        indptr = np.cumsum([0, *map(len, rows)])
        every = np.array([row for some in rows for row in some], numpy_dtype(self.dtype)).reshape(-1, 2, *shape[1:])
        k, v = every[:, 0], every[:, 0, :, : self.d_latent] if self.d_latent else every[:, 1]
        mask = ta.Tree([record.tree for record in records])
        if window:
            mask = mask & (ta.Window(window) | ta.Sink(sink))
        scale = parts.pop("sm_scale", None)
        assert_within_budget(out, lse, Case(q, ta.RaggedKV(k, v, indptr), mask, step.q_indptr, scale, parts))

    def commit(self, step, accepted):
        self.cache.commit(step, accepted)
        for seq, path in accepted.items():
            record = self.records[seq]
            record.committed += [record.pending[node] for node in (range(path) if isinstance(path, int) else path)]
            record.pending, record.tree = [], None

    def check_contents(self):
        for seq, record in self.records.items():
            assert self.cache.length(seq) == len(record.committed)
            for layer in range(self.num_layers):
                rows = np.array([row[layer] for row in record.committed]).reshape(-1, 2, self.heads, self.dim)
                read = self.cache.read(layer, seq)
                for half, got in enumerate((read[:, None],) if self.d_latent else read):
                    np.testing.assert_array_equal(got, rows[:, half])

    def prompt(self, *lengths):
        seqs = [self.add() for _ in lengths]
        new = dict(zip(seqs, lengths, strict=True))
        self.commit(self.forward(new, attend=False), new)
        return seqs


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_prompts_trees_and_decoding(dtype):
    engine = Engine(dtype=dtype)
    a, b, c = engine.add(), engine.add(), engine.add()
    engine.commit(engine.forward({a: 7, b: 1, c: 4}), {a: 7, b: 1, c: 3})
    engine.commit(engine.forward({b: TREE, a: FOREST, c: BACKWARDS}), {c: [3, 0, 1], b: [0, 2, 5], a: [1]})
    engine.check_contents()
    engine.commit(engine.forward({c: 1, a: 1, b: 1}), {a: 1, b: 1, c: 1})
    engine.check_contents()
    for seq in (a, b, c):
        engine.remove(seq)
    assert engine.cache.free_pages == 64


def test_t2_commit_of_a_tree_beside_a_chain():
    engine = Engine()
    a, b = engine.prompt(5, 9)
    step = engine.forward({a: TREE, b: 4})
    engine.commit(step, {a: [0, 2, 5], b: 4})
    engine.check_contents()
    engine.commit(engine.forward({a: 1, b: 1}), {a: 1, b: 1})


def test_t3_commit_in_another_order_than_begin():
    engine = Engine()
    a, b, c = engine.prompt(5, 9, 2)
    step = engine.forward({a: TREE, b: FOREST, c: TREE})
    engine.commit(step, {c: [0, 1, 4], a: [0, 2, 5]})
    engine.commit(step, {b: [1, 3, 5]})
    engine.check_contents()
    engine.commit(engine.forward({b: 1, c: 1, a: 1}), {a: 1, b: 1, c: 1})


def test_t4_forked_beside_plain_sequences_and_trees_of_several_rounds():
    engine = Engine()
    a, b = engine.prompt(10, 6)
    child = engine.fork(a)
    grandchild = engine.fork(child, 7)
    engine.forward({a: TREE, grandchild: 2, b: FOREST, child: ta.TokenTree.star(3)})
    second = ta.TokenTree.from_parents([*TREE.parents, 5, 5, 3, 6])
    engine.forward(
        {b: 0, child: ta.TokenTree.from_parents([-1, 0, 0, 2, 1]), a: second} | {grandchild: 3} | {b: FOREST}
    )
    third = ta.TokenTree.from_parents([*second.parents, 9, 0])
    step = engine.forward({a: third, b: ta.TokenTree.from_parents([*FOREST.parents, 5, -1])})
    engine.commit(step, {b: [1, 3, 5, 6], a: [0, 2, 5, 6, 9, 10]})
    engine.check_contents()
    for seq in (child, grandchild):
        engine.truncate(seq, engine.cache.length(seq))
    engine.commit(engine.forward({child: 1, a: 1, grandchild: TREE, b: 1}), {a: 1, grandchild: [0, 1]})
    engine.check_contents()


def test_the_accepted_nodes_need_not_be_together():
    """Accepted nodes scattered over the tree are dense before the next step, which takes the prefix to be so."""
    engine = Engine()
    (a,) = engine.prompt(3)
    scattered = ta.TokenTree.from_parents([-1, *[0] * 20, *[20] * 20, 40])
    engine.commit(engine.forward({a: scattered}), {a: [0, 20, 40, 41]})
    engine.check_contents()
    engine.commit(engine.forward({a: TREE}), {a: [0, 2]})
    engine.check_contents()


def test_tokens_are_moved_one_by_one_and_not_by_page():
    """Source and target in one page, in neighbouring ones, and a target that is another node's source."""
    for prompt in range(1, 9):
        engine = Engine(num_layers=1)
        (a,) = engine.prompt(prompt)
        engine.commit(engine.forward({a: BACKWARDS}, attend=False), {a: [3, 0, 1, 4]})
        engine.check_contents()


@pytest.mark.parametrize("length", [0, 3, 4, 5, 8, 10])
def test_rollback_then_append_is_like_a_fresh_cache(length):
    engine = Engine()
    (a,) = engine.prompt(10)
    child = engine.fork(a)
    engine.forward({a: TREE})  # and never committed
    engine.truncate(a, length)
    engine.commit(engine.forward({a: 6}), {a: 6})
    engine.check_contents()
    fresh = Engine()
    (b,) = fresh.prompt(length)
    fresh.records[b].committed[:] = engine.records[a].committed[:length]
    for layer in range(2):
        for half in (0, 1):
            for position, row in enumerate(engine.records[a].committed):
                np.testing.assert_array_equal(engine.cache.read(layer, a)[half][position], row[layer][half])
    engine.commit(engine.forward({child: 1, a: TREE}), {child: 1})


def test_a_tree_in_rounds_gives_the_bits_of_the_tree_at_once():
    """And those of decoding the path."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((6, heads, 24), np.float32) for heads in (4, 2, 2))
    prompt = rng.standard_normal((2, 5, 2, 24), np.float32)

    def start():
        cache = ta.PagedKVCache(1, num_pages=16, dtype="float32", **SIZES)
        step = cache.begin({(seq := cache.add()): 5})
        step.append(0, *prompt)
        cache.commit(step, {seq: 5})
        return cache, seq

    def attend(cache, seq, new, rows):
        step = cache.begin({seq: new})
        step.append(0, k[rows], v[rows])
        return step, step.attention(0, q[rows])

    cache, seq = start()
    _, (whole, whole_lse) = attend(cache, seq, TREE, np.arange(6))
    cache, seq = start()
    for upto, rows in ((1, [0]), (3, [1, 2]), (6, [3, 4, 5])):
        part = ta.TokenTree.from_parents(TREE.parents[:upto])
        step, (out, lse) = attend(cache, seq, part, np.array(rows))
        np.testing.assert_array_equal(out, whole[rows])
        np.testing.assert_array_equal(lse, whole_lse[rows])
    cache.commit(step, {seq: [0, 2, 5]})
    cache, seq = start()
    for node in (0, 2, 5):
        step, (out, _) = attend(cache, seq, 1, np.array([node]))
        np.testing.assert_array_equal(out[0], whole[node])
        cache.commit(step, {seq: 1})


def test_layers_with_windows_of_their_own():
    engine = Engine(num_layers=3)
    a, b = engine.prompt(30, 11)
    step = engine.forward({a: TREE, b: FOREST}, windows=(None, 6, 17), sink=0)
    engine.commit(step, {a: [0, 2, 5], b: [0]})
    engine.commit(engine.forward({a: 1, b: 3}, windows=(6, 17, 9), sink=3), {a: 1, b: 3})


def test_dropping_what_no_window_sees_changes_no_output():
    """The oracle still has every token."""
    engine = Engine()
    a, b, c = engine.prompt(41, 6, 20)
    child = engine.fork(a)
    assert engine.cache.drop_outside(9, 5, [a]) == 0  # the fork holds those pages still
    assert engine.cache.drop_outside(9, 5) == 6 + 1  # positions 8 to 31 of a and its fork, 8 to 11 of c
    assert engine.cache.length(a) == 41 and len(engine.cache.read(0, a)[0]) == 41 - 24
    for windows in ((9,), (7, 3)):
        step = engine.forward({a: TREE, b: FOREST, c: 3, child: 2}, windows=windows, sink=5)
        engine.commit(step, {a: [0, 2, 5], b: [0], c: 3, child: 1})
    engine.cache.drop_outside(9, 2)
    engine.commit(engine.forward({a: 1, c: TREE, b: 1}, windows=(9,), sink=2), {a: 1, c: [0, 1], b: 1})
    step = engine.cache.begin({a: 1, b: 1})
    for options in ({}, {"window": 14}, {"window": 9, "sink": 5}):
        q = k = np.zeros((2, 2, 24), np.float32)
        step.append(0, k, k)
        with pytest.raises(ta.CacheError, match=f"dropped from sequence {a}, got window="):
            step.attention(0, q, **options)
    for seq in (a, b, c, child):
        engine.remove(seq)
    assert engine.cache.free_pages == 64


def test_latent_cache():
    engine = Engine(d_latent=16, group=4)
    a, b = engine.prompt(9, 3)
    engine.commit(engine.forward({a: TREE, b: 2}, sm_scale=0.3), {b: 1, a: [0, 1, 4]})
    engine.check_contents()
    child = engine.fork(a)
    engine.commit(engine.forward({child: TREE, a: 1}, sm_scale=0.3), {child: [0, 2, 5], a: 1})
    engine.check_contents()


def test_logit_parts_and_rope_of_a_step():
    engine = Engine(num_layers=1)
    a, b = engine.prompt(12, 5)
    rope = ta.Rope(theta=1e4)
    sinks, slopes = np.linspace(-1, 1, 4, dtype=np.float32), np.linspace(0.1, 0.4, 4, dtype=np.float32)
    engine.forward({a: TREE, b: FOREST}, rope=rope, softcap=3.0, sink_logits=sinks, alibi=slopes)


def test_keys_may_be_turned_when_they_are_appended():
    """As good as turning them when they are read."""
    rng = np.random.default_rng(0)
    rope, outs = ta.Rope(theta=500.0), []
    q, k, v = (rng.standard_normal((6, heads, 24), np.float32) for heads in (4, 2, 2))
    for early in (True, False):
        cache = ta.PagedKVCache(1, num_pages=16, dtype="float32", **SIZES)
        step = cache.begin({cache.add(): TREE})
        assert step.positions.tolist() == [0, 1, 1, 2, 2, 2]
        step.append(0, k, v, rope=rope if early else None)
        queries = rope.rotate(q, step.positions) if early else q
        outs.append(step.attention(0, queries, rope=None if early else rope)[0])
    np.testing.assert_allclose(*outs, rtol=1e-5, atol=1e-5)


def test_layers_with_equal_options_share_a_plan(monkeypatch):
    from treeattn.cache import step as steps

    made = []
    plan = steps.api.plan
    monkeypatch.setattr(steps.api, "plan", lambda *args, **options: made.append(options) or plan(*args, **options))
    engine = Engine(num_layers=6)
    (a,) = engine.prompt(20)
    engine.forward({a: TREE}, windows=(None, None, 8))
    assert len(made) == 2


def test_a_batch_without_rows_or_sequences():
    engine = Engine()
    a, b = engine.prompt(3, 0)
    engine.commit(engine.forward({a: 0, b: 0}), {a: 0, b: 0})
    engine.commit(engine.forward({a: 0, b: 2}), {a: [], b: [0]})
    engine.commit(engine.forward({}), {})
    engine.check_contents()


def test_torch_in_torch_out():
    torch = pytest.importorskip("torch")
    cache = ta.PagedKVCache(1, num_pages=4, dtype="bfloat16", **SIZES)
    step = cache.begin({(seq := cache.add()): TREE})
    k, v, q = (torch.randn(6, heads, 24, dtype=torch.bfloat16) for heads in (2, 2, 4))
    step.append(0, k, v)
    out, lse = step.attention(0, q)
    assert isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16 and isinstance(lse, torch.Tensor)
    want, _ = ta.attention(q, ta.RaggedKV(k, v, [0, 6]), ta.Tree([TREE]))
    assert torch.equal(out, want)
    assert cache.used_pages == 2 and cache.length(seq) == 0


def test_memory_of_a_part_may_be_reused_for_the_next_layer():
    """A plan belongs to the values of the sink logits, not to where they lie."""
    cache = ta.PagedKVCache(2, 1, 16, 4, 4, "float32")
    step = cache.begin({cache.add(): 3})
    x, sinks = np.ones((3, 1, 16), np.float32), np.zeros(1, np.float32)
    lses = []
    for layer, sink in enumerate((0.0, 8.0)):
        step.append(layer, x, x)
        sinks[:] = sink
        lses.append(step.attention(layer, x, sink_logits=sinks)[1])
        assert np.array_equal(lses[-1], step.attention(layer, x, sink_logits=[sink])[1])
    assert (lses[0] < lses[1]).all()
