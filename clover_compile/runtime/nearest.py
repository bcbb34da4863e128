"""What a mistyped word was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

CLOSE = 0.6
"""How alike two words must be, 0 to 1."""


def nearest(word: object, known: Iterable[str]) -> str | None:
    """The known word most like `word`, upper and lower case alike; None if none is close."""
    if not isinstance(word, str):
        return None
    spelled = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), spelled, n=1, cutoff=CLOSE)
    return spelled[found[0]] if found else None


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The same to put after the word, ` (did you mean 'x'?)`; empty if no word is close."""
    found = nearest(word, known)
    return "" if found is None else f" (did you mean {found!r}?)"
