"""TVM's paged KV cache with any generators of its kernels, beside a plain float64 model of what it must hold and give.

`Kernels` builds what one namespace of generators offers (TVM's ``kv_cache`` module, ``treeattn.tvm_compat``) as a user
of TVM would, each kernel once in the process. `RuntimeCache` is TVM's cache object with those kernels in it. `Model` is
the definition: lists of keys, values and positions. `CheckedCache` drives both and compares after every step.

How the runtime calls its kernels (TVM 0.27, CPU; seen by printing what it hands over):

* metadata (indptrs, page ids, lengths, positions, tree orders) are int32 views of one buffer, so they come with a byte
  offset that is a multiple of 16 only; a page table with a tree may have an offset of 256 or 304 bytes;
* q, k, v, out, lse and pages start at offset 0, 64-byte aligned; queries and ``lse`` are views of longer buffers;
* the paged kernels are called once for every fork depth with ``causal=0``, and their result is merged in place into the
  first one's; a sequence without pages at a depth has an empty page range and a last page length of 0;
* ``causal=1`` reaches the paged prefill only for layers with a window of their own (`AttnKind.MHA_SLIDING`): the keys
  are then the past, without the new tokens;
* ``rotary_mode`` is 1 for inline RoPE, else 0, and the cache's theta and scale are passed at every call.
"""

from __future__ import annotations

import importlib
import inspect
import os
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise

os.environ.setdefault("TVM_NUM_THREADS", "2")  # before TVM's thread pool starts

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm.relax.frontend.nn.llm.kv_cache import AttnKind, RopeMode
from tvm.target.codegen import llvm_get_system_cpu

LOG2_E = 1.4426950408889634
CPU = {"kind": "llvm", "mcpu": llvm_get_system_cpu()}


def generators_under_test():
    """`treeattn.tvm_compat`; with ``TREEATTN_TEST_GENERATORS=tvm`` TVM's own, which proves this harness."""
    if os.environ.get("TREEATTN_TEST_GENERATORS") == "tvm":
        return importlib.import_module("tvm.relax.frontend.nn.llm.kv_cache")
    reason = "treeattn.tvm_compat cannot be imported"
    return pytest.importorskip("treeattn.tvm_compat", reason=reason, exc_type=ImportError)


# kernels -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """What kernels and cache are made for."""

    q_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "float32"
    num_layers: int = 2
    page_size: int = 16
    rope: str = "normal"  # none, normal, inline
    sliding: bool = False  # sequences may have a window
    layers: str = ""  # one letter a layer: f full, s window of its own; empty: all full
    layer_window: int = 1024  # TVM 0.27 takes it when the cache is made
    theta: int = 10_000
    scale: int = 1

    def but(self, **changes) -> Config:
        return replace(self, **changes)

    @property
    def attn_kinds(self) -> list[int]:
        kinds = {"f": AttnKind.MHA, "s": AttnKind.MHA_SLIDING}
        return [int(kinds[kind]) for kind in self.layers or "f" * self.num_layers]


@cache
def build(generators, factory: str, *args, **options):
    """One kernel, compiled through TVM's normal path; `generators` is a module, or anything with its names."""
    return compiled(getattr(generators, factory)(*_thawed(args), **options))


def compiled(func):
    """A `PrimFunc` as a callable."""
    name = str(func.attrs["global_symbol"]) if func.attrs and "global_symbol" in func.attrs else "main"
    func = func.with_attr("global_symbol", name)
    return tvm.tirx.build(tvm.IRModule({name: func}), target=tvm.target.Target(CPU))[name]


def _thawed(args):
    return [dict(arg) if isinstance(arg, frozenset) else arg for arg in args]


def _paged(generators, factory: str, page_size: int) -> dict:
    """``page_size`` for the generators that have it; TVM's tree kernels do not (16 is theirs)."""
    has = "page_size" in inspect.signature(getattr(generators, factory)).parameters
    assert has or page_size == 16, f"{factory} has no page_size"
    return {"page_size": page_size} if has else {}


