"""The factories of `treeattn.tvm_compat` against TVM's own of the same name.

Same signature, same parameters of the `PrimFunc`; on inputs where TVM's kernels are right, both are within one budget
of float64; and where TVM's are wrong (the table in docs/from-tvm.md) ours must be right. ``theirs_fails`` says
so of theirs too, so that the list stays true.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_cache
import tvm_ffi
from tvm.relax.frontend.nn.llm import kv_cache as theirs
from tvm_cache import Arithmetic, Config, assert_close, build

import treeattn as ta
from treeattn.errors import UnsupportedError
from treeattn.testing.guard import guarded

OURS = tvm_cache.generators_under_test()
OBJECTS = {"PagedKVCache", "FlashInferPagedKVCache", "TIRPagedKVCache"}  # Relax objects, no kernels
ENUMS = {"AttnKind", "RopeMode"}
FACTORIES = sorted(set(theirs.__all__) - OBJECTS - ENUMS)
NONE = frozenset()  # no RoPE scaling; `build` makes a dict of it
CPU = tvm.target.Target(tvm_cache.CPU)

H_KV, H_Q, D, PAGE = 2, 8, 64, 16
HEADS = H_KV, H_Q, D
SM_SCALE, THETA = 0.11, 10_000.0


# names and signatures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FACTORIES)
def test_signature(name):
    """TVM's parameters, in order, with its defaults; more may follow, with defaults."""
    ours, want = (inspect.signature(getattr(of, name)).parameters for of in (OURS, theirs))
    kinds = lambda parameters: [(p.name, p.kind, p.default) for p in parameters]  # noqa: E731
    assert kinds(ours.values())[: len(want)] == kinds(want.values())
    assert all(p.default is not p.empty for p in list(ours.values())[len(want) :])


@pytest.mark.parametrize("name", sorted(ENUMS))
def test_enums(name):
    assert {m.name: int(m) for m in getattr(OURS, name)} == {m.name: int(m) for m in getattr(theirs, name)}


def test_thread_limits():
    from tvm.relax.frontend.nn.llm import _kernel_common

    target = tvm.target.Target("cuda")
    for name in ("get_max_num_threads_per_block", "check_thread_limits"):
        ours, want = getattr(OURS, name), getattr(_kernel_common, name)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(want).parameters)
    assert OURS.get_max_num_threads_per_block(target) == _kernel_common.get_max_num_threads_per_block(target)
    OURS.check_thread_limits(target, 32, 4, 1, 1)
    with pytest.raises((AssertionError, ta.TreeAttnError)):
        OURS.check_thread_limits(target, 1024, 4, 1, 1)


ARGUMENTS = {
    "_attention_decode": (*HEADS, "float16", False, {}),
    "_attention_prefill": (*HEADS, "float16", False, {}),
    "_attention_prefill_mla": (H_Q, 64, 16, "float16", False),
    "_attention_prefill_ragged": (*HEADS, 32, "float16", {}),
    "_attention_sequence_prefill": (*HEADS, "float16"),
    "_attention_sequence_prefill_with_mask": (*HEADS, "float16"),
    "_compact_kv_copy": (H_KV, D, "float16"),
    "_copy_single_page": (H_KV, PAGE, D, "float16"),
    "_copy_single_page_mla": (PAGE, D, "float16"),
    "_merge_state_inplace": (H_Q, D, "float16"),
    "tree_attn": (*HEADS, "float16", {}),
    "tree_attn_with_paged_kv_cache": (*HEADS, "float16", {}),
    "_attention_decode_cpu": (*HEADS, "float16", True, {}),
    "_attention_prefill_cpu": (*HEADS, "float16", True, {}),
    "_attention_prefill_ragged_cpu": (*HEADS, 32, "float16", {}),
    "_compact_kv_copy_cpu": (H_KV, D, "float16"),
    "_copy_single_page_cpu": (H_KV, PAGE, D, "float16"),
    "_kv_cache_debug_get_kv": (3, H_KV, D, "float16"),
    "_kv_cache_debug_get_kv_mla": (3, D, "float16"),
    "_kv_cache_transpose_append": (H_KV, D, "float16"),
    "_kv_cache_transpose_append_mla": (D, "float16"),
    "_merge_state_inplace_cpu": ("float16",),
    "llama_rope_with_position_map": (THETA, 1.0, D, H_Q, H_KV, "float16", {}),
    "tree_attn_cpu": (*HEADS, "float16", {}),
    "tree_attn_with_paged_kv_cache_cpu": (*HEADS, "float16", {}),
}
TARGETED = [name for name in FACTORIES if "target" in inspect.signature(getattr(theirs, name)).parameters]


GPU = tvm.target.Target({"kind": "cuda", "arch": "sm_80"})


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("target", [CPU, GPU], ids=["cpu", "gpu"])
def test_parameters_of_the_function(name, target):
    """Name, order, element types, ranks and constant dimensions; theirs for a GPU where they have no CPU kernel."""
    with target:
        ours = getattr(OURS, name)(*ARGUMENTS[name], **({"target": target} if name in TARGETED else {}))
    want = getattr(theirs, name)(*ARGUMENTS[name], **({"target": GPU} if name in TARGETED else {}))
    assert isinstance(ours, tvm.tirx.PrimFunc)
    assert ours.attrs and ours.attrs.get("tirx.is_scheduled"), "TVM's default schedules would rewrite it"
    if target == GPU and name in TARGETED:
        assert ours.attrs["global_symbol"] == want.attrs["global_symbol"]
    ours, want = ([_described(func, param) for param in func.params] for func in (ours, want))
    assert [dtype for dtype, _ in ours] == [dtype for dtype, _ in want]
    for (_, own), (_, dims) in zip(ours, want, strict=True):
        assert len(own) == len(dims)
        assert all(dim in (one, None) for one, dim in zip(own, dims, strict=True)), (own, dims)


