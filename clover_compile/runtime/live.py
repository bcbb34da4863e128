"""Shows a response while it is decoded: repainted on a terminal, one line a step elsewhere."""

from __future__ import annotations

import contextlib
import shutil
import unicodedata
from collections.abc import Callable, Sequence
from typing import TextIO

from clover_compile.runtime.step import Step
from clover_compile.runtime.terminal import one_line

OPEN_ROW = "\N{LIGHT SHADE}"
PLAIN_OPEN_ROW = "_"
"""For streams that cannot encode the shade."""

_DIM, _BRIGHT, _PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[0m"

Decode = Callable[[Sequence[int]], str]


class Live:
    """An `on_step` observer that draws on a stream; close() it when the generation ends."""

    def __init__(self, stream: TextIO, decode: Decode, mask_token_id: int) -> None:
        """`decode` turns ids without the mask id into text."""
        self._stream, self._decode, self._mask = stream, decode, mask_token_id
        self._repaints = stream.isatty()
        self._painted = 0
        self._before: list[int] = []
        self._block: tuple[int, tuple[int, ...]] = (0, ())
        try:
            OPEN_ROW.encode(stream.encoding or "ascii")
            self._open = OPEN_ROW
        except (LookupError, UnicodeEncodeError):
            self._open = PLAIN_OPEN_ROW

    def __call__(self, step: Step) -> None:
        """Draws one step."""
        self._advance(step)
        with contextlib.suppress(OSError):  # a full stderr must not cost the answer
            if self._repaints:
                self._repaint(step)
            else:
                self._line(step)

    def close(self) -> None:
        """Takes the drawing off a terminal, so that the answer can be printed in its place."""
        if self._repaints:
            with contextlib.suppress(OSError):
                self._erase()
                self._stream.flush()

    def _advance(self, step: Step) -> None:
        """Keeps the ids of what came before this block; a round may be repeated or cut short."""
        start, ids = self._block
        if step.start != start:
            self._before = [*self._before[:start], *ids][: step.start]
        self._block = step.start, step.ids

    def _line(self, step: Step) -> None:
        settled = sum(step.fixed)
        head = f"{step.kind} at {step.start}, pass {step.turn + 1}, {settled}/{len(step.ids)}: "
        self._stream.write(head + "".join(text for text, _ in self._pieces(step)) + "\n")
        self._stream.flush()

    def _repaint(self, step: Step) -> None:
        """Draws as much of the end of the response as fits on the screen."""
        columns, lines = shutil.get_terminal_size()
        # A wide character that does not fit at the end of a line leaves a column empty.
        room = (columns - 1) * max(1, lines - 2) - 1
        used, kept = 0, list[str]()
        pieces = [(one_line(self._decode(self._before)), _PLAIN), *self._pieces(step)]
        for text, style in reversed(pieces):
            first = len(text)
            while first > 0 and used + _width(text[first - 1]) <= room:
                first -= 1
                used += _width(text[first])
            if first < len(text):
                kept.append(f"{style}{text[first:]}{_PLAIN}")
            if first:
                break
        self._erase()
        self._stream.write("".join(reversed(kept)))
        self._stream.flush()
        self._painted = max(used - 1, 0) // max(1, columns)

    def _erase(self) -> None:
        up = f"\x1b[{self._painted}A" if self._painted else ""
        self._stream.write(f"\r{up}\x1b[J")
        self._painted = 0

    def _pieces(self, step: Step) -> list[tuple[str, str]]:
        """The block as runs of one style: settled, not yet settled, or open."""
        runs: list[tuple[list[int], str]] = []
        for token, fixed in zip(step.ids, step.fixed, strict=True):
            style = _DIM if token == self._mask else _BRIGHT if fixed else _PLAIN
            if runs and runs[-1][1] == style:
                runs[-1][0].append(token)
            else:
                runs.append(([token], style))
        return [
            (self._open * len(ids) if style == _DIM else one_line(self._decode(ids)), style)
            for ids, style in runs
        ]


def _width(character: str) -> int:
    """Columns of a terminal that a character takes."""
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
