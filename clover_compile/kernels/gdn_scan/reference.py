"""The causal Gated DeltaNet of a commit in plain torch: the meaning of clover::gdn_scan."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Rows solved together by the delta rule."""

FLOOR = -200.0
"""A log-decay below this is 0 in fp32; clamping keeps sums of gates finite."""

SKIP = -1e30
"""Gate input of a row that must not touch the state: sigmoid and softplus of it are exactly 0."""


@torch.library.custom_op("clover::delta_rule", mutates_args=())
def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over T rows, chunk by chunk, exact for any T.

    q, k: [B, T, HK, DK], q already scaled; v: [B, T, HV, DV]; g (log-decay <= 0), beta: [B, T, HV];
    state: [B, HV, DK, DV]; all fp32. Value head h reads key head h // (HV // HK).
    Per row S <- e^g S; d = beta (v - S'k); S <- S + k d'; o = S'q.
    Returns o [B, T, HV, DV] and the state after the last row. The triangular system of a chunk is
    solved by substitution: the nilpotent product explodes when a token repeats.
    """
    heads = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(heads, 2).transpose(1, 2) for x in (q, k))
    v, g, beta = v.transpose(1, 2), g.transpose(1, 2).clamp(min=FLOOR), beta.transpose(1, 2)
    outputs, state = [], state.clone()
    for start in range(0, v.shape[2], CHUNK):
        part = slice(start, start + CHUNK)
        qc, kc, vc, bc = q[:, :, part], k[:, :, part], v[:, :, part], beta[:, :, part, None]
        total = g[:, :, part].double().cumsum(-1)
        gap = (total[..., :, None] - total[..., None, :]).tril()
        decay = gap.exp().float().tril()
        since = total.exp().float()[..., None]
        system = bc * (kc @ kc.mT) * decay
        delta = torch.linalg.solve_triangular(
            system, bc * (vc - since * (kc @ state)), upper=False, unitriangular=True
        )
        outputs.append(since * (qc @ state) + (qc @ kc.mT * decay) @ delta)
        left = (total[..., -1:] - total).exp().float()[..., None]
        state = since[..., -1:, :] * state + (kc * left).mT @ delta
    out = torch.cat(outputs, 2) if outputs else v.new_zeros(v.shape)
    return out.transpose(1, 2).contiguous(), state


@delta_rule.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), torch.empty_like(state)


def unit_length(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) along the last axis; the constant is not the norm's eps."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def convolve(rows: Tensor, taps: Tensor, length: int) -> Tensor:
    """Depthwise convolution of fp32 rows [B, length + K - 1, C] with taps [C, K]."""
    mixed = rows[:, :length] * taps[:, 0].float()
    for j in range(1, taps.shape[1]):
        mixed = mixed + rows[:, j : j + length] * taps[:, j].float()
    return mixed


def split_heads(rows: Tensor, key_heads: int, dk: int, dv: int) -> tuple[Tensor, Tensor, Tensor]:
    """Splits convolved rows [B, T, C] into unit q, k [B, T, HK, DK] and v [B, T, HV, DV]."""
    q, k, v = rows.split([key_heads * dk, key_heads * dk, rows.shape[2] - 2 * key_heads * dk], 2)
    q, k = (unit_length(x.unflatten(2, (key_heads, dk))) for x in (q, k))
    return q, k, v.unflatten(2, (-1, dv))


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm per head of o [B, T, HV, DV], times weight [DV], times silu(z) [B, T, HV * DV]."""
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (o.flatten(2) * F.silu(z.float())).to(z.dtype)


def gdn_scan(
    u: Tensor,
    z: Tensor | None,
    b: Tensor,
    a: Tensor,
    ring: Tensor,
    state: Tensor,
    conv: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    rows: Tensor | None,
    eps: float,
    key_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal convolution with ring, gates, delta rule and gated norm of T rows.

    u: [B, T, C] rows before the convolution; z: [B, T, HV * DV] or None (then y is 0 wide);
    b, a: [B, T, HV]; ring: [B, K - 1, C], the rows before u; state: [B, HV, DK, DV] fp32;
    conv: [C, K]; decay: [HV], -exp(A_log); dt_bias: [HV]; norm: [DV]; rows: i32 [B] or None: rows
    from that one on leave ring and state alone. Returns y like z, the new ring and the new state.
    """
    _, dk, dv = state.shape[1:]
    length, taps = u.shape[1], conv.shape[1]
    full = torch.cat([ring, u], 1)
    wide = full.float()
    mixed = convolve(wide, conv, length)
    q, k, v = split_heads(F.silu(mixed), key_heads, dk, dv)
    b, a = b.float(), a.float()
    if rows is None:
        new_ring = full[:, length:].clone()
    else:
        late = torch.arange(length, device=u.device)[None, :, None] >= rows[:, None, None]
        b, a = (torch.where(late, SKIP, x) for x in (b, a))
        take = rows[:, None].long() + torch.arange(taps - 1, device=u.device)
        new_ring = full.gather(1, take[:, :, None].expand(-1, -1, full.shape[2]))
    g = decay * F.softplus(a + dt_bias)
    o, new_state = torch.ops.clover.delta_rule(q * dk**-0.5, k, v, g, torch.sigmoid(b), state)
    y = u.new_zeros(u.shape[0], u.shape[1], 0) if z is None else gated_norm(o, z, norm, eps)
    return y, new_ring, new_state
