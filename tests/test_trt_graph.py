"""Units lowered for TensorRT: what stands in the file, and what its nodes compute."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from torch import Tensor

from clover_compile import models
from clover_compile.checkpoint import Checkpoint
from clover_compile.model import interface
from clover_compile.model.load import load_model
from clover_compile.passes.base import run_passes
from clover_compile.passes.pipeline import PIPELINE
from clover_compile.prove import rules_of
from clover_compile.runtime.session import Session
from clover_compile.targets.cubins import plan_key
from clover_compile.targets.ort_cpu.lowering import arrange
from clover_compile.targets.trt.build import TensorRtTarget, profile
from clover_compile.targets.trt.graph import Graph
from clover_compile.targets.trt.lowering import Lowering
from clover_compile.targets.trt.node import Attributes, attributes
from clover_compile.targets.trt.render import Expanded, function_model, plugin_model
from clover_compile.unit import Source, Unit, source_of, trace_unit
from tests.onnx_runs import session as open_session
from tests.trt_toys import hollow_cubins

WAYS: dict[str, dict[str, Any]] = {
    "denoise": {"decode": "denoise"},
    "causal": {"decode": "causal"},
    "exact": {"decode": "self-speculate", "accept": "exact"},
    "release": {"decode": "self-speculate", "accept": "release"},
}
CHECKPOINT = Checkpoint.open(models.find())

Made = tuple[dict[str, Unit], dict[str, Graph], Source]


@pytest.fixture(scope="module")
def made() -> Made:
    """Every Unit of the demonstration model, fused and lowered in fp32."""
    model = load_model(CHECKPOINT.config, CHECKPOINT.tensor, torch.float32)
    units, graphs = dict[str, Unit](), dict[str, Graph]()
    for name in interface.units(CHECKPOINT.config):
        units[name] = trace_unit(model, CHECKPOINT.generation, name)
        run_passes(units[name], (*PIPELINE, *TensorRtTarget.tail), lambda event: None)
        graphs[name] = Lowering(units[name], (90,)).lower()
    return units, graphs, source_of(dict(model.named_parameters()))


class Expansion:
    """Runs the graphs, nodes expanded to functions, in ONNX Runtime."""

    def __init__(
        self, units: Mapping[str, Unit], graphs: Mapping[str, Graph], source: Source
    ) -> None:
        self.sessions: dict[str, Any] = {}
        self.weights: dict[str, dict[str, Any]] = {}
        known: dict[str, Any] = {}
        for name, graph in graphs.items():
            expanded = function_model(graph)
            onnx.checker.check_model(expanded.model)
            self.sessions[name] = open_session(expanded.model)
            for weight in units[name].weights.values():
                key = weight.name
                if key not in known:
                    known[key] = _array(weight.evaluate(source), expanded, key)
            self.weights[name] = {x.name: known[x.name] for x in graph.weights}

    def run(
        self, unit: str, feeds: dict[str, Any], outputs: Sequence[str] | None = None
    ) -> dict[str, Any]:
        session = self.sessions[unit]
        wanted = [x.name for x in session.get_outputs()] if outputs is None else list(outputs)
        return dict(zip(wanted, session.run(wanted, {**feeds, **self.weights[unit]}), strict=True))


def _array(value: Tensor, expanded: Expanded, name: str) -> Any:
    return arrange(value.detach(), expanded.layouts.get(name, "")).contiguous().numpy()


@pytest.fixture(scope="module")
def answers(made: Made) -> Session:
    """A session over the expanded graphs."""
    engine: Any = Expansion(*made)
    return Session(engine, CHECKPOINT.config, rules_of(CHECKPOINT), 512)


@pytest.mark.parametrize("way", WAYS)
def test_the_nodes_compute_the_stored_tokens(way: str, answers: Session) -> None:
    lines = (models.find() / "oracle_tokens.jsonl").read_text().splitlines()[:3]
    for line in lines:
        stored = json.loads(line)
        out = answers.generate(stored["prompt_ids"], max_new_tokens=128, **WAYS[way])
        assert list(out.token_ids) == stored["causal" if way == "exact" else way]


def _attributes(graph: Graph) -> dict[str, Attributes]:
    plans = {plan_key(p): p for node in graph.fused() for p in node.plans.values()}
    cubins = {90: hollow_cubins(plans, 90)}
    return {n.name: attributes(n.plans, cubins, n.aliases) for n in graph.fused()}


def test_every_fused_op_is_one_plugin_node_and_no_function_is_left(made: Made) -> None:
    units, graphs, _ = made
    for name, graph in graphs.items():
        held = _attributes(graph)
        model = plugin_model(graph, held)
        onnx.checker.check_model(model)
        assert not model.functions
        nodes = [node for node in model.graph.node if node.domain == "clover"]
        fused = sum(units[name].count_ops().values())
        angles = int(name not in ("replay", "pick"))
        assert len(nodes) == fused + angles == len(graph.fused())
        for node in nodes:
            given = {a.name: a for a in node.attribute}
            assert node.op_type == "TritonKernel" and given["plugin_namespace"].s == b"clover"
            assert given["plan"].t.raw_data == held[node.name].plan
            assert given["cubins"].t.raw_data == held[node.name].cubins
            assert given["cubins"].t.data_type == TensorProto.INT8
        own = [*units[name].inputs, *sorted(w.name for w in units[name].weights.values())]
        assert [x.name for x in model.graph.input] == own
        assert [x.name for x in model.graph.output] == list(units[name].outputs)
        assert all(x.data_type != TensorProto.DOUBLE for x in model.graph.initializer)


def test_only_ring_and_state_of_commit_and_replay_alias(made: Made) -> None:
    _, graphs, _ = made
    recurrent = interface.recurrent_names(CHECKPOINT.config)
    for name, graph in graphs.items():
        meant = {f"{x}.new": x for x in recurrent} if name in ("commit", "replay") else {}
        assert graph.aliases() == meant


def test_the_profile_covers_a_block_and_the_whole_context(made: Made) -> None:
    shapes, values = profile(made[1]["commit"], 512)
    assert shapes["ids"] == [[1, 1], [1, 32], [1, 256]]
    assert [x[1] for x in shapes["k.3"]] == [1, 512, 512] and "ring.0" not in shapes
    assert values == {"keep": [0, 1, 256]}
    assert profile(made[1]["replay"], 512)[0]["tape.0"][2][1] == 256


def test_the_turns_travel_bit_for_bit(made: Made) -> None:
    graph = made[1]["preview"]
    ((name, turns),) = [(k, x) for k, x in graph.constants.items() if x.dtype is torch.float64]
    held = _attributes(graph)
    model = plugin_model(graph, held)
    (stored,) = [x for x in model.graph.initializer if x.name == name]
    found = onnx.numpy_helper.to_array(stored)
    assert found.dtype == np.int64 and (found.view(np.float64) == turns.numpy()).all()
