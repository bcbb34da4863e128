"""Bundles of the `trt-*` targets: what they hold, what is said of them, what they refuse."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clover_compile.build import build
from clover_compile.checkpoint import Checkpoint
from clover_compile.errors import NoCompiler
from clover_compile.options import BuildOptions
from clover_compile.profiling import modelled
from clover_compile.profiling.floor import work
from clover_compile.runtime.bundle import load
from clover_compile.runtime.errors import BadBundle, NotProved
from clover_compile.runtime.manifest import read_bundle
from clover_compile.targets.trt.library import library
from tests.checkpoints import make_tiny
from tests.command import clover_compile
from tests.trt_toys import hollow_cubins

RECORDER = Path(__file__).with_name("recording_tensorrt.py")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trt-h100 bundle of a tiny random model; its kernels hold no code."""
    folder = tmp_path_factory.mktemp("trt")
    try:
        library()
    except NoCompiler as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clover_compile.targets.trt.build.compile_plans", hollow_cubins)
        options = BuildOptions(
            model=make_tiny(folder / "model"), output=folder / "tiny.clover", target="trt-h100",
            context=96,
        )  # fmt: skip
        result = build(options, lambda line: None)
    assert result["outcome"] == "compiled, not run"
    return folder / "tiny.clover"


def test_the_verdict_says_what_is_missing(bundle: Path) -> None:
    checked = read_bundle(bundle)
    assert checked.verdict["outcome"] == "compiled, not run"
    assert checked.verdict["reason"] == "needs TensorRT 11 and an sm_90 GPU to finish"
    assert checked.manifest["dtype"] == "bf16"
    assert checked.manifest["device"]["capabilities"] == [90]
    assert checked.manifest["device"]["versions"] == ">=11,<12"
    held = set(checked.manifest["files"])
    units = {f"{name}.onnx" for name in checked.manifest["units"]}
    assert held >= units | {"finish.py", "plugin/libclover_trt.so", "plugin/plugin.cpp"}
    assert checked.manifest["units"]["commit"]["shapes"]["k.1"][2][1] == 96


def test_inspect_lists_every_plugin_node_with_its_kernels(bundle: Path) -> None:
    manifest = read_bundle(bundle).manifest
    done = clover_compile("inspect", "--json", bundle)
    assert done.exit_code == 0
    shown = json.loads(done.stdout)["manifest"]["units"]
    told = clover_compile("inspect", bundle).stdout.split("plugin nodes")[1]
    for unit, row in manifest["units"].items():
        assert shown[unit]["nodes"] == row["nodes"]
        assert len(row["nodes"]) == sum(op["count"] for op in manifest["ops"][unit].values())
        for node in row["nodes"].values():
            functions = {key.rsplit("-", 2)[0] for key in node["kernels"]}
            assert functions and all(name in told for name in (unit, node["op"], *functions))


