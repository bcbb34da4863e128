"""The launcher: what it hands to a device, and the calls it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from clover_compile.runtime.launch_plan import Launch, Operand, Plan, Variant
from clover_compile.runtime.launcher import BadLaunch, bind, resolve, run


@dataclass
class Array:
    """A stand-in for a device's array."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def dense(dtype: str, *shape: int) -> Array:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    return Array(dtype, shape, tuple(strides))


@dataclass
class Recorder:
    """A device that records its launches."""

    launches: list[tuple[Any, ...]] = field(default_factory=list)

    def describe(self, array: Array) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        return array.dtype, array.shape, array.strides

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Array:
        return dense(dtype, *shape)

    def launch(
        self, launch: Launch, grid: tuple[int, int, int], arrays: Mapping[str, Any],
        integers: Mapping[str, int],
    ) -> None:  # fmt: skip
        self.launches.append((launch.kernel, grid, dict(arrays), dict(integers)))


FEW = Variant(
    "n <= 16",
    (
        Launch("m:first", ("n", 1, 1), {"a": "x", "w": "half"}, {"eps": 1e-6}, {"rows": "n"}),
        Launch("m:second", (1, "cdiv(R, 4)", 1), {"w": "half", "o": "y"}, {"k": None}),
    ),
    {"half": Operand("fp32", ("n", "2 * R"))},
)
MANY = Variant("n <= 64", (Launch("m:all", ("n", 1, 1), {"a": "x", "o": "y"}, {}),))
PLAN = Plan(
    "op",
    {"x": Operand("bf16", (1, "n", 8), 20), "p": Operand("bf16", (1, "R", 8)), "none": None},
    {"y": Operand("bf16", (1, "n", 8))},
    (FEW, MANY),
)
X, P = Array("bf16", (1, 3, 8), (60, 20, 1)), dense("bf16", 1, 9, 8)


def test_launches_in_order_with_every_size_filled_in() -> None:
    device = Recorder()
    out = run(PLAN, {"x": X, "p": P}, device)
    first, second = device.launches
    assert first[:2] == ("m:first", (3, 1, 1)) and first[3] == {"rows": 3}
    assert second[:2] == ("m:second", (1, 3, 1))
    assert first[2]["a"] is X and first[2]["w"] is second[2]["w"]
    assert first[2]["w"].shape == (3, 18)
    assert out == {"y": second[2]["o"]} and out["y"].shape == (1, 3, 8)


def test_the_first_variant_whose_guard_holds() -> None:
    assert resolve(PLAN, {"n": 16, "R": 0}).variant is FEW
    assert resolve(PLAN, {"n": 17, "R": 0}).variant is MANY
    with pytest.raises(BadLaunch, match="outside every guard"):
        resolve(PLAN, {"n": 65, "R": 0})


def test_workspace_bytes() -> None:
    assert resolve(PLAN, {"n": 3, "R": 9}).workspace_bytes() == 3 * 18 * 4


def test_json_round_trip() -> None:
    assert Plan.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        ("x", dense("bf16", 1, 3, 8), "strides"),
        ("x", Array("fp32", (1, 3, 8), (60, 20, 1)), "fp32"),
        ("x", Array("bf16", (1, 3, 9), (60, 20, 1)), "8 is 8"),
        ("x", Array("bf16", (2, 3, 8), (60, 20, 1)), "1 is 1"),
        ("x", Array("bf16", (3, 8), (20, 1)), "planned"),
        ("x", Array("bf16", (1, 3, 8), (60, 20, 2)), "strides"),
        ("x", None, "takes an array"),
        ("none", P, "takes nothing"),
    ],
)
def test_refused(name: str, array: Array | None, said: str) -> None:
    with pytest.raises(BadLaunch, match=said):
        bind(PLAN, {"x": X, "p": P, name: array}, Recorder())


def test_strides_of_single_rows_do_not_matter() -> None:
    assert bind(PLAN, {"x": Array("bf16", (1, 1, 8), (7, 7, 1)), "p": P}, Recorder())["n"] == 1


def test_strides_of_nothing_do_not_matter() -> None:
    empty = Array("bf16", (1, 0, 8), (0, 0, 0))
    assert bind(PLAN, {"x": X, "p": empty}, Recorder()) == {"n": 3, "R": 0}


def test_one_symbol_has_one_value() -> None:
    plan = replace(PLAN, inputs={"x": Operand("bf16", ("n", 4)), "p": Operand("bf16", ("n", 4))})
    with pytest.raises(BadLaunch, match="n is 3"):
        bind(plan, {"x": dense("bf16", 3, 4), "p": dense("bf16", 5, 4)}, Recorder())


def test_a_call_without_rows_launches_nothing() -> None:
    device = Recorder()
    empty = Array("bf16", (1, 0, 8), (0, 20, 1))
    assert run(PLAN, {"x": empty, "p": P}, device)["y"].shape == (1, 0, 8)
    assert not device.launches


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 65536, 1), (2**31, 1, 1)])
def test_grids_a_device_cannot_hold(grid: tuple[int, int, int]) -> None:
    variant = Variant("1", (Launch("m:k", grid, {}, {}),))
    with pytest.raises(BadLaunch, match="grid"):
        run(replace(PLAN, variants=(variant,)), {"x": X, "p": P}, Recorder())
