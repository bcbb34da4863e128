"""Rotary angles in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rotary(ids: Tensor, length: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [B, n, half], of positions length + row.

    ids: i64 [B, n], read for their count alone; length: i32 [B]; turns: fp64 [half], turns per
    position. Positions are multiplied and reduced in fp64, so that far ones stay exact.
    """
    position = length[:, None] + torch.arange(ids.shape[1], device=ids.device)
    turn = position.double()[..., None] * turns
    angle = ((turn - torch.floor(turn)) * (2 * math.pi)).float()
    return torch.cos(angle), torch.sin(angle)
