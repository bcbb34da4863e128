"""Every error explains itself, and docs/errors.md is what the classes say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clover_compile import error_catalogue
from clover_compile.errors import CloverError

ROOT = Path(__file__).parents[1]
CLASSES = [error for _, module in error_catalogue.GROUPS for error in error_catalogue.of(module)]

ADVICE = re.compile(
    r"\b(?:build|check|choose|correct|do not|fetch|find|get|give|install|leave|make|mend|name|prove"
    r"|remove|report|restore|run|start)\b"
)
"""A template must tell the reader to do something."""


def _below(base: type[CloverError]) -> set[type[CloverError]]:
    found = {base}
    for one in base.__subclasses__():
        if one.__module__.startswith("clover_compile"):
            found |= _below(one)
    return found


def test_the_catalogue_is_current() -> None:
    kept = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert kept == error_catalogue.render(), "python -m clover_compile.error_catalogue"


def test_every_class_is_in_it() -> None:
    bases = {"CloverError", "InputError", "RunError", "BuildError"}
    assert {c.__name__ for c in _below(CloverError)} == {c.__name__ for c in CLASSES} | bases


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_an_error_says_what_where_and_what_to_do(error: type[CloverError]) -> None:
    assert vars(error).get("__doc__"), "no docstring of its own"
    assert "template" in vars(error)
    assert "\n" not in error.template and error.template.isascii()
    assert "{" in error.template, "it does not say where"
    advice = error_catalogue.says(error).rpartition("; ")[2]
    assert ADVICE.search(advice), "it does not end with what to do"
    assert error.exit_status in (1, 2)
