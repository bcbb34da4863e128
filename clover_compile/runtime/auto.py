"""`--decode auto`: before every round, the way that promises most tokens for its cost.

    a step             1 token
    a draft of w rows  1 + h1 + h1 h2 + ... + h1..h(w-1) tokens, hr the chance of the draft at r
    a block of n rows  its tokens, after n / (rows per pass) passes and a commit

What to expect comes from `experience.py`, the costs from the bundle's costs.json. The best rate is
taken. Now and then a way that looks worse is tried: a narrow draft, a wider one once all of it was
kept, or a pass over a block. What trials lose against the best rate is kept within ALLOWANCE steps
and CAP of all cost. A block is given up after a pass that leaves too little hope: its fixed rows
before the first open one stay, or else one token is drawn from the last committed row.

No clock is read: the same table, counts, prompt and seed choose the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clover_compile.runtime import decode as ways
from clover_compile.runtime.costs import CostTable
from clover_compile.runtime.engine import Array
from clover_compile.runtime.experience import FIRST_TRIAL, Experience

ALLOWANCE, CAP = 4.0, 0.0075
WIDTHS = (2, 4, 8, 16, 32)
HEDGED = 4.0
"""Passes to have seen before a block is begun without the logits that giving it up may need."""


@dataclass(frozen=True)
class Choice:
    """One decision."""

    way: str
    """`causal`, `denoise` or `self-speculate`."""
    rows: int = 1
    trial: bool = False

    @property
    def name(self) -> str:
        """`causal`, `denoise` or `self-speculate 8`."""
        return f"{self.way} {self.rows}" if self.way == "self-speculate" else self.way


@dataclass
class Chooser:
    """Chooses the rounds of one request, and books what came of them."""

    table: CostTable
    seen: Experience
    """Changed by every round; hand in a copy to keep the original."""
    rule: str
    """Which drafts are kept: `exact` or `release`."""
    widths: tuple[int, ...]
    """Of the drafts that may be made; none where the request draws its tokens."""
    block_size: int
    """0 where blocks are not allowed."""
    threshold: float

    def choose(self, left: int, room: int) -> Choice:
        """The next round; `left`: tokens of the budget, `room`: rows of the context."""
        options = self._steady(left)
        if 0 < self.block_size <= room:
            options.append(Choice("denoise", self.block_size))
        best = max(options, key=lambda choice: self.rate(choice, left))
        return self._trial(best, options, left) or best

    def rate(self, choice: Choice, left: int) -> float:
        """Expected tokens for a unit of cost."""
        if choice.way == "causal":
            return 1 / self.table.step()
        if choice.way == "self-speculate":
            return self._tokens(choice.rows) / self.table.draft(choice.rows)
        return self.rate_of_block(choice.rows, left, 0)

    def rate_of_block(self, open_rows: int, left: int, leading: int) -> float:
        """Expected tokens for the cost of finishing a block; `leading` are had already."""
        passes = max(1.0, open_rows / self.seen.rows_of_pass(self.table.outlook))
        expected = max(self.seen.tokens_of_block(self.table.outlook), leading + 1.0)
        tokens = min(expected, left, self.block_size)
        commit = self.table.cost("commit", max(1, round(tokens)))
        return (tokens - leading) / (passes * self.table.look(self.block_size) + commit)

    def steady_rate(self, left: int) -> float:
        """The best rate without blocks."""
        return max(self.rate(choice, left) for choice in self._steady(left))

    def paid(self, choice: Choice, cost: float, tokens: int, rate: float) -> None:
        """Books a round; `rate` is what its cost would have earned at best."""
        self.seen.spent += cost
        if choice.trial:
            lost = self.seen.lost.get(choice.way, 0.0) + cost - tokens / rate
            self.seen.lost[choice.way] = max(0.0, lost)

    def _steady(self, left: int) -> list[Choice]:
        drafts = [Choice("self-speculate", w) for w in self.widths if w <= left]
        return [Choice("causal"), *drafts]

    def _tokens(self, width: int) -> float:
        return self.seen.tokens_of_draft(width, self.rule, self.table.outlook)

    def _trial(self, best: Choice, options: list[Choice], left: int) -> Choice | None:
        """A way that looks worse but may be tried: first of those on which least was lost."""
        lost, price = self.seen.lost, 1 / self.rate(best, left)
        budget = ALLOWANCE * self.table.step() + CAP * self.seen.spent - sum(lost.values())
        drafting = best.way == "self-speculate"
        width = max(self.seen.width, 2 * best.rows if drafting else 0)
        costs: dict[Choice, tuple[float, float]] = {}  # the cost, and tokens almost sure of it
        for choice in options:
            if choice.way == "self-speculate" and choice.rows == width:
                sure = width / 2 if width > FIRST_TRIAL else 1.0
                costs[choice] = self.table.draft(width), sure
            elif choice.way == "denoise" != best.way:
                cost = self.table.look(choice.rows) + self.table.step()
                costs[choice] = cost, self._tokens(best.rows) / 2 if drafting else 1.0
        for choice in sorted(costs, key=lambda choice: lost.get(choice.way, 0.0)):
            cost, tokens = costs[choice]
            if cost - tokens * price <= budget:
                return Choice(choice.way, choice.rows, trial=True)
        return None


def auto(run: ways.Run, prompt: Sequence[int], chooser: Chooser) -> None:
    """Decodes by whatever way the chooser picks next."""
    rows = list(prompt)  # not committed yet: what comes next decides how they are
    while len(run.response.ids) < run.budget and not run.stopped:
        start = len(run.response.ids)
        left = run.budget - start
        choice = chooser.choose(left, run.state.context - run.state.length - len(rows))
        rate = chooser.steady_rate(left)
        run.counts.choices[choice.name] = run.counts.choices.get(choice.name, 0) + 1
        if choice.way == "causal":
            rows, cost = ways.step(run, rows), chooser.table.step()
        elif choice.way == "self-speculate":
            rows, cost = _draft(run, rows, choice, chooser), chooser.table.draft(choice.rows)
        else:
            rows, cost = _block(run, rows, choice, chooser)
        chooser.paid(choice, cost, len(run.response.ids) - start, rate)
    if run.keep_state:
        ways.commit(run, rows)


def _draft(run: ways.Run, rows: list[int], choice: Choice, chooser: Chooser) -> list[int]:
    """One round of self-speculation; the rows that are left to commit."""
    if len(rows) > 1:
        ways.commit(run, rows[:-1])
    emitted = ways.verified(run, rows[-1], choice.rows, chooser.rule == "exact")
    chooser.seen.drafted(choice.rows, chooser.rule, len(emitted))
    if choice.trial:
        whole = len(emitted) == choice.rows
        chooser.seen.width = min(2 * choice.rows, WIDTHS[-1]) if whole else FIRST_TRIAL
    return emitted[-1:]


def _block(
    run: ways.Run, rows: list[int], choice: Choice, chooser: Chooser
) -> tuple[list[int], float]:
    """One block, or the part of it that was worth it; rows left to commit, and the cost."""
    seen, table, left = chooser.seen, chooser.table, run.budget - len(run.response.ids)
    hedged = choice.trial or seen.rows.weight < HEDGED
    logits, before = ways.commit(run, rows, keep=int(hedged)), run.counts.passes

    def go_on(fixed: int, settled: Array) -> bool:
        if run.counts.passes == before + 1:
            seen.looked(chooser.rule, bool(settled[0]))
        seen.passed(fixed)
        leading = int(np.append(settled, False).argmin())
        if not leading and not hedged:
            return True
        finish = chooser.rate_of_block(int((~settled).sum()), left, leading)
        return finish >= chooser.steady_rate(left)

    ids = ways.resolve(run, choice.rows, chooser.threshold, go_on)
    cost = (run.counts.passes - before) * table.look(choice.rows) + hedged * table.head
    if not ids:
        return ways.emit_next(run, logits), cost + table.step()
    taken = run.emit(ids)
    run.counts.after_passes += len(taken)
    if len(ids) == choice.rows:
        run.counts.blocks += 1
        seen.tokens.see(float(len(taken)))
    return taken, cost + table.cost("commit", len(taken))
