"""What a `triton-*` build needs, from headers alone; fitted to builds on a machine without a GPU.

Memory, at the peak, which is the eager model on the probes: the weights as stored and in bf16, and
an fp32 copy of them, by which the model's own rounding noise is measured.
"""

from __future__ import annotations

from math import prod

from clover_compile.checkpoint import Checkpoint
from clover_compile.model.interface import WIDE
from clover_compile.targets.estimate import Estimate
from clover_compile.targets.ort_cpu.plan import BASE, PER_LAYER, PROBE_ROWS, unproved
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
    kept = sum(checkpoint.stored_bytes(name) for name in checkpoint.names)
    c = checkpoint.config
    memory = BASE + PER_LAYER * c.num_hidden_layers + kept + fp32 + 4 * PROBE_ROWS * c.vocab_size
    if kept != stored:
        memory += stored
    low, high = like.minutes
    return Estimate(
        memory_bytes=memory,
        unproved_memory_bytes=unproved(checkpoint, 2),
        disk_bytes=like.disk_bytes - fp32 + stored + KERNELS,
        minutes=(low + COMPILE_MINUTES[0], high + COMPILE_MINUTES[1]),
        device_bytes=stored + DEVICE,
    )
