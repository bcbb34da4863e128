"""What a `trt-*` build needs, from headers alone. Not fitted: only small builds were measured."""

from __future__ import annotations

from dataclasses import replace

from clover_compile.checkpoint import Checkpoint
from clover_compile.targets.estimate import Estimate
from clover_compile.targets.triton.plan import estimate as triton_estimate

KERNELS_PER_LAYER = 8_000_000
"""Bytes of cubins in the nodes of a layer, all Units together."""
PLUGIN_MINUTES = (0.1, 0.5)


def estimate(checkpoint: Checkpoint, dtype: str, context: int) -> Estimate:
    """Needs of a build of this checkpoint; reads nothing."""
    like = triton_estimate(checkpoint, dtype, context)
    nodes = KERNELS_PER_LAYER * checkpoint.config.num_hidden_layers
    low, high = like.minutes
    return replace(
        like,
        memory_bytes=like.memory_bytes + 2 * nodes,
        disk_bytes=like.disk_bytes + nodes,
        minutes=(low + PLUGIN_MINUTES[0], high + PLUGIN_MINUTES[1]),
    )
