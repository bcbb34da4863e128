"""A projection in plain torch: what the kernel of the same name computes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def projection(x: Tensor, weight: Tensor, wide: bool) -> Tensor:
    """x [B, n, K] times weight [N, K] transposed; [B, n, N] like x, or fp32 and not rounded
    on the way if `wide` (logits)."""
    return F.linear(x.float(), weight.float()) if wide else F.linear(x, weight)
