"""Clover in plain PyTorch: one module with a method per Unit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clover_compile.model.config import ModelConfig
from clover_compile.model.layers import (
    Attention,
    GatedDeltaNet,
    Linear,
    MixtureOfExperts,
    Norm,
    weight,
)

State = dict[str, Tensor]
"""`ring.i` [B, K-1, C], `S.i` [B, HV, DK, DV] fp32, `k.i`, `v.i` [B, R, KV, D] by name."""


class Embedding(nn.Module):
    """Rows of the embedding by id."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = weight(vocabulary, width)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Layer(nn.Module):
    """A mixer and its experts, each behind a norm."""

    def __init__(self, c: ModelConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        if c.is_attention(index):
            self.self_attn = Attention(c)
        else:
            self.linear_attn = GatedDeltaNet(c)
        self.mlp = MixtureOfExperts(c)


class Rotary(nn.Module):
    """Rotary angles; float64 until the angle is reduced, so far positions stay exact."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        half = c.rotary_dim // 2
        self.turns = [c.rope_theta ** (-i / half) / (2 * math.pi) for i in range(half)]

    def forward(self, length: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """cos and sin, fp32 [B, rows, rotary / 2], of the positions from `length` (i32 [B]) on."""
        position = length[:, None] + torch.arange(rows, device=length.device)
        per_row = torch.tensor(self.turns, dtype=torch.float64, device=length.device)
        turn = position.double()[..., None] * per_row
        angle = ((turn - torch.floor(turn)) * (2 * math.pi)).float()
        return torch.cos(angle), torch.sin(angle)


class Backbone(nn.Module):
    """Embedding, layers and the final norm, named as in the checkpoint."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.rotary = Rotary(c)


class Clover(nn.Module):
    """The model; its parameter names are the checkpoint's canonical tensor names."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.config = c
        self.model = Backbone(c)
        if not c.tie_word_embeddings:
            self.lm_head = Linear(c.hidden_size, c.vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        """The activation dtype."""
        return self.model.embed_tokens.weight.dtype

    def head(self, x: Tensor, residual: Tensor) -> Tensor:
        """fp32 logits of rows x + residual [B, T, H]."""
        _, normed = self.model.norm(x, residual)
        if self.config.tie_word_embeddings:
            return F.linear(normed, self.model.embed_tokens.weight).float()
        logits: Tensor = self.lm_head(normed)
        return logits.float()

    def layer(self, index: int) -> Layer:
        """One layer."""
        found = self.model.layers[index]
        assert isinstance(found, Layer)
        return found

    def _rows(
        self, ids: Tensor, length: Tensor, state: State, preview: bool, new: State, tape: State
    ) -> tuple[Tensor, Tensor]:
        """Runs all layers; fills `new` (and `tape`) by name; returns the last sum's two terms."""
        h: Tensor | None = None
        x = self.model.embed_tokens(ids)
        angles = self.model.rotary(length, ids.shape[1]) if self.config.attention_layers else None
        for i in range(self.config.num_hidden_layers):
            layer = self.layer(i)
            h, normed = layer.input_layernorm(x, h)
            if self.config.is_attention(i):
                x, new[f"k.{i}"], new[f"v.{i}"] = layer.self_attn(
                    normed, state[f"k.{i}"], state[f"v.{i}"], length, angles, not preview
                )
            elif preview:
                x = layer.linear_attn.preview(normed, state[f"ring.{i}"], state[f"S.{i}"])
            else:
                x, new[f"ring.{i}"], new[f"S.{i}"], tape[f"tape.{i}"] = layer.linear_attn.commit(
                    normed, state[f"ring.{i}"], state[f"S.{i}"]
                )
            h, normed = layer.post_attention_layernorm(x, h)
            x = layer.mlp(normed, preview)
        assert h is not None
        return x, h

    def commit(
        self, ids: Tensor, length: Tensor, keep: Tensor, state: State
    ) -> tuple[Tensor, State]:
        """Runs ids [B, T] causally; logits [B, keep, V] of the last rows, new state arrays."""
        new: State = {}
        x, h = self._rows(ids, length, state, False, new, {})
        count: Any = keep.item()
        torch._check(count >= 0)
        torch._check(count <= ids.shape[1])
        first = ids.shape[1] - count
        return self.head(x.narrow(1, first, count), h.narrow(1, first, count)), new

    def verify(self, ids: Tensor, length: Tensor, state: State) -> tuple[Tensor, State]:
        """Runs ids [B, T] causally; logits of all rows, new k, v rows and the tapes."""
        new: State = {}
        tape: State = {}
        logits = self.head(*self._rows(ids, length, state, False, new, tape))
        rows = {name: x for name, x in new.items() if name[0] in "kv"}
        return logits, rows | tape

    def replay(self, state: State, tape: State, rows: Tensor) -> State:
        """ring and S after the first `rows` (i32 [B]) rows of the tapes of a verify."""
        new: State = {}
        for i in self.config.gdn_layers:
            layer = self.layer(i).linear_attn
            new[f"ring.{i}"], new[f"S.{i}"] = layer.replay(
                tape[f"tape.{i}"], state[f"ring.{i}"], state[f"S.{i}"], rows
            )
        return new

    def preview(self, ids: Tensor, length: Tensor, state: State) -> Tensor:
        """One denoising evaluation of a block ids [B, n]: logits [B, n, V]; writes nothing."""
        return self.head(*self._rows(ids, length, state, True, {}, {}))

    def new_state(self, batch: int = 1) -> State:
        """The state of an empty sequence (R = 0)."""
        return dict(_empty_state(self.config, batch, self.model.embed_tokens.weight.dtype))


def _empty_state(c: ModelConfig, batch: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for i in range(c.num_hidden_layers):
        if c.is_attention(i):
            for name in (f"k.{i}", f"v.{i}"):
                yield name, torch.zeros(batch, 0, c.num_key_value_heads, c.head_dim, dtype=dtype)
        else:
            heads, dk, dv = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
            yield (
                f"ring.{i}",
                torch.zeros(batch, c.linear_conv_kernel_dim - 1, c.conv_dim, dtype=dtype),
            )
            yield f"S.{i}", torch.zeros(batch, heads, dk, dv)
