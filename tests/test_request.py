"""What a request may ask: every refusal in one line, all faults at once, nothing run before."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from clover_compile.runtime.errors import AutoNeedsCosts, Faults, InputError
from clover_compile.runtime.request import DEFAULTS, ONLY_FOR
from clover_compile.runtime.session import Session
from tests.oracle_engine import oracle_session

SPECULATE: dict[str, Any] = {"decode": "self-speculate"}


@pytest.fixture
def session() -> Session:
    """A session of context 120, block 8, vocabulary 0..39, mask 39."""
    return oracle_session(context=120)[0]


def _refusal(session: Session, prompt: Any, **options: Any) -> str:
    """The words of a refusal; also checks that no Unit ran."""
    with pytest.raises(Faults) as caught:
        session.generate(prompt, **{"max_new_tokens": 8, **options})
    engine: Any = session.engine
    assert not engine.calls
    assert isinstance(caught.value, InputError)
    words = str(caught.value)
    assert words.isascii()
    assert words.isprintable()
    return words


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; must be in 1.."),
        ({"max_new_tokens": 2.0}, "max_new_tokens must be a whole number, not 2.0"),
        ({"max_new_tokens": True}, "max_new_tokens must be a whole number, not true"),
        ({"threshold": -0.1}, "threshold is -0.1; must be in [0, 1]"),
        ({"threshold": 1.5}, "threshold is 1.5; must be in [0, 1]"),
        ({"threshold": float("nan")}, "threshold is NaN; must be in [0, 1]"),
        ({"threshold": "high"}, 'threshold must be a number, not "high"'),
        ({"threshold": 10**400}, "threshold is 1000"),
        ({"temperature": -1.0}, "temperature is -1.0; must be in [0, 10000]"),
        ({"temperature": float("inf")}, "temperature is Infinity"),
        ({"temperature": 1.0, "top_k": -1}, "top_k is -1; must be in 0.."),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0; must be above 0"),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p is 1.1; must be in [0, 1]"),
        ({"temperature": 1.0, "seed": -1}, "seed is -1; must be in 0.."),
        (
            {"temperature": 1.0, **SPECULATE},
            "temperature has no effect with decode 'self-speculate'",
        ),
        ({"block_size": 3}, "block_size 3 does not divide the trained block of 8"),
        ({"block_size": 0}, "block_size 0 does not divide"),
        ({"block_size": 16}, "block_size 16 does not divide"),
        ({"block_size": 4.0}, "block_size must be a whole number, not 4.0"),
        ({"width": 0, **SPECULATE}, "width is 0; must be in 1..256"),
        ({"width": 257, **SPECULATE}, "width is 257; must be in 1..256"),
        (
            {"decode": "beam"},
            'decode "beam" is unknown; choose from denoise, causal, self-speculate',
        ),
        ({"accept": "never", **SPECULATE}, 'accept "never" is unknown; choose from release, exact'),
        ({"exact": 1, "decode": "causal"}, "exact must be True or False, not 1"),
        ({"exact": True}, "exact allows only decode 'causal', 'self-speculate' and 'auto'"),
        ({"thinking": "yes"}, 'thinking must be True or False, not "yes"'),
        ({"thinking": True}, "raw, thinking and tools have no effect on a prompt of ids"),
        ({"raw": True}, "raw, thinking and tools have no effect on a prompt of ids"),
        ({"tools": []}, "raw, thinking and tools have no effect on a prompt of ids"),
        ({"state": 7}, "state must come from new_state or fork, not be 7"),
    ],
)
def test_options_are_checked(session: Session, options: dict[str, Any], words: str) -> None:
    assert words in _refusal(session, [1, 2, 3], **options)


ASKED: dict[str, Any] = {
    "accept": "exact", "width": 8, "block_size": 8, "threshold": 0.5,
    "temperature": 0.5, "top_k": 3, "top_p": 0.5, "seed": 3,
}  # fmt: skip


@pytest.mark.parametrize("way", ["denoise", "causal", "self-speculate"])
@pytest.mark.parametrize("name", sorted(ASKED))
def test_no_option_is_silently_ignored(session: Session, name: str, way: str) -> None:
    assert set(ASKED) == set(ONLY_FOR)
    if way not in ONLY_FOR[name]:
        words = _refusal(session, [1], decode=way, **{name: ASKED[name]})
        assert f"{name} has no effect with decode '{way}'" in words
    elif name in ("top_k", "top_p", "seed"):
        words = _refusal(session, [1], decode=way, **{name: ASKED[name]})
        assert f"{name} has no effect at temperature 0" in words
    else:
        session.generate([1], 8, decode=way, **{name: ASKED[name]})


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (None, "the prompt must be a string, a list of messages or a list of ids, not null"),
        (5, "the prompt must be a string"),
        ({"role": "user"}, "the prompt must be a string"),
        (iter([1]), "the prompt must be a string"),
        ([], "the prompt is empty"),
        ("", "the prompt is empty"),
        (np.zeros(0, np.int64), "the prompt is empty"),
        ("hello", "this session has no tokenizer; give ids"),
        ([1, 40], "prompt id 1 is 40; the vocabulary is 0..39"),
        ([-1], "prompt id 0 is -1; the vocabulary is 0..39"),
        ([0, 39], "prompt id 1 is the mask id 39"),
        ([1.0], "prompt id 0 is 1.0, not a whole number"),
        ([True], "prompt id 0 is true, not a whole number"),
        (["a\nb"], "prompt id 0 is"),
        (np.array([1.5]), "prompt id 0 is 1.5, not a whole number"),
        (np.zeros((2, 300)), "prompt id 0 is"),
        ([10**5000], "prompt id 0 is"),
        ([99] * 5000, "the ids from 8 on were not checked"),
    ],
)
def test_prompts_are_checked(session: Session, prompt: Any, words: str) -> None:
    refusal = _refusal(session, prompt)
    assert words in refusal
    assert len(refusal) < 1000


def test_all_faults_are_told_at_once(session: Session) -> None:
    words = _refusal(session, [77, 39], max_new_tokens=0, decode="causal", threshold=3, width=400)
    for part in (
        "max_new_tokens is 0", "threshold has no effect", "threshold is 3", "width is 400",
        "width has no effect", "prompt id 0 is 77", "prompt id 1 is the mask id",
    ):  # fmt: skip
        assert part in words


@pytest.mark.parametrize(
    ("rows", "budget", "options", "fits"),
    [
        (104, 16, {}, True),
        (105, 16, {}, False),
        (105, 9, {}, False),  # the block is always whole
        (104, 9, {}, True),
        (105, 15, {"decode": "causal"}, True),
        (106, 15, {"decode": "causal"}, False),
        (105, 15, SPECULATE, True),
        (106, 15, SPECULATE, False),
        (111, 9, {"block_size": 1}, True),
    ],
)
def test_prompt_and_whole_blocks_must_fit(
    session: Session, rows: int, budget: int, options: dict[str, Any], fits: bool
) -> None:
    if fits:
        session.generate([1] * rows, budget, **options)
    else:
        words = _refusal(session, [1] * rows, max_new_tokens=budget, **options)
        assert f"{rows} prompt ids" in words
        assert "exceed the context of 120" in words


def test_a_used_state_counts_for_the_context(session: Session) -> None:
    state = session.new_state()
    session.commit(state, [1] * 100)
    engine: Any = session.engine
    engine.calls.clear()
    words = _refusal(session, [1] * 13, state=state)
    assert "100 committed rows, 13 prompt ids and 8 rows" in words
    assert state.length == 100


def test_auto_needs_costs(session: Session) -> None:
    with pytest.raises(AutoNeedsCosts, match="name a way: denoise, causal, self-speculate"):
        session.generate([1], decode="auto")


def test_numpy_numbers_are_numbers(session: Session) -> None:
    plain = session.generate([1, 2], 8, threshold=0.5, block_size=4)
    budget: Any = np.int64(8)
    block: Any = np.int32(4)
    prompt: Any = np.array([1, 2])
    numpy = session.generate(prompt, budget, threshold=np.float64(0.5), block_size=block)
    assert numpy.token_ids == plain.token_ids


def test_exact_makes_speculation_exact(session: Session) -> None:
    want = session.generate([1, 2], 20, decode="causal").token_ids
    assert session.generate([1, 2], 20, decode="causal", exact=True).token_ids == want
    assert session.generate([1, 2], 20, exact=True, **SPECULATE).token_ids == want


def test_the_defaults_are_those_of_generate() -> None:
    parameters = inspect.signature(Session.generate).parameters
    assert {name: parameters[name].default for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decode": "casual"}, "\"casual\" is unknown (did you mean 'causal'?); choose from denoi"),
        ({"decode": "atuo"}, "did you mean 'auto'?"),
        ({"decode": "self-speculate", "accept": "exat"}, "did you mean 'exact'?"),
        ({"decode": "zzz"}, '"zzz" is unknown; choose from denoise, causal, self-speculate, auto'),
    ],
)
def test_a_mistyped_way_is_told_with_the_nearest(
    session: Session, options: dict[str, Any], words: str
) -> None:
    assert words in _refusal(session, [1], **options)
