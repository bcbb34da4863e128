"""The kernels compile within their budgets on other releases of Triton, each in its own folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

OLDEST, NEWEST = "3.6.0", "3.9.0"
"""3.6 goes with torch 2.11, the oldest that is accepted; 3.9 is the newest that was tried."""


@pytest.mark.slow
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_compiles_within_budget(version: str, tmp_path: Path) -> None:
    folder = tmp_path / "triton"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, f"triton=={version}"], check=True, capture_output=True)
    report = tmp_path / "kernels.json"
    command = [sys.executable, "-m", "clover_compile.kernels.report", "--json", str(report)]
    chosen = [x for capability in ("80", "90", "100") for x in ("--capability", capability)]
    environment = os.environ | {
        "PYTHONPATH": str(folder), "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "TRITON_DEFAULT_FP_FUSION": "1",
    }  # fmt: skip
    done = subprocess.run([*command, *chosen], env=environment, capture_output=True, text=True)
    made = json.loads(report.read_text(encoding="utf-8"))
    assert made["triton"] == version
    assert not [fault for row in made["kernels"] for fault in row["faults"]], done.stdout
    assert done.returncode == 0, done.stderr[-2000:]
