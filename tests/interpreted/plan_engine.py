"""A runner engine that runs every fused op and every matrix product by its launch plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx
from torch.export.graph_signature import InputKind

from clover_compile.kernels.interpreter import Interpreter
from clover_compile.kernels.plans import plan_of
from clover_compile.kernels.table import OPS, fused_op
from clover_compile.runtime.launcher import run
from clover_compile.unit import Source, Unit

Array = NDArray[Any]


class _Planned(fx.Interpreter):
    """Runs a Unit's graph; ops with a launch plan go through the launcher."""

    def __init__(self, module: torch.nn.Module, device: Interpreter, calls: Counter[str]) -> None:
        super().__init__(module)
        self.device, self.calls = device, calls

    def run_node(self, n: fx.Node) -> Any:
        target = str(n.target)
        name = target.split(".")[1] if target.startswith("clover.") else ""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.op == "call_function" and name in OPS:
            assert not kwargs
            return self._fused(n, name, list(args))
        if target == "aten.linear.default":
            x, weight = args
            return self._planned("projection", [x.contiguous(), weight, False], ("y",))["y"]
        assert not name, f"{target} has no launch plan"
        return super().run_node(n)

    def _fused(self, n: fx.Node, name: str, args: list[Any]) -> Any:
        op = fused_op(name)
        args += [None] * (len(op.parameters) - len(args))
        if len(op.outputs) == 1:
            return self._planned(name, args, op.outputs)[op.outputs[0]]
        used = {user.args[1] for user in n.users}
        wanted = tuple(out for i, out in enumerate(op.outputs) if i in used)
        got = self._planned(name, args, wanted)
        return tuple(got.get(out) for out in op.outputs)

    def _planned(self, name: str, args: Sequence[Any], wanted: Sequence[str]) -> dict[str, Tensor]:
        op = fused_op(name)
        plan = plan_of(op, args, wanted)
        named = dict(zip(op.parameters, args, strict=True))
        self.calls[name] += 1
        return run(plan, {k: named[k] for k in plan.inputs}, self.device)


class PlanEngine:
    """The engine protocol over fused Units, interpreted."""

    def __init__(self, units: Mapping[str, Unit], source: Source) -> None:
        self.units, self.source = units, source
        self.device, self.calls = Interpreter(), Counter[str]()

    def run(
        self, unit: str, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """Runs one Unit; arrays as the engine protocol states them."""
        found = self.units[unit]
        given = iter([torch.from_numpy(np.array(feeds[name])) for name in found.inputs])
        values: list[Any] = []
        for spec in found.program.graph_signature.input_specs:
            if spec.kind == InputKind.USER_INPUT:
                values.append(next(given))
            elif spec.arg.name in found.weights:
                values.append(found.weights[spec.arg.name].evaluate(self.source))
            else:
                values.append(found.program.constants[str(spec.target)])
        planned = _Planned(found.program.graph_module, self.device, self.calls)
        with torch.no_grad():
            results = planned.run(*values)
        wanted = found.outputs if outputs is None else outputs
        made = zip(found.outputs, results, strict=True)
        return {name: x.numpy() for name, x in made if name in wanted}
