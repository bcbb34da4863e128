"""The attributes of a plugin node: its launch plans for one or more GPUs, and their cubins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clover_compile.kernels.compiled import operands, signature
from clover_compile.runtime.launch_plan import Launch, Operand, Plan, Variant
from clover_compile.targets.cubins import Cubins, plan_key


@dataclass(frozen=True)
class Attributes:
    """What the plugin reads; its reader is plugin/plan.cpp."""

    plan: bytes
    """JSON."""
    cubins: bytes
    """The kernels of the plan, one after the other."""
    kernels: tuple[str, ...]
    """Their keys in the same order."""


def attributes(
    plans: Mapping[int, Plan], cubins: Mapping[int, Cubins], aliases: Mapping[str, str]
) -> Attributes:
    """Attributes of a node with these plans by compute capability.

    aliases: output -> the input whose memory it takes over.
    """
    first = next(iter(plans.values()))
    made = _Writer(first, aliases)
    targets = [made.target(c, plan, cubins[c]) for c, plan in plans.items()]
    described = {
        "op": first.op,
        "inputs": [_operand(n, x) for n, x in made.inputs.items()],
        "outputs": [
            _operand(n, x) | {"alias": made.input_of(aliases.get(n))}
            for n, x in first.outputs.items()
        ],
        "kernels": list(made.kernels.values()),
        "targets": targets,
    }
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=True).encode()
    return Attributes(text, b"".join(made.code), tuple(made.kernels))


def _operand(name: str, operand: Operand) -> dict[str, Any]:
    if operand.stride is not None:
        raise ValueError(f"{name}: arrays of an engine are contiguous")
    return {"name": name, "dtype": operand.dtype, "shape": list(operand.shape)}


@dataclass
class _Writer:
    """Collects the kernels of all targets, each once."""

    plan: Plan
    aliases: Mapping[str, str]
    inputs: dict[str, Operand] = field(init=False)
    kernels: dict[str, dict[str, Any]] = field(default_factory=dict)
    code: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inputs = {name: x for name, x in self.plan.inputs.items() if x is not None}

    def input_of(self, name: str | None) -> int | None:
        return None if name is None else list(self.inputs).index(name)

    def target(self, capability: int, plan: Plan, cubins: Cubins) -> dict[str, Any]:
        if (plan.inputs, plan.outputs) != (self.plan.inputs, self.plan.outputs):
            raise ValueError(f"{plan.op}: arrays differ from one GPU to another")
        rows = zip(plan.variants, cubins.keys[plan_key(plan)], strict=True)
        return {
            "capability": capability,
            "variants": [self._variant(plan, variant, keys, cubins) for variant, keys in rows],
        }

    def _variant(
        self, plan: Plan, variant: Variant, keys: Sequence[str], cubins: Cubins
    ) -> dict[str, Any]:
        rows = zip(variant.launches, keys, strict=True)
        return {
            "guard": variant.guard,
            "scratch": [_operand(n, x) for n, x in variant.workspace.items()],
            "launches": [
                {
                    "kernel": self._kernel(key, cubins),
                    "grid": list(launch.grid),
                    "arguments": self._arguments(plan, variant, launch),
                }
                for launch, key in rows
            ],
        }

    def _kernel(self, key: str, cubins: Cubins) -> int:
        if key not in self.kernels:
            row, code = cubins.rows[key], cubins.compiled[key].cubin
            self.kernels[key] = {
                "function": row["function"], "bytes": len(code), "warps": row["warps"],
                "shared": row["shared"],
            }  # fmt: skip
            self.code.append(code)
        return list(self.kernels).index(key)

    def _arguments(self, plan: Plan, variant: Variant, launch: Launch) -> list[list[Any]]:
        places = {
            **{name: ["scratch", i] for i, name in enumerate(variant.workspace)},
            **{name: ["output", i] for i, name in enumerate(plan.outputs)},
            **{name: ["input", i] for i, name in enumerate(self.inputs)},
        }
        types = signature(launch, operands(plan, variant))
        return [
            ["integer", launch.integers[parameter]]
            if parameter in launch.integers
            else places[launch.arguments[parameter]]
            for parameter, kind in types.items()
            if kind != "constexpr"
        ]
