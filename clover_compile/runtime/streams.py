"""Standard streams that may be closed, full or cut: diagnostics must never change a result."""

from __future__ import annotations

import contextlib
import os
import sys

from clover_compile.runtime.errors import OutputClosed

PIPE_CLOSED, INTERRUPTED, TERMINATED = 141, 130, 143
"""128 + the number of the signal, as a shell reports them."""


def prepare() -> None:
    """Gives a closed stderr a sink, lest Python print to stdout instead; raises OutputClosed."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        raise OutputClosed(stream="standard output")


def say(text: str) -> None:
    """One line on stderr; a stderr that takes nothing is no reason to fail."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def progress(text: str, last: bool = False) -> None:
    """Rewrites one line of a terminal; silent where stderr is none. `last` ends the line."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="\n" if last else "", file=sys.stderr, flush=True)


def abandon_stdout() -> None:
    """After a broken pipe nothing more can be said; keeps Python from trying at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
