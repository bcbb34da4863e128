"""The same messages by every way to decode: how often the answer is right, and how fast it is."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clover_compile.profiling import cost_table
from clover_compile.profiling.messages import Message, Messages
from clover_compile.profiling.rounds import spread, turns
from clover_compile.profiling.subject import Subject
from clover_compile.runtime.auto import WIDTHS
from clover_compile.runtime.costs import CostTable, Outlook
from clover_compile.runtime.engine import Arrays, Engine
from clover_compile.runtime.session import Generation, Session, Text
from clover_compile.runtime.step import Step

THRESHOLDS = (0.5, 0.7, 0.9, 0.95)
SHOWN = 3
"""Answers whose every step is kept for the report."""

CAUSAL, SPECULATED = "causal", "self-speculate exact 16"
AUTO: dict[str, dict[str, Any]] = {
    "auto": {"decode": "auto"}, "auto --exact": {"decode": "auto", "exact": True},
}  # fmt: skip

Options = dict[str, Any]
Calls = Counter[tuple[str, int, bool]]
"""(Unit, rows, whether a commit also answered logits) -> calls."""


def ways(threshold: float) -> dict[str, Options]:
    """Name of a way -> options; `threshold` is the checkpoint's."""
    found: dict[str, Options] = {CAUSAL: {"decode": "causal"}}
    for x in sorted({*THRESHOLDS, threshold}):
        found[denoising(x)] = {"decode": "denoise", "threshold": x}
    for rule in ("exact", "release"):
        for width in WIDTHS:
            found[f"self-speculate {rule} {width}"] = {
                "decode": "self-speculate", "accept": rule, "width": width,
            }  # fmt: skip
    return found


def denoising(threshold: float) -> str:
    """The name of denoising at a threshold."""
    return f"denoise > {threshold:g}"


class Counted:
    """An engine that counts calls: (unit, rows, with logits)."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.calls: Calls = Counter()

    def run(self, unit: str, feeds: Arrays, outputs: Sequence[str] | None = None) -> Arrays:
        """Runs one Unit of the engine behind it."""
        if unit == "replay":
            rows = next((x.shape[1] for n, x in feeds.items() if n.startswith("tape.")), 0)
        else:
            rows = feeds["logits" if unit == "pick" else "ids"].shape[1]
        self.calls[unit, rows, unit == "commit" and bool(feeds["keep"])] += 1
        return self.engine.run(unit, feeds, outputs)


def cost_of(calls: Calls, table: CostTable) -> float:
    """Calls times cost table."""
    return sum(count * table.cost(*call) for call, count in calls.items())


@dataclass
class Log:
    """What one way did with the messages."""

    answers: list[Generation] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    steps: list[list[Step]] = field(default_factory=list)
    calls: Calls = field(default_factory=Counter)

    @property
    def rounds(self) -> list[tuple[int, int]]:
        """Width and tokens of every round of self-speculation."""
        found = []
        for steps in self.steps:
            for draft, verified in itertools.pairwise(steps):
                if draft.kind == "draft" and verified.kind == "verify":
                    found.append((len(draft.ids) + 1, len(verified.ids)))
        return found


Logs = dict[str, Log]


def ask(
    subject: Subject, messages: Messages, ways: Mapping[str, Options], budget: int,
    costs: CostTable | None, say: Callable[[str], None],
) -> Logs:  # fmt: skip
    """Every message by every way, by turns; each way has a session of its own."""
    counted = {way: Counted(subject.engine) for way in ways}
    sessions: dict[str, Session] = {}
    for way in ways:
        sessions[way] = subject.session()
        sessions[way].engine, sessions[way].costs = counted[way], costs
    logs = {way: Log() for way in ways}
    for number, message in enumerate(messages.asked):
        say(f"message {number + 1} of {len(messages.asked)} by {len(ways)} ways")
        room = _room(subject, sessions[next(iter(ways))], message, budget)
        for way in turns(list(ways), number):
            steps: list[Step] = []
            start = time.perf_counter()
            answer = sessions[way].generate(
                _prompt(message), room, on_step=steps.append, **ways[way]
            )
            logs[way].seconds.append(time.perf_counter() - start)
            logs[way].answers.append(answer)
            logs[way].steps.append(steps)
    for way, log in logs.items():
        log.calls = counted[way].calls
    return logs


def _prompt(message: Message) -> Any:
    return message.prompt if isinstance(message.prompt, str) else list(message.prompt)


def _room(subject: Subject, session: Session, message: Message, budget: int) -> int:
    """The budget, or as many whole blocks as the context has room for."""
    assert session.text is not None
    block = subject.loaded.rules.block_size
    room = subject.loaded.context - len(session.text.encode(_prompt(message)))
    return max(1, min(budget, room // block * block))


def outlook(logs: Logs, threshold: float, block_size: int) -> Outlook:
    """What the ways' logs let expect of guesses on such messages."""
    rules = {
        rule: [x for way, log in logs.items() if f" {rule} " in way for x in log.rounds]
        for rule in ("exact", "release")
    }
    steps = [x for run in logs[denoising(threshold)].steps for x in run]
    last = [x for x in steps if all(x.fixed)]
    answers = logs[denoising(threshold)].answers
    tokens = sum(len(x.token_ids) for x in answers)
    return Outlook(
        cost_table.chances(rules["exact"]), cost_table.chances(rules["release"]),
        max(1.0, block_size * len(last) / max(1, len(steps))), max(1.0, tokens / max(1, len(last))),
    )  # fmt: skip


