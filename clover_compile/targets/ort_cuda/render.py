"""A lowered graph as ONNX for the CUDA provider: products and experts in 16 bits, the rest in fp32.

Fused ops are functions that compute in fp32 whatever the rows are stored in, as the model does;
only the experts' own kernel takes 16-bit rows and weights. A Unit's arrays are fp32 for its caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from onnx import ModelProto, NodeProto, TensorProto, helper

from clover_compile.kernels.moe.onnx_function import function as experts
from clover_compile.kernels.onnx_text import OnnxFunction
from clover_compile.targets.ort_cpu.lowering import Placement, StoredWeight
from clover_compile.targets.trt.graph import Array, FusedNode, Graph
from clover_compile.targets.trt.lowering import ELEMENTS
from clover_compile.targets.trt.render import dynamic_shapes, function_nodes, graph_model

NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class CudaModel:
    """A Unit whose weights are named but not placed."""

    model: ModelProto
    weights: tuple[StoredWeight, ...]
    functions: Mapping[str, tuple[OnnxFunction, ...]]
    """By op."""


def cuda_model(graph: Graph) -> CudaModel:
    """The graph for the CUDA provider."""
    functions: dict[str, OnnxFunction] = {}
    by_op: dict[str, dict[str, OnnxFunction]] = {}
    layouts: dict[str, str] = {}
    nodes = [_cast(f"{x.name}.wide", x.name, ELEMENTS[x.dtype])
             for x in graph.inputs if x.dtype in NARROW]  # fmt: skip
    turned: dict[str, str] = {}
    for node in graph.nodes:
        if isinstance(node, FusedNode):
            function = _function(node)
            functions.setdefault(function.name, function)
            by_op.setdefault(node.op.name, {})[function.name] = function
            layouts |= {node.inputs[k].name: x for k, x in function.layouts.items()}
            nodes += _widened(node, function) if node.op.name != "moe" else function_nodes(
                node, function
            )  # fmt: skip
        elif node.op_type == "Transpose":
            turned[node.output[0]] = node.input[0]
        else:
            nodes.append(_product(node, turned))
    nodes += [_cast(x.name, f"{x.name}.wide", TensorProto.FLOAT)
              for x in graph.outputs if x.dtype in NARROW]  # fmt: skip
    outer = replace(
        graph, weights=[], inputs=[_wide(x) for x in graph.inputs],
        outputs=[_wide(x) for x in graph.outputs],
    )  # fmt: skip
    model = graph_model(outer, nodes, list(functions.values()))
    _rename(model, graph)
    weights = tuple(
        StoredWeight("|".join(filter(None, (x.name, layouts.get(x.name, "")))), x.name,
                     layouts.get(x.name, ""), tuple(int(n) for n in x.shape))
        for x in graph.weights
    )  # fmt: skip
    return CudaModel(model, weights, {op: tuple(x.values()) for op, x in by_op.items()})


def place(made: CudaModel, graph: Graph, placement: Placement) -> bytes:
    """The file with its weights where they lie in the store."""
    model = ModelProto()
    model.CopyFrom(made.model)
    types = {x.name: ELEMENTS[x.dtype] for x in graph.weights}
    for stored in made.weights:
        file, offset, length = placement[stored.name]
        tensor = model.graph.initializer.add(
            name=stored.weight, dims=stored.shape, data_type=types[stored.weight],
            data_location=TensorProto.EXTERNAL,
        )  # fmt: skip
        for key, value in (("location", file), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def _function(node: FusedNode) -> OnnxFunction:
    shapes = dynamic_shapes(node)
    if node.op.name == "moe":
        return experts(shapes, dict(node.scalars), ELEMENTS[node.inputs["x"].dtype])
    made: OnnxFunction = node.op.slot("onnx")(shapes, dict(node.scalars))
    return made


def _cast(source: str, target: str, element: int) -> NodeProto:
    name = f"cast.{target}"
    made: NodeProto = helper.make_node("Cast", [source], [target], name=name, to=element)
    return made


def _wide(array: Array) -> Array:
    return replace(array, dtype=torch.float32) if array.dtype in NARROW else array


def _product(node: NodeProto, turned: Mapping[str, str]) -> NodeProto:
    """x W^T on the weight as stored."""
    if node.op_type != "MatMul":
        return node
    made: NodeProto = helper.make_node(
        "FusedMatMul", [node.input[0], turned[node.input[1]]], list(node.output), name=node.name,
        domain="com.microsoft", transB=1,
    )  # fmt: skip
    return made


def _widened(node: FusedNode, function: OnnxFunction) -> list[NodeProto]:
    """The function between casts: fp32 in, and out in the rows' own type."""
    narrow = {k: x for k, x in node.inputs.items() if x.dtype in NARROW and k in function.inputs}
    before = [_cast(x.name, f"{node.name}.{k}.wide", TensorProto.FLOAT) for k, x in narrow.items()]
    inputs = {**node.inputs} | {
        k: replace(x, name=f"{node.name}.{k}.wide", dtype=torch.float32) for k, x in narrow.items()
    }
    typed = {k: x for k, x in node.results.items() if x in NARROW}
    outputs = {k: f"{x}.fp32" if k in typed else x for k, x in node.outputs.items()}
    middle = function_nodes(replace(node, inputs=inputs, outputs=outputs), function)
    after = [_cast(f"{node.outputs[k]}.fp32", node.outputs[k], ELEMENTS[x])
             for k, x in typed.items()]  # fmt: skip
    return before + middle + after


def _rename(model: ModelProto, graph: Graph) -> None:
    """Callers see the Unit's own names; what the casts give and take inside has others."""
    outer = {x.name for x in (*graph.inputs, *graph.outputs) if x.dtype in NARROW}
    names = {name: f"{name}.narrow" for name in outer} | {f"{name}.wide": name for name in outer}
    for node in model.graph.node:
        node.input[:] = [names.get(x, x) for x in node.input]
        node.output[:] = [names.get(x, x) for x in node.output]