def _described(func, param):
    """Element type, and dimensions: None where they are a variable."""
    buffer = getattr(func, "buffer_map", {}).get(param, param)
    if not hasattr(buffer, "shape"):
        return str(param.ty), []
    return str(buffer.dtype), [int(dim) if isinstance(dim, tvm.tirx.IntImm) else None for dim in buffer.shape]


def test_a_target_that_is_no_target_of_ours_is_refused():
    for name in TARGETED:
        with pytest.raises(UnsupportedError, match="hexagon"):
            getattr(OURS, name)(*ARGUMENTS[name], target=tvm.target.Target("hexagon"))


# calling both ------------------------------------------------------------------------------------------------------


def call(generators, factory, args, inputs, outputs, scalars, **options):
    """Run one kernel on fresh copies; ``outputs``: positions in ``inputs`` of what it writes."""
    tensors = [tvm.runtime.tensor(np.ascontiguousarray(array)) for array in inputs]
    build(generators, factory, *args, **options)(*_interleaved(tensors, scalars))
    return [tensors[index].numpy() for index in outputs]


def _interleaved(tensors, scalars):
    """Scalars come last, or, in a dict, at a position."""
    if isinstance(scalars, dict):
        whole = list(tensors)
        for at in sorted(scalars):
            whole[at:at] = scalars[at]
        return whole
    return [*tensors, *scalars]


def int32(*values):
    return np.array(values, np.int32)


