"""fp8 weights (e4m3): one scale for each output channel, the largest magnitude over 448."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0
"""The largest finite e4m3 value."""

LEAST = 1e-30
"""Smallest scale: a channel of zeros needs one too."""


def scales(weight: Tensor) -> Tensor:
    """weight [..., outputs, inputs] -> fp32 [..., outputs]."""
    return (weight.float().abs().amax(-1) / LARGEST).clamp(min=LEAST)


def quantised(weight: Tensor) -> Tensor:
    """weight [..., outputs, inputs] -> the same in e4m3, to be multiplied by `scales`.

    A stack is done matrix by matrix: one of a large model is a gigabyte.
    """
    made = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    flat, out = weight.reshape(-1, *weight.shape[-2:]), made.view(-1, *weight.shape[-2:])
    for matrix, target in zip(flat, out, strict=True):
        target.copy_(matrix.float() / scales(matrix)[:, None])
    return made


def widened(weight: Tensor, scale: Tensor) -> Tensor:
    """The fp32 values that e4m3 `weight` and its `scale` stand for."""
    return weight.float() * scale[..., None]


@torch.library.custom_op("clover::dequantise", mutates_args=())
def dequantise(weight: Tensor, scale: Tensor) -> Tensor:
    """`widened` in bf16, as one node: targets take the two parts instead."""
    return widened(weight, scale).bfloat16()


@dequantise.register_fake
def _(weight: Tensor, scale: Tensor) -> Tensor:
    return weight.new_empty(weight.shape, dtype=torch.bfloat16)
