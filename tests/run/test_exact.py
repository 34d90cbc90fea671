"""A row's result depends on its visible keys in order and on nothing else: bit for bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from helpers import DTYPES, assert_same, attend, parents_first, plan_of, renumbered, rng, tile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import treeattn as ta
from treeattn.errors import UnsupportedError
from treeattn.kernels.spec import KernelSpec
from treeattn.schedules.tiles import TileConfig
from treeattn.targets import KNOWN, host
from treeattn.testing import alone, gather_path, make_case, mask_kinds, pack, random_forest, random_trees, repack
from treeattn.testing.strategies import lengths, seeds, trees

DRAWN = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
LINEAR = {"tree": "causal", "tree&window": "causal&window", "tree&(window|sink)": "causal&(window|sink)"}
SHAPES = [(16, "float32", "float32"), (46, "float16", "float32"), (46, "bfloat16", "bfloat16")]
"""Few, so that few kernels are compiled: ``(d, dtype, kv_dtype)``."""
TILES = [
    TileConfig(rows=16),
    TileConfig(rows=32, columns=36),
    TileConfig(rows=256, columns=60, few=(1, 2, 4, 8)),
    TileConfig(rows=16, few=(1,)),
    TileConfig(rows=48, tokens=3, columns=42, few=(1, 2, 3, 5, 6, 7)),
    TileConfig(rows=24, panel=8, tokens=14, columns=56, few=(2, 5)),
    TileConfig(rows=64, lanes=4, tokens=2, columns=32),
]


@st.composite
def bounded_cases(draw, masks):
    """Cases over everything that is run-time data, and few specs."""
    mask, (d, dtype, kv_dtype) = draw(st.sampled_from(masks)), draw(st.sampled_from(SHAPES))
    kv_heads, source = draw(st.integers(1, 2)), np.random.default_rng(draw(seeds()))
    sizes = draw(lengths(max_seqs=3, max_rows=20, max_context=90, tree="tree" in mask))
    return make_case(
        source,
        mask=mask,
        lengths=sizes,
        trees=ordered_trees(source, sizes, draw(st.booleans())) if "tree" in mask else None,
        dtype=dtype,
        kv_dtype=kv_dtype,
        kv_heads=kv_heads,
        q_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 5, 7, 12])),
        d_qk=d,
        page_size=draw(st.sampled_from([1, 3, 16, 17])),
        logit_scale=draw(st.sampled_from([1.0, 20.0, 200.0])),
    )


def ordered_trees(source, sizes, depth_first=False):
    """Trees whose paths run in node order, as decoding would append them: sums have an order, bits depend on it."""
    return [parents_first(tree, depth_first) for tree in random_trees(source, sizes)]


def rows_of(result, begin, end):
    return tuple(part[begin:end] for part in result)


# masks that are equal ---------------------------------------------------------------------------------------

FULL, CAUSAL, WINDOW, SINK = ta.Full(), ta.Causal(), ta.Window(7), ta.Sink(2)
EQUAL = {
    "full & causal": (FULL & CAUSAL, CAUSAL),
    "causal & full": (CAUSAL & FULL, CAUSAL),
    "full & full": (FULL & FULL, FULL),
    "full | causal": (FULL | CAUSAL, FULL),
    "window & (full | causal)": (WINDOW & (FULL | CAUSAL), WINDOW),
    "(full & causal) & window": ((FULL & CAUSAL) & WINDOW, CAUSAL & WINDOW),
    "causal & (full & (window | sink))": (CAUSAL & (FULL & (WINDOW | SINK)), CAUSAL & (WINDOW | SINK)),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_masks_give_equal_results(name):
    one, other = EQUAL[name]
    for seed in range(3):
        case = make_case(rng(seed), mask="causal", lengths=[(6, 40), (1, 30), (0, 9), (25, 25)])
        assert_same(attend(replace(case, mask=one)), attend(replace(case, mask=other)))


# verify equals decode ---------------------------------------------------------------------------------------


def assert_verify_is_decode(case, seed=0):
    """Every node of every tree, decoded as the last token of its own path."""
    verified = attend(case)
    for seq, tree in enumerate(case.mask.trees):
        begin, end = case.q_indptr[seq : seq + 2]
        for row in range(begin, end):
            node = tree.num_nodes - (end - row)
            path, at = gather_path(case, seq, node, rng(seed), only_last=True)
            assert at.tolist() == [row]
            assert_same(attend(path), rows_of(verified, row, row + 1))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", LINEAR)
def test_verify_equals_decode(mask, shape):
    d, dtype, kv_dtype = shape
    lengths = [(1, 40), (20, 20), (50, 150), (0, 5), (5, 31), (0, 0)]
    for depth_first in (False, True):
        trees = ordered_trees(rng(d), lengths, depth_first)
        shape = {"d_qk": d, "dtype": dtype, "kv_dtype": kv_dtype, "q_heads": 6, "kv_heads": 2}
        assert_verify_is_decode(make_case(rng(d), mask=mask, lengths=lengths, trees=trees, **shape))


@DRAWN
@given(bounded_cases(list(LINEAR)))
def test_verify_equals_decode_for_drawn_trees(case):
    assert_verify_is_decode(case)


@DRAWN
@given(bounded_cases(list(LINEAR)))
def test_a_path_in_one_piece_equals_its_nodes(case):
    """A whole root-to-node path as the rows of one causal prefill."""
    verified = attend(case)
    for seq, tree in enumerate(case.mask.trees):
        if case.q_indptr[seq] == case.q_indptr[seq + 1]:
            continue
        path, at = gather_path(case, seq, tree.num_nodes - 1, rng())
        assert_same(attend(path), tuple(part[at] for part in verified))


@DRAWN
@given(trees(min_nodes=1, max_nodes=40), st.integers(0, 80), seeds())
def test_node_order_is_free(tree, context, seed):
    """Depth first or level by level, a row is the same: both keep the order along every path."""
    levels = parents_first(tree)
    case = make_case(rng(seed), mask="tree", trees=[levels], contexts=[context], storage="ragged")
    order = np.argsort(levels.intervals[:, 0])
    cols = np.array([*range(context), *(context + order)])
    kv = ta.RaggedKV(case.kv.k[cols], case.kv.v[cols], case.kv.kv_indptr)
    other = replace(case, q=case.q[order], kv=kv, mask=ta.Tree(renumbered(levels, order)))
    assert_same(attend(other), tuple(part[order] for part in attend(case)))


def test_a_chain_equals_causal():
    for dtype in DTYPES:
        chains = [ta.TokenTree.chain(n) for n in (1, 50, 7)]
        case = make_case(rng(), mask="tree", trees=chains, contexts=[30, 100, 0], dtype=dtype)
        assert_same(attend(replace(case, mask=ta.Causal())), attend(case))


def test_every_visible_column_in_one_mask_equals_full():
    case = make_case(rng(), mask="full")
    assert_same(attend(replace(case, mask=ta.Window(10**6))), attend(case))
    assert_same(attend(replace(case, mask=ta.Sink(10**6))), attend(case))
    assert_same(attend(replace(case, mask=ta.ValidLength(case_limits(case)))), attend(case))


def case_limits(case):
    return np.maximum(case.kv.kv_len, np.diff(case.q_indptr)).tolist()


def test_nodes_that_are_not_seen_may_hold_anything():
    """NaN, infinities and huge numbers in the keys and values of siblings change no bit."""
    tree = ta.TokenTree.star(40)
    case = make_case(rng(), trees=[tree], contexts=[37], storage="ragged", q_heads=2, kv_heads=1)
    before = attend(case)
    k, v = case.kv.k.copy(), case.kv.v.copy()
    for node, poison in ((3, np.nan), (9, np.inf), (17, -np.inf), (30, 3e38)):
        k[37 + node] = v[37 + node] = poison
    after = attend(replace(case, kv=ta.RaggedKV(k, v, case.kv.kv_indptr)))
    others = np.delete(np.arange(40), [3, 9, 17, 30])
    assert_same(tuple(part[others] for part in after), tuple(part[others] for part in before))


def test_decode_equals_verify_where_a_visible_value_is_infinite():
    """A weight of zero times a visible infinity is the same in a full block and in a partial one."""
    parents = [-1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    case = make_case(
        rng(), trees=[ta.TokenTree.from_parents(parents)], contexts=[33], storage="ragged", q_heads=1, kv_heads=1
    )
    case.kv.v[2, 0, 3] = np.inf
    case.q[...] *= 10  # some weights underflow to zero
    assert_verify_is_decode(case)


# invariance -------------------------------------------------------------------------------------------------

ALL = list(mask_kinds())
INVARIANT = ["full", "causal", "tree", "tree&(window|sink)", "causal&padded_left"]


@DRAWN
@given(bounded_cases(INVARIANT), seeds())
def test_batch_composition(case, seed):
    together = attend(case)
    for seq in range(case.num_seqs):
        single = alone(case, seq, rng(seed))
        assert_same(attend(single), rows_of(together, *case.q_indptr[seq : seq + 2]))


@pytest.mark.parametrize("mask", ALL)
def test_batch_composition_for_every_mask(mask):
    case = make_case(rng(1), mask=mask)
    together = attend(case)
    for seq in range(case.num_seqs):
        single = alone(case, seq, rng(seq))
        assert_same(attend(single), rows_of(together, *case.q_indptr[seq : seq + 2]))


@DRAWN
@given(bounded_cases(INVARIANT), st.sampled_from([1, 2, 3, 16, 17, 64, 256]), seeds())
def test_page_size_and_permutation(case, page_size, seed):
    assert_same(attend(repack(case, rng(seed), page_size=page_size)), attend(case))


@DRAWN
@given(bounded_cases(INVARIANT))
def test_ragged_equals_paged(case):
    assert_same(attend(repack(case, rng(), storage="ragged")), attend(case))


@DRAWN
@given(bounded_cases(INVARIANT), st.sampled_from([1, 2, 3, 5, 64]))
def test_threads(case, threads):
    assert_same(attend(case, threads=threads), attend(case, threads=1))


@DRAWN
@given(bounded_cases(["tree", "causal"]))
def test_rows_of_a_prefill_equal_a_smaller_one(case):
    """The last rows alone, as later rounds of the same tree (or sequence)."""
    q_len = np.diff(case.q_indptr)
    keep = (q_len + 1) // 2
    at = np.concatenate([np.arange(end - n, end) for end, n in zip(case.q_indptr[1:], keep, strict=True)] or [[]])
    fewer = replace(case, q=case.q[at.astype(int)], q_indptr=np.concatenate([[0], np.cumsum(keep)]).astype(np.int32))
    assert_same(attend(fewer), tuple(part[at.astype(int)] for part in attend(case)))


@DRAWN
@given(bounded_cases(["tree", "causal"]))
def test_heads_are_independent(case):
    """Each group of heads computed on its own."""
    together = attend(case)
    ragged = repack(case, rng(), storage="ragged")
    group = case.q.shape[1] // case.kv.kv_heads
    for head in range(case.kv.kv_heads):
        mine = slice(head * group, (head + 1) * group)
        kv = ta.RaggedKV(ragged.kv.k[:, head : head + 1], ragged.kv.v[:, head : head + 1], ragged.kv.kv_indptr)
        assert_same(attend(replace(ragged, q=case.q[:, mine], kv=kv)), tuple(part[:, mine] for part in together))


def test_group_one_equals_a_group_of_equals():
    """Query heads of one group with the same query give the same rows, in whatever row tile they fall."""
    for group in (2, 5, 9, 40):
        case = make_case(rng(group), mask="tree", q_heads=1, kv_heads=1)
        wide = replace(case, q=np.repeat(case.q, group, axis=1))
        assert_same(attend(wide), tuple(np.repeat(part, group, axis=1) for part in attend(case)))


def test_runs_repeat():
    case = make_case(rng(), mask="tree&(window|sink)", dtype="float16")
    plan = plan_of(case)
    first = plan.run(case.q)
    for _ in range(20):
        assert_same(plan.run(case.q), first)


# tiles ------------------------------------------------------------------------------------------------------


def tile_cases():
    cases = []
    for seed, mask in enumerate(["tree", "causal&(window|sink)"]):
        lengths = [(1, 120), (40, 40), (19, 133), (0, 3), (3, 70), (2, 65)]
        cases += [
            make_case(rng(seed), mask=mask, lengths=lengths, q_heads=heads, kv_heads=heads // 2 or 1)
            for heads in (4, 1)
        ]
    return cases


@pytest.mark.parametrize("config", TILES, ids=str)
def test_tile(config):
    spec = KernelSpec(16, 16, "float32", "float32", ta.Causal().form)
    assert config.legal(spec, host()) == []
    for case in tile_cases()[: 4 if config in TILES[:3] else 2]:
        want = attend(case)
        with tile(config):
            plan = plan_of(case)
            assert plan._launch.kernel.config == config
            assert_same(plan.run(case.q), want)


REFUSED = [
    TileConfig(columns=24),
    TileConfig(columns=64),
    TileConfig(rows=24),
    TileConfig(panel=12),
    TileConfig(tokens=7),
    TileConfig(tokens=16, columns=32),
    TileConfig(few=(4, 1)),
    TileConfig(few=(1, 9)),
    TileConfig(few=()),
    TileConfig(columns=37),
    TileConfig(few_columns=0),
    TileConfig(few_columns=-32),
    TileConfig(rows=0),
    TileConfig(tokens=1, columns=0),
]


@pytest.mark.parametrize("config", REFUSED, ids=str)
def test_tiles_that_cannot_run_are_refused_with_reasons(config):
    spec = KernelSpec(16, 16, "float32", "float32", ta.Causal().form)
    reasons = config.legal(spec, KNOWN["llvm-avx2"])
    assert reasons
    assert all(isinstance(reason, str) and len(reason) > 10 for reason in reasons)


@pytest.mark.parametrize("d", [320, 384, 640])
@pytest.mark.parametrize("target", KNOWN)
def test_T17_tiles_for_odd_head_sizes(d, target):
    """A legal tile, or an error with the reason."""
    from treeattn.schedules.tiles import select

    spec = KernelSpec(d, d, "float16", "float16", ta.Tree([]).form)
    try:
        config = select(spec, KNOWN[target])
    except UnsupportedError as error:
        assert str(error).strip()
    else:
        assert config.legal(spec, KNOWN[target]) == []


# long sequences ---------------------------------------------------------------------------------------------


def test_long_context_and_big_tree():
    tree = parents_first(random_forest(rng(), 300))
    case = make_case(rng(), trees=[tree], contexts=[3000], q_heads=2, kv_heads=1, dtype="float16")
    assert_verify_is_decode(replace(case, q=case.q[-40:], q_indptr=np.array([0, 40], np.int32)))
    whole = attend(case)
    assert_same(attend(repack(case, rng(1), page_size=64)), whole)


def test_all_layouts_at_once():
    """Batch, page size, threads and tile changed together."""
    base = make_case(rng(7), mask="tree", lengths=[(30, 64), (1, 48), (9, 9)], q_heads=3, kv_heads=1)
    want = attend(base)
    for config, threads, page_size in product(TILES[:3], (1, 3), (1, 17)):
        with tile(config):
            assert_same(attend(repack(base, rng(page_size), page_size=page_size), threads=threads), want)


def test_equal_sequences_give_equal_rows():
    k = rng().standard_normal((50, 2, 16)).astype(np.float32)
    q = rng(1).standard_normal((5, 4, 16)).astype(np.float32)
    indptr = np.array([0, 50, 100, 150], np.int32)
    kv = pack(rng(2), np.tile(k, (3, 1, 1)), np.tile(k[::-1], (3, 1, 1)), indptr, page_size=3)
    out, lse = ta.attention(np.tile(q, (3, 1, 1)), kv, ta.Causal(), q_indptr=[0, 5, 10, 15])
    for seq in (1, 2):
        assert_same((out[5 * seq : 5 * seq + 5], lse[5 * seq : 5 * seq + 5]), (out[:5], lse[:5]))
