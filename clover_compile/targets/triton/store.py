"""The weight store of the Triton targets: every matrix once, as the kernels read it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from clover_compile.kernels.fp8 import quantised, scales
from clover_compile.targets.triton.lowering import Lowered
from clover_compile.targets.triton.quantisation import report
from clover_compile.unit import Source, Unit, Weight
from clover_compile.weight_store import Stored, write_weights

WEIGHTS = "weights/model.safetensors"


def write_store(
    folder: Path, units: Mapping[str, Unit], lowered: Mapping[str, Lowered], source: Source
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Writes the store; returns name -> {file, offset, shape, dtype}, and what fp8 did to weights.

    A weight whose rows are the first of a longer one (the preview's input projection, which lacks
    the write gate) is no copy: its entry points into the longer one.
    """
    weights = {w.name: w for unit in units.values() for w in unit.weights.values()}
    inside = _prefixes(weights)
    constants = {k: x for one in lowered.values() for k, x in one.constants.items()}
    stored = [
        Stored(name, w.shape, w.dtype, lambda w=w: w.evaluate(source))  # type: ignore[misc]
        for name, w in weights.items()
        if name not in inside
    ] + [Stored(k, tuple(x.shape), x.dtype, lambda x=x: x) for k, x in constants.items()]  # type: ignore[misc]
    (folder / WEIGHTS).parent.mkdir()
    found = write_weights(folder / WEIGHTS, stored)
    for name, longer in inside.items():
        found[name] = {**found[longer], "shape": list(weights[name].shape)}
    small = [w for n, w in weights.items() if w.target is quantised and n not in inside]
    return found, report(small, source) if small else {}


def _prefixes(weights: Mapping[str, Weight]) -> dict[str, str]:
    """Weight -> the longer one whose first rows it is."""
    rows = {name: w for name, w in weights.items() if _is_stack(_unquantised(w))}
    return {
        short: long
        for short, s in rows.items()
        for long, w in rows.items()
        if s.target is w.target
        and len(w.leaves) > len(s.leaves)
        and w.leaves[: len(s.leaves)] == s.leaves
    }


def _unquantised(weight: Weight) -> Weight:
    """The matrix behind fp8 values or scales, both of which go row by row."""
    if weight.target in (quantised, scales):
        inner = weight.arguments[0]
        assert isinstance(inner, Weight)
        return inner
    return weight


def _is_stack(weight: Weight) -> bool:
    """Whether a weight is checkpoint matrices one below the other."""
    if weight.target is not torch.ops.aten.cat.default or weight.arguments[1:] != (0,):
        return False
    return all(isinstance(x, Weight) and x.leaf for x in weight.arguments[0])
