"""Units of a bundle against the eager model and the floor, in interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clover_compile.checkpoint import Checkpoint
from clover_compile.model.config import ModelConfig
from clover_compile.model.load import load_model
from clover_compile.profiling.floor import Machine, Work, work
from clover_compile.profiling.rival import FORMS, Rival
from clover_compile.profiling.rounds import Clock, clock_for, spread, take_turns
from clover_compile.runtime.engine import Arrays
from clover_compile.runtime.manifest import read_bundle
from clover_compile.runtime.ort_engine import OrtEngine
from clover_compile.runtime.state import State

PREFIX = 512
"""Committed rows before every call."""

ERROR = 1e-4
"""Largest difference of the engines' logits or state over the largest value: else one is wrong and
its speed means nothing."""


@dataclass(frozen=True)
class Call:
    """One kind of call that decoding makes."""

    name: str
    unit: str
    rows: int
    keep: int

    def ids(self, c: ModelConfig) -> np.ndarray[Any, Any]:
        """Different ids; in a preview every other row is a mask, as in the middle of a block."""
        ids = np.random.default_rng(7).integers(0, c.vocab_size - 1, (1, self.rows))
        if self.unit == "preview":
            ids[:, ::2] = c.mask_token_id
        return ids


CALLS = (
    Call("preview, 32 rows", "preview", 32, 32),
    Call("commit, 32 rows", "commit", 32, 0),
    Call("commit, 1 row", "commit", 1, 1),
)
"""A pass, the commit of a finished block, and the step of one-token-at-a-time decoding."""


def measure(checkpoint: Path, bundle: Path, threads: int, rounds: int) -> dict[str, Any]:
    """Name of a call -> its figures, see `_figures`; raises ValueError if the engines disagree."""
    source = Checkpoint.open(checkpoint)
    c = source.config
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        engine = OrtEngine(read_bundle(bundle), threads)
        rival = Rival(load_model(c, source.tensor), source.generation)
        state = _state(engine, c, min(PREFIX, source.config.max_position_embeddings // 2))
        shapes = {name: source.shape(name) for name in source.names}
        plans = [_plan(call, c, engine, rival, state, shapes) for call in CALLS]
        clock = clock_for(threads)
        machine = Machine([work.bytes for _, work in plans], clock)
        return {
            call.name: _figures(_rounds(runs, work, machine, rounds, clock), work)
            for call, (runs, work) in zip(CALLS, plans, strict=True)
        }
    finally:
        torch.set_num_threads(before)


def _state(engine: OrtEngine, c: ModelConfig, rows: int) -> State:
    state = State(c, c.max_position_embeddings)
    ids = np.random.default_rng(3).integers(0, c.vocab_size - 1, (1, rows))
    for part in np.array_split(ids, max(1, rows // 256), 1):
        new = engine.run("commit", {"ids": part, "keep": np.array(0, np.int32), **state.feeds()})
        state.advance(part.shape[1], new)
    return state


Runs = dict[str, Callable[[], object]]


def _plan(
    call: Call, c: ModelConfig, engine: OrtEngine, rival: Rival, state: State,
    shapes: dict[str, tuple[int, ...]],
) -> tuple[Runs, Work]:  # fmt: skip
    """What to run by engine, and the work it has to do."""
    feeds: Arrays = {"ids": call.ids(c), **state.feeds()}
    if call.unit == "commit":
        feeds["keep"] = np.array(call.keep, np.int32)
    given = rival.arguments(call.unit, feeds)
    found = engine.run(call.unit, feeds)

    def eager(form: str) -> Callable[[], object]:
        def run() -> object:
            rival.take(form)
            return rival.run(call.unit, given)

        return run

    runs: Runs = {"ort": lambda: engine.run(call.unit, feeds)}
    for form in FORMS:
        runs[form] = eager(form)
        rival.take(form)
        for want, got in zip(rival.run(call.unit, given), found.values(), strict=True):
            # As it runs with another prefix than the proof: an engine that errs proves nothing.
            largest = max(float(want.abs().max()), 1e-12) if want.numel() else 1.0
            if not np.allclose(got, want.numpy(), rtol=0, atol=ERROR * largest):
                raise ValueError(f"{call.name}: the bundle and {form} eager differ")
    need = work(
        c, shapes, unit=call.unit, rows=call.rows, prefix=state.length,
        keep=call.keep, routers=rival.routers(call.unit, given),
    )  # fmt: skip
    return runs, need


def _rounds(
    runs: Runs, need: Work, machine: Machine, rounds: int, clock: Clock
) -> list[dict[str, float]]:
    """Seconds of every engine and of the floor, one entry a round, engines taking turns."""
    found = []
    for turn in range(rounds):
        took = take_turns(runs, turn, clock)
        rates = machine.rates(need.bytes)
        took["floor"] = rates.seconds(need)
        took["bandwidth"], took["product"] = rates.bandwidth, rates.product
        found.append(took)
    return found


def _figures(rounds: list[dict[str, float]], need: Work) -> dict[str, Any]:
    """Milliseconds by engine; eager over ort by form and for the faster form; ort over floor."""
    ratios = {form: spread([r[form] / r["ort"] for r in rounds]) for form in FORMS}
    faster = min(FORMS, key=lambda form: np.median([r[form] for r in rounds]))
    return {
        "ms": {name: spread([1e3 * r[name] for r in rounds]) for name in ("ort", *FORMS, "floor")},
        "eager/ort": ratios,
        "faster eager": faster,
        "speedup": ratios[faster],
        "of floor": spread([r["ort"] / r["floor"] for r in rounds]),
        "floor": {
            "bytes": need.bytes, "flop": need.flop, "experts per layer": need.experts,
            "GB/s": spread([r["bandwidth"] / 1e9 for r in rounds]),
            "GFLOP/s": spread([r["product"] / 1e9 for r in rounds]),
            "bound": "bandwidth" if need.bytes / rounds[0]["bandwidth"]
            > need.flop / rounds[0]["product"] else "product",
        },
        "rounds": rounds,
    }  # fmt: skip
