"""The one ordered list of passes; a target may only append its tail."""

from __future__ import annotations

from clover_compile.passes.base import Pass
from clover_compile.passes.clean_up import CleanUp
from clover_compile.passes.count_ops import CountOps
from clover_compile.passes.fold_weights import FoldWeights
from clover_compile.passes.fuse import Fuse
from clover_compile.passes.join_projections import JoinProjections

PIPELINE: tuple[Pass, ...] = (
    CleanUp(),
    Fuse("rms_norm"),
    Fuse("gdn_scan"),
    Fuse("gdn_preview"),
    Fuse("block_attention"),
    Fuse("moe"),
    Fuse("pick"),
    FoldWeights(),
    JoinProjections(),
    CountOps(),
)
