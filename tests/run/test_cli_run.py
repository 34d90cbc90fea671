"""``treeattn run`` on case files that NumPy wrote alone: the reference's result, and what --check finds."""

from __future__ import annotations

import json

import numpy as np
import pytest

from treeattn.casefile import load_case
from treeattn.cli import main
from treeattn.reference import attention
from treeattn.testing import make_case


def arrays_of(case):
    names = ("page_indptr", "page_ids", "last_page_len", "pages")
    names = names if hasattr(case.kv, "pages") else ("k", "v", "kv_indptr")
    arrays = {"q": case.q, "q_indptr": case.q_indptr} | {name: getattr(case.kv, name) for name in names}
    if trees := case.mask.trees:
        arrays["tree_parents"] = np.concatenate([tree.parents for tree in trees])
        arrays["tree_indptr"] = np.cumsum([0, *(tree.num_nodes for tree in trees)])
    return arrays


@pytest.fixture(params=["paged", "ragged"])
def arrays(request):
    return arrays_of(make_case(np.random.default_rng(3), mask="tree", storage=request.param, dtype="float32"))


def run(tmp_path, arrays, *options):
    np.savez(tmp_path / "case.npz", **arrays)
    return main(["run", str(tmp_path / "case.npz"), *options])


@pytest.mark.parametrize("options", [{}, {"window": 5, "sink": 2}, {"sm_scale": 0.5}])
def test_result_is_the_references(tmp_path, arrays, options):
    out_file = tmp_path / "out.npz"
    assert run(tmp_path, arrays | options, "--out", str(out_file), "--check", "--threads", "2") == 0
    case = load_case(tmp_path / "case.npz")
    out, lse = attention(case.q, case.kv, case.mask, q_indptr=case.q_indptr, sm_scale=case.sm_scale)
    with np.load(out_file) as found:
        np.testing.assert_allclose(found["lse"], lse, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(found["out"], out, atol=5e-4)


def test_json_describes_the_run(tmp_path, arrays, capsys):
    assert run(tmp_path, arrays, "--json", "--check") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rows"] == len(arrays["q"])
    assert report["mask"] == ["Tree"]
    assert report["difference"] is None


def test_check_finds_a_wrong_expectation(tmp_path, arrays, capsys):
    case = make_case(np.random.default_rng(3), mask="tree", storage="ragged")
    right = attention(case.q, case.kv, case.mask, q_indptr=case.q_indptr)
    arrays = arrays_of(case) | {"expected_out": right[0], "expected_lse": right[1]}
    assert run(tmp_path, arrays, "--check") == 0
    assert "within the budget" in capsys.readouterr().out
    natural = arrays | {"expected_lse": right[1] * np.log(2)}
    assert run(tmp_path, natural, "--check") == 1
    assert "DIFFERS: expected_out and expected_lse of the file" in capsys.readouterr().out
    assert run(tmp_path, natural) == 0  # not asked to compare


def test_other_targets_are_refused_in_one_line(tmp_path, arrays, capsys):
    assert run(tmp_path, arrays, "--target", "abacus") == 2
    assert capsys.readouterr().err.count("\n") == 1
