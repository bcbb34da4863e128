"""A language whose guesses are as good as a test wants: an engine without a model, for decoding.

The text is fixed: the token at every position. Causal rows always know the next token. A row of a
preview knows it with a chance that falls with the number of open rows before it in the block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from clover_compile.runtime.costs import CostTable
from clover_compile.runtime.engine import Array, Arrays
from clover_compile.runtime.rules import GenerationRules

VOCABULARY, MASK, STOP = 64, 63, 62
SURE, UNSURE = 0.99, 0.4

Skill = Callable[[int, int], float]
"""(position, open rows before it) -> chance that a preview knows the token."""

SIZES: Any = SimpleNamespace(
    vocab_size=VOCABULARY, layer_types=("full_attention",), num_key_value_heads=1, head_dim=1,
    linear_conv_kernel_dim=4, linear_num_value_heads=1, linear_key_head_dim=1,
    linear_value_head_dim=1, conv_dim=3, gdn_layers=(), attention_layers=(0,),
)  # fmt: skip


def rules(threshold: float = 0.9, block_size: int = 32) -> GenerationRules:
    """Rules of the language: id 62 stops."""
    return GenerationRules((STOP,), MASK, block_size, threshold)


def _chance(*key: int) -> float:
    """A number of [0, 1) that looks random and is the same for the same key."""
    return float(np.random.default_rng(key).random())


class Language:
    """The Units over a fixed text; logs (unit, rows, logits rows of a commit)."""

    def __init__(self, skill: Skill, seed: int = 0, answer: int = 0) -> None:
        """`answer`: every so many positions the text holds a stop id; 0: never."""
        self.skill, self.seed, self.answer = skill, seed, answer
        self.calls: list[tuple[str, int, int]] = []

    def token(self, position: int) -> int:
        """The text."""
        if self.answer and position % self.answer == self.answer - 1:
            return STOP
        return int(_chance(self.seed, 1, position) * STOP)

    def run(self, unit: str, feeds: Arrays, outputs: Sequence[str] | None = None) -> Arrays:
        """Runs one Unit."""
        if unit == "pick":
            self.calls.append((unit, feeds["logits"].shape[1], 0))
            return _pick(feeds)
        ids = feeds["ids"][0]
        keep = int(feeds["keep"]) if unit == "commit" else 0
        self.calls.append((unit, len(ids), keep))
        start = int(feeds["length"][0])
        if unit == "preview":
            return {"logits": self._preview(ids, start)}
        rows = np.arange(len(ids) - keep, len(ids)) if unit == "commit" else np.arange(len(ids))
        logits = [_logits(self.token(start + int(row) + 1), 0.9) for row in rows]
        made = np.array(logits, np.float32).reshape(1, len(rows), VOCABULARY)
        cache = ids.astype(np.float32)[None, :, None, None]
        return {"logits": made, "k.0.new": cache, "v.0.new": cache}

    def _preview(self, ids: Array, start: int) -> Array:
        is_open = ids == MASK
        made = []
        for row in range(len(ids)):
            position, before = start + row, int(is_open[:row].sum())
            knows = _chance(self.seed, 2, position, before) < self.skill(position, before)
            wrong = (self.token(position) + 1) % STOP
            token = self.token(position) if knows else wrong
            made.append(_logits(token, SURE if knows else UNSURE))
        return np.array(made, np.float32)[None]

    def cost(self, table: CostTable) -> float:
        """Of all calls so far."""
        return sum(table.cost(unit, rows, logits=keep > 0) for unit, rows, keep in self.calls)


def _logits(token: int, sure: float) -> Array:
    made = np.zeros(VOCABULARY, np.float32)
    made[MASK] = -30.0
    made[token] = np.log(sure * (VOCABULARY - 2) / (1 - sure))
    return made


def _pick(feeds: Arrays) -> Arrays:
    x = feeds["logits"].astype(np.float64)
    x[..., MASK] = -np.inf
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    ids = x.argmax(-1)
    draft = feeds["draft"]
    drafted = np.take_along_axis(p, np.maximum(draft, 0)[..., None], -1)[..., 0]
    confirmed = np.where(draft >= 0, drafted, 0)
    entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(-1)
    return {
        "ids": ids, "confidence": np.take_along_axis(p, ids[..., None], -1)[..., 0],
        "p_draft": confirmed, "entropy": entropy,
    }  # fmt: skip