@dataclass(frozen=True)
class Kernels:
    """The kernels of one configuration, compiled at their first call; ``called`` has the names of those used."""

    generators: object
    config: Config
    called: set = field(default_factory=set, compare=False)

    def recipe(self, kind: str) -> tuple[str, tuple, dict]:
        """Factory, positional and named arguments, as `TIRPagedKVCache` gives them on a CPU."""
        c, rope = self.config, frozenset()
        heads = c.kv_heads, c.q_heads, c.head_dim
        factory, args, paged = {
            "append": ("_kv_cache_transpose_append", (c.kv_heads, c.head_dim, c.dtype), True),
            "ragged": ("_attention_prefill_ragged_cpu", (*heads, c.head_dim, c.dtype, rope), False),
            "prefill": ("_attention_prefill_cpu", (*heads, c.dtype, False, rope), True),
            "decode": ("_attention_decode_cpu", (*heads, c.dtype, False, rope), True),
            "prefill_window": ("_attention_prefill_cpu", (*heads, c.dtype, True, rope), True),
            "decode_window": ("_attention_decode_cpu", (*heads, c.dtype, True, rope), True),
            "tree": ("tree_attn_cpu", (*heads, c.dtype, rope), False),
            "tree_paged": ("tree_attn_with_paged_kv_cache_cpu", (*heads, c.dtype, rope), True),
            "merge": ("_merge_state_inplace_cpu", (c.dtype,), False),
            "rope": (
                "llama_rope_with_position_map",
                (c.theta, c.scale, c.head_dim, c.q_heads, c.kv_heads, c.dtype, rope, c.head_dim),
                False,
            ),
            "copy_page": ("_copy_single_page_cpu", (c.kv_heads, c.page_size, c.head_dim, c.dtype), False),
            "debug": ("_kv_cache_debug_get_kv", (c.num_layers, c.kv_heads, c.head_dim, c.dtype), False),
            "compact": ("_compact_kv_copy_cpu", (c.kv_heads, c.head_dim, c.dtype), True),
        }[kind]
        options = _paged(self.generators, factory, c.page_size) if paged else {}
        if kind == "prefill_window":
            options["sliding_window_size"] = c.layer_window
        return factory, args, options

    def direct(self, kind: str):
        """The compiled function itself."""
        factory, args, options = self.recipe(kind)
        return build(self.generators, factory, *args, **options)

    def lazy(self, kind: str):
        """A function that notes its use and compiles when first called: no scenario waits for kernels it never uses."""

        def call(*args):
            self.called.add(kind)
            return self.direct(kind)(*args)

        return tvm_ffi.convert(call)


# the cache of TVM --------------------------------------------------------------------------------------------------


def runtime(name: str):
    """A global function of the runtime."""
    return tvm.get_global_func(f"vm.builtin.{name}")


def shape(values):
    return tvm_ffi.Shape(list(values))


