"""The calls that decoding makes of a bundle's Units, and what each is fed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clover_compile.runtime.engine import Array, Arrays, Engine, scalar
from clover_compile.runtime.pick import Response, Sampling
from clover_compile.runtime.rules import GenerationRules
from clover_compile.runtime.session import Session
from clover_compile.runtime.state import State

PREFIX = 512
"""Committed rows before every call, or half the context where that is less."""

VERIFIED = 16
"""Rows of the round of self-speculation that is looked at closely."""


@dataclass(frozen=True)
class Call:
    """One kind of call."""

    unit: str
    rows: int
    keep: int = 0
    """Rows of logits of a commit."""

    @property
    def name(self) -> str:
        """`preview, 32 rows`."""
        plural = "" if self.rows == 1 else "s"
        return f"{self.unit}, {self.rows} row{plural}"


def main_calls(block_size: int, replays: bool) -> tuple[Call, ...]:
    """What is looked at op by op: a pass, the commit of its block, a step, and a round's parts."""
    calls = (
        Call("preview", block_size), Call("commit", block_size), Call("commit", 1, 1),
        Call("verify", VERIFIED), Call("replay", VERIFIED), Call("pick", block_size),
    )  # fmt: skip
    return tuple(call for call in calls if replays or call.unit != "replay")


class Scene:
    """A sequence in mid-generation, from which any call can be fed."""

    def __init__(self, session: Session, text: Sequence[int]) -> None:
        """`text`: ids of some real text, repeated as need be."""
        self.engine: Engine = session.engine
        self.rules: GenerationRules = session.rules
        self.prefix = min(PREFIX, session.context // 2)
        self._text, self._sizes = list(text), session.sizes
        self.state: State = session.new_state()
        session.commit(self.state, self.ids(self.prefix))
        self.recurrent = self.state.recurrent()

    def ids(self, rows: int, start: int = 0) -> list[int]:
        """So many ids of the text from a position on."""
        return [self._text[(start + i) % len(self._text)] for i in range(rows)]

    def feeds(self, call: Call) -> Arrays:
        """What the call is fed: text, or for a preview one token and masks after it."""
        if call.unit == "replay":
            verified = self.engine.run("verify", self.feeds(Call("verify", call.rows)))
            tapes = {name: x for name, x in verified.items() if name.startswith("tape.")}
            return {**self.recurrent, **tapes, "rows": scalar(call.rows)}
        if call.unit == "pick":
            logits = self.engine.run("preview", self.feeds(Call("preview", call.rows)))["logits"]
            return _Noted(self._sizes, self.rules).feeds(logits)
        ids = self.ids(call.rows, self.prefix)
        if call.unit == "preview":
            ids = [ids[0], *[self.rules.mask_token_id] * (call.rows - 1)]
        made: Arrays = {"ids": np.array([ids], np.int64), **self.state.feeds()}
        if call.unit == "commit":
            made["keep"] = np.array(call.keep, np.int32)
        return made


class _Noted(Response):
    """A response that tells what it would feed `pick`."""

    def __init__(self, sizes: object, rules: GenerationRules) -> None:
        super().__init__(sizes, rules, Sampling())  # type: ignore[arg-type]
        self._fed: Arrays = {}

    def feeds(self, logits: Array) -> Arrays:
        """The feeds of a greedy choice from logits [1, n, V]."""
        self.pick(self, "preview", logits, 1)
        return self._fed

    def run(self, unit: str, feeds: Arrays, outputs: Sequence[str] | None = None) -> Arrays:
        """Stands for an engine."""
        self._fed = feeds
        return {"confidence": np.zeros((1, 1), np.float32)}
