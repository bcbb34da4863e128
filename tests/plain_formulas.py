"""The fused ops' formulas in float64, one row, head and expert at a time: slow and obvious."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence row by row; arguments as in clover::delta_rule."""
    q, k, v, g, beta, s = (x.double() for x in (q, k, v, g, beta, state))
    repeat = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(repeat, 2) for x in (q, k))
    rows = []
    for t in range(v.shape[1]):
        s = s * g[:, t].exp()[..., None, None]
        d = beta[:, t, :, None] * (v[:, t] - (s.mT @ k[:, t, ..., None])[..., 0])
        s = s + k[:, t, ..., None] * d[..., None, :]
        rows.append((s.mT @ q[:, t, ..., None])[..., 0])
    return torch.stack(rows, 1), s


def attention(q: Tensor, keys: Tensor, values: Tensor, seen: Sequence[Sequence[int]]) -> Tensor:
    """Row t of head h attends to the columns seen[t]; q [T, H, D], keys and values [R, KV, D]."""
    heads, dim = q.shape[1:]
    group = heads // keys.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for t, columns in enumerate(seen):
        for h in range(heads):
            k, v = keys[list(columns), h // group], values[list(columns), h // group]
            out[t, h] = torch.softmax(k @ q[t, h] / math.sqrt(dim), 0) @ v
    return out


def routed(
    x: Tensor, router: Tensor, kept: set[int], gate_up: Tensor, down: Tensor, top_k: int
) -> Tensor:
    """Weighted experts of each row; x [T, H], router [T, E], only experts in `kept`."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    p = torch.softmax(router.double(), -1)
    width = down.shape[2]
    for t in range(len(x)):
        chosen = sorted(kept, key=lambda e: (-router[t, e].item(), e))[:top_k]
        total = sum(p[t, e].item() for e in chosen)
        for e in chosen:
            both = gate_up[e].double() @ x[t].double()
            middle = torch.nn.functional.silu(both[:width]) * both[width:]
            out[t] += p[t, e] / total * (down[e].double() @ middle)
    return out


def kept_experts(router: Tensor, top_k: int, top_p: float) -> set[int]:
    """The coreset of one sequence's rows, router [T, E]."""
    p = torch.softmax(router.double(), -1)
    totals = [0.0] * p.shape[1]
    for row in p.tolist():
        for e in sorted(range(len(row)), key=lambda e: (-row[e], e))[:top_k]:
            totals[e] += row[e]
    kept: set[int] = set()
    before, mass = 0.0, sum(totals)
    for e in sorted(range(len(totals)), key=lambda e: (-totals[e], e)):
        if kept and before / mass >= top_p:
            break
        kept.add(e)
        before += totals[e]
    return kept
