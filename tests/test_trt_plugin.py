"""The TensorRT plugin's own logic, compared with the runner's: expressions, plans, launches."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from clover_compile.errors import NoCompiler, PluginFailed
from clover_compile.kernels import release
from clover_compile.kernels.compiled import function
from clover_compile.runtime.expressions import BadExpression
from clover_compile.runtime.expressions import evaluate as meant
from clover_compile.runtime.launch_plan import ITEMSIZE, Launch, Operand, Plan
from clover_compile.runtime.launcher import BadLaunch, Resolved
from clover_compile.runtime.launcher import resolve as launcher_resolve
from clover_compile.targets.cubins import plan_key
from clover_compile.targets.trt import library as plugin_library
from clover_compile.targets.trt.node import Attributes, attributes
from tests.trt_toys import evaluate, hollow_cubins, plugin, resolve

VECTORS = json.loads((Path(__file__).parent / "vectors" / "expressions.json").read_text())
PLACES = {place.name: place for place in release.places()}
ROWS = (1, 2, 5, 8, 9, 15, 16, 17, 32, 33, 64, 65, 255, 256, 1000)
PREFIXES = (0, 1, 127, 4096, 262_144)
ALIASES = {"new_ring": "ring", "new_state": "state"}


@pytest.fixture(scope="module", autouse=True)
def _plugin() -> None:
    try:
        plugin()
    except NoCompiler as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["expression"] or "empty")
def test_vector(vector: dict[str, Any]) -> None:
    if vector.get("error"):
        with pytest.raises(ValueError):
            evaluate(vector["expression"], vector["names"])
    else:
        assert evaluate(vector["expression"], vector["names"]) == vector["value"]


def _sum(r: random.Random, depth: int) -> str:
    if depth == 0 or r.random() < 0.3:
        return r.choice(["n", "R", "k", str(r.randrange(40)), str(2 ** r.randrange(63))])
    a, b = _sum(r, depth - 1), _sum(r, depth - 1)
    form = r.choice(["{}+{}", "{} - {}", "({}) * {}", "({})//({})", "cdiv({}, {})", "min({},{})",
                     "max({}, {})"])  # fmt: skip
    return form.format(a, b)


def test_both_evaluators_agree_on_random_expressions() -> None:
    r = random.Random(0)
    refused = 0
    for _ in range(3000):
        text = _sum(r, 4)
        if r.random() < 0.3:
            text = f"{text} {r.choice(['<=', '<', '>=', '>', '=='])} {_sum(r, 2)} and {_sum(r, 1)}"
        names = {"n": r.randrange(-5, 300), "R": r.randrange(3), "k": 2 ** r.randrange(40)}
        try:
            value = meant(text, names)
        except BadExpression:
            refused += 1
            with pytest.raises(ValueError):
                evaluate(text, names)
        else:
            assert evaluate(text, names) == value, (text, names)
    assert 100 < refused < 2000


def _contiguous(plan: Plan) -> Plan:
    """The plan for arrays as engines have them."""

    def dense(x: Operand | None) -> Operand | None:
        return None if x is None else replace(x, stride=None)

    return replace(plan, inputs={name: dense(x) for name, x in plan.inputs.items()})


def _node(name: str, *capabilities: int) -> tuple[dict[int, Plan], Attributes]:
    plans = {c: _contiguous(PLACES[name].plan(c)) for c in capabilities}
    cubins = {c: hollow_cubins({plan_key(p): p}, c) for c, p in plans.items()}
    aliases = {k: v for k, v in ALIASES.items() if k in plans[capabilities[0]].outputs}
    return plans, attributes(plans, cubins, aliases if name.startswith("gdn_scan") else {})


def _shapes(plan: Plan, symbols: dict[str, int]) -> list[list[int]]:
    return [[symbols[x] if isinstance(x, str) else x for x in operand.shape]
            for operand in plan.inputs.values() if operand is not None]  # fmt: skip


def _workspace(plan: Plan, call: Resolved, aliased: set[str]) -> int:
    """Scratch and staged outputs, each in whole pieces of 256 bytes."""
    arrays = [*call.variant.workspace.values(), *(plan.outputs[name] for name in sorted(aliased))]
    return sum(-(-prod(call.shape(x)) * ITEMSIZE[x.dtype] // 256) * 256 for x in arrays)


def _arguments(plan: Plan, call: Resolved, launch: Launch) -> list[list[Any]]:
    """What the kernel is handed, in the order of its signature."""
    inputs = [name for name, operand in plan.inputs.items() if operand is not None]
    groups = (("input", inputs), ("output", list(plan.outputs)),
              ("scratch", list(call.variant.workspace)))  # fmt: skip
    made: list[list[Any]] = []
    for parameter in function(launch.kernel).arg_names:
        if parameter in launch.integers:
            made.append(["integer", call.size(launch.integers[parameter])])
        elif parameter in launch.arguments:
            array = launch.arguments[parameter]
            made += [[kind, names.index(array)] for kind, names in groups if array in names]
    return made


@pytest.mark.parametrize("name", PLACES)
def test_launches_are_those_of_the_runner(name: str) -> None:
    """Every place of the released model, over rows and prefixes, for two GPUs in one node."""
    plans, made = _node(name, 89, 90)
    aliased = {k for k in ALIASES if k in plans[89].outputs and name.startswith("gdn_scan")}
    seen = set()
    for capability, plan in plans.items():
        symbols = {x for o in plan.inputs.values() if o for x in o.shape if isinstance(x, str)}
        for rows in ROWS:
            for prefix in PREFIXES if "R" in symbols else (0,):
                values = {"n": rows, "R": prefix}
                shapes = _shapes(plan, values)
                try:
                    call = launcher_resolve(plan, {k: values[k] for k in symbols})
                except BadLaunch:
                    with pytest.raises(ValueError, match="outside every variant's guard"):
                        resolve(made.plan, made.cubins, capability, shapes)
                    continue
                found = resolve(made.plan, made.cubins, capability, shapes)
                assert found["variant"] == plan.variants.index(call.variant)
                assert found["workspace"] == _workspace(plan, call, aliased)
                assert [tuple(x["grid"]) for x in found["launches"]] == [
                    call.grid(x) for x in call.variant.launches
                ]
                for launch, got in zip(call.variant.launches, found["launches"], strict=True):
                    assert got["arguments"] == _arguments(plan, call, launch)
                    assert made.kernels[got["kernel"]].startswith(launch.kernel.split(":")[1])
                    seen.add(made.kernels[got["kernel"]])
    assert seen == set(made.kernels)


def test_an_empty_call_launches_nothing_and_too_large_a_grid_is_refused() -> None:
    plans, made = _node("rms_norm", 90)
    assert resolve(made.plan, made.cubins, 90, _shapes(plans[90], {"n": 0}))["launches"] == []
    wide = made.plan.replace(b'"grid":["n",1,1]', b'"grid":[1,"n * 7",1]')
    shapes = _shapes(plans[90], {"n": 10_000})
    with pytest.raises(ValueError, match="a grid of 70000 along axis 1"):
        resolve(wide, made.cubins, 90, shapes)
    with pytest.raises(ValueError, match="too large"):
        resolve(made.plan, made.cubins, 90, _shapes(plans[90], {"n": 2**40}))


def test_shapes_and_gpus_of_another_plan_are_refused() -> None:
    plans, made = _node("gdn_scan-commit", 90)
    shapes = _shapes(plans[90], {"n": 5})
    cases = (
        ([[1, 5, 8191], *shapes[1:]], 90, r"u: given \[1, 5, 8191\], planned 8192 at axis 2"),
        ([[1, 6, 8192], *shapes[1:]], 90, "planned 6 at axis 1"),
        (shapes[:-1], 90, "takes"),
        ([[1, 5], *shapes[1:]], 90, "planned with 3 dimensions"),
        (shapes, 80, "this GPU has 80"),
    )
    for given, capability, said in cases:
        with pytest.raises(ValueError, match=said):
            resolve(made.plan, made.cubins, capability, given)


def test_attributes_that_are_cut_or_changed_are_refused_or_harmless() -> None:
    """Any of them may come out of a damaged file: a fault, never a crash."""
    plans, made = _node("block_attention-causal", 86, 90)
    shapes = _shapes(plans[90], {"n": 5, "R": 9})
    for stop in range(0, len(made.plan), 7):
        with pytest.raises(ValueError):
            resolve(made.plan[:stop], made.cubins, 90, shapes)
    for stop in range(0, len(made.cubins), 50):
        with pytest.raises(ValueError, match="cut off"):
            resolve(made.plan, made.cubins[:stop], 90, shapes)
    with pytest.raises(ValueError, match="end at byte"):
        resolve(made.plan, made.cubins + b"x", 90, shapes)
    r, refused = random.Random(1), 0
    for _ in range(3000):
        text = bytearray(made.plan)
        for _ in range(r.randrange(1, 4)):
            text[r.randrange(len(text))] = r.choice(b'0123456789-{}[]",:nR xe\\\x00\xff')
        try:
            resolve(bytes(text), made.cubins, 90, shapes)
        except ValueError:
            refused += 1
    assert refused > 1000


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (b"", "ends early"),
        (b"[" * 5000, "nested too deeply"),
        (b"{}", 'lacks "op"'),
        (b'{"op": 1.5}', "not whole"),
        (b'{"op": 99999999999999999999}', "leaves 64 bits"),
    ],
)  # fmt: skip
def test_what_is_no_plan(plan: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        resolve(plan, b"", 90, [])


def test_a_machine_without_compiler_or_headers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_library, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(NoCompiler, match="no no-such-compiler; install it"):
        plugin_library.library()
    monkeypatch.undo()
    monkeypatch.setattr(plugin_library, "HEADERS", (("no_such_package", "include", "x.h"),))
    with pytest.raises(
        NoCompiler, match=r"x.h \(package no_such_package\); install it \(pip install"
    ):
        plugin_library.library()


def test_a_plugin_that_does_not_compile_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.cpp").write_text("int main( {")
    monkeypatch.setattr(plugin_library, "SOURCES", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(PluginFailed, match=r"broken.cpp:1"):
        plugin_library.library()
    assert not list((tmp_path / "cache").rglob("*.so"))
