"""What finishing a TensorRT bundle checks, with everything that needs no TensorRT and no GPU."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from clover_compile.runtime import cuda_driver, trt_checks
from clover_compile.runtime.bundle import load
from clover_compile.runtime.errors import BadBundle, FinishFailed, WrongMachine
from clover_compile.runtime.manifest import Checked
from clover_compile.runtime.session import Session
from clover_compile.runtime.trt_finish import compare, read_arrays
from tests.built import demonstration

PLUGIN = "plugin/libclover_trt.so"


@pytest.fixture(scope="module")
def answers() -> tuple[Session, dict[str, Any]]:
    """A session that is proved, over another engine, and its bundle's probes."""
    loaded = load(demonstration())
    session = Session(loaded.engine, loaded.sizes, loaded.rules, loaded.context)
    return session, read_arrays(loaded.path / "probes.safetensors")


def test_probes_are_read_without_a_package(answers: tuple[Session, dict[str, Any]]) -> None:
    meant = load_file(demonstration() / "probes.safetensors")
    assert answers[1].keys() == meant.keys()
    for name, array in meant.items():
        assert answers[1][name].dtype == array.dtype and np.array_equal(
            answers[1][name], array, equal_nan=array.dtype.kind == "f"
        )


def test_a_correct_engine_meets_every_stored_row(
    answers: tuple[Session, dict[str, Any]],
) -> None:
    session, probes = answers
    figures = compare(session, probes)
    meant = sum(
        int(probes[name]) for name in probes
        if name.endswith(".rows") and name.split(".")[1] in ("commit", "preview")
    )  # fmt: skip
    assert figures["rows"] == meant > 64
    assert figures["max_error"] < 1e-4 and figures["top1"] == 1.0


@pytest.mark.parametrize("name", ["out.commit.far", "out.preview.near.0", "out.preview.far.0"])
@pytest.mark.parametrize("fault", ["scaled", "shifted", "nan"])
def test_another_answer_is_refused(
    name: str, fault: str, answers: tuple[Session, dict[str, Any]]
) -> None:
    session, probes = answers
    wrong = probes[name].copy()
    if fault == "scaled":
        wrong *= 1.1
    elif fault == "shifted":
        wrong = np.roll(wrong, 1, -1)
    else:
        wrong[0, 0, 3] = np.nan
    with pytest.raises(FinishFailed, match="logits differ by"):
        compare(session, probes | {name: wrong})


def _checked(folder: Path, **changes: Any) -> Checked:
    """A bundle as far as the checks read it."""
    (folder / "plugin").mkdir(exist_ok=True)
    (folder / PLUGIN).write_bytes(b"library")
    device = {
        "module": "tensorrt", "versions": ">=11,<12", "capabilities": [90], "plugin": PLUGIN,
        "finished": False, **changes.pop("device", {}),
    }  # fmt: skip
    unit = {"nodes": {"a": {"op": "moe", "kernels": []}}}
    manifest = {
        "target": "trt-h100", "device": device, "files": {PLUGIN: {}}, "units": {"commit": unit},
        "ops": {"commit": {"moe": {"count": 1}}}, **changes,
    }  # fmt: skip
    return Checked(folder, "0" * 64, manifest, {})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What this machine is said to have; a test may change it."""
    have: dict[str, Any] = {"devices": 1, "capability": 90, "tensorrt": "11.4.0.106"}

    def version(name: str) -> str:
        if have.get(name) is None:
            raise metadata.PackageNotFoundError(name)
        return str(have[name])

    monkeypatch.setattr(cuda_driver, "device_count", lambda: have["devices"])
    monkeypatch.setattr(cuda_driver, "capability", lambda: have["capability"])
    monkeypatch.setattr(cuda_driver, "device_name", lambda: "a GPU")
    monkeypatch.setattr(cuda_driver, "why_no_device", lambda: "why")
    monkeypatch.setattr("importlib.metadata.version", version)
    return have


def test_a_machine_that_fits_is_let_through(tmp_path: Path, machine: dict[str, Any]) -> None:
    assert trt_checks.check(_checked(tmp_path), True, finishing=True)["module"] == "tensorrt"
    finished = {"finished": True, "built_with": "11.4.0.106"}
    assert trt_checks.check(_checked(tmp_path, device=finished), True)["finished"]


DONE = {"finished": True, "built_with": "11.4.0.106"}


@pytest.mark.parametrize(
    ("have", "changes", "finishing", "said"),
    [
        ({"devices": 0}, {}, True, "capability 9.0; this machine has none .why.; run it"),
        ({"capability": 89}, {}, True, "capability 9.0; this machine has 8.9 .a GPU.; run it"),
        ({"tensorrt": None}, {}, True, "needs tensorrt >=11,<12; this machine has none; run it"),
        ({"tensorrt": "10.9.0"}, {}, True,
         "needs tensorrt >=11,<12; this machine has 10.9.0; run it elsewhere, or pip install"),
        ({"tensorrt": "11.5.0"}, {"device": DONE}, False,
         "needs tensorrt ==11.4.0.106; this machine has 11.5.0; run it elsewhere, or pip install"),
        ({}, {}, False, "no engines yet; run `clover-compile finish"),
        ({}, {"device": DONE}, True, "built already; run it as it is"),
        ({}, {"ops": {"commit": {"moe": {"count": 2}}}}, True,
         "Unit commit has 1 plugin nodes of moe instead of 2"),
        ({}, {"files": {}}, True, "the plugin .plugin/libclover_trt.so. is not in the bundle"),
        ({}, {"device": {"module": "os"}}, True, "device.module is .os."),
        ({}, {"device": {"capabilities": "90"}}, True, "device.capabilities is .90."),
        ({}, {"device": {"plugin": None}}, True, "device.plugin is"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(
    have: dict[str, Any], changes: dict[str, Any], finishing: bool, said: str,
    tmp_path: Path, machine: dict[str, Any],
) -> None:  # fmt: skip
    machine |= have
    with pytest.raises((BadBundle, WrongMachine), match=said) as refused:
        trt_checks.check(_checked(tmp_path, **changes), True, finishing=finishing)
    assert "\n" not in str(refused.value)
    assert "tensorrt" not in sys.modules


def test_a_library_of_others_needs_permission(
    tmp_path: Path, machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = _checked(tmp_path)
    cache = tmp_path / "cache" / "clover-compile" / "plugin" / "0"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(BadBundle, match="none that this installation compiled; give --allow-nat"):
        trt_checks.check(checked, False, finishing=True)
    cache.mkdir(parents=True)
    (cache / "libclover_trt.so").write_bytes(b"library")
    assert trt_checks.check(checked, False, finishing=True)
    (cache / "libclover_trt.so").write_bytes(b"another")
    with pytest.raises(BadBundle, match="its plugin has hash"):
        trt_checks.check(checked, False, finishing=True)
