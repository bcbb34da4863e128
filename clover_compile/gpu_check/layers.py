"""Passes of models of two and three layers at the released sizes, timed as CUDA graphs.

The differences between three models are the cost of one layer of each kind; forty layers are
extrapolated from them, and said to be.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from clover_compile import models, oversize
from clover_compile.kernels import release
from clover_compile.kernels.compiled import Compiled
from clover_compile.kernels.costs import ROWS
from clover_compile.model import interface
from clover_compile.model.config import GenerationConfig, ModelConfig
from clover_compile.passes.base import run_passes
from clover_compile.passes.pipeline import PIPELINE
from clover_compile.runtime.cuda_device import CudaArray, CudaDevice, Module
from clover_compile.runtime.launch_plan import Plan, strides_of
from clover_compile.runtime.program_engine import ProgramEngine
from clover_compile.targets.cubins import Job, jobs_of, parameters, plan_key
from clover_compile.targets.triton.build import ORDER
from clover_compile.targets.triton.join import JoinWriteGate
from clover_compile.targets.triton.lowering import Lowered, Lowering
from clover_compile.unit import trace_unit

GDN, ATTENTION = "linear_attention", "full_attention"

MODELS: dict[str, tuple[str, ...]] = {
    "one of each": (GDN, ATTENTION),
    "a GDN layer more": (GDN, GDN, ATTENTION),
    "an attention layer more": (GDN, ATTENTION, ATTENTION),
}

SIZES: dict[str, Any] = {
    "vocab_size": release.VOCABULARY, "hidden_size": release.HIDDEN,
    "num_attention_heads": release.QUERY_HEADS, "num_key_value_heads": release.KV_HEADS,
    "head_dim": release.DIM, "linear_num_key_heads": release.KEY_HEADS,
    "linear_num_value_heads": release.HEADS, "linear_key_head_dim": release.DK,
    "linear_value_head_dim": release.DV, "num_experts": release.EXPERTS,
    "num_experts_per_tok": release.TOP_K, "moe_intermediate_size": release.WIDTH,
    "shared_expert_intermediate_size": release.SHARED, "mask_token_id": release.VOCABULARY - 1,
    "max_position_embeddings": 262_144,
}  # fmt: skip
"""Keys of config.json in which the released model differs from the demonstration model."""

PREFIX, CONTEXT, CALLS, ROUNDS = 1024, 2048, 10, 9
"""Committed rows, rows of the state, calls of a round, rounds."""


def config(layers: tuple[str, ...]) -> ModelConfig:
    """The released model's sizes with these layers."""
    raw = json.loads((models.find() / "config.json").read_text())
    raw.pop("full_attention_interval")
    raw |= {**SIZES, "num_hidden_layers": len(layers), "layer_types": list(layers)}
    return ModelConfig.from_dict(raw)[0]


def _generation() -> GenerationConfig:
    raw = json.loads((models.find() / "generation_config.json").read_text())
    return GenerationConfig.from_dict(
        raw, vocab_size=release.VOCABULARY, mask_token_id=release.VOCABULARY - 1
    )[0]


def lower(layers: tuple[str, ...], capability: int) -> dict[str, Lowered]:
    """Every Unit of a model as a program; no weight is read."""
    c = config(layers)
    model = oversize.shell(c, torch.bfloat16)
    found: dict[str, Lowered] = {}
    for name in (n for n in ORDER if n in interface.units(c)):
        unit = trace_unit(model, _generation(), name)
        run_passes(unit, (*PIPELINE, JoinWriteGate()), lambda event: None)
        verify = found["verify"].program if name == "replay" else None
        found[name] = Lowering(unit, capability, plan_key, verify).lower()
    return found


def plans_of(lowered: Mapping[str, Lowered]) -> dict[str, Plan]:
    """The launch plans of these programs, by key."""
    return {k: plan for one in lowered.values() for k, plan in one.plans.items()}


@dataclass(frozen=True)
class Borrowed:
    """Device memory that torch owns, with the address a CudaArray asks for."""

    tensor: torch.Tensor

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()


