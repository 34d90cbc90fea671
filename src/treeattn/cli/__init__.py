"""The ``treeattn`` command: one module a command, imported when it is called.

Exit status 0; 1 where a comparison fails; 2 with one line on standard error for bad input. Only a fault of
treeattn itself shows a traceback.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import zipfile
from collections.abc import Sequence

import click

from ..errors import TreeAttnError

COMMANDS = ("run", "demo", "bench", "show", "compile", "generate", "info")


class LazyGroup(click.Group):
    """Commands found by name, so that ``--help`` imports none of what they need."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f".{cmd_name}", __name__).command
        return command


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="treeattn")
def group() -> None:
    """Tree attention for language-model inference."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names in a file may hold what no terminal shows
    try:
        status = group.main(argv, prog_name="treeattn", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        status = 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader has gone: nothing more to say to it
        status = 1
    except (click.ClickException, TreeAttnError, OSError, MemoryError, zipfile.BadZipFile) as error:
        print(f"treeattn: {' '.join(_explain(error).split())}", file=sys.stderr)
        status = 2
    except (KeyboardInterrupt, click.Abort):
        print("treeattn: interrupted", file=sys.stderr)
        status = 130
    return status if isinstance(status, int) else 0


def _explain(error: Exception) -> str:
    if isinstance(error, click.UsageError) and error.ctx:
        return f"{error.format_message()} (see {error.ctx.command_path} --help)"
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return f"out of memory {error}" if isinstance(error, MemoryError) else str(error)
