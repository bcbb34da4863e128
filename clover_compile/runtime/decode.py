"""The ways to decode, as plain functions over an engine and a state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from clover_compile.runtime.engine import Array, Arrays, Engine, scalar
from clover_compile.runtime.pick import Response
from clover_compile.runtime.state import State
from clover_compile.runtime.step import OnStep, Step

COMMIT_ROWS = 256
"""Most rows of one commit; a longer prompt is sent in parts."""

RELEASE_RATIO, RELEASE_DELTA = 0.9, 0.6
"""The release's rule takes a draft of probability >= min(ratio, delta * e^-entropy)."""


GoOn = Callable[[int, Array], bool]
"""Asked with the number of rows a pass fixed and which rows [n] are fixed now."""


@dataclass
class Counts:
    """What a generation did."""

    blocks: int = 0
    passes: int = 0
    commits: int = 0
    rounds: int = 0
    drafts_kept: int = 0
    after_passes: int = 0
    """Tokens of blocks and of rounds that began with a preview; causal steps are not among them."""
    choices: dict[str, int] = field(default_factory=dict)
    """What `auto` chose, and how often."""


@dataclass
class Run:
    """One generation in progress."""

    engine: Engine
    state: State
    response: Response
    budget: int
    keep_state: bool
    """Whether every emitted row must be committed when the generation returns."""
    on_step: OnStep | None = None
    counts: Counts = field(default_factory=Counts)

    @property
    def stopped(self) -> bool:
        """Whether the last token ends the response."""
        ids = self.response.ids
        return bool(ids) and ids[-1] in self.response.rules.stop_token_ids

    def emit(self, ids: Sequence[int]) -> list[int]:
        """Appends ids up to the budget and the first stop id; returns what was appended."""
        taken: list[int] = []
        for token in ids[: self.budget - len(self.response.ids)]:
            taken.append(int(token))
            if token in self.response.rules.stop_token_ids:
                break
        self.response.extend(taken)
        return taken

    def tell(self, step: Step) -> None:
        """Tells the observer, if there is one."""
        if self.on_step is not None:
            self.on_step(step)


def commit(run: Run, ids: Sequence[int], keep: int = 0) -> Array:
    """Commits ids; returns logits [1, keep, V] of the last `keep` (0 or 1) rows."""
    logits = np.zeros((1, 0, 0), np.float32)
    for start in range(0, len(ids), COMMIT_ROWS):
        part = np.array([ids[start : start + COMMIT_ROWS]], np.int64)
        last = start + COMMIT_ROWS >= len(ids)
        rows = np.array(keep if last else 0, np.int32)
        new = run.engine.run("commit", {"ids": part, "keep": rows, **run.state.feeds()})
        run.state.advance(part.shape[1], new)
        run.counts.commits += 1
        logits = new["logits"]
    return logits


def preview(run: Run, ids: Array) -> Array:
    """Logits [1, n, V] of a block ids [n]; the state stays as it is."""
    run.counts.passes += 1
    return run.engine.run("preview", {"ids": ids[None], **run.state.feeds()})["logits"]


def denoise(run: Run, prompt: Sequence[int], block_size: int, threshold: float) -> None:
    """Whole blocks of masks; every pass fixes the rows it is sure of, at least the surest one."""
    commit(run, prompt)
    while len(run.response.ids) < run.budget and not run.stopped:
        taken = run.emit(resolve(run, block_size, threshold))
        run.counts.blocks += 1
        run.counts.after_passes += len(taken)
        more = len(run.response.ids) < run.budget and not run.stopped
        if more or run.keep_state:
            commit(run, taken)


def resolve(run: Run, block_size: int, threshold: float, go_on: GoOn | None = None) -> list[int]:
    """Previews one block until no row is open; returns its ids.

    `go_on` is asked after every pass; if it says no while a row is open, the block is given up, and
    only the fixed rows before the first open one are returned, perhaps none.
    """
    start, mask = len(run.response.ids), run.response.rules.mask_token_id
    ids, is_open, turn = np.full(block_size, mask, np.int64), np.ones(block_size, bool), 0
    while is_open.any():
        chosen = run.response.pick(
            run.engine, "preview", preview(run, ids), start + 1, block=ids.tolist(), turn=turn
        )
        sure = chosen["confidence"]
        take = is_open & (sure > threshold)
        if not take.any():
            take[np.where(is_open, sure, -1.0).argmax()] = True
        ids, is_open = np.where(take, chosen["ids"], ids), is_open & ~take
        run.tell(_step("denoise", start, turn, ids, ~is_open, sure))
        turn += 1
        if go_on is not None and not go_on(int(take.sum()), ~is_open) and is_open.any():
            return [int(token) for token in ids[: is_open.argmax()]]
    return [int(token) for token in ids]


def causal(run: Run, prompt: Sequence[int]) -> None:
    """One token at a time: the autoregressive baseline of the same weights."""
    rows = list(prompt)
    while len(run.response.ids) < run.budget and not run.stopped:
        rows = step(run, rows)
    if run.keep_state:
        commit(run, rows)


