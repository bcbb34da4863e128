"""`triton-*` bundles of the demonstration model: what they hold, and that none claims it ran."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from clover_compile import models, prove
from clover_compile.build import build
from clover_compile.cli import status
from clover_compile.errors import CannotWrite, VerdictError
from clover_compile.inspection import describe, render
from clover_compile.kernels.compiled import assembler
from clover_compile.options import BuildOptions
from clover_compile.profiling.options import ProfileOptions
from clover_compile.profiling.run import profile
from clover_compile.runtime import bundle as runtime_bundle
from clover_compile.runtime import cuda_driver, gpu_needs
from clover_compile.runtime.errors import BadBundle, NotProved, OutputTaken, WrongMachine
from clover_compile.runtime.launch_plan import Plan
from clover_compile.runtime.manifest import read_bundle
from clover_compile.runtime.program_engine import ProgramEngine
from clover_compile.runtime.trt_finish import finish
from clover_compile.runtime.unit_program import UnitProgram
from clover_compile.targets.table import TARGETS
from tests.bundles import edit
from tests.command import clover_compile
from tests.twin import Twin

CUDA_ELF = 190
"""e_machine of a cubin."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demonstration model for an H100."""
    path = tmp_path_factory.mktemp("triton") / "demo.clover"
    result = build(BuildOptions(models.find(), path, "triton-h100"), lambda line: None)
    assert result["outcome"] == "compiled, not run"
    assert result["reason"].startswith("needs an NVIDIA GPU of compute capability 9.0")
    return path


def _copy(built: Path, folder: Path) -> Path:
    return Path(shutil.copytree(built, folder / "copy.clover"))


def test_every_launch_has_its_machine_code(built: Path) -> None:
    table = json.loads((built / "kernels.json").read_text())
    plans = json.loads((built / "plans.json").read_text())
    named = set()
    for plan in plans.values():
        for variant, keys in zip(plan["variants"], plan["kernels"], strict=True):
            assert len(variant["launches"]) == len(keys)
            named |= set(keys)
    assert named == set(table["kernels"])
    for key, row in table["kernels"].items():
        cubin = (built / "kernels" / f"{key}.cubin").read_bytes()
        assert cubin[:4] == b"\x7fELF" and int.from_bytes(cubin[18:20], "little") == CUDA_ELF
        assert row["function"].encode() in cubin
        assert b".nv_debug" not in cubin and b"kernel.py" not in cubin
        ptx = (built / "kernels" / f"{key}.ptx").read_text()
        assert ".version 8.3" in ptx and ".target sm_90a" in ptx
    assert table["driver"] == int(assembler(90).split(".")[0]) * 1000


def test_the_manifest_says_what_it_costs(built: Path) -> None:
    manifest = read_bundle(built).manifest
    assert manifest["dtype"] == "bf16" and manifest["target"] == "triton-h100"
    rows = {row["pass"]: row for row in manifest["static"]["passes"]}
    assert set(rows) == {"preview", "verify", "commit", "step", "replay"}
    layers = manifest["model"]["config"]["num_hidden_layers"]
    for row in rows.values():
        assert row["launches"] <= 10 * layers + 4
        assert row["floor_bytes"][0] <= row["floor_bytes"][1]
    # A replay touches no large weight, so its bytes are state and tape alone.
    assert rows["replay"]["floor_bytes"][1] < rows["step"]["floor_bytes"][0] / 4
    text = render(describe(built))
    assert "compiled, not run" in text and "nothing ran" in text
    assert f"{manifest['static']['kernels']['count']} for compute capability 9.0" in text
    assert manifest["passes"]["verify"]["join-write-gate"] == 6


def test_a_profile_is_modelled_and_says_so(built: Path, tmp_path: Path) -> None:
    copy = _copy(built, tmp_path)
    done = clover_compile("profile", copy, "-o", tmp_path / "report", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["kind"], found["costs"]["kind"]) == ("modelled", "modelled")
    static = {row["pass"]: row for row in read_bundle(copy).manifest["static"]["passes"]}
    assert {row["pass"] for row in found["passes"]} == set(static)
    for row in found["passes"]:
        sizes = [sum(op["bytes"][i] for op in row["ops"]) for i in (0, 1)]
        assert (sizes, row["launches"]) == (
            static[row["pass"]]["floor_bytes"], static[row["pass"]]["launches"],
        )  # fmt: skip
        low, high = static[row["pass"]]["modelled_ms"]
        assert low <= row["modelled ms"] <= high
    told = clover_compile("profile", copy).stdout
    assert "MODELLED, NOT RUN" in told and "compiled, not run" in told
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Modelled, not run." in page and "Nothing of this ran" in page
    costs = read_bundle(copy).costs
    assert costs is not None and costs.kind == "modelled"
    assert costs.draft(8) > costs.step() > 0


