"""Reads the programs and plans of a Triton bundle; a file that holds none is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from clover_compile.runtime.errors import BadBundle
from clover_compile.runtime.expressions import BadExpression
from clover_compile.runtime.launch_plan import Plan
from clover_compile.runtime.manifest import Checked
from clover_compile.runtime.strict_json import JsonFault, read_json
from clover_compile.runtime.terminal import one_line
from clover_compile.runtime.unit_program import UnitProgram

Made = TypeVar("Made")

WRONG = (KeyError, TypeError, ValueError, AttributeError, IndexError, BadExpression, JsonFault)
"""What a reader trips over in a file that is no program."""


def guarded(checked: Checked, name: str, read: Callable[[], Made]) -> Made:
    """What `read` gives; BadBundle naming the file `name` if it holds something else."""
    try:
        return read()
    except WRONG as error:
        fault = f"{name}: {type(error).__name__}: {error}"
        raise BadBundle(one_line(str(checked.path)), one_line(fault)[:200]) from None


def read_table(checked: Checked, name: str) -> dict[str, Any]:
    """A JSON object of the bundle."""
    return guarded(checked, name, lambda: read_json(checked.path / name))


def read_programs(checked: Checked) -> dict[str, UnitProgram]:
    """Unit -> its program."""
    return {
        name: guarded(
            checked, unit["file"],
            lambda unit=unit: UnitProgram.from_json(read_json(checked.path / unit["file"])),  # type: ignore[misc]
        )
        for name, unit in checked.manifest["units"].items()
    }  # fmt: skip


def read_plans(checked: Checked) -> dict[str, Plan]:
    """Key of a plan -> the plan."""
    described = read_table(checked, "plans.json")
    return guarded(
        checked, "plans.json", lambda: {k: Plan.from_json(x) for k, x in described.items()}
    )
