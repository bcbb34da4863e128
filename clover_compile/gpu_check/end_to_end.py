"""Rebuilds the demonstration bundle on the GPU that is here, proves it, and compares its tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from clover_compile import models
from clover_compile.kernels.architecture import ARCHITECTURES
from clover_compile.prove import WAYS

MESSAGES = 20


def target_for(capability: int) -> str:
    """The name of a `triton-*` target of this compute capability; KeyError if there is none."""
    found = {gpu.capability: f"triton-{gpu.name}" for gpu in reversed(ARCHITECTURES.values())}
    return found[capability]


def stored(count: int) -> list[dict[str, Any]]:
    """The first messages: prompt, answer, and the oracle's tokens for each way to decode."""
    folder = models.find()
    rows = [
        [json.loads(line) for line in (folder / name).read_text().splitlines()[:count]]
        for name in ("messages.jsonl", "oracle_tokens.jsonl")
    ]
    keys = {"denoise": "denoise", "causal": "causal", "self-speculate release": "release",
            "self-speculate exact": "causal"}  # fmt: skip
    return [
        {**message, "tokens": {way: tokens[keys[way]] for way in WAYS}}
        for message, tokens in zip(*rows, strict=True)
    ]


def run(capability: int, folder: Path, messages: int = MESSAGES) -> dict[str, Any]:
    """Builds, which proves, then generates. The oracle computes in float64, the bundle in bf16: the
    share of equal answers is reported, the verdict judges."""
    from clover_compile.build import build
    from clover_compile.options import BuildOptions
    from clover_compile.runtime import Session

    folder.mkdir(parents=True, exist_ok=True)
    path, target = folder / "gpu-demo.clover", target_for(capability)
    options = BuildOptions(models.find(), path, target, force=True)
    result = build(options, lambda line: print(line, file=sys.stderr))
    report: dict[str, Any] = {"target": target, **result}
    verdict = json.loads((path / "verdict.json").read_text())
    report["verdict"] = verdict
    report["right"] = result["outcome"] == "passed"
    if not report["right"]:
        return report
    session = Session.load(path)
    report["ways"] = {}
    for way, flags in WAYS.items():
        same = exact = 0
        seconds = 0.0
        for message in stored(messages):
            out = session.generate(message["prompt"], max_new_tokens=256, **flags)
            same += list(out.token_ids) == message["tokens"][way]
            exact += out.text == message["answer"]
            seconds += sum(out.stats["seconds"].values())
        report["ways"][way] = {
            "messages": messages, "tokens_equal": same, "answers_exact": exact,
            "ms_per_answer": 1e3 * seconds / messages,
        }  # fmt: skip
    return report
