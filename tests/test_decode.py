"""Every way to decode, through the eager Units, against the oracle: tokens, passes, rounds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clover_compile.checkpoint import Checkpoint
from clover_compile.eager import EagerEngine
from clover_compile.model.load import load_model
from clover_compile.runtime.engine import Arrays
from clover_compile.runtime.errors import ContextFull, NotANumber
from clover_compile.runtime.rules import GenerationRules
from clover_compile.runtime.session import Session
from tests import oracle
from tests.checkpoints import load_weights, make_checkpoint
from tests.configurations import CONFIGURATIONS, prompts


def eager_session(folder: Path, context: int = 1024) -> Session:
    """A session over the eager model of a checkpoint folder."""
    checkpoint = Checkpoint.open(folder)
    c = checkpoint.config
    rules = GenerationRules.from_dict(
        checkpoint.generation.to_dict()
        | {"block_size": c.block_size, "threshold": c.threshold, "mask_token_id": c.mask_token_id}
    )
    engine = EagerEngine(load_model(c, checkpoint.tensor), checkpoint.generation)
    return Session(engine, c, rules, context)


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids=[c.name for c in CONFIGURATIONS])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Session, oracle.Oracle, Any]:
    """A session over the eager model and the oracle of the same weights."""
    made = request.param
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(folder, scale=made.scale, **dataclasses.asdict(made.config))
    return eager_session(folder), oracle.Oracle(made.config, load_weights(folder)), made


def test_denoise_equals_the_oracle(pair: tuple[Session, oracle.Oracle, Any]) -> None:
    session, truth, made = pair
    for prompt in prompts(truth.c, made.prompt_lengths):
        trace: list[dict[str, Any]] = []
        want = truth.generate(prompt, made.budget, trace)
        steps: list[Any] = []
        got = session.generate(prompt, made.budget, on_step=steps.append)
        assert list(got.token_ids) == want
        assert got.stats["passes"] == len(trace)
        assert [list(step.ids) for step in steps] == [t["ids"] for t in trace]


def test_causal_and_exact_speculation_equal_the_oracle(
    pair: tuple[Session, oracle.Oracle, Any],
) -> None:
    session, truth, made = pair
    for prompt in prompts(truth.c, made.prompt_lengths):
        want = truth.causal(prompt, made.budget)
        assert list(session.generate(prompt, made.budget, decode="causal").token_ids) == want
        for width in (16, 5):
            rounds: list[tuple[int, int]] = []
            truth.self_speculate(prompt, made.budget, width, exact=True, stats=rounds)
            got = session.generate(
                prompt, made.budget, decode="self-speculate", accept="exact", width=width
            )
            assert list(got.token_ids) == want
            assert got.stats["rounds"] == len(rounds)
            assert got.stats["drafts_kept"] == sum(kept for _, kept in rounds)


def test_release_rule_equals_the_oracle(pair: tuple[Session, oracle.Oracle, Any]) -> None:
    session, truth, made = pair
    for prompt in prompts(truth.c, made.prompt_lengths):
        rounds: list[tuple[int, int]] = []
        want = truth.self_speculate(prompt, made.budget, 16, exact=False, stats=rounds)
        got = session.generate(prompt, made.budget, decode="self-speculate")
        assert list(got.token_ids) == want
        assert got.stats["rounds"] == len(rounds)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A session over one small eager model."""
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(folder, block_size=8, threshold=0.5)
    return eager_session(folder)


WAYS = [
    {"decode": "denoise"},
    {"decode": "causal"},
    {"decode": "self-speculate"},
    {"decode": "self-speculate", "accept": "exact", "width": 6},
]


@pytest.mark.parametrize("way", WAYS)
def test_a_reused_state_holds_every_emitted_row(session: Session, way: dict[str, Any]) -> None:
    first, second = [5, 9, 77, 12], [33, 1, 2]
    state = session.new_state()
    one = session.generate(first, 19, state=state, **way)
    assert state.length == len(first) + len(one.token_ids)
    again = session.generate(second, 11, state=state, **way)
    whole = session.generate([*first, *one.token_ids, *second], 11, **way)
    assert again.token_ids == whole.token_ids


