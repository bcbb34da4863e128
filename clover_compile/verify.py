"""The proof: a bundle's Units and generations against the eager model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clover_compile import probes
from clover_compile.model import interface
from clover_compile.model.config import ModelConfig
from clover_compile.runtime.engine import Engine

Array = NDArray[Any]


@dataclass(frozen=True)
class Limits:
    """What a bundle of one precision must reach; None: reported, not judged."""

    max_error: float | None
    """Largest difference of a logit over the largest logit."""
    median_error: float | None
    """The same within a row, for the middle row."""
    mean_kl: float | None
    top1: float | None
    state: float | None
    """Largest difference of a state array over its largest value."""
    state_norm: float | None
    """Norm of the difference over the norm of the array."""
    generations: bool

    def beside(self, noise: Noise | None) -> Limits:
        """Limits that allow NOISY times what rounding does to the eager model itself.

        In 16 bits a rounding that falls the other way sends a row to another expert, in a correct
        engine as in the eager model, so no fixed limit on the worst row holds for every model.
        """
        if noise is None:
            return self
        own = {"median_error": noise.median_error, "mean_kl": noise.mean_kl,
               "state_norm": noise.state_norm}  # fmt: skip
        allowed = {
            name: max(limit, NOISY * own[name])
            for name in own
            if (limit := getattr(self, name)) is not None
        }
        top1 = None if self.top1 is None else min(self.top1, 1 - NOISY * noise.disagreement)
        return replace(self, **allowed, top1=top1)


@dataclass(frozen=True)
class Noise:
    """How far the eager model is from itself in fp32 over the same stored weights, all probe rows
    together: what its precision alone does."""

    median_error: float
    mean_kl: float
    disagreement: float
    """Share of the rows whose top-1 differs."""
    state_norm: float
    """Of the state array that differs most, see Limits."""


NOISY = 4
"""Times the eager model's own noise that an engine of 16 bits may differ from it: two engines that
round independently differ from each other by more than either from the truth."""

LIMITS: dict[str, Limits] = {
    "fp32": Limits(1e-4, None, 1e-6, 1.0, 1e-5, None, True),
    "fp16": Limits(None, 1e-2, 2e-3, 0.99, None, 1e-2, False),
    "bf16": Limits(None, 1e-2, 2e-3, 0.99, None, 1e-2, False),
    "fp8": Limits(None, None, 2e-1, 0.97, None, None, False),
}

LOGIT_UNITS = ("commit", "verify", "preview")


class _Kept:
    """An engine whose outputs are copied off it: the proof holds them while it runs on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(
        self, unit: str, feeds: dict[str, Array], outputs: Sequence[str] | None = None
    ) -> dict[str, Array]:
        made = self._engine.run(unit, feeds, outputs)
        return {name: np.array(value) for name, value in made.items()}


def compare(
    engine: Engine, c: ModelConfig, probe: Mapping[str, Array], dtype: str
) -> dict[str, Any]:
    """Runs the probes on an engine; returns figures and, under `faults`, what misses a limit."""
    engine = _Kept(engine)
    noise = stored_noise(probe)
    limits, faults = LIMITS[dtype].beside(noise), list[str]()
    given = {k[3:]: v for k, v in probe.items() if k.startswith("in.")}
    want = {k[4:]: v for k, v in probe.items() if k.startswith("out.")}
    got = probes.run_script(engine, c, given)
    units = {unit: _logit_figures(unit, want, got, limits, faults) for unit in LOGIT_UNITS}
    _constant_answer(want, faults)
    state = {
        kind: _array_figures(kind, want, got, limits, faults)
        for kind in ("state", "replay")
        if any(name.startswith(f"{kind}.") for name in want)
    }
    pick = _pick_figures(want, probes.run_pick(engine, given, want["preview.near.0"]), faults)
    parts = _parts(engine, c, given["prompt"][:, : probes.FIRST])
    if not _tied(want, "commit.near"):
        _judge("commit in parts: max error of the state", parts, limits.state, faults)
    return {
        "units": units,
        "state": state,
        "pick": pick,
        "commit_in_parts": parts,
        "limits": _plain(limits),
        "preview_writes_nothing": _preview_writes_nothing(engine, c, given, faults),
        "faults": faults,
    }


