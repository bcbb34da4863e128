"""Whether a measured profile can be believed: what a busy machine leaves of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

SUMS = (0.8, 1.25)
"""Ops over pass that are no reason to doubt; on an idle machine they stay within 0.9 and 1.1."""

APART = 2.0
"""The 90th over the 10th percentile of a call's rounds from which on they measure the machine."""

SHORT = 0.1
"""Of the usual call: what is shorter is doubled by a tick of the system, and decides nothing."""

CROWDED = 1.5
"""Load per core from which on others had a good part of the machine."""

EFFECT = (
    "costs.json was written all the same, and --decode auto goes by it: profile again while "
    "nothing else runs"
)


def warning(found: Mapping[str, Any], taken: Sequence[Mapping[str, float]]) -> str | None:
    """One sentence on what makes no sense; None where nothing does.

    `found`: the profile; `taken`: seconds of the cost table's calls, by round.
    """
    doubts = [*_load(found), *_ops(found), *_spread(taken)]
    if not doubts:
        return None
    return f"the machine was busy and these figures are not the bundle's: {'; '.join(doubts)}"


def _load(found: Mapping[str, Any]) -> Iterator[str]:
    load, machine = found.get("load"), found.get("machine", {})
    if load is not None and load > CROWDED * machine["cores"]:
        yield f"the load was {load:.1f} on {machine['cores']} cores when it began"


def _ops(found: Mapping[str, Any]) -> Iterator[str]:
    calls = found.get("units", {}).get("calls", [])
    for key, words in (("", "ops"), ("unfused ", "ops of the unfused graph")):
        sums = {x["name"]: x.get(f"{key}sum of ops / pass") for x in calls}
        odd = {n: x["median"] for n, x in sums.items() if x and not _fair(x["median"])}
        if odd:
            name = max(odd, key=lambda n: abs(np.log(max(odd[n], 1e-3))))
            yield f"{words} add up to {odd[name]:.0%} of {name!r}" + _more(len(odd))


def _fair(ratio: float) -> bool:
    return SUMS[0] <= ratio <= SUMS[1]


def _spread(taken: Sequence[Mapping[str, float]]) -> Iterator[str]:
    typical = {name: float(np.median([took[name] for took in taken])) for name in taken[0]}
    usual = float(np.median(list(typical.values())))
    apart = {}
    for name in taken[0]:
        low, high = np.percentile([took[name] for took in taken], (10, 90))
        if high > APART * low and typical[name] >= SHORT * usual:
            apart[name] = float(high / low)
    if apart:
        name = max(apart, key=lambda n: apart[n])
        yield f"rounds of {name!r} lie {apart[name]:.1f} x apart" + _more(len(apart))


def _more(count: int) -> str:
    return f" (and {count - 1} more)" if count > 1 else ""
