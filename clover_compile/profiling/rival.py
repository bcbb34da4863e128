"""The eager model as a rival: its Units on torch tensors, experts grouped as they are or dense."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clover_compile import trace
from clover_compile.kernels.moe.reference import coreset, moe
from clover_compile.model import interface
from clover_compile.model.clover import Clover
from clover_compile.model.config import GenerationConfig
from clover_compile.runtime.engine import Array, Arrays

FORMS = {"grouped": moe, "dense": lambda *arguments: dense_moe(*arguments)}
"""Ways to compute routed experts: those hit, one by one, or all of them for every row."""


def dense_moe(
    x: Tensor, router: Tensor, shared_gate: Tensor, gate_up: Tensor, down: Tensor,
    shared_gate_up: Tensor, shared_down: Tensor, top_k: int, top_p: float, block: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What clover::moe means, by batched products over all experts; arguments and results alike."""
    experts = router.shape[-1]
    kept = torch.ones_like(router[:, :1], dtype=torch.bool)
    if block:
        kept = coreset(torch.softmax(router, -1), top_k, top_p)
    best, expert = torch.sort(
        torch.where(kept, router, -torch.inf), dim=-1, descending=True, stable=True
    )
    weight = torch.zeros_like(router).scatter(
        -1, expert[..., :top_k], torch.softmax(best[..., :top_k], -1)
    )
    rows = x.flatten(0, 1)
    gate, up = torch.matmul(rows, gate_up.mT).chunk(2, -1)
    each = torch.matmul(F.silu(gate) * up, down.mT)
    routed = (each * weight.flatten(0, 1).T[..., None]).sum(0).view(x.shape)
    gate, up = F.linear(x, shared_gate_up).chunk(2, -1)
    shared = F.linear(F.silu(gate) * up, shared_down)
    return routed + torch.sigmoid(shared_gate) * shared, kept.view(-1, experts).sum(-1).int()


class Rival:
    """Runs the eager Units without the checks of the proof."""

    def __init__(self, model: Clover, generation: GenerationConfig) -> None:
        self._config = model.config
        self._layers = [model.layer(i).mlp.moe for i in range(model.config.num_hidden_layers)]
        self._entries = {
            unit: trace.entry(model, generation, unit) for unit in interface.units(model.config)
        }

    def take(self, form: str) -> None:
        """Sets how routed experts are computed, one of FORMS."""
        for layer in self._layers:
            layer.reference = FORMS[form]

    def has(self, unit: str) -> bool:
        """Whether the eager model has this Unit."""
        return unit in self._entries

    def arguments(self, unit: str, feeds: Arrays) -> tuple[Tensor, ...]:
        """The feeds as the Unit's arguments."""
        names = interface.inputs(self._config, unit)
        return tuple(torch.from_numpy(feeds[name].copy()) for name in names)

    def run(self, unit: str, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Runs one Unit; its outputs in order."""
        with torch.inference_mode():
            results: tuple[Tensor, ...] = self._entries[unit](*arguments)
        return results

    def routers(self, unit: str, arguments: tuple[Tensor, ...]) -> list[Array]:
        """Router logits [T, E] of every layer in one run."""
        seen: list[Array] = []

        def note(_: torch.nn.Module, given: tuple[Any, ...]) -> None:
            seen.append(given[1][0].numpy().copy())

        handles = [layer.register_forward_pre_hook(note) for layer in self._layers]
        try:
            self.run(unit, arguments)
        finally:
            for handle in handles:
                handle.remove()
        return seen
