"""Fills the eager model from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from clover_compile.model.clover import Clover
from clover_compile.model.config import ModelConfig
from clover_compile.model.interface import WIDE


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype a weight has in a model of activation dtype `dtype`."""
    return torch.float32 if name.split(".")[-1] in WIDE else dtype


def load_model(
    config: ModelConfig,
    tensor: Callable[[str, torch.dtype], Tensor],
    dtype: torch.dtype = torch.float32,
) -> Clover:
    """The eager model with the tensors that `tensor(name, dtype)` gives by canonical name.

    Mapped tensors stay mapped: nothing is copied where the dtype already fits.
    """
    with torch.device("meta"):
        model = Clover(config)
    weights = {name: tensor(name, dtype_of(name, dtype)) for name, _ in model.named_parameters()}
    model.load_state_dict(weights, strict=True, assign=True)
    return model.requires_grad_(False).eval()
