"""The configurations on which product and oracle must agree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests import oracle


@dataclass(frozen=True)
class Configuration:
    """A random model and what is asked of it."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    scale: float = 0.06
    prompt_lengths: tuple[int, ...] = (31,)
    budget: int = 18

    @property
    def config(self) -> oracle.Config:
        """The oracle's configuration."""
        return oracle.Config(**_SMALL | self.fields)


_PENALTIES = {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.3}
_RAMPS = {
    "length_penalty": 6.0, "length_penalty_start": 3, "length_penalty_window": 12,
    "think_end_bias": 5.0, "think_end_start": 2, "think_end_window": 6, "think_end_token_id": 260,
}  # fmt: skip


def _vocabulary(size: int) -> dict[str, int]:
    return {"vocab_size": size, "mask_token_id": size - 1}


_SMALL = {"hidden_size": 32, "moe_intermediate_size": 16, "threshold": 0.4}
"""The oracle takes one token at a time in float64: small and sure models keep it in seconds."""

CONFIGURATIONS = [
    Configuration("plain", {"block_size": 16}, prompt_lengths=(1, 33)),
    Configuration("release-ratios", {"block_size": 32, "threshold": 0.95}, budget=33),
    Configuration(
        "one-key-head",
        {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "block_size": 8},
    ),
    Configuration(
        "odd-heads",
        {"num_attention_heads": 6, "num_key_value_heads": 2, "num_experts_per_tok": 3,
         "block_size": 16}
        | _vocabulary(331),
        prompt_lengths=(32, 33),
    ),
    Configuration(
        "no-attention",
        {"num_hidden_layers": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 16,
         "linear_value_head_dim": 24, "num_experts": 7, "num_experts_per_tok": 1, "block_size": 8},
    ),
    Configuration(
        "every-second-attention",
        {"num_hidden_layers": 5, "full_attention_interval": 2, "num_key_value_heads": 1,
         "partial_rotary_factor": 0.5, "num_experts": 8, "num_experts_per_tok": 8,
         "coreset_enabled": False},
        prompt_lengths=(33,),
    ),
    Configuration(
        "attention-only",
        {"num_hidden_layers": 2, "full_attention_interval": 1, "block_size": 8},
    ),
    Configuration("top-1", {"num_experts_per_tok": 1, "block_size": 16}),
    Configuration("top-2-of-4", {"num_experts": 4, "num_experts_per_tok": 2, "block_size": 8}),
    Configuration("top-5", {"num_experts_per_tok": 5, "block_size": 16}, prompt_lengths=(1, 65)),
    Configuration("top-8", {"num_experts_per_tok": 8, "block_size": 16}),
    Configuration("tiny-coreset", {"coreset_top_p": 0.05, "block_size": 16}),
    Configuration("half-coreset", {"coreset_top_p": 0.5, "block_size": 16}),
    Configuration("whole-coreset", {"coreset_top_p": 1.0, "block_size": 16}),
    Configuration("no-coreset", {"coreset_enabled": False, "block_size": 8}),
    Configuration("threshold-0", {"threshold": 0.0, "block_size": 8}, budget=27),
    Configuration("threshold-1", {"threshold": 1.0, "block_size": 8}, budget=13),
    Configuration("penalties", {"block_size": 8, "threshold": 0.3} | _PENALTIES, budget=29),
    Configuration("ramps", {"block_size": 8, "threshold": 0.3} | _RAMPS, budget=29),
    Configuration(
        "penalties-and-ramps",
        {"block_size": 16, "threshold": 0.5} | _PENALTIES | _RAMPS,
        budget=33,
    ),
    Configuration("larger-weights", {"block_size": 16}, scale=0.15),
    Configuration("odd-vocabulary", {"block_size": 32} | _vocabulary(397), prompt_lengths=(31, 32)),
    Configuration("long-prompt", {"block_size": 16}, prompt_lengths=(300,), budget=16),
    Configuration("repeated-token", {"block_size": 16}, prompt_lengths=(-300,), budget=16),
]  # fmt: skip


def prompts(c: oracle.Config, lengths: tuple[int, ...]) -> list[list[int]]:
    """Random prompts of the given lengths; a negative one repeats a single token."""
    made = []
    for length in lengths:
        if length < 0:
            made.append([7] * -length)
        else:
            drawn = np.random.default_rng(length).integers(0, c.vocab_size - 1, length)
            made.append([int(token) for token in drawn])
    return made
