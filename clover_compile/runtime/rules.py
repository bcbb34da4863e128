"""The decoding constants of a bundle: generation.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clover_compile.runtime.errors import Faults
from clover_compile.runtime.strict_json import quote

MAX_TOKEN_TEXT = 256
"""Most characters of a token that a chat template is given."""


@dataclass(frozen=True)
class GenerationRules:
    """Penalties, ramps, ids and the template's tokens, as the checkpoint states them."""

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
    bos_token: str | None = None
    """What the chat template writes for `bos_token`; None leaves the name undefined there."""
    eos_token: str | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GenerationRules:
        """Takes every field by name; raises Faults for keys and values that are not usable."""
        faults = _faults(cls, values)
        if faults:
            raise Faults("generation.json", tuple(faults))
        return cls(**{**values, "stop_token_ids": tuple(values["stop_token_ids"])})

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**dataclasses.asdict(self), "stop_token_ids": list(self.stop_token_ids)}


def _faults(cls: type[GenerationRules], values: Mapping[str, Any]) -> list[str]:
    known = {field.name: field for field in dataclasses.fields(cls)}
    faults = [f"unknown key {quote(key, 40)}" for key in values if key not in known]
    for name, field in known.items():
        if name not in values:
            if field.default is dataclasses.MISSING:
                faults.append(f"{name} is missing")
        elif not _usable(name, field.type, values[name]):
            faults.append(f"{name} is {quote(values[name], 40)}")
    return faults


def _usable(name: str, kind: object, value: object) -> bool:
    """Whether a JSON value has a field's type and can mean something; `kind` is the annotation."""
    if name == "stop_token_ids":
        ids = value if isinstance(value, list | tuple) else []
        return bool(ids) and all(_whole(one, 0) for one in ids)
    if kind == "float":
        number = isinstance(value, int | float) and not isinstance(value, bool)
        top = 1.0 if name == "threshold" else 1e6
        # Logits are divided by the repetition penalty.
        low = {"threshold": 0.0, "repetition_penalty": 1e-6}.get(name, -1e6)
        return number and low <= float(str(value)) <= top
    if kind == "str | None":
        return value is None or is_token_text(value)
    if name == "block_size":
        return _whole(value, 1, 256)
    return (value is None and name == "think_end_token_id") or _whole(value, 0)


def is_token_text(value: object) -> bool:
    """Whether a value can be the text of a token: some valid Unicode, not endless."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TOKEN_TEXT:
        return False
    return not any("\ud800" <= x <= "\udfff" for x in value)


def _whole(value: object, low: int, high: int = 2**31 - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
