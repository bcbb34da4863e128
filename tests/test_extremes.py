"""Weights at the edge of the numbers: the right answer, or an error that names the place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clover_compile.build import build
from clover_compile.checkpoint import Checkpoint
from clover_compile.errors import ModelOverflows, VerdictError
from clover_compile.options import BuildOptions
from clover_compile.runtime.engine import Array, Arrays
from clover_compile.runtime.errors import NotANumber, NotProved
from clover_compile.runtime.session import Session
from tests import oracle
from tests.checkpoints import TINY, Edit, Weights, load_weights, make_tiny, weights
from tests.command import clover_compile
from tests.oracle_engine import oracle_session
from tests.test_configurations import eager_session
from tests.test_locate import _overflow, _stand_in

PROMPT, BUDGET = [5, 9, 200, 31, 5, 5, 5], 12


def _set(ending: str, value: float) -> Edit:
    """Sets all values of the tensors whose names end so."""

    def change(w: Weights) -> None:
        names = [name for name in w if name.endswith(ending)]
        assert names
        for name in names:
            w[name][:] = np.float32(value)

    return weights(change)


def _all(*edits: Edit) -> Edit:
    def edit(folder: Path) -> None:
        for one in edits:
            one(folder)

    return edit


ZERO_EXPERTS = _all(_set("experts.gate_up_proj", 0), _set("experts.down_proj", 0))
TIED_ROUTER = _set("mlp.gate.weight", 0)
FINITE: dict[str, Edit] = {
    "experts that are all zero": ZERO_EXPERTS,
    "nothing in any MLP": _all(ZERO_EXPERTS, _set("shared_expert.down_proj.weight", 0)),
    "a router that always ties": TIED_ROUTER,
    "a router of one opinion": _set("mlp.gate.weight", 1e4),
    "gates of 0, the state forgets": _set("A_log", 20),
    "gates beyond fp32": _set("A_log", 300),
    "gates of 1, the state never forgets": _set("A_log", -300),
    "no gate opens": _set("dt_bias", -1e30),
    "every gate closes": _set("dt_bias", 1e30),
    "a softmax of one row": _set("bd_softmax_logit_scale", 1e4),
    "a softmax of the largest number": _set("bd_softmax_logit_scale", 3e38),
    "only the history": _set("bd_softmax_history_bias", 1e30),
    "never the history": _set("bd_softmax_history_bias", -1e30),
    "nothing but zeros in the embedding": _set("embed_tokens.weight", 0),
}
"""Edits after which every number of the model is still finite."""


def _model(folder: Path, edit: Edit) -> tuple[Path, oracle.Oracle]:
    """A tiny checkpoint and the oracle of the same weights."""
    fields: dict[str, Any] = {"block_size": 8, "threshold": 0.05}
    edit(make_tiny(folder, **fields))
    return folder, oracle.Oracle(oracle.Config(**{**TINY, **fields}), load_weights(folder))


def _agree(session: Session, truth: Any) -> None:
    """Logits of commit and preview, and where no two are equal every way to decode."""
    state, reference = session.new_state(), oracle.State()
    pairs = [(truth.commit(reference, PROMPT), session.commit(state, PROMPT))]
    block = [truth.c.mask_token_id] * 8
    pairs.append((truth.preview(reference, block), session.preview(state, block)))
    for want, got in pairs:
        assert np.isfinite(got).all()
        assert np.abs(got - want).max() <= 1e-4 * max(np.abs(want).max(), 1e-6)
    assert list(session.generate(PROMPT, BUDGET).token_ids) == truth.generate(PROMPT, BUDGET)
    causal = truth.causal(PROMPT, BUDGET)
    ways: list[dict[str, Any]] = [
        {"decode": "causal"}, {"decode": "self-speculate", "accept": "exact"},
    ]  # fmt: skip
    for way in ways:
        assert list(session.generate(PROMPT, BUDGET, **way).token_ids) == causal


@pytest.mark.parametrize("edit", FINITE.values(), ids=FINITE)
def test_the_eager_model_equals_the_oracle(edit: Edit, tmp_path: Path) -> None:
    folder, truth = _model(tmp_path / "model", edit)
    _agree(eager_session(folder), truth)


PROVED = ("experts that are all zero", "gates beyond fp32", "gates of 1, the state never forgets")


@pytest.mark.slow
@pytest.mark.parametrize("name", PROVED)
def test_a_bundle_of_such_a_model_equals_the_oracle(name: str, tmp_path: Path) -> None:
    folder, truth = _model(tmp_path / "model", FINITE[name])
    output = tmp_path / "x.clover"
    assert build(BuildOptions(model=folder, output=output), print)["outcome"] == "passed"
    _agree(Session.load(output), truth)


@pytest.mark.slow
def test_a_bundle_whose_router_always_ties_is_unproved(tmp_path: Path) -> None:
    folder, truth = _model(tmp_path / "model", TIED_ROUTER)
    output = tmp_path / "x.clover"
    done = clover_compile("build", folder, "-o", output)
    assert (done.exit_code, "unproved: fewer than 32 probe rows" in done.stdout) == (0, True)
    refused = clover_compile("run", output, "--prompt-ids", "1,2")
    assert (refused.exit_code, refused.stdout, "ties" in refused.stderr) == (2, "", True)
    with pytest.raises(NotProved):
        Session.load(output)
    again = clover_compile("verify", output)
    assert (again.exit_code, "unproved" in again.stdout) == (0, True), again.output
    # Among ties the lower id is taken, here as there.
    _agree(Session.load(output, unverified=True), truth)


HUGE: dict[str, Edit] = {
    "a head beyond fp32": weights(lambda w: w["lm_head.weight"].__imul__(np.float32(1e38))),
    "an expert beyond fp32": _overflow(1),
}
"""Edits that leave every weight finite but not what is computed."""

SQUARED: dict[str, Edit] = {
    "a state of 1e30": weights(
        lambda w: w["model.layers.0.linear_attn.in_proj_qkv.weight"].__imul__(np.float32(1e30))
    ),
    "an embedding of 1e36": weights(
        lambda w: w["model.embed_tokens.weight"].__imul__(np.float32(1e36))
    ),
}
"""Edits after which only the square inside a norm leaves fp32."""


def _only_honest_tokens(session: Session, truth: Any) -> str:
    """Runs every way: each gives the oracle's tokens or an error that names Unit, pass and row."""
    said = []
    ways: list[tuple[dict[str, Any], Any]] = [
        ({"decode": "denoise"}, truth.generate), ({"decode": "causal"}, truth.causal),
        ({"decode": "self-speculate", "accept": "exact"}, truth.causal),
    ]  # fmt: skip
    for way, want in ways:
        try:
            got = list(session.generate(PROMPT, BUDGET, **way).token_ids)
        except NotANumber as error:
            said.append(str(error))
        else:
            assert got == want(PROMPT, BUDGET), way
    assert all(re.match(r"Unit \w+ answered NaN at pass \d+, row \d+ ", x) for x in said)
    return "; ".join(said)


