"""A lowered graph as ONNX: for TensorRT with plugin nodes, for ONNX Runtime with functions.

Both hold the same nodes in the same order. TensorRT takes a function for a plugin of its name, so
its file has none; ONNX Runtime, which has no plugin, proves what the nodes compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper
from torch import Tensor

from clover_compile import __version__
from clover_compile.kernels.onnx_text import DOMAIN, DOMAIN_VERSION, OPSETS, OnnxFunction, Shape
from clover_compile.targets.ort_cpu.lowering import IR_VERSION
from clover_compile.targets.trt.graph import Array, FusedNode, Graph
from clover_compile.targets.trt.lowering import ELEMENTS
from clover_compile.targets.trt.node import Attributes

PLUGIN, PLUGIN_VERSION = "TritonKernel", "1"


@dataclass(frozen=True)
class Expanded:
    """A graph for ONNX Runtime."""

    model: ModelProto
    layouts: dict[str, str]
    """Weight -> layout its function wants it in, where that is not the checkpoint's."""


def plugin_model(graph: Graph, attributes: Mapping[str, Attributes]) -> ModelProto:
    """The graph for TensorRT: every fused op one node of the plugin, its attributes by name."""
    nodes = [
        _plugin_node(node, attributes[node.name]) if isinstance(node, FusedNode) else node
        for node in graph.nodes
    ]
    constants = [_engine_constant(name, x) for name, x in graph.constants.items()]
    return graph_model(graph, nodes, [], constants)


def function_model(graph: Graph) -> Expanded:
    """The same nodes as functions in standard ops and ONNX Runtime's own."""
    functions: dict[str, OnnxFunction] = {}
    layouts: dict[str, str] = {}
    nodes: list[NodeProto] = []
    for node in graph.nodes:
        if isinstance(node, NodeProto):
            nodes.append(node)
            continue
        function = node.op.slot("onnx")(dynamic_shapes(node), dict(node.scalars))
        known = functions.setdefault(function.name, function)
        if known.proto != function.proto:
            raise ValueError(f"two different functions {function.name} in {graph.unit}")
        layouts |= {node.inputs[k].name: layout for k, layout in function.layouts.items()}
        nodes += function_nodes(node, function)
    used = [function for _, function in sorted(functions.items())]
    return Expanded(graph_model(graph, nodes, used), layouts)


def dynamic_shapes(node: FusedNode) -> dict[str, Shape]:
    """Shapes of a node's inputs as ONNX functions are made for them."""
    return {
        k: tuple(n if isinstance(n, int) else None for n in x.shape) for k, x in node.inputs.items()
    }


def _plugin_node(node: FusedNode, attributes: Attributes) -> NodeProto:
    inputs = [node.inputs[k].name for k in node.op.parameters if k in node.inputs]
    made: NodeProto = helper.make_node(
        PLUGIN, inputs, list(node.outputs.values()), name=node.name, domain=DOMAIN,
        plugin_namespace=DOMAIN, plugin_version=PLUGIN_VERSION,
    )  # fmt: skip
    for key, value in (("plan", attributes.plan), ("cubins", attributes.cubins)):
        # As int8: other types change the bytes or their number on the way into the plugin.
        tensor = helper.make_tensor(key, TensorProto.INT8, [len(value)], value, raw=True)
        made.attribute.append(helper.make_attribute(key, tensor))
    return made


def function_nodes(node: FusedNode, function: OnnxFunction) -> list[NodeProto]:
    """A call of the function, and what copies results that equal an input."""
    inputs = [node.inputs[k].name for k in function.inputs]
    results = [node.op.outputs[i] for i in function.outputs]
    outputs = [node.outputs.get(r, f"{node.name}.unread.{r}") for r in results]
    made = [helper.make_node(function.name, inputs, outputs, name=node.name, domain=DOMAIN)]
    for i, parameter in function.aliases.items():
        result = node.op.outputs[i]
        if result in node.outputs:
            source, target = node.inputs[parameter].name, node.outputs[result]
            made.append(helper.make_node("Identity", [source], [target], name=target))
    return made


def _value(array: Array) -> ValueInfoProto:
    made: ValueInfoProto = helper.make_tensor_value_info(
        array.name, ELEMENTS[array.dtype], list(array.shape)
    )
    return made


def _engine_constant(name: str, value: Tensor) -> TensorProto:
    """Engines have no fp64: it travels as int64 with the same bits."""
    array = value.numpy()
    if value.dtype is torch.float64:
        array = array.view(np.int64)
    made: TensorProto = numpy_helper.from_array(array, name)
    return made


def graph_model(
    graph: Graph, nodes: list[NodeProto], functions: list[OnnxFunction],
    constants: list[TensorProto] | None = None,
) -> ModelProto:  # fmt: skip
    """The file: the graph's arrays around these nodes; its constants as they are if none given."""
    if constants is None:
        constants = [
            numpy_helper.from_array(x.numpy(), name) for name, x in graph.constants.items()
        ]
    made = helper.make_graph(
        nodes, graph.unit, [_value(x) for x in (*graph.inputs, *graph.weights)],
        [_value(x) for x in graph.outputs], constants,
    )  # fmt: skip
    versions = {"": OPSETS[""], DOMAIN: DOMAIN_VERSION, **(OPSETS if functions else {})}
    model: ModelProto = helper.make_model(
        made,
        opset_imports=[helper.make_opsetid(*item) for item in versions.items()],
        functions=[x.proto for x in functions],
        ir_version=IR_VERSION,
        producer_name="clover-compile",
        producer_version=__version__,
    )
    return model
