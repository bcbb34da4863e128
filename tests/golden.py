"""Golden files: text that must not change unnoticed; CLOVER_ACCEPT=1 rewrites it."""

from __future__ import annotations

import difflib
from pathlib import Path

from clover_compile import flags

FOLDER = Path(__file__).parent / "golden"
_SHOWN = 60


def check_golden(name: str, text: str) -> None:
    """Compares `text` with tests/golden/<name>.txt; fails with the start of a unified diff."""
    path = FOLDER / f"{name}.txt"
    if flags.accept():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    known = path.read_text(encoding="utf-8") if path.exists() else ""
    if known != text:
        lines = list(
            difflib.unified_diff(
                known.splitlines(), text.splitlines(), f"golden/{path.name}", "found", lineterm=""
            )
        )
        more = [f"... {len(lines) - _SHOWN} more lines"] if len(lines) > _SHOWN else []
        diff = "\n".join(lines[:_SHOWN] + more)
        raise AssertionError(f"{name} changed; if it should, run with CLOVER_ACCEPT=1\n{diff}")
