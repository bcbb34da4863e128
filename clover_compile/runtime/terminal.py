"""Makes text that nobody vouches for safe to show on a terminal."""

from __future__ import annotations

import re

# C0 but tab and newline, DEL, C1, the bidirectional overrides that hide what a line says, line and
# paragraph separators, and lone surrogates, which no stream can encode.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """`text` with every control character but newline and tab spelled out, as in `\\x1b`."""
    return _UNSAFE.sub(lambda found: _spelled(found[0]), text)


def one_line(text: str) -> str:
    """The same on a single line: newlines and tabs are spelled out too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