def rows(logs: Logs, messages: Messages, table: CostTable) -> list[dict[str, Any]]:
    """One row a way."""
    causal = logs[CAUSAL]
    return [_row(way, log, causal, messages, table) for way, log in logs.items()]


def _row(way: str, log: Log, causal: Log, messages: Messages, table: CostTable) -> dict[str, Any]:
    answers = log.answers
    tokens, seconds = sum(len(x.token_ids) for x in answers), sum(log.seconds)
    wanted = [m.answer for m in messages.asked]
    judged = [(a.text, w) for a, w in zip(answers, wanted, strict=True) if w is not None]
    total, after_passes = Counter[str](), 0.0
    choices = Counter[str]()
    for answer in answers:
        total.update({name: answer.stats[name] for name in ("passes", "rounds", "commits")})
        after_passes += answer.stats["passes"] * (answer.stats["tokens_per_pass"] or 0)
        choices.update(answer.stats.get("choices", {}))
    same = [a.token_ids == b.token_ids for a, b in zip(answers, causal.answers, strict=True)]
    pairs = zip(log.seconds, answers, causal.seconds, causal.answers, strict=True)
    faster = [t0 / t * len(x.token_ids) / len(x0.token_ids) for t, x, t0, x0 in pairs]
    return {
        "way": way, "answers": len(answers), "tokens": tokens,
        "right": sum(text == want for text, want in judged) / len(judged) if judged else None,
        "as causal": sum(same) / len(same),
        "passes": total["passes"], "rounds": total["rounds"],
        "tokens per pass": after_passes / total["passes"] if total["passes"] else None,
        # Where ways are mixed a round is only some of the tokens.
        "tokens per round": tokens / total["rounds"] if total["rounds"] and not choices else None,
        "ms per answer": spread([1e3 * x for x in log.seconds]),
        "tokens per second": tokens / seconds,
        "cost per token": cost_of(log.calls, table) / tokens,
        "faster than causal": spread(faster),
        "choices": dict(choices),
        "seconds": log.seconds,
    }  # fmt: skip


def winner(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fastest way that is right as often as causal decoding (where that is never right, or no
    answers are known: with its text), the fastest whose text was always the causal one, and the
    fastest of all.
    """

    def best(kept: Sequence[dict[str, Any]]) -> dict[str, Any]:
        row = max(kept, key=lambda r: r["tokens per second"])
        return {"way": row["way"], "faster than causal": row["faster than causal"]}

    causal = rows[0]
    same = [row for row in rows if row["as causal"] == 1]
    right = [row for row in rows if row["right"] and row["right"] >= causal["right"]]
    no_worse = right if causal["right"] else same
    return {"no worse": best(no_worse), "same text": best(same), "of all": best(rows)}


def pictures(logs: Logs, threshold: float, messages: Messages, text: Text) -> dict[str, Any]:
    """What the report draws: steps of a few answers, and how many rows passes fixed."""
    log = logs[denoising(threshold)]
    fixed: Counter[int] = Counter()
    for steps in log.steps:
        before = 0
        for step in steps:
            if step.turn == 0:
                before = 0
            fixed[sum(step.fixed) - before] += 1
            before = sum(step.fixed)
    rounds = Counter(tokens for _, tokens in logs[SPECULATED].rounds)
    order = sorted(range(len(log.steps)), key=lambda number: -len(log.steps[number]))
    longest = sorted(order[:SHOWN])
    return {
        "rows fixed by a pass": sorted(fixed.items()),
        "tokens of a round": sorted(rounds.items()),
        "answers": [
            {
                "way": way,
                "prompt": _shown(messages.asked[number]),
                "answer": logs[way].answers[number].text,
                "steps": [_step(step, text) for step in logs[way].steps[number]],
            }
            for way in (denoising(threshold), SPECULATED)
            for number in longest
        ],
    }


def _shown(message: Message) -> str:
    """A prompt as text."""
    if isinstance(message.prompt, str):
        return message.prompt
    return "\n".join(f"{x.get('role')}: {x.get('content')}" for x in message.prompt)


def _step(step: Step, text: Text) -> dict[str, Any]:
    return {
        "kind": step.kind, "start": step.start, "turn": step.turn,
        "pieces": [text.decode([token])[0] for token in step.ids],
        "fixed": list(step.fixed), "confidence": [round(float(x), 4) for x in step.confidence],
    }  # fmt: skip
