"""What importing costs: looking at the compiler loads no engine, the runner loads no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "onnx", "onnxscript", "onnxruntime", "triton", "tensorrt", "tensorrt_rtx"}

# The modules go to stderr: the command under test owns stdout.
PROBE = """
import json, runpy, sys
try:
    {body}
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def _loaded(body: str) -> tuple[set[str], str]:
    """Modules a fresh interpreter holds after running one line, and what it printed."""
    command = [sys.executable, "-W", "ignore", "-c", PROBE.format(body=body)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1])), done.stdout


def _command(*arguments: str) -> tuple[set[str], str]:
    argv = ["clover-compile", *arguments]
    return _loaded(f"sys.argv = {argv!r}; runpy.run_module('clover_compile.cli', {{}}, '__main__')")


def test_importing_the_command_line_is_light() -> None:
    loaded, _ = _loaded("import clover_compile.cli")
    assert "clover_compile.cli" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize("arguments", [("--help",), ("targets",), ("targets", "--json")])
def test_looking_around_is_light(arguments: tuple[str, ...]) -> None:
    loaded, printed = _command(*arguments)
    assert "build" in printed or "ort-cpu" in printed
    assert not loaded & HEAVY


def test_the_runner_stands_alone() -> None:
    loaded, _ = _loaded("import clover_compile.runtime; clover_compile.runtime.Session")
    assert "clover_compile.runtime.session" in loaded
    assert not loaded & HEAVY
    ours = {name for name in loaded if name.startswith("clover_compile.")}
    assert all(name.split(".")[1] == "runtime" for name in ours), ours


def test_imports_point_one_way() -> None:
    code = "from importlinter.cli import lint_imports_command as main; main()"
    command = [sys.executable, "-c", code, "--no-cache"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
