"""The kernels compile on other releases of Triton, each in its own folder.

Budgets bind on the release that the installed torch pins (`test_compiled_kernels.py`). Another one
allocates registers its own way: it may spill, which is slower and told in the report, but what it
makes must run and use the matrix units.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

OLDEST, NEWEST = "3.6.0", "3.9.0"
"""3.6 goes with torch 2.11, the oldest that is accepted; 3.9 is the newest that was tried."""

SLOWER = (
    "of stack, none allowed",
    " LDL, none allowed",
    " STL, none allowed",
    " registers, at most",
)
"""What a fault of a kernel that runs, if slowly, says."""

KERNELS = 250
"""At least so many are compiled for the three architectures."""


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_everything_compiles_and_could_run(version: str, tmp_path: Path) -> None:
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
    assert report.exists(), done.stderr[-2000:]
    made = json.loads(report.read_text(encoding="utf-8"))
    assert made["triton"] == version and len(made["kernels"]) >= KERNELS
    faults = [fault for row in made["kernels"] for fault in row["faults"]]
    assert not [x for x in faults if not any(words in x for words in SLOWER)], faults
    assert done.returncode == int(bool(faults)), done.stderr[-2000:]
