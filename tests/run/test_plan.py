"""Plans: no compile for new data, balanced and complete work, reuse, and refusal of what was not planned."""

from __future__ import annotations

import threading
import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from helpers import assert_same, attend, plan_of, rng, tile

import treeattn as ta
import treeattn.compiler as compiler
from treeattn import api
from treeattn.reference import visible
from treeattn.schedules.tiles import TileConfig
from treeattn.testing import canaries, make_case, mask_kinds, random_forest, repack

# compilation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["tree", "tree&(window|sink)", "causal"])
def test_new_data_compiles_nothing(mask):
    """A thousand trees, lengths, batches, pages, kv heads and windows, one kernel."""
    case = make_case(rng(), mask=mask, q_heads=4, kv_heads=2)
    attend(case)
    before, kernels = compiler.compilations, len(compiler._kernels)
    source = rng(1)
    for _ in range(340):
        num_seqs, kv_heads = int(source.integers(0, 5)), int(source.integers(1, 4))
        q_len = source.integers(0, 12, num_seqs)
        kv_len = q_len + source.integers(0, 50, num_seqs)
        page_size = int(source.integers(1, 40))
        num_pages = -(-kv_len // page_size)
        pages = np.zeros((int(num_pages.sum()) + 2, 2, kv_heads, page_size, 16), np.float32)
        last = np.where(kv_len > 0, (kv_len - 1) % page_size + 1, 0)
        kv = ta.PagedKV(pages, np.cumsum([0, *num_pages]), source.permutation(int(num_pages.sum())), last)
        made = mask_kinds()[mask](
            source,
            type("Batch", (), {"lengths": list(zip(q_len.tolist(), kv_len.tolist(), strict=True)), "trees": None})(),
        )
        q_heads = kv_heads * 2
        q = np.zeros((int(q_len.sum()), q_heads, 16), np.float32)
        out, lse = ta.attention(q, kv, made, q_indptr=np.cumsum([0, *q_len]))
        assert (out == 0).all()
        assert not np.isnan(lse).any()
    assert (compiler.compilations, len(compiler._kernels)) == (before, kernels)


def test_heads_of_a_kv_head_choose_the_tile():
    """A group's own row counts have tiles; every group beyond eight shares one kernel."""
    cases = {group: make_case(rng(), mask="causal", q_heads=group, kv_heads=1) for group in (*range(1, 12), 16)}
    kernels = {group: plan_of(case)._launch.kernel for group, case in cases.items()}
    assert [kernels[group].config.few for group in range(1, 10)] == [
        (1, 4, 8), (2, 4, 8), (3, 6), (4, 8), (5,), (6,), (7,), (8,), (1,)
    ]  # fmt: skip
    assert kernels[9] is kernels[10] is kernels[16]


def test_one_kernel_per_spec():
    case = make_case(rng(), mask="causal")
    first, second = (plan_of(case)._launch.kernel for _ in range(2))
    assert first is second
    assert plan_of(replace(case, mask=ta.Causal() & ta.Full()))._launch.kernel is first


def test_masks_of_one_form_share_a_kernel():
    case = make_case(rng(), mask="causal")
    one = plan_of(replace(case, mask=ta.Causal() & ta.Window(3)))
    other = plan_of(replace(case, mask=ta.ValidLength([0] * case.num_seqs) & ta.Window(99)))
    assert one._launch.kernel is other._launch.kernel


# work -------------------------------------------------------------------------------------------------------

CONFIGS = [TileConfig(), TileConfig(rows=16), TileConfig(rows=256, columns=60, few=(1, 2, 4, 8))]


def items_of(plan):
    names = ("kind", "seq", "head", "row_begin", "num_rows", "span_begin", "span_end")
    return [dict(zip(names, item, strict=True)) for item in plan._launch.work.items.tolist()]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3, 64])