class RuntimeCache:
    """TVM's paged KV cache object; method names are those of its global functions."""

    def __init__(self, kernels: Kernels, *, max_seqs=8, capacity=1024, chunk=512, direct=False):
        c, self.config = kernels.config, kernels.config
        kernel = kernels.direct if direct else kernels.lazy
        tir = lambda kind: ["tirx", kernel(kind)]  # noqa: E731
        self.cache = runtime("paged_attention_kv_cache_create")(
            shape([max_seqs, capacity, chunk, c.page_size, int(c.sliding), c.layer_window]),
            shape([0, c.num_layers]),  # layers of each pipeline stage
            c.q_heads,
            c.kv_heads,
            c.head_dim,  # of q and k
            c.head_dim,  # of v
            shape(c.attn_kinds),
            False,  # disaggregation
            int(RopeMode[c.rope.upper()]),
            c.scale,
            c.theta,
            None,  # factors of longrope
            tvm.runtime.tensor(np.zeros((), c.dtype)),  # its dtype and device are the cache's
            kernel("append"),
            None,  # append of MLA
            tir("ragged"),
            tir("prefill"),
            tir("decode"),
            tir("prefill_window"),
            tir("decode_window"),
            tir("tree_paged"),  # before the ragged one, whatever the order in TIRPagedKVCache's source
            tir("tree"),
            [],  # prefill of MLA
            [kernel("merge"), kernel("merge")],  # the second is for merge_attn_output_inplace
            kernel("rope"),
            kernel("copy_page"),
            kernel("debug"),
            kernel("compact"),
        )

    def add_sequence(self, seq):
        runtime("kv_state_add_sequence")(self.cache, seq)

    def remove_sequence(self, seq):
        runtime("kv_state_remove_sequence")(self.cache, seq)

    def fork_sequence(self, parent, child, position=-1):
        runtime("kv_state_fork_sequence")(self.cache, parent, child, position)

    def popn(self, seq, count):
        runtime("kv_state_popn")(self.cache, seq, count)

    def clear(self):
        runtime("kv_state_clear")(self.cache)

    def enable_sliding_window_for_seq(self, seq, window, sink):
        runtime("attention_kv_cache_enable_sliding_window_for_seq")(self.cache, seq, window, sink)

    def begin_forward(self, seqs, lengths, parents=None):
        """`parents`: of all new nodes, one after another; indices within each sequence's whole uncommitted tree."""
        tree = () if parents is None else (shape(parents),)
        runtime("kv_state_begin_forward")(self.cache, shape(seqs), shape(lengths), *tree)

    def end_forward(self):
        runtime("kv_state_end_forward")(self.cache)

    def attention(self, layer, qkv, sm_scale):
        """``qkv [tokens, q_heads + 2 * kv_heads, d]`` -> ``out [tokens, q_heads, d]``."""
        out = tvm.runtime.tensor(np.full((len(qkv), self.config.q_heads, qkv.shape[2]), np.nan, qkv.dtype))
        name = "attention_kv_cache_attention_with_fused_qkv"
        runtime(name)(self.cache, layer, float(sm_scale), tvm.runtime.tensor(qkv), out)
        return out.numpy()

    def commit(self, seqs, leaves):
        name = "attention_kv_cache_commit_accepted_token_tree_nodes"
        runtime(name)(self.cache, shape(seqs), shape(leaves))

    def query_positions(self):
        return runtime("attention_kv_cache_get_query_positions")(self.cache).numpy()

    def debug_get_kv(self, seq, start, end):
        """Stored keys and values ``[num_layers, end - start, kv_heads, d]``."""
        c = self.config
        k, v = (
            tvm.runtime.tensor(np.zeros((c.num_layers, end - start, c.kv_heads, c.head_dim), c.dtype)) for _ in "kv"
        )
        runtime("attention_kv_cache_debug_get_kv")(self.cache, seq, start, end, k, v)
        return k.numpy(), v.numpy()

    @property
    def empty(self):
        return bool(runtime("attention_kv_cache_empty")(self.cache))

    @property
    def available_pages(self):
        return int(runtime("attention_kv_cache_get_num_available_pages")(self.cache))

    @property
    def total_length(self):
        return int(runtime("attention_kv_cache_get_total_sequence_length")(self.cache))


