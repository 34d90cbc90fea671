"""Tests here share the helpers of ``tests/run``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "run"))
