"""What a `triton-*` build needs, from headers alone; fitted to builds on a machine without a GPU.

Memory, at the peak, which is the eager model on the probes: the weights as stored and in bf16, and
an fp32 copy of them, by which the model's own rounding noise is measured.
"""

from __future__ import annotations

from math import prod

from clover_compile.checkpoint import Checkpoint
from clover_compile.model.config import ModelConfig
from clover_compile.model.interface import WIDE
from clover_compile.runtime.gpu_needs import RESERVE
from clover_compile.targets.estimate import Estimate
from clover_compile.targets.ort_cpu.plan import BASE, PER_LAYER, PROBE_ROWS, unproved
from clover_compile.targets.ort_cpu.plan import estimate as fp32_estimate

KERNELS = 12_000_000
"""Bytes of cubins, PTX and plans."""
COMPILE_MINUTES = (0.5, 8.0)
"""Compiling some sixty kernels on two cores and more."""
SCALE = 4
"""Bytes of an fp8 matrix's scale, one for each output channel."""


def weight_bytes(checkpoint: Checkpoint, dtype: str) -> int:
    """Bytes of the weights as a bundle stores them in bf16, fp16 or fp8."""
    total = 0
    for name in checkpoint.names:
        shape = checkpoint.shape(name)
        if dtype == "fp8" and _is_quantised(name):
            total += _in_fp8(shape)
        else:
            total += (4 if name.split(".")[-1] in WIDE else 2) * prod(shape)
    if dtype == "fp8" and checkpoint.config.tie_word_embeddings:  # the table stays, the head not
        total += _in_fp8(checkpoint.shape("model.embed_tokens.weight"))
    return total


def state_bytes(c: ModelConfig, context: int) -> int:
    """Bytes of one sequence's state over the whole context: S in fp32, the rest in 16 bits."""
    heads = c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim
    ring = (c.linear_conv_kernel_dim - 1) * c.conv_dim
    rows = 2 * context * c.num_key_value_heads * c.head_dim
    return len(c.gdn_layers) * (4 * heads + 2 * ring) + len(c.attention_layers) * 2 * rows


def _is_quantised(name: str) -> bool:
    """Whether an fp8 build makes e4m3 of a tensor: the matrices of products and the experts."""
    return "_proj" in name or name == "lm_head.weight"


def _in_fp8(shape: tuple[int, ...]) -> int:
    return prod(shape) + SCALE * prod(shape[:-1])


def estimate(checkpoint: Checkpoint, dtype: str, context: int) -> Estimate:
    """Needs of a build of this checkpoint; reads nothing.

    dtype: bf16, fp16 or fp8. The eager model of an fp8 build is in bf16 too.
    """
    sizes = {name: prod(checkpoint.shape(name)) for name in checkpoint.names}
    stored, held = (weight_bytes(checkpoint, x) for x in ("bf16", dtype))
    like = fp32_estimate(checkpoint, "fp32", context)
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
        weight_bytes=held,
        disk_bytes=like.disk_bytes - fp32 + held + KERNELS,
        minutes=(low + COMPILE_MINUTES[0], high + COMPILE_MINUTES[1]),
        device_bytes=held + state_bytes(c, context) + RESERVE,
    )
