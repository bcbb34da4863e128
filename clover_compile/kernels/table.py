"""The fused ops, and what else has kernels, by name; nothing is imported before it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clover_compile.kernels.op import FusedOp

OPS: dict[str, str] = {
    "rms_norm": "clover_compile.kernels.rms_norm.spec:SPEC",
    "gdn_scan": "clover_compile.kernels.gdn_scan.spec:SPEC",
    "gdn_preview": "clover_compile.kernels.gdn_preview.spec:SPEC",
    "block_attention": "clover_compile.kernels.block_attention.spec:SPEC",
    "moe": "clover_compile.kernels.moe.spec:SPEC",
    "pick": "clover_compile.kernels.pick.spec:SPEC",
}

KERNELS: dict[str, str] = {
    **OPS,
    "projection": "clover_compile.kernels.projection.spec:SPEC",
    "projection_fp8": "clover_compile.kernels.projection_fp8.spec:SPEC",
    "moe_fp8": "clover_compile.kernels.moe_fp8.spec:SPEC",
    "embedding": "clover_compile.kernels.embedding.spec:SPEC",
    "rotary": "clover_compile.kernels.rotary.spec:SPEC",
}
"""Everything with a launch plan: the fused ops, and what stands between them."""


def fused_op(name: str) -> FusedOp:
    """The spec of the op called `name`; KeyError if there is none."""
    module, attribute = KERNELS[name].split(":")
    spec: FusedOp = getattr(importlib.import_module(module), attribute)
    return spec
