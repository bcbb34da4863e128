"""What a profile was made of: machine, versions, prompts, and raw samples of calls and answers."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from clover_compile import __version__
from clover_compile.profiling.messages import Messages
from clover_compile.profiling.options import ProfileOptions
from clover_compile.profiling.subject import Subject
from clover_compile.runtime.cores import processor

PACKAGES = ("onnxruntime", "torch", "numpy", "onnx", "triton", "tokenizers")


def machine(threads: int) -> dict[str, Any]:
    """Processor, cores and load, and the threads in use."""
    return {
        "machine": {"processor": processor(), "cores": os.cpu_count(), "system": platform.system()},
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "threads": threads,
    }  # fmt: skip


def versions() -> dict[str, str]:
    """Of Python, this package and what it measures with."""
    found = {"python": platform.python_version(), "clover-compile": __version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def receipt(
    options: ProfileOptions, subject: Subject, asked: Messages | None, found: dict[str, Any],
    taken: list[dict[str, float]],
) -> dict[str, Any]:  # fmt: skip
    """Takes the raw samples out of what was found, and names what they came from."""
    calls = found.get("units", {}).get("calls", [])
    work = found.get("workload", {})
    rows = [*work.get("ways", []), *work.get("auto", [])]
    return {
        "bundle": subject.loaded.identity,
        "machine": found["machine"], "load": found["load"], "threads": subject.threads,
        "versions": versions(),
        "prompts": asked and {"source": asked.source, "sha256": asked.sha256,
                              "count": len(asked.asked)},
        "max new tokens": options.max_new_tokens, "seeds": [0], "rounds": options.rounds,
        "samples": {
            "seconds of calls": {row["name"]: row.pop("rounds") for row in calls},
            "seconds of the cost table": taken,
            "seconds of answers": [[row["way"], row.pop("seconds")] for row in rows],
        },
    }  # fmt: skip