def test_its_profile_is_modelled_and_says_so(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.clover"
    shutil.copytree(bundle, copy)
    done = clover_compile("profile", copy, "-o", tmp_path / "report", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["kind"], found["costs"]["kind"]) == ("modelled", "modelled")
    manifest = read_bundle(copy).manifest
    keys = {
        k for u in manifest["units"].values() for x in u["nodes"].values() for k in x["kernels"]
    }
    assert found["kernels"] == {"count": len(keys)}
    for row in found["passes"]:
        ops = {op["op"]: op for op in row["ops"]}
        for name, entry in manifest["ops"][row["unit"]].items():
            # A commit without logits leaves out the last norm.
            idle = row["unit"] == "commit" and not row["keep"] and name == "rms_norm"
            assert ops[name]["count"] == entry["count"] - idle <= ops[name]["launches"]
            assert 0 < ops[name]["bytes"][0] <= ops[name]["bytes"][1]
            assert ops[name]["modelled ms"] > ops[name]["floor ms"][0] > 0
        assert (ops["other"]["launches"], ops["other"]["bytes"]) == (0, [0, 0])
        total = row["modelled ms"]
        assert sum(op["modelled ms"] for op in row["ops"]) == pytest.approx(total)
    told = clover_compile("profile", copy).stdout
    assert "MODELLED, NOT RUN" in told and "which is unknown here" in told
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Modelled, not run." in page and "Nothing of this ran" in page
    costs = read_bundle(copy).costs
    assert costs is not None and costs.kind == "modelled"


def test_its_counts_equal_a_count_from_the_checkpoint(bundle: Path) -> None:
    """FLOP of every pass, from the files the engines are built of, and from sizes alone. Bytes hold
    what passes between ops as well."""
    checkpoint = Checkpoint.open(bundle.parent / "model")
    c = checkpoint.config
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names}
    known, _ = modelled.profile(read_bundle(bundle))
    # Rows that all choose the same experts: as many pairs as can be, and the fewest experts.
    for row in known["passes"]:
        unit, rows = row["unit"], row["rows"]
        keep = rows if unit in ("preview", "verify") else row["keep"]
        layers = 0 if unit == "replay" else c.num_hidden_layers
        alike = [np.tile(np.arange(c.num_experts) * 1e-3, (rows, 1))] * layers
        want = work(
            c, shapes, unit=unit, rows=rows, prefix=modelled.PREFIX, keep=keep, routers=alike
        )
        # A replay is handed the weight of a norm that it does not apply; a commit without logits
        # leaves out the last norm.
        idle = {"replay": c.linear_value_head_dim * len(c.gdn_layers)}
        idle |= {} if row["keep"] else {"commit": -c.hidden_size}
        assert row["flop"] == want.flop + 2 * rows * idle.get(unit, 0), row["pass"]
        assert sum(op["bytes"][0] for op in row["ops"]) > want.bytes / 2  # 16 bits for 32


def test_it_is_not_run(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(NotProved, match="needs TensorRT 11 and an sm_90 GPU to finish"):
        load(bundle)
    with pytest.raises(BadBundle, match="no engines yet; run `clover-compile finish"):
        load(bundle, unverified=True)
    done = clover_compile("finish", bundle, "-o", tmp_path / "new.clover")
    assert done.exit_code == 2 and not list(tmp_path.iterdir())
    assert (
        "trt-h100 needs an NVIDIA GPU of compute capability 9.0; this machine has none"
        in done.stderr
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("how", ["missing", "changed"])
def test_a_plugin_that_is_not_the_bundle_s_is_refused(
    how: str, bundle: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.clover"
    shutil.copytree(bundle, copy)
    plugin = copy / "plugin" / "libclover_trt.so"
    data = bytearray(plugin.read_bytes())
    plugin.unlink()
    if how == "changed":
        data[100] ^= 1
        plugin.write_bytes(data)
    said = "is missing" if how == "missing" else "has hash"
    done = clover_compile("finish", copy, "-o", tmp_path / "new.clover")
    assert done.exit_code == 2 and f'"plugin/libclover_trt.so" {said}' in done.stderr


def test_the_bundle_holds_all_that_finish_opens(bundle: Path, tmp_path: Path) -> None:
    """In an empty directory, without the compiler, beside a stand-in that records."""
    copy, record = tmp_path / "here" / "copy.clover", tmp_path / "record.json"
    shutil.copytree(bundle, copy)
    recorder = tmp_path / "recorder.py"
    shutil.copyfile(RECORDER, recorder)
    new = tmp_path / "here" / "new.clover"
    done = subprocess.run(
        [sys.executable, "-P", str(recorder), str(copy), str(new), str(record)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert record.exists(), done.stderr
    found: dict[str, Any] = json.loads(record.read_text())
    units = list(read_bundle(bundle).manifest["units"])
    # Engines would be opened next: there are none, nor a driver to open them with.
    assert "no CUDA driver" in done.stderr and found["status"] == 2 and not new.exists(), (
        done.stderr
    )
    assert list((tmp_path / "here").iterdir()) == [copy]
    libraries = {str(copy / "plugin" / "libclover_trt.so")}
    onnx = {str(copy / f"{name}.onnx") for name in units}
    assert onnx | libraries <= set(found["given"])
    inside = {x for x in found["given"] if x.startswith(str(copy))}
    assert inside == onnx | libraries
    source = str(Path(__file__).parents[1] / "clover_compile")
    assert not [x for x in found["opened"] if x.startswith(source)]
