"""Response processing and each row's choice of a token: the meaning of clover::pick."""

from __future__ import annotations

import torch
from torch import Tensor

SCALARS = (
    "presence", "frequency", "repetition",
    "length_penalty", "length_penalty_start", "length_penalty_window",
    "think_end_bias", "think_end_start", "think_end_window",
    "temperature", "top_k", "top_p",
)  # fmt: skip
"""What the entries of `scalars` mean, in order."""


def _ramp(row: Tensor, start: Tensor, window: Tensor, strength: Tensor) -> Tensor:
    return ((row - start) / window.clamp(min=1)).clamp(0, 1) * strength


def _process(
    logits: Tensor, counts: Tensor, position: Tensor, close: Tensor, allow: Tensor | None,
    scalars: Tensor, mask_id: int, stop_ids: list[int], think_end_id: int,
) -> Tensor:  # fmt: skip
    """Mask and allow, penalties, ramps; logits, counts [B, n, V], position, close [B, n]."""
    presence, frequency, repetition = scalars[0], scalars[1], scalars[2]
    ids = torch.arange(logits.shape[-1], device=logits.device)
    barred = ids == mask_id if allow is None else (ids == mask_id) | ~allow
    x = torch.where(barred & ~logits.isnan(), -torch.inf, logits)
    seen = counts > 0
    x = torch.where(seen, x - (counts * frequency + presence), x)
    x = torch.where(seen, torch.where(x < 0, x * repetition, x / repetition), x)
    stops = torch.isin(ids, torch.tensor(stop_ids, dtype=torch.int64, device=logits.device))
    x = x + torch.where(stops, _ramp(position, scalars[4], scalars[5], scalars[3])[..., None], 0.0)
    think = _ramp(position, scalars[7], scalars[8], scalars[6]) * close
    return x + torch.where(ids == think_end_id, think[..., None], 0.0)


def _draw(x: Tensor, scalars: Tensor, noise: Tensor) -> Tensor:
    """Inverse-CDF draw per row of x [B, n, V] after top-k (ties at the cut stay) and top-p."""
    temperature, top_k, top_p = scalars[9].clamp(min=1e-6), scalars[10].long(), scalars[11]
    value, order = torch.sort(x, dim=-1, descending=True, stable=True)
    k = torch.where(top_k > 0, top_k, x.shape[-1]).clamp(max=x.shape[-1])
    cut = value.gather(-1, (k - 1).view(1, 1, 1).expand(*x.shape[:2], 1))
    p = torch.softmax(torch.where(value >= cut, value, -torch.inf) / temperature, -1)
    p = torch.where(p.cumsum(-1) - p <= top_p, p, 0.0)
    edge = p.cumsum(-1)
    reached = edge > noise[..., None] * edge[..., -1:]
    return order.gather(-1, reached.int().argmax(-1, keepdim=True))[..., 0]


def pick(
    logits: Tensor, counts: Tensor, row0: Tensor, close_open: Tensor, scalars: Tensor,
    draft: Tensor, running: Tensor, noise: Tensor, allow: Tensor | None,
    mask_id: int, stop_ids: list[int], think_end_id: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Processes each row's logits and chooses its token.

    logits: [B, n, V]; counts: i32 [B, V], how often the response holds an id; row0: i32 [B], the
    response position (from 1) row 0 would take; close_open: bool [B], whether the think ramp
    applies; scalars: fp32 [12], see SCALARS; draft: i64 [B, n], the id row j must confirm, -1 for
    none; running: bool [], then row j also counts draft[0..j), and close_open ends for it once the
    think-end id is among them; noise: fp32 [B, n] in [0, 1), read when temperature > 0; allow: bool
    [B, n, V] or None. think_end_id -1: the model has none.
    Returns ids (i64), confidence (probability of the id at temperature 1), p_draft and entropy
    (natural log), each [B, n]. Confidence is NaN exactly when a logit of the row is.
    """
    rows = logits.shape[1]
    row = torch.arange(rows, device=logits.device)
    earlier = (row < row[:, None]) & running & (draft >= 0)[:, None]
    before = torch.zeros_like(logits).scatter_add(
        2, draft.clamp(min=0)[:, None].expand(-1, rows, -1), earlier.to(logits.dtype)
    )
    thought = ((draft == think_end_id)[:, None] & earlier).any(-1)
    position = row0[:, None] + row
    close = close_open[:, None] & ~thought
    if think_end_id < 0:
        close = torch.zeros_like(close)
    x = _process(
        logits.float(), counts[:, None] + before, position, close, allow,
        scalars, mask_id, stop_ids, think_end_id,
    )  # fmt: skip
    logp = torch.log_softmax(x, -1)
    p = logp.exp()
    ids = torch.where(scalars[9] > 0, _draw(x, scalars, noise), x.argmax(-1))
    confidence = p.gather(-1, ids[..., None])[..., 0]
    confidence = torch.where(logits.isnan().any(-1), torch.nan, confidence)
    p_draft = p.gather(-1, draft.clamp(min=0)[..., None])[..., 0] * (draft >= 0)
    entropy = -torch.where(p > 0, p * logp, 0.0).sum(-1)
    return ids, confidence, p_draft, entropy
