"""A headless browser for tests of pages, where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_MESSAGE = re.compile(r":CONSOLE(?::|\()\d+\)?\] (?P<text>.*)")


def browser() -> str:
    """The command of an installed browser; skips the test where there is none."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    pytest.skip(f"no headless browser here; any of {', '.join(NAMES)} would do")


def opened(page: Path, width: int, folder: Path, height: int = 900) -> tuple[str, list[str], Path]:
    """The page's tree once it has loaded, what its console said, and a picture of it."""
    picture = folder / f"{page.stem}-{width}.png"
    common = [
        browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--hide-scrollbars", "--enable-logging=stderr", "--v=0", f"--window-size={width},{height}",
        f"--user-data-dir={folder / 'browser'}", "--virtual-time-budget=3000",
    ]  # fmt: skip
    shown, tree = (
        subprocess.run(
            [*common, what, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
        )
        for what in (f"--screenshot={picture}", "--dump-dom")
    )
    console = [match["text"] for match in _MESSAGE.finditer(shown.stderr + tree.stderr)]
    return tree.stdout, console, picture
