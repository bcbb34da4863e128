"""Closed, full and cut streams, and signals: the same behaviour for every command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMANDS = [["models"], ["targets"], ["--help"], ["build", "--help"]]
CLI = f"{sys.executable} -m clover_compile.cli"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Runs a line of bash."""
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_full_stdout_is_one_line_and_status_1(words: list[str]) -> None:
    done = shell(f"{CLI} {' '.join(words)} > /dev/full")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "No space left" in done.stderr


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_closed_stdout_is_told(words: list[str]) -> None:
    done = shell(f"{CLI} {' '.join(words)} >&-")
    assert done.returncode == 1
    assert "standard output is closed" in done.stderr


def test_errors_never_go_to_stdout() -> None:
    for command in ("run /no/bundle -p x", "inspect /no/bundle", "build /no/model -o /no/x.clover"):
        done = shell(f"{CLI} {command} 2>&-")
        assert (done.returncode, done.stdout) == (2, "")


def test_a_cut_pipe_is_silent() -> None:
    done = shell(f"set -o pipefail; {CLI} models --json | true")
    assert done.returncode in (0, 141)
    assert done.stderr == ""


@pytest.mark.parametrize("words", ["inspect", "verify", "build --no-such", "nonsense", "build a b"])
def test_wrong_usage_is_one_line_and_status_2(words: str) -> None:
    done = shell(f"{CLI} {words}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--help" in done.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_nothing(number: signal.Signals, status: int, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "clover_compile.cli",
        "build",
        "-o",
        str(tmp_path / "x.clover"),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".x.clover.building-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == status
    assert "nothing was written" in said
    assert not list(tmp_path.iterdir())
