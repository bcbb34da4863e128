"""`make bench`: builds what is missing, measures, prints one table and writes one JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench import picking, processes, speed, synthetic
from bench.table import table
from clover_compile import models
from clover_compile.build import build
from clover_compile.checkpoint import Checkpoint
from clover_compile.options import BuildOptions
from clover_compile.runtime import Session
from clover_compile.runtime.errors import CloverError

SIZES = ("60M", "300M")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """The command; returns what it wrote."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/bench"), help="kept checkpoints")
    parser.add_argument("--sizes", nargs="*", choices=synthetic.SIZES, default=SIZES)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--vocabulary", type=int, default=picking.VOCABULARY)
    parser.add_argument("--demo", type=Path, help="bundle for the first token; built if missing")
    parser.add_argument("--output", type=Path, help="the JSON file (default: in the folder)")
    options = parser.parse_args(arguments)
    found = run(options)
    output = options.output or options.folder / "bench.json"
    output.write_text(json.dumps(found, indent=1))
    print(table(found))
    print(f"\n{output}: all figures, every round")
    return found


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All measurements, as JSON values."""
    folder: Path = options.folder
    demo = _bundle(models.find(), options.demo or folder / "demo.clover")
    found: dict[str, Any] = {"machine": _machine(), "rounds": options.rounds, "sizes": {}}
    print("measuring the first token", file=sys.stderr)
    found["first token"] = processes.first_token(demo, options.rounds)
    for size in options.sizes:
        checkpoint = folder / size
        if not (checkpoint / "config.json").exists():
            synthetic.write(checkpoint, size)
        bundle = _bundle(checkpoint, folder / f"{size}.clover")
        print(f"measuring {size}", file=sys.stderr)
        # First the memory: Pss divides pages that this process maps as well.
        memory = processes.memory(bundle, max(options.threads))
        found["sizes"][size] = {
            "parameters": Checkpoint.open(checkpoint).parameters,
            "memory": memory,
            "speed": {
                str(t): speed.measure(checkpoint, bundle, t, options.rounds)
                for t in options.threads
            },
        }
    print("measuring pick", file=sys.stderr)
    file = picking.unit_file(Checkpoint.open(models.find()), options.vocabulary)
    found["vocabulary"] = options.vocabulary
    found["pick"] = {
        str(t): picking.measure(file, options.vocabulary, t, options.rounds)
        for t in options.threads
    }
    return found


def _bundle(checkpoint: Path, bundle: Path) -> Path:
    """The bundle of a checkpoint, built unless one that still loads is there."""
    try:
        Session.load(bundle)
    except CloverError as reason:
        print(f"building {bundle}: {reason}", file=sys.stderr)
        build(BuildOptions(model=checkpoint, output=bundle, force=bundle.exists()), _say)
    return bundle


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "?")
    return {
        "processor": name, "cores": os.cpu_count(), "load": os.getloadavg()[0],
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "onnxruntime", "numpy")},
    }  # fmt: skip


if __name__ == "__main__":
    main()
