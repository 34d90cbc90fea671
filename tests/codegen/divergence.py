"""What a barrier stands under, read from a kernel's OpenCL text: every loop and branch around it must be uniform.

The text has one statement a line. A variable is *divergent* if threads of a block may hold different values: it comes
from the thread's index, from private or shared memory, or from another divergent one. What is read from ``plan`` and
``tables`` at a uniform index is uniform.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NAME = r"[A-Za-z_]\w*"
DIVERGENT = re.compile(r"get_local_id|_ptr\w*\s*\[")


@dataclass(frozen=True)
class Frame:
    """A loop or branch: its header, and whether threads may disagree about it."""

    header: str
    divergent: bool

    @property
    def is_loop(self) -> bool:
        return self.header.startswith("for")


def frames_of(text: str, wanted: str) -> list[list[Frame]]:
    """The frames around every line that contains ``wanted``, outermost first."""
    divergent: set[str] = set()
    stack: list[Frame] = []
    found = []

    def diverges(expression: str) -> bool:
        return bool(DIVERGENT.search(expression)) or bool(divergent & set(re.findall(NAME, expression)))

    for line in text[text.index("{") + 1 :].splitlines():
        line = line.strip()
        if line.startswith("}"):
            last = stack.pop() if stack else Frame("", False)
            if "else" in line:
                stack.append(last)
            continue
        if line.endswith("{"):
            stack.append(Frame(line, diverges(line)))
            if loop := re.match(rf"for \(int ({NAME}) =", line):
                divergent.discard(loop[1])
                if stack[-1].divergent:
                    divergent.add(loop[1])
            continue
        if wanted in line:
            found.append(list(stack))
        if declared := re.match(rf"(?:int|long|uint|float|bool) ({NAME}) = (.*);", line):
            (divergent.add if diverges(declared[2]) else divergent.discard)(declared[1])
    return found


def shared_bytes(text: str) -> int:
    """Bytes of shared memory a kernel declares."""
    sizes = {"float": 4, "int": 4, "long": 8}
    return sum(sizes[kind] * int(count) for kind, count in re.findall(r"__local (\w+) \w+\[(\d+)\]", text))
