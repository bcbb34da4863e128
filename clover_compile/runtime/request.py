"""Checks everything a generation is asked for; all faults are told at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clover_compile.runtime.engine import Sizes
from clover_compile.runtime.errors import AutoNeedsCosts, Faults
from clover_compile.runtime.nearest import did_you_mean
from clover_compile.runtime.pick import Sampling
from clover_compile.runtime.rules import GenerationRules
from clover_compile.runtime.strict_json import quote

WAYS = ("denoise", "causal", "self-speculate")
AUTO = "auto"
"""Picks among them by the bundle's costs."""

ROLES = ("system", "user", "assistant", "tool")
"""Who may speak in a conversation."""

ACCEPT = ("release", "exact")
MAX_WIDTH = 256
MAX_FAULTS = 8
"""Faults of a prompt that are told; one wrong file can hold thousands."""

DEFAULTS: dict[str, Any] = {
    "max_new_tokens": 256, "decode": "denoise", "accept": "release", "width": 16,
    "block_size": None, "threshold": None, "temperature": 0.0, "top_k": 0, "top_p": 1.0,
    "seed": 0, "thinking": None, "exact": False,
}  # fmt: skip
"""Defaults of `Session.generate`, and so of the command line."""

_DRAWS = ("denoise", "causal", AUTO)
ONLY_FOR: dict[str, tuple[str, ...]] = {
    "accept": ("self-speculate", AUTO), "width": ("self-speculate",),
    "block_size": ("denoise", AUTO), "threshold": ("denoise", AUTO),
    "temperature": _DRAWS, "top_k": _DRAWS, "top_p": _DRAWS, "seed": _DRAWS,
}  # fmt: skip
"""Options that mean something for some ways only; asked for with another, they are refused."""


@dataclass(frozen=True)
class Request:
    """A checked request."""

    max_new_tokens: int
    decode: str
    exact: bool
    """Only ways whose text is that of causal decoding."""
    exact_accept: bool
    width: int
    block_size: int
    threshold: float
    sampling: Sampling


def check(
    options: dict[str, Any], rules: GenerationRules, no_costs: str | None = "there is none"
) -> Request:  # fmt: skip
    """Checks the options of one generation; raises Faults with all that is wrong.

    `options` holds every key of DEFAULTS but `thinking`; `no_costs`: why the bundle has no costs,
    for which `auto` is refused with AutoNeedsCosts, or None if it has.
    """
    faults: list[str] = []
    way = options["decode"]
    if way == AUTO and no_costs is not None:
        raise AutoNeedsCosts(found=no_costs, known=", ".join(WAYS))
    if way not in (*WAYS, AUTO):
        faults.append(_unknown("decode", way, (*WAYS, AUTO)))
    else:
        faults += [
            f"{name} has no effect with decode {way!r}; it is for {' and '.join(ways)}"
            for name, ways in ONLY_FOR.items()
            if way not in ways and options[name] != DEFAULTS[name]
        ]
    if options["accept"] not in ACCEPT:
        faults.append(_unknown("accept", options["accept"], ACCEPT))
    if not isinstance(options["exact"], bool):
        faults.append(f"exact must be True or False, not {quote(options['exact'])}")
    elif options["exact"]:
        faults += _exact_faults(options)
    _integers(options, faults)
    _numbers(options, faults)
    block_size = _block_size(options, rules, faults)
    if faults:
        raise Faults("request", tuple(faults))
    threshold = rules.threshold if options["threshold"] is None else options["threshold"]
    sampling = Sampling(
        float(options["temperature"]), int(options["top_k"]),
        float(options["top_p"]), int(options["seed"]),
    )  # fmt: skip
    return Request(
        int(options["max_new_tokens"]), way, options["exact"],
        options["exact"] or options["accept"] == "exact",
        int(options["width"]), block_size, float(threshold), sampling,
    )  # fmt: skip


def _unknown(name: str, value: object, known: Sequence[str]) -> str:
    meant = did_you_mean(value, known)
    return f"{name} {quote(value)} is unknown{meant}; choose from {', '.join(known)}"


