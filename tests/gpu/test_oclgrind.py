"""The kernels under Oclgrind, which watches every access to memory: nothing out of bounds, no data race."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from oclgrind_case import CASES

pytestmark = [
    pytest.mark.skipif(shutil.which("oclgrind") is None, reason="oclgrind is not installed: apt-get install oclgrind"),
    pytest.mark.skipif(importlib.util.find_spec("pyopencl") is None, reason="pyopencl is not installed"),
]


def oclgrind(*arguments):
    """What a run says, reports and all."""
    command = [
        "oclgrind",
        "--data-races",
        "--max-errors",
        "5",
        sys.executable,
        Path(__file__).with_name("oclgrind_case.py"),
    ]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=600, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", CASES)
def test_no_race_and_nothing_out_of_bounds(name):
    assert oclgrind(name).split() == ["done"]


def test_missing_barriers_are_noticed():
    assert "data race" in oclgrind("many rows", "broken")
