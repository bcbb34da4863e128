"""The cost of each Unit at each number of rows, measured; and what to expect of guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from clover_compile.profiling.calls import Call, Scene
from clover_compile.profiling.rounds import clock_for, take_turns
from clover_compile.profiling.subject import Subject
from clover_compile.runtime.auto import WIDTHS
from clover_compile.runtime.costs import CostTable, Outlook, Points
from clover_compile.runtime.decode import COMMIT_ROWS

COMMITTED = (1, 2, 4, 8, 16, 32, 64, 128, COMMIT_ROWS)
STEP = Call("commit", 1, 1)


def neutral(block_size: int) -> Outlook:
    """What to expect where nothing was asked: every second guess is right."""
    return Outlook((0.5,), (0.5,), 2.0, float(block_size))


def points(subject: Subject) -> tuple[Call, ...]:
    """The calls that are timed."""
    block = subject.loaded.rules.block_size
    rows = {
        "commit": [n for n in COMMITTED if n <= subject.loaded.context // 2],
        "verify": list(WIDTHS), "replay": list(WIDTHS) if subject.config.gdn_layers else [],
        "preview": sorted({*WIDTHS, block}), "pick": sorted({1, *WIDTHS, block}),
    }  # fmt: skip
    return (STEP, *(Call(unit, n) for unit, counts in rows.items() for n in counts))


def measure(
    subject: Subject, scene: Scene, rounds: int, say: Callable[[str], None]
) -> tuple[CostTable, list[dict[str, float]]]:
    """The table, with a neutral outlook, and the seconds of every round by call."""
    clock = clock_for(subject.threads)
    calls = {_key(call): call for call in points(subject)}
    runs: dict[str, Callable[[], object]] = {
        name: partial(subject.engine.run, call.unit, scene.feeds(call))
        for name, call in calls.items()
    }
    taken = []
    for turn in range(rounds):
        say(f"round {turn + 1} of {rounds}: the cost of {len(runs)} calls")
        taken.append(take_turns(runs, turn, clock))
    typical = {name: float(np.median([took[name] for took in taken])) for name in runs}
    units: dict[str, Points] = {}
    for name, call in calls.items():
        if call != STEP:
            units[call.unit] = (*units.get(call.unit, ()), (call.rows, typical[name]))
    head = np.median([took[_key(STEP)] - took[_key(Call("commit", 1))] for took in taken])
    outlook = neutral(subject.loaded.rules.block_size)
    return CostTable("measured", units, max(0.0, float(head)), outlook), taken


def _key(call: Call) -> str:
    return f"{call.name}, {call.keep} kept" if call.keep else call.name


def chances(rounds: Sequence[tuple[int, int]], places: int = WIDTHS[-1] - 1) -> tuple[float, ...]:
    """Chance that the draft at each place is kept once those before it were.

    `rounds`: width and tokens of each. A place that was never tried does as the last that was; one
    try more that half succeeds keeps a chance away from 0 and 1.
    """
    found: list[float] = []
    for place in range(1, places + 1):
        tried = [tokens for width, tokens in rounds if width > place and tokens >= place]
        kept = sum(tokens > place for tokens in tried)
        if tried or not found:
            found.append((kept + 0.5) / (len(tried) + 1))
        else:
            found.append(found[-1])
    return tuple(found)


def break_even(table: CostTable, block_size: int) -> dict[str, Any]:
    """Tokens that a pass, or a round, must give to cost no more per token than causal decoding."""
    step = table.step()
    own = table.cost("commit", block_size) / block_size
    look = table.look(block_size)
    return {
        "tokens per pass": look / (step - own) if step > own else None,
        "tokens per round": {str(w): table.draft(w) / step for w in WIDTHS},
    }