def indptr(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def normal(rng, *dims, dtype="float32", scale=1.0):
    return (rng.standard_normal(dims) * scale).astype(dtype)


@dataclass
class Attention:
    """One attention call: the arrays of each layout from plain per-sequence lists, and the definition of its result."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    dtype: str = "float32"
    d_v: int = D
    seed: int = 0
    scale: float = 1.0
    page_size: int = PAGE
    rotary: int = 0
    starts: tuple[int, ...] = ()  # position of each sequence's first key; 0
    parents: tuple[tuple[int, ...], ...] = ()  # of each sequence's last nodes
    visible: object = None  # (seq, row, column) -> bool

    def __post_init__(self):
        rng = self.rng = np.random.default_rng(self.seed)
        self.q = normal(rng, sum(self.q_lens), H_Q, D, dtype=self.dtype, scale=self.scale)
        self.k = [normal(rng, n, H_KV, D, dtype=self.dtype, scale=self.scale) for n in self.kv_lens]
        self.v = [normal(rng, n, H_KV, self.d_v, dtype=self.dtype) for n in self.kv_lens]
        self.starts = self.starts or (0,) * len(self.kv_lens)
        self.q_indptr = indptr(self.q_lens)

    # what kernels take

    @property
    def empty(self):
        """``out`` and ``lse``, full of NaN."""
        rows = len(self.q)
        return np.full((rows, H_Q, self.d_v), np.nan, self.dtype), np.full((rows, H_Q), np.nan, np.float32)

    @property
    def ragged(self):
        return np.concatenate(self.k), np.concatenate(self.v), indptr(self.kv_lens)

    def paged(self, slots=None):
        """Pages in random order, NaN in every unused slot; ``slots``: where the tokens of each sequence lie."""
        slots = slots or [range(n) for n in self.kv_lens]
        counts = [(max(where, default=-1) + self.page_size) // self.page_size for where in slots]
        ids = self.rng.permutation(sum(counts) + 3)[: sum(counts)].astype(np.int32)
        pages = np.full((sum(counts) + 3, 2, H_KV, self.page_size, D), np.nan, self.dtype)
        page_indptr = indptr(counts)
        for seq, where in enumerate(slots):
            for token, slot in enumerate(where):
                page = ids[page_indptr[seq] + slot // self.page_size]
                pages[page, 0, :, slot % self.page_size] = self.k[seq][token]
                pages[page, 1, :, slot % self.page_size] = self.v[seq][token]
        last = [(max(where, default=-1)) % self.page_size + 1 if len(where) else 0 for where in slots]
        return pages, page_indptr, ids, np.array(last, np.int32)

    @property
    def positions(self):
        """Of the queries: depths in a tree, else the last places of the sequence."""
        parts = []
        for seq, (q_len, kv_len) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            parts.append(self.starts[seq] + np.array(self._places(seq, kv_len))[kv_len - q_len :])
        return np.concatenate(parts).astype(np.int32)

    @property
    def tree(self):
        """``mn_indptr`` and the (enter, exit) of every node."""
        intervals = [ta.TokenTree.from_parents(list(parents)).intervals for parents in self.parents]
        return indptr([len(parents) for parents in self.parents]), np.concatenate(intervals).astype(np.int32)

    # the definition

    def _places(self, seq, kv_len):
        if not self.parents:
            return list(range(kv_len))
        depth = ta.TokenTree.from_parents(list(self.parents[seq])).depth
        prefix = kv_len - len(depth)
        return [*range(prefix), *(prefix + int(d) for d in depth)]

    def columns(self, seq):
        """Visible columns of each row of a sequence."""
        q_len, kv_len = self.q_lens[seq], self.kv_lens[seq]
        for row in range(q_len):
            at = kv_len - q_len + row
            if self.parents:
                parents, prefix = self.parents[seq], kv_len - len(self.parents[seq])
                node, path = at - prefix, []
                while node >= 0:
                    path.append(prefix + node)
                    node = parents[node]
                yield [*range(prefix), *path[::-1]]
            elif self.visible:
                yield [column for column in range(kv_len) if self.visible(row, column, q_len, kv_len)]
            else:
                yield list(range(at + 1))

    def definition(self, part, how: Arithmetic):
        config, parts, positions = Config(dtype=self.dtype), [], self.positions
        for seq, (start, end) in enumerate(zip(self.q_indptr, self.q_indptr[1:], strict=False)):
            q, k = self.q[start:end], self.k[seq]
            if self.rotary:
                places = self.starts[seq] + np.array(self._places(seq, len(k)))
                q, k = how.rotate(q, positions[start:end], config), how.rotate(k, places, config)
            if part == "out":
                parts.append(how.attend(q, k, self.v[seq], self.columns(seq), SM_SCALE))
            else:
                parts.append(how.lse(q, k, self.columns(seq), SM_SCALE))
        return np.concatenate(parts)

    def check(self, results, who):
        out, lse = results
        assert out.dtype == self.dtype and lse.dtype == np.float32
        assert_close(out, partial(self.definition, "out"), f"{who} out")
        assert_close(lse, partial(self.definition, "lse"), f"{who} lse")

    @property
    def rope_scalars(self):
        return self.rotary, 1.0, THETA, SM_SCALE


def check_both(case, factory, args, inputs, outputs, scalars, **options):
    for who, generators in (("TVM's", theirs), ("ours", OURS)):
        case.check(call(generators, factory, args, inputs, outputs, scalars, **options), who)


def check_ours(case, factory, args, inputs, outputs, scalars, *, theirs_fails, **options):
    case.check(call(OURS, factory, args, inputs, outputs, scalars, **options), "ours")
    if theirs_fails:
        with pytest.raises(AssertionError):
            case.check(call(theirs, factory, args, inputs, outputs, scalars, **options), "TVM's")


# attention, where theirs are right ---------------------------------------------------------------------------------

DTYPES = pytest.mark.parametrize("dtype", ["float32", "float16"])
ROTARY = pytest.mark.parametrize("rotary", [0, 1])
TREES = ((-1, 0, 0, 1, 1, 2), (-1, 0, 1), (-1, -1, 0, 0, 1))
BACKWARDS = ((3, 0, 3, -1), (1, -1))  # ancestors come last


def everything(row, column, q_len, kv_len):
    return True


@DTYPES
@ROTARY
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("d_v", [D, 32])
def test_ragged_prefill(dtype, rotary, causal, d_v):
    lens = (7, 1, 20), (20, 1, 37)
    case = Attention(*lens, dtype, d_v, rotary=rotary, starts=(0, 5, 30), visible=None if causal else everything)
    inputs = [case.q, case.q_indptr, *case.ragged, case.positions, int32(*case.starts), *case.empty]
    scalars = (causal, *case.rope_scalars)
    check_both(case, "_attention_prefill_ragged_cpu", (*HEADS, d_v, dtype, NONE), inputs, (7, 8), scalars)


@DTYPES
@ROTARY
@pytest.mark.parametrize("causal", [0, 1])
def test_paged_prefill(dtype, rotary, causal):
    case = Attention((7, 1, 20), (20, 1, 37), dtype, rotary=rotary, visible=None if causal else everything)
    inputs = [case.q, case.q_indptr, *case.paged(), int32(0, 0, 0), case.positions, *case.empty]
    scalars = (causal, *case.rope_scalars)
    check_both(case, "_attention_prefill_cpu", (*HEADS, dtype, False, NONE), inputs, (8, 9), scalars)


def windowed(case, starts, sinks):
    """Slots of sequences whose window starts at ``starts``, after ``sinks`` tokens that stay; and their lengths."""
    slots = [
        [*range(sink), *range(start, start + n - sink)]
        for n, start, sink in zip(case.kv_lens, starts, sinks, strict=True)
    ]
    pages, page_indptr, ids, last = case.paged(slots)
    return pages, page_indptr, ids, np.stack([last, int32(*starts), int32(*sinks)])


@DTYPES
@ROTARY
def test_paged_prefill_of_a_cache_that_has_moved(dtype, rotary):
    case = Attention((3, 1, 2), (20, 30, 9), dtype, rotary=rotary, visible=everything)
    inputs = [case.q, case.q_indptr, *windowed(case, (9, 18, 0), (4, 0, 0)), int32(0, 0, 0)]
    inputs += [case.positions, *case.empty]
    scalars = (0, *case.rope_scalars)
    check_both(case, "_attention_prefill_cpu", (*HEADS, dtype, True, NONE), inputs, (8, 9), scalars)


@DTYPES
@ROTARY
@pytest.mark.parametrize("sliding", [False, True])
def test_decode(dtype, rotary, sliding):
    case = Attention((1, 1, 1), (20, 1, 47), dtype, rotary=rotary)
    table = windowed(case, (9, 0, 33), (4, 0, 2)) if sliding else case.paged()
    inputs = [case.q, *table, int32(0, 0, 0), case.positions, *case.empty]
    args = (*HEADS, dtype, sliding, NONE)
    check_both(case, "_attention_decode_cpu", args, inputs, (7, 8), case.rope_scalars)


def ragged_tree(case):
    return [case.q, case.q_indptr, *case.ragged, case.positions, *case.tree, *case.empty]


def paged_tree(case):
    """Inputs, and the scalars between ``lse`` and the tree."""
    inputs = [case.q, case.q_indptr, *case.paged(), int32(*case.starts), case.positions, *case.empty, *case.tree]
    return inputs, (8, 9), {10: case.rope_scalars}


@DTYPES
def test_ragged_tree_after_a_prefix(dtype):
    case = Attention((6, 3, 5), (26, 10, 6), dtype, parents=TREES)
    check_both(case, "tree_attn_cpu", (*HEADS, dtype, NONE), ragged_tree(case), (8, 9), case.rope_scalars)


@DTYPES
def test_ragged_tree_with_inline_rope(dtype):
    """Keys take the positions of the queries, so there is no prefix; moderate logits, roots first."""
    trees = (TREES[0], TREES[1], (-1, 0, 0, 0))
    case = Attention((6, 3, 4), (6, 3, 4), dtype, rotary=1, starts=(0, 31, 8), parents=trees)
    check_both(case, "tree_attn_cpu", (*HEADS, dtype, NONE), ragged_tree(case), (8, 9), case.rope_scalars)


def test_ragged_tree_with_inline_rope_after_a_prefix():
    """The root of the tree stands behind the prefix; theirs read past the positions."""
    case = Attention((6, 3, 5), (26, 10, 6), rotary=1, starts=(0, 31, 8), parents=TREES)
    args = (*HEADS, "float32", NONE)
    case.check(call(OURS, "tree_attn_cpu", args, ragged_tree(case), (8, 9), case.rope_scalars), "ours")
    case = Attention((4, 2), (9, 5), rotary=1, parents=BACKWARDS)
    case.check(call(OURS, "tree_attn_cpu", args, ragged_tree(case), (8, 9), case.rope_scalars), "ours")


@pytest.mark.parametrize("d", [1, 45])
def test_rope_turns_pairs_of_dims(d):
    """Of an odd number of dims it is refused; theirs read the next head."""
    rng, zero = np.random.default_rng(0), int32(0)
    q, pages = normal(rng, 1, 2, d), normal(rng, 1, 2, 1, PAGE, d)
    inputs = [q, pages, int32(0, 1), zero, int32(1), zero, zero, np.empty_like(q), normal(rng, 1, 2)]
    args = (1, 2, d, "float32", False, NONE)
    out = call(OURS, "_attention_decode_cpu", args, inputs, (7,), (0, 1.0, THETA, SM_SCALE))[0]
    np.testing.assert_allclose(out[0], np.repeat(pages[:, 1, 0, 0], 2, axis=0), rtol=1e-6)
    with pytest.raises(RuntimeError, match=f"rotary_mode 1 turns pairs of dims, which {d} do not make"):
        call(OURS, "_attention_decode_cpu", args, inputs, (7,), (1, 1.0, THETA, SM_SCALE))


@DTYPES
@pytest.mark.parametrize("q_lens", [(6, 3, 5), (2, 1, 3)], ids=["one round", "a later round"])
def test_paged_tree_after_a_prefix(dtype, q_lens):
    case = Attention(q_lens, (26, 40, 6), dtype, parents=TREES)
    check_both(case, "tree_attn_with_paged_kv_cache_cpu", (*HEADS, dtype, NONE), *paged_tree(case))


# states, rotation and moving, where theirs are right ---------------------------------------------------------------


@DTYPES
def test_merge(dtype):
    rng = np.random.default_rng(0)
    a, b = (normal(rng, 9, H_Q, D, dtype=dtype) for _ in range(2))
    s, t = (normal(rng, 9, H_Q, scale=20) for _ in range(2))
    t[3] = s[3]

    def out(how):
        work, top = how.work, np.maximum(s, t).astype(how.work)
        weights = [np.exp2(lse.astype(work) - top)[..., None] for lse in (s, t)]
        return (a.astype(work) * weights[0] + b.astype(work) * weights[1]) / sum(weights)

    def lse(how):
        return np.logaddexp2(s.astype(how.work), t.astype(how.work))

    for who, generators in (("TVM's", theirs), ("ours", OURS)):
        got = call(generators, "_merge_state_inplace_cpu", (dtype,), [a, s, b, t], (0, 1), ())
        assert_close(got[0], out, f"{who} out")
        assert_close(got[1], lse, f"{who} lse")


SCALINGS = {
    "default": {},
    "gptj": {"rope_type": "gptj"},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "llama4": {
        "rope_type": "llama4",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
        "inv_theta_log_scale": 1 / (2 * np.log(THETA)),
    },
}


@DTYPES
@pytest.mark.parametrize("rotary_dim", [D, 32])
@pytest.mark.parametrize("scaling", ["default", "gptj", "llama3"])
def test_split_and_rotate(dtype, rotary_dim, scaling):
    """Ours and theirs agree as far as a float32 angle lets them."""
    rng = np.random.default_rng(0)
    tokens, heads = 11, H_Q + 2 * H_KV
    qkv, positions = normal(rng, tokens, heads, D, dtype=dtype), rng.integers(0, 300, tokens).astype(np.int32)
    parts = [np.full((tokens, n, D), np.nan, dtype) for n in (H_Q, H_KV, H_KV)]
    args = (THETA, 1.0, D, H_Q, H_KV, dtype, frozenset(SCALINGS[scaling].items()), rotary_dim)
    for apply in (0, 1):
        inputs, name = [qkv, positions, *parts], "llama_rope_with_position_map"
        want, got = (call(of, name, args, inputs, (2, 3, 4), (apply,)) for of in (theirs, OURS))
        np.testing.assert_array_equal(got[2], qkv[:, H_Q + H_KV :])
        eps = np.finfo(dtype).eps
        for one, other in zip(got, want, strict=True):
            angle = 0 if apply == 0 else 4 * np.finfo(np.float32).eps * positions.max()
            np.testing.assert_allclose(
                one.astype(float), other.astype(float), atol=(angle + 2 * eps * apply) * np.abs(qkv).max(), rtol=0
            )


@pytest.mark.parametrize("rotary_dim", [D, 32])
def test_split_and_rotate_bfloat16(rotary_dim):
    """As the same numbers in float32, rounded once."""
    rng, tokens, results = np.random.default_rng(0), 11, []
    qkv, positions = normal(rng, tokens, H_Q + 2 * H_KV, D, dtype=ml_dtypes.bfloat16), int32(*range(tokens))
    for dtype in (ml_dtypes.bfloat16, np.float32):
        parts = [np.zeros((tokens, n, D), dtype) for n in (H_Q, H_KV, H_KV)]
        args = (THETA, 1.0, D, H_Q, H_KV, np.dtype(dtype).name, NONE, rotary_dim)
        inputs = [qkv.astype(dtype), positions, *parts]
        results.append(call(OURS, "llama_rope_with_position_map", args, inputs, (2, 3, 4), (1,)))
    for low, want in zip(*results, strict=True):
        np.testing.assert_array_equal(low, want.astype(ml_dtypes.bfloat16))


@DTYPES
@pytest.mark.parametrize("tokens", [50, 51], ids=["short", "long"])
def test_longrope(dtype, tokens):
    """TVM 0.27 cannot make this one (it asks a Buffer for its truth value); the definition from its source."""
    rng, trained, longest = np.random.default_rng(0), 50, 4096
    scaling = {"rope_type": "longrope", "max_position_embeddings": longest, "original_max_position_embeddings": trained}
    qkv, positions = normal(rng, tokens, H_Q + 2 * H_KV, D, dtype=dtype), np.arange(tokens, dtype=np.int32)
    parts = [np.full((tokens, n, D), np.nan, dtype) for n in (H_Q, H_KV, H_KV)]
    factors = rng.uniform(1, 8, D).astype(np.float32)  # long ones, then short ones
    args = (THETA, 1.0, D, H_Q, H_KV, dtype, frozenset(scaling.items()), D)
    inputs = [qkv, positions, *parts, factors]
    q, k, v = call(OURS, "llama_rope_with_position_map", args, inputs, (2, 3, 4), ())

    factor = factors[: D // 2] if tokens > trained else factors[D // 2 :]
    angle = positions[:, None] / (factor.astype(float) * THETA ** (np.arange(D // 2) / (D // 2)))
    grow = np.sqrt(1 + np.log(longest / trained) / np.log(trained))
    cos, sin = np.cos(angle)[:, None] * grow, np.sin(angle)[:, None] * grow
    low, high = np.split(qkv[:, : H_Q + H_KV].astype(float), 2, axis=2)
    want = np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=2)
    atol = 4 * (np.finfo(np.float32).eps * tokens + np.finfo(dtype).eps) * np.abs(want).max()
    np.testing.assert_allclose(np.concatenate([q, k], axis=1).astype(float), want, atol=atol, rtol=0)
    np.testing.assert_array_equal(v, qkv[:, H_Q + H_KV :])


def same_bits(factory, args, inputs, outputs, scalars, **options):
    want, got = (call(of, factory, args, inputs, outputs, scalars, **options) for of in (theirs, OURS))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    assert any((one != inputs[at]).any() for one, at in zip(got, outputs, strict=True)), "nothing was written"


def pool(dtype, pages=9):
    return normal(np.random.default_rng(1), pages, 2, H_KV, PAGE, D, dtype=dtype)


@DTYPES
def test_append(dtype):
    rng = np.random.default_rng(0)
    k, v = (normal(rng, 12, H_KV, D, dtype=dtype) for _ in range(2))
    where = np.append(0, 1 + rng.permutation(9 * PAGE - 1)[:11]).astype(np.int32)
    where[[2, 7]] = -1  # not kept
    same_bits("_kv_cache_transpose_append", (H_KV, D, dtype), [pool(dtype), k, v, where], (0,), ())
    kv, pages = normal(rng, 12, 80, dtype=dtype), normal(rng, 9, PAGE, 80, dtype=dtype)
    same_bits("_kv_cache_transpose_append_mla", (80, dtype), [pages, kv, where], (0,), ())


@DTYPES
def test_copy_page(dtype):
    for length in (1, 7, PAGE):
        same_bits("_copy_single_page_cpu", (H_KV, PAGE, D, dtype), [pool(dtype)], (0,), (3, 5, length))


@DTYPES
def test_compact(dtype):
    """Ranges that overlap, moved in ascending order; a sequence without any."""
    sources, targets = int32(3, 5, 6, 40, 41, 60, 70), int32(2, 3, 5, 17, 40, 59, 60)
    lengths, moves = int32(0, 3, 3, 7), np.stack([sources, targets])
    same_bits("_compact_kv_copy_cpu", (H_KV, D, dtype), [pool(dtype), lengths, moves], (0,), (3,))


@DTYPES
def test_debug_get(dtype):
    where = np.random.default_rng(0).permutation(9 * PAGE)[:20].astype(np.int32)
    out = np.zeros((3, 20, H_KV, D), dtype)
    same_bits("_kv_cache_debug_get_kv", (3, H_KV, D, dtype), [pool(dtype), where, out, out], (2, 3), (1,))
    pages = normal(np.random.default_rng(1), 9, PAGE, 80, dtype=dtype)
    same_bits("_kv_cache_debug_get_kv_mla", (3, 80, dtype), [pages, where, np.zeros((3, 20, 80), dtype)], (2,), (1,))


# factories with a target: on a CPU only ours exist -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["_attention_prefill", "_attention_decode"])
def test_targeted_names_give_the_cpu_kernel(name):
    case = Attention((1, 1, 1), (20, 1, 47))
    inputs = [*case.paged(), int32(0, 0, 0), case.positions, *case.empty]
    inputs, scalars = ([case.q, *inputs], ()) if "decode" in name else ([case.q, case.q_indptr, *inputs], (0,))
    outputs = (len(inputs) - 2, len(inputs) - 1)
    args = (*HEADS, "float32", False, NONE, CPU)
    case.check(call(OURS, name, args, inputs, outputs, (*scalars, *case.rope_scalars)), "ours")


def test_targeted_ragged_trees_and_merge():
    case = Attention((6, 3, 5), (26, 10, 6), parents=TREES)
    args = (*HEADS, "float32", NONE, CPU)
    case.check(call(OURS, "tree_attn", args, ragged_tree(case), (8, 9), case.rope_scalars), "ours")
    case.check(call(OURS, "tree_attn_with_paged_kv_cache", args, *paged_tree(case)), "ours")
    case = Attention((7, 1, 20), (20, 1, 37), d_v=32)
    inputs = [case.q, case.q_indptr, *case.ragged, case.positions, int32(0, 0, 0), *case.empty]
    args = (*HEADS, 32, "float32", NONE, CPU)
    case.check(call(OURS, "_attention_prefill_ragged", args, inputs, (7, 8), (1, *case.rope_scalars)), "ours")


def test_targeted_page_operations():
    pages, rng = pool("float32"), np.random.default_rng(0)
    for ours, args, cpu, scalars, rest in (
        ("_copy_single_page", (H_KV, PAGE, D, "float32"), "_copy_single_page_cpu", (3, 5, 7), ()),
        ("_compact_kv_copy", (H_KV, D, "float32"), "_compact_kv_copy_cpu", (1,), (int32(0, 2), int32([4, 6], [3, 4]))),
    ):
        inputs = [pages, *rest]
        want = call(theirs, cpu, args, inputs, (0,), scalars)
        got = call(OURS, ours, (*args, CPU), inputs, (0,), scalars)
        np.testing.assert_array_equal(got[0], want[0])
    latent = normal(rng, 5, PAGE, 80)
    want = latent.copy()
    want[4, :7] = want[1, :7]
    np.testing.assert_array_equal(
        call(OURS, "_copy_single_page_mla", (PAGE, 80, "float32", CPU), [latent], (0,), (1, 4, 7))[0], want
    )
    a, b, s, t = normal(rng, 9, H_Q, D), normal(rng, 9, H_Q, D), normal(rng, 9, H_Q), normal(rng, 9, H_Q)
    want = call(OURS, "_merge_state_inplace_cpu", ("float32",), [a, s, b, t], (0, 1), ())
    got = call(OURS, "_merge_state_inplace", (H_Q, D, "float32", CPU), [a, s, b, t], (0, 1), ())
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


@DTYPES
@pytest.mark.parametrize("mode", ["full", "causal", "padded", "causal_padded_left"])
def test_dense_batch(dtype, mode):
    """``lse`` of the masked one has the dtype of q, as TVM declares it."""
    batch, n, rng = 3, 19, np.random.default_rng(0)
    q, (k, v) = normal(rng, batch, n, H_Q, D, dtype=dtype), (normal(rng, batch, n, H_KV, D, dtype=dtype) for _ in "kv")
    valid = int32(n, 7, 0)
    masked = mode.startswith(("padded", "causal_p"))
    options = {"mask_mode": mode} if masked else {"causal": int(mode == "causal")}
    name = "_attention_sequence_prefill" + "_with_mask" * masked
    out, lse = np.full(q.shape, np.nan, dtype), np.full(q.shape[:3], np.nan, dtype)
    inputs = [q, k, v, *([valid] if masked else []), out, lse]
    outputs = (len(inputs) - 2, len(inputs) - 1)
    got_out, got_lse = call(OURS, name, (*HEADS, dtype, CPU, SM_SCALE) if masked else (*HEADS, dtype, CPU), inputs,
                            outputs, (), **options, **({} if masked else {"sm_scale": SM_SCALE}))  # fmt: skip
    for b in range(batch):
        columns = [list(dense_columns(mode, row, n, int(valid[b]))) for row in range(n)]
        assert_close(got_out[b], lambda how: how.attend(q[b], k[b], v[b], columns, SM_SCALE), "out")  # noqa: B023
        assert_close(got_lse[b], lambda how: how.lse(q[b], k[b], columns, SM_SCALE), "lse")  # noqa: B023


def dense_columns(mode, row, n, valid):
    if mode == "full":
        return range(n)
    if mode == "causal":
        return range(row + 1)
    if mode == "padded":
        return range(valid if row < valid else 0)
    return range(n - valid, row + 1)


# where theirs are wrong --------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("rotary_dim", [D, 32])
@pytest.mark.parametrize("scaling", ["yarn", "llama4"])
def test_scalings_that_are_no_rotation_at_theirs(dtype, rotary_dim, scaling):
    """Lengths must not change. TVM's yarn takes the ramp of the second half's elements at their own index, not at that
    of their pair; its llama4 gives neighbours one frequency and then pairs halves."""
    rng, half = np.random.default_rng(0), rotary_dim // 2
    qkv, positions = normal(rng, 11, H_Q + 2 * H_KV, D, dtype=dtype), rng.integers(0, 300, 11).astype(np.int32)
    parts = [np.full((11, n, D), np.nan, dtype) for n in (H_Q, H_KV, H_KV)]
    args = (THETA, 1.0, D, H_Q, H_KV, dtype, frozenset(SCALINGS[scaling].items()), rotary_dim)
    inputs, name = [qkv, positions, *parts], "llama_rope_with_position_map"
    bad, got = (call(of, name, args, inputs, (2, 3, 4), (1,)) for of in (theirs, OURS))
    turned, wrong, before = (
        np.linalg.norm(x[..., :rotary_dim].astype(float), axis=2) for x in (got[0], bad[0], qkv[:, :H_Q])
    )
    atol = 4 * (np.finfo(dtype).eps + np.finfo(np.float32).eps * 300) * np.abs(qkv).max()
    np.testing.assert_allclose(turned, before, atol=atol * 8, rtol=0)
    assert np.abs(wrong - before).max() > 0.1

    power, pair = THETA ** (-np.arange(half) / half), np.arange(half)
    s = SCALINGS[scaling]
    if scaling == "yarn":
        at = [
            rotary_dim * np.log(s["original_max_position_embeddings"] / (turns * 2 * np.pi)) / (2 * np.log(THETA))
            for turns in (s["beta_fast"], s["beta_slow"])
        ]
        ramp = np.clip((pair - max(at[0], 0)) / (min(at[1], rotary_dim - 1) - max(at[0], 0)), 0, 1)
        frequency, first, second = power * (1 - ramp + ramp / s["factor"]), slice(0, half), slice(half, rotary_dim)
    else:
        long = 2 * np.pi / power > s["original_max_position_embeddings"]
        frequency = np.where(long, power / s["factor"], power)
        first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    angle = positions[:, None, None] * frequency
    x = qkv[:, :H_Q].astype(float)
    want = x.copy()
    want[..., first] = x[..., first] * np.cos(angle) - x[..., second] * np.sin(angle)
    want[..., second] = x[..., second] * np.cos(angle) + x[..., first] * np.sin(angle)
    np.testing.assert_allclose(got[0].astype(float), want, atol=atol, rtol=0)


FOREST = (-1, -1, 0, 1)


def test_t5_forest_without_a_prefix():
    case = Attention((4, 4), (4, 4), scale=20, parents=(FOREST, (-1, 0, -1, 2)))
    args = (*HEADS, "float32", NONE)
    check_ours(case, "tree_attn_with_paged_kv_cache_cpu", args, *paged_tree(case), theirs_fails=True)
    check_ours(case, "tree_attn_cpu", args, ragged_tree(case), (8, 9), case.rope_scalars, theirs_fails=False)


def very_negative(case):
    """q.k of about -1e6, differences of a few units."""
    case.q[...] = 40 + case.q / 10
    for k in case.k:
        k[...] = -400 + k / 100
    return case


def test_t6_visible_logit_below_minus_50000():
    args = (*HEADS, "float32", NONE)
    case = very_negative(Attention((4, 3), (9, 3), parents=(FOREST, (-1, 0, 1))))
    check_ours(case, "tree_attn_cpu", args, ragged_tree(case), (8, 9), case.rope_scalars, theirs_fails=True)
    check_ours(case, "tree_attn_with_paged_kv_cache_cpu", args, *paged_tree(case), theirs_fails=True)
    case = very_negative(Attention((1, 1), (20, 3)))
    inputs = [case.q, *case.paged(), int32(0, 0), case.positions, *case.empty]
    args = (*HEADS, "float32", False, NONE)
    check_ours(case, "_attention_decode_cpu", args, inputs, (7, 8), case.rope_scalars, theirs_fails=True)
    case = very_negative(Attention((5, 1), (20, 3)))
    inputs = [case.q, case.q_indptr, *case.paged(), int32(0, 0), case.positions, *case.empty]
    check_ours(case, "_attention_prefill_cpu", args, inputs, (8, 9), (1, *case.rope_scalars), theirs_fails=True)


def test_t7_nan_in_what_nobody_else_sees():
    """NaN in node 1 of the first tree: its own row and that of its child only."""
    case = Attention((4, 3), (9, 3), parents=(FOREST, (-1, 0, 1)))
    case.v[0][6] = np.nan
    args = (*HEADS, "float32", NONE)
    check_ours(case, "tree_attn_cpu", args, ragged_tree(case), (8, 9), case.rope_scalars, theirs_fails=True)
    check_ours(case, "tree_attn_with_paged_kv_cache_cpu", args, *paged_tree(case), theirs_fails=True)
    case = Attention((5,), (20,))
    case.v[0][18:] = np.nan
    inputs = [case.q, case.q_indptr, *case.paged(), int32(0), case.positions, *case.empty]
    args = (*HEADS, "float32", False, NONE)
    check_ours(case, "_attention_prefill_cpu", args, inputs, (8, 9), (1, *case.rope_scalars), theirs_fails=True)


def test_t8_nothing_to_see():
    case = Attention((2, 1, 3), (0, 5, 0), visible=everything)
    inputs = [case.q, case.q_indptr, *case.paged(), int32(0, 0, 0), int32(*range(6)), *case.empty]
    args = (*HEADS, "float32", False, NONE)
    scalars = (0, *case.rope_scalars)
    out, lse = call(OURS, "_attention_prefill_cpu", args, inputs, (8, 9), scalars)
    assert (out[[0, 1, 3, 4, 5]] == 0).all() and (lse[[0, 1, 3, 4, 5]] == -np.inf).all()
    assert np.isfinite(lse[2]).all()
    state = [out, lse, out, lse]
    merged = call(OURS, "_merge_state_inplace_cpu", ("float32",), state, (0, 1), ())
    np.testing.assert_array_equal(merged[0][[0, 1, 3, 4, 5]], 0)
    np.testing.assert_array_equal(merged[1], np.where(np.isinf(lse), -np.inf, lse + 1))
    assert not np.isinf(call(theirs, "_attention_prefill_cpu", args, inputs, (9,), scalars)[0]).any()
    assert np.isnan(call(theirs, "_merge_state_inplace_cpu", ("float32",), state, (0,), ())[0]).any()


@pytest.mark.parametrize("page_size", [1, 3, 32])
def test_t10_page_sizes(page_size):
    case = Attention((2, 1, 3), (26, 40, 6), page_size=page_size, parents=TREES)
    args = (*HEADS, "float32", NONE)
    name = "tree_attn_with_paged_kv_cache_cpu"
    case.check(call(OURS, name, args, *paged_tree(case), page_size=page_size), "ours")


@DTYPES
def test_t11_unaligned_arrays(dtype):
    """Every array one element off: NumPy slices, handed over without a copy. Theirs end in SIGSEGV."""
    in_a_process_of_its_own("run_unaligned", dtype)


@pytest.mark.parametrize("side", ["before", "after"])
def test_t18_no_read_outside_the_arrays(side):
    """Inaccessible memory at every array; theirs look the prefix's columns up in the tree, and end in SIGSEGV."""
    in_a_process_of_its_own("run_guarded", side)


def in_a_process_of_its_own(function, argument):
    code = f"import test_tvm_differential as tests; tests.{function}({argument!r})"
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=here, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[:300]}"


