"""moe over fp8 expert weights in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from clover_compile.kernels.fp8 import widened
from clover_compile.kernels.moe.reference import moe


def moe_fp8(
    x: Tensor,
    router: Tensor,
    shared_gate: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared_gate_up: Tensor,
    shared_down: Tensor,
    gate_up_scale: Tensor,
    down_scale: Tensor,
    shared_gate_up_scale: Tensor,
    shared_down_scale: Tensor,
    top_k: int,
    top_p: float,
    block: bool,
) -> tuple[Tensor, Tensor]:
    """`moe` with e4m3 weights, each with an fp32 scale per output channel: [E, 2I], [E, H], [2S],
    [H]. Only experts that some row chose are widened."""
    used = torch.zeros(gate_up.shape[0], dtype=torch.bool, device=x.device)
    logits = router.float().flatten(0, 1)
    if not block:
        used[torch.sort(logits, dim=-1, descending=True, stable=True)[1][:, :top_k]] = True
    else:
        used[:] = True
    y, kept = moe(
        x.float(), router, shared_gate, _stack(gate_up, gate_up_scale, used),
        _stack(down, down_scale, used), widened(shared_gate_up, shared_gate_up_scale),
        widened(shared_down, shared_down_scale), top_k, top_p, block,
    )  # fmt: skip
    return y.to(x.dtype), kept


def _stack(weight: Tensor, scale: Tensor, used: Tensor) -> Tensor:
    made = torch.zeros(weight.shape, device=weight.device)
    made[used] = widened(weight[used], scale[used])
    return made