def step(run: Run, rows: Sequence[int]) -> list[int]:
    """Commits rows, and from their logits emits one token, which it returns in a list."""
    return emit_next(run, commit(run, rows, keep=1))


def emit_next(run: Run, logits: Array) -> list[int]:
    """Emits the token that causal decoding draws from the last row's logits [1, 1, V]."""
    start = len(run.response.ids)
    chosen = run.response.pick(run.engine, "commit", logits, start + 1)
    taken = run.emit(chosen["ids"].tolist())
    run.tell(_step("causal", start, 0, chosen["ids"], np.ones(1, bool), chosen["confidence"]))
    return taken


def self_speculate(run: Run, prompt: Sequence[int], width: int, exact: bool) -> None:
    """Drafts from a preview, verified by one causal pass; a rejected draft costs no second pass."""
    if len(prompt) > 1:
        commit(run, prompt[:-1])
    step(run, prompt[-1:])
    while len(run.response.ids) < run.budget and not run.stopped:
        _round(run, width, exact)
    if run.keep_state:
        commit(run, run.response.ids[-1:])


def _round(run: Run, width: int, exact: bool) -> None:
    """One round from the pending (last emitted) token; commits pending and the kept drafts."""
    start, pending = len(run.response.ids), run.response.ids[-1]
    width = round_width(width, run.budget - start)
    if width > 1:
        verified(run, pending, width, exact)
        return
    run.counts.rounds += 1
    logits, turn = commit(run, [pending], keep=1), run.counts.rounds
    chosen = run.response.pick(run.engine, "commit", logits, start + 1, turn=turn)
    run.emit(chosen["ids"].tolist())
    run.tell(_step("verify", start, turn, chosen["ids"], np.ones(1, bool), chosen["confidence"]))


def verified(run: Run, pending: int, width: int, exact: bool) -> list[int]:
    """Drafts width - 1 tokens after `pending`, which is not committed yet, and verifies them.

    Emits the drafts that were kept and one token more; returns what was emitted. All of it but the
    last token is committed then, and so is pending.
    """
    start = len(run.response.ids)
    run.counts.rounds += 1
    turn = run.counts.rounds
    drafts = _draft(run, pending, width)
    new = run.engine.run("verify", {"ids": drafts[None], **run.state.feeds()})
    confirm = np.append(drafts[1:], -1)
    chosen = run.response.pick(
        run.engine, "verify", new["logits"], start + 1, draft=confirm, running=exact, turn=turn
    )
    kept = _kept(chosen, confirm, exact)
    run.counts.drafts_kept += kept
    emitted = run.emit([*drafts[1 : kept + 1].tolist(), int(chosen["ids"][kept])])
    run.counts.after_passes += len(emitted)
    sure = np.append(chosen["p_draft"][:kept], chosen["confidence"][kept])
    # Pending and all emitted but the last: that one is the next pending.
    _settle(run, len(emitted), new)
    done = np.ones(len(emitted), bool)
    run.tell(_step("verify", start, turn, np.array(emitted), done, sure[: len(emitted)]))
    return emitted


def round_width(width: int, left: int) -> int:
    """The width of a round: halved while it exceeds the tokens left."""
    while width > left:
        width //= 2
    return max(width, 1)


def _draft(run: Run, pending: int, width: int) -> Array:
    """[pending, drafts] from one preview of [pending, masks]."""
    start, turn = len(run.response.ids), run.counts.rounds
    drafts = np.full(width, run.response.rules.mask_token_id, np.int64)
    drafts[0] = pending
    # Row r counts as response position len(response) + r; row 0 is pending itself.
    chosen = run.response.pick(run.engine, "preview", preview(run, drafts), start, turn=turn)
    drafts[1:] = chosen["ids"][1:]
    guess = np.zeros(width - 1, bool)
    run.tell(_step("draft", start, turn, drafts[1:], guess, chosen["confidence"][1:]))
    return drafts


def _kept(chosen: Arrays, confirm: Array, exact: bool) -> int:
    """How many drafts are accepted before the first rejection."""
    if exact:
        good = chosen["ids"] == confirm
    else:
        p = chosen["p_draft"].astype(np.float64)
        entropy = chosen["entropy"].astype(np.float64)
        bar = np.minimum(RELEASE_RATIO, RELEASE_DELTA * np.exp(-entropy))
        good = (p > 0) & (p >= bar)
    good[-1] = False  # the last row has no draft to confirm
    return int(good.argmin())


def _settle(run: Run, rows: int, verified: Arrays) -> None:
    """Advances the state over the first `rows` rows of a verify, without touching a weight."""
    tapes = {name: x for name, x in verified.items() if name.startswith("tape.")}
    new = {name: x for name, x in verified.items() if name.endswith(".new")}
    if tapes:
        new |= run.engine.run("replay", {**run.state.recurrent(), **tapes, "rows": scalar(rows)})
    run.state.advance(rows, new)


def _step(kind: str, start: int, turn: int, ids: Array, fixed: Array, sure: Array) -> Step:
    return Step(
        kind=kind, start=start, turn=turn,
        ids=tuple(ids.tolist()), fixed=tuple(fixed.tolist()), confidence=tuple(sure.tolist()),
    )  # fmt: skip
