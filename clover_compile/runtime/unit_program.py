"""A Unit as ordered launches over a table of buffers: what unit.json of a Triton bundle holds.

Sizes are numbers or expressions (runtime/expressions.py) over the Unit's symbols: its rows (n or
T), the prefix rows R, and `keep`. A session fills the symbols in once per row count and replays the
steps; nothing here needs torch or a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from clover_compile.runtime.launch_plan import Size


@dataclass(frozen=True)
class Buffer:
    """One array of its own: contiguous, 256-byte aligned."""

    dtype: str
    shape: tuple[Size, ...]
    kind: str
    """input, output, weight or temporary."""
    weight: str | None = None
    """Name in the weight store, for kind `weight`."""


@dataclass(frozen=True)
class View:
    """Part of a buffer: an offset in elements, a shape, and the elements from row to row."""

    buffer: str
    shape: tuple[Size, ...]
    offset: Size = 0
    stride: int | None = None
    """Of axis 1; None: contiguous."""


@dataclass(frozen=True)
class Step:
    """One op by its launch plan."""

    plan: str
    """Key in the bundle's plans.json."""
    inputs: Mapping[str, View]
    outputs: Mapping[str, View]


@dataclass(frozen=True)
class UnitProgram:
    """One Unit, lowered."""

    name: str
    symbols: tuple[str, ...]
    buffers: Mapping[str, Buffer]
    inputs: Mapping[str, tuple[View, ...]]
    """Array of the Unit -> the views that hold it, side by side along the last axis.

    A tape is three parts of the projection it came from; everything else is one view. `keep` is no
    array here but a symbol."""
    outputs: Mapping[str, tuple[View, ...]]
    steps: tuple[Step, ...]

    def to_json(self) -> dict[str, Any]:
        """The program as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> UnitProgram:
        """The program that `to_json` described."""
        buffers = {
            name: Buffer(x["dtype"], tuple(x["shape"]), x["kind"], x["weight"])
            for name, x in data["buffers"].items()
        }
        steps = tuple(
            Step(x["plan"], _views(x["inputs"]), _views(x["outputs"])) for x in data["steps"]
        )
        return cls(
            data["name"], tuple(data["symbols"]), buffers,
            _parts(data["inputs"]), _parts(data["outputs"]), steps,
        )  # fmt: skip


def _view(data: Mapping[str, Any]) -> View:
    return View(data["buffer"], tuple(data["shape"]), data["offset"], data["stride"])


def _views(data: Mapping[str, Any]) -> dict[str, View]:
    return {name: _view(x) for name, x in data.items()}


def _parts(data: Mapping[str, Any]) -> dict[str, tuple[View, ...]]:
    return {name: tuple(_view(x) for x in parts) for name, parts in data.items()}
