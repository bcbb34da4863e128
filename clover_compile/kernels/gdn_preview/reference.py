"""The bidirectional Gated DeltaNet of a preview: the meaning of clover::gdn_preview."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from clover_compile.kernels.gdn_scan.reference import convolve, gated_norm, split_heads

CALIBRATION_ROWS = 32
"""Block length at which the history slot needs no correction: a constant of the model."""


def gdn_preview(
    u: Tensor,
    z: Tensor,
    a: Tensor,
    ring: Tensor,
    state: Tensor,
    taps: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    logit_scale: Tensor,
    history_bias: Tensor,
    history_c: Tensor,
    norm: Tensor,
    eps: float,
    key_heads: int,
) -> Tensor:
    """Both-sided convolution, softmax over the block and the decayed history, gated norm of n rows.

    u: [B, n, C]; z: [B, n, HV * DV]; a: [B, n, HV]; ring: [B, K - 1, C]; state: [B, HV, DK, DV]
    fp32; taps: [C, 2K - 1], causal taps then right taps; decay (-exp(A_log)), dt_bias, logit_scale,
    history_bias, history_c: [HV] fp32; norm: [DV]. Returns y like z; writes no state.
    """
    heads, dk, dv = state.shape[1:]
    length, width = u.shape[1], taps.shape[1]
    right = u.new_zeros(u.shape[0], width // 2, u.shape[2])
    full = torch.cat([ring, u, right], 1).float()
    mixed = convolve(full, taps, length)
    q, k, v = split_heads(F.silu(mixed), key_heads, dk, dv)
    q, k = (x.repeat_interleave(heads // key_heads, 2).transpose(1, 2) for x in (q, k))
    v = v.transpose(1, 2)
    g = (decay * F.softplus(a.float() + dt_bias)).transpose(1, 2)[..., None]
    history = g.exp() * (q @ state) * dk**-0.5
    scores = q @ k.mT * logit_scale[:, None, None]
    rows = torch.full((), length, dtype=torch.float32, device=u.device)
    slot = history_bias + history_c * torch.log(rows / CALIBRATION_ROWS)
    slot = slot[None, :, None, None].expand(scores.shape[0], heads, length, 1)
    p = torch.softmax(torch.cat([slot, scores], -1), -1)
    o = p[..., :1] * history + p[..., 1:] @ v
    return gated_norm(o.transpose(1, 2), z, norm, eps)
