"""`build --plan`: what a build will need, told from headers and close to what it then uses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clover_compile import models
from clover_compile import plan as planner
from clover_compile.options import BuildOptions
from clover_compile.targets.table import TARGETS
from tests.built import demonstration
from tests.checkpoints import make_tiny
from tests.command import Result, clover_compile

CLOSE = 0.15


def _plan(*arguments: str | Path) -> Result:
    return clover_compile("build", "--plan", *arguments)


def _found(*arguments: str | Path) -> dict[str, Any]:
    done = _plan("--json", *arguments)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_disk_is_what_a_build_takes() -> None:
    bundle = demonstration()
    used = sum(path.stat().st_size for path in bundle.rglob("*"))
    needs = _found("-o", bundle.with_name("other.clover"))["needs"]
    assert abs(needs["disk_bytes"] / used - 1) < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["demonstration", "60M", "60M-bf16"])
def test_memory_is_what_a_build_takes(sizes: str, tmp_path: Path) -> None:
    model = models.find() if sizes == "demonstration" else _synthetic(tmp_path / "model", sizes)
    output = tmp_path / "x.clover"
    needs = _found(model, "-o", output)["needs"]
    command = [sys.executable, "-m", "clover_compile.cli", "build", str(model), "-o", str(output)]
    subprocess.run(command, check=True, timeout=500, capture_output=True)
    manifest = json.loads((output / "manifest.json").read_text())
    used = sum(path.stat().st_size for path in output.rglob("*"))
    minutes = manifest["stages"]["lowering for ort-cpu"] / 60
    assert abs(needs["memory_bytes"] / manifest["peak_memory_bytes"] - 1) < CLOSE
    assert abs(needs["disk_bytes"] / used - 1) < CLOSE
    assert minutes < needs["minutes"][1]


def _synthetic(folder: Path, sizes: str) -> Path:
    """62 M parameters; small weights, so that two correct engines agree."""
    from safetensors.torch import load_file, save_file

    from tests.checkpoints import make_checkpoint

    make_checkpoint(
        folder, scale=0.02, hidden_size=512, num_hidden_layers=8, num_experts=32,
        moe_intermediate_size=128, shared_expert_intermediate_size=128, vocab_size=8000,
        mask_token_id=7999,
    )  # fmt: skip
    if sizes.endswith("bf16"):
        stored = load_file(folder / "model.safetensors")
        half = {name: x.bfloat16() for name, x in stored.items()}
        save_file(half, folder / "model.safetensors")
    return folder


def test_it_builds_nothing_and_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from clover_compile.cli import main\n"
        "try: main(['build', '--plan', '-o', 'x.clover'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'onnx', 'onnxruntime'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "memory" in done.stdout and "fits       yes" in done.stdout
    assert not list(tmp_path.iterdir())


def test_more_weights_need_more(tmp_path: Path) -> None:
    small = _found(make_tiny(tmp_path / "small"))["needs"]
    large = _found(make_tiny(tmp_path / "large", hidden_size=96, num_experts=16))["needs"]
    assert all(large[key] > small[key] for key in ("memory_bytes", "disk_bytes"))
    assert small["device_bytes"] == 0
    assert small["minutes"][0] < small["minutes"][1]


def test_what_does_not_fit_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "free_memory", lambda: 10**8)
    monkeypatch.setattr(planner, "free_disk", lambda output: 10**6)
    found = planner.plan(BuildOptions(model=models.find(), output=tmp_path / "x.clover"))
    assert not found["fits"] and len(found["short"]) == 2
    assert "no: memory: needs" in planner.render(found)


def test_a_container_may_have_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert planner.free_memory() != 7
    (tmp_path / "memory.max").write_text("100\n")
    (tmp_path / "memory.current").write_text("93\n")
    assert planner.free_memory() == 7
    monkeypatch.setattr(planner, "MEMINFO", tmp_path / "none")
    (tmp_path / "memory.max").unlink()
    assert planner.free_memory() is not None


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--target", "nope"], "no target is called"),
        (["--dtype", "bf16"], "is not for target"),
        (["--context", "32"], "--context 32"),
        (["nowhere"], "no such folder"),
    ],
)
def test_it_refuses_what_a_build_refuses(arguments: list[str], fragment: str) -> None:
    done = _plan(*arguments)
    assert (done.exit_code, fragment in done.stderr) == (2, True), done.output


def test_every_target_has_a_plan() -> None:
    assert all(":" in row.plan and row.dtypes for row in TARGETS.values())
