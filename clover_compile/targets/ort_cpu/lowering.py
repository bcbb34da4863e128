"""A fused Unit as an ONNX file for ONNX Runtime: small, without weights, one node per fused op."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import onnx_ir
import torch
from onnx import ModelProto, NodeProto, TensorProto
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from onnxscript.optimizer import optimize_ir
from torch import Tensor

from clover_compile import __version__
from clover_compile.kernels.moe.onnx_function import COLUMNS, INTERLEAVED
from clover_compile.kernels.onnx_text import DOMAIN, OPSETS
from clover_compile.targets.ort_cpu.flatten import weights_as_inputs
from clover_compile.targets.ort_cpu.translation import DOMAINS, UNREAD, Translation
from clover_compile.unit import Unit

IR_VERSION = 10
"""Version of the file format; every ONNX Runtime that has the kernels reads it."""

INLINE_LIMIT = 64 * 1024
"""Bytes of constants a file may hold: more would be a weight that was folded."""


@dataclass(frozen=True)
class StoredWeight:
    """A weight as the file wants it stored."""

    name: str
    """The weight's name, then `|` and the layout where it is not the checkpoint's."""
    weight: str
    layout: str
    """"" or a name `arrange` knows."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LoweredOp:
    """How one op of a Unit is served."""

    count: int
    """Nodes in the finished file."""
    functions: tuple[str, ...]
    kernels: tuple[str, ...]
    reason: str
    """Why no single kernel serves it; empty where one does."""


@dataclass(frozen=True)
class Lowered:
    """A Unit in ONNX, its weights named but not placed."""

    unit: str
    model: ModelProto
    weights: tuple[StoredWeight, ...]
    ops: Mapping[str, LoweredOp]


Placement = Mapping[str, tuple[str, int, int]]
"""Stored weight -> (file relative to the model, offset, length in bytes)."""


def arrange(tensor: Tensor, layout: str) -> Tensor:
    """The tensor as a kernel wants it, see kernels/moe/onnx_function.py; ValueError if unknown."""
    kind, _, count = layout.partition("/")
    parts = int(count or 1)
    if not layout:
        return tensor
    experts, rows, columns = tensor.shape
    if kind == INTERLEAVED:
        split = tensor.reshape(experts, 2, parts, -1, columns)
        return split.permute(2, 0, 3, 1, 4).reshape(parts * experts, -1, columns)
    if kind == COLUMNS:
        split = tensor.reshape(experts, rows, parts, -1)
        return split.permute(2, 0, 1, 3).reshape(parts * experts, rows, -1)
    raise ValueError(f"unknown layout {layout}")


def lower(unit: Unit) -> Lowered:
    """Lowers a Unit, fused or not; no weight is read, folded or copied."""
    program, names = weights_as_inputs(unit)
    translation = Translation()
    with _quiet():
        exported = torch.onnx.export(
            program,
            dynamo=True,
            custom_translation_table=translation.table(),
            opset_version=OPSETS[""],
            optimize=False,
            verbose=False,
        )
    assert exported is not None
    model = exported.model
    optimize_ir(model, inline=False)
    ClearMetadataAndDocStringPass()(model)
    _name(model, unit, names)
    proto = onnx_ir.to_proto(model)
    weights = _declare_weights(proto, unit, translation)
    _finish(proto, unit, translation)
    return Lowered(unit.name, proto, weights, _count(proto, translation))


