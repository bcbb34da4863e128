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
from clover_compile.runtime.rules import GenerationRules
from clover_compile.runtime.session import Session
from tests import oracle
from tests.checkpoints import load_weights, make_checkpoint
from tests.configurations import CONFIGURATIONS, Configuration, prompts


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
) -> tuple[Session, oracle.Oracle, Configuration]:
    """A session over the eager model and the oracle of the same weights."""
    made = request.param
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(folder, scale=made.scale, **dataclasses.asdict(made.config))
    return eager_session(folder), oracle.Oracle(made.config, load_weights(folder)), made


def test_denoise_equals_the_oracle(pair: tuple[Session, oracle.Oracle, Configuration]) -> None:
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
    pair: tuple[Session, oracle.Oracle, Configuration],
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


def test_release_rule_equals_the_oracle(pair: tuple[Session, oracle.Oracle, Configuration]) -> None:
    session, truth, made = pair
    for prompt in prompts(truth.c, made.prompt_lengths):
        rounds: list[tuple[int, int]] = []
        want = truth.self_speculate(prompt, made.budget, 16, exact=False, stats=rounds)
        got = session.generate(prompt, made.budget, decode="self-speculate")
        assert list(got.token_ids) == want
        assert got.stats["rounds"] == len(rounds)


def test_commit_and_preview_equal_the_oracle(
    pair: tuple[Session, oracle.Oracle, Configuration],
) -> None:
    session, truth, made = pair
    for prompt in prompts(truth.c, made.prompt_lengths):
        state, reference = session.new_state(), oracle.State()
        want = truth.commit(reference, prompt)
        got = session.commit(state, prompt)
        assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()
        block = [truth.c.mask_token_id] * truth.c.block_size
        block[1 % len(block)] = 5
        want = truth.preview(reference, block)
        got = session.preview(state, block)
        assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


def test_commits_in_parts_leave_the_same_state(
    pair: tuple[Session, oracle.Oracle, Configuration],
) -> None:
    session, truth, made = pair
    prompt = prompts(truth.c, made.prompt_lengths)[-1]
    half = len(prompt) // 2
    states = []
    for parts in ([prompt], [prompt[:half], prompt[half:]], [[token] for token in prompt]):
        state = session.new_state()
        for part in parts:
            if part:
                session.commit(state, part)
        states.append(state.feeds())
    for other in states[1:]:
        for name, whole in states[0].items():
            assert np.abs(whole - other[name]).max() <= 1e-5 * max(np.abs(whole).max(), 1e-6)
