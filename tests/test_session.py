"""Sessions and states: what they keep, what they share, and what they never let through."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clover_compile.runtime.engine import Arrays
from clover_compile.runtime.errors import ContextFull, Faults
from clover_compile.runtime.session import Messages, Session
from clover_compile.runtime.state import FIRST_ROWS, State
from clover_compile.runtime.step import Step
from tests.oracle_engine import SMALL, Sizes, maths, oracle_session


class Spelled:
    """Text that is a list of numbers: `1 2 3`."""

    def encode(
        self,
        prompt: str | Messages,
        raw: bool = False,
        thinking: bool | None = None,
        tools: Messages | None = None,
    ) -> list[int]:
        """Ids of numbers; a conversation is joined; an id of its own unless raw."""
        text = prompt if isinstance(prompt, str) else " ".join(str(m["content"]) for m in prompt)
        return [*([] if raw else [30]), *([31] if thinking else []), *[32 for _ in tools or []],
                *map(int, text.split())]  # fmt: skip

    def decode(self, ids: Sequence[int]) -> tuple[str, str | None]:
        """The numbers back."""
        return " ".join(map(str, ids)), "thought"


@pytest.fixture
def session() -> Session:
    """A session over one small model."""
    return oracle_session(threshold=0.4, text=Spelled())[0]


def _random(size: int, seed: int = 0) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(0, 39, size)]


def _copy(state: State) -> Arrays:
    return {name: array.copy() for name, array in state.feeds().items()}


def _same(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_text_conversations_and_ids(session: Session) -> None:
    by_ids = session.generate([30, 4, 5], 8)
    assert session.generate("4 5", 8).token_ids == by_ids.token_ids
    talk = [{"role": "user", "content": "4"}, {"role": "user", "content": "5"}]
    assert session.generate(talk, 8).token_ids == by_ids.token_ids
    assert session.generate("30 4 5", 8, raw=True).token_ids == by_ids.token_ids
    assert session.generate("4 5", 8, thinking=True).stats["prompt_tokens"] == 4
    assert session.generate("4 5", 8, tools=[{}, {}]).stats["prompt_tokens"] == 5
    assert by_ids.text == " ".join(map(str, by_ids.token_ids))
    assert by_ids.reasoning == "thought"


def test_an_answer_s_stats_are_json(session: Session) -> None:
    for way in ("denoise", "causal", "self-speculate"):
        steps: list[Step] = []
        stats = session.generate([1, 2, 3], 12, decode=way, on_step=steps.append).stats
        assert json.loads(json.dumps(stats)) == stats
        assert stats["prompt_tokens"] == 3
        assert all(seconds >= 0 for seconds in stats["seconds"].values())
        assert {"commit", "pick"} <= set(stats["seconds"])
        # Causal steps, and rounds too narrow for a draft, give a token without a pass.
        drafted = [False, *(step.kind == "draft" for step in steps)]
        alone = sum(
            step.kind == "causal" or (step.kind == "verify" and not after)
            for step, after in zip(steps, drafted, strict=False)
        )
        passes = sum(step.kind in ("denoise", "draft") for step in steps)
        assert (stats["passes"], alone > 0) == (passes, way != "denoise")
        per_pass = (stats["new_tokens"] - alone) / passes if passes else None
        assert stats["tokens_per_pass"] == per_pass


def test_finish_reason_and_the_stop_id() -> None:
    session, truth = oracle_session(stop_token_ids=tuple(range(39)))
    got = session.generate([1], 8)
    assert got.finish_reason == "stop"
    assert len(got.token_ids) == 1
    session, truth = oracle_session(stop_token_ids=())
    got = session.generate([1], 5)
    assert (got.finish_reason, len(got.token_ids)) == ("length", 5)
    assert truth.generate([1], 5) == list(got.token_ids)


def test_commit_and_preview_give_all_rows() -> None:
    session, truth = oracle_session()
    ids, block, reference = _random(300), [5, 39, 39, 7], maths.State()
    state = session.new_state()
    logits = session.commit(state, ids)
    assert logits.dtype == np.float32
    assert np.allclose(logits, truth.commit(reference, ids), atol=1e-4)
    before = _copy(state)
    shown = session.preview(state, block)
    assert shown.dtype == np.float32
    assert np.allclose(shown, truth.preview(reference, block), atol=1e-4)
    assert _same(before, state.feeds())
    assert state.length == 300


@pytest.mark.parametrize("ids", [[], [1.7], ["a"], [True], [[1, 2]], [40], [-1], [1] * 260 + [40]])
def test_bad_ids_commit_nothing(session: Session, ids: list[Any]) -> None:
    state = session.new_state()
    for call in (session.commit, session.preview):
        with pytest.raises(Faults, match=r"one or more whole numbers of 0\.\.39"):
            call(state, ids)
    assert state.length == 0


def test_a_commit_that_does_not_fit_commits_nothing() -> None:
    session, _ = oracle_session(context=280)
    state = session.new_state()
    with pytest.raises(ContextFull, match="needs 300 rows but this bundle holds 280"):
        session.commit(state, [1] * 300)
    assert state.length == 0
    session.commit(state, [1] * 278)
    with pytest.raises(ContextFull, match="needs 282 rows"):
        session.preview(state, [1] * 4)
    with pytest.raises(Faults, match="at most 256 rows"):
        session.preview(session.new_state(), [1] * 257)


def test_forks_are_independent(session: Session) -> None:
    state = session.new_state()
    session.commit(state, _random(10))
    twin = state.fork()
    assert _same(_copy(state), twin.feeds())
    kept = _copy(state)
    session.generate([1, 2], 9, state=twin)
    assert _same(kept, state.feeds())
    kept = _copy(twin)
    session.generate([3, 4], 9, state=state)
    assert _same(kept, twin.feeds())


class Scribbler:
    """An engine that writes to what it is given."""

    def run(self, unit: str, feeds: Arrays, outputs: Any = None) -> Arrays:
        """Spoils each float feed."""
        for array in feeds.values():
            if array.dtype == np.float32:
                array[...] = 7
        return {}


@pytest.mark.parametrize("interval", [1, 2])
def test_no_engine_can_write_to_a_state(interval: int) -> None:
    fields = {**SMALL, "full_attention_interval": interval}
    session, _ = oracle_session(full_attention_interval=interval)
    state = session.new_state()
    session.commit(state, [1, 2, 3])
    before = _copy(state)
    rogue = Session(Scribbler(), Sizes(maths.Config(**fields)), session.rules, 600)
    with pytest.raises(ValueError, match="read-only"):
        rogue.preview(state, [1, 2])
    assert _same(before, state.feeds())


def test_the_cache_grows_and_is_zero_beyond_its_rows() -> None:
    session, _ = oracle_session(context=2 * FIRST_ROWS + 10)
    state, ids, sizes = session.new_state(), _random(2 * FIRST_ROWS + 5), set[int]()
    for start in range(0, len(ids), 37):
        session.commit(state, ids[start : start + 37])
        for name, buffer in state._cache.items():
            assert not buffer[:, state.length :].any()
            assert state.feeds()[name].shape[1] == state.length
            sizes.add(buffer.shape[1])
    assert sizes == {FIRST_ROWS, 2 * FIRST_ROWS, 2 * FIRST_ROWS + 10}
    whole = session.new_state()
    session.commit(whole, ids)
    for name, array in whole.feeds().items():
        assert np.allclose(array, state.feeds()[name], rtol=1e-4, atol=1e-5)


def test_sessions_and_threads_do_not_leak_into_each_other() -> None:
    sessions = [oracle_session(seed=seed, threshold=0.4)[0] for seed in (1, 2)]
    jobs = [
        (session, _random(3 + n, n), way, sampling)
        for session in sessions
        for n in range(3)
        for way, sampling in (
            ("denoise", {}), ("denoise", {"temperature": 1.0, "seed": n}),
            ("causal", {"temperature": 0.7, "top_k": 9, "seed": n}), ("self-speculate", {}),
        )
    ]  # fmt: skip

    def run(job: tuple[Session, list[int], str, dict[str, Any]]) -> tuple[Any, ...]:
        session, prompt, way, sampling = job
        got = session.generate(prompt, 13, decode=way, **sampling)
        return got.token_ids, got.stats["passes"], got.stats["commits"], got.stats["rounds"]

    alone = [run(job) for job in jobs]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(run, jobs)) == alone


def test_load_hands_its_switches_to_the_bundle(
    monkeypatch: pytest.MonkeyPatch, session: Session, tmp_path: Path
) -> None:
    from clover_compile.runtime import bundle

    seen: list[Any] = []

    class Loaded:
        engine, sizes, rules, context, text, costs, costs_fault = (
            session.engine, session.sizes, session.rules, 77, session.text, None, "no use",
        )  # fmt: skip

    def load(path: Any, **switches: Any) -> type[Loaded]:
        seen.append((path, switches))
        return Loaded

    monkeypatch.setattr(bundle, "load", load)
    opened = Session.load(tmp_path, unverified=True)
    assert seen == [(tmp_path, {"unverified": True, "allow_native": False})]
    assert (opened.context, opened.costs_fault) == (77, "no use")
    assert opened.generate("1 2", 8).token_ids == session.generate("1 2", 8).token_ids
