"""A projection by an fp8 matrix in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from clover_compile.kernels.fp8 import widened


def projection_fp8(x: Tensor, weight: Tensor, scale: Tensor, wide: bool) -> Tensor:
    """x [B, n, K], weight e4m3 [N, K], scale fp32 [N] -> [B, n, N] like x, fp32 if `wide`."""
    y = F.linear(x.float(), widened(weight, scale))
    return y if wide else y.to(x.dtype)
