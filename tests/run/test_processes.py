"""Plans in several threads at once, in threads that end, in forked children, and in processes that start together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import treeattn as ta
from treeattn.backends.llvm import MOST_POOLS
from treeattn.targets import available_threads

KEYS = np.random.default_rng(0).standard_normal((300, 2, 8), np.float32)
QUERIES = np.random.default_rng(1).standard_normal((5, 4, 8), np.float32)
KV = ta.RaggedKV(KEYS, KEYS, [0, 300])


def plan(threads=2):
    return ta.plan(KV, ta.Causal(), q_indptr=[0, 5], q_heads=4, dtype="float32", threads=threads)


def test_threads_share_a_plan():
    shared = plan()
    want, _ = shared.run(QUERIES, KV)

    def work(thread):
        runs = [(plan(1 + i % 3) if i % 20 == 0 else shared).run(QUERIES, KV)[0] for i in range(100)]
        return all(np.array_equal(out, want) for out in runs)

    with ThreadPoolExecutor(3 * MOST_POOLS) as threads:
        assert all(threads.map(work, range(3 * MOST_POOLS)))


def test_threads_that_end_leave_no_workers():
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        pytest.skip("no /proc/self/task to count threads in")
    shared = plan()
    before = len(list(tasks.iterdir()))
    for _ in range(50):
        thread = threading.Thread(target=shared.run, args=(QUERIES, KV))
        thread.start()
        thread.join()
    most = 2 * MOST_POOLS * (available_threads() + 1)
    assert len(list(tasks.iterdir())) <= before + most


def run_in_child(work):
    """Exit status of a forked child, or None if it had to be ended."""
    child = os.fork()
    if child == 0:
        os._exit(0 if work() else 1)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_computes_too():
    shared = plan()
    want, _ = shared.run(QUERIES, KV)

    def same():
        return np.array_equal(shared.run(QUERIES, KV)[0], want) and np.array_equal(plan(3).run(QUERIES, KV)[0], want)

    assert run_in_child(same) == 0
    assert run_in_child(lambda: run_in_child(same) == 0) == 0
    assert same()


def of_a_process(_):
    return ta.attention(QUERIES, KV, ta.Causal())[0].tobytes()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_that_start_together(method, monkeypatch, tmp_path):
    """With nothing on disk each compiles, and what one leaves is sound for the others."""
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system cannot {method}")
    want = of_a_process(0)
    if method == "spawn":
        monkeypatch.setenv("TREEATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with multiprocessing.get_context(method).Pool(3) as pool:
        assert set(pool.map_async(of_a_process, range(6)).get(timeout=100)) == {want}
