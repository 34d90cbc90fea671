"""What a barrier stands under, read from a kernel's OpenCL text: every loop and branch around it must be uniform.

The text has one statement a line. A variable is *divergent* if threads of a block may hold different values: it comes
from the thread's index, from shared memory, or from another divergent one, or is set where threads may disagree. What
is read from global memory at a uniform index is uniform.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

NAME = r"[A-Za-z_]\w*"
TYPE = r"(?:int|long|uint|ulong|float|half|bool|ushort|uchar)"
DECLARED_ARRAY = re.compile(rf"(__local )?{TYPE} ({NAME})\[\d+\];")
SET = re.compile(rf"(?:{TYPE} )?({NAME})(\[.*\])? = (.*);")


@dataclass(frozen=True)
class Frame:
    """A loop or branch: its header, and whether threads may disagree about it."""

    header: str
    divergent: bool

    @property
    def is_loop(self) -> bool:
        return self.header.startswith("for")


@dataclass
class Reader:
    """Walks over a kernel's lines; walked until it finds no more, ``divergent`` is complete."""

    lines: list[str]
    divergent: set[str] = field(default_factory=set)

    def __post_init__(self):
        arrays = [found for line in self.lines if (found := DECLARED_ARRAY.match(line))]
        self.divergent |= {found[2] for found in arrays if found[1]}
        self.private = {found[2] for found in arrays if not found[1]}

    def diverges(self, expression: str) -> bool:
        return "get_local_id" in expression or bool(self.divergent & set(re.findall(NAME, expression)))

    def walk(self, wanted: str) -> list[list[Frame]]:
        """The frames around every line that contains ``wanted``, outermost first."""
        stack: list[Frame] = []
        found = []
        for line in self.lines:
            if line.startswith("}"):
                last = stack.pop() if stack else Frame("", False)
                if "else" in line:
                    stack.append(last)
            elif line.endswith("{"):
                stack.append(Frame(line, self.diverges(line)))
                if loop := re.match(rf"for \(int ({NAME}) =", line):
                    self._set(loop[1], line, stack)
            else:
                if wanted in line:
                    found.append(list(stack))
                made = SET.match(line)
                if made and (not made[2] or made[1] in self.private):
                    self._set(made[1], f"{made[2]} {made[3]}", stack)
        return found

    def _set(self, name: str, value: str, stack: list[Frame]) -> None:
        if self.diverges(value) or any(frame.divergent for frame in stack):
            self.divergent.add(name)


def frames_of(text: str, wanted: str) -> list[list[Frame]]:
    """The frames around every line that contains ``wanted``, outermost first, in each kernel of a text."""
    found = []
    for kernel in re.split(r"__kernel [^{;]*\{\n", text)[1:]:
        reader, known = Reader([line.strip() for line in kernel.splitlines()]), -1
        while known < len(reader.divergent):
            known = len(reader.divergent)
            frames = reader.walk(wanted)
        found += frames
    return found


def shared_bytes(text: str) -> int:
    """Bytes of shared memory that kernels of a text declare, together."""
    sizes = {"float": 4, "int": 4, "long": 8}
    return sum(sizes[kind] * int(count) for kind, count in re.findall(r"__local (\w+) \w+\[(\d+)\]", text))
