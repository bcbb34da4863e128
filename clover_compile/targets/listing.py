"""The table that `clover-compile targets` prints: a group per kind of output, a line per target."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from clover_compile.targets.table import Row

COLUMNS = 80
HEAD = ("target", "weights", "builds here", "runs on")
GAP = 2


def render(rows: Mapping[str, Row]) -> str:
    """No line is wider than COLUMNS; the last column is broken where it must be."""
    cells = {name: _cells(name, row) for name, row in rows.items()}
    table = [HEAD, *cells.values()]
    widths = [max(len(cell[i]) for cell in table) + GAP for i in range(len(HEAD) - 1)]
    lines = list(_line(HEAD, widths))
    for emits, names in itertools.groupby(rows, key=lambda name: rows[name].emits):
        lines += ["", *textwrap.wrap(emits, COLUMNS)]
        for name in names:
            lines += _line(cells[name], widths)
    return "\n".join([*lines, *_missing(rows)])


def _cells(name: str, row: Row) -> tuple[str, str, str, str]:
    return name, " ".join(row.dtypes), "no" if row.missing() else "yes", row.runs_on


def _line(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    left = "".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False))
    indent = " " * len(left)
    yield from textwrap.wrap(left + cells[-1], COLUMNS, subsequent_indent=indent)


def _missing(rows: Mapping[str, Row]) -> Iterable[str]:
    """What to install, by the targets that lack it."""
    lacking: dict[tuple[str, ...], list[str]] = {}
    for name, row in rows.items():
        if row.missing():
            lacking.setdefault(row.missing(), []).append(name)
    for packages, names in lacking.items():
        words = f"no: {', '.join(names)} lack{'s' if len(names) == 1 else ''} the module"
        words += f"{'s' if len(packages) > 1 else ''} {', '.join(packages)}"
        yield from ["", *textwrap.wrap(words, COLUMNS, break_on_hyphens=False)]