def attach(lowered: Lowered, placement: Placement) -> bytes:
    """The file with its weights placed; KeyError if a weight has no place."""
    proto = ModelProto()
    proto.CopyFrom(lowered.model)
    wanted = {stored.name for stored in lowered.weights}
    for tensor in proto.graph.initializer:
        if tensor.name in wanted:
            file, offset, length = placement[tensor.name]
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", file), ("offset", offset), ("length", length)):
                tensor.external_data.add(key=key, value=str(value))
    file_bytes: bytes = proto.SerializeToString(deterministic=True)
    return file_bytes


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the exporter's remarks about packages we do not use away from the user."""
    logger = logging.getLogger("torch.onnx._internal.exporter")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _name(model: onnx_ir.Model, unit: Unit, names: tuple[str, ...]) -> None:
    """Gives inputs and outputs the names of the Unit's interface."""
    graph = model.graph
    for value, name in zip(graph.inputs, names, strict=True):
        value.name = name
    for i, (value, name) in enumerate(zip(graph.outputs, unit.outputs, strict=True)):
        if value.producer() is None or value in graph.outputs[:i]:
            node = onnx_ir.node("Identity", [value], name=f"copy_{name}")
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            graph.append(node)
            graph.outputs[i] = value = node.outputs[0]
        value.name = name


def _declare_weights(
    proto: ModelProto, unit: Unit, translation: Translation
) -> tuple[StoredWeight, ...]:
    """Turns the inputs that are weights into initializers without data, one per layout in use."""
    graph = proto.graph
    own = set(unit.inputs)
    known = {weight.name: weight for weight in unit.weights.values()}
    stored: dict[str, StoredWeight] = {}
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name in known and name not in own:
                layout = _layout(node, place, translation)
                full = "|".join(filter(None, (name, layout)))
                node.input[place] = full
                shape = tuple(arrange(torch.empty(known[name].shape, device="meta"), layout).shape)
                stored[full] = StoredWeight(full, name, layout, shape)
    kept = [value for value in graph.input if value.name in own]
    types = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    del graph.input[:]
    graph.input.extend(kept)
    for name in sorted(stored):
        weight = stored[name]
        graph.initializer.add(name=name, dims=weight.shape, data_type=types[weight.weight])
    return tuple(stored[name] for name in sorted(stored))


def _layout(node: NodeProto, place: int, translation: Translation) -> str:
    function = translation.functions.get(node.op_type) if node.domain == DOMAIN else None
    return function.layouts.get(function.inputs[place], "") if function else ""


def _finish(proto: ModelProto, unit: Unit, translation: Translation) -> None:
    """Adds the functions and opset versions, and drops what no engine reads."""
    graph = proto.graph
    graph.name = unit.name
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                # The only size that comes from data is the number of logits rows.
                dim.dim_param = unit.dimensions.get(dim.dim_param, "keep")
    used = {node.op_type for node in graph.node if node.domain == DOMAIN}
    del proto.functions[:]
    proto.functions.extend(translation.functions[name].proto for name in sorted(used))
    del proto.opset_import[:]
    for domain, version in DOMAINS.items():
        proto.opset_import.add(domain=domain, version=version)
    proto.ir_version = IR_VERSION
    proto.producer_name, proto.producer_version = "clover-compile", __version__
    inline = sum(len(t.raw_data) for t in graph.initializer)
    if inline > INLINE_LIMIT:
        raise ValueError(f"Unit {unit.name}: {inline} bytes of constants: a weight was folded")
    if UNREAD.encode() in graph.SerializeToString():
        raise ValueError(f"Unit {unit.name}: reads a result that is {UNREAD}")


def _count(proto: ModelProto, translation: Translation) -> dict[str, LoweredOp]:
    """What the finished file holds, op by op."""
    nodes = Counter(node.op_type for node in proto.graph.node if node.domain == DOMAIN)
    ops: dict[str, LoweredOp] = {}
    for owner in sorted({translation.owners[name] for name in nodes}):
        names = tuple(name for name in sorted(nodes) if translation.owners[name] == owner)
        functions = [translation.functions[name] for name in names]
        kernels = dict.fromkeys(kernel for f in functions for kernel in f.kernels)
        reasons = dict.fromkeys(f.reason for f in functions if f.reason)
        count = sum(nodes[name] for name in names)
        ops[owner] = LoweredOp(count, names, tuple(kernels), "; ".join(reasons))
    return ops