def test_forks_are_independent(session: Session) -> None:
    state = session.new_state()
    session.commit(state, [1, 2, 3])
    twin = state.fork()
    before = {name: x.copy() for name, x in twin.feeds().items()}
    session.generate([7, 8], 8, state=state)
    after = twin.feeds()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert twin.length == 3
    assert np.array_equal(
        session.preview(twin, [4, 5, 6]),
        session.preview(_committed(session, [1, 2, 3]), [4, 5, 6]),
    )


def _committed(session: Session, ids: list[int]) -> Any:
    state = session.new_state()
    session.commit(state, ids)
    return state


def test_a_preview_leaves_the_state_bit_identical(session: Session) -> None:
    state = _committed(session, list(range(40)))
    before = {name: x.copy() for name, x in state.feeds().items()}
    session.preview(state, [1] * 8)
    assert all(np.array_equal(before[name], x) for name, x in state.feeds().items())


def test_noise_repeats_with_the_seed_and_the_draw_follows_the_distribution(
    session: Session,
) -> None:
    draw: dict[str, Any] = {"decode": "causal", "temperature": 1.0, "top_k": 4}
    prompt = [3, 1, 4]
    logits = session.commit(session.new_state(), prompt)[-1].astype(np.float64)
    logits[session.rules.mask_token_id] = -np.inf
    best = np.argsort(-logits)[:4]
    p = np.exp(logits[best] - logits[best[0]])
    p /= p.sum()
    got = [session.generate(prompt, 1, seed=seed, **draw).token_ids[0] for seed in range(400)]
    assert set(got) <= set(best.tolist())
    share = np.array([got.count(int(token)) / 400 for token in best])
    assert np.abs(share - p).max() < 0.1
    long = session.generate(prompt, 12, seed=7, **draw).token_ids
    assert session.generate(prompt, 12, seed=7, **draw).token_ids == long
    assert any(session.generate(prompt, 12, seed=s, **draw).token_ids != long for s in (8, 9, 10))


class Poisoned:
    """An engine whose logits of one Unit hold a NaN."""

    def __init__(self, engine: Any, unit: str) -> None:
        self.engine, self.unit = engine, unit

    def run(self, unit: str, feeds: Arrays, outputs: Any = None) -> Arrays:
        """Runs a Unit, then spoils it."""
        out: Arrays = self.engine.run(unit, feeds, outputs)
        if unit == self.unit and out["logits"].size:
            out["logits"] = out["logits"].copy()
            out["logits"][0, -1, 3] = np.nan
        return out


@pytest.mark.parametrize(
    ("unit", "way"),
    [("preview", WAYS[0]), ("commit", WAYS[1]), ("verify", WAYS[2]), ("preview", WAYS[3])],
)
def test_nan_is_an_error_never_a_token(session: Session, unit: str, way: dict[str, Any]) -> None:
    broken = Session(Poisoned(session.engine, unit), session.sizes, session.rules, 256)
    with pytest.raises(NotANumber, match=f"Unit {unit} answered NaN at pass .* row"):
        broken.generate([1, 2, 3], 16, **way)


def test_a_full_context_refuses_and_changes_nothing(session: Session) -> None:
    small = Session(session.engine, session.sizes, session.rules, 10)
    state = small.new_state()
    small.commit(state, [1] * 8)
    with pytest.raises(ContextFull, match="needs 11 rows but this bundle holds 10"):
        small.commit(state, [1, 2, 3])
    assert state.length == 8


def test_block_size_and_threshold_overrides(session: Session) -> None:
    truth_rules = dataclasses.replace(session.rules, block_size=4, threshold=0.0)
    other = Session(session.engine, session.sizes, truth_rules, 256)
    want = other.generate([1, 2, 3], 12)
    got = session.generate([1, 2, 3], 12, block_size=4, threshold=0.0)
    assert got.token_ids == want.token_ids
    assert got.stats["passes"] == want.stats["passes"]