def test_every_row_of_every_kv_head_belongs_to_one_item(threads, config):
    for seed in range(5):
        case = make_case(rng(seed), mask="tree", q_heads=6, kv_heads=2, num_seqs=9)
        with tile(config):
            plan = plan_of(case, threads=threads)
        done = Counter()
        for item in items_of(plan):
            rows = range(item["row_begin"], item["row_begin"] + item["num_rows"])
            done.update((item["seq"], item["head"], row) for row in rows)
        q_len = np.diff(case.q_indptr) * 3
        assert done == Counter((seq, head, row) for seq, n in enumerate(q_len) for head in range(2) for row in range(n))
        indptr = plan._launch.work.item_indptr
        assert len(indptr) == threads + 1 == plan.threads + 1
        assert (indptr[0], indptr[-1]) == (0, plan.num_items)
        assert (np.diff(indptr) >= 0).all()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_tiles_hold_their_rows(config):
    for rows in range(300):
        case = (
            make_case(rng(), mask="causal", lengths=[(rows, rows)], q_heads=1, kv_heads=1, logit_scale=1.0)
            if rows < 40
            else None
        )
        if case is None:
            k = np.zeros((rows, 1, 16), np.float32)
            case = replace(
                make_case(rng(), mask="causal", lengths=[(1, 1)], storage="ragged", q_heads=1, kv_heads=1),
                q=k,
                kv=ta.RaggedKV(k, k, [0, rows]),
                q_indptr=np.array([0, rows]),
            )
        with tile(config):
            items = items_of(plan_of(case, threads=1))
        capacity = [*config.few, config.rows]
        for item in items:
            assert 0 < item["num_rows"] <= capacity[item["kind"]]
            assert item["kind"] == 0 or item["num_rows"] > capacity[item["kind"] - 1], "a smaller tile would do"


