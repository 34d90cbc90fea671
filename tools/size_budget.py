"""Keep the package small: fail where a file, a function or the whole has more code lines than it may.

A code line is a line that holds code: no blank, no comment, no docstring. Raising a limit is an edit of this
file, to be argued for in review.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "treeattn"
MAX_FILE, MAX_FUNCTION, MAX_KERNEL_BODY = 400, 60, 150
MAX_PACKAGE = 14000
MAX_PARTS = {"kernels": 1500, "kernels/gpu": 1500}
"""Of the files of a folder, not of those below it."""
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines of ``source`` that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def functions(source: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, first and last line of every function of ``source``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, node.end_lineno or node.lineno


def excesses(root: Path) -> tuple[list[str], dict[str, int]]:
    """Return what is over its limit, and the code lines of the package and of the folders that have a limit."""
    found, sizes = [], dict.fromkeys(["package", *MAX_PARTS], 0)
    for path in sorted(root.rglob("*.py")):
        source, name = path.read_text(), path.relative_to(root)
        lines, folder = code_lines(source), name.parent.as_posix()
        sizes["package"] += len(lines)
        if folder in MAX_PARTS:
            sizes[folder] += len(lines)
        if len(lines) > MAX_FILE:
            found.append(f"{name}: {len(lines)} code lines, at most {MAX_FILE}")
        limit = MAX_KERNEL_BODY if folder in MAX_PARTS else MAX_FUNCTION
        for function, first, last in functions(source):
            size = len(lines & set(range(first, last + 1)))
            if size > limit:
                found.append(f"{name}:{first}: {function} has {size} code lines, at most {limit}")
    for label, limit in limits().items():
        if sizes[label] > limit:
            found.append(f"{label}: {sizes[label]} code lines, at most {limit}")
    return found, sizes


def limits() -> dict[str, int]:
    """Return the limits of the package and of its folders."""
    return {"package": MAX_PACKAGE, **MAX_PARTS}


def main() -> int:
    """Print what is over its limit; return 1 if anything is."""
    found, sizes = excesses(PACKAGE)
    for line in found:
        print(line, file=sys.stderr)
    print("code lines:", ", ".join(f"{sizes[label]} of {limit} in {label}" for label, limit in limits().items()))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
