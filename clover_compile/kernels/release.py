"""The calls of the released 35B model: every place a kernel stands in its Units, at real sizes.

Sizes from the model's config: 40 layers (30 GDN, 10 attention), hidden 2048, GDN 16 key and 32
value heads of 128, attention 16 heads and 2 key-value heads of 256 with 64 rotary channels, 256
experts of 512 (8 per row) and a shared one of 512, 248,320 ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clover_compile.kernels.plans import plan_of
from clover_compile.kernels.table import fused_op
from clover_compile.runtime.launch_plan import Plan

HIDDEN, VOCABULARY, EPS = 2048, 248_320, 1e-6
KEY_HEADS, HEADS, DK, DV, TAPS = 16, 32, 128, 128, 4
CHANNELS = 2 * KEY_HEADS * DK + HEADS * DV
QUERY_HEADS, KV_HEADS, DIM, ROTARY = 16, 2, 256, 64
EXPERTS, TOP_K, WIDTH, SHARED, TOP_P = 256, 8, 512, 512, 0.9
GDN_LAYERS, ATTENTION_LAYERS = 30, 10

Make = Callable[..., Tensor]
"""torch.empty-like: make(*shape, dtype=...) on the device of choice."""


@dataclass(frozen=True)
class Place:
    """One place of a kernel in the released model."""

    name: str
    op: str
    arguments: Callable[[Make, int, int], list[Any]]
    """(make, rows, prefix rows) -> arguments of the op's reference; activations in bf16."""
    outputs: tuple[str, ...] | None = None
    """Outputs that are read there; None: all."""
    least: int = 80
    """Smallest compute capability that has its dtypes, times ten."""

    def plan(self, capability: int) -> Plan:
        """The launch plan; rows and prefix stay symbols."""
        made = self.arguments(_meta, 2, 2)
        return plan_of(fused_op(self.op), made, self.outputs, capability)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _joined(make: Make, rows: int, *widths: int) -> list[Tensor]:
    """Neighbouring outputs of one projection, as the passes join them."""
    return list(make(1, rows, sum(widths)).split(list(widths), 2))


def _projection(width: int, outputs: int, wide: bool = False) -> Callable[..., list[Any]]:
    def arguments(make: Make, rows: int, _: int) -> list[Any]:
        return [make(1, rows, width), make(outputs, width), wide]

    return arguments


def _rms_norm(make: Make, rows: int, _: int) -> list[Any]:
    return [make(1, rows, HIDDEN), make(1, rows, HIDDEN), make(HIDDEN), EPS]


def _heads(make: Make, count: int) -> list[Tensor]:
    return [make(HEADS, dtype=torch.float32) for _ in range(count)]


def _carried(make: Make) -> list[Tensor]:
    """ring and S."""
    return [make(1, TAPS - 1, CHANNELS), make(1, HEADS, DK, DV, dtype=torch.float32)]


def _gdn_preview(make: Make, rows: int, _: int) -> list[Any]:
    u, z, a = _joined(make, rows, CHANNELS, HEADS * DV, HEADS)
    taps = make(CHANNELS, 2 * TAPS - 1)
    return [u, z, a, *_carried(make), taps, *_heads(make, 5), make(DV), EPS, KEY_HEADS]


def _gdn_scan(replay: bool) -> Callable[..., list[Any]]:
    def arguments(make: Make, rows: int, _: int) -> list[Any]:
        if replay:
            # A tape is what a verify left behind: the joined projection, z unread.
            u, _z, a, b = _joined(make, rows, CHANNELS, HEADS * DV, HEADS, HEADS)
            z, kept = None, make(1, dtype=torch.int32)
        else:
            u, z, a, b = _joined(make, rows, CHANNELS, HEADS * DV, HEADS, HEADS)
            kept = None
        carried, conv = _carried(make), make(CHANNELS, TAPS)
        return [
            u, z, b, a, *carried, conv, *_heads(make, 2), make(DV), kept, EPS, KEY_HEADS,
        ]  # fmt: skip

    return arguments


