"""What a `triton-*` build needs, from headers alone. Not fitted: no such build was measured."""

from __future__ import annotations

from math import prod

from clover_compile.checkpoint import Checkpoint
from clover_compile.model.interface import WIDE
from clover_compile.targets.estimate import Estimate
from clover_compile.targets.ort_cpu.plan import estimate as fp32_estimate

KERNELS = 12_000_000
"""Bytes of cubins, PTX and plans."""
COMPILE_MINUTES = (0.5, 8.0)
"""Compiling some sixty kernels on two cores and more."""
DEVICE = 1_000_000_000
"""Bytes on the device beside the weights: buffers, graphs, one state."""


def estimate(checkpoint: Checkpoint) -> Estimate:
    """Needs of a build of this checkpoint in bf16; reads nothing."""
    sizes = {name: prod(checkpoint.shape(name)) for name in checkpoint.names}
    stored = sum((4 if name.split(".")[-1] in WIDE else 2) * n for name, n in sizes.items())
    like = fp32_estimate(checkpoint)
    fp32 = 4 * sum(sizes.values())
    low, high = like.minutes
    return Estimate(
        memory_bytes=like.memory_bytes,
        disk_bytes=like.disk_bytes - fp32 + stored + KERNELS,
        minutes=(low + COMPILE_MINUTES[0], high + COMPILE_MINUTES[1]),
        device_bytes=stored + DEVICE,
    )