def _logit_figures(
    unit: str,
    want: Mapping[str, Array],
    got: Mapping[str, Array],
    limits: Limits,
    faults: list[str],
) -> dict[str, Any]:
    a, b, left = [], [], 0
    for name in (n for n in want if n.startswith(f"{unit}.") and n.endswith(".rows")):
        rows, stem = int(want[name]), name.removesuffix(".rows")
        left += want[stem].shape[1] - rows
        a.append(want[stem][0, :rows])
        b.append(got[stem][0, :rows])
    x, y = np.concatenate(a).astype(np.float64), np.concatenate(b).astype(np.float64)
    if not len(x):  # every row follows a near-tie; `enough` of the probes says so
        return {"rows": 0, "rows_left_out": left, "max_error": 0.0, "median_error": 0.0,
                "mean_kl": 0.0, "top1": 1.0, "top1_left_out": 0}  # fmt: skip
    largest = max(float(np.abs(x).max()), 1e-12)
    rows_error = np.abs(x - y).max(-1) / largest
    error, median = float(rows_error.max()), float(np.median(rows_error))
    kl = float(_kl(x, y).mean())
    ranked = np.sort(x, -1)
    clear = ranked[:, -1] - ranked[:, -2] > error * largest
    agree = float((x.argmax(-1) == y.argmax(-1))[clear].mean()) if clear.any() else 1.0
    _judge(f"{unit}: max error", error, limits.max_error, faults)
    _judge(f"{unit}: median error of a row", median, limits.median_error, faults)
    _judge(f"{unit}: mean KL", kl, limits.mean_kl, faults)
    if limits.top1 is not None and not agree >= limits.top1:
        faults.append(f"{unit}: top-1 agreement {agree:.4f} below {limits.top1}")
    return {
        "rows": len(x), "rows_left_out": left, "max_error": error, "median_error": median,
        "mean_kl": kl, "top1": agree, "top1_left_out": int((~clear).sum()),
    }  # fmt: skip


def noise(rounded: Mapping[str, Array], exact: Mapping[str, Array]) -> Noise:
    """What separates two runs of the probes' script, one in 16 bits and one in fp32."""
    names = [n for n in rounded if n.split(".")[0] in LOGIT_UNITS and rounded[n].ndim == 3]
    x, y = (np.concatenate([run[n][0] for n in names]).astype(np.float64)
            for run in (rounded, exact))  # fmt: skip
    error = np.abs(x - y).max(-1) / max(float(np.abs(x).max()), 1e-12)
    differ = x.argmax(-1) != y.argmax(-1)
    state = [relative_norm(rounded[n], exact[n]) for n in rounded if n.startswith("state.")]
    kl = float(_kl(x, y).mean())
    return Noise(float(np.median(error)), kl, float(differ.mean()), max(state))


def stored_noise(probe: Mapping[str, Array]) -> Noise | None:
    """The noise that a build stored with its probes; None for fp32, which has none."""
    if "noise" not in probe:
        return None
    return Noise(*(float(x) for x in probe["noise"]))


def _plain(limits: Limits) -> dict[str, float | bool]:
    return {name: x for name, x in asdict(limits).items() if x is not None}


def _kl(x: Array, y: Array) -> Array:
    def log_softmax(v: Array) -> Array:
        v = v - v.max(-1, keepdims=True)
        out: Array = v - np.log(np.exp(v).sum(-1, keepdims=True))
        return out

    p, q = log_softmax(x), log_softmax(y)
    total: Array = (np.exp(p) * (p - q)).sum(-1)
    return total


def _constant_answer(want: Mapping[str, Array], faults: list[str]) -> None:
    """Probes that all have one answer prove nothing: a constant engine would pass."""
    logits = [v[0] for n, v in want.items() if n.split(".")[0] in LOGIT_UNITS and v.ndim == 3]
    best = np.concatenate(logits).argmax(-1)
    share = np.bincount(best).max() / len(best)
    if share > 0.5:
        faults.append(
            f"{share:.0%} of the probes have the same top-1: they would not catch a constant"
        )