@pytest.mark.parametrize("mask", mask_kinds())
def test_spans_cover_what_is_seen_and_full_ones_are(mask):
    """Spans are disjoint and rising; they hold every visible column; full ones hold no invisible one."""
    for seed in range(6):
        case = make_case(rng(seed), mask=mask, q_heads=2, kv_heads=1)
        plan = plan_of(case, threads=1)
        for item in items_of(plan):
            seq = item["seq"]
            q_len, kv_len = int(np.diff(case.q_indptr)[seq]), int(case.kv.kv_len[seq])
            rows = np.unique(np.arange(item["row_begin"], item["row_begin"] + item["num_rows"]) // 2)
            seen = visible(case.mask, seq, q_len, kv_len)[rows]
            taken = np.zeros(kv_len, int)
            spans = plan._launch.work.spans[item["span_begin"] : item["span_end"]]
            assert (spans[1:, 0] >= spans[:-1, 1]).all()
            for begin, end, full in spans:
                assert 0 <= begin < end <= kv_len
                taken[begin:end] += 1
                assert not full or seen[:, begin:end].all()
            assert taken[seen.any(axis=0)].all()


def visited(plan):
    return [
        int(
            (
                plan._launch.work.spans[i["span_begin"] : i["span_end"], 1]
                - plan._launch.work.spans[i["span_begin"] : i["span_end"], 0]
            ).sum()
        )
        for i in items_of(plan)
    ]


def test_what_no_row_sees_is_not_visited():
    """A window's own columns and the sinks; causal rows nothing after themselves; nothing without keys."""
    k = np.zeros((5000, 1, 16), np.float32)
    kv = ta.RaggedKV(k, k, [0, 5000])

    def columns(mask, rows):
        return visited(api.plan(kv, mask, q_indptr=[0, rows], q_heads=1, dtype="float32", threads=1))

    assert columns(ta.Causal() & ta.Window(100), 1) == [100]
    assert columns(ta.Causal() & (ta.Window(100) | ta.Sink(4)), 1) == [104]
    assert columns(ta.Causal() & ta.Window(100), 8) == [107]
    assert columns(ta.Tree(ta.TokenTree.chain(8)) & ta.Window(100), 8) == [107]
    assert columns(ta.Tree(ta.TokenTree.chain(8)) & (ta.Window(100) | ta.Sink(4)), 8) == [111]
    assert columns(ta.Causal() & ta.PaddedLeft([30]), 1) == [30]
    assert columns(ta.ValidLength([70]), 1) == [70]
    assert columns(ta.ValidLength([0]), 1) == [0]
    triangle = columns(ta.Causal(), 5000)
    assert sum(triangle) < 0.53 * 5000 * len(triangle)


def test_prefix_of_a_tree_is_taken_without_tests():
    plan = plan_of(make_case(rng(), trees=[random_forest(rng(), 30)], contexts=[500], q_heads=1, kv_heads=1))
    assert plan._launch.work.spans[0].tolist() == [0, 500, 1]


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_long_and_short_requests_are_balanced(threads):
    """The dearest thread has at most 1.25 times the mean of the work, where items allow it."""
    source = rng(2)
    kv_len = np.exp(source.uniform(np.log(16), np.log(8192), 32)).astype(int)
    q_len = np.minimum(source.integers(1, 65, 32), kv_len)
    trees = [random_forest(source, n) for n in q_len]
    k = np.zeros((int(kv_len.sum()), 1, 1), np.float32)
    k = np.broadcast_to(k[:, :, :1], (len(k), 8, 16))
    kv = ta.RaggedKV(k, k, np.cumsum([0, *kv_len]))
    plan = api.plan(kv, ta.Tree(trees), q_indptr=np.cumsum([0, *q_len]), q_heads=32, dtype="float32", threads=threads)
    rows = np.array([max(item["num_rows"], 8) for item in items_of(plan)])
    cost = rows * np.array(visited(plan))
    loads = np.add.reduceat(cost, plan._launch.work.item_indptr[:-1])
    assert loads.max() <= 1.25 * loads.mean()


@pytest.mark.parametrize(
    ("threads", "error"),
    [
        (0, ta.IndexRangeError),
        (-1, ta.IndexRangeError),
        (1.0, ta.DTypeError),
        ("2", ta.DTypeError),
        (True, ta.DTypeError),
    ],
)
def test_bad_thread_counts(threads, error):
    case = make_case(rng(), mask="causal")
    with pytest.raises(error, match=r"^threads: expected"):
        plan_of(case, threads=threads)


def test_thread_counts():
    import os

    case = make_case(rng(), mask="causal")
    assert plan_of(case).threads == len(os.sched_getaffinity(0))
    assert plan_of(case, threads=np.int64(3)).threads == 3


# reuse ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["paged", "ragged"])
def test_one_plan_for_every_layer(storage):
    case = make_case(rng(), mask="tree", storage=storage)
    plan = plan_of(case)
    for layer in range(4):
        other = repack_values(case, layer)
        assert_same(plan.run(other.q, other.kv), attend(other))
    assert_same(plan.run(case.q), attend(case))


def repack_values(case, seed):
    """The same lengths and page table with other numbers."""
    source = rng(100 + seed)

    def fresh(array):
        return source.standard_normal(array.shape).astype(array.dtype)

    names = ("pages",) if hasattr(case.kv, "pages") else ("k", "v")
    kv = replace(case.kv, **{name: fresh(getattr(case.kv, name)) for name in names})
    return replace(case, q=fresh(case.q), kv=kv)


def test_layers_of_other_strides_and_a_larger_pool():
    case = make_case(rng(), mask="tree")
    plan = plan_of(case)
    layers = np.full((3, len(case.kv.pages) + 5, *case.kv.pages.shape[1:]), np.nan, np.float32)
    layers[1, : len(case.kv.pages)] = case.kv.pages
    transposed = np.ascontiguousarray(case.kv.pages.transpose(0, 1, 3, 2, 4)).transpose(0, 1, 3, 2, 4)
    for pages in (layers[1], transposed):
        assert_same(plan.run(case.q, replace(case.kv, pages=pages)), attend(case))


def test_a_plan_keeps_what_it_needs():
    """Arrays that the caller changes or drops after planning do not matter."""
    case = make_case(rng(), mask="tree&(window|sink)")
    want = attend(case)
    ids, indptr, q_indptr = case.kv.page_ids.copy(), case.kv.page_indptr.copy(), case.q_indptr.copy()
    plan = plan_of(replace(case, kv=replace(case.kv, page_ids=ids, page_indptr=indptr), q_indptr=q_indptr))
    for array in (indptr, q_indptr):
        array[...] = -7
    assert_same(plan.run(case.q, case.kv), want)


def test_page_ids_changed_after_planning():
    """A page table the caller reuses for the next step must not change, unchecked, what a plan follows."""
    case = make_case(rng(), mask="tree")
    want, ids = attend(case), case.kv.page_ids.copy()
    plan = plan_of(replace(case, kv=replace(case.kv, page_ids=ids)))
    ids[...] = 2**30
    assert plan._launch.table.page_ids.max() < len(case.kv.pages), "the plan would read far outside of the pool"
    assert_same(plan.run(case.q, case.kv), want)


def test_several_python_threads_run_one_plan():
    case = make_case(rng(), mask="tree", lengths=[(40, 300), (1, 200), (9, 9)], q_heads=8, kv_heads=2)
    plan, want, failures = plan_of(case), attend(case), []

    def work():
        try:
            for _ in range(20):
                assert_same(plan.run(case.q), want)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_several_python_threads_plan_and_run_their_own():
    cases, failures = (
        [make_case(rng(seed), mask=mask) for seed, mask in enumerate(("tree", "causal", "full", "tree&(window|sink)"))],
        [],
    )
    want = [attend(case) for case in cases]

    def work(index):
        try:
            for _ in range(10):
                assert_same(attend(cases[index], threads=1 + index), want[index])
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


# refusal ----------------------------------------------------------------------------------------------------

CASE = make_case(rng(), mask="tree")
RAGGED = repack(CASE, rng(), storage="ragged")


def other(**changes):
    return make_case(rng(), mask="tree", **changes)


WRONG_RUNS = {
    "fewer rows": lambda: {"q": CASE.q[:-1]},
    "more rows": lambda: {"q": np.concatenate([CASE.q, CASE.q])},
    "other heads": lambda: {"q": CASE.q[:, :2]},
    "other d": lambda: {"q": CASE.q[..., :8]},
    "flat q": lambda: {"q": CASE.q.reshape(len(CASE.q), -1)},
    "q of another dtype": lambda: {"q": CASE.q.astype(np.float16)},
    "q in float64": lambda: {"q": CASE.q.astype(np.float64)},
    "q a list": lambda: {"q": CASE.q.tolist()},
    "q None": lambda: {"q": None},
    "kv of another kind": lambda: {"kv": RAGGED.kv},
    "kv of another page size": lambda: {"kv": repack(CASE, rng(), page_size=8).kv},
    "kv of another dtype": lambda: {"kv": other(kv_dtype="float16").kv},
    "kv of other heads": lambda: {"kv": other(q_heads=4, kv_heads=4).kv},
    "kv of another d": lambda: {"kv": other(d_qk=8).kv},
    "kv with fewer pages": lambda: {"kv": replace(CASE.kv, pages=CASE.kv.pages[:-1])},
    "kv an array": lambda: {"kv": CASE.kv.pages},
    "kv a string": lambda: {"kv": "pages"},
    "out too small": lambda: {"out": np.zeros_like(CASE.q)[:-1]},
    "out of another d": lambda: {"out": np.zeros((*CASE.q.shape[:2], 8), np.float32)},
    "out flat": lambda: {"out": np.zeros(CASE.q.size, np.float32)},
    "out of another dtype": lambda: {"out": np.zeros(CASE.q.shape, np.float16)},
    "out in float64": lambda: {"out": np.zeros(CASE.q.shape, np.float64)},
    "out a list": lambda: {"out": [1.0]},
    "out spread": lambda: {"out": np.zeros((*CASE.q.shape, 2), np.float32)[..., 0]},
    "out big-endian": lambda: {"out": np.zeros(CASE.q.shape, ">f4")},
    "out unaligned": lambda: {"out": np.ndarray(CASE.q.shape, np.float32, bytearray(CASE.q.nbytes + 1), 1)},
    "out read-only": lambda: {"out": locked(np.zeros_like(CASE.q))},
    "out with rows in one place": lambda: {
        "out": np.lib.stride_tricks.as_strided(np.zeros(16, np.float32), CASE.q.shape, (0, 0, 4))
    },
}


def locked(array):
    array.setflags(write=False)
    return array


@pytest.mark.parametrize("wrong", WRONG_RUNS)
def test_what_was_not_planned_is_refused(wrong):
    """The message names the argument; nothing is written."""
    plan = plan_of(CASE)
    arguments = WRONG_RUNS[wrong]()
    buffer = canaries(CASE.q.shape, np.float32)
    before = np.array(arguments["out"]).tobytes() if "out" in arguments else buffer.surroundings.tobytes()
    with pytest.raises(ta.TreeAttnError, match=rf"^({next(iter(arguments))}|pages): .*(expected|float64)"):
        plan.run(**({"q": CASE.q, "out": buffer.array} | arguments))
    after = np.array(arguments["out"]).tobytes() if "out" in arguments else buffer.surroundings.tobytes()
    assert after == before


def test_a_ragged_plan_wants_rows_enough():
    plan = plan_of(RAGGED)
    kv = RAGGED.kv
    for shorter in (ta.RaggedKV(kv.k[:-1], kv.v[:-1], kv.kv_indptr), CASE.kv):
        with pytest.raises(ta.TreeAttnError, match=r"^kv: expected"):
            plan.run(RAGGED.q, shorter)


PLAN = {"kv": CASE.kv, "mask": CASE.mask, "q_indptr": CASE.q_indptr, "q_heads": 4, "dtype": "float32"}
WRONG_PLANS = {
    "kv": [None, CASE.kv.pages, "kv", 3],
    "mask": [None, "causal", 3, ta.Tree, np.ones((3, 3), bool)],
    "q_indptr": [
        None,
        3,
        "x",
        [[0, 1]],
        [],
        [0],
        [0] * 99,
        CASE.q_indptr + 1,
        CASE.q_indptr[::-1],
        [0, 5, 3, 9, 9, 9, 9],
        CASE.q_indptr * 1.0,
        [0, 0, 0, 0, 0, 0, 2**40],
    ],
    "q_heads": [None, 0, -4, 3, 4.0, "4", True, [4]],
    "dtype": [None, "float64", "int8", np.float64, int, "", "F32", 32, object()],
    "sm_scale": ["1", [1.0], True, np.nan, np.inf, -np.inf, 1e300, 10**400, 1j],
    "target": ["abacus", 3, {}, [], np.zeros(3), object()],
    "softcap": ["1", [1.0], -1.0, 0.0, np.nan, np.inf, True],
    "alibi": ["x", [1.0], [[1.0] * 4], [None] * 4, [1.0] * 5],
    "sink_logits": ["x", [1.0], [[1.0] * 4], [None] * 4],
    "rope": ["neox", 5e5, {}],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in WRONG_PLANS.items() for value in values],
    ids=lambda value: f"{value!r:.30}",
)
def test_wrong_arguments_of_plan(name, value):
    with pytest.raises(ta.TreeAttnError, match=rf"^{name}: "):
        api.plan(**(PLAN | {name: value}))


