"""Opens a checked bundle: rules, sizes, tokenizer and the engine that runs it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from clover_compile.runtime.engine import Engine, Sizes
from clover_compile.runtime.errors import BadBundle, NotProved
from clover_compile.runtime.manifest import Checked, read_bundle
from clover_compile.runtime.rules import GenerationRules
from clover_compile.runtime.session import Text
from clover_compile.runtime.strict_json import JsonFault, read_json

ENGINES = {"ort": "clover_compile.runtime.ort_engine:OrtEngine"}
"""Engine of a manifest -> "module:Class", opened with the checked bundle."""


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


def load(
    path: str | Path, *, unverified: bool = False, allow_native: bool = False, recheck: bool = False
) -> LoadedBundle:
    """Checks and opens a bundle.

    Raises NoBundle, BadBundle, or NotProved unless the verdict is `passed` or `unverified` is set
    (a failed bundle is never opened).
    """
    checked = read_bundle(path, recheck=recheck)
    outcome = checked.verdict["outcome"]
    if outcome != "passed" and (not unverified or outcome == "failed"):
        reason = str(checked.verdict.get("reason", ""))
        raise NotProved(path=checked.path, outcome=outcome, reason=reason)
    rules = _rules(checked)
    sizes = _sizes(checked)
    from clover_compile.runtime.chat import Text as ChatText

    template = checked.path / "chat_template.jinja"
    text = ChatText(
        checked.path / "tokenizer.json", template.read_text() if template.exists() else None, rules
    )
    engine = _engine(checked)
    return LoadedBundle(
        checked.path, checked.identity, checked.manifest, checked.verdict,
        sizes, rules, checked.manifest["context"], engine, text,
    )  # fmt: skip


def _engine(checked: Checked) -> Engine:
    name = checked.manifest["engine"]
    if name not in ENGINES:
        raise BadBundle(checked.path, f"engine {name!r}; this runner has: {', '.join(ENGINES)}")
    module, attribute = ENGINES[name].split(":")
    engine: Engine = getattr(importlib.import_module(module), attribute)(checked)
    return engine


def _rules(checked: Checked) -> GenerationRules:
    try:
        return GenerationRules.from_dict(read_json(checked.path / "generation.json"))
    except (JsonFault, TypeError, KeyError) as error:
        raise BadBundle(checked.path, f"generation.json: {error}") from None


def _sizes(checked: Checked) -> Sizes:
    """The model's sizes under the names of its config."""
    config = checked.manifest["model"].get("config")
    try:
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
    except (TypeError, KeyError) as error:
        raise BadBundle(checked.path, f"manifest.json: model config: {error}") from None
