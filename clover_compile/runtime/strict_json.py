"""Reads JSON objects from files nobody vouches for."""

from __future__ import annotations

import json
import math
from pathlib import Path

MAX_BYTES = 64 << 20
MAX_DEPTH = 64


class JsonFault(ValueError):
    """The text is not a usable JSON object; the message says why, without the file's name."""


def quote(value: object, limit: int = 80) -> str:
    """Spell any value on one short ASCII line, so that it cannot break a message."""
    try:
        text = json.dumps(value, ensure_ascii=True, default=repr)
    except (RecursionError, ValueError, TypeError):
        text = f"<{type(value).__name__}>"
    end = '..."' if text.startswith('"') else "..."
    return text if len(text) <= limit else text[: limit - len(end)] + end


def read_file(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes, or raise JsonFault."""
    # A directory, a FIFO or a dangling link must not block or raise halfway.
    if not path.is_file():
        found = "is a broken link" if path.is_symlink() else "is missing"
        raise JsonFault("is not a regular file" if path.exists() else found)
    try:
        size = path.stat().st_size
        if size > limit:
            raise JsonFault(f"holds {size} bytes, more than the {limit} allowed")
        return path.read_bytes()
    except OSError as error:
        raise JsonFault(f"cannot be read ({error.strerror})") from None


def read_json(path: Path, limit: int = MAX_BYTES) -> dict[str, object]:
    """Parse the JSON object in `path`; raises JsonFault."""
    return parse_json(read_file(path, limit))


def parse_json(data: bytes) -> dict[str, object]:
    """Parse one JSON object; raises JsonFault."""
    value = parse_value(data)
    if not isinstance(value, dict):
        raise JsonFault(f"must hold a JSON object, not {quote(value)}")
    return value


def parse_value(data: bytes) -> object:
    """Parse one JSON value or raise JsonFault.

    UTF-8, finite numbers, no key twice, at most MAX_DEPTH levels.
    """
    try:
        value: object = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_int,
        )
    except UnicodeDecodeError:
        raise JsonFault("is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise JsonFault(f"is not valid JSON ({error.msg}, {where})") from None
    except RecursionError:
        raise JsonFault(f"is nested deeper than {MAX_DEPTH} levels") from None
    _check_depth(value)
    return value


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonFault(f"holds the key {quote(key)} twice")
            seen.add(key)
    return result


def _constant(text: str) -> object:
    raise JsonFault(f"holds {text}, which is not a JSON number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise JsonFault(f"holds the number {quote(text, 40)}, which is out of range")
    return value


def _int(text: str) -> int:
    # Python refuses to convert thousands of digits; no key of ours needs twenty.
    if len(text) > 40:
        raise JsonFault(f"holds a number of {len(text)} digits")
    return int(text)


def _check_depth(value: object) -> None:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        if not inner:
            return
        level = inner
    raise JsonFault(f"is nested deeper than {MAX_DEPTH} levels")
