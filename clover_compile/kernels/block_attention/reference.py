"""Gated attention over prefix and block in plain torch: the meaning of clover::block_attention."""

from __future__ import annotations

import torch
from torch import Tensor


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the leading channels of x [B, T, heads, D], pairing i with i + half."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def block_attention(
    query_gate: Tensor,
    k: Tensor,
    v: Tensor,
    k_prefix: Tensor,
    v_prefix: Tensor,
    length: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """q/k norm, rotary position, attention to the prefix and the block, output gate.

    query_gate: [B, T, H * 2D], per head the query then the gate; k, v: [B, T, KV * D];
    k_prefix, v_prefix: [B, R, KV, D], of which the first `length` (i32 [B]) rows are valid, the
    others may hold anything; cos, sin: [B, T, rotary / 2] fp32; q_norm, k_norm: [D], the factors
    themselves (1 + w). Rows see the valid prefix and, in the block, the rows up to their own
    (causal) or all. Returns the gated result [B, T, H * D] and the block's own k and v
    [B, T, KV, D], as they belong into the cache.
    """
    batch, rows = k.shape[:2]
    prefix, heads_kv, dim = k_prefix.shape[1:]
    q, gate = query_gate.unflatten(2, (-1, 2 * dim)).float().split(dim, -1)
    new_k = _norm(k.unflatten(2, (heads_kv, dim)).float(), k_norm, eps)
    new_k = _rotate(new_k, cos, sin).to(k.dtype)
    new_v = v.unflatten(2, (heads_kv, dim)).clone()
    q = _rotate(_norm(q, q_norm, eps), cos, sin).transpose(1, 2)
    q = q.unflatten(1, (heads_kv, -1))
    valid = torch.arange(prefix, device=k.device) < length[:, None]
    clean = torch.where(valid[:, :, None, None], v_prefix, 0)
    keys = torch.cat([k_prefix, new_k], 1).float().permute(0, 2, 1, 3)[:, :, None]
    values = torch.cat([clean, new_v], 1).float().permute(0, 2, 1, 3)[:, :, None]
    row = torch.arange(rows, device=k.device)
    block = row <= row[:, None] if causal else (row >= 0)[None].expand(rows, rows)
    seen = torch.cat(
        [valid[:, None].expand(batch, rows, prefix), block[None].expand(batch, rows, rows)], 2
    )
    scores = torch.where(seen[:, None, None], q @ keys.mT * dim**-0.5, -torch.inf)
    out = (torch.softmax(scores, -1) @ values).flatten(1, 2).transpose(1, 2)
    out = (out * torch.sigmoid(gate)).flatten(2).to(query_gate.dtype)
    return out, new_k, new_v
