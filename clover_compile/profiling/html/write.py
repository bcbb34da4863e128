"""Writes report.html, report.json and receipt.json into a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clover_compile.bundle import bundle_around
from clover_compile.errors import CannotWrite
from clover_compile.profiling.html.report import render
from clover_compile.tensor_names import spell


def require_folder(folder: Path) -> None:
    """Makes the folder, before minutes are spent on what goes into it; raises CannotWrite."""
    if (around := bundle_around(folder)) is not None:
        reason = f"{spell(str(around))} is a bundle, which takes nothing more"
        raise CannotWrite(path=spell(str(folder)), reason=reason)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".clover-compile"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise CannotWrite(path=spell(str(folder)), reason=error.strerror) from None


def write(folder: Path, found: Mapping[str, Any]) -> None:
    """Writes the three files; what stood there under these names is replaced."""
    shown = {name: x for name, x in found.items() if name != "receipt"}
    receipt = found["receipt"]
    brief = {name: x for name, x in receipt.items() if name != "samples"}
    page = render({**shown, "receipt": brief})
    (folder / "report.html").write_text(page, encoding="utf-8")
    (folder / "report.json").write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")
    (folder / "receipt.json").write_text(json.dumps(receipt, indent=1) + "\n", encoding="utf-8")
