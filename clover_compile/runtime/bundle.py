"""Opens a checked bundle: rules, sizes, tokenizer and the engine that runs it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from clover_compile.runtime.costs import CostTable
from clover_compile.runtime.engine import Engine, Sizes
from clover_compile.runtime.errors import BadBundle, Faults, NotProved
from clover_compile.runtime.manifest import Checked, read_bundle
from clover_compile.runtime.rules import GenerationRules
from clover_compile.runtime.session import Text
from clover_compile.runtime.strict_json import JsonFault, quote, read_file, read_json
from clover_compile.runtime.terminal import one_line

ENGINES = {
    "ort": "clover_compile.runtime.ort_engine:OrtEngine",
    "triton": "clover_compile.runtime.triton_engine:open_engine",
    "trt": "clover_compile.runtime.trt_engine:TrtEngine",
}
"""Engine of a manifest -> "module:callable" that opens a checked bundle."""

NATIVE = ("trt",)
"""Engines that load a library of the bundle, and are told whether they may."""

TEMPLATE = "chat_template.jinja"
MAX_TEMPLATE = 1 << 20


@dataclass(frozen=True)
class LoadedBundle:
    """An open bundle."""

    path: Path
    identity: str
    manifest: dict[str, Any]
    verdict: dict[str, Any]
    sizes: Sizes
    rules: GenerationRules
    context: int
    engine: Engine
    text: Text
    costs: CostTable | None = None
    costs_fault: str | None = None


def load(
    path: str | Path, *, unverified: bool = False, allow_native: bool = False,
    recheck: bool = False, unfinished: bool = False, renewing: bool = False,
    recosting: bool = False,
) -> LoadedBundle:  # fmt: skip
    """Checks and opens a bundle.

    Raises NoBundle, BadBundle, or NotProved unless the verdict is `passed` or `unverified` is set
    (a failed bundle is never opened). The other options as for `read_bundle`.
    """
    checked = read_bundle(
        path, recheck=recheck, unfinished=unfinished, renewing=renewing, recosting=recosting
    )
    _require_proof(checked, unverified)
    open_engine, native = _engine(checked), checked.manifest["engine"] in NATIVE
    rules, sizes, template = _rules(checked), _sizes(checked), _template(checked)
    from clover_compile.runtime.chat import Text as ChatText

    text = ChatText(checked.path / "tokenizer.json", template, rules)
    engine = open_engine(checked, **({"allow_native": allow_native} if native else {}))
    return LoadedBundle(
        checked.path, checked.identity, checked.manifest, checked.verdict,
        sizes, rules, checked.manifest["context"], engine, text, checked.costs,
        checked.costs_fault,
    )  # fmt: skip


def rules_and_sizes(checked: Checked) -> tuple[GenerationRules, Sizes]:
    """What a session over a checked bundle needs beside its engine."""
    return _rules(checked), _sizes(checked)


def _require_proof(checked: Checked, unverified: bool) -> None:
    outcome = checked.verdict["outcome"]
    if outcome == "passed" or (unverified and outcome != "failed"):
        return
    shown = one_line(str(checked.path))
    words = quote(checked.verdict.get("reason") or "no reason given", 300)
    remedy = "" if outcome == "failed" else ", or take it as it is with --unverified"
    device = checked.manifest.get("device")
    if isinstance(device, dict) and device.get("finished") is False:
        remedy = ", after `clover-compile finish BUNDLE -o NEW`"
    raise NotProved(path=shown, outcome=outcome, reason=words, remedy=remedy)


def _template(checked: Checked) -> str | None:
    path = checked.path / TEMPLATE
    if TEMPLATE not in checked.manifest["files"]:
        return None
    try:
        return read_file(path, MAX_TEMPLATE).decode("utf-8")
    except (JsonFault, UnicodeDecodeError) as error:
        raise _bad(checked, f"{TEMPLATE}: {error}") from None


def _bad(checked: Checked, fault: str) -> BadBundle:
    return BadBundle(one_line(str(checked.path)), one_line(fault))


def _engine(checked: Checked) -> Callable[..., Engine]:
    name = checked.manifest["engine"]
    if name not in ENGINES:
        raise _bad(checked, f"engine {quote(name)}; this runner has: {', '.join(ENGINES)}")
    module, attribute = ENGINES[name].split(":")
    found: Callable[..., Engine] = getattr(importlib.import_module(module), attribute)
    return found


def _rules(checked: Checked) -> GenerationRules:
    try:
        rules = GenerationRules.from_dict(read_json(checked.path / "generation.json"))
    except JsonFault as fault:
        raise _bad(checked, f"generation.json {fault}") from None
    except Faults as faults:
        raise _bad(checked, "generation.json: " + "; ".join(faults.faults)) from None
    vocab = checked.manifest["model"]["config"]["vocab_size"]
    if max(rules.mask_token_id, *rules.stop_token_ids, rules.think_end_token_id or 0) >= vocab:
        raise _bad(checked, f"generation.json: an id lies outside the vocabulary of {vocab}")
    return rules


def _sizes(checked: Checked) -> Sizes:
    """The model's sizes under the names of its config."""
    config = checked.manifest["model"]["config"]
    kinds = tuple(config["layer_types"])
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    derived = {
        "layer_types": kinds,
        "conv_dim": 2 * key + value,
        "gdn_layers": tuple(i for i, k in enumerate(kinds) if k == "linear_attention"),
        "attention_layers": tuple(i for i, k in enumerate(kinds) if k != "linear_attention"),
    }
    return SimpleNamespace(**{**config, **derived})
