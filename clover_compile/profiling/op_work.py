"""What every op of a Unit's ONNX file must read, write and compute, from the file itself.

Bytes are weights, state and logits, each once; what passes between ops may stay in a cache. An
expert counts if a row is routed to it: the file is run once with its router logits as outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from clover_compile.kernels.onnx_text import DOMAIN
from clover_compile.model.config import ModelConfig
from clover_compile.profiling.calls import Call
from clover_compile.profiling.floor import FP32, experts_used, own_flop
from clover_compile.profiling.kernel_times import function_of
from clover_compile.runtime.engine import Array, Arrays

PROJECTION, HEAD, EMBEDDING, OTHER = "projection", "head", "embedding", "other"
_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
_GROWING = ("k", "v")
"""First parts of the names of state arrays of which only the prefix is read."""


@dataclass
class OpWork:
    """All calls of one op in a Unit."""

    count: int = 0
    bytes: int = 0
    flop: int = 0


class UnitFile:
    """The ONNX file of one Unit."""

    def __init__(
        self, path: Path, ops: Mapping[str, Any], c: ModelConfig,
        regions: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """`ops`: the manifest's, which say what functions an op became; of an unfused Unit instead
        `regions`, node -> the op of the region it was traced in.
        """
        self.model = onnx.load(str(path), load_external_data=False)
        self._c, self._regions = c, regions or {}
        graph = self.model.graph
        self._owners = {f: op for op, row in ops.items() for f in row["functions"]}
        self._owners |= {x.op_type: self._regions[x.name] for x in graph.node
                         if x.domain == DOMAIN and x.name in self._regions}  # fmt: skip
        external = onnx.TensorProto.EXTERNAL
        self._stored = [x for x in graph.initializer if x.data_location == external]
        self._weights = {x.name: tuple(x.dims) for x in self._stored}
        self._inputs = {x.name for x in graph.input}
        self._outputs = {x.name for x in graph.output}
        self.labels = {node.name: self.label(node) for node in graph.node}
        """Node outside functions -> op."""

    def owner(self, function: str) -> str:
        """The op a function implements."""
        return self._owners.get(function, OTHER)

    def op_of(self, kernel: str) -> str:
        """The op that a kernel of the engine belongs to, by the name its profiler gives it: a
        node's own, that of the first of some nodes the engine joined and `/` and what they became,
        or one that tells the function it was inlined from.
        """
        function = function_of(kernel)
        if function is not None:
            return self.owner(function)
        return self.labels.get(kernel.split("/")[0], OTHER)

    def label(self, node: onnx.NodeProto) -> str:
        """The op a node belongs to: a fused one, the one whose region it was traced in, or one of
        those around them."""
        if node.name in self._regions:
            return self._regions[node.name]
        if node.domain == DOMAIN:
            return self.owner(node.op_type)
        weights = [name for name in node.input if name in self._weights]
        if node.op_type in ("FusedMatMul", "MatMul", "Gemm") and weights:
            return HEAD if self._is_head(node) else PROJECTION
        return EMBEDDING if node.op_type == "Gather" and weights else OTHER

    def work(self, call: Call, prefix: int, routers: list[Array]) -> dict[str, OpWork]:
        """Op -> work of one call; `routers` are the router logits [T, E] of its layers."""
        found: dict[str, OpWork] = {}
        used = iter([self.used(call, router) for router in routers])
        for node in self.model.graph.node:
            label = self.label(node)
            row = found.setdefault(label, OpWork())
            row.count += 1
            hit, pairs = next(used) if label == "moe" else (0, 0)
            row.bytes += FP32 * sum(self._elements(node, label, call, prefix, hit))
            row.flop += self._flop(node, label, call, prefix, pairs)
        if call.unit == "pick":
            found["pick"].bytes = FP32 * (call.rows + 1) * self._c.vocab_size
            found["pick"].flop = 4 * call.rows * self._c.vocab_size
        return found

    def routers(self, feeds: Arrays, weights: Mapping[str, Array]) -> list[Array]:
        """Router logits [T, E] of every layer in one run."""
        nodes = [node for node in self.model.graph.node if self.label(node) == "moe"]
        if not nodes:
            return []
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        graph = model.graph
        names = [self._router(node) for node in nodes]
        for name in names:
            graph.output.append(onnx.ValueInfoProto(name=name))
        # As inputs, since a file in memory has no folder to find its weights in.
        for tensor in self._stored:
            graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
            graph.initializer.remove(tensor)
        options = ort.SessionOptions()
        options.log_severity_level = 4
        session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        given = {**feeds, **{tensor.name: weights[tensor.name] for tensor in self._stored}}
        found = session.run(names, {x.name: given[x.name] for x in session.get_inputs()})
        return [x[0] for x in found]

    def _router(self, node: onnx.NodeProto) -> str:
        function = next(f for f in self.model.functions if f.name == node.op_type)
        name: str = node.input[list(function.input).index("router")]
        return name

    def used(self, call: Call, router: Array) -> tuple[int, int]:
        """Experts hit, and pairs of row and expert, in one layer."""
        c = self._c
        block = call.unit == "preview" and c.coreset_enabled
        return experts_used(router, c.num_experts_per_tok, c.coreset_top_p if block else None)

    def _is_head(self, node: onnx.NodeProto) -> bool:
        return (self._c.vocab_size in self._weights[node.input[1]] and "head" in node.input[1]) or (
            self._c.tie_word_embeddings and "embed_tokens" in node.input[1]
        )

    def _elements(
        self, node: onnx.NodeProto, label: str, call: Call, prefix: int, hit: int
    ) -> Iterator[int]:
        c = self._c
        if label == HEAD:
            rows = call.rows if call.unit in ("preview", "verify") else call.keep
            yield (prod(self._weights[node.input[1]]) if rows else 0) + rows * c.vocab_size
            return
        for name in node.input:
            if name in self._weights:
                size = prod(self._weights[name])
                if any(part in name for part in _EXPERTS):
                    size = size * hit // c.num_experts
                yield call.rows * c.hidden_size if label == EMBEDDING else size
            elif name in self._inputs:
                yield self._state(name, call, prefix)
        for name in node.output:
            if name in self._outputs and name != "logits":
                yield self._state(name.removesuffix(".new"), call, 0, new=True)

    def _state(self, name: str, call: Call, prefix: int, new: bool = False) -> int:
        """Elements of a state array that are read, or written."""
        c, kind = self._c, name.split(".")[0]
        heads = c.linear_num_value_heads
        if kind in _GROWING:
            return (call.rows if new else prefix) * c.num_key_value_heads * c.head_dim
        return {
            "ring": (c.linear_conv_kernel_dim - 1) * c.conv_dim,
            "S": heads * c.linear_key_head_dim * c.linear_value_head_dim,
            "tape": call.rows * (c.conv_dim + 2 * heads),
        }.get(kind, 0)

    def _flop(self, node: onnx.NodeProto, label: str, call: Call, prefix: int, pairs: int) -> int:
        c = self._c
        rows = call.rows
        if label == HEAD and call.unit == "commit":
            rows = call.keep
        dense = sum(
            prod(self._weights[name])
            for name in node.input
            if name in self._weights and not any(part in name for part in _EXPERTS)
        )
        flop = 0 if label == EMBEDDING else 2 * rows * dense
        block = call.unit == "preview"
        return flop + own_flop(c, label, block=block, rows=rows, prefix=prefix, pairs=pairs)
