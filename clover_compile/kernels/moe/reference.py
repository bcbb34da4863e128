"""Routing in a block coreset, routed and shared experts in plain torch: what clover::moe means."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("clover::routed_experts", mutates_args=())
def routed_experts(
    x: Tensor, expert: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Weighted sum of each row's SwiGLU experts, reading only experts that some row uses.

    x: [N, H]; expert: i64 [N, k]; weight: fp32 [N, k], 0 where a row has fewer than k;
    gate_up: [E, 2I, H], the first I rows are the gate; down: [E, H, I]. Returns fp32 [N, H].
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    used = torch.where(weight > 0, expert, -1)
    for e in torch.unique(used).tolist():
        if e < 0:
            continue
        row, slot = torch.where(used == e)
        gate, up = F.linear(x[row], gate_up[e]).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, down[e])
        out.index_add_(0, row, y.float() * weight[row, slot, None])
    return out


@routed_experts.register_fake
def _(x: Tensor, expert: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)


def coreset(p: Tensor, top_k: int, top_p: float) -> Tensor:
    """Experts a block keeps: bool [B, 1, E] from the rows' probabilities p [B, T, E] fp32.

    Every row's top-k add their probability to their expert's total; experts in descending total
    (ties: lower id) are kept while the normalised mass before them is < top_p, the first always.
    """
    best = torch.sort(p, dim=-1, descending=True, stable=True)[1][..., :top_k]
    member = torch.zeros_like(p).scatter(-1, best, 1.0)
    total, order = torch.sort((p * member).sum(1), dim=-1, descending=True, stable=True)
    mass = total / total.sum(-1, keepdim=True).clamp(min=1e-9)
    before = mass.cumsum(-1) - mass
    first = torch.arange(p.shape[-1], device=p.device) == 0
    held = (first | (before < top_p)).float()
    return torch.zeros_like(before).scatter(-1, order, held)[:, None] > 0


def moe(
    x: Tensor,
    router: Tensor,
    shared_gate: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared_gate_up: Tensor,
    shared_down: Tensor,
    top_k: int,
    top_p: float,
    block: bool,
) -> tuple[Tensor, Tensor]:
    """Top-k routing (inside the block's coreset if `block`), grouped SwiGLU, the shared expert.

    x: [B, T, H]; router: [B, T, E] logits; shared_gate: [B, T, 1] logit; gate_up: [E, 2I, H];
    down: [E, H, I]; shared_gate_up: [2S, H], gate then up; shared_down: [H, S].
    Returns y like x and the number of experts kept per sequence, i32 [B] (E without a coreset).
    """
    logits = router.float()
    experts = logits.shape[-1]
    kept = torch.ones_like(logits[:, :1], dtype=torch.bool)
    if block:
        kept = coreset(torch.softmax(logits, -1), top_k, top_p)
    # Chosen and renormalised as logits: inside a coreset all probabilities of a row can be 0.
    inside = torch.where(kept, logits, -torch.inf)
    best, expert = torch.sort(inside, dim=-1, descending=True, stable=True)
    weight, expert = torch.softmax(best[..., :top_k], -1), expert[..., :top_k]
    routed = torch.ops.clover.routed_experts(
        x.flatten(0, 1), expert.flatten(0, 1), weight.flatten(0, 1), gate_up, down
    ).view(x.shape)
    gate, up = F.linear(x, shared_gate_up).chunk(2, -1)
    shared = F.linear(F.silu(gate) * up, shared_down).float()
    y = routed + torch.sigmoid(shared_gate.float()) * shared
    return y.to(x.dtype), kept.view(-1, experts).sum(-1).int()
