"""What the commands write to: a table to standard output, progress to standard error on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

Item = TypeVar("Item")
PATIENCE = 2.0  # seconds
WIDE = 200  # columns; a file or a pipe has no width to keep to
LEAST = 116  # columns; a narrower terminal folds the lines of a table, where rich would cut its columns away


def console() -> Console:
    """Console on standard output."""
    from rich.console import Console

    found = Console(highlight=False)
    found.width = max(found.width, LEAST) if found.is_terminal else WIDE
    return found


def progress(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
    """Yield ``items``, with a bar from the third second on."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import Progress

    start = time.perf_counter()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total, visible=False)
        for item in items:
            yield item
            bar.update(task, advance=1, visible=time.perf_counter() - start > PATIENCE)


@contextmanager
def bar(label: str) -> Iterator[Callable[[float], None]]:
    """Show a bar from the third second on; yields what to tell the part that is done, 0 to 1."""
    if not sys.stderr.isatty():
        yield lambda part: None
        return
    from rich.console import Console
    from rich.progress import Progress

    start = time.perf_counter()
    with Progress(console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(label, total=1.0, visible=False)
        yield lambda part: shown.update(task, completed=part, visible=time.perf_counter() - start > PATIENCE)
