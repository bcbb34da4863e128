"""ONNX functions from text: the form in which a fused op goes into an ONNX file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx
from onnx import AttributeProto, FunctionProto, NodeProto

DOMAIN = "clover"
DOMAIN_VERSION = 1
OPSETS = {"": 24, "com.microsoft": 1}
"""Opset versions of every body. From 25 on ONNX Runtime's CPU kernel for Attention is missed."""

LOWEST = -3.0e38
"""Stands for minus infinity in arithmetic that would make NaN of it; its exponential is 0."""

Shape = tuple[int | None, ...]
"""Sizes of a tensor; None where a size is dynamic."""


def fixed(*sizes: int | None) -> tuple[int, ...]:
    """Sizes that a function bakes in; ValueError if one is dynamic."""
    known = tuple(size for size in sizes if size is not None)
    if len(known) != len(sizes):
        raise ValueError(f"dynamic size among {sizes}")
    return known


@dataclass(frozen=True)
class OnnxFunction:
    """One ONNX function that implements a fused op for given sizes and constants."""

    name: str
    proto: FunctionProto
    inputs: tuple[str, ...]
    """The op's tensor parameters, in the order of the node's inputs."""
    outputs: tuple[int, ...]
    """Which results of the op the node returns, in order."""
    kernels: tuple[str, ...]
    """The engine's kernels that do the work, `domain:type` (no domain for ai.onnx)."""
    reason: str = ""
    """Why no single kernel serves the op, where none does."""
    layouts: Mapping[str, str] = field(default_factory=dict)
    """Parameter -> layout its weight must be stored in, where that is not the checkpoint's."""
    aliases: Mapping[int, str] = field(default_factory=dict)
    """Result of the op that is no output -> the parameter it equals."""


def _label(nodes: Iterable[NodeProto]) -> None:
    """Names every node after its first output: names are what the engine's profile shows."""
    for node in nodes:
        node.name = node.output[0]
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                _label(attribute.g.node)


def build(
    name: str,
    inputs: Iterable[str],
    outputs: Iterable[str],
    body: str,
    *,
    returns: tuple[int, ...],
    kernels: tuple[str, ...],
    **rest: Any,
) -> OnnxFunction:
    """The function `name` in domain `clover` from the text of its body.

    `inputs` are parameters of the op's reference, `outputs` names of the body, `returns` the
    results of the op these are; `rest` are further fields. Raises onnx.parser.ParseError with the
    offending line, and ValueError if a kernel named is not in the body.
    """
    inputs = tuple(inputs)
    imports = ", ".join(f'"{domain}" : {version}' for domain, version in OPSETS.items())
    proto = onnx.parser.parse_function(
        f'<domain: "{DOMAIN}", opset_import: [{imports}]>\n'
        f"{name} ({', '.join(inputs)}) => ({', '.join(outputs)})\n{{\n{body}\n}}"
    )
    _label(proto.node)
    used = {":".join(filter(None, (node.domain, node.op_type))) for node in proto.node}
    if not used.issuperset(kernels):
        raise ValueError(f"{name}: no {', '.join(set(kernels) - used)} in its body")
    return OnnxFunction(name, proto, inputs, returns, kernels, **rest)


def ints(*values: int) -> str:
    """Text of a Constant node: int64 [n]."""
    return f"Constant <value_ints = [{', '.join(map(str, values))}]> ()"


def integer(value: int) -> str:
    """Text of a Constant node: an int64 scalar."""
    return f"Constant <value_int = {value}> ()"


def number(value: float) -> str:
    """Text of a Constant node: an fp32 scalar."""
    return f"Constant <value_float = {float(value)!r}> ()"


def floats(*values: float) -> str:
    """Text of a Constant node: fp32 [n]."""
    return f"Constant <value_floats = [{', '.join(repr(float(v)) for v in values)}]> ()"