def test_rows_that_q_does_not_have_are_refused_at_once():
    """Nothing is allocated for rows that are not there: ``[0, 2**31 - 1]`` must not take 16 GiB to refuse."""
    case = make_case(rng(), mask="causal", lengths=[(3, 30)])
    attend(case)
    tracemalloc.start()
    with pytest.raises(ta.TreeAttnError, match=r"^q(_indptr)?: expected"):
        ta.attention(case.q, case.kv, case.mask, q_indptr=[0, 2**22])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22


@pytest.mark.parametrize(("rows", "q_heads"), [(2**20, 2**13), (4, 2**32)])
def test_more_rows_than_int32_counts_are_refused(rows, q_heads):
    """Rows times group: a wrapped product would plan work that is not there."""
    k = np.zeros((5, 2, 16), np.float32)
    with pytest.raises(ta.TreeAttnError, match=r"^q_(indptr|heads): expected"):
        api.plan(ta.RaggedKV(k, k, [0, 5]), ta.Full(), q_indptr=[0, rows], q_heads=q_heads, dtype="float32")


def test_very_many_threads_are_refused_or_harmless():
    """Scratch memory for threads that have nothing to do must not exhaust the machine."""
    case = make_case(rng(), mask="causal", lengths=[(3, 30)])
    want = attend(case)
    tracemalloc.start()
    try:
        assert_same(attend(case, threads=10**5), want)
    except ta.TreeAttnError as error:
        assert str(error).startswith("threads: expected")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**27
