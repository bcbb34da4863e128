"""Starts the runner: `python x.clover/runner.pyz ...` or `python -m clover_compile.runtime ...`."""

from __future__ import annotations

import sys
from pathlib import Path

LEAST_PYTHON = (3, 11)


def entry() -> None:
    """Runs the command line and exits with its status; packed in a bundle, runs that bundle."""
    archive = _archive(Path(__file__))
    if sys.version_info < LEAST_PYTHON:
        wanted = ".".join(map(str, LEAST_PYTHON))
        sys.exit(f"runner: needs Python {wanted} or newer, this is {sys.version.split()[0]}")
    from clover_compile.runtime.main import main

    if archive is None:
        sys.exit(main(sys.argv[1:], prog="python -m clover_compile.runtime"))
    sys.exit(main(sys.argv[1:], bundle=archive.parent, prog=archive.name))


def _archive(module: Path) -> Path | None:
    """The zip archive `module` was imported from; None outside of one."""
    return next((folder.resolve() for folder in module.parents if folder.is_file()), None)


if __name__ == "__main__":
    entry()
