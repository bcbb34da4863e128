"""The one place where environment variables are read."""

from __future__ import annotations

import os


def _on(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


def accept() -> bool:
    """CLOVER_ACCEPT=1: tests rewrite their golden files instead of comparing with them."""
    return _on("CLOVER_ACCEPT")


def debug() -> bool:
    """CLOVER_DEBUG=1: errors keep their traceback, as with --debug."""
    return _on("CLOVER_DEBUG")


def environment(**changes: str) -> dict[str, str]:
    """The environment of a process we start: this one's, with changes."""
    return {**os.environ, **changes}