def _exact_faults(options: dict[str, Any]) -> list[str]:
    if options["decode"] == "denoise":
        return ["exact allows only decode 'causal', 'self-speculate' and 'auto'"]
    if options["decode"] != AUTO:
        return []
    return [
        f"{name} has no effect with exact: it never resolves blocks"
        for name in ("block_size", "threshold")
        if options[name] != DEFAULTS[name]
    ]


def is_whole(value: object) -> bool:
    """Whether a value is an integer, Python's or NumPy's; True and False are not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _integers(options: dict[str, Any], faults: list[str]) -> None:
    spans = {
        "max_new_tokens": (1, 1 << 31), "width": (1, MAX_WIDTH),
        "top_k": (0, 1 << 24), "seed": (0, (1 << 63) - 1),
    }  # fmt: skip
    for name, (low, high) in spans.items():
        value = options[name]
        if not is_whole(value):
            faults.append(f"{name} must be a whole number, not {quote(value)}")
        elif not low <= value <= high:
            faults.append(f"{name} is {quote(value)}; must be in {low}..{high}")


def _numbers(options: dict[str, Any], faults: list[str]) -> None:
    spans = {"threshold": (0.0, 1.0), "temperature": (0.0, 1e4), "top_p": (0.0, 1.0)}
    for name, (low, high) in spans.items():
        value = options[name]
        if value is None and DEFAULTS[name] is None:
            continue
        if not (is_whole(value) or isinstance(value, (float, np.floating))):
            faults.append(f"{name} must be a number, not {quote(value)}")
        elif not low <= value <= high:  # so for NaN
            faults.append(f"{name} is {quote(value)}; must be in [{low:g}, {high:g}]")
        elif name == "top_p" and value == 0:
            faults.append("top_p is 0; must be above 0")
        elif name == "temperature" and value == 0:
            _nothing_to_draw(options, faults)


def _nothing_to_draw(options: dict[str, Any], faults: list[str]) -> None:
    if options["decode"] != "self-speculate":  # there they are refused with temperature itself
        faults += [
            f"{name} has no effect at temperature 0"
            for name in ("top_k", "top_p", "seed")
            if options[name] != DEFAULTS[name]
        ]


def _block_size(options: dict[str, Any], rules: GenerationRules, faults: list[str]) -> int:
    size = options["block_size"]
    if size is None:
        return rules.block_size
    if not is_whole(size):
        faults.append(f"block_size must be a whole number, not {quote(size)}")
    elif size < 1 or rules.block_size % size:
        faults.append(
            f"block_size {quote(size)} does not divide the trained block of {rules.block_size}"
        )
    else:
        return int(size)
    return rules.block_size


def check_prompt(
    ids: Sequence[Any], request: Request | None,
    sizes: Sizes, rules: GenerationRules, used: int, context: int,
) -> None:  # fmt: skip
    """Checks prompt ids and, given a request, that prompt and response fit; raises Faults."""
    faults = [] if len(ids) else ["the prompt is empty"]
    for i, token in enumerate(ids):
        if not is_whole(token):
            faults.append(f"prompt id {i} is {quote(token)}, not a whole number")
        elif not 0 <= token < sizes.vocab_size:
            faults.append(
                f"prompt id {i} is {quote(token)}; the vocabulary is 0..{sizes.vocab_size - 1}"
            )
        elif token == rules.mask_token_id:
            faults.append(f"prompt id {i} is the mask id {token}, which stands for an open row")
        if len(faults) >= MAX_FAULTS and i + 1 < len(ids):
            faults.append(f"the ids from {i + 1} on were not checked")
            break
    if request is not None:
        _check_room(len(ids), request, used, context, faults)
    if faults:
        raise Faults("request", tuple(faults))


def _check_room(prompt: int, request: Request, used: int, context: int, faults: list[str]) -> None:
    block = request.block_size if request.decode == "denoise" else 1
    whole = -(-request.max_new_tokens // block) * block
    if used + prompt + whole > context:
        before = f"{used} committed rows, " if used else ""
        faults.append(
            f"{before}{prompt} prompt ids and {whole} rows for the response exceed the context of "
            f"{context}; shorten the prompt or ask for fewer tokens"
        )
