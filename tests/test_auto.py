"""`--decode auto`: what it chooses, what that costs beside the best single way, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from clover_compile.runtime.auto import ALLOWANCE, CAP, Choice, Chooser
from clover_compile.runtime.costs import CostTable, Outlook
from clover_compile.runtime.errors import AutoNeedsCosts, Faults
from clover_compile.runtime.experience import MEMORY, Experience
from clover_compile.runtime.session import Generation, Session
from clover_compile.runtime.step import Step
from tests.oracle_engine import oracle_session
from tests.scripted_language import SIZES, Language, Skill, rules

TOKENS, BUDGET = 1024, 256

HOPEFUL = Outlook((0.97,) * 31, (0.97,) * 31, 22.0, 28.0)
DOUBTFUL = Outlook((0.1,), (0.1,), 1.1, 32.0)

TABLES = {
    # A CPU: wide passes cost much more than narrow ones.
    "cpu": CostTable(
        "measured",
        {
            "commit": ((1, 0.36), (32, 2.0), (256, 14.0)), "replay": ((2, 0.1), (32, 0.2)),
            "verify": ((2, 0.5), (16, 1.3), (32, 2.2)), "pick": ((1, 0.05), (32, 0.4)),
            "preview": ((2, 0.9), (16, 1.4), (32, 1.9)),
        },
        0.02, HOPEFUL,
    ),
    # A GPU: bytes count, and they grow with the experts that are read.
    "gpu": CostTable(
        "modelled",
        {
            "commit": ((1, 1.2), (32, 6.0)), "replay": ((2, 0.05), (32, 0.06)),
            "verify": ((2, 1.8), (8, 3.4), (16, 5.0), (32, 6.5)), "pick": ((1, 0.02), (32, 0.05)),
            "preview": ((2, 1.9), (16, 3.0), (32, 3.4)),
        },
        0.3, HOPEFUL,
    ),
}  # fmt: skip

TEXTS: dict[str, tuple[Skill, int]] = {
    "no guess is right": (lambda position, before: 0.0, 0),
    "every guess is right": (lambda position, before: 1.0, 0),
    "short answers, nearly all right": (lambda position, before: 0.985, 40),
    "prose": (lambda position, before: 0.5 * 0.85**before, 0),
}
"""Text -> skill of the guesses, and tokens of an answer (0: no stop)."""

SINGLE: list[dict[str, Any]] = [
    {"decode": "causal"},
    {"decode": "denoise"},
    *({"decode": "self-speculate", "accept": "exact", "width": w} for w in (2, 4, 8, 16, 32)),
]


def language(text: str, table: CostTable | None = None) -> tuple[Session, Language]:
    """A session over a text."""
    skill, answer = TEXTS[text]
    made = Language(skill, 3, answer)
    return Session(made, SIZES, rules(), 1 << 16, costs=table), made


def decoded(session: Session, **options: Any) -> list[Generation]:
    """Answers of at least TOKENS tokens in all, to short prompts of several lengths."""
    answers: list[Generation] = []
    while sum(len(x.token_ids) for x in answers) < TOKENS:
        prompt = [1] * (5 + 7 * len(answers) % 40)
        answers.append(session.generate(prompt, BUDGET, **options))
    return answers


def cost_of_a_token(text: str, table: CostTable, **options: Any) -> float:
    """Calls times cost table, over the tokens of all answers."""
    session, engine = language(text, table)
    answers = decoded(session, **options)
    return engine.cost(table) / sum(len(x.token_ids) for x in answers)


@pytest.mark.parametrize("machine", TABLES)
@pytest.mark.parametrize("text", TEXTS)
def test_regret(text: str, machine: str) -> None:
    """At most 5 % above the best single way and 3 % above causal decoding, cost for cost."""
    table = TABLES[machine]
    single = {str(way): cost_of_a_token(text, table, **way) for way in SINGLE}
    causal = single[str(SINGLE[0])]
    chosen = cost_of_a_token(text, table, decode="auto")
    assert chosen <= 1.05 * min(single.values()), (chosen, single)
    assert chosen <= 1.03 * causal, (chosen, single)
    exact = cost_of_a_token(text, table, decode="auto", exact=True)
    allowed = [cost for way, cost in single.items() if "denoise" not in way]
    assert exact <= 1.05 * min(allowed), (exact, single)


def test_a_wrong_outlook_costs_little() -> None:
    """Hopes of the profile that a text disappoints, and fears that it does not bear out."""
    cpu = TABLES["cpu"]
    causal = cost_of_a_token("no guess is right", cpu, decode="causal")
    assert cost_of_a_token("no guess is right", cpu, decode="auto") <= 1.03 * causal
    doubtful = CostTable(cpu.kind, cpu.units, cpu.head, DOUBTFUL)
    assert cost_of_a_token("every guess is right", doubtful, decode="auto") < 0.5 * causal


def test_exact_gives_the_causal_text() -> None:
    for text in TEXTS:
        session, _ = language(text, TABLES["gpu"])
        causal = [x.token_ids for x in decoded(session, decode="causal")]
        exact = decoded(session, decode="auto", exact=True)
        assert [x.token_ids for x in exact] == causal
        assert not any("denoise" in x.stats["choices"] for x in exact)


def test_the_same_counts_choose_the_same() -> None:
    runs = []
    for _ in range(2):
        session, engine = language("prose", TABLES["gpu"])
        answers = decoded(session, decode="auto")
        runs.append((engine.calls, [(x.token_ids, x.stats["choices"]) for x in answers]))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("text", ["no guess is right", "prose"])
def test_tokens_per_pass_counts_no_causal_step(text: str, table: str) -> None:
    session, _ = language(text, TABLES[table])
    steps: list[Step] = []
    stats = session.generate([1, 2, 3], 96, decode="auto", on_step=steps.append).stats
    passes = sum(step.kind in ("denoise", "draft") for step in steps)
    causal = sum(step.kind == "causal" for step in steps)
    assert causal > 0 and stats["passes"] == passes > 0
    assert stats["tokens_per_pass"] == (stats["new_tokens"] - causal) / passes


def test_what_was_learned_stays_for_the_next_request() -> None:
    session, _ = language("no guess is right", TABLES["cpu"])
    first = session.generate([1, 2], 64, decode="auto").stats["choices"]
    assert set(first) != {"causal"}  # the profile promised much
    later = session.generate([1, 2], 64, decode="auto").stats["choices"]
    assert later == {"causal": 64}
    fresh, _ = language("no guess is right", TABLES["cpu"])
    assert fresh.generate([1, 2], 64, decode="auto").stats["choices"] == first


def test_what_is_learned_depends_on_the_rule_and_not_on_the_object() -> None:
    seen = Experience()
    twin = seen.copy()
    seen.drafted(8, "exact", 1)
    table = TABLES["cpu"]
    assert seen.tokens_of_draft(8, "exact", table.outlook) < 3
    assert seen.tokens_of_draft(8, "release", table.outlook) > 6
    assert twin.tokens_of_draft(8, "exact", table.outlook) > 6


def test_a_stop_is_a_rejection() -> None:
    seen = Experience()
    seen.drafted(8, "exact", 3)
    places = seen.drafts["exact"]
    assert [(x.given, x.weight) for x in places[:4]] == [(1, 1), (1, 1), (0, 1), (0, 0)]
    assert seen.rows.weight == seen.tokens.weight == 0


def test_passes_of_one_block_fade_together() -> None:
    seen = Experience()
    for _ in range(2):
        seen.looked("exact", first_is_sure=True)
        for fixed in (30, 2):
            seen.passed(fixed)
    assert seen.rows.given == 32 * (1 - 1 / MEMORY) + 32
    assert seen.rows.weight == 2 * (1 - 1 / MEMORY) + 2


def test_one_short_answer_says_little_of_the_next() -> None:
    seen = Experience()
    seen.tokens.see(6.0)
    assert seen.tokens_of_block(HOPEFUL) > 23


def test_trials_stay_within_their_budget() -> None:
    for text in TEXTS:
        table = TABLES["cpu"]
        session, _ = language(text, table)
        decoded(session, decode="auto")
        lost, spent = sum(session.experience.lost.values()), session.experience.spent
        # One trial may go wrong after the check: a block of one pass at most.
        worst = table.look(32) + table.step()
        assert lost <= ALLOWANCE * table.step() + CAP * spent + worst


def chooser(widths: tuple[int, ...] = (2, 4, 8), block_size: int = 32) -> Chooser:
    """A chooser that has spent its allowance."""
    table = TABLES["cpu"]
    seen = Experience(lost={"denoise": ALLOWANCE * table.step()})
    return Chooser(table, seen, "exact", widths, block_size, 0.9)


def test_what_does_not_fit_is_not_chosen() -> None:
    assert chooser().choose(64, 64) == Choice("denoise", 32)
    assert chooser().choose(64, 31).way == "self-speculate"
    assert chooser().choose(9, 31) == Choice("self-speculate", 8)
    assert chooser(widths=()).choose(64, 31) == Choice("causal")
    assert chooser(block_size=0).choose(1, 64) == Choice("causal")


def test_a_context_too_small_for_a_block_is_no_obstacle() -> None:
    made = Language(TEXTS["every guess is right"][0])
    session = Session(made, SIZES, rules(), 40, costs=TABLES["gpu"])
    assert len(session.generate([1] * 10, 30, decode="auto").token_ids) == 30


def test_drawn_tokens_are_never_drafted() -> None:
    session, _ = language("every guess is right", TABLES["gpu"])
    out = session.generate([1], 64, decode="auto", temperature=1.0, seed=3)
    assert not any("self-speculate" in name for name in out.stats["choices"])
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    exact = session.generate([1], 9, decode="auto", exact=True, **drawn)
    assert exact.token_ids == session.generate([1], 9, decode="causal", **drawn).token_ids


def test_a_turn_leaves_every_emitted_row_committed() -> None:
    for options in ({}, {"exact": True}, {"block_size": 8}, {"accept": "exact"}):
        session, _ = oracle_session(threshold=0.2, stop_token_ids=())
        session.costs = TABLES["gpu"]
        state = session.new_state()
        out = session.generate([1, 2, 3], 21, decode="auto", state=state, **options)
        assert state.length == 3 + len(out.token_ids)
        again = session.generate([4], 5, decode="causal", state=state)
        whole = [1, 2, 3, *out.token_ids, 4]
        assert again.token_ids == session.generate(whole, 5, decode="causal").token_ids


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 8}, "width has no effect with decode 'auto'"),
        ({"exact": True, "threshold": 0.5}, "threshold has no effect with exact"),
        ({"exact": True, "block_size": 8}, "block_size has no effect with exact"),
        ({"top_k": 3}, "top_k has no effect at temperature 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    session, _ = language("prose", TABLES["cpu"])
    with pytest.raises(Faults, match=words):
        session.generate([1], decode="auto", **options)


def test_without_costs_it_is_refused() -> None:
    session, _ = language("prose")
    with pytest.raises(AutoNeedsCosts, match="clover-compile profile"):
        session.generate([1], decode="auto")


def test_costs_lie_on_straight_lines() -> None:
    table = TABLES["cpu"]
    assert table.cost("commit", 1) == 0.36
    assert table.cost("commit", 1, logits=True) == pytest.approx(0.38)
    assert table.cost("commit", 16) == pytest.approx(0.36 + 15 / 31 * 1.64)
    assert table.cost("commit", 512) == pytest.approx(14 + 256 / 224 * 12)
    assert table.cost("verify", 1) == 0.5
    assert CostTable.from_json(table.to_json()) == table
    plain = CostTable("modelled", {**table.units, "replay": ()}, 0.0, HOPEFUL)
    assert plain.cost("replay", 7) == 0


BREAKS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda x: x.update(kind="guessed"), "kind is"),
    (lambda x: x["costs"].pop("verify"), "must name the Units"),
    (lambda x: x["costs"].update(extra=[[1, 1.0]]), "must name the Units"),
    (lambda x: x.update(costs=[]), "must name the Units"),
    (lambda x: x["costs"].update(pick=[]), "not a list of pairs"),
    (lambda x: x["costs"].update(pick=[[1]]), "hold \\[1\\]"),
    (lambda x: x["costs"].update(pick=[[1.5, 1]]), "hold"),
    (lambda x: x["costs"].update(pick=[[2, 1.0], [2, 1.0]]), "do not ascend"),
    (lambda x: x["costs"].update(pick=[[0, 1.0]]), "do not ascend"),
    (lambda x: x["costs"].update(pick=[[1, 0.0]]), "not above 0"),
    (lambda x: x["costs"].update(pick=[[1, True]]), "not a number"),
    (lambda x: x["costs"].update(pick=[[1, 10**400]]), "not a number"),
    (lambda x: x.update(head=-1.0), "head is -1"),
    (lambda x: x.update(outlook=None), "outlook is missing"),
    (lambda x: x["outlook"].update(exact=[1.5]), "above 1"),
    (lambda x: x["outlook"].update(release=[]), "not a list of chances"),
    (lambda x: x["outlook"].update(rows_per_pass=0.5), "rows_per_pass is 0.5"),
]


@pytest.mark.parametrize(("change", "words"), BREAKS)
def test_a_table_that_cannot_be_one_is_refused(
    change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    data = TABLES["cpu"].to_json()
    change(data)
    with pytest.raises(ValueError, match=words):
        CostTable.from_json(data)
