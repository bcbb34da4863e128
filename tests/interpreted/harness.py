"""Runs an op's launch plan in the interpreter and compares it with the op's reference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clover_compile.gpu_check.values import truth
from clover_compile.kernels.interpreter import Interpreter, install
from clover_compile.kernels.op import Case, FusedOp
from clover_compile.kernels.plans import plan_of
from clover_compile.runtime.launch_plan import Plan
from clover_compile.runtime.launcher import run

install()

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def arguments(op: FusedOp, case: Case, dtype: str) -> list[Any]:
    """A case's arguments, floats rounded to the storage dtype where the op stores it."""
    made = case.make(torch.Generator().manual_seed(0))
    return [
        x.to(DTYPES[dtype])
        if isinstance(x, Tensor) and x.is_floating_point() and name not in op.wide
        else x
        for name, x in zip(op.parameters, made, strict=True)
    ]


def interpret(
    op: FusedOp, args: Sequence[Any], outputs: Sequence[str] | None = None, capability: int = 90
) -> dict[str, Tensor]:
    """The op's outputs by its launch plan, which has been through JSON."""
    plan = plan_of(op, args, outputs, capability)
    plan = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    named = zip(op.parameters, args, strict=True)
    return run(plan, {k: x for k, x in named if k in plan.inputs}, Interpreter())


def check(
    op: FusedOp, args: Sequence[Any], dtype: str, outputs: Sequence[str] | None = None,
    capability: int = 90,
) -> None:  # fmt: skip
    """AssertionError unless every output is within the op's tolerance of the reference's."""
    got, meant = interpret(op, args, outputs, capability), truth(op, args)
    assert set(got) == set(op.outputs if outputs is None else outputs)
    for name, value in got.items():
        right = meant[name]
        assert value.shape == right.shape, name
        if not right.is_floating_point():
            assert torch.equal(value, right), name
            continue
        assert torch.isfinite(value).all(), f"{name} is not finite"
        if right.numel():
            error = (value.float() - right).abs().max() / right.abs().max().clamp(min=1e-30)
            assert error <= op.tolerance[dtype], f"{name}: {float(error):.2e}"


def one_sequence(op: FusedOp) -> list[Case]:
    """The op's cases that a launch plan covers: a batch of 1."""
    made = ((case, case.make(torch.Generator().manual_seed(0))) for case in op.cases())
    return [case for case, args in made if args[0].shape[0] == 1]
