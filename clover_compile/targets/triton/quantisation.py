"""What fp8 did to the weights: bytes and error by group, and experts of unusual range."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from clover_compile.kernels.fp8 import quantised, scales, widened
from clover_compile.unit import Source, Weight

UNUSUAL = 4.0
"""An expert whose largest weight is so many times the median expert's is named."""

GROUPS = ("experts", "shared_expert", "linear_attn", "self_attn", "lm_head")


def report(weights: Iterable[Weight], source: Source) -> dict[str, Any]:
    """Group -> {tensors, bytes, bytes_before, error, worst, worst_tensor}, and `unusual_experts`.

    error: norm of the difference over the norm, all tensors of the group together; worst: of one.
    weights: the fp8 ones; what they are made of comes from `source`, one tensor at a time.
    """
    groups: dict[str, dict[str, Any]] = {}
    unusual: list[dict[str, Any]] = []
    for weight in weights:
        inner = weight.arguments[0]
        assert isinstance(inner, Weight)
        lost, whole, peaks = _compare(inner.evaluate(source))
        row = groups.setdefault(_group(weight), {
            "tensors": 0, "bytes": 0, "bytes_before": 0, "lost": 0.0, "whole": 0.0, "worst": 0.0,
            "worst_tensor": "",
        })  # fmt: skip
        row["tensors"] += 1
        row["bytes"] += weight.nbytes + 4 * (weight.nbytes // weight.shape[-1])
        row["bytes_before"] += inner.nbytes
        row["lost"] += lost
        row["whole"] += whole
        error = (lost / whole) ** 0.5 if whole else 0.0
        if error >= row["worst"]:
            row |= {"worst": error, "worst_tensor": inner.name}
        unusual += _unusual(inner.name, peaks)
    for row in groups.values():
        lost, whole = row.pop("lost"), row.pop("whole")
        row["error"] = (lost / whole) ** 0.5 if whole else 0.0
    return {"groups": groups, "unusual_experts": unusual}


def _compare(value: Tensor) -> tuple[float, float, list[float]]:
    """Squares lost and squares in all, and the largest magnitude of each matrix of a stack."""
    lost = whole = 0.0
    peaks = []
    for matrix in value.reshape(-1, *value.shape[-2:]):
        exact = matrix.float()
        lost += float((widened(quantised(matrix), scales(matrix)) - exact).square().sum())
        whole += float(exact.square().sum())
        peaks.append(float(exact.abs().max()))
    return lost, whole, peaks


def _group(weight: Weight) -> str:
    name = weight.leaves[0]
    return next((group for group in reversed(GROUPS) if group in name), "other")


def _unusual(name: str, peaks: list[float]) -> list[dict[str, Any]]:
    """Experts far from the middle one; a stack of one has none."""
    middle = float(torch.tensor(peaks).median())
    return [
        {"tensor": name, "expert": i, "largest": peak, "median": middle}
        for i, peak in enumerate(peaks)
        if len(peaks) > 1 and not middle / UNUSUAL <= peak <= middle * UNUSUAL
    ]
