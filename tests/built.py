"""Bundles that several tests share: built once per test run, whatever the number of workers."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from clover_compile import models
from clover_compile.build import build
from clover_compile.options import BuildOptions


def demonstration() -> Path:
    """The bundle of the demonstration checkpoint; the first worker that asks builds it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    folder = Path(tempfile.gettempdir()) / f"clover-tests-{run}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        output = folder / "demonstration.clover"
        if not output.exists():
            build(BuildOptions(model=models.find(), output=output), lambda line: None)
        return output
