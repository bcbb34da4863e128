"""Builds that can be killed cheaply: python -m tests.interrupted MODEL OUTPUT HOW COUNT SEED.

The build is the real one, from the command line to the renaming, but tracing, lowering and proof
are stand-ins that write slowly. One process imports everything and forks a child per build. HOW is
what the child meets: KILL or INT (a signal at a random moment), FORCE (the same as KILL, where a
bundle is being replaced), FSIZE (a limit on the size of a file) or NONE. Prints one JSON line per
build.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from clover_compile import build as builder
from clover_compile import cli
from clover_compile import prove as proof
from clover_compile.runtime.errors import CloverError
from clover_compile.runtime.manifest import read_bundle
from clover_compile.targets.base import Emitted
from clover_compile.targets.ort_cpu.build import OrtCpu
from tests.bundles import PORTS, UNITS

PIECES, PAUSE = 12, 0.004
"""Writes per file, and seconds between them."""
PIECE = 4096
FILE_LIMIT = 20_000
"""Bytes: the weights are the first file above it."""


class Eager:
    """In place of what the eager model answers."""

    def __init__(self, *_: Any) -> None:
        time.sleep(PAUSE)

    def arrays(self) -> dict[str, Any]:
        """Something to store."""
        return {"enough": np.array(True)}


def emit(self: OrtCpu, units: Any, source: Any, folder: Path, context: int, say: Any) -> Emitted:
    """In place of lowering: files of the right names, written slowly."""
    (folder / "weights").mkdir()
    weights = "weights/model.safetensors"
    for name in (*(f"{unit}.onnx" for unit in UNITS), weights):
        with (folder / name).open("wb") as stream:
            for _ in range(PIECES if name == weights else 2):
                stream.write(b"\0" * PIECE)
                stream.flush()
                time.sleep(PAUSE)
    weight = {"file": weights, "offset": 0, "shape": [2, 3], "dtype": "float32"}
    return Emitted(
        units={unit: {"file": f"{unit}.onnx", **PORTS} for unit in UNITS},
        ops={},
        weights={"w": weight},
    )


def prove(*_: Any) -> Mapping[str, Any]:
    """In place of the proof."""
    time.sleep(5 * PAUSE)
    return {"bundle": "", "outcome": "passed", "reason": ""}


def patch() -> None:
    """Puts the stand-ins in place, in this process and its children."""
    builder.__dict__["fused_units"] = lambda *_: ({}, {})
    builder.__dict__["load"] = lambda path, **_: path
    proof.__dict__.update(Truth=Eager, prove=prove)
    OrtCpu.emit = emit  # type: ignore[method-assign]


def loadable(folder: Path) -> list[str]:
    """Bundles in `folder`, whatever their names, that `run` would take."""
    found = []
    for path in folder.iterdir():
        try:
            if path.is_dir() and read_bundle(path).verdict["outcome"] == "passed":
                found.append(path.name)
        except CloverError:
            pass
    return found


def start(model: str, output: str, how: str) -> int:
    """Forks a build; returns its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    if how == "FSIZE":
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT))
    status = 99
    try:
        force = ["--force"] if how == "FORCE" else []
        status = cli.status(["build", model, "-o", output, *force])
    finally:
        os._exit(status)


def main(model: str, output: str, how: str, count: int, seed: int) -> None:
    """Runs `count` builds and tells what each left."""
    patch()
    draw = random.Random(seed)
    began = time.perf_counter()
    os.waitpid(start(model, output + ".timed", "NONE"), 0)
    duration = time.perf_counter() - began
    if how == "FORCE":
        os.rename(output + ".timed", output)
    for _ in range(count):
        child = start(model, output, how)
        if how in ("KILL", "INT", "FORCE"):
            time.sleep(draw.uniform(0, (1.1 if how == "FORCE" else 0.8) * duration))
            os.kill(child, signal.SIGINT if how == "INT" else signal.SIGKILL)
        _, code = os.waitpid(child, 0)
        folder = Path(output).parent
        row = {
            "status": os.waitstatus_to_exitcode(code),
            "finished": Path(output).exists(),
            "loadable": loadable(folder),
            "left": sorted(p.name for p in folder.iterdir() if "building" in p.name),
        }
        print(json.dumps(row), flush=True)
        if row["finished"] and how != "FORCE":
            os.rename(output, f"{output}.{child}.done")


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:6]))  # type: ignore[arg-type]
