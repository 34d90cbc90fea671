"""`PagedKVCache` against plain lists of tokens: contents, lengths and free pages after every step.

``TREEATTN_CACHE_EXAMPLES=2000`` runs the long form.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import treeattn as ta
from treeattn import cache_ops

EXAMPLES = int(os.environ.get("TREEATTN_CACHE_EXAMPLES", "300"))
LAYERS, DIM = 2, 2
HALF = np.array([1.0, 0.5], np.float32)


@dataclass
class Model:
    """A sequence as a list of tokens, and which pages it should be on."""

    pages: list = field(default_factory=list)
    tokens: list = field(default_factory=list)
    dropped: range = range(0)
    parents: list = field(default_factory=list)  # of the uncommitted tree
    pending: list = field(default_factory=list)
    step: object = None

    @property
    def kept(self):
        return self.tokens[: self.dropped.start] + self.tokens[self.dropped.stop :]

    @property
    def columns(self):
        return len(self.kept) + len(self.pending)


def rows(tokens, layer):
    """Key rows of tokens, each like no other; values are the negative."""
    return (np.array(tokens, np.float32) * 8 + layer)[:, None] * HALF


class CacheMachine(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([1, 2, 3, 4, 16]))
    def start(self, page_size):
        self.size, self.models = page_size, {}
        self.num_pages = 24 // page_size + 2  # soon full
        self.cache = ta.PagedKVCache(LAYERS, 1, DIM, self.num_pages, page_size, "float32")
        for layer in range(LAYERS):
            self.cache.pages(layer)[...] = np.nan
        self.fresh, self.page_names = count(1), count()
        for length in (11, 4):  # an empty cache has little to get wrong
            self.models[seq := self.cache.add()] = Model()
            self.grow_by({seq: list(range(-1, length - 1))}, {seq: length})
            self.keep(self.models[seq].step, {seq: length})
        self.fork_at(seq, 4)

    # what the model says of pages

    def held(self):
        return Counter(page for model in self.models.values() for page in model.pages)

    def trim(self, model):
        del model.pages[-(-model.columns // self.size) :]

    def grow(self, growth):
        """Pages after a step, or None where they do not suffice: each sequence in turn takes what it needs."""
        pages = {seq: list(model.pages) for seq, model in self.models.items()}
        for seq, new in growth.items():
            columns, held = self.models[seq].columns, Counter(page for some in pages.values() for page in some)
            if new and columns % self.size and held[pages[seq][-1]] > 1:
                pages[seq][-1] = next(self.page_names)
            while len(pages[seq]) * self.size < columns + new:
                pages[seq].append(next(self.page_names))
        return None if len({page for some in pages.values() for page in some}) > self.num_pages else pages

    # rules

    @rule()
    def add(self):
        self.models[self.cache.add()] = Model()

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def fork(self, data):
        seq, model = self.pick(data)
        length = data.draw(self.length(model))
        if model.step:
            with pytest.raises(ta.CacheError, match="uncommitted"):
                self.cache.fork(seq, length)
        elif length in model.dropped[1:]:
            with pytest.raises(ta.CacheError, match="were dropped"):
                self.cache.fork(seq, length)
        else:
            self.fork_at(seq, length)

    def fork_at(self, seq, length):
        model = self.models[seq]
        child = Model(
            list(model.pages), model.tokens[:length], model.dropped if length > model.dropped.start else range(0)
        )
        self.trim(child)
        self.models[self.cache.fork(seq, length)] = child

    @precondition(lambda self: self.models)
    @rule(data=st.data(), seed=st.integers(0, 2**32), deep=st.booleans())
    def begin(self, data, seed, deep):
        rng = np.random.default_rng(seed)
        seqs = data.draw(st.lists(st.sampled_from(list(self.models)), unique=True, min_size=1))
        trees = {seq: self.extended(rng, self.models[seq].parents, deep) for seq in seqs}
        growth = {seq: len(parents) - len(self.models[seq].parents) for seq, parents in trees.items()}
        new = {seq: self.spelled(rng, self.models[seq].parents, parents) for seq, parents in trees.items()}
        if self.grow(growth) is None:
            with pytest.raises(ta.CacheFullError, match="free pages"):
                self.cache.begin(new)
        else:
            self.grow_by(trees, new)

    def grow_by(self, trees, new):
        """Begin ``new``, after which the trees so far are ``trees``, and append in every layer."""
        growth = {seq: len(parents) - len(self.models[seq].parents) for seq, parents in trees.items()}
        pages, step = self.grow(growth), self.cache.begin(new)
        tokens = {seq: [next(self.fresh) for _ in range(count)] for seq, count in growth.items()}
        assert step.q_indptr.tolist() == np.cumsum([0, *growth.values()]).tolist()
        assert step.positions.tolist() == [
            len(self.models[seq].tokens) + depth(parents, node)
            for seq, parents in trees.items()
            for node in range(len(parents) - growth[seq], len(parents))
        ]
        for layer in range(LAYERS):
            k = rows([token for some in tokens.values() for token in some], layer)[:, None]
            step.append(layer, k, -k)
        for seq, parents in trees.items():
            model = self.models[seq]
            model.pending, model.parents, model.step = model.pending + tokens[seq], parents, step
        for seq, names in pages.items():
            self.models[seq].pages = names

    @precondition(lambda self: any(model.step for model in self.models.values()))
    @rule(data=st.data())
    def commit(self, data):
        waiting = [seq for seq, model in self.models.items() if model.step]
        step = self.models[data.draw(st.sampled_from(waiting))].step
        mine = [seq for seq in waiting if self.models[seq].step is step]
        chosen = data.draw(st.permutations(mine))[: data.draw(st.integers(1, len(mine)))]
        accepted = {seq: self.path(data, self.models[seq]) for seq in chosen}
        self.keep(step, accepted)

    def keep(self, step, accepted):
        self.cache.commit(step, accepted)
        for seq, path in accepted.items():
            model = self.models[seq]
            model.tokens += [model.pending[node] for node in (range(path) if isinstance(path, int) else path)]
            self.settle(model)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def truncate(self, data):
        seq, model = self.pick(data)
        length = data.draw(self.length(model) | st.just(len(model.tokens) + 1))
        if length > len(model.tokens):
            with pytest.raises(ta.IndexRangeError, match="length: expected 0 to"):
                self.cache.truncate(seq, length)
        elif length in model.dropped[1:]:
            with pytest.raises(ta.CacheError, match="were dropped"):
                self.cache.truncate(seq, length)
        else:
            self.cache.truncate(seq, length)
            model.dropped = model.dropped if length > model.dropped.start else range(0)
            del model.tokens[length:]
            self.settle(model)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def remove(self, data):
        seq, model = self.pick(data)
        self.cache.remove(seq)
        del self.models[seq]
        for call in (self.cache.length, self.cache.remove, self.cache.fork):
            with pytest.raises(ta.IndexRangeError, match="removed"):
                call(seq)
        if model.step:
            with pytest.raises(ta.CacheError, match="ended"):
                model.step.append(0, np.zeros((0, 1, DIM), "f4"), np.zeros((0, 1, DIM), "f4"))

    @rule(window=st.integers(1, 6), sink=st.integers(0, 4))
    def drop_outside(self, window, sink):
        settled = [seq for seq, model in self.models.items() if not model.step]
        if len(settled) < len(self.models):
            with pytest.raises(ta.CacheError, match="uncommitted"):
                self.cache.drop_outside(window, sink)
        before = len(self.held())
        freed = self.cache.drop_outside(window, sink, settled)
        for seq in settled:
            self.drop(self.models[seq], window, sink)
        assert freed == before - len(self.held())

    def drop(self, model, window, sink):
        """Drop each page on which no position is below the sink or at or past the window's first, or partly filled."""
        first = len(model.tokens) - window + 1
        stays = [position < sink or position >= first for position in range(len(model.tokens))]
        kept = [position for position in range(len(model.tokens)) if position not in model.dropped]
        on_page = [kept[i : i + self.size] for i in range(0, len(kept), self.size)]
        gone = [len(page) == self.size and not any(stays[position] for position in page) for page in on_page]
        dropped = [position for page, is_gone in zip(on_page, gone, strict=True) if is_gone for position in page]
        every = sorted([*model.dropped, *dropped])
        if dropped and every == list(range(every[0], every[-1] + 1)):  # one gap is all there may be
            model.pages = [page for page, is_gone in zip(model.pages, gone, strict=True) if not is_gone]
            model.dropped = range(every[0], every[-1] + 1)

    @precondition(lambda self: any(not model.step for model in self.models.values()))
    @rule(data=st.data())
    def save_and_load(self, data):
        seq = data.draw(st.sampled_from([seq for seq, model in self.models.items() if not model.step]))
        model = self.models[seq]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "sequence.safetensors"
            self.cache.save(seq, path)
            assert list(Path(folder).iterdir()) == [path]
            if len(self.held()) + len(model.pages) > self.num_pages:
                with pytest.raises(ta.CacheFullError):
                    self.cache.load(path)
                return
            copy = self.cache.load(path)
        self.models[copy] = Model([next(self.page_names) for _ in model.pages], list(model.tokens), model.dropped)

    # what holds at any time

    @invariant()
    def pages_are_counted(self):
        if not hasattr(self, "models"):
            return
        held = self.held()
        assert (self.cache.used_pages, self.cache.free_pages) == (len(held), self.num_pages - len(held))
        inner = {seq: list(self.cache._sequences[seq].pages) for seq in self.models}
        alike = {}
        for seq, model in self.models.items():
            assert len(inner[seq]) == len(model.pages)
            for page, name in zip(inner[seq], model.pages, strict=True):
                assert alike.setdefault(page, name) == name  # shared where the model shares, and nowhere else
        assert len(alike) == len(held)
        for model in self.models.values():
            for column in range(len(model.kept), model.columns):  # what may be written is nobody else's
                assert held[model.pages[column // self.size]] == 1

    @invariant()
    def contents_are_right(self):
        if not hasattr(self, "models"):
            return
        assert self.cache.seqs == tuple(self.models)
        assert [self.cache.length(seq) for seq in self.models] == [len(model.tokens) for model in self.models.values()]
        slots, tokens = [], []
        for seq, model in self.models.items():
            pages = self.cache._sequences[seq].pages
            slots += [pages[c // self.size] * self.size + c % self.size for c in range(model.columns)]
            tokens += [*model.kept, *model.pending]
            assert self.is_equal(self.cache.read(1, seq), rows(model.kept, 1))
        for layer in range(LAYERS):
            assert self.is_equal(cache_ops.gather(self.cache.pages(layer), np.array(slots, int)), rows(tokens, layer))

    def is_equal(self, kv, want):
        k, v = kv
        return np.array_equal(k[:, 0], want) and np.array_equal(v[:, 0], -want)

    def teardown(self):
        if hasattr(self, "models"):
            for seq in list(self.models):
                self.cache.remove(seq)
            assert self.cache.free_pages == self.num_pages

    # draws

    def pick(self, data):
        seq = data.draw(st.sampled_from(list(self.models)))
        return seq, self.models[seq]

    def length(self, model):
        """Any length, or one at an edge of what was dropped."""
        edges = {0, model.dropped.start, model.dropped.stop, len(model.tokens)}
        return st.sampled_from(sorted(edges)) | st.integers(0, len(model.tokens))

    def settle(self, model):
        model.pending, model.parents, model.step = [], [], None
        self.trim(model)

    def extended(self, rng, parents, deep):
        """The tree so far and a few nodes more, some of which come before their parents."""
        old, total = len(parents), len(parents) + int(rng.integers(0, 7))
        order = [*range(old), *rng.permutation(np.arange(old, total)).tolist()]
        new = dict(enumerate(parents))
        for place in range(old, total):
            above = order[place - 1] if deep and place else int(rng.choice([-1, *order[:place]]))
            new[order[place]] = above
        return [new[node] for node in range(total)]

    def spelled(self, rng, old, parents):
        """A chain may be given as a number."""
        is_chain = parents == list(range(-1, len(parents) - 1))
        if is_chain and rng.random() < 0.7:
            return len(parents) - len(old)
        return ta.TokenTree.from_parents(parents)

    def path(self, data, model):
        is_chain = model.parents == list(range(-1, len(model.parents) - 1))
        if is_chain and data.draw(st.booleans()):
            return data.draw(st.integers(0, len(model.parents)))
        node = data.draw(st.integers(-1, len(model.parents) - 1))
        path = []
        while node >= 0:
            path.append(node)
            node = model.parents[node]
        return path[::-1]


def depth(parents, node):
    return 0 if parents[node] < 0 else 1 + depth(parents, parents[node])


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=EXAMPLES, stateful_step_count=25, deadline=None)
