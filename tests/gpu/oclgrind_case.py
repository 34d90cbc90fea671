"""A tiny problem for Oclgrind, in a process of its own: ``python oclgrind_case.py NAME [broken]``."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

import treeattn as ta
from treeattn import api, compiler
from treeattn.testing import assert_within_budget, make_case

CASES = {
    "few rows": {"mask": "tree", "lengths": [(1, 3), (2, 9)], "q_heads": 2, "kv_heads": 1},
    "many rows": {"mask": "tree&(window|sink)", "lengths": [(17, 21), (3, 3)], "q_heads": 3, "kv_heads": 1},
    "split": {"mask": "causal", "lengths": [(1, 150)], "q_heads": 2, "kv_heads": 1},
}


BARRIER = "barrier(CLK_LOCAL_MEM_FENCE);"


def break_kernels() -> None:
    """Take every barrier out of what is generated."""
    generate = compiler.gpu_sources

    def broken(*args):
        return [replace(source, text=source.text.replace(BARRIER, "")) for source in generate(*args)]

    compiler.gpu_sources = broken


def main(name: str, *flags: str) -> None:
    if flags:
        break_kernels()
    case = make_case(np.random.default_rng(0), d_qk=6, page_size=3, **CASES[name])
    assert "Oclgrind" in ta.device("opencl").name
    plan = api.plan(
        case.kv, case.mask, q_indptr=case.q_indptr, q_heads=case.q.shape[1], dtype="float32", target="opencl",
        threads=8 if name == "split" else 1,
    )  # fmt: skip
    assert (plan._launch.work.num_merges > 0) == (name == "split")
    result = plan.run(case.q)
    if not flags:
        assert_within_budget(*result, case)
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