def _attention(causal: bool) -> Callable[..., list[Any]]:
    def arguments(make: Make, rows: int, prefix: int) -> list[Any]:
        kv = KV_HEADS * DIM
        query_gate, k, v = _joined(make, rows, 2 * QUERY_HEADS * DIM, kv, kv)
        old = [make(1, prefix, KV_HEADS, DIM) for _ in range(2)]
        length = make(1, dtype=torch.int32)
        angles = [make(1, rows, ROTARY // 2, dtype=torch.float32) for _ in range(2)]
        return [query_gate, k, v, *old, length, *angles, make(DIM), make(DIM), EPS, causal]

    return arguments


def _moe(block: bool) -> Callable[..., list[Any]]:
    def arguments(make: Make, rows: int, _: int) -> list[Any]:
        router, shared_gate = _joined(partial(make, dtype=torch.float32), rows, EXPERTS, 1)
        return [
            make(1, rows, HIDDEN), router, shared_gate,
            make(EXPERTS, 2 * WIDTH, HIDDEN), make(EXPERTS, HIDDEN, WIDTH),
            make(2 * SHARED, HIDDEN), make(HIDDEN, SHARED), TOP_K, TOP_P, block,
        ]  # fmt: skip

    return arguments


def _projection_fp8(width: int, outputs: int, wide: bool = False) -> Callable[..., list[Any]]:
    def arguments(make: Make, rows: int, _: int) -> list[Any]:
        weight = make(outputs, width, dtype=torch.float8_e4m3fn)
        return [make(1, rows, width), weight, make(outputs, dtype=torch.float32), wide]

    return arguments


def _moe_fp8(block: bool) -> Callable[..., list[Any]]:
    def arguments(make: Make, rows: int, prefix: int) -> list[Any]:
        plain = _moe(block)(make, rows, prefix)
        shapes = [tuple(x.shape) for x in plain[3:7]]
        weights = [make(*shape, dtype=torch.float8_e4m3fn) for shape in shapes]
        scales = [make(*shape[:-1], dtype=torch.float32) for shape in shapes]
        return [*plain[:3], *weights, *scales, *plain[7:]]

    return arguments


def _pick(make: Make, rows: int, _: int) -> list[Any]:
    floats, ints = {"dtype": torch.float32}, {"dtype": torch.int32}
    return [
        make(1, rows, VOCABULARY, **floats), make(1, VOCABULARY, **ints), make(1, **ints),
        make(1, dtype=torch.bool), make(12, **floats), make(1, rows, dtype=torch.int64),
        make((), dtype=torch.bool), make(1, rows, **floats), None,
        VOCABULARY - 1, [VOCABULARY - 2, VOCABULARY - 3], 151_668,
    ]  # fmt: skip


def _embedding(make: Make, rows: int, _: int) -> list[Any]:
    return [make(1, rows, dtype=torch.int64), make(VOCABULARY, HIDDEN)]


def _rotary(make: Make, rows: int, _: int) -> list[Any]:
    turns = make(ROTARY // 2, dtype=torch.float64)
    return [make(1, rows, dtype=torch.int64), make(1, dtype=torch.int32), turns]


def places() -> Iterator[Place]:
    """Every place, in the order of a layer."""
    yield Place("embedding", "embedding", _embedding)
    yield Place("rotary", "rotary", _rotary)
    yield Place("rms_norm", "rms_norm", _rms_norm)
    wide = CHANNELS + HEADS * DV
    yield Place("gdn-in", "projection", _projection(HIDDEN, wide + 2 * HEADS))
    yield Place("gdn-in-preview", "projection", _projection(HIDDEN, wide + HEADS))
    yield Place("gdn_preview", "gdn_preview", _gdn_preview)
    yield Place("gdn_scan-commit", "gdn_scan", _gdn_scan(False))
    yield Place("gdn_scan-verify", "gdn_scan", _gdn_scan(False), ("y",))
    yield Place("gdn_scan-replay", "gdn_scan", _gdn_scan(True), ("new_ring", "new_state"))
    yield Place("gdn-out", "projection", _projection(HEADS * DV, HIDDEN))
    heads = 2 * QUERY_HEADS + 2 * KV_HEADS
    yield Place("attention-in", "projection", _projection(HIDDEN, heads * DIM))
    yield Place("block_attention-causal", "block_attention", _attention(True))
    yield Place("block_attention-block", "block_attention", _attention(False))
    yield Place("attention-out", "projection", _projection(QUERY_HEADS * DIM, HIDDEN))
    yield Place("router", "projection", _projection(HIDDEN, EXPERTS + 1, True))
    yield Place("moe-block", "moe", _moe(True), ("y",))
    yield Place("moe-rows", "moe", _moe(False), ("y",))
    yield Place("head", "projection", _projection(HIDDEN, VOCABULARY, True))
    yield Place("pick", "pick", _pick)
    yield from _fp8_places()


FP8 = 89
"""Smallest compute capability with e4m3, times ten."""


def _fp8_places() -> Iterator[Place]:
    """The places whose weights are stored in fp8 where a bundle is built so."""
    wide = CHANNELS + HEADS * DV
    heads = 2 * QUERY_HEADS + 2 * KV_HEADS
    for name, width, outputs in (
        ("gdn-in", HIDDEN, wide + 2 * HEADS),
        ("gdn-in-preview", HIDDEN, wide + HEADS),
        ("gdn-out", HEADS * DV, HIDDEN),
        ("attention-in", HIDDEN, heads * DIM),
        ("attention-out", QUERY_HEADS * DIM, HIDDEN),
    ):
        yield Place(f"{name}-fp8", "projection_fp8", _projection_fp8(width, outputs), least=FP8)
    yield Place("head-fp8", "projection_fp8", _projection_fp8(HIDDEN, VOCABULARY, True), least=FP8)
    yield Place("moe-block-fp8", "moe_fp8", _moe_fp8(True), ("y",), FP8)
    yield Place("moe-rows-fp8", "moe_fp8", _moe_fp8(False), ("y",), FP8)


_SECOND = ("rms_norm", "router")
PASSES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "preview": (
        ("rms_norm", "gdn-in-preview", "gdn_preview", "gdn-out", *_SECOND, "moe-block"),
        ("rms_norm", "attention-in", "block_attention-block", "attention-out", *_SECOND,
         "moe-block"),
        ("embedding", "rotary", "rms_norm", "head", "pick"),
    ),
    "verify": (
        ("rms_norm", "gdn-in", "gdn_scan-verify", "gdn-out", *_SECOND, "moe-rows"),
        ("rms_norm", "attention-in", "block_attention-causal", "attention-out", *_SECOND,
         "moe-rows"),
        ("embedding", "rotary", "rms_norm", "head", "pick"),
    ),
    "commit": (
        ("rms_norm", "gdn-in", "gdn_scan-commit", "gdn-out", *_SECOND, "moe-rows"),
        ("rms_norm", "attention-in", "block_attention-causal", "attention-out", *_SECOND,
         "moe-rows"),
        ("embedding", "rotary"),
    ),
    "step": (
        ("rms_norm", "gdn-in", "gdn_scan-commit", "gdn-out", *_SECOND, "moe-rows"),
        ("rms_norm", "attention-in", "block_attention-causal", "attention-out", *_SECOND,
         "moe-rows"),
        ("embedding", "rotary", "rms_norm", "head", "pick"),
    ),
    "replay": (("gdn_scan-replay",), (), ()),
}  # fmt: skip
"""Pass -> places of a GDN layer, of an attention layer, and around the layers.

step: a commit of one row with its logits, as causal decoding makes it; commit: a finished block,
without logits.
"""