@pytest.mark.parametrize("edit", HUGE.values(), ids=HUGE)
def test_what_leaves_the_numbers_never_gives_a_token(edit: Edit, tmp_path: Path) -> None:
    folder, truth = _model(tmp_path / "model", edit)
    assert not Checkpoint.open(folder).nonfinite()
    with np.errstate(all="ignore"):
        said = _only_honest_tokens(eager_session(folder), truth)
    assert "NaN" in said


@pytest.mark.parametrize("edit", SQUARED.values(), ids=SQUARED)
def test_a_known_limit_norms_take_values_above_1e19_for_0(edit: Edit, tmp_path: Path) -> None:
    """fp32's own rule, 1 / sqrt(Inf) = 0, gives finite logits that are not those of float64, and no
    error. Whoever makes the norms tell must turn this test round.
    """
    folder, truth = _model(tmp_path / "model", edit)
    want = truth.commit(oracle.State(), PROMPT)
    session = eager_session(folder)
    got = session.commit(session.new_state(), PROMPT)
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() > 1e-3 * np.abs(want).max()


@pytest.mark.slow
@pytest.mark.parametrize("edit", HUGE.values(), ids=HUGE)
def test_a_build_of_it_names_the_part(edit: Edit, tmp_path: Path) -> None:
    folder, _ = _model(tmp_path / "model", edit)
    output = tmp_path / "out" / "x.clover"
    with pytest.raises((ModelOverflows, VerdictError)) as raised:
        build(BuildOptions(model=folder, output=output), print)
    assert "model.layers" in str(raised.value) or "lm_head" in str(raised.value)
    assert not list(output.parent.iterdir())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("tensor", "part"),
    [
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("model.layers.0.linear_attn.in_proj_a.weight", "model.layers.0."),
        ("model.layers.1.self_attn.k_norm.weight", "model.layers.1.self_attn"),
        ("model.layers.1.mlp.shared_expert_gate.weight", "model.layers.1.mlp"),
        ("lm_head.weight", "lm_head"),
    ],
)
def test_locate_names_the_part_that_holds_it(
    tmp_path: Path, tensor: str, part: str, value: float
) -> None:
    def change(w: Weights) -> None:
        w[tensor].reshape(-1)[:] = np.float32(value)

    folder, _ = _model(tmp_path / "model", weights(change))
    bundle = _stand_in(tmp_path / "x.clover", folder)
    done = clover_compile("verify", bundle, "--model", folder, "--locate")
    assert done.exit_code == 1, done.output
    assert f": {part}" in done.stdout or f": {part.rstrip('.')}" in done.stdout, done.stdout


class Sure:
    """The oracle's engine, but every row is exactly as sure as it is told."""

    def __init__(self, engine: Any, sure: float) -> None:
        self.engine, self.sure = engine, np.float32(sure)

    def run(self, unit: str, feeds: Arrays, outputs: Any = None) -> Arrays:
        """Runs a Unit; the confidence of a pick is replaced."""
        out: Arrays = self.engine.run(unit, feeds, outputs)
        if unit == "pick":
            out["confidence"] = np.full_like(out["confidence"], self.sure)
        return out


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.5, 0.95, 1.0])
def test_a_confidence_equal_to_the_threshold_fixes_nothing(threshold: float) -> None:
    plain, _ = oracle_session(stop_token_ids=())
    exact = float(np.float32(threshold))
    above = float(np.nextafter(np.float32(threshold), np.float32(2)))
    passes = []
    for sure in (exact, above):
        session = Session(Sure(plain.engine, sure), plain.sizes, plain.rules, 100)
        out = session.generate([1, 2], 8, threshold=threshold)
        passes.append(out.stats["passes"])
    # One row a pass where nothing is above the threshold, the whole block where all is.
    assert passes == [8, 1]


def test_the_oracle_takes_the_same_side(monkeypatch: pytest.MonkeyPatch) -> None:
    session, truth = oracle_session(stop_token_ids=())
    trace: list[Any] = []
    truth.generate([1, 2], 8, trace)
    seen: list[Array] = []
    session.generate([1, 2], 8, on_step=lambda step: seen.append(np.array(step.confidence)))
    second = float(np.sort(seen[0])[-2])  # of two rows above all others
    for threshold, fixed in ((second, 1), (float(np.nextafter(np.float32(second), 0)), 2)):
        steps: list[Any] = []
        session.generate([1, 2], 8, threshold=threshold, on_step=steps.append)
        assert sum(steps[0].fixed) == fixed
