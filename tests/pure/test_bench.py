"""What a benchmark claims: the work it counts, the goals it compares with, the timer's turns."""

from __future__ import annotations

import csv
import time

import numpy as np
import pytest

from treeattn.bench import limits
from treeattn.bench.limits import Probe
from treeattn.bench.measure import Result
from treeattn.bench.report import records, write_csv
from treeattn.bench.rivals import CANDIDATES, UnavailableError, numpy_dense, resolve
from treeattn.bench.timer import Candidate, Timing, interleave
from treeattn.bench.workloads import LIMITS, TREES, WORKLOADS, Goal, Workload, build, likely_tree, select
from treeattn.errors import UnsupportedError
from treeattn.masks import Causal, Full
from treeattn.reference import attention, visible

SMALL = Workload("small", 4, 2, 8, (5, 0, 33), (7, 1, 40), page_size=3)


@pytest.mark.parametrize("tree", TREES)
def test_useful_work_is_what_the_reference_sees(tree):
    problem = build(Workload("small", 4, 2, 8, (5, 0, 33), (7, 1, 40), tree=tree), "float32")
    for mask in (problem.mask, Causal(), Full()):
        pairs = sum(
            visible(mask, seq, nodes, int(problem.kv_len[seq])).sum()
            for seq, nodes in enumerate(problem.workload.nodes)
        )
        assert problem.flops_of(mask) == 4 * pairs * 4 * 8


def test_bytes_count_keys_and_values_once():
    assert build(SMALL, "float16").num_bytes == (12 + 1 + 73) * 2 * 2 * 8 * 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_problems_are_valid_and_numpy_agrees_with_the_reference(dtype):
    problem = build(SMALL, dtype)
    problem.kv.validate()
    out, _ = attention(problem.q, problem.kv, problem.mask, q_indptr=problem.q_indptr)
    np.testing.assert_allclose(numpy_dense(problem, 1)(), out, atol=2e-6)


def test_workloads_have_names_and_known_candidates():
    names = [work.name for work in WORKLOADS]
    assert len(set(names)) == len(names)
    for work in WORKLOADS:
        assert set(work.own_candidates + work.rivals) <= set(CANDIDATES)
        assert len(work.contexts) == len(work.nodes)
    assert [work.name for work in select(["decode-?", "star"])][-1] == "star"
    with pytest.raises(UnsupportedError, match="no 'x'"):
        select(["x"])


def test_decode_rows_are_what_their_names_say():
    assert [work.rows for work in select(["decode-?"])] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [work.rows for work in select(["small-*"])] == [16, 28, 32]


def test_likely_tree_is_a_tree_of_its_size():
    tree = likely_tree(64)
    assert tree.num_nodes == 64
    assert (tree.parents == -1).sum() == 1
    assert 4 <= tree.depth.max() <= 12


def test_against():
    assert resolve(["tvm", "torch", "sdpa"]) == ("tvm", "sdpa", "sdpa+gather", "flex")
    assert resolve(["none"]) == ()
    with pytest.raises(UnavailableError, match="nobody"):
        resolve(["nobody"])


def test_timer_takes_turns_and_lets_slow_ones_sit_out():
    calls = []

    def slow():
        calls.append("slow")
        time.sleep(0.05)

    timings = interleave([Candidate("fast", lambda: calls.append("fast")), Candidate("slow", slow)], 0.1, 6)
    assert [sorted(calls[turn : turn + 2]) for turn in (0, 2, 4)] == [["fast", "slow"]] * 3  # untimed, then timed
    assert timings["slow"].samples == 2
    assert timings["fast"].samples >= 2
    assert timings["slow"].best >= 0.05


def test_before_runs_right_before_each_sample():
    calls = []
    interleave([Candidate("a", lambda: calls.append("a"), lambda: calls.append("before"))], 0.01, 2)
    assert calls == ["a", "before", "a", "before", "a"]


def result(workload=SMALL, **timings):
    found = {"treeattn": 1.0, "sgemm": 1.0, "read": 1.0} | timings
    probes = {"sgemm": Probe("sgemm", 200.0, "", print), "read": Probe("read", 50.0, "", print)}
    times = {name: Timing(best, 3) for name, best in found.items()}
    return Result(workload, "float32", 2, 100.0, 40.0, times, probes, "all")


def test_fractions_and_goals():
    goals = (
        Goal((("compute", 0.6), ("bandwidth", 0.8))),
        Goal((("compute", 0.6),)),
        Goal((("sdpa", 2.0),)),
        Goal((("tvm", 50.0),)),
        Goal((("compute", 0.9),), ("float16",)),
    )
    found = result(Workload("w", 1, 1, 8, (1,), (1,), goals), sdpa=2.5)
    assert [found.fraction(limit) for limit in LIMITS] == [0.5, 0.8, 0.8]
    assert [met for _, met in found.goals()] == [True, False, True, None]


def test_csv_has_a_row_for_each_candidate_and_the_environment(tmp_path):
    write_csv(tmp_path / "b.csv", [result(sdpa=2.0)])
    with (tmp_path / "b.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["candidate"] for row in rows] == ["treeattn", "sgemm", "read", "sdpa"]
    assert rows[3]["over_treeattn"] == "2.0"
    assert rows[0]["numpy"] == np.__version__
    assert records([result()])[0]["compute"] == 0.5


@pytest.mark.parametrize("probe", [limits.sgemm, limits.read])
def test_probes_of_all_workloads_share_their_arrays(probe):
    """Ninety results with arrays of their own would fill the memory of a small machine."""
    assert probe(1) is probe(1)
