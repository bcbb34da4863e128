"""The eager model behind the runner's engine protocol: the truth every bundle is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clover_compile import trace
from clover_compile.model import interface
from clover_compile.model.clover import Clover
from clover_compile.model.config import GenerationConfig

Array = NDArray[Any]

TIE = 1e-5
"""A relative gap below which two correct engines may choose differently."""


@dataclass
class Gaps:
    """Smallest relative gap, per row of the last call, between a routing choice and its rival."""

    rows: Tensor = field(default_factory=lambda: torch.zeros(0))

    def first_tie(self) -> int:
        """Number of rows before the first near-tie (all rows when there is none)."""
        near = (self.rows < TIE).nonzero()
        return int(near[0]) if len(near) else len(self.rows)

    @property
    def tied(self) -> bool:
        """Whether any row was a near-tie."""
        return self.first_tie() < len(self.rows)


class EagerEngine:
    """Runs the Units in plain torch and watches how close each routing choice was."""

    def __init__(self, model: Clover, generation: GenerationConfig) -> None:
        self.config = model.config
        self.model, self.dtype = model, model.dtype
        self.gaps = Gaps()
        self._entries = {
            unit: trace.entry(model, generation, unit) for unit in interface.units(model.config)
        }
        self._routers = [model.layer(i).mlp.moe for i in range(self.config.num_hidden_layers)]

    def run(
        self, unit: str, feeds: dict[str, Array], outputs: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """Runs one Unit; arrays as the engine protocol states them."""
        arrays = [self._tensor(n, feeds[n]) for n in interface.inputs(self.config, unit)]
        if unit != "pick":
            self.gaps.rows = torch.full(arrays[0].shape[1:2], torch.inf)
        # Only while this engine runs: the model may be traced, or run by another one, in between.
        handles = [part.register_forward_pre_hook(self._watch) for part in self._routers]
        try:
            with torch.no_grad():
                results = self._entries[unit](*arrays)
        finally:
            for handle in handles:
                handle.remove()
        names = interface.outputs(self.config, unit)
        wanted = names if outputs is None else outputs
        return {n: _numpy(x) for n, x in zip(names, results, strict=True) if n in wanted}

    def _tensor(self, name: str, value: Array) -> Tensor:
        """An array of a Unit; those of the activation dtype come as float32."""
        made = torch.from_numpy(np.array(value))
        return made.to(self.dtype) if name.split(".")[0] in interface.ACTIVATIONS else made

    def _watch(self, _: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        router, (top_k, top_p, block) = arguments[1], arguments[-3:]
        p = torch.softmax(router[0].double(), -1)
        gap = torch.full(p.shape[:1], torch.inf, dtype=torch.float64)
        if block:
            kept, margin = _coreset_margin(p, top_k, top_p)
            gap.clamp_(max=margin)
            p = torch.where(kept, p, 0.0)
        ranked = torch.sort(p, dim=-1, descending=True)[0]
        if top_k < ranked.shape[-1]:
            last, rival = ranked[:, top_k - 1], ranked[:, top_k]
            near = (last - rival) / last.clamp(min=1e-30)
            gap = torch.minimum(gap, torch.where(rival > 0, near, torch.inf))
        self.gaps.rows = torch.minimum(self.gaps.rows, gap.float())


def _numpy(x: Tensor) -> Array:
    """numpy has no bfloat16: it becomes float32, which holds every value of it."""
    made: Array = (x.float() if x.dtype is torch.bfloat16 else x).numpy()
    return made


def _coreset_margin(p: Tensor, top_k: int, top_p: float) -> tuple[Tensor, float]:
    """Kept experts bool [E] and how far the choice was from another, from p [T, E] in fp64.

    Watched are the rows' own top-k, whose membership makes the totals, the mass at the edge, and
    the order of the last kept and the first dropped expert.
    """
    ranked, best = torch.sort(p, dim=-1, descending=True, stable=True)
    margin = torch.inf
    if top_k < p.shape[-1]:
        margin = float(((ranked[:, top_k - 1] - ranked[:, top_k]) / ranked[:, top_k - 1]).min())
    member = torch.zeros_like(p).scatter(-1, best[:, :top_k], 1.0)
    total, order = torch.sort((p * member).sum(0), descending=True, stable=True)
    mass = total / total.sum()
    before = mass.cumsum(0) - mass
    keep = before < top_p
    keep[0] = True
    count = int(keep.sum())
    if top_p < 1:
        margin = min(margin, float((before[1:] - top_p).abs().min()) if len(before) > 1 else margin)
    if count < len(total) and total[count] > 0:
        margin = min(margin, float((total[count - 1] - total[count]) / total[count - 1]))
    kept = torch.zeros(p.shape[-1], dtype=torch.bool).scatter(0, order[:count], True)
    return kept, margin
