"""The script for GPU machines runs to its end without one."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="CUDA text runs on the CPU by way of g++")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cuda_check.py"


def test_emulated_in_no_time(tmp_path):
    """Without time it makes one check and one measurement, writes both files and says what it left out."""
    command = [sys.executable, SCRIPT, "--emulate", "--minutes", "0", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    checks, times = (list(csv.DictReader((tmp_path / name).open())) for name in ("cuda_check.csv", "cuda_times.csv"))
    assert [row["result"] for row in checks] == ["right", "left out: no time"]
    assert times[0]["candidate"] == "treeattn"
    assert float(times[0]["microseconds"]) > 0
