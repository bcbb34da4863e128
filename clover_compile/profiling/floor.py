"""The least time a Unit can take here: the bytes it must read and the FLOP it must do, against the
bandwidth and the matrix-product rate that this machine shows in the same minute.

Counted from the sizes of the checkpoint's tensors and from which experts the rows are routed to; no
compiled graph is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clover_compile.model.config import ModelConfig
from clover_compile.profiling.rounds import Clock, seconds

Array = NDArray[Any]

FP32 = 4
_NEVER_WHOLE = ("embed_tokens.weight", "experts.gate_up_proj", "experts.down_proj")
_PREVIEW_ONLY = ("conv_right_weight", "bd_softmax_")
_COMMIT_ONLY = ("in_proj_b.weight",)
_REPLAYED = ("conv1d.weight", "A_log", "dt_bias")


@dataclass(frozen=True)
class Work:
    """What one call of a Unit must do at least."""

    bytes: int
    """Weights, state and logits, each once."""
    flop: int
    experts: float
    """Experts hit per layer, on average."""


@dataclass(frozen=True)
class Rates:
    """What the machine does, in bytes and in FLOP per second."""

    bandwidth: float
    product: float

    def seconds(self, work: Work) -> float:
        """The floor of a call."""
        return max(work.bytes / self.bandwidth, work.flop / self.product)


def experts_used(router: Array, top_k: int, top_p: float | None) -> tuple[int, int]:
    """Experts hit and pairs of row and expert, from router logits [T, E] of one layer.

    `top_p`: the coreset of a preview, None without one.
    """
    p = np.exp(router.astype(np.float64) - router.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    allowed = np.ones(p.shape[1], bool)
    if top_p is not None:
        total = np.zeros(p.shape[1])
        for row in p:
            best = np.argsort(-row, kind="stable")[:top_k]
            total[best] += row[best]
        order = np.argsort(-total, kind="stable")
        mass = np.cumsum(total[order]) / total.sum()
        count = 1 + int((mass[:-1] < top_p).sum())
        allowed[:] = False
        allowed[order[:count]] = True
    chosen = [np.argsort(-np.where(allowed, row, -1), kind="stable")[:top_k] for row in p]
    used = [row[allowed[row]] for row in chosen]
    return len(set(np.concatenate(used).tolist())), sum(map(len, used))


def work(
    c: ModelConfig, shapes: Mapping[str, tuple[int, ...]], *, unit: str, rows: int, prefix: int,
    keep: int, routers: Sequence[Array],
) -> Work:  # fmt: skip
    """The work of one call; `routers` are the router logits [T, E] of its layers."""
    if unit == "pick":
        return Work(FP32 * (rows + 1) * c.vocab_size, 4 * rows * c.vocab_size, 0.0)
    preview, replay = unit == "preview", unit == "replay"
    top_p = c.coreset_top_p if preview and c.coreset_enabled else None
    used = [experts_used(router, c.num_experts_per_tok, top_p) for router in routers]
    hit, pairs = sum(x for x, _ in used), sum(x for _, x in used)
    dense = {n: s for n, s in shapes.items() if _is_read(n, unit, keep, c)}
    expert = 3 * c.moe_intermediate_size * c.hidden_size
    size = sum(map(prod, dense.values())) + expert * hit + (not replay) * rows * c.hidden_size
    flop = 2 * expert * pairs
    for name, shape in dense.items():
        flop += 2 * prod(shape) * (keep if _is_head(name, c) else rows)
    size += _state(c, unit, rows, prefix) + keep * c.vocab_size
    heads, dk, dv = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    block = 2 * rows * (dk + dv) if preview else 4 * dk * dv
    flop += len(c.gdn_layers) * rows * heads * (2 * dk * dv + block)
    if not replay:
        seen = prefix + (rows if preview else (rows + 1) / 2)
        row = 4 * seen * c.num_attention_heads * c.head_dim
        flop += int(len(c.attention_layers) * rows * row)
    return Work(FP32 * size, flop, hit / max(1, len(routers)))


def own_flop(c: ModelConfig, op: str, *, block: bool, rows: int, prefix: int, pairs: int) -> int:
    """FLOP of one call of a fused op beside those of its dense weights.

    `block`: rows see the whole block, as in a preview; `pairs`: of row and expert.
    """
    heads, dk, dv = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    if op.startswith("moe"):
        return 2 * 3 * c.moe_intermediate_size * c.hidden_size * pairs
    if op in ("gdn_scan", "gdn_preview"):
        mixed = 4 * dk * dv if op == "gdn_scan" else 2 * rows * (dk + dv)
        return rows * heads * (2 * dk * dv + mixed)
    if op == "block_attention":
        seen = prefix + (rows if block else (rows + 1) / 2)
        return int(rows * 4 * seen * c.num_attention_heads * c.head_dim)
    return 0


def _is_head(name: str, c: ModelConfig) -> bool:
    return name == ("model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight")


def _is_read(name: str, unit: str, keep: int, c: ModelConfig) -> bool:
    """Whether a Unit reads a tensor of the checkpoint whole."""
    if _is_head(name, c):
        return keep > 0
    if unit == "replay":
        return name.endswith(_REPLAYED)
    left_out = _NEVER_WHOLE + (_COMMIT_ONLY if unit == "preview" else _PREVIEW_ONLY)
    return not any(part in name for part in left_out)


def _state(c: ModelConfig, unit: str, rows: int, prefix: int) -> int:
    """Elements of the state that a call reads and writes."""
    heads = c.linear_num_value_heads
    carried = heads * c.linear_key_head_dim * c.linear_value_head_dim
    carried += (c.linear_conv_kernel_dim - 1) * c.conv_dim
    tape = rows * (c.conv_dim + 2 * heads) if unit in ("verify", "replay") else 0
    size = len(c.gdn_layers) * (carried * (2 if unit in ("commit", "replay") else 1) + tape)
    if unit != "replay":
        row = 2 * c.num_key_value_heads * c.head_dim
        size += len(c.attention_layers) * row * (prefix + (0 if unit == "preview" else rows))
    return size


class Machine:
    """Measures rates; its buffers are made once and stay mapped."""

    def __init__(self, sizes: list[int], clock: Clock) -> None:
        """`sizes`: bytes that will be asked for."""
        self._clock = clock
        self._buffer = torch.ones(max(sizes) // FP32)
        self._a, self._b = torch.ones(1024, 1024), torch.ones(1024, 1024)
        self._rows, self._wide = torch.ones(32, 1024), torch.ones(4096, 1024)

    def rates(self, size: int) -> Rates:
        """Read bandwidth over `size` bytes again and again (what a cache holds of them is the
        Unit's gain as well), and the better of two fp32 matrix products: both the best of some."""
        part = self._buffer[: size // FP32]
        matrix = part[: len(part) // 1024 * 1024].view(-1, 1024)
        with torch.inference_mode():
            read = min(self._best(part.sum, 3), self._best(lambda: matrix @ self._a[0], 3))
            square = 2 * 1024**3 / self._best(lambda: self._a @ self._b, 5)
            flat = 2 * 32 * 1024 * 4096 / self._best(lambda: self._rows @ self._wide.T, 10)
        return Rates(size / read, max(square, flat))

    def _best(self, call: Callable[[], object], times: int) -> float:
        """Shortest of some runs, seconds."""
        return min(seconds(call, self._clock) for _ in range(times))
