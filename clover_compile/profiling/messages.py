"""The messages a workload is made of: a JSON Lines file, or those a bundled model comes with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clover_compile.checkpoint import Checkpoint
from clover_compile.errors import BadMessages
from clover_compile.runtime.nearest import did_you_mean
from clover_compile.runtime.strict_json import JsonFault, parse_value, quote, read_file
from clover_compile.tensor_names import spell

MESSAGES = "messages.jsonl"
MAX_BYTES = 64 << 20
KEYS = ("prompt", "answer")


@dataclass(frozen=True)
class Message:
    """One request, and the answer it should get where that is known."""

    prompt: str | tuple[dict[str, Any], ...]
    """A user's text, or a conversation."""
    answer: str | None = None


@dataclass(frozen=True)
class Messages:
    """What a workload asks."""

    source: str
    """The file, or the bundled model."""
    sha256: str
    """Of the file."""
    asked: tuple[Message, ...]


def read(path: Path, count: int) -> Messages:
    """The first `count` messages of a file: a line is an object with `prompt`, a text or a list of
    {role, content}, and perhaps `answer`. Raises BadMessages.
    """
    where = spell(str(path))
    try:
        data = read_file(path, MAX_BYTES)
        lines = data.decode("utf-8").splitlines()
    except (JsonFault, UnicodeDecodeError) as fault:
        raise BadMessages(path=where, reason=fault) from None
    asked: list[Message] = []
    for number, line in enumerate(filter(str.strip, lines), 1):
        if len(asked) == count:
            break
        try:
            asked.append(_message(parse_value(line.encode())))
        except (JsonFault, ValueError) as fault:
            raise BadMessages(path=where, reason=f"line {number}: {fault}") from None
    if not asked:
        raise BadMessages(path=where, reason="it holds no message")
    return Messages(path.name, hashlib.sha256(data).hexdigest(), tuple(asked))


def bundled(checkpoint: Checkpoint | None, count: int) -> Messages | None:
    """The demonstration messages of the model, if it comes with any."""
    if checkpoint is None or not (checkpoint.folder / MESSAGES).is_file():
        return None
    return read(checkpoint.folder / MESSAGES, count)


def _message(value: object) -> Message:
    if not isinstance(value, dict) or "prompt" not in value:
        raise ValueError(f"{quote(value, 60)} is not an object with a prompt")
    if unknown := next((key for key in value if key not in KEYS), None):
        raise ValueError(f"{quote(unknown, 60)} is unknown{did_you_mean(unknown, KEYS)}")
    prompt, answer = value["prompt"], value.get("answer")
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f"answer is {quote(answer, 60)}, not a text")
    if isinstance(prompt, str):
        return Message(prompt, answer)
    if isinstance(prompt, list) and prompt and all(isinstance(x, dict) for x in prompt):
        return Message(tuple(prompt), answer)
    raise ValueError(f"prompt is {quote(prompt, 60)}, not a text or a conversation")
