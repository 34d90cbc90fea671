"""What the README and the docstrings print runs as printed."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
WITH_EXAMPLES = [path.relative_to(ROOT / "src") for path in ROOT.glob("src/**/*.py") if ">>> " in path.read_text()]


def test_the_examples_run(capsys):
    """One after the other, as a reader would."""
    names = {}
    for text in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL):
        exec(compile(text, str(README), "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "0"
    assert printed[-3:] == ["(6, 32, 128)", "(6, 32)", "Accepted(nodes=[0, 1, 4], tokens=[0, 2], bonus_token=5)"]
    assert names["cache"].length(names["seq"]) == len(names["accepted"].nodes)


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=str)
def test_docstrings(path):
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0
