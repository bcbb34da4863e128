"""The decoding constants of a bundle: generation.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GenerationRules:
    """Penalties, ramps and ids as the checkpoint states them."""

    stop_token_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    threshold: float
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    length_penalty: float = 0.0
    length_penalty_start: int = 8192
    length_penalty_window: int = 8192
    think_end_bias: float = 0.0
    think_end_start: int = 4096
    think_end_window: int = 4096
    think_end_token_id: int | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GenerationRules:
        """Takes every field by name; raises TypeError for a key too many or too few."""
        return cls(**{**values, "stop_token_ids": tuple(values["stop_token_ids"])})

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**dataclasses.asdict(self), "stop_token_ids": list(self.stop_token_ids)}
