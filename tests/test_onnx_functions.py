"""Each op's ONNX function, alone in ONNX Runtime, against the op's reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from clover_compile.kernels.gdn_scan.spec import Sizes as ScanSizes
from clover_compile.kernels.gdn_scan.spec import inputs
from clover_compile.kernels.moe.spec import Sizes
from clover_compile.kernels.moe.spec import inputs as moe_inputs
from clover_compile.kernels.onnx_text import build
from clover_compile.kernels.op import Case
from clover_compile.kernels.pick.onnx_function import _chunk
from clover_compile.kernels.pick.spec import Sizes as PickSizes
from clover_compile.kernels.pick.spec import inputs as pick_inputs
from clover_compile.kernels.table import OPS, fused_op
from tests.onnx_runs import error, prepare, session

CASES = [(name, case) for name in OPS for case in fused_op(name).cases()]
TOLERANCES = {"state.out": 2e-5}
WEIGHTS = {
    "rms_norm": ("weight",),
    "gdn_scan": ("conv", "decay", "dt_bias", "norm"),
    "gdn_preview": (
        "taps", "decay", "dt_bias", "logit_scale", "history_bias", "history_c", "norm",
    ),
    "block_attention": ("q_norm", "k_norm"),
    "moe": ("gate_up", "down", "shared_gate_up", "shared_down"),
    "pick": (),
}  # fmt: skip


def make(case: Case) -> tuple[Any, ...]:
    """The arguments of a case."""
    return case.make(torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{n}-{c.name}" for n, c in CASES])
def test_function_agrees_with_the_reference(name: str, case: Case) -> None:
    run = prepare(fused_op(name), make(case))
    found = session(run.model).run(None, run.feeds)
    # Of a row with a NaN only the confidence is promised.
    sound = ~np.isnan(run.feeds["logits"]).any(-1) if name == "pick" else slice(None)
    for output, value in zip(run.expected, found, strict=True):
        expected = run.expected[output]
        if name == "pick" and output != "confidence.out":
            value, expected = value[sound], expected[sound]
        if output == "entropy.out":  # in nats: what counts is its absolute size
            assert np.abs(value - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max())
        elif value.dtype == np.float32:
            assert error(value, expected) <= TOLERANCES.get(output, 1e-5), output
        else:
            assert np.array_equal(value, expected), output


@pytest.mark.parametrize("name", [name for name, weights in WEIGHTS.items() if weights])
def test_weights_may_be_mapped_initializers(name: str, tmp_path: Path) -> None:
    run = prepare(fused_op(name), make(next(fused_op(name).cases())))
    mapped = {}
    for weight in set(WEIGHTS[name]) & set(run.feeds):
        value = run.feeds.pop(weight)
        value.tofile(tmp_path / weight)
        mapped[weight] = np.memmap(tmp_path / weight, value.dtype, "r", shape=value.shape)
        entry = next(x for x in run.model.graph.input if x.name == weight)
        run.model.graph.input.remove(entry)
        tensor = run.model.graph.initializer.add(name=weight, dims=value.shape, data_type=1)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=weight)
    # The files must be real, also where the values are given: small weights are folded from them.
    (tmp_path / "model.onnx").write_bytes(run.model.SerializeToString())
    onnx.checker.check_model(str(tmp_path / "model.onnx"))
    found = session(tmp_path / "model.onnx", mapped).run(None, run.feeds)
    for output, value in zip(run.expected, found, strict=True):
        assert error(value, run.expected[output]) <= 1e-5


def test_replay_of_no_rows_changes_no_bit_and_of_all_is_the_scan() -> None:
    spec, generator = fused_op("gdn_scan"), torch.Generator().manual_seed(3)
    scan = list(inputs(ScanSizes(9), generator))
    replay = [*scan]
    replay[1] = None
    states = {}
    for rows in (0, 4, 9):
        replay[10] = torch.tensor([rows], dtype=torch.int32)
        run = prepare(spec, tuple(replay))
        states[rows] = session(run.model).run(None, run.feeds)
    cut = [x[:, :4] if i < 4 else x for i, x in enumerate(scan)]
    for rows, arguments in ((9, scan), (4, cut)):
        run = prepare(spec, tuple(arguments))
        _, ring, state = session(run.model).run(None, run.feeds)
        assert np.array_equal(states[rows][0], ring)
        assert np.array_equal(states[rows][1], state)
    assert np.array_equal(states[0][0], scan[4].numpy())
    assert np.array_equal(states[0][1], scan[5].numpy())


@pytest.mark.parametrize("vocab", [4096, 4099])
def test_pick_takes_the_first_maximum_of_a_large_vocabulary(vocab: int) -> None:
    arguments = pick_inputs(PickSizes(8, vocab, levels=3), torch.Generator().manual_seed(1))
    run = prepare(fused_op("pick"), arguments)
    ids = session(run.model).run(["ids.out"], run.feeds)[0]
    assert np.array_equal(ids, run.expected["ids.out"])
    assert _chunk(4099) == 1 < _chunk(4096)


@pytest.mark.parametrize("block", [False, True], ids=["alone", "coreset"])
@pytest.mark.parametrize("router", ["normal", "equal", "pairs", "far"])
@pytest.mark.parametrize(("width", "parts"), [(127, 1), (128, 2), (192, 2), (256, 4)])
def test_wide_experts_are_cut_into_parts(width: int, parts: int, router: str, block: bool) -> None:
    """Threads then have the same to do; nothing else changes, whatever ties."""
    sizes = Sizes(5, 3, width=width, router=router, block=block)
    run = prepare(fused_op("moe"), moe_inputs(sizes, torch.Generator().manual_seed(2)))
    assert run.feeds["gate_up"].shape == (8 * parts, 2 * width // parts, 24)
    assert run.feeds["down"].shape == (8 * parts, 24, width // parts)
    y, kept = session(run.model).run(None, run.feeds)
    assert error(y, run.expected["y.out"]) <= 1e-5
    assert np.array_equal(kept, run.expected["kept.out"])


def test_two_requests_share_nothing() -> None:
    """A function's text depends on sizes and constants alone."""
    spec = fused_op("moe")
    first = make(next(spec.cases()))
    assert prepare(spec, first).function.proto == prepare(spec, first).function.proto


def test_body_is_checked() -> None:
    with pytest.raises(onnx.parser.ParseError):
        build("F", ["x"], ["y"], "y = Relu(x", returns=(0,), kernels=("Relu",))
    with pytest.raises(ValueError, match="no Gelu in its body"):
        build("F", ["x"], ["y"], "y = Relu(x)", returns=(0,), kernels=("Gelu",))
    function = build("F", ["x"], ["y"], "y = Relu(x)", returns=(0,), kernels=("Relu",))
    assert [node.name for node in function.proto.node] == ["y"]
