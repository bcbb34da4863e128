"""Compares installed packages with the ranges a bundle accepts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata

from clover_compile.runtime.strict_json import quote

_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_CLAUSE = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*([0-9]{1,9}(?:\.[0-9]{1,9})*)\s*")
_RELEASE = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})*")


def version_faults(accepts: Mapping[str, object]) -> list[str]:
    """What is wrong with the packages installed here, each with the version found, the range
    wanted (as in ">=1.24,<2") and the remedy.
    """
    faults = []
    for package, wanted in accepts.items():
        if not _PACKAGE.fullmatch(package) or not isinstance(wanted, str) or not _clauses(wanted):
            faults.append(f"manifest.json: accepts {quote(package)}: {quote(wanted)} is no range")
            continue
        remedy = f"pip install '{package}{wanted}'"
        found = _installed(package)
        if found is None:
            faults.append(f"needs {package} {wanted}, which is not installed; {remedy}")
        elif not inside(found, wanted):
            faults.append(
                f"{package} {quote(found, 40)} is installed, the bundle accepts {wanted}; {remedy}"
            )
    return faults


def inside(version: str, wanted: str) -> bool:
    """Whether a version lies in a range; only its release numbers count (1.25.0rc1 is 1.25.0)."""
    start = _RELEASE.match(version)
    clauses = _clauses(wanted)
    if start is None or not clauses:
        return False
    have = _numbers(start[0])
    return all(_holds(have, sign, bound) for sign, bound in clauses)


def _installed(package: str) -> str | None:
    try:
        # A damaged installation has a folder but no version.
        return metadata.version(package) or None
    except (metadata.PackageNotFoundError, KeyError):
        return None


def _clauses(wanted: str) -> list[tuple[str, tuple[int, ...]]]:
    """The clauses of a range; empty if one of them cannot be read."""
    found = [_CLAUSE.fullmatch(part) for part in wanted.split(",")]
    return [(m[1], _numbers(m[2])) for m in found if m] if all(found) else []


def _numbers(text: str) -> tuple[int, ...]:
    """Release numbers without trailing zeros, so that 2 and 2.0 are equal."""
    numbers = [int(part) for part in text.split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _holds(have: tuple[int, ...], sign: str, bound: tuple[int, ...]) -> bool:
    # Without trailing zeros tuples order as versions do.
    return {
        ">=": have >= bound,
        "<=": have <= bound,
        "==": have == bound,
        "!=": have != bound,
        ">": have > bound,
        "<": have < bound,
    }[sign]
