"""Feeds of the `pick` Unit: the response so far, the penalties and the noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clover_compile.runtime.engine import Array, Arrays, Engine, Sizes, scalar
from clover_compile.runtime.errors import NotANumber
from clover_compile.runtime.rules import GenerationRules


@dataclass(frozen=True)
class Sampling:
    """How an id is drawn; temperature 0 takes the most probable one."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class Response:
    """The tokens emitted so far and how often each occurs."""

    def __init__(self, sizes: Sizes, rules: GenerationRules, sampling: Sampling) -> None:
        self.rules, self.sampling = rules, sampling
        self.ids: list[int] = []
        self.counts = np.zeros((1, sizes.vocab_size), np.int32)
        self.scalars = np.array(
            [
                rules.presence_penalty, rules.frequency_penalty, rules.repetition_penalty,
                rules.length_penalty, rules.length_penalty_start, rules.length_penalty_window,
                rules.think_end_bias, rules.think_end_start, rules.think_end_window,
                sampling.temperature, sampling.top_k, sampling.top_p,
            ],
            np.float32,
        )  # fmt: skip

    def extend(self, ids: Sequence[int]) -> None:
        """Appends emitted tokens."""
        self.ids.extend(ids)
        np.add.at(self.counts[0], list(ids), 1)

    def pick(
        self, engine: Engine, unit: str, logits: Array, first: int, *,
        draft: Array | None = None, running: bool = False, block: Sequence[int] = (), turn: int = 0,
    ) -> Arrays:  # fmt: skip
        """Chooses a token for each row of logits [1, n, V]; row 0 takes response position `first`.

        `draft` [n] are ids the rows must confirm (-1: none); `block` are ids beside the response
        that may hold the think-end id; `turn` is the pass number, for the noise. Raises NotANumber
        naming the Unit the logits came from.
        """
        rows, end = logits.shape[1], self.rules.think_end_token_id
        open_ = end is not None and self.counts[0, end] == 0 and end not in block
        feeds = {
            "logits": logits,
            "counts": self.counts,
            "row0": scalar(first),
            "close_open": np.array([open_]),
            "scalars": self.scalars,
            "draft": np.full((1, rows), -1, np.int64) if draft is None else draft[None],
            "running": np.array(running),
            "noise": self._noise(first, rows, turn),
        }
        chosen = {name: x[0] for name, x in engine.run("pick", feeds).items()}
        bad = np.isnan(chosen["confidence"])
        if bad.any():
            row = int(bad.argmax())
            raise NotANumber(unit=unit, turn=turn, row=row, position=first + row)
        return chosen

    def _noise(self, first: int, rows: int, turn: int) -> Array:
        """Uniform noise that depends on seed, response row and pass alone."""
        out = np.zeros((1, rows), np.float32)
        if self.sampling.temperature > 0:
            for j in range(rows):
                counter = np.random.Philox(key=self.sampling.seed, counter=[first + j, turn, 0, 0])
                # 24 bits: a float32 below 1 whatever the draw.
                out[0, j] = (int(counter.random_raw()) >> 40) / (1 << 24)
        return out
