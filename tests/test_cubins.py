"""Kernels over their budget: refused where it binds, told and noted elsewhere."""

from __future__ import annotations

import pytest

from clover_compile.errors import KernelsOverBudget
from clover_compile.kernels import budget, release
from clover_compile.targets import cubins

TIGHT = budget.Budget(registers=1)


def test_a_budget_binds_at_released_sizes_on_the_triton_it_was_set_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = next(place for place in release.places() if place.name == "rms_norm").plan(90)
    monkeypatch.setattr(cubins, "budget_of", lambda kernel: TIGHT)
    assert budget.binding() and cubins.is_released(plan)
    with pytest.raises(KernelsOverBudget, match=r"add_norm-sm90-\w+: \d+ registers, at most 1"):
        cubins.compile_plans({"norm": plan}, 90, "triton-h100", lambda line: None)

    monkeypatch.setattr(budget, "SET_ON", "3.1")
    said: list[str] = []
    made = cubins.compile_plans({"norm": plan}, 90, "triton-h100", said.append)
    assert all(row["over_budget"] for row in made.rows.values())
    assert said[-1].strip().startswith(f"{len(made.rows)} of {len(made.rows)} kernels miss")
