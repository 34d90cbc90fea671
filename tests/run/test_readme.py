"""What the README prints runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

README = Path(__file__).parents[2] / "README.md"


def test_the_examples_run(capsys):
    """One after the other, as a reader would; what a model gives the second is made up here."""
    rng = np.random.default_rng(0)
    names = {
        "k_new": rng.standard_normal((6, 8, 128)).astype(np.float16),
        "v_new": rng.standard_normal((6, 8, 128)).astype(np.float16),
        "draft_tokens": [3, 1, 4, 1, 5, 9],
        "logits": rng.standard_normal((6, 20)).astype(np.float32),
    }
    first, second = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(first, str(README), "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2:] == ["(6, 32, 128)", "(6, 32)"]
    assert printed[0] == "0"
    exec(compile(second, str(README), "exec"), names)
    assert names["cache"].length(names["seq"]) == len(names["accepted"].nodes)
