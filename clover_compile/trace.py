"""torch.export of the model: one program per Unit, with dynamic T, n and R."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from clover_compile.kernels.pick.reference import SCALARS, pick
from clover_compile.model import interface
from clover_compile.model.clover import Clover
from clover_compile.model.config import GenerationConfig, ModelConfig
from clover_compile.model.layers import REGIONS, Region

MAX_BLOCK = 256
"""Most rows of a block."""

MAX_ROWS = 1 << 20
"""Most rows of a commit; runners send at most 256 at once."""

EXAMPLE_ROWS, EXAMPLE_PREFIX = 5, 7
"""Sizes of the traced example; 0 and 1 would be specialised, the export says so loudly."""


class Entry(nn.Module):
    """Adapts a method of the model to the flat, ordered arrays of a Unit."""

    def __init__(self, model: Clover, unit: str) -> None:
        super().__init__()
        self.clover, self.unit = model, unit
        self.names = interface.inputs(model.config, unit)
        self.results = interface.outputs(model.config, unit)

    def forward(self, *arrays: Tensor) -> tuple[Tensor, ...]:
        x = dict(zip(self.names, arrays, strict=True))
        m = self.clover
        if self.unit == "commit":
            logits, new = m.commit(x["ids"], x["length"], x["keep"], x)
            named = {"logits": logits} | {f"{name}.new": value for name, value in new.items()}
        elif self.unit == "verify":
            logits, new = m.verify(x["ids"], x["length"], x)
            named = {"logits": logits}
            named |= {n if n.startswith("tape") else f"{n}.new": value for n, value in new.items()}
        elif self.unit == "replay":
            new = m.replay(x, x, x["rows"])
            named = {f"{name}.new": value for name, value in new.items()}
        else:
            named = {"logits": m.preview(x["ids"], x["length"], x)}
        return tuple(named[name] for name in self.results)


class Picker(nn.Module):
    """The `pick` Unit: no weights, the ids a model knows as constants."""

    def __init__(self, c: ModelConfig, g: GenerationConfig) -> None:
        super().__init__()
        self.constants = interface.pick_constants(c, g)
        self.pick = Region(pick)

    def forward(self, *arrays: Tensor) -> tuple[Tensor, ...]:
        chosen: tuple[Tensor, ...] = self.pick(*arrays, None, *self.constants)
        return chosen


def entry(model: Clover, generation: GenerationConfig, unit: str) -> nn.Module:
    """The module whose forward is the Unit called `unit`."""
    return Picker(model.config, generation) if unit == "pick" else Entry(model, unit)


def example(
    c: ModelConfig,
    unit: str,
    rows: int,
    prefix: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    """Random inputs of a Unit, in order: `rows` new rows after `prefix` committed ones."""
    g = torch.Generator().manual_seed(seed)
    kk, heads = c.linear_conv_kernel_dim - 1, c.linear_num_value_heads
    shapes: dict[str, tuple[int, ...]] = {
        "ring": (1, kk, c.conv_dim),
        "S": (1, heads, c.linear_key_head_dim, c.linear_value_head_dim),
        "k": (1, prefix, c.num_key_value_heads, c.head_dim),
        "v": (1, prefix, c.num_key_value_heads, c.head_dim),
        "tape": (1, rows, c.conv_dim + 2 * heads),
        "logits": (1, rows, c.vocab_size),
    }
    scalars = [0.1, 0.2, 1.3, 2.0, 3.0, 9.0, 1.5, 2.0, 8.0, 0.0, 0.0, 1.0]
    assert len(scalars) == len(SCALARS)
    made: dict[str, Tensor] = {
        "ids": torch.randint(0, c.vocab_size, (1, rows), generator=g),
        "length": torch.tensor([prefix], dtype=torch.int32),
        "keep": torch.tensor(rows, dtype=torch.int32),
        "rows": torch.tensor([rows // 2], dtype=torch.int32),
        "counts": torch.randint(0, 3, (1, c.vocab_size), generator=g, dtype=torch.int32),
        "row0": torch.tensor([4], dtype=torch.int32),
        "close_open": torch.tensor([True]),
        "scalars": torch.tensor(scalars),
        "draft": torch.randint(0, c.vocab_size, (1, rows), generator=g),
        "running": torch.tensor(True),
        "noise": torch.rand(1, rows, generator=g),
    }
    arrays = []
    for name in interface.inputs(c, unit):
        kind = name.split(".")[0]
        if kind in shapes:
            scale = 3.0 if kind == "logits" else 0.3
            x = torch.randn(shapes[kind], generator=g) * scale
            arrays.append(x if kind in ("S", "logits") else x.to(dtype))
        else:
            arrays.append(made[name])
    return tuple(arrays)


def dynamic_shapes(c: ModelConfig, unit: str) -> tuple[dict[int, Any], ...]:
    """The declared dynamic dimension of every input of a Unit, in interface order."""
    block = unit in ("preview", "pick")
    rows = Dim("n", min=1, max=MAX_BLOCK) if block else Dim("T", min=1, max=MAX_ROWS)
    prefix = Dim("R", min=0, max=c.max_position_embeddings)
    by_kind: dict[str, Any] = {
        "ids": {1: rows}, "logits": {1: rows}, "draft": {1: rows}, "noise": {1: rows},
        "tape": {1: rows}, "k": {1: prefix}, "v": {1: prefix},
    }  # fmt: skip
    return tuple(by_kind.get(name.split(".")[0], {}) for name in interface.inputs(c, unit))


def regions(module: nn.Module) -> list[str]:
    """Qualified names of the regions inside a module, in tree order."""
    return [
        name
        for name, part in module.named_modules()
        if isinstance(part, Region) and name.split(".")[-1] in REGIONS
    ]


def export(model: Clover, generation: GenerationConfig, unit: str) -> ExportedProgram:
    """Traces one Unit; raises torch's own error if a declared dimension was specialised."""
    module = entry(model, generation, unit)
    c = model.config
    arrays = example(c, unit, EXAMPLE_ROWS, EXAMPLE_PREFIX, dtype=model.dtype)
    with torch.no_grad():
        return torch.export.export(
            module,
            arrays,
            dynamic_shapes=(dynamic_shapes(c, unit),),
            strict=False,
            preserve_module_call_signature=tuple(regions(module)),
        )
