"""The ONNX Runtime engine: shared mapped weights, feeds, outputs, errors that name the Unit."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto, helper

from clover_compile.runtime.cores import cores
from clover_compile.runtime.errors import EngineFailed
from clover_compile.runtime.manifest import Checked, read_bundle
from clover_compile.runtime.ort_engine import OrtEngine
from tests.bundles import UNITS, WEIGHT, edit, make_bundle

pytestmark = pytest.mark.ort

ROWS = np.array([[1, 2], [3, 4]], np.float32)


def write_unit(path: Path, offset: int, shape: tuple[int, int] = (2, 3)) -> None:
    """y = x @ w and total = sum(y), with w outside of the file."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=shape)
    weight.data_location = TensorProto.EXTERNAL
    length = 4 * shape[0] * shape[1]
    for key, value in (("location", "weights.bin"), ("offset", offset), ("length", length)):
        entry = weight.external_data.add()
        entry.key, entry.value = key, str(value)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("ReduceSum", ["y"], ["total"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "unit",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", shape[0]])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["T", shape[1]]),
            helper.make_tensor_value_info("total", TensorProto.FLOAT, []),
        ],
        [weight],
    )
    opset = [helper.make_opsetid("", 21)]
    path.write_bytes(
        helper.make_model(graph, opset_imports=opset, ir_version=10).SerializeToString()
    )


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checked:
    """A bundle of four equal Units over one weight."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = make_bundle(tmp_path / "x.clover")
    os.link(folder / "weights/model.safetensors", folder / "units/weights.bin")
    offset = (folder / "weights/model.safetensors").stat().st_size - WEIGHT.nbytes
    for name in UNITS:
        write_unit(folder / f"units/{name}.onnx", offset)
    edit(folder)
    return read_bundle(folder)


def test_every_unit_reads_the_shared_weight(checked: Checked) -> None:
    engine = OrtEngine(checked, threads=1)
    for unit in UNITS:
        out = engine.run(unit, {"x": ROWS})
        np.testing.assert_array_equal(out["y"], ROWS @ WEIGHT)
        assert out["total"] == (ROWS @ WEIGHT).sum()


def test_only_the_outputs_asked_for(checked: Checked) -> None:
    engine = OrtEngine(checked, threads=1)
    assert list(engine.run("commit", {"x": ROWS}, ["total"])) == ["total"]
    assert list(engine.run("commit", {"x": ROWS})) == ["y", "total"]


def test_views_and_read_only_feeds_are_taken(checked: Checked) -> None:
    engine = OrtEngine(checked, threads=1)
    wide = np.arange(8, dtype=np.float32).reshape(4, 2)
    view = wide[:2]
    view.flags.writeable = False
    np.testing.assert_array_equal(engine.run("verify", {"x": view})["y"], view @ WEIGHT)
    assert engine.run("verify", {"x": wide[:0]})["y"].shape == (0, 3)


def test_outputs_are_the_callers_to_keep(checked: Checked) -> None:
    engine = OrtEngine(checked, threads=1)
    first = engine.run("commit", {"x": ROWS})["y"]
    before = first.copy()
    engine.run("commit", {"x": ROWS * 5})
    np.testing.assert_array_equal(first, before)
    first += 1


@pytest.mark.parametrize(
    ("unit", "feeds", "words"),
    [
        ("commit", {"x": np.zeros((2, 5), np.float32)}, "Unit commit could not run"),
        ("preview", {"x": np.zeros((2, 2))}, "Unit preview could not run"),
        ("preview", {}, "Unit preview could not run"),
        ("replay", {"x": ROWS}, "the bundle has no such Unit"),
    ],
)
def test_an_error_names_the_unit_on_one_line(
    checked: Checked, unit: str, feeds: dict[str, np.ndarray], words: str
) -> None:
    engine = OrtEngine(checked, threads=1)
    with pytest.raises(EngineFailed, match=words) as raised:
        engine.run(unit, feeds)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("data", [b"", b"not a model", onnx.ModelProto().SerializeToString()])
def test_a_broken_unit_file_names_the_unit(
    checked: Checked, data: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    (checked.path / "units/pick.onnx").write_bytes(data)
    with pytest.raises(EngineFailed, match="Unit pick") as raised:
        OrtEngine(checked, threads=1)
    assert str(raised.value).isprintable()
    # The message is ours to print; the library stays silent.
    assert capfd.readouterr().err == ""


def test_weights_are_mapped_and_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows, columns = 256, 65536  # 64 MiB
    folder = make_bundle(tmp_path / "x.clover")
    data = np.full(rows * columns, 2, np.float32)
    data.tofile(folder / "weights/model.safetensors")
    (folder / "units/weights.bin").touch()
    for name in UNITS:
        write_unit(folder / f"units/{name}.onnx", 0, (rows, columns))
    place = {"file": "weights/model.safetensors", "offset": 0, "dtype": "float32"}
    edit(folder, weights={"w": {**place, "shape": [rows, columns]}})
    checked = read_bundle(folder)
    before = psutil.Process().memory_full_info().uss
    engine = OrtEngine(checked, threads=1)
    for unit in ("commit", "verify", "pick"):
        assert engine.run(unit, {"x": np.ones((1, rows), np.float32)})["y"][0, 0] == 2 * rows
    # The mapped pages count once and the layout of preview once; three more copies would be five.
    assert psutil.Process().memory_full_info().uss - before < data.nbytes * 2.5


class TestCores:
    """Threads by default: physical cores that are allowed, within a container's share."""

    def test_at_least_one_and_no_more_than_allowed(self) -> None:
        assert 1 <= cores() <= len(os.sched_getaffinity(0))

    @pytest.mark.parametrize(
        ("quota", "most"), [("max 100000", None), ("50000 100000", 1), ("x", None), ("1 0", None)]
    )
    def test_a_share_limits(self, tmp_path: Path, quota: str, most: int | None) -> None:
        (tmp_path / "fs/cgroup").mkdir(parents=True)
        (tmp_path / "fs/cgroup/cpu.max").write_text(quota)
        assert cores(tmp_path) == (most or len(os.sched_getaffinity(0)))

    def test_siblings_count_once(self, tmp_path: Path) -> None:
        for i in os.sched_getaffinity(0):
            place = tmp_path / f"devices/system/cpu/cpu{i}/topology"
            place.mkdir(parents=True)
            (place / "thread_siblings_list").write_text("0-127\n")
        assert cores(tmp_path) == 1
