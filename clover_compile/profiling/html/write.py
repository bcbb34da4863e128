"""Writes report.html, report.json and receipt.json into a folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clover_compile.bundle import bundle_around
from clover_compile.errors import CannotWrite
from clover_compile.profiling.html.report import render
from clover_compile.tensor_names import spell

FILES = ("report.html", "report.json", "receipt.json")


@contextlib.contextmanager
def report_folder(folder: Path) -> Iterator[None]:
    """Makes the folder before minutes are spent on what goes into it, and takes it away again if
    nothing comes of them; raises CannotWrite."""
    if (around := bundle_around(folder)) is not None:
        reason = f"{spell(str(around))} is a bundle, which takes nothing more"
        raise CannotWrite(path=spell(str(folder)), reason=reason)
    try:
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".clover-compile"
        probe.touch()
        probe.unlink()
    except OSError as error:
        why = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise CannotWrite(path=spell(str(folder)), reason=why) from None
    for name in FILES:
        if (folder / name).exists() and not (folder / name).is_file():
            raise CannotWrite(path=spell(str(folder / name)), reason="it is no regular file")
    try:
        yield
    except BaseException:
        for path in new:
            with contextlib.suppress(OSError):  # something else came into it
                path.rmdir()
        raise


def write(folder: Path, found: Mapping[str, Any]) -> None:
    """Writes the three files; what stood there under these names is replaced."""
    shown = {name: x for name, x in found.items() if name != "receipt"}
    receipt = found["receipt"]
    brief = {name: x for name, x in receipt.items() if name != "samples"}
    page = render({**shown, "receipt": brief})
    texts = (page, json.dumps(shown, indent=1) + "\n", json.dumps(receipt, indent=1) + "\n")
    for name, text in zip(FILES, texts, strict=True):
        (folder / name).write_text(text, encoding="utf-8")
