"""Runs TensorRT-RTX in a process of its own, where its library has the name that it looks for."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clover_compile import flags
from clover_compile.errors import EngineBuildFailed, MissingExtra
from clover_compile.runtime.trt_build import Built, Request
from clover_compile.targets.base import Say

SHARED, UNVERSIONED = "libtensorrt_rtx.so.1", "libtensorrt_rtx.so"
"""The parser opens the second name, the package holds the first: without a link the process dies as
soon as a plugin is made."""


def rtx_library() -> Path | None:
    """The library of the installed TensorRT-RTX, or None."""
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    return next((Path(x) / SHARED for x in places if (Path(x) / SHARED).is_file()), None)


def build_engines(library: Path, requests: Sequence[Request], say: Say) -> list[Built]:
    """Builds every engine; library: the plugin.

    Raises MissingExtra without TensorRT-RTX, EngineBuildFailed with the builder's words.
    """
    rtx = rtx_library()
    if rtx is None:
        raise MissingExtra(package="tensorrt-rtx", extra="rtx")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / UNVERSIONED).symlink_to(rtx)
        asked = {
            "module": "tensorrt_rtx", "library": str(library),
            "engines": [asdict(x) for x in requests],
        }  # fmt: skip
        (folder / "request.json").write_text(json.dumps(asked))
        answer = _run(folder, say)
    if "refused" in answer:
        raise EngineBuildFailed(reason=answer["refused"])
    return [Built(**row) for row in answer["built"]]


def _run(folder: Path, say: Say) -> dict[str, Any]:
    environment = flags.environment(LD_LIBRARY_PATH=str(folder))
    command = [
        sys.executable,
        "-m",
        "clover_compile.runtime.trt_build",
        str(folder / "request.json"),
    ]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    last = ""
    for line in process.stderr:
        last = line.rstrip()
        if last.startswith("    "):
            say(last)
    text = process.stdout.read()
    process.wait()
    try:
        answer: dict[str, Any] = json.loads(text.splitlines()[-1])
    except (ValueError, IndexError):
        reason = f"the builder ended with status {process.returncode}: {last}"
        raise EngineBuildFailed(reason=reason) from None
    return answer
