"""The JavaScript example on an exported WGSL kernel: its packed plan, and its result where there is a WebGPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import treeattn as ta
from treeattn.testing import assert_within_budget

sys.path.append(str(Path(__file__).parents[1] / "run"))
from export_case import PREFIX, WINDOW, example_case, example_result

EXAMPLE = Path(__file__).parents[2] / "examples" / "export_js"
MODULES = EXAMPLE / "node_modules"
DENO = shutil.which("deno") or (str(MODULES / ".bin" / "deno") if (MODULES / ".bin" / "deno").exists() else None)
NODE = shutil.which("node")
DENO_COMMAND = [DENO, "run", "--no-lock", "--allow-read", "--allow-write", "--allow-env", "--unstable-webgpu"]
NO_ADAPTER = 3


def runtimes():
    """Commands that run a script; each may or may not have a WebGPU."""
    return [command for command, program in ((DENO_COMMAND, DENO), ([NODE], NODE)) if program]


@pytest.fixture(scope="module")
def case():
    return example_case()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    spec = json.loads((EXAMPLE / "spec.json").read_text())
    return ta.compile(spec, "webgpu").export(tmp_path_factory.mktemp("js") / "export").parent


def run(command, *arguments):
    environment = os.environ | {"XDG_RUNTIME_DIR": os.environ.get("XDG_RUNTIME_DIR", "/tmp"), "NO_COLOR": "1"}
    words = [*command, EXAMPLE / "main.mjs", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=environment)


@pytest.mark.skipif(not runtimes(), reason="neither node nor deno is installed")
def test_plan_is_packed_by_the_manifest(folder, case, tmp_path):
    done = run(runtimes()[0], folder, tmp_path / "packed", "--pack")
    assert done.returncode == 0, done.stderr
    (kernel,) = json.loads((folder / "manifest.json").read_text())["kernels"]
    content = (tmp_path / "packed").read_bytes()
    plan, tables = kernel["packed"]["plan"], kernel["packed"]["tables"]
    integers = np.frombuffer(content[: len(content) - 4 * len(tables["header"])], np.int32)
    floats = np.frombuffer(content, np.float32)[len(integers) :]
    header = dict(zip((field["name"] for field in plan["header"]), integers.tolist(), strict=False))
    assert {name: header[name] for name in ("bounds_stride", "page_size", "group", "q_heads")} == {
        "bounds_stride": 6, "page_size": 16, "group": 3, "q_heads": 6,
    }  # fmt: skip
    np.testing.assert_allclose(floats, [32**-0.5, 1, 1, -np.inf], rtol=1e-6)
    begins = [header[part["name"]] for part in plan["parts"]]
    parts = np.split(integers, begins)[1:]
    found = {part["name"]: array for part, array in zip(plan["parts"], parts, strict=True)}
    tree = case.mask.trees[0]
    assert begins == sorted(begins)
    assert np.array_equal(found["nodes"].reshape(-1, 3), np.column_stack([tree.intervals, tree.depth]))
    bounds = [tree.intervals[:, 0], PREFIX + tree.depth - WINDOW + 1]
    assert np.array_equal(found["bounds"].reshape(2, -1), bounds)
    assert np.array_equal(found["seqs"], [0, 0, PREFIX, 0, 0, 0, 0, 0])
    assert np.array_equal(found["page_ids"], case.kv.page_ids)
    assert len(found["items"]) == 2 * len(found["merges"])


def test_result_is_the_references(folder, case, tmp_path):
    """Two parts of each tile, merged."""
    reasons = []
    for command in runtimes():
        done = run(command, folder, tmp_path / "out")
        if done.returncode == NO_ADAPTER:
            reasons.append(f"{Path(command[0]).name}: {done.stderr.strip()}")
            continue
        assert done.returncode == 0, done.stdout + done.stderr
        assert_within_budget(*example_result(tmp_path / "out"), case)
        return
    pytest.skip("; ".join(reasons) or "neither node nor deno is installed")
