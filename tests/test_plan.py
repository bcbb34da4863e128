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
from clover_compile.kernels import release
from clover_compile.options import BuildOptions
from clover_compile.targets.table import TARGETS
from tests import sparse
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
    minutes = sum(manifest["seconds"].values()) / 60
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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system counts both")
def test_the_peak_is_not_that_of_the_process_that_started_it() -> None:
    command = [
        sys.executable,
        "-c",
        "from clover_compile.build import peak_memory as p; print(p())",
    ]
    held = b"x" * (3 << 29)
    peak = int(subprocess.run(command, check=True, timeout=60, capture_output=True).stdout)
    assert 1e8 < peak < len(held) / 2


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
    output = tmp_path / "x.clover"
    found = planner.plan(BuildOptions(model=models.find(), output=output))
    assert not found["fits"] and len(found["short"]) == 2
    done = _plan("-o", output)
    assert done.exit_code == 1 and done.stderr == ""
    fits = done.stdout.splitlines()[-1]
    assert "no: memory needs" in fits and "MB, free here 100 MB; disk needs" in fits
    done = _plan("-o", output, "--json")
    assert done.exit_code == 1 and json.loads(done.stdout)["short"] == found["short"]


@pytest.mark.parametrize(("target", "free"), [("triton-rtx4090", 24e9), ("ort-cuda", None)])
def test_a_model_larger_than_its_gpu_does_not_fit(
    released: Path, tmp_path: Path, target: str, free: float | None
) -> None:
    """The GPU's memory is known where the target names one."""
    done = _plan(released, "--target", target, "-o", tmp_path / "x", "--json")
    found = json.loads(done.stdout)
    assert found["free"]["device_bytes"] == free
    assert (done.exit_code, found["fits"]) == ((0, True) if free is None else (1, False))
    assert found["short"] == ([] if free is None else ["device needs " + _shown(found, 24)])


def _shown(found: dict[str, Any], gpu: int) -> str:
    return f"{found['needs']['device_bytes'] / 1e9:.1f} GB, the GPU has {gpu}.0 GB"


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Headers of the released sizes; the weights are holes."""
    return sparse.write(tmp_path_factory.mktemp("released") / "model")


@pytest.fixture(autouse=True)
def _enough_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has free, but where a test says otherwise."""
    monkeypatch.setattr(planner, "free_disk", lambda output: 10**12)


def test_fp8_takes_what_fp8_stores(released: Path, tmp_path: Path) -> None:
    """e4m3 matrices with a scale per output channel; the embedding alone stays a large matrix."""
    where = ("-o", tmp_path / "x", "--target", "triton-h100")
    wide, small = (_found(released, *where, "--dtype", d)["needs"] for d in ("bf16", "fp8"))
    embedding = release.VOCABULARY * release.HIDDEN
    assert wide["weight_bytes"] > 69e9
    assert small["weight_bytes"] == pytest.approx(wide["weight_bytes"] / 2 + embedding, rel=0.01)
    for key in ("disk_bytes", "device_bytes"):
        assert wide[key] - small[key] == wide["weight_bytes"] - small["weight_bytes"]


def test_the_device_holds_a_state_of_the_whole_context(released: Path, tmp_path: Path) -> None:
    where = (released, "-o", tmp_path / "x", "--target", "triton-h200", "--context")
    short, long = (_found(*where, n)["needs"]["device_bytes"] for n in ("1000", "3000"))
    c = sparse.config()
    row = 2 * 2 * len(c.attention_layers) * c.num_key_value_heads * c.head_dim
    assert long - short == 2000 * row


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