# the definition ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arithmetic:
    """How the definition is computed: exactly, or as plain low-precision code would, in one order or another."""

    work: type = np.float64
    backwards: bool = False
    power_error: float = 0.0  # of the rotation's periods, in ulps

    def total(self, terms, axis):
        """One term after another, as kernels add: NumPy's pairwise sums would ask more than they can."""
        terms = np.flip(terms, axis) if self.backwards else terms
        return np.add.accumulate(terms, axis=axis).take(-1, axis)

    def rotate(self, x, positions, config: Config):
        """Neox rotation of ``x [n, heads, d]``."""
        work, half = self.work, x.shape[-1] // 2
        period = work(config.theta) ** (np.arange(half).astype(work) / work(half))
        period = period * (1 - work(self.power_error) * np.finfo(work).eps)
        angle = np.asarray(positions).astype(work)[:, None] * work(config.scale) / period
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        low, high = x[..., :half].astype(work), x[..., half:].astype(work)
        return self.rounded(np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1), config.dtype)

    def attend(self, q, k, v, visible, sm_scale):
        """``q [rows, q_heads, d]`` over ``k, v [cols, kv_heads, d]``; ``visible``: columns of each row."""
        work, group = self.work, q.shape[1] // k.shape[1]
        out = np.zeros((*q.shape[:2], v.shape[2]), work)
        for row, cols in enumerate(visible):
            if len(cols) == 0:
                continue
            keys = np.repeat(k[cols], group, axis=1).astype(work)
            values = np.repeat(v[cols], group, axis=1).astype(work)
            logits = self.total(keys * q[row].astype(work), 2) * work(sm_scale)
            weights = np.exp(logits - logits.max(axis=0))
            out[row] = self.total(weights[..., None] * values, 0) / self.total(weights, 0)[:, None]
        return out

    def lse(self, q, k, visible, sm_scale):
        """Base 2, ``[rows, q_heads]``; -inf where nothing is visible."""
        work, group = self.work, q.shape[1] // k.shape[1]
        lse = np.full(q.shape[:2], -np.inf, work)
        for row, cols in enumerate(visible):
            if len(cols):
                keys = np.repeat(k[cols], group, axis=1).astype(work)
                logits = self.total(keys * q[row].astype(work), 2) * work(sm_scale * LOG2_E)
                top = logits.max(axis=0)
                lse[row] = top + np.log2(self.total(np.exp2(logits - top), 0))
        return lse

    def rounded(self, x, dtype):
        """Stored as a cache stores it; not rounded where the definition is exact."""
        return x if self.work is np.float64 else x.astype(dtype)


EXACT = Arithmetic()
PLAIN = [Arithmetic(np.float32, backwards, error) for backwards in (False, True) for error in (2, -2)]


@dataclass
class Sequence:
    """Keys (never rotated) and values ``[num_layers, n, kv_heads, d]``, positions, and the tree at the end."""

    k: np.ndarray
    v: np.ndarray
    positions: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # of the last len(parents) tokens, uncommitted
    window: int = 0
    sink: int = 0

    def __len__(self):
        return self.k.shape[1]

    @property
    def depths(self):
        depths = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    def keep(self, indices):
        self.k, self.v = self.k[:, indices], self.v[:, indices]
        self.positions = [self.positions[index] for index in indices]

    def path(self, node):
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def copy(self, length=None):
        length = len(self) if length is None else length
        return Sequence(self.k[:, :length].copy(), self.v[:, :length].copy(), self.positions[:length])

    def slide(self):
        """A window keeps its sinks and the newest tokens; what is left is renumbered."""
        if self.window and len(self) > self.window:
            self.keep([*range(self.sink), *range(len(self) - self.window + self.sink, len(self))])
            self.positions = list(range(len(self)))


@dataclass
class Model:
    config: Config
    sequences: dict[int, Sequence] = field(default_factory=dict)

    def add(self, seq):
        c = self.config
        empty = np.zeros((c.num_layers, 0, c.kv_heads, c.head_dim), c.dtype)
        self.sequences[seq] = Sequence(empty, empty)

    def append(self, seq, k, v, parents=None):
        """New tokens at the end of a sequence; ``parents`` of a tree's new nodes. Returns their positions."""
        s = self.sequences[seq]
        base, new = len(s) - len(s.parents), k.shape[1]
        if parents is None:
            positions = list(range(len(s), len(s) + new))
        else:
            s.parents += parents
            positions = [base + depth for depth in s.depths[-new:]]
        s.k, s.v = np.concatenate([s.k, k], axis=1), np.concatenate([s.v, v], axis=1)
        s.positions += positions
        return positions

    def visible(self, seq, new, window=0):
        """Columns that each of the last ``new`` tokens sees; ``window``: of the layer."""
        s = self.sequences[seq]
        base = len(s) - len(s.parents)
        for row in range(len(s) - new, len(s)):
            columns = [*range(base), *(base + node for node in s.path(row - base))] if s.parents else range(row + 1)
            at = s.positions[row]
            yield [column for column in columns if not window or s.positions[column] > at - window]

    def attention(self, layer, seq, q, how=EXACT):
        """What the last ``len(q)`` tokens of a sequence get on a layer."""
        c, s = self.config, self.sequences[seq]
        k, v = s.k[layer], s.v[layer]
        if c.rope != "none":
            k, q = how.rotate(k, s.positions, c), how.rotate(q, s.positions[-len(q) :], c)
        window = c.layer_window if c.attn_kinds[layer] == AttnKind.MHA_SLIDING else 0
        return how.attend(q, k, v, self.visible(seq, len(q), window), c.head_dim**-0.5)

    def commit(self, seq, leaf):
        """Keep the path to a node; -1 drops the nodes of the last round only, see `CheckedCache.commit`."""
        s = self.sequences[seq]
        base = len(s) - len(s.parents)
        path = s.path(leaf)
        s.keep([*range(base), *(base + node for node in path)])
        s.parents = []


