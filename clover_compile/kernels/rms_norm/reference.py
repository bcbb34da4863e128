"""Residual add and RMS norm in plain torch: the meaning of clover::rms_norm."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Adds the residual and normalises the sum.

    x, residual: [B, T, H] in the activation dtype; weight: [H], the factor itself (1 + w).
    Returns the sum and the normalised sum, both like x. Statistics are fp32.
    """
    total = x.clone() if residual is None else residual + x
    wide = total.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return total, (wide * weight.float()).to(x.dtype)
