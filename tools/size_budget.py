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
MAX_PACKAGE, MAX_KERNELS = 14000, 3000
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


def excesses(root: Path) -> tuple[list[str], int, int]:
    """Return what is over its limit, and the code lines of the package and of its kernels."""
    found, package, kernels = [], 0, 0
    for path in sorted(root.rglob("*.py")):
        source, name = path.read_text(), path.relative_to(root)
        lines = code_lines(source)
        is_kernel = name.parts[0] == "kernels"
        package += len(lines)
        kernels += len(lines) if is_kernel else 0
        if len(lines) > MAX_FILE:
            found.append(f"{name}: {len(lines)} code lines, at most {MAX_FILE}")
        limit = MAX_KERNEL_BODY if is_kernel else MAX_FUNCTION
        for function, first, last in functions(source):
            size = len(lines & set(range(first, last + 1)))
            if size > limit:
                found.append(f"{name}:{first}: {function} has {size} code lines, at most {limit}")
    for label, size, limit in (("package", package, MAX_PACKAGE), ("kernels", kernels, MAX_KERNELS)):
        if size > limit:
            found.append(f"{label}: {size} code lines, at most {limit}")
    return found, package, kernels


def main() -> int:
    """Print what is over its limit; return 1 if anything is."""
    found, package, kernels = excesses(PACKAGE)
    for line in found:
        print(line, file=sys.stderr)
    print(f"size budget: {package} of {MAX_PACKAGE} code lines, {kernels} of {MAX_KERNELS} in kernels")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
