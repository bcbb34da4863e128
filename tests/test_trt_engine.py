"""Plugin nodes through the registry, parser and builder of TensorRT-RTX, which need no GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from onnx import ModelProto, TensorProto, helper

from clover_compile.errors import EngineBuildFailed, NoCompiler
from clover_compile.runtime.trt_build import Built, Request
from clover_compile.targets.trt.library import library
from clover_compile.targets.trt.rtx import build_engines, rtx_library
from tests.trt_toys import scratch

pytestmark = pytest.mark.trt

CODE = b"\x7fELF" + bytes(range(256))
TYPES = {
    "fp32": TensorProto.FLOAT, "bf16": TensorProto.BFLOAT16, "fp16": TensorProto.FLOAT16,
    "i64": TensorProto.INT64, "i32": TensorProto.INT32, "i1": TensorProto.BOOL,
    "fp64": TensorProto.INT64,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def plugin() -> Path:
    """The plugin's library."""
    if rtx_library() is None:
        pytest.skip("needs the package tensorrt-rtx")
    try:
        return library().path
    except NoCompiler as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class Array:
    """An array of the toy node: in its plan, and as the network has it."""

    dtype: str
    planned: tuple[Any, ...]
    given: tuple[Any, ...] = ()
    alias: int | None = None


def toy_plan(inputs: list[Array], outputs: list[Array]) -> bytes:
    """A plan of one launch that would hand over everything there is."""

    def row(kind: str, i: int, x: Array) -> dict[str, Any]:
        made = {"name": f"{kind}{i}", "dtype": x.dtype, "shape": list(x.planned)}
        return made if kind == "in" else made | {"alias": x.alias}

    arguments = [["input", i] for i in range(len(inputs))]
    arguments += [["output", i] for i in range(len(outputs))] + [["scratch", 0], ["integer", 3]]
    launch = {"kernel": 0, "grid": [1, 1, 1], "arguments": arguments}
    scratch_row = {"name": "w", "dtype": "fp32", "shape": [5]}
    variant = {"guard": "1", "scratch": [scratch_row], "launches": [launch]}
    plan = {
        "op": "toy",
        "inputs": [row("in", i, x) for i, x in enumerate(inputs)],
        "outputs": [row("out", i, x) for i, x in enumerate(outputs)],
        "kernels": [{"function": "f", "bytes": len(CODE), "warps": 4, "shared": 16}],
        "targets": [{"capability": 89, "variants": [variant]}],
    }
    return json.dumps(plan).encode()


def toy_model(inputs: list[Array], outputs: list[Array], attributes: dict[str, Any]) -> ModelProto:
    """A network of one node."""
    names = [f"in{i}" for i in range(len(inputs))], [f"out{i}" for i in range(len(outputs))]
    node = helper.make_node(
        "TritonKernel", *names, name="toy", domain="clover", plugin_namespace="clover",
        plugin_version="1",
    )  # fmt: skip
    for key, value in attributes.items():
        if isinstance(value, bytes):
            value = helper.make_tensor(key, TensorProto.INT8, [len(value)], value, raw=True)
        node.attribute.append(helper.make_attribute(key, value))
    graph = helper.make_graph(
        [node], "toy",
        [helper.make_tensor_value_info(n, TYPES[x.dtype], list(x.given))
         for n, x in zip(names[0], inputs, strict=True)],
        [helper.make_tensor_value_info(n, TYPES[x.dtype], None)
         for n, x in zip(names[1], outputs, strict=True)],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("clover", 1)]
    made: ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return made


def build(
    folder: Path, plugin: Path, inputs: list[Array], outputs: list[Array],
    aliases: dict[str, str] | None = None, shapes: dict[str, Any] | None = None, **changes: Any,
) -> Built:  # fmt: skip
    """Builds an engine of the toy; `changes` replace (None: remove) attributes."""
    attributes = {"plan": toy_plan(inputs, outputs), "cubins": CODE, **changes}
    attributes = {k: x for k, x in attributes.items() if x is not None}
    model = toy_model(inputs, outputs, attributes)
    onnx = scratch(folder, "toy.onnx", model.SerializeToString())
    engine = str(folder / "toy.engine")
    request = Request("toy", onnx, engine, ["toy"], shapes or {}, {}, aliases or {})
    (built,) = build_engines(plugin, [request], lambda line: None)
    return built


