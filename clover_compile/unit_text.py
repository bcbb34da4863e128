"""The canonical text of a Unit: our own printer, so that a new torch changes no snapshot."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from clover_compile.unit import Unit

_SHORT = {
    torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64",
    torch.int64: "i64", torch.int32: "i32", torch.bool: "bool",
}  # fmt: skip


def render(unit: Unit) -> str:
    """One line per input, node and output; weights are quoted, symbols have declared names."""
    printer = _Printer(unit)
    lines = [f"unit {unit.name}"]
    lines += [
        printer.line(node)
        for node in unit.graph.nodes
        if node.op != "placeholder" or printer.shown(node)
    ]
    return "\n".join(lines) + "\n"


class _Printer:
    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.names: dict[fx.Node, str] = {}
        self.users = list(unit.program.graph_signature.user_inputs)
        self.symbols: dict[str, str] = dict(unit.dimensions)

    def shown(self, node: fx.Node) -> bool:
        if node.name in self.unit.weights:
            self.names[node] = f'"{self.unit.weights[node.name].name}"'
            return False
        return True

    def line(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            if node.name in self.users:
                label = self.unit.inputs[self.users.index(node.name)]
                self.names[node] = f"%{label}"
                return f"  input %{label} : {self.kind(node.meta.get('val'))}"
            number = sum(name.startswith("%constant") for name in self.names.values())
            self.names[node] = f"%constant{number}"
            return f"  constant {self.names[node]} : {self.kind(node.meta.get('val'))}"
        if node.op == "output":
            pairs = zip(self.unit.outputs, node.args[0], strict=True)  # type: ignore[arg-type]
            return "\n".join(f"  output {label} = {self.value(x)}" for label, x in pairs)
        number = sum(name.startswith("%") and name[1:].isdigit() for name in self.names.values())
        self.names[node] = f"%{number}"
        arguments = [self.value(x) for x in node.args]
        arguments += [f"{key}={self.value(x)}" for key, x in sorted(node.kwargs.items())]
        kind = self.kind(node.meta.get("val"))
        return f"  {self.names[node]} : {kind} = {_target(node.target)}({', '.join(arguments)})"

    def value(self, x: Any) -> str:
        if isinstance(x, fx.Node):
            return self.names[x]
        if isinstance(x, (list, tuple)):
            return "[" + ", ".join(self.value(y) for y in x) + "]"
        return repr(x) if isinstance(x, (str, float)) else str(x)

    def kind(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            shape = ",".join(self.symbol(str(size)) for size in value.shape)
            return f"{_SHORT.get(value.dtype, str(value.dtype))}[{shape}]"
        if isinstance(value, (list, tuple)):
            return "(" + ", ".join(self.kind(x) for x in value) + ")"
        return type(value).__name__

    def symbol(self, text: str) -> str:
        def rename(match: re.Match[str]) -> str:
            return self.symbols.setdefault(match[0], f"{match[0][0]}{len(self.symbols)}")

        return re.sub(r"\b[su]\d+\b", rename, text)


def _target(target: Any) -> str:
    name = str(target)
    return getattr(target, "__name__", name) if name.startswith("<") else name