# both --------------------------------------------------------------------------------------------------------------


class CheckedCache:
    """The runtime's cache and the model, driven together; every output is compared.

    Known faults of the runtime itself, which no kernel can mend; the scenarios stay outside of them:

    * T2: a commit of several sequences is of trees or of chains as the *last* of them is: ``[tree, chain]`` corrupts.
    * T3: a commit counts on the order of ``begin_forward``.
    * T4: in a second round of trees a batch must have all its sequences at one fork depth.
    * A commit after several rounds looks nodes up in the last round's positions, and pops only from what that round
      appended: it corrupts, or fails with "Index out of bounds". Only ``commit(-1)``, which drops the last round and
      accepts those before as they lie, is sound, and then only when those are a chain.
    * A tree with inline RoPE or with windows is refused, and so are 257 nodes and appends of length 0.
    * ``popn`` of a sequence whose window has moved counts its pages without the window's offset and frees one in use.
    * A window on a sequence of three blocks (forked, and its shared part forked again) takes the offset and sink of the
      last block for those of all.
    * A layer's own window (MHA_SLIDING) is not applied among the new tokens: appends must be no longer than it.
      Trees ignore it altogether, forks count it from the end of each block, and ``debug_get_kv`` refuses such caches.
    """

    def __init__(self, generators, config: Config, seed=0, **options):
        self.config, self.kernels = config, Kernels(generators, config)
        self.runtime, self.model = RuntimeCache(self.kernels, **options), Model(config)
        self.rng = np.random.default_rng(seed)
        self.round = {}

    def add(self, *seqs):
        for seq in seqs:
            self.runtime.add_sequence(seq)
            self.model.add(seq)

    def remove(self, *seqs):
        for seq in seqs:
            self.runtime.remove_sequence(seq)
            del self.model.sequences[seq]

    def fork(self, parent, child, position=-1):
        self.runtime.fork_sequence(parent, child, position)
        source = self.model.sequences[parent]
        self.model.sequences[child] = source.copy(None if position < 0 else position)

    def popn(self, seq, count):
        self.runtime.popn(seq, count)
        s = self.model.sequences[seq]
        s.keep(range(len(s) - count))

    def slide(self, seq, window, sink, own_sink=None):
        """``own_sink``: what the sink comes to, where a shared prefix is longer (it never slides)."""
        self.runtime.enable_sliding_window_for_seq(seq, window, sink)
        s = self.model.sequences[seq]
        s.window, s.sink = window, sink if own_sink is None else own_sink

    def draw(self, tokens, scale=1.0):
        c = self.config
        heads = c.q_heads + 2 * c.kv_heads
        drawn = self.rng.standard_normal((c.num_layers, tokens, heads, c.head_dim)) * scale
        return drawn.astype(c.dtype)

    def forward(self, lengths: dict[int, int], trees=None, qkv=None, check=True):
        """One step over all layers: ``{sequence: new tokens}``; ``trees``: parents of each sequence's new nodes."""
        c = self.config
        seqs, counts = list(lengths), list(lengths.values())
        qkv = self.draw(sum(counts)) if qkv is None else qkv
        flat = None if trees is None else [parent for parents in trees for parent in parents]
        self.runtime.begin_forward(seqs, counts, flat)
        got = [self.runtime.attention(layer, qkv[layer], c.head_dim**-0.5) for layer in range(c.num_layers)]
        positions = self.runtime.query_positions()
        self.runtime.end_forward()
        self.round = dict(lengths)

        q, k, v = np.split(qkv, [c.q_heads, c.q_heads + c.kv_heads], axis=2)
        bounds = list(pairwise(np.cumsum([0, *counts])))
        for index, (seq, (start, end)) in enumerate(zip(seqs, bounds, strict=True)):
            parents = None if trees is None else trees[index]
            want = self.model.append(seq, k[:, start:end], v[:, start:end], parents)
            assert positions[start:end].tolist() == want
        if check:
            self.compare(got, q, seqs, bounds)
        for seq in seqs:
            self.model.sequences[seq].slide()
        return got

    def compare(self, got, q, seqs, bounds):
        for layer in range(self.config.num_layers):
            rows = [q[layer, start:end] for start, end in bounds]
            definition = partial(self.definition, layer, seqs, rows)
            assert_close(got[layer], definition, f"layer {layer}, sequences {seqs}")

    def definition(self, layer, seqs, rows, how):
        return np.concatenate([self.model.attention(layer, *of, how) for of in zip(seqs, rows, strict=True)])

    def commit(self, leaves: dict[int, int]):
        self.runtime.commit(list(leaves), list(leaves.values()))
        for seq, leaf in leaves.items():
            s = self.model.sequences[seq]
            if leaf < 0:
                s.keep(range(len(s) - self.round[seq]))
                s.parents = []
            else:
                self.model.commit(seq, leaf)

    def check_stored(self):
        """Stored values are the very bits, keys too unless rotated; and the lengths agree."""
        c = self.config
        assert self.runtime.total_length == sum(len(s) for s in self.model.sequences.values())
        for seq, s in self.model.sequences.items():
            if len(s) == 0:
                continue
            k, v = self.runtime.debug_get_kv(seq, 0, len(s))
            np.testing.assert_array_equal(v, s.v, err_msg=f"values of sequence {seq}")
            if c.rope != "normal":
                np.testing.assert_array_equal(k, s.k, err_msg=f"keys of sequence {seq}")
                continue
            for layer in range(c.num_layers):
                definition = lambda how: how.rotate(s.k[layer], s.positions, c)  # noqa: B023, E731
                assert_close(k[layer], definition, f"keys of layer {layer}, sequence {seq}")

    def check_empty(self):
        """Everything removed: every page is free again."""
        self.remove(*self.model.sequences)
        assert self.runtime.empty


def assert_close(got, definition, what):
    """``error <= 2 * (error of plain code + eps * largest)``, where plain code of some order of sums has that error.

    ``definition``: from an `Arithmetic` to the array.
    """
    want = definition(EXACT)
    assert got.shape == want.shape, (what, got.shape, want.shape)
    largest, eps = float(np.abs(want[np.isfinite(want)]).max(initial=0)), float(np.finfo(got.dtype).eps)
    error, plain = errors(got, want), 0.0
    for how in PLAIN:
        plain = max(plain, float(errors(definition(how).astype(got.dtype), want).max(initial=0)))
        budget = 2 * (plain + eps * largest)
        if (error <= budget).all():
            return
    raise AssertionError(
        f"{what}: error {error.max():.3e} over the budget {budget:.3e} = 2 * ({plain:.3e} of plain code + {eps:.1e} "
        f"* {largest:.3e}); {int((error > budget).sum())} of {error.size} entries"
    )


def errors(got, want):
    """Absolute differences; NaN stands only where the definition has it."""
    with np.errstate(invalid="ignore"):
        error = np.abs(got.astype(np.float64) - want)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    return np.where(same, 0, np.where(np.isnan(error), np.inf, error))
