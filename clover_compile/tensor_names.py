"""Spells tensor names and paths so that long lists stay exact, short and on one line."""

from __future__ import annotations

import re
from collections.abc import Iterable

from clover_compile.runtime.strict_json import quote

# A list this long after folding says that the file is of something else altogether.
MAX_LISTED = 400
NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")


def spell(name: str) -> str:
    """A name or path as it is when harmless, else quoted, escaped and shortened."""
    harmless = name.isascii() and name.isprintable() and 0 < len(name) <= 200
    return name if harmless and not set(name) & set(';"') else quote(name)


def listed(names: Iterable[str]) -> str:
    """All names, folded, on one line."""
    folded = fold(names)
    more = len(folded) - MAX_LISTED
    return ", ".join(folded[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def fold(names: Iterable[str]) -> list[str]:
    """List names exactly but briefly: runs of numbers are joined, as in `model.layers.{0-39}.x`."""
    plain: list[tuple[str, ...]] = []
    strange: list[str] = []
    for name in names:
        if spell(name) == name:
            plain.append(tuple(name.split(".")))
        else:
            strange.append(spell(name))
    # From the last number to the first: experts join within a layer, then layers that look alike.
    for place in reversed(range(max(map(len, plain), default=0))):
        groups: dict[tuple[str, ...], set[int]] = {}
        merged: dict[tuple[str, ...], None] = {}
        for row in plain:
            if place < len(row) and NUMBER.fullmatch(row[place]):
                groups.setdefault((*row[:place], "", *row[place + 1 :]), set()).add(int(row[place]))
            else:
                merged[row] = None
        for rest, numbers in groups.items():
            merged[(*rest[:place], ranges(numbers), *rest[place + 1 :])] = None
        plain = list(merged)
    return [".".join(row) for row in plain] + strange


def ranges(numbers: Iterable[int]) -> str:
    """`7`, or `{0-3,7}`."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    spelled = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return spelled if spelled.isdecimal() else "{" + spelled + "}"