@pytest.mark.parametrize("n", [0, 1, 7, 33, 257])
def test_output_shapes_are_the_plan_s(n: int, tmp_path: Path, plugin: Path) -> None:
    inputs = [Array("bf16", (1, "n", 3), (1, n, 3)), Array("i32", (), ())]
    outputs = [
        Array("fp32", (1, "cdiv(n, 2)", "n * 2 + 1")),
        Array("i64", ("max(n, 5) - min(n, 4)", "(n + 40) // 3")),
        Array("i1", ()),
    ]
    built = build(tmp_path, plugin, inputs, outputs)
    assert built.shapes == {
        "out0": [1, -(-n // 2), 2 * n + 1], "out1": [max(n, 5) - min(n, 4), (n + 40) // 3],
        "out2": [],
    }  # fmt: skip
    plan = (tmp_path / "toy.engine").read_bytes()
    assert built.nbytes == len(plan)
    assert toy_plan(inputs, outputs) in plan and CODE in plan


def test_every_dtype_and_a_size_that_varies(tmp_path: Path, plugin: Path) -> None:
    inputs = [Array(kind, (2, "n"), (2, "n")) for kind in TYPES]
    outputs = [Array(kind, ("n", 2)) for kind in TYPES]
    shapes = {f"in{i}": [[2, 1], [2, 8], [2, 300]] for i in range(len(inputs))}
    built = build(tmp_path, plugin, inputs, outputs, shapes=shapes)
    assert built.inputs == [f"in{i}" for i in range(len(TYPES))]
    assert set(map(tuple, built.shapes.values())) == {(-1, 2)}


IN_PLACE = [Array("fp32", (1, 4), (1, 4)), Array("bf16", (3,), (3,))]


def test_an_alias_needs_to_be_asked_for(tmp_path: Path, plugin: Path) -> None:
    outputs = [Array("bf16", (3,), alias=1), Array("fp32", (1, 4), alias=0)]
    aliases = {"out0": "in1", "out1": "in0"}
    assert build(tmp_path, plugin, IN_PLACE, outputs, aliases).outputs == ["out0", "out1"]
    with pytest.raises(EngineBuildFailed, match="Aliased I/O used by plugin"):
        build(tmp_path, plugin, IN_PLACE, outputs)
    with pytest.raises(EngineBuildFailed, match="out0 cannot take the memory of in0"):
        build(tmp_path, plugin, IN_PLACE, [Array("bf16", (3,), alias=0)], {"out0": "in0"})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"plan": None}, "attribute plan .int8. is missing"),
        ({"cubins": None}, "attribute cubins .int8. is missing"),
        ({"plan": "text"}, "attribute plan .int8. is missing"),
        ({"plan": toy_plan(IN_PLACE, [])[:-9]}, "no JSON"),
        ({"plan": b"\xff\xfe\x00"}, "no JSON"),
        ({"plan": toy_plan(IN_PLACE, [])}, "has no outputs"),
        ({"cubins": CODE[:-1]}, "cut off: f ends at byte 260 of 259"),
        ({"cubins": b"x" * len(CODE)}, "is no cubin"),
        ({"plan": toy_plan(IN_PLACE[:1], [Array("fp32", (1,))])}, "takes 1 inputs"),
        ({"plan": toy_plan(IN_PLACE, [Array("fp32", ("n",))])}, "no input gives n a value"),
        ({"plan": toy_plan([IN_PLACE[0], Array("fp16", (3,))], [Array("fp32", (1,))])},
         "in1 is planned as fp16"),
        ({"plan": toy_plan([IN_PLACE[0], Array("bf16", (4,))], [Array("fp32", (1,))])},
         "in1 has 3 at axis 0, planned 4"),
        ({"plan": toy_plan([IN_PLACE[0], Array("bf16", (1, 3))], [Array("fp32", (1,))])},
         "has 1 dimensions, planned with 2"),
    ],
)  # fmt: skip
def test_attributes_that_do_not_fit_are_a_builder_error(
    changes: dict[str, Any], said: str, tmp_path: Path, plugin: Path
) -> None:
    with pytest.raises(EngineBuildFailed, match=said):
        build(tmp_path, plugin, IN_PLACE, [Array("fp32", (1,))], **changes)


def test_a_node_that_is_no_plugin_layer_is_told(tmp_path: Path, plugin: Path) -> None:
    model = toy_model(IN_PLACE, [Array("fp32", (1,))], {})
    model.graph.node[0].domain = ""
    model.graph.node[0].op_type = "Identity"
    del model.graph.node[0].attribute[:], model.graph.node[0].input[1:]
    onnx = scratch(tmp_path, "toy.onnx", model.SerializeToString())
    request = Request("toy", onnx, str(tmp_path / "e"), ["toy"], {})
    with pytest.raises(EngineBuildFailed, match="0 plugin layers instead of 1: toy"):
        build_engines(plugin, [request], lambda line: None)