def test_nothing_runs_it_here(built: Path) -> None:
    with pytest.raises(NotProved, match=r"compiled, not run.*compute capability 9.0"):
        runtime_bundle.load(built)
    if cuda_driver.device_count() == 0:
        with pytest.raises(WrongMachine, match=r"needs an NVIDIA GPU.*has none"):
            runtime_bundle.load(built, unverified=True)


MACHINES: dict[str, tuple[dict[str, Any], str]] = {
    "another GPU": ({"capability": lambda: 80}, r"capability 9\.0; this machine has 8\.0 \(GPU\)"),
    "an old driver": (
        {"driver_version": lambda: 11080},
        r"needs a driver for CUDA 12\.0; this machine has one for 11\.8; run it elsewhere, or",
    ),
    "a full GPU": (
        {"free_memory": lambda: (100 * 10**6, 80 * 10**9)},
        r"needs 0\.5 GB of device memory; this machine has 0\.1 of 80\.0 GB free",
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_that_does_not_fit(
    name: str, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated: what the driver would say is put in its place, nothing is launched."""
    fits: dict[str, Any] = {
        "device_count": lambda: 1, "capability": lambda: 90, "device_name": lambda: "GPU",
        "driver_version": lambda: 13000, "make_current": lambda: None,
        "free_memory": lambda: (79 * 10**9, 80 * 10**9),
    }  # fmt: skip
    changes, words = MACHINES[name]
    for function, stand_in in {**fits, **changes}.items():
        monkeypatch.setattr(cuda_driver, function, stand_in)
    with pytest.raises(WrongMachine, match=words):
        runtime_bundle.load(built, unverified=True)
    needs = gpu_needs.GpuNeeds("triton-h100", 90, 12000, held=0)
    monkeypatch.setattr(cuda_driver, "free_memory", fits["free_memory"])
    assert (needs.reason() is None) == (name == "a full GPU")


def test_a_flipped_cubin_is_refused(built: Path, tmp_path: Path) -> None:
    copy = _copy(built, tmp_path)
    cubin = next((copy / "kernels").glob("project-*.cubin"))
    data = bytearray(cubin.read_bytes())
    data[len(data) // 2] ^= 1
    cubin.write_bytes(bytes(data))
    with pytest.raises(BadBundle, match=r"project-.*cubin. has hash [0-9a-f]{12} instead of"):
        runtime_bundle.load(copy, unverified=True)


@pytest.fixture
def twin(built: Path) -> Iterator[runtime_bundle.LoadedBundle]:
    with on_the_twin(built) as loaded:
        yield loaded


@contextmanager
def on_the_twin(built: Path) -> Iterator[runtime_bundle.LoadedBundle]:
    """The bundle's own files on the software twin; no kernel runs."""
    checked = read_bundle(built)
    plans = json.loads((built / "plans.json").read_text())
    programs = {
        name: UnitProgram.from_json(json.loads((built / unit["file"]).read_text()))
        for name, unit in checked.manifest["units"].items()
    }
    engine = ProgramEngine(
        programs, {k: Plan.from_json(x) for k, x in plans.items()}, _weights(checked), Twin()
    )
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setitem(runtime_bundle.ENGINES, "triton", f"{__name__}:_opened")
        globals()["_opened"] = lambda checked: engine
        yield runtime_bundle.load(built, unverified=True)


def _weights(checked: Any) -> dict[str, torch.Tensor]:
    """Every stored tensor by its manifest entry."""
    files = {w["file"] for w in checked.manifest["weights"].values()}
    raw = {name: (checked.path / name).read_bytes() for name in files}
    found = {}
    for name, w in checked.manifest["weights"].items():
        dtype = getattr(torch, w["dtype"])
        count = torch.Size(w["shape"]).numel()
        flat = torch.frombuffer(
            bytearray(raw[w["file"]]), dtype=dtype, count=count, offset=w["offset"]
        )
        found[name] = flat.view(w["shape"]).clone()
    return found


def test_the_twin_passes_the_proof(twin: runtime_bundle.LoadedBundle) -> None:
    """The whole verdict in bf16 over the bundle's own programs, plans and weights."""
    lines: list[str] = []
    verdict = prove.prove(twin, "bf16", lines.append)
    assert verdict["outcome"] == "passed", verdict
    assert verdict["units"].keys() == {"commit", "verify", "preview"}


SPOILED: dict[str, tuple[str, Callable[[str, torch.Tensor], torch.Tensor]]] = {
    "experts a tenth too weak": ("moe", lambda name, x: x * 0.9),
    "attention that misses a head": ("block_attention", lambda name, x: _without_a_head(name, x)),
    "a state that decays": ("gdn_scan", lambda name, x: x * (0.9 if name == "new_state" else 1)),
    "a channel of previews lost": ("gdn_preview", lambda name, x: _without_channels(x)),
    "one norm in every Unit off": ("rms_norm", lambda name, x: x * 1.06),
}  # fmt: skip


QUICK = ("a state that decays", "experts a tenth too weak")


def _without_a_head(name: str, x: torch.Tensor) -> torch.Tensor:
    return _without_channels(x) if name == "y" else x


def _without_channels(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[..., : x.shape[-1] // 4] = 0
    return x


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in SPOILED if x not in QUICK)]
)
def test_the_proof_notices_a_wrong_engine(name: str, twin: runtime_bundle.LoadedBundle) -> None:
    """What 16 bits excuse is no excuse for these."""
    op, change = SPOILED[name]
    twin.engine.device.spoil[op] = change  # type: ignore[attr-defined]
    with pytest.raises(VerdictError, match=r"KL|norm of|error of|top-1"):
        prove.prove(twin, "bf16", lambda line: None)


def test_stored_weights_are_the_checkpoints(built: Path) -> None:
    """Every matrix of the checkpoint is in the store once, unchanged but for its rounding."""
    checkpoint = load_file(models.find() / "model.safetensors")
    weights = _weights(read_bundle(built))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(weights[name], checkpoint[name].bfloat16())


@pytest.mark.parametrize("name", [n for n in TARGETS if n.startswith("triton-")])
def test_the_default_precision_is_the_targets(name: str) -> None:
    options = BuildOptions(models.find(), Path("x.clover"), name)
    assert TARGETS[name].dtype(name, options.dtype) == "bf16"
    assert TARGETS[name].dtype(name, replace(options, dtype="bf16").dtype) == "bf16"


def test_the_command_line_says_so(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["run", str(built), "-p", "x"], ["verify", str(built)]):
        assert status(command) == 2
        assert "compute capability 9.0" in capsys.readouterr().err


def test_ctrl_c_while_kernels_compile(tmp_path: Path) -> None:
    """One line, at once, from the build alone: workers and assemblers get the signal too."""
    command = [sys.executable, "-m", "clover_compile.cli", "build", "--target", "triton-l40s"]
    with subprocess.Popen(
        [*command, "-o", str(tmp_path / "x.clover")], stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as child:  # fmt: skip
        assert child.stderr is not None
        for line in child.stderr:
            if "kernels compiled" in line:
                break
        os.killpg(child.pid, signal.SIGINT)
        rest = child.stderr.read()
    assert child.returncode == 130
    last = rest.strip().splitlines()[-1]
    assert last == "clover-compile: interrupted; nothing was written"
    assert "ptxas" not in rest
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_into_a_bundle(built: Path, tmp_path: Path) -> None:
    copy = _copy(built, tmp_path)
    for output in (copy / "sub.clover", copy / "deep" / "x.clover"):
        with pytest.raises(CannotWrite, match="is a bundle"):
            build(BuildOptions(models.find(), output), lambda line: None)
    for output in (copy, copy / "report"):
        with pytest.raises(CannotWrite, match="is a bundle"):
            profile(ProfileOptions(copy, output=output), lambda line: None)
    assert not (copy / "report").exists()
    assert read_bundle(copy).identity == read_bundle(built).identity


def _first_input(program: Any) -> Any:
    return next(iter(program["steps"][3]["inputs"].values()))


HOSTILE: dict[str, tuple[str, Callable[[Any], object]]] = {
    "an offset": ("pick.json", lambda x: x["outputs"]["entropy"][0].pop("offset")),
    "a shape": ("commit.json", lambda x: _first_input(x).update(shape="../../x")),
    "a buffer": ("replay.json", lambda x: x["buffers"].update(dict.fromkeys(x["buffers"], ""))),
    "a plan": ("plans.json", lambda x: x.update(dict.fromkeys(x, 3))),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_resealed_program_that_is_none(name: str, built: Path, tmp_path: Path) -> None:
    copy = _copy(built, tmp_path)
    file, change = HOSTILE[name]
    content = json.loads((copy / file).read_text())
    change(content)
    (copy / file).write_text(json.dumps(content))
    edit(copy)
    with pytest.raises(BadBundle):
        profile(ProfileOptions(copy), lambda line: None)


def test_finish_is_for_other_bundles(built: Path, tmp_path: Path) -> None:
    with pytest.raises(BadBundle, match="for target triton-h100, which needs no finish"):
        finish(built, tmp_path / "x.clover", lambda line: None)
    with pytest.raises(OutputTaken, match="it exists; give another -o"):
        finish(built, tmp_path, lambda line: None)


def test_no_arguments_is_a_readable_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert status([]) == 2
    assert "\nCommands:" in capsys.readouterr().err


def test_the_manifest_names_no_folder_of_the_build(built: Path) -> None:
    assert str(models.find()) not in (built / "manifest.json").read_text()
