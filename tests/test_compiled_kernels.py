"""Every kernel and variant compiles at the released model's sizes, within its budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from clover_compile.kernels import costs, release
from clover_compile.kernels.architecture import ARCHITECTURES, CAPABILITIES, shared_limit
from clover_compile.kernels.budget import Budget
from clover_compile.kernels.compiled import Compiled, Usage, compile_launch
from clover_compile.kernels.report import kernels, main

PLACES = {place.name: place for place in release.places()}


FP8_QUICK = (90,)
QUICK = (86, 90, 100)
"""Capabilities of `make test`: the least shared memory, the two kinds of matrix instruction that
read it. `make test-all` compiles for every one."""


def _pairs() -> Iterator[Any]:
    for name, place in PLACES.items():
        quick = FP8_QUICK if place.least > CAPABILITIES[0] else QUICK
        for capability in (c for c in CAPABILITIES if c >= place.least):
            marks = [] if capability in quick else [pytest.mark.slow]
            yield pytest.param(name, capability, marks=marks)


@pytest.mark.parametrize(("name", "capability"), list(_pairs()))
def test_within_its_budget(name: str, capability: int) -> None:
    faults = [
        fault
        for kernel in kernels(PLACES[name], capability)
        for fault in kernel.budget.faults(kernel.compiled, kernel.compiled.usage())
    ]
    assert not faults


def test_a_report_of_no_place_is_refused() -> None:
    done = CliRunner().invoke(main, ["--only", "nope"])
    assert done.exit_code == 2 and "no place has 'nope' in its name; known: emb" in done.output


def test_launches_per_layer() -> None:
    made = list(costs.passes())
    assert {row["pass"] for row in made} == set(release.PASSES)
    for row in made:
        assert row["launches_per_gdn_layer"] <= costs.LAUNCHES_PER_LAYER, row
        assert row["launches_per_attention_layer"] <= costs.LAUNCHES_PER_LAYER, row


def test_launches_per_layer_of_a_prompt() -> None:
    by_name = {place.name: place for place in release.places()}
    for members in release.PASSES["commit"][:2]:
        count = sum(costs.cost(by_name[name], 1000, 1024, 256).launches for name in members)
        assert count <= costs.LAUNCHES_PER_LAYER, members


def test_bytes_of_a_preview_by_hand() -> None:
    """An independent count of the weights a preview must read, 48 experts kept per layer."""
    hidden, wide = 2048, 8192 + 4096 + 32
    gdn = hidden * wide + 4096 * hidden
    attention = hidden * (2 * 4096 + 2 * 512) + 4096 * hidden
    experts = 48 * 3 * 512 * hidden + 3 * 512 * hidden + 257 * hidden
    weights = 2 * (30 * gdn + 10 * attention + 40 * experts + hidden * 248_320)
    row = next(x for x in costs.passes() if x["pass"] == "preview" and x["experts"] == 48)
    assert weights < row["bytes"] < 1.12 * weights


def _compiled(shared: int = 0, capability: int = 90) -> Compiled:
    return Compiled("k", capability, b"", "", shared, 4, 0)


def _usage(registers: int = 10, stack: int = 0, **opcodes: int) -> Usage:
    return Usage(registers, stack, 0, opcodes)


@pytest.mark.parametrize(
    ("compiled", "usage", "said"),
    [
        (_compiled(shared_limit(90) + 1), _usage(HGMMA=1), "shared"),
        (_compiled(shared_limit(86) + 1, 86), _usage(), "shared"),
        (replace(_compiled(), tensor_memory=513), _usage(HGMMA=1), "tensor memory"),
        (replace(_compiled(), scratch=128), _usage(HGMMA=1), "scratch"),
        (_compiled(), _usage(65, HGMMA=1), "registers"),
        (_compiled(), _usage(stack=8, HGMMA=1), "stack"),
        (_compiled(), _usage(HGMMA=1, LDL=1), "LDL"),
        (_compiled(), _usage(HGMMA=1, STL=2), "STL"),
        (_compiled(), _usage(HGMMA=1, FFMA=101), "FFMA"),
        (_compiled(), _usage(HMMA=4), "HGMMA"),
    ],
)
def test_a_broken_budget_is_named(compiled: Compiled, usage: Usage, said: str) -> None:
    budget = Budget(registers=64, required={90: "HGMMA"}, ffma=100)
    (fault,) = budget.faults(compiled, usage)
    assert said in fault and "k: " in fault
    assert not list(budget.faults(_compiled(shared_limit(90)), _usage(64, HGMMA=1, FFMA=100)))


def test_a_kernel_over_the_shared_memory_limit_fails_by_name() -> None:
    """Compiled for real: the compiler itself does not complain."""
    place = PLACES["gdn-out"]
    plan = place.plan(86)
    variant = plan.variants[-1]
    launch = replace(variant.launches[0], stages=12)
    compiled = compile_launch(plan, variant, launch, 86)
    assert compiled.shared > shared_limit(86)
    faults = list(Budget(registers=255).faults(compiled, compiled.usage()))
    assert any("shared memory" in fault and compiled.key in fault for fault in faults)


def test_architectures_name_capabilities_that_are_compiled() -> None:
    assert {gpu.capability for gpu in ARCHITECTURES.values()} == set(CAPABILITIES)
