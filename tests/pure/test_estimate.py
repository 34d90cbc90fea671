"""The cost model of CUDA: counts against counting by hand, and what the plan gives away."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from treeattn.bench import estimate
from treeattn.bench.workloads import WORKLOADS, Workload
from treeattn.cli import main
from treeattn.errors import UnsupportedError

H200 = estimate.KNOWN["h200"]
VERIFY = next(work for work in WORKLOADS if work.name == "verify")


def test_counts_of_a_small_workload():
    """Two sequences of 20 tokens and 4 heads a kv head, 100 columns: two tiles of 40 rows, two blocks of columns."""
    work = Workload("small", 8, 2, 64, (80, 80), (20, 20))
    found = estimate.estimate(work, "float16", H200)
    tiles, blocks, warps = 2 * 2 * 2, 3, 3  # the prefix ends within the second block, the tree has one of its own
    assert found.items == tiles
    assert found.products == tiles * blocks * warps * (8 * 4 + 4 * 8)
    assert found.busiest == 4 * found.products // tiles // warps  # one tensor core of four has nothing to do
    assert found.cache_bytes == tiles * 100 * 2 * 64 * 2
    keys_and_values, rows = 2 * 100 * 2 * 2 * 64 * 2, 40 * 8
    assert found.useful_bytes == keys_and_values
    assert found.memory_bytes == keys_and_values + rows * (2 * 64 * 2 + 4)
    assert found.seconds == max(found.memory_bytes / 4.8e12, found.busiest * 4096 * 132 / 989e12)


def test_keys_are_split_where_multiprocessors_would_idle():
    found = estimate.estimate(Workload("one", 32, 8, 128, (8191,), (1,)), "float16", H200)
    assert 100 <= found.items <= 132
    assert found.memory_bytes > found.useful_bytes + found.items * 4 * 130 * 4 * 2


@pytest.mark.parametrize("batch", [4, 16])
@pytest.mark.parametrize("context", [1024, 4096])
def test_trees_of_64_nodes_come_near_the_limit(batch, context):
    """32 and 8 heads of 128: within 1.3 of the larger of bytes over bandwidth and operations over the rate."""
    work = replace(VERIFY, contexts=(context,) * batch, nodes=(64,) * batch)
    found = estimate.estimate(work, "float16", H200)
    assert found.limit <= found.seconds <= 1.3 * found.limit
    assert found.resident == 2


def test_what_tensor_cores_do_not_serve_is_refused():
    with pytest.raises(UnsupportedError, match=r"not for tensor cores .*float32"):
        estimate.estimate(VERIFY, "float32", H200)


def test_the_command(capsys):
    assert main(["bench", "--target", "cuda", "--estimate", "-w", "verify*", "--json"]) in (0, None)
    rows = json.loads(capsys.readouterr().out)["estimates"]
    assert {"verify", "verify-d64"} <= {row["workload"] for row in rows}
    assert all(np.isfinite(row["seconds"]) for row in rows)
    main(["bench", "--target", "cuda", "--estimate", "-w", "verify", "--gpu", "a100"])
    assert "A100 SXM 80 GB: 2.04 TB/s, 312 TFLOP/s" in capsys.readouterr().out


def test_cuda_is_not_timed_here(capsys):
    assert main(["bench", "--target", "cuda", "-w", "verify"]) == 2
    assert main(["bench", "--gpu", "h200", "-w", "verify"]) == 2
    assert capsys.readouterr().err.count("--estimate") == 2


def test_a_narrow_terminal_cuts_no_column(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # standard output counts as a terminal
    monkeypatch.setenv("COLUMNS", "80")
    main(["bench", "--target", "cuda", "--estimate", "-w", "verify*"])
    shown = capsys.readouterr().out
    assert "\x1b[" in shown
    assert "…" not in shown
    assert "verify-group1" in shown
