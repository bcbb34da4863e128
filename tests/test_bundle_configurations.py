"""Whole bundles of random models against the oracle: logits, tokens, passes, rounds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clover_compile.build import build
from clover_compile.options import BuildOptions
from clover_compile.runtime import Session
from tests import oracle
from tests.checkpoints import load_weights, make_checkpoint
from tests.configurations import CONFIGURATIONS, prompts

QUICK = ("odd-heads",)
SLOW = (
    "no-attention", "every-second-attention", "attention-only", "half-coreset",
    "penalties-and-ramps", "odd-vocabulary", "repeated-token",
)  # fmt: skip


def _cases() -> list[Any]:
    by_name = {c.name: c for c in CONFIGURATIONS}
    quick = [pytest.param(by_name[name], id=name) for name in QUICK]
    return quick + [pytest.param(by_name[n], id=n, marks=pytest.mark.slow) for n in SLOW]


@pytest.mark.parametrize("made", _cases())
def test_a_bundle_equals_the_oracle(made: Any, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", scale=made.scale, **dataclasses.asdict(made.config))
    truth = oracle.Oracle(made.config, load_weights(tmp_path / "model"))
    output = tmp_path / "model.clover"
    build(BuildOptions(model=tmp_path / "model", output=output), lambda line: None)
    session = Session.load(output)
    for prompt in prompts(made.config, (*made.prompt_lengths, 1)):
        state, reference = session.new_state(), oracle.State()
        want, got = truth.commit(reference, prompt), session.commit(state, prompt)
        assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()
        block = [made.config.mask_token_id] * made.config.block_size
        want, got = truth.preview(reference, block), session.preview(state, block)
        assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()
        _same_generations(session, truth, prompt, made.budget)


def _same_generations(
    session: Session, truth: oracle.Oracle, prompt: list[int], budget: int
) -> None:
    passes: list[Any] = []
    want = truth.generate(prompt, budget, passes)
    out = session.generate(prompt, budget)
    assert (list(out.token_ids), out.stats["passes"]) == (want, len(passes))
    causal = truth.causal(prompt, budget)
    assert list(session.generate(prompt, budget, decode="causal").token_ids) == causal
    for accept in ("exact", "release"):
        rounds: list[Any] = []
        want = truth.self_speculate(prompt, budget, exact=accept == "exact", stats=rounds)
        out = session.generate(prompt, budget, decode="self-speculate", accept=accept)
        assert (list(out.token_ids), out.stats["rounds"]) == (want, len(rounds))
        assert accept == "release" or want == causal
