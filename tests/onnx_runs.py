"""Runs one fused op's ONNX function alone in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import Tensor

from clover_compile.kernels.onnx_text import DOMAIN, DOMAIN_VERSION, OPSETS, OnnxFunction
from clover_compile.kernels.op import FusedOp
from clover_compile.targets.ort_cpu.lowering import IR_VERSION, arrange

_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.bool: TensorProto.BOOL,
}


def _value(name: str, x: Tensor) -> onnx.ValueInfoProto:
    dims = [f"{name}{axis}" for axis in range(x.dim())]
    return helper.make_tensor_value_info(name, _TYPES[x.dtype], dims)


@dataclass(frozen=True)
class Run:
    """One case of an op as a model of one node, every tensor an input."""

    function: OnnxFunction
    model: onnx.ModelProto
    feeds: dict[str, NDArray[Any]]
    expected: dict[str, NDArray[Any]]


def prepare(spec: FusedOp, arguments: tuple[Any, ...]) -> Run:
    """Builds the model of a case, checks it, and runs the reference."""
    given = dict(zip(spec.parameters, arguments, strict=True))
    tensors = {k: x for k, x in given.items() if isinstance(x, Tensor)}
    constants = {k: x for k, x in given.items() if k not in tensors and x is not None}
    function = spec.slot("onnx")({k: tuple(x.shape) for k, x in tensors.items()}, constants)
    found = spec.reference(*arguments)
    found = found if isinstance(found, tuple) else (found,)
    expected = {f"{spec.outputs[i]}.out": found[i] for i in function.outputs}
    graph = helper.make_graph(
        [helper.make_node(function.name, function.inputs, list(expected), "call", domain=DOMAIN)],
        spec.name,
        [_value(name, tensors[name]) for name in function.inputs],
        [_value(name, x) for name, x in expected.items()],
    )
    domains = {DOMAIN: DOMAIN_VERSION, **OPSETS}
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(*item) for item in domains.items()],
        functions=[function.proto],
        ir_version=IR_VERSION,
    )
    onnx.checker.check_model(model)
    feeds = {
        name: arrange(tensors[name], function.layouts.get(name, "")).contiguous().numpy()
        for name in function.inputs
    }
    return Run(function, model, feeds, {name: x.numpy() for name, x in expected.items()})


def session(
    model: onnx.ModelProto | Path, weights: Mapping[str, NDArray[Any]] | None = None
) -> Any:
    """An ONNX Runtime session with one thread; `weights` become initializers without a copy."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    values = {k: ort.OrtValue.ortvalue_from_numpy(x) for k, x in (weights or {}).items()}
    for name, value in values.items():
        options.add_initializer(name, value)
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    made = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    made.weights = values  # the session does not keep them alive itself
    return made


def error(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """Largest difference over the largest value; infinite where a NaN stands on one side only."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not found.size:
        return 0.0
    bad = np.isnan(expected)
    if (np.isnan(found) != bad).any():
        return float("inf")
    wide, wanted = (x[~bad].astype(np.float64) for x in (found, expected))
    largest = np.abs(wanted).max(initial=1e-30)
    return float(np.abs(wide - wanted).max(initial=0.0) / largest)