def _array_figures(
    kind: str,
    want: Mapping[str, Array],
    got: Mapping[str, Array],
    limits: Limits,
    faults: list[str],
) -> dict[str, float]:
    worst: dict[str, float] = {}
    norms: dict[str, float] = {}
    tied = _tied(want, "commit" if kind == "state" else "verify")
    for name in (n for n in want if n.startswith(f"{kind}.")):
        array = name.split(".")[-2]
        worst[array] = max(worst.get(array, 0.0), relative(want[name], got[name]))
        norms[array] = max(norms.get(array, 0.0), relative_norm(want[name], got[name]))
    for array, error in worst.items():
        # After a near-tie in routing the state may differ as the rows do, so it is only reported.
        _judge(f"{kind} {array}: max error", error, None if tied else limits.state, faults)
        most = None if tied else limits.state_norm
        _judge(f"{kind} {array}: norm of the error", norms[array], most, faults)
    return worst


def _tied(want: Mapping[str, Array], stem: str) -> bool:
    """Whether a row of the calls whose names begin with `stem` was a near-tie in routing."""
    names = [n for n in want if n.startswith(stem) and n.endswith(".rows")]
    return any(int(want[n]) < want[n.removesuffix(".rows")].shape[1] for n in names)


def relative(want: Array, got: Array) -> float:
    """Largest difference over the largest value; inf where shapes or NaNs differ."""
    if want.shape != got.shape or not np.array_equal(np.isnan(want), np.isnan(got)):
        return float("inf")
    if want.size == 0:
        return 0.0
    scale = max(float(np.abs(np.nan_to_num(want)).max()), 1e-12)
    return float(np.abs(np.nan_to_num(want - got)).max()) / scale


def relative_norm(want: Array, got: Array) -> float:
    """Norm of the difference over the norm; inf where shapes or NaNs differ."""
    if relative(want, got) == float("inf"):
        return float("inf")
    scale = max(float(np.linalg.norm(np.nan_to_num(want))), 1e-12)
    return float(np.linalg.norm(np.nan_to_num(want - got))) / scale


def _pick_figures(
    want: Mapping[str, Array], got: Mapping[str, Array], faults: list[str]
) -> dict[str, float]:
    errors: dict[str, float] = {}
    for name in (n for n in want if n.startswith("pick.")):
        key = name.split(".")[-1]
        error = (
            float((want[name] != got[name]).mean())
            if key == "ids"
            else relative(want[name], got[name])
        )
        errors[key] = max(errors.get(key, 0.0), error)
    for key, error in errors.items():
        _judge(f"pick {key}", error, 1e-4 if key != "ids" else 0.0, faults)
    return errors


def _parts(engine: Engine, c: ModelConfig, ids: Array) -> float:
    """T rows at once against one by one, on the bundle alone; the worst state array's error."""

    def state_after(sizes: list[int]) -> probes.Arrays:
        state, start = probes.empty_state(c), 0
        for size in sizes:
            new = probes.commit(engine, c, state, ids[:, start : start + size], 0)
            state, start = probes.advance(c, state, new, size), start + size
        return state

    rows = ids.shape[1]
    whole = state_after([rows])
    worst = 0.0
    for sizes in ([rows // 2 + 3, rows - rows // 2 - 3], [1] * rows):
        other = state_after(sizes)
        worst = max([worst, *(relative(whole[n], other[n]) for n in interface.state_names(c))])
    return worst


def _preview_writes_nothing(
    engine: Engine, c: ModelConfig, given: Mapping[str, Array], faults: list[str]
) -> bool:
    state, ids = probes.empty_state(c), given["prompt"][:, :5]
    state = probes.advance(c, state, probes.commit(engine, c, state, ids, 0), ids.shape[1])
    before = {n: x.copy() for n, x in state.items()}
    feeds = {"ids": given["blocks"][:, : c.block_size], **{n: state[n] for n in state}}
    engine.run("preview", feeds)
    same = all(np.array_equal(state[n], before[n]) for n in state)
    if not same:
        faults.append("a preview changed the state")
    return same


def _judge(what: str, value: float, limit: float | None, faults: list[str]) -> None:
    if limit is not None and not value <= limit:
        faults.append(f"{what} {value:.2e} above {limit:.0e}")
