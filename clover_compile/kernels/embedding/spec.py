"""The embedding: its cases and slots."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from clover_compile.kernels.embedding.reference import embedding
from clover_compile.kernels.op import Case, FusedOp, by_row, normal


def inputs(rows: int, vocabulary: int, width: int, g: torch.Generator) -> tuple[Any, ...]:
    """Random arguments of the reference; the first and the last id are among the ids."""
    ids = torch.randint(0, vocabulary, (1, rows), generator=g)
    ids[0, 0], ids[0, -1] = 0, vocabulary - 1
    return ids, normal(g, vocabulary, width)


def cases() -> Iterator[Case]:
    """One and many rows, widths around a power of two."""
    for rows in (1, 2, 33):
        yield Case(f"rows-{rows}", partial(inputs, rows, 50, 24))
    yield Case("wide", partial(inputs, 3, 5, 1100))


SPEC = FusedOp(
    "embedding",
    embedding,
    ("y",),
    cases,
    onnx=None,
    plan="clover_compile.kernels.embedding.plan:plan",
    symbols=by_row("ids"),
    tolerance={"fp32": 0.0, "bf16": 0.0},
)
