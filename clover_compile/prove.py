"""The verdict: what a bundle must show before it exists, and again whenever it is verified."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from clover_compile import probes, verify
from clover_compile.checkpoint import Checkpoint
from clover_compile.eager import TIE, EagerEngine
from clover_compile.errors import VerdictError
from clover_compile.model.clover import Clover
from clover_compile.model.config import ModelConfig
from clover_compile.model.load import load_model
from clover_compile.runtime.bundle import LoadedBundle
from clover_compile.runtime.rules import GenerationRules
from clover_compile.runtime.session import Session

Array = NDArray[Any]

WAYS: dict[str, dict[str, Any]] = {
    "denoise": {"decode": "denoise"},
    "causal": {"decode": "causal"},
    "self-speculate release": {"decode": "self-speculate", "accept": "release"},
    "self-speculate exact": {"decode": "self-speculate", "accept": "exact"},
}
"""Every way to decode, each compared over a whole generation."""

PROMPT_ROWS, NEW_TOKENS = 24, 48

TIED = (
    f"fewer than {probes.LEAST_ROWS} probe rows are free of ties in routing, so no two correct "
    "engines need agree"
)


class Watched:
    """The eager engine, noting after how many response tokens a choice was first a near-tie."""

    def __init__(self, engine: EagerEngine, threshold: float) -> None:
        self.engine, self.threshold = engine, threshold
        self.tokens = 0
        self.limit: int | None = None

    def run(self, unit: str, feeds: dict[str, Array], outputs: Any = None) -> dict[str, Array]:
        """Runs one Unit of the eager model."""
        if unit == "pick":
            self.tokens = int(feeds["row0"][0]) - 1
        out = self.engine.run(unit, feeds, outputs)
        near = self._near_pick(feeds, out) if unit == "pick" else self._near_routing()
        if near and self.limit is None:
            self.limit = self.tokens
        return out

    def _near_routing(self) -> bool:
        return self.engine.gaps.tied

    def _near_pick(self, feeds: Mapping[str, Array], out: Mapping[str, Array]) -> bool:
        best = np.sort(feeds["logits"][0], -1)
        tie = (best[:, -1] - best[:, -2] < 2 * TIE * np.abs(best).max(-1)).any()
        at_threshold = (np.abs(out["confidence"] - self.threshold) < TIE).any()
        return bool(tie or at_threshold)


class Truth:
    """What the eager model of a checkpoint answers to the probes and in whole generations."""

    def __init__(self, model: Clover, checkpoint: Checkpoint, context: int) -> None:
        self.engine = EagerEngine(model, checkpoint.generation)
        self.checkpoint, self.context = checkpoint, context

    def arrays(self) -> dict[str, Array]:
        """Everything `probes.safetensors` holds."""
        c = self.checkpoint.config
        arrays, enough = probes.make(self.engine, c)
        arrays["enough"] = np.array(enough)
        if self.engine.dtype is not torch.float32:
            arrays["noise"] = np.array(dataclasses.astuple(self._noise(arrays)))
        rows = min(PROMPT_ROWS, self.context - c.block_size)
        arrays["generate.prompt"] = arrays["in.prompt"][0, :rows]
        rules = rules_of(self.checkpoint)
        for way, options in WAYS.items():
            watched = Watched(self.engine, c.threshold)
            session = Session(watched, c, _endless(rules), self.context)
            ids = _generate(session, arrays["generate.prompt"], options)
            limit = len(ids) if watched.limit is None else min(watched.limit, len(ids))
            arrays[f"generate.{way}"] = np.array(ids, np.int64)
            arrays[f"generate.{way}.compared"] = np.array(limit)
        return {name: np.array(x, order="C") for name, x in arrays.items()}

    def _noise(self, arrays: Mapping[str, Array]) -> verify.Noise:
        """What 16 bits alone do to the eager model: against fp32 over the weights as stored."""
        weights = dict(self.engine.model.named_parameters())
        wide = load_model(self.checkpoint.config, lambda name, dtype: weights[name].to(dtype))
        exact = EagerEngine(wide, self.checkpoint.generation)
        given = {k[3:]: v for k, v in arrays.items() if k.startswith("in.")}
        found = probes.run_script(exact, self.checkpoint.config, given)
        return verify.noise({k[4:]: v for k, v in arrays.items() if k.startswith("out.")}, found)


def rules_of(checkpoint: Checkpoint) -> GenerationRules:
    """The rules a bundle of this checkpoint generates by."""
    c = checkpoint.config
    values = checkpoint.generation.to_dict() | {
        "block_size": c.block_size, "threshold": c.threshold, "mask_token_id": c.mask_token_id,
        **checkpoint.chat_tokens,
    }  # fmt: skip
    return GenerationRules.from_dict(values)


def _endless(rules: GenerationRules) -> GenerationRules:
    """The rules without stop ids: a generation that ends at once would prove nothing."""
    return dataclasses.replace(rules, stop_token_ids=())


def _generate(session: Session, prompt: Array, options: dict[str, Any]) -> list[int]:
    room = session.context - len(prompt)
    block = session.rules.block_size
    budget = min(NEW_TOKENS, room // block * block)
    return list(session.generate(prompt.tolist(), max_new_tokens=budget, **options).token_ids)


def prove(
    loaded: LoadedBundle, dtype: str, say: Callable[[str], None],
    truth: Mapping[str, Array] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Compares a loaded bundle with its stored probes, or with a fresh truth.

    Returns the verdict (without its own hash). Raises VerdictError if it does not agree.
    """
    stored = loaded.path / "probes.safetensors"
    arrays = dict(load_file(stored)) if truth is None else dict(truth)
    # A bundle keeps the sizes under the names of the config; no checkpoint is at hand.
    config = cast(ModelConfig, loaded.sizes)
    session = Session(loaded.engine, loaded.sizes, _endless(loaded.rules), loaded.context)
    figures = verify.compare(loaded.engine, config, arrays, dtype)
    faults: list[str] = figures.pop("faults")
    figures["generations"] = _generations(session, arrays, dtype, faults)
    for unit, row in figures["units"].items():
        say(
            f"    {unit}: {row['rows']} rows, max error {row['max_error']:.1e} of the largest, "
            f"KL {row['mean_kl']:.1e}, top-1 {row['top1']:.2%}"
        )
    if faults:
        raise VerdictError(reason="; ".join(faults))
    outcome, reason = "passed", ""
    if not bool(arrays["enough"]):
        outcome, reason = "unproved", TIED
    return {
        "bundle": loaded.identity,
        "outcome": outcome,
        "reason": reason,
        "dtype": dtype,
        **figures,
    }


def _generations(
    session: Session, arrays: Mapping[str, Array], dtype: str, faults: list[str]
) -> dict[str, dict[str, Any]]:
    figures = {}
    for way, options in WAYS.items():
        want = arrays[f"generate.{way}"].tolist()
        limit = int(arrays[f"generate.{way}.compared"])
        got = _generate(session, arrays["generate.prompt"], options)
        whole = limit == len(want)
        equal = got == want if whole else got[:limit] == want[:limit]
        figures[way] = {"equal": equal, "compared": limit, "tokens": len(want)}
        if not equal and verify.LIMITS[dtype].generations:
            first = next(
                (i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), len(got)
            )
            faults.append(f"{way}: generation differs from token {first} on")
    return figures
