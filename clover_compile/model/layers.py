"""The layers of Clover: projections around regions.

A region is a module without parameters whose forward is one call of an op's reference, every tensor
a positional argument: the trace keeps its boundary, and a pass puts the fused op in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clover_compile.kernels.block_attention.reference import block_attention
from clover_compile.kernels.gdn_preview.reference import gdn_preview
from clover_compile.kernels.gdn_scan.reference import gdn_scan
from clover_compile.kernels.moe.reference import moe
from clover_compile.kernels.pick.reference import pick
from clover_compile.kernels.rms_norm.reference import rms_norm
from clover_compile.model.config import ModelConfig


class Region(nn.Module):
    """A parameter-free boundary around one reference; its name in the tree is the op's name."""

    def __init__(self, reference: Callable[..., Any]) -> None:
        super().__init__()
        self.reference = reference

    def forward(self, *arguments: Any) -> Any:
        return self.reference(*arguments)


REGIONS: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "gdn_scan": gdn_scan,
    "gdn_preview": gdn_preview,
    "block_attention": block_attention,
    "moe": moe,
    "pick": pick,
}
"""Name of a region in the module tree (and of its op) -> its reference."""


def weight(*shape: int) -> nn.Parameter:
    """A parameter to be filled from a checkpoint."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Linear(nn.Module):
    """x W^T without a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = weight(outputs, inputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class WideLinear(Linear):
    """x W^T in fp32 whatever the weight is stored in: rounded to 16 bits, router logits tie."""

    def forward(self, x: Tensor) -> Tensor:
        """x: fp32 [..., inputs]."""
        return F.linear(x, self.weight.float())


class Norm(nn.Module):
    """Residual add and zero-centred RMS norm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight(width), eps
        self.rms_norm = Region(rms_norm)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        total, normed = self.rms_norm(x, residual, 1.0 + self.weight, self.eps)
        return total, normed


class HeadNorm(nn.Module):
    """Holds the weight of a norm that a region applies."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = weight(width)


class Taps(nn.Module):
    """Holds the causal taps of the depthwise convolution, [C, 1, K] as stored."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = weight(channels, 1, taps)


class GatedDeltaNet(nn.Module):
    """A recurrent mixer: scan for committed rows, block softmax for previews."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        heads, taps = c.linear_num_value_heads, c.linear_conv_kernel_dim
        self.eps, self.key_heads = c.rms_norm_eps, c.linear_num_key_heads
        self.in_proj_qkv = Linear(c.hidden_size, c.conv_dim)
        self.in_proj_z = Linear(c.hidden_size, c.value_dim)
        self.in_proj_b = Linear(c.hidden_size, heads)
        self.in_proj_a = Linear(c.hidden_size, heads)
        self.out_proj = Linear(c.value_dim, c.hidden_size)
        self.conv1d = Taps(c.conv_dim, taps)
        self.conv_right_weight = weight(c.conv_dim, taps - 1)
        self.A_log, self.dt_bias = weight(heads), weight(heads)
        self.bd_softmax_logit_scale = weight(heads)
        self.bd_softmax_history_bias = weight(heads)
        self.bd_softmax_history_c = weight(heads)
        self.norm = HeadNorm(c.linear_value_head_dim)
        self.gdn_scan, self.gdn_preview = Region(gdn_scan), Region(gdn_preview)

    def _decay(self) -> Tensor:
        # Above 80 the exponential leaves fp32 and 0 * inf would poison rows whose gate is closed.
        return -torch.exp(self.A_log.float().clamp(max=80.0))

    def _scan(
        self, u: Tensor, z: Tensor | None, b: Tensor, a: Tensor,
        ring: Tensor, state: Tensor, rows: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        y, new_ring, new_state = self.gdn_scan(
            u, z, b, a, ring, state, self.conv1d.weight[:, 0], self._decay(), self.dt_bias.float(),
            self.norm.weight, rows, self.eps, self.key_heads,
        )  # fmt: skip
        return y, new_ring, new_state

    def commit(
        self, x: Tensor, ring: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [B, T, H] -> mixer output [B, T, H], new ring, new state, tape [B, T, C + 2 HV]."""
        u, z, a = self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_a(x)
        b = self.in_proj_b(x)
        y, new_ring, new_state = self._scan(u, z, b, a, ring, state, None)
        return self.out_proj(y), new_ring, new_state, torch.cat([u, b, a], 2)

    def replay(
        self, tape: Tensor, ring: Tensor, state: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Advances ring and state over the first `rows` (i32 [B]) rows of a tape."""
        heads = state.shape[1]
        u, b, a = tape.split([ring.shape[2], heads, heads], 2)
        _, new_ring, new_state = self._scan(u, None, b, a, ring, state, rows)
        return new_ring, new_state

    def preview(self, x: Tensor, ring: Tensor, state: Tensor) -> Tensor:
        """x [B, n, H] -> mixer output [B, n, H]; reads ring and state, writes nothing."""
        taps = torch.cat([self.conv1d.weight[:, 0], self.conv_right_weight], 1)
        y = self.gdn_preview(
            self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_a(x), ring, state, taps,
            self._decay(), self.dt_bias.float(), self.bd_softmax_logit_scale.float(),
            self.bd_softmax_history_bias.float(), self.bd_softmax_history_c.float(),
            self.norm.weight, self.eps, self.key_heads,
        )  # fmt: skip
        out: Tensor = self.out_proj(y)
        return out


class Attention(nn.Module):
    """Gated attention over the committed rows and the block."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.eps = c.rms_norm_eps
        self.q_proj = Linear(c.hidden_size, c.num_attention_heads * 2 * c.head_dim)
        self.k_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size)
        self.q_norm, self.k_norm = HeadNorm(c.head_dim), HeadNorm(c.head_dim)
        self.block_attention = Region(block_attention)

    def forward(
        self,
        x: Tensor,
        k: Tensor,
        v: Tensor,
        length: Tensor,
        angles: tuple[Tensor, Tensor],
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, H], prefix k, v [B, R, KV, D] -> mixer output, the block's k and v."""
        out, new_k, new_v = self.block_attention(
            self.q_proj(x), self.k_proj(x), self.v_proj(x), k, v, length, *angles,
            1.0 + self.q_norm.weight, 1.0 + self.k_norm.weight, self.eps, causal,
        )  # fmt: skip
        return self.o_proj(out), new_k, new_v


class Experts(nn.Module):
    """Holds the stacked expert weights."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = weight(c.num_experts, 2 * c.moe_intermediate_size, c.hidden_size)
        self.down_proj = weight(c.num_experts, c.hidden_size, c.moe_intermediate_size)


class SharedExpert(nn.Module):
    """Holds the shared expert's weights."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(hidden, width), Linear(hidden, width)
        self.down_proj = Linear(width, hidden)


class MixtureOfExperts(nn.Module):
    """Routed experts, inside the block's coreset in previews, and the shared expert."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.top_k, self.coreset = c.num_experts_per_tok, c.coreset_enabled
        self.top_p = c.coreset_top_p
        self.gate = WideLinear(c.hidden_size, c.num_experts)
        self.experts = Experts(c)
        self.shared_expert = SharedExpert(c.hidden_size, c.shared_expert_intermediate_size)
        self.shared_expert_gate = WideLinear(c.hidden_size, 1)
        self.moe = Region(moe)

    def forward(self, x: Tensor, preview: bool) -> Tensor:
        shared = self.shared_expert
        gate_up = torch.cat([shared.gate_proj.weight, shared.up_proj.weight])
        wide = x.float()
        y, _ = self.moe(
            x, self.gate(wide), self.shared_expert_gate(wide), self.experts.gate_up_proj,
            self.experts.down_proj, gate_up, shared.down_proj.weight,
            self.top_k, self.top_p, preview and self.coreset,
        )  # fmt: skip
        out: Tensor = y
        return out
