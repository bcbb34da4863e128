"""What an `ort-cpu` build needs, from headers alone; the figures were fitted to measured builds.

Memory, at the peak, which is the proof:

    BASE + PER_LAYER x layers            interpreter and libraries; traces and lowered graphs
    + stored                             the checkpoint's files, mapped and read
    + fp32                               the bundle's weights, mapped and read
    + prepacked                          matrices ONNX Runtime copies into a layout of its own
    + PROBE_ROWS x vocabulary x 4        logits of the probes, the bundle's and the eager model's

Mapped files count because they are resident when there is room; under pressure the system drops
them and the build goes on, more slowly. The eager model, with fp32 copies of weights that are
stored otherwise, is gone by then: those are never more than the bundle's.
"""

from __future__ import annotations

from math import prod

from clover_compile.checkpoint import Checkpoint
from clover_compile.model.config import ModelConfig
from clover_compile.targets.estimate import Estimate

BASE, PER_LAYER = 530_000_000, 13_000_000
PROBE_ROWS = 1_150

STORED_LOGITS = 64
"""Rows of logits of a Unit that probes.safetensors holds."""
STATES = 3
"""Recurrent states it holds: after the commits, and two of a replay."""
PROMPT = 130
"""Rows of keys and values it holds."""

TEXT, TEXT_PER_LAYER = 120_000, 30_000
"""Bytes of runner and texts; of Unit files and manifest, per layer."""

SECONDS, SECONDS_PER_LAYER, SECONDS_PER_GB, SECONDS_PER_TOKEN = 25.0, 4.0, 60.0, 6e-4
"""On two idle cores; the last for each token of the vocabulary, which `pick` sorts."""
FASTER, SLOWER = 0.5, 4.0


def estimate(checkpoint: Checkpoint, dtype: str, context: int) -> Estimate:
    """Needs of a build of this checkpoint, in fp32 and for any context; reads nothing."""
    c = checkpoint.config
    sizes = {name: 4 * prod(checkpoint.shape(name)) for name in checkpoint.names}
    fp32 = sum(sizes.values())
    stored = sum(checkpoint.stored_bytes(name) for name in checkpoint.names)
    prepacked = sum(size for name, size in sizes.items() if _is_prepacked(name))
    layers = c.num_hidden_layers
    memory = BASE + PER_LAYER * layers + stored + fp32 + prepacked
    seconds = SECONDS + SECONDS_PER_LAYER * layers + SECONDS_PER_GB * fp32 / 1e9
    seconds += SECONDS_PER_TOKEN * c.vocab_size
    return Estimate(
        unproved_memory_bytes=unproved(checkpoint, 4),
        memory_bytes=memory + 4 * PROBE_ROWS * c.vocab_size,
        weight_bytes=fp32,
        disk_bytes=fp32 + _probes(c) + TEXT + TEXT_PER_LAYER * layers,
        minutes=(round(FASTER * seconds / 60, 1), round(SLOWER * seconds / 60, 1)),
    )


UNPROVED, UNPROVED_PER_LAYER = 1_300_000_000, 25_000_000
"""Interpreter, libraries and the twin; the traces of the model itself."""


def unproved(checkpoint: Checkpoint, itemsize: int) -> int:
    """Peak memory of a build without the eager model: weights pass through one at a time."""
    c = checkpoint.config
    twin = 4 * 2 * c.num_experts_per_tok * 3 * c.moe_intermediate_size * c.hidden_size
    largest = max(prod(checkpoint.shape(name)) for name in checkpoint.names)
    return UNPROVED + 2 * twin + UNPROVED_PER_LAYER * c.num_hidden_layers + 2 * itemsize * largest


def _is_prepacked(name: str) -> bool:
    """Whether a preview multiplies by the tensor whole; experts are gathered, rows looked up."""
    matrix = name.endswith(("_proj.weight", "gate.weight", "lm_head.weight", "in_proj_qkv.weight"))
    return matrix or ".in_proj_" in name


def _probes(c: ModelConfig) -> int:
    """Bytes of probes.safetensors: logits, states, keys and values."""
    logits = 3 * STORED_LOGITS * c.vocab_size
    heads = c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim
    recurrent = heads + (c.linear_conv_kernel_dim - 1) * c.conv_dim
    cache = 2 * PROMPT * c.num_key_value_heads * c.head_dim
    layers = len(c.gdn_layers) * STATES * recurrent + len(c.attention_layers) * cache
    return 4 * (logits + layers + c.vocab_size)