def run_unaligned(dtype):
    case = Attention((6, 3, 5), (26, 10, 6), dtype, parents=TREES)
    run_in_place(case, "tree_attn_with_paged_kv_cache_cpu", *paged_tree(case), _one_element_off)


def run_guarded(side):
    case = Attention((6, 3, 5), (26, 10, 6), parents=TREES)
    place = partial(guarded, side=side)
    run_in_place(case, "tree_attn_with_paged_kv_cache_cpu", *paged_tree(case), place)
    run_in_place(case, "tree_attn_cpu", ragged_tree(case), (8, 9), case.rope_scalars, place)


def run_in_place(case, factory, inputs, outputs, scalars, place):
    """On memory of the caller's choice, without a copy."""
    arrays = [place(array) for array in inputs]
    tensors = [tvm_ffi.from_dlpack(array, require_alignment=array.itemsize) for array in arrays]
    build(OURS, factory, *HEADS, case.dtype, NONE)(*_interleaved(tensors, scalars))
    case.check([arrays[index] for index in outputs], "ours")


def _one_element_off(array):
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + array.itemsize
    placed = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    placed[...] = array
    return placed


@DTYPES
def test_t19_first_tokens_outside_the_window(dtype):
    """``causal`` of the sliding kernel: the keys are the past only, and row r sees the last ``window - r - 1``.

    Theirs start from a maximum that was never set: NaN now and then, so nothing is asserted of them.
    """
    window = 8

    def visible(row, column, q_len, kv_len):
        return column >= kv_len - max(window - row - 1, 0)

    case = Attention((3, 12), (20, 30), dtype, visible=visible)
    table = windowed(case, (0, 0), (0, 0))
    inputs = [case.q, case.q_indptr, *table, int32(0, 0), int32(*range(15)), *case.empty]
    args, scalars = (*HEADS, dtype, True, NONE), (1, *case.rope_scalars)
    got = call(OURS, "_attention_prefill_cpu", args, inputs, (8, 9), scalars, sliding_window_size=window)
    case.check(got, "ours")


def test_inline_rope_in_a_paged_tree():
    """TVM asserts; keys of a tree are at depths, as the queries are."""
    case = Attention((6, 3, 5), (26, 40, 6), rotary=1, parents=TREES)
    case.check(call(OURS, "tree_attn_with_paged_kv_cache_cpu", (*HEADS, "float32", NONE), *paged_tree(case)), "ours")
