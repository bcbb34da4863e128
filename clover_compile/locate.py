"""Finds where the eager model first leaves the numbers: hooks on every part, whole generations."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clover_compile import probes, prove
from clover_compile.checkpoint import Checkpoint
from clover_compile.eager import EagerEngine
from clover_compile.model.clover import Clover
from clover_compile.model.config import ModelConfig
from clover_compile.runtime import streams
from clover_compile.runtime.errors import NotANumber
from clover_compile.runtime.session import Session

Array = NDArray[Any]

SEEDS = range(8)
"""Seeds of the probes a build may have chosen."""


@dataclass(frozen=True)
class Finding:
    """The first output that was not finite."""

    module: str
    """Name of the part in the model, `model.layers.3.mlp.moe`."""
    kind: str
    """`NaN` or `Inf`."""
    values: int
    """How many values of the output are not finite."""
    total: int
    largest_input: float
    """Largest finite magnitude that went in."""
    unit: str = ""
    position: int | None = None
    """Row in the whole sequence; None where the output has no rows, as a state."""

    @property
    def layer(self) -> int | None:
        """Number of the layer; None for embedding, final norm and head."""
        parts = self.module.split(".")
        return int(parts[2]) if parts[:2] == ["model", "layers"] else None

    def to_dict(self) -> dict[str, Any]:
        """Everything it holds, for JSON."""
        return {"layer": self.layer, **asdict(self)}

    def __str__(self) -> str:
        where = "outside the layers" if self.layer is None else f"layer {self.layer}"
        row = "" if self.position is None else f" at position {self.position}"
        return (
            f"{where}: {self.module} gives {self.kind} in {self.values} of {self.total} values "
            f"(Unit {self.unit}{row}; its inputs reach {self.largest_input:.1e})"
        )


class _Found(Exception):
    """Ends the run as soon as there is something to tell."""

    def __init__(self, finding: Finding, row: int | None) -> None:
        super().__init__(str(finding))
        self.finding, self.row = finding, row


class _Noting:
    """The eager engine; adds to a finding which Unit ran, and on which rows."""

    def __init__(self, engine: EagerEngine) -> None:
        self.engine = engine

    def run(self, unit: str, feeds: dict[str, Array], outputs: Any = None) -> dict[str, Array]:
        """Runs one Unit of the eager model."""
        try:
            return self.engine.run(unit, feeds, outputs)
        except _Found as found:
            known = found.row is not None and "length" in feeds
            position = int(feeds["length"][0]) + (found.row or 0) if known else None
            raise _Found(replace(found.finding, unit=unit, position=position), None) from None


def find(
    model: Clover, checkpoint: Checkpoint, context: int, prompts: Iterable[Sequence[int]],
    say: Callable[[str], None] = lambda line: None,
) -> Finding | None:  # fmt: skip
    """Generates from every prompt by every way to decode, up to the first NaN or Inf.

    Returns None if all outputs of all parts were finite. Raises Faults for a prompt not usable.
    `say` gets a line before each generation; a terminal also sees the passes counted.
    """
    engine = _Noting(EagerEngine(model, checkpoint.generation))
    rules = replace(prove.rules_of(checkpoint), stop_token_ids=())
    session = Session(engine, model.config, rules, context)
    asked, started = list(prompts), time.perf_counter()
    with _hooks(model):
        for number, prompt in enumerate(asked, 1):
            for way, options in prove.WAYS.items():
                seconds = time.perf_counter() - started
                say(f"[{seconds:6.1f} s] prompt {number} of {len(asked)}, {way}")
                try:
                    _generate(session, prompt, options)
                except _Found as found:
                    return found.finding
                except NotANumber:
                    break  # from a NaN that no part of the model made
    return None


def probe_prompts(
    c: ModelConfig, context: int, seeds: Iterable[int] = SEEDS
) -> Iterator[list[int]]:
    """What a build generates from, and the longer prompt of its probes, for each seed."""
    room = context - c.block_size
    for seed in seeds:
        prompt = probes.inputs(c, seed)["prompt"][0]
        for rows in (prove.PROMPT_ROWS, len(prompt)):
            yield prompt[: min(rows, room)].tolist()


def _generate(session: Session, prompt: Sequence[int], options: dict[str, Any]) -> None:
    block = session.rules.block_size
    blocks = max(1, (session.context - len(prompt)) // block)
    budget = min(prove.NEW_TOKENS, blocks * block)
    passes = itertools.count(1)
    try:
        session.generate(
            prompt, max_new_tokens=budget, **options,
            on_step=lambda step: streams.progress(f"    pass {next(passes)}"),
        )  # fmt: skip
    finally:
        streams.progress("")


@contextlib.contextmanager
def _hooks(model: Clover) -> Iterator[None]:
    """Watches every part: inner ones report before those that hold them."""
    names = {part: name for name, part in model.named_modules()}

    def look(part: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        for x in _floats(result):
            bad = ~x.isfinite()
            if bad.any():
                kind = "NaN" if x.isnan().any() else "Inf"
                largest = max((_largest(y) for y in _floats(given)), default=0.0)
                finding = Finding(names[part], kind, int(bad.sum()), x.numel(), largest)
                raise _Found(finding, int(bad[0].any(-1).nonzero()[0]) if x.dim() == 3 else None)

    handles = [part.register_forward_hook(look) for part in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _floats(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values] if values.is_floating_point() else []
    if isinstance(values, Sequence):
        return [x for value in values for x in _floats(value)]
    return []


def _largest(x: Tensor) -> float:
    finite = torch.where(x.isfinite(), x, 0).abs()
    return float(finite.max()) if finite.numel() else 0.0
