"""Builds of models whose eager form does not fit into this machine's memory.

Such a build traces the model at its real sizes without reading a weight, checks every pass on a
small twin instead, copies the weights one at a time, and ends `unproved`: nothing was compared.
"""

from __future__ import annotations

import mmap
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from clover_compile import plan
from clover_compile.checkpoint import Checkpoint
from clover_compile.model.clover import Clover
from clover_compile.model.config import GenerationConfig, ModelConfig
from clover_compile.model.load import dtype_of, load_model
from clover_compile.options import BuildOptions
from clover_compile.safetensors_header import map_nothing
from clover_compile.unit import Source

TWIN_VOCABULARY = 512
ADDRESSES = 64
"""Bytes between the starts of tensors that are never touched."""


def shortage(options: BuildOptions, checkpoint: Checkpoint) -> str | None:
    """Why no proof is possible here, in one clause; None where the eager model fits."""
    needs, free = plan.estimate(options, checkpoint), plan.free_memory()
    if plan.have_room(needs.memory_bytes, free):
        return None
    return (
        f"the eager model and its proof need {plan.size(needs.memory_bytes)} of memory, "
        f"{plan.size(free)} are free"
    )


def shell(config: ModelConfig, dtype: torch.dtype) -> Clover:
    """The model with weights nobody may read: address space alone, for tracing."""
    shapes = _shapes(config)
    return load_model(config, lambda name, kind: _untouched(shapes[name], kind), dtype)


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(x.shape) for name, x in Clover(config).named_parameters()}


def _untouched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = prod(shape)
    room: mmap.mmap = map_nothing(max(ADDRESSES, count * dtype.itemsize))
    return torch.frombuffer(room, dtype=dtype, count=count).reshape(shape)


def twin(c: ModelConfig, g: GenerationConfig) -> tuple[Clover, GenerationConfig]:
    """A random model of one layer of each kind, with the real widths, few experts and few ids."""
    kinds = tuple(dict.fromkeys(c.layer_types))
    vocabulary = min(c.vocab_size, TWIN_VOCABULARY)
    small = replace(
        c, num_hidden_layers=len(kinds), layer_types=kinds, vocab_size=vocabulary,
        num_experts=min(c.num_experts, 2 * c.num_experts_per_tok), mask_token_id=vocabulary - 1,
    )  # fmt: skip
    end = None if g.think_end_token_id is None else 1
    generator = torch.Generator().manual_seed(0)
    shapes = _shapes(small)

    def draw(name: str, dtype: torch.dtype) -> Tensor:
        shape = shapes[name]
        # Not tiny, so that a wrong rewrite shows, and no wider than keeps the activations finite.
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.5
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    return load_model(small, draw), replace(g, stop_token_ids=(0,), think_end_token_id=end)


def source(checkpoint: Checkpoint, dtype: torch.dtype) -> Source:
    """The checkpoint's tensors one at a time: asking for one gives back the memory of the last."""

    def read(name: str) -> Tensor:
        checkpoint.release()
        return checkpoint.tensor(name, dtype_of(name, dtype))

    return read
