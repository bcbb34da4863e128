"""Arguments for the released model's calls that look like a model's: scales, gates, routing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clover_compile.kernels import release
from clover_compile.kernels.op import FusedOp
from clover_compile.kernels.release import Place
from clover_compile.kernels.table import fused_op

FP8_SPREAD = 100.0
"""Standard deviation of fp8 values, whose largest is 448."""

POSITIVE_ONE = {"norm", "weight", "q_norm", "k_norm"}
"""Factors of a norm, near 1 (for rms_norm; a projection's weight is a matrix)."""


def arguments(
    place: Place, rows: int, prefix: int, device: str, seed: int, spare: int = 0
) -> list[Any]:
    """The arguments of one call; `prefix` rows are valid, `spare` more are NaN."""
    g = torch.Generator(device).manual_seed(seed)

    def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        if dtype is torch.float8_e4m3fn:
            made = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=g)
            return (made * FP8_SPREAD).to(dtype)
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=device)
        fan = shape[-1] if len(shape) in (2, 3) and shape[0] != 1 else 1
        made = torch.empty(shape, dtype=dtype, device=device).normal_(generator=g)
        return made * fan**-0.5 if fan > 1 else made

    op = fused_op(place.op)
    made = place.arguments(make, rows, prefix + spare)
    return [
        _adjust(op, name, value, rows, prefix, g)
        for name, value in zip(op.parameters, made, strict=True)
    ]


def _adjust(
    op: FusedOp, name: str, value: Any, rows: int, prefix: int, g: torch.Generator
) -> Any:  # fmt: skip
    if not isinstance(value, Tensor):
        return value
    if name.endswith("scale") and op.name.endswith("fp8"):
        # With the values' spread, a matrix about as large as a model's.
        return (0.5 + torch.rand(value.shape, generator=g, device=value.device)) / (
            FP8_SPREAD * release.HIDDEN**0.5
        )
    if name in POSITIVE_ONE and value.dim() == 1:
        return 1 + 0.1 * value
    if name == "decay":
        return -value.exp()
    if name == "length":
        return torch.full_like(value, prefix)
    if name in ("k_prefix", "v_prefix"):
        value[:, prefix:] = torch.nan
        return value
    if name == "rows":
        return torch.full_like(value, (rows + 1) // 2)
    if name in ("cos", "sin"):
        angle = torch.arange(value.shape[-1], device=value.device) * 0.1
        turn = (prefix + torch.arange(rows, device=value.device))[:, None] * angle
        return (turn.cos() if name == "cos" else turn.sin())[None].float()
    if op.name == "pick":
        return _pick(name, value, g)
    return value


def _pick(name: str, value: Tensor, g: torch.Generator) -> Tensor:
    if name == "counts":
        value[:, :100] = 1
    if name == "scalars":
        # No penalties and temperature 0, repetition and top-p neutral.
        neutral = [0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1]
        return torch.tensor(neutral, dtype=value.dtype, device=value.device)
    if name == "noise":
        return torch.rand(value.shape, generator=g, device=value.device)
    if name == "draft":
        return torch.randint(-1, 1000, value.shape, generator=g, device=value.device)
    return 4 * value if name == "logits" else value


def truth(op: FusedOp, given: Sequence[Any]) -> dict[str, Tensor]:
    """The reference's outputs in fp32 on the same device, without tf32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    wide = [x.float() if isinstance(x, Tensor) and x.dtype is torch.bfloat16 else x for x in given]
    result = op.reference(*wide)
    return dict(zip(op.outputs, result if isinstance(result, tuple) else (result,), strict=True))


def difference(got: Tensor, meant: Tensor) -> float:
    """Largest error as a share of the largest value; integers: the share that differs."""
    if got.numel() == 0:
        return 0.0
    if not meant.is_floating_point():
        return float((got != meant).float().mean())
    if not torch.isfinite(got).all():
        return float("inf")
    error = (got.float() - meant.float()).abs().max()
    return float(error / meant.abs().max().clamp(min=1e-30))
