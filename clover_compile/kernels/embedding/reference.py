"""Embedding rows in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of weight [V, H] by ids i64 [B, n]; [B, n, H] like weight."""
    return F.embedding(ids, weight)