def engine(lowered: Mapping[str, Lowered], compiled: Mapping[str, Compiled | str],
           capability: int) -> ProgramEngine:  # fmt: skip
    """An engine over random weights on the GPU; RuntimeError for a kernel that did not compile."""
    plans = plans_of(lowered)
    keys: dict[int, str] = {}
    modules: dict[str, Module] = {}
    for key, job in jobs_of(plans.values(), capability).items():
        made = compiled[key]
        if isinstance(made, str):
            raise RuntimeError(f"did not compile: {made}")
        modules[key] = _module(job, made)
    for plan in plans.values():
        for variant in plan.variants:
            for launch in variant.launches:
                keys[id(launch)] = Job(plan, variant, launch, capability).key
    device = CudaDevice(modules, lambda launch: keys[id(launch)])
    programs = {name: one.program for name, one in lowered.items()}
    weights: dict[str, CudaArray] = {}
    for one in lowered.values():
        for buffer in one.program.buffers.values():
            if buffer.kind == "weight" and buffer.weight not in weights:
                value = one.constants.get(str(buffer.weight))
                weights[str(buffer.weight)] = _weight(buffer.dtype, buffer.shape, value)
    return ProgramEngine(programs, plans, weights, device)


def _module(job: Job, made: Compiled) -> Module:
    function = job.launch.kernel.split(":")[1]
    return Module(made.cubin, function, tuple(parameters(job)), made.warps, made.shared)


def _weight(dtype: str, shape: tuple[Any, ...], value: torch.Tensor | None) -> CudaArray:
    """Random, about as large as a model's; `value` where the numbers matter."""
    from clover_compile.kernels.call import TORCH

    sizes = tuple(int(x) for x in shape)
    if value is None:
        scale = sizes[-1] ** -0.5 if len(sizes) > 1 else 0.5
        value = torch.empty(sizes, device="cuda", dtype=TORCH[dtype]).normal_() * scale
    held = value.to("cuda").contiguous()
    return CudaArray(Borrowed(held), dtype, sizes, strides_of(sizes))  # type: ignore[arg-type]


def time_passes(made: ProgramEngine, c: ModelConfig) -> dict[str, dict[str, float]]:
    """Milliseconds per call of every pass, as graphs, host work left out."""
    state = made.new_state(c, CONTEXT)
    rows = np.random.default_rng(0).integers(0, c.vocab_size - 1, (1, PREFIX))
    for part in np.array_split(rows, PREFIX // 256, 1):
        new = made.run("commit", {"ids": part, "keep": np.array(0), **state.feeds()})
        state.advance(part.shape[1], new)
    found = {}
    for name, count in ROWS.items():
        ids = rows[:, :count]
        unit, keep = ("commit", 1) if name == "step" else (name, 0)
        feeds: dict[str, Any] = {"ids": ids, **state.feeds()}
        if unit == "commit":
            feeds["keep"] = np.array(keep)
        if unit == "replay":
            verified = made.run("verify", {"ids": ids, **state.feeds()})
            tapes = {n: x for n, x in verified.items() if n.startswith("tape")}
            feeds = {"rows": np.array([count // 2]), **tapes, **state.recurrent()}
        call = partial(made.run, unit, feeds)
        call()
        found[name] = _time(made, call)
    return found


def _time(made: ProgramEngine, call: Any) -> dict[str, float]:
    stream = made.device.stream  # type: ignore[attr-defined]
    taken = []
    for _ in range(ROUNDS):
        stream.wait()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        stream.wait()
        taken.append(1e3 * (time.perf_counter() - began) / CALLS)
    return {"median_ms": median(taken), "least_ms": min(taken)}


def extrapolate(times: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """Milliseconds of each pass of the released model, from the least of each of MODELS."""
    base, gdn, attention = (times[name] for name in MODELS)
    found = {}
    for name in base:
        once = base[name]["least_ms"]
        per_gdn = gdn[name]["least_ms"] - once
        per_attention = attention[name]["least_ms"] - once
        layers = (release.GDN_LAYERS - 1) * per_gdn + (release.ATTENTION_LAYERS - 1) * per_attention
        found[name] = once + layers
    return found


def run(compiled: Mapping[str, Compiled | str], capability: int) -> dict[str, Any]:
    """Times every model and extrapolates; raises what the driver says if a launch fails."""
    times = {}
    for name, layers in MODELS.items():
        made = engine(lower(layers, capability), compiled, capability)
        times[name] = time_passes(made, config(layers))
    note = "forty layers are extrapolated from the differences of three models"
    return {"models": times, "forty_layers_ms": extrapolate(times), "note": note}


def launches(lowered: Mapping[str, Lowered]) -> dict[str, int]:
    """Steps of each program: what a dry run can show."""
    return {name: len(one.program.steps) for name, one in lowered.items()}
