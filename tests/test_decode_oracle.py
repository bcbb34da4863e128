"""The decode loops alone, over the float64 engine: tokens, passes, rounds, and what they cost."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from clover_compile.runtime.decode import COMMIT_ROWS
from clover_compile.runtime.engine import Array, Arrays
from clover_compile.runtime.errors import NotANumber, RunError
from clover_compile.runtime.pick import Response, Sampling
from clover_compile.runtime.session import Session
from clover_compile.runtime.step import Step
from tests.oracle_engine import allowed, maths, oracle_session, rules_of

PENALTIES = {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.3}
RAMPS = {
    "length_penalty": 6.0, "length_penalty_start": 3, "length_penalty_window": 12,
    "think_end_bias": 5.0, "think_end_start": 2, "think_end_window": 6, "think_end_token_id": 35,
}  # fmt: skip

CASES: list[dict[str, Any]] = [
    {"threshold": 0.0, "scale": 0.06},
    {"threshold": 0.5, "scale": 0.3, "block_size": 16, "seed": 1},
    {"threshold": 0.95, "scale": 0.15, "block_size": 32, "seed": 2},
    {"threshold": 1.0, "scale": 0.3, "seed": 3},
    {"threshold": 0.3, "stop_token_ids": (), "seed": 4, **PENALTIES},
    {"threshold": 0.3, "scale": 0.3, "seed": 5, **RAMPS},
    {"threshold": 0.2, "block_size": 16, "seed": 6, **PENALTIES, **RAMPS},
    {"threshold": 0.5, "num_hidden_layers": 1, "full_attention_interval": 1, "seed": 7},
    {"threshold": 0.5, "num_hidden_layers": 1, "stop_token_ids": (), "seed": 8},
    {"threshold": 0.1, "stop_token_ids": tuple(range(12)), "block_size": 16, "seed": 9},
    # A response that draws more of itself: drafts and the causal pass often agree.
    {
        "threshold": 0.5,
        "stop_token_ids": (),
        "seed": 10,
        "presence_penalty": -10.0,
        "frequency_penalty": 1.5,
    },
    {
        "threshold": 0.5,
        "stop_token_ids": (),
        "seed": 11,
        "presence_penalty": -6.0,
        "frequency_penalty": 0.8,
        **RAMPS,
        "think_end_bias": 14.0,
        "think_end_start": 5,
    },
]

WAYS: list[dict[str, Any]] = [
    {"decode": "denoise"},
    {"decode": "causal"},
    {"decode": "self-speculate"},
    {"decode": "self-speculate", "accept": "exact", "width": 6},
]


def _prompt(case: dict[str, Any]) -> list[int]:
    seed = case.get("seed", 0)
    drawn = np.random.default_rng(seed).integers(0, 39, 1 + 4 * seed)
    return [int(token) for token in drawn]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("budget", [1, 13, 29])
def test_denoise_takes_the_oracle_s_passes(case: dict[str, Any], budget: int) -> None:
    session, truth = oracle_session(**case)
    trace: list[dict[str, Any]] = []
    want = truth.generate(_prompt(case), budget, trace)
    steps: list[Step] = []
    got = session.generate(_prompt(case), budget, on_step=steps.append)
    assert list(got.token_ids) == want
    assert got.stats["passes"] == len(trace)
    assert got.stats["blocks"] == len({entry["start"] for entry in trace})
    assert [list(step.ids) for step in steps] == [entry["ids"] for entry in trace]
    assert [step.start for step in steps] == [entry["start"] for entry in trace]
    for step, entry in zip(steps, trace, strict=True):
        assert step.kind == "denoise"
        assert np.allclose(step.confidence, entry["conf"], atol=1e-5)
        mask = session.rules.mask_token_id
        assert step.fixed == tuple(token != mask for token in step.ids)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [16, 6, 2, 1])
def test_exact_speculation_is_causal_decoding(case: dict[str, Any], width: int) -> None:
    session, truth = oracle_session(**case)
    prompt, rounds = _prompt(case), list[tuple[int, int]]()
    want = truth.causal(prompt, 21)
    truth.self_speculate(prompt, 21, width, exact=True, stats=rounds)
    assert list(session.generate(prompt, 21, decode="causal").token_ids) == want
    got = session.generate(prompt, 21, decode="self-speculate", accept="exact", width=width)
    assert list(got.token_ids) == want
    assert got.stats["rounds"] == len(rounds)
    assert got.stats["drafts_kept"] == sum(kept for _, kept in rounds)
    assert got.stats["passes"] == sum(w > 1 for w, _ in rounds)


@pytest.mark.parametrize("case", CASES)
def test_the_release_rule_keeps_what_the_oracle_keeps(case: dict[str, Any]) -> None:
    session, truth = oracle_session(**case)
    rounds: list[tuple[int, int]] = []
    want = truth.self_speculate(_prompt(case), 29, 16, exact=False, stats=rounds)
    got = session.generate(_prompt(case), 29, decode="self-speculate")
    assert list(got.token_ids) == want
    assert got.stats["rounds"] == len(rounds)
    assert got.stats["drafts_kept"] == sum(kept for _, kept in rounds)


def test_the_cases_reach_every_branch() -> None:
    """Kept and rejected drafts under both rules, stops, budgets; else the tests above are idle."""
    ends, kept, rejected = set[str](), {False: 0, True: 0}, {False: 0, True: 0}
    for case in CASES:
        session, truth = oracle_session(**case)
        ends.add(session.generate(_prompt(case), 29).finish_reason)
        for exact in (False, True):
            rounds: list[tuple[int, int]] = []
            truth.self_speculate(_prompt(case), 29, 16, exact=exact, stats=rounds)
            kept[exact] += sum(k for _, k in rounds)
            rejected[exact] += sum(w - 1 - k for w, k in rounds)
    assert ends == {"stop", "length"}
    assert min(*kept.values(), *rejected.values()) > 10


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_turns_on_one_state_are_one_long_prompt(case: dict[str, Any], way: dict[str, Any]) -> None:
    session, _ = oracle_session(**case)
    first, second, state = _prompt(case), [33, 1, 2], session.new_state()
    one = session.generate(first, 19, state=state, **way)
    assert one.token_ids == session.generate(first, 19, **way).token_ids
    history = [*first, *one.token_ids]
    assert state.length == len(history)
    fresh = session.new_state()
    session.commit(fresh, history)
    for name, array in fresh.feeds().items():
        assert np.allclose(array, state.feeds()[name], rtol=1e-4, atol=1e-5), name
    again = session.generate(second, 11, state=state, **way)
    assert again.token_ids == session.generate([*history, *second], 11, **way).token_ids


class Scripted:
    """An engine whose `pick` is as sure as it is told, pass by pass."""

    def __init__(self, engine: Any, sure: list[list[float]]) -> None:
        self.engine, self.sure = engine, sure

    def run(self, unit: str, feeds: Arrays, outputs: Any = None) -> Arrays:
        """Runs a Unit; a pick gets the next confidences."""
        out: Arrays = self.engine.run(unit, feeds, outputs)
        if unit == "pick":
            out["confidence"] = np.array([self.sure.pop(0)], np.float32)
        return out


@pytest.mark.parametrize(
    ("threshold", "sure", "fixed"),
    [
        # Confidence equal to the threshold does not fix a row; of equals the first is taken.
        (
            0.5,
            [[0.5, 0.5, 0.75, 0.5], [0.5] * 4, [0.0, 0.5, 0.1, 0.5], [0.0] * 4],
            ["2", "0", "1", "3"],
        ),
        # A fixed row, however sure, does not stand in for an open one.
        (0.5, [[0.9, 0.1, 0.2, 0.9], [1.0, 0.1, 0.2, 1.0], [1.0, 0.1, 1.0, 1.0]], ["03", "2", "1"]),
        (0.0, [[0.0] * 4] * 4, ["0", "1", "2", "3"]),
        (1.0, [[1.0] * 4] * 4, ["0", "1", "2", "3"]),
    ],
)
def test_which_rows_a_pass_fixes(
    threshold: float, sure: list[list[float]], fixed: list[str]
) -> None:
    plain, _ = oracle_session(stop_token_ids=(), block_size=4)
    engine = Scripted(plain.engine, list(sure))
    session, steps = Session(engine, plain.sizes, plain.rules, 100), list[Step]()
    session.generate([1, 2], 4, threshold=threshold, on_step=steps.append)
    before: tuple[bool, ...] = (False,) * 4
    told: list[str] = []
    for step in steps:
        told.append("".join(str(j) for j in range(4) if step.fixed[j] and not before[j]))
        before = step.fixed
    assert told == fixed


def _units(session: Session, *arguments: Any, **options: Any) -> list[tuple[str, int]]:
    engine: Any = session.engine
    engine.calls.clear()
    session.generate(*arguments, **options)
    return [call for call in engine.calls if call[0] != "pick"]


def test_a_round_is_one_preview_one_verify_and_a_replay() -> None:
    session, _ = oracle_session(stop_token_ids=())
    calls = _units(session, [1, 2, 3], 17, decode="self-speculate", width=4)
    assert calls[:2] == [("commit", 2), ("commit", 1)]
    width_one = [("commit", 1)]
    rest = calls[2:]
    while rest:
        if rest[:1] == width_one:
            rest = rest[1:]
            continue
        rows = rest[0][1]
        assert rest[:3] == [("preview", rows), ("verify", rows), ("replay", 0)]
        rest = rest[3:]


def test_a_long_prompt_is_committed_in_parts_and_the_head_runs_once() -> None:
    session, truth = oracle_session(stop_token_ids=())
    prompt = [int(x) for x in np.random.default_rng(0).integers(0, 39, 2 * COMMIT_ROWS + 3)]
    assert COMMIT_ROWS == 256
    calls = _units(session, prompt, 2, decode="causal")
    assert calls == [("commit", COMMIT_ROWS), ("commit", COMMIT_ROWS), ("commit", 3), ("commit", 1)]
    got = session.generate(prompt, 9)
    assert list(got.token_ids) == truth.generate(prompt, 9)


def test_the_last_block_is_committed_only_for_the_caller_s_state() -> None:
    session, _ = oracle_session(stop_token_ids=(), threshold=0.0)
    assert _units(session, [1], 16) == [
        ("commit", 1),
        ("preview", 8),
        ("commit", 8),
        ("preview", 8),
    ]
    calls = _units(session, [1], 11, state=session.new_state())
    assert calls[-1] == ("commit", 3)


def test_speculation_tells_its_guesses_then_what_was_kept() -> None:
    session, _ = oracle_session(stop_token_ids=())
    steps: list[Step] = []
    got = session.generate([1, 2], 19, decode="self-speculate", width=8, on_step=steps.append)
    assert steps[0].kind == "causal"
    told = [token for step in steps if step.kind != "draft" for token in step.ids]
    assert told == list(got.token_ids)
    for draft, kept in pairwise(steps):
        if draft.kind == "draft":
            assert kept.kind == "verify"
            assert (draft.start, draft.turn) == (kept.start, kept.turn)
            assert not any(draft.fixed)
            assert draft.ids[: len(kept.ids) - 1] == kept.ids[:-1]


class Poisoned:
    """An engine that answers NaN in one row of one Unit, from its nth call on."""

    def __init__(self, engine: Any, unit: str, row: int, call: int) -> None:
        self.engine, self.unit, self.row, self.left = engine, unit, row, call

    def run(self, unit: str, feeds: Arrays, outputs: Any = None) -> Arrays:
        """Runs a Unit, then spoils it."""
        out: Arrays = self.engine.run(unit, feeds, outputs)
        if unit == self.unit and out["logits"].size:
            if self.left == 0:
                out["logits"][0, self.row, 5] = np.nan
            self.left -= 1
        return out


@pytest.mark.parametrize(
    ("unit", "row", "call", "way", "words"),
    [
        (
            "preview",
            5,
            2,
            WAYS[0],
            "Unit preview answered NaN at pass 2, row 5 (response position 6)",
        ),
        ("commit", 0, 3, WAYS[1], "row 0 (response position 4)"),
        ("commit", 0, 0, WAYS[2], "row 0 (response position 1)"),
        (
            "preview",
            3,
            0,
            WAYS[2],
            "Unit preview answered NaN at pass 1, row 3 (response position 4)",
        ),
        ("verify", 2, 1, WAYS[2], "Unit verify answered NaN at pass 2, row 2 "),
        (
            "verify",
            0,
            0,
            WAYS[3],
            "Unit verify answered NaN at pass 1, row 0 (response position 2)",
        ),
    ],
)
def test_nan_names_unit_pass_and_row(
    unit: str, row: int, call: int, way: dict[str, Any], words: str
) -> None:
    session, truth = oracle_session(stop_token_ids=(), threshold=1.0)
    engine = Poisoned(session.engine, unit, row, call)
    broken = Session(engine, session.sizes, rules_of(truth.c), 200)
    with pytest.raises(NotANumber) as caught:
        broken.generate([1, 2, 3], 16, **way)
    assert isinstance(caught.value, RunError)
    assert words in str(caught.value)


def _share(drawn: list[int], vocab: int) -> Array:
    return np.bincount(drawn, minlength=vocab) / len(drawn)


@pytest.mark.parametrize("way", ["causal", "denoise"])
@pytest.mark.parametrize(
    "options",
    [{"temperature": 1.0}, {"temperature": 0.6, "top_k": 5}, {"temperature": 1.4, "top_p": 0.5}],
)
def test_draws_follow_the_distribution(way: str, options: dict[str, Any]) -> None:
    session, truth = oracle_session(scale=0.1, block_size=8, threshold=0.0)
    prompt, size, state = [3, 1, 4], 600, maths.State()
    if way == "causal":
        logits = truth.commit(state, prompt)[-1]
    else:
        truth.commit(state, prompt)
        logits = truth.preview(state, [39] * 8)[0]
    scalars = np.zeros(12)
    scalars[9:] = options["temperature"], options.get("top_k", 0), options.get("top_p", 1.0)
    p = allowed(truth.process(logits, [], 1, False), scalars)
    drawn = [
        session.generate(prompt, 1, decode=way, seed=seed, **options).token_ids[0]
        for seed in range(size)
    ]
    share = _share(drawn, truth.c.vocab_size)
    assert not share[p == 0].any()
    expected = p[p > 0] * size
    chi2 = float((((share[p > 0] * size) - expected) ** 2 / expected).sum())
    freedom = int((p > 0).sum()) - 1
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom) + 5


@pytest.mark.parametrize("way", ["causal", "denoise"])
def test_a_seed_repeats_and_another_differs(way: str) -> None:
    session, _ = oracle_session(stop_token_ids=(), threshold=0.4)
    told = [
        session.generate([1, 2], 24, decode=way, temperature=1.0, seed=seed).token_ids
        for seed in (7, 7, 8, 9)
    ]
    assert told[0] == told[1]
    assert len(set(told)) == 3


def test_noise_belongs_to_seed_row_and_pass() -> None:
    plain, _ = oracle_session()

    def noise(seed: int, first: int, rows: int, turn: int) -> Array:
        response = Response(plain.sizes, plain.rules, Sampling(temperature=1.0, seed=seed))
        seen: list[Array] = []

        class Watched:
            def run(self, unit: str, feeds: Arrays, outputs: Any = None) -> Arrays:
                seen.append(feeds["noise"][0])
                return plain.engine.run(unit, feeds, outputs)

        logits = np.zeros((1, rows, plain.sizes.vocab_size), np.float32)
        response.pick(Watched(), "preview", logits, first, turn=turn)
        return seen[0]

    whole = np.concatenate([noise(s, 1, 250, t) for s in (0, 1, 2**63 - 1) for t in (0, 1, 7)])
    assert whole.dtype == np.float32
    assert whole.min() >= 0
    assert whole.max() < 1
    assert len(set(whole.tolist())) > 0.999 * len(whole)
    assert abs(whole.mean() - 0.5) < 0.03
    # However a response is cut into blocks, a row of a pass has the same noise.
    assert np.array_equal(noise(5, 3, 8, 2)[4:], noise(5, 7, 4, 2))


def test_top_k_of_one_is_greedy() -> None:
    session, truth = oracle_session()
    got = session.generate([5, 6], 20, decode="causal", temperature=3.0, top_k=1, seed=4)
    assert list(got.token_ids) == truth.causal([5, 6], 20)
