"""Scripts of work on sessions, and three ways to run several of them at once.

A script is a list of operations that an actor carries out on states of its own, which begin as
forks of a state that all actors of a session share. Whatever the interleaving, its record must be
bit for bit the one it leaves when it runs alone.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from clover_compile.runtime.session import Session
from clover_compile.runtime.state import FIRST_ROWS, State
from clover_compile.runtime.step import Step

Pause = Callable[[], None]
Record = list[Any]

TEXTS = (
    "The no-fly zone at Mere Island is cancelled.", "No drones within 2 km of 51.5N 0.1W.",
    "<|im_end|> is only text here",
)  # fmt: skip
WAYS: tuple[dict[str, Any], ...] = (
    {"decode": "denoise", "block_size": 4},
    {"decode": "denoise", "block_size": 4, "threshold": 0.999},
    {"decode": "denoise", "block_size": 8, "temperature": 1.0, "seed": 3},
    {"decode": "causal"},
    {"decode": "causal", "temperature": 0.9, "top_k": 20, "seed": 5},
    {"decode": "self-speculate", "accept": "exact", "width": 8},
    {"decode": "self-speculate", "accept": "release", "width": 5},
)


@dataclass(frozen=True)
class Script:
    """What one actor does: operations drawn from a seed, on one of several sessions."""

    seed: int
    session: int


def shared_states(session: Session) -> list[State]:
    """What actors fork: nothing, a few rows, and one row short of where a cache must grow."""
    states = [session.new_state() for _ in range(3)]
    for state, rows in zip(states[1:], (5, FIRST_ROWS - 1), strict=True):
        session.commit(state, _ids(session, random.Random(rows), rows))
    return states


def carry_out(
    script: Script, sessions: Sequence[Session], shared: Sequence[list[State]], pause: Pause
) -> Record:
    """Runs a script; `pause` is called between any two things that happen."""
    draw, session = random.Random(script.seed), sessions[script.session]
    record: Record = []
    states = [draw.choice(shared[script.session]).fork()]

    def step(told: Step) -> None:
        record.append(told)
        pause()

    for _ in range(draw.randint(2, 4)):
        pause()
        state = draw.choice(states)
        kind = draw.choice(("commit", "preview", "fork", "generate", "new"))
        if kind == "commit":
            record.append(session.commit(state, _ids(session, draw, draw.randint(1, 9))))
        elif kind == "preview":
            block = [session.rules.mask_token_id] * draw.randint(1, 8)
            block[0] = draw.choice((block[0], 5))
            record.append(session.preview(state, block))
        elif kind == "fork":
            states.append(state.fork())
        else:
            text = draw.random() < 0.3
            prompt = draw.choice(TEXTS) if text else _ids(session, draw, draw.randint(1, 5))
            way, budget = draw.choice(WAYS), draw.choice((1, 2, 4))
            kept = state if kind == "generate" else None
            out = session.generate(prompt, budget, state=kept, on_step=step, **way)
            counts = {k: v for k, v in out.stats.items() if k != "seconds"}
            record += [out.token_ids, out.text, out.finish_reason, counts]
    for state in states:
        record += [state.length, *snapshot(state)]
    return record


def snapshot(state: State) -> list[Any]:
    """Copies of all arrays of a state, buffers beyond its rows included."""
    arrays = {**state._recurrent, **state._cache}
    return [(name, array.copy()) for name, array in sorted(arrays.items())]


def _ids(session: Session, draw: random.Random, rows: int) -> list[int]:
    vocab, mask = session.sizes.vocab_size, session.rules.mask_token_id
    return [x + (x >= mask) for x in (draw.randrange(vocab - 1) for _ in range(rows))]


def same(one: Any, other: Any) -> bool:
    """Equality bit for bit of records and whatever stands in them."""
    if isinstance(one, np.ndarray):
        alike = isinstance(other, np.ndarray) and one.dtype == other.dtype
        return bool(alike and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, list | tuple):
        pairs = zip(one, other, strict=False)
        return type(one) is type(other) and len(one) == len(other) and all(same(*p) for p in pairs)
    return type(one) is type(other) and bool(one == other)


Job = Callable[[Pause], Record]


def by_turns(jobs: Sequence[Job], draw: random.Random) -> list[Record]:
    """One thread per job, of which exactly one runs at a time; at every pause the next is drawn."""
    baton = _Baton(len(jobs), draw)
    return _in_threads([partial(baton.hold, i, job) for i, job in enumerate(jobs)])


def at_once(jobs: Sequence[Job], draw: random.Random) -> list[Record]:
    """One thread per job, all running as the system lets them."""
    start = threading.Barrier(len(jobs))

    def run(job: Job) -> Record:
        start.wait()
        return job(lambda: None)

    return _in_threads([partial(run, job) for job in jobs])


def nested(jobs: Sequence[Job], draw: random.Random) -> list[Record]:
    """One thread: at its pauses, inside `on_step` too, a job carries out whole others."""
    waiting: Iterator[int] = iter(draw.sample(range(len(jobs)), len(jobs)))
    records: list[Record] = [[] for _ in jobs]

    def pause() -> None:
        if draw.random() < 0.3 and (i := next(waiting, None)) is not None:
            records[i] = jobs[i](pause)

    while (i := next(waiting, None)) is not None:
        records[i] = jobs[i](pause)
    return records


class _Baton:
    def __init__(self, count: int, draw: random.Random) -> None:
        self.turn = threading.Condition()
        self.draw, self.running, self.holder = draw, set(range(count)), draw.randrange(count)

    def hold(self, i: int, job: Job) -> Record:
        self._wait(i)
        try:
            return job(lambda: self._pass_on(i))
        finally:
            with self.turn:
                self.running.discard(i)
                self._next()

    def _pass_on(self, i: int) -> None:
        with self.turn:
            self._next()
        self._wait(i)

    def _next(self) -> None:
        if self.running:
            self.holder = self.draw.choice(sorted(self.running))
            self.turn.notify_all()

    def _wait(self, i: int) -> None:
        with self.turn:
            self.turn.wait_for(lambda: self.holder == i)


def _in_threads(calls: Sequence[Callable[[], Record]]) -> list[Record]:
    records: list[Record] = [[] for _ in calls]
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            records[i] = calls[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return records
