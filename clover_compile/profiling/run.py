"""`clover-compile profile`: measures or models a bundle, and writes its costs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clover_compile.checkpoint import Checkpoint
from clover_compile.errors import CannotModel, NeedsCheckpoint
from clover_compile.model.load import load_model
from clover_compile.profiling import (
    cost_table,
    doubts,
    messages,
    modelled,
    receipt,
    units,
    workload,
)
from clover_compile.profiling.calls import PREFIX, Scene
from clover_compile.profiling.html.write import report_folder, write
from clover_compile.profiling.messages import Messages
from clover_compile.profiling.options import ProfileOptions
from clover_compile.profiling.rival import Rival
from clover_compile.profiling.subject import Subject, open_rival, open_subject
from clover_compile.profiling.unfused import Unfused
from clover_compile.reprove import bundled_checkpoint, named_checkpoint
from clover_compile.runtime.bundle import load
from clover_compile.runtime.cores import cores
from clover_compile.runtime.costs import CostTable, Origin
from clover_compile.runtime.errors import WrongMachine
from clover_compile.runtime.manifest import Checked, read_bundle
from clover_compile.runtime.sealing import write_costs
from clover_compile.runtime.strict_json import read_json
from clover_compile.tensor_names import spell

FORMAT = 1
Say = Callable[[str], None]


def profile(options: ProfileOptions, say: Say) -> dict[str, Any]:
    """Profiles a bundle; returns everything that was found, as JSON values.

    Writes costs.json into the bundle, if it can be written to. Raises what opening a bundle does,
    OtherModel, NeedsThisModel or BadMessages; CannotModel for one that can neither run here nor be
    modelled.
    """
    checked = read_bundle(options.bundle, recosting=True)
    reason = _cannot_run(options, checked)
    if reason and not modelled.can_model(checked):
        raise CannotModel(path=spell(str(checked.path)), reason=reason)
    with report_folder(options.output) if options.output else contextlib.nullcontext():
        if reason and options.messages is not None:
            say("no message is answered: the bundle cannot run here, so its passes are modelled")
        found, table = _modelled(checked, reason) if reason else _measured(options, say)
        found["costs"] = table.to_json()
        block: Any = read_json(checked.path / "generation.json")["block_size"]
        found["break even"] = cost_table.break_even(table, block)
        write_costs_of(options.bundle, table, found)
        if options.output is not None:
            write(options.output, found)
    return found


def _cannot_run(options: ProfileOptions, checked: Checked) -> str | None:
    """Why a bundle cannot be measured here; None if it can."""
    if checked.verdict["outcome"] == "compiled, not run":
        return str(checked.verdict.get("reason") or "it was never run")
    try:
        if checked.manifest["engine"] != "ort":
            load(options.bundle, allow_native=options.allow_native, recosting=True)
    except WrongMachine as error:
        return str(error)
    return None


def _modelled(checked: Checked, reason: str) -> tuple[dict[str, Any], CostTable]:
    """What is known of a bundle that cannot run here."""
    known, table = modelled.profile(checked)
    found: dict[str, Any] = {
        "format": FORMAT, "kind": "modelled", "bundle": checked.identity,
        "target": checked.manifest["target"], "model": checked.manifest["model"]["name"],
        "prefix": modelled.PREFIX, "warning": None,
        **known, "notes": [*known["notes"], f"not run here: {reason}"],
        "receipt": {"bundle": checked.identity, "versions": receipt.versions(), "prompts": None},
    }  # fmt: skip
    return found, table


def _measured(options: ProfileOptions, say: Say) -> tuple[dict[str, Any], CostTable]:
    """What is measured of a bundle that runs here."""
    threads = options.threads or cores()
    # The floor is measured with torch; its idle threads would spin beside what is measured.
    torch.set_num_threads(threads)
    subject = open_subject(options.bundle, threads, options.allow_native)
    notes: list[str] = []
    checkpoint = _checkpoint(options, subject, notes)
    asked = _messages(options, checkpoint, notes)
    scene = Scene(subject.session(), _text(subject, asked))
    found: dict[str, Any] = {
        "format": FORMAT, "kind": "measured", "bundle": subject.loaded.identity,
        "target": subject.manifest["target"], "model": subject.manifest["model"]["name"],
        "prefix": scene.prefix, "rounds": options.rounds, "notes": notes,
        **receipt.machine(subject.threads),
    }  # fmt: skip
    if subject.manifest["target"] == "ort-cpu":
        with _rivals(options, subject, checkpoint, say) as rivals:
            found["units"] = units.measure(subject, scene, rivals, options.rounds, say)
    table, taken = cost_table.measure(subject, scene, options.rounds, say)
    if asked is not None:
        table = _workload(options, subject, asked, table, say, found)
    found["warning"] = doubts.warning(found, taken)
    origin = Origin(found["machine"]["processor"], subject.threads, found["warning"])
    found["receipt"] = receipt.receipt(options, subject, asked, found, taken)
    return found, replace(table, origin=origin)


def write_costs_of(path: Path, table: CostTable, found: dict[str, Any]) -> None:
    """Writes costs.json, and says so where the profile is doubted, or why it was not written."""
    content: dict[str, Any] = {"bundle": found["bundle"], **table.to_json()}
    content["prefix"] = found["prefix"]
    try:
        write_costs(path, content)
        if found["warning"]:
            found["warning"] += f". {doubts.EFFECT}"
    except OSError as error:
        found["notes"].append(f"costs.json was not written ({error.strerror}); auto stays as it is")


def _checkpoint(options: ProfileOptions, subject: Subject, notes: list[str]) -> Checkpoint | None:
    if options.model is not None:
        return named_checkpoint(subject.manifest, options.model)
    try:
        return bundled_checkpoint(options.bundle, subject.manifest)
    except NeedsCheckpoint:
        notes.append("the unfused graph needs the checkpoint; give --model to compare with it")
        return None


def _messages(
    options: ProfileOptions, checkpoint: Checkpoint | None, notes: list[str]
) -> Messages | None:
    if options.messages is not None:
        return messages.read(options.messages, options.answers)
    found = messages.bundled(checkpoint, options.answers)
    if found is None:
        notes.append("no messages, so no ways to decode were compared; give --messages")
    return found


def _text(subject: Subject, asked: Messages | None) -> list[int]:
    """Ids of real text where there is any, else ids drawn at random."""
    if asked is None:
        drawn = np.random.default_rng(0).integers(0, subject.config.vocab_size - 1, PREFIX)
        mask = subject.loaded.rules.mask_token_id
        return [int(x) + (int(x) >= mask) for x in drawn]
    text = subject.loaded.text
    found: list[int] = []
    for message in asked.asked:
        prompt = message.prompt if isinstance(message.prompt, str) else list(message.prompt)
        found += text.encode(prompt)
        found += text.encode(message.answer, raw=True) if message.answer else []
    return found


@contextlib.contextmanager
def _rivals(
    options: ProfileOptions, subject: Subject, checkpoint: Checkpoint | None, say: Say
) -> Iterator[units.Rivals]:  # fmt: skip
    """What the bundle is compared with, call by call."""
    found: dict[str, units.Make] = {}
    with contextlib.ExitStack() as stack:
        unfused = None
        # First what may be refused: tracing takes minutes.
        if options.against == "eager":
            checkpoint = checkpoint or bundled_checkpoint(options.bundle, subject.manifest)
            rival = Rival(load_model(checkpoint.config, checkpoint.tensor), checkpoint.generation)
            found["eager"] = units.eager_runs(rival)
        elif options.against is not None:
            other = open_rival(Path(options.against), subject, options.allow_native)
            found["against"] = units.engine_runs(other.engine, other.manifest["units"])
        if checkpoint is not None:
            unfused = Unfused(checkpoint, subject.manifest["units"], subject.threads, say)
            stack.callback(unfused.close)
        yield units.Rivals(found, unfused)


def _workload(
    options: ProfileOptions, subject: Subject, asked: Messages, table: CostTable, say: Say,
    found: dict[str, Any],
) -> CostTable:  # fmt: skip
    """Compares the ways, then `auto` with the costs that came of it; returns the table in full."""
    threshold, budget = subject.loaded.rules.threshold, options.max_new_tokens
    singles = workload.ways(threshold)
    logs = workload.ask(subject, asked, singles, budget, None, say)
    block = subject.loaded.rules.block_size
    table = replace(table, outlook=workload.outlook(logs, threshold, block))
    rows = workload.rows(logs, asked, table)
    best = workload.winner(rows)
    again = {
        way: singles[way]
        for way in dict.fromkeys((workload.CAUSAL, *(x["way"] for x in best.values())))
    }
    again |= workload.AUTO
    after = workload.ask(subject, asked, again, budget, table, say)
    found["workload"] = {
        "messages": asked.source, "ways": rows, "winner": best,
        "per_pass": _per_pass(rows, threshold),
        "auto": workload.rows(after, asked, table),
        **workload.pictures(logs, threshold, asked, subject.loaded.text),
    }  # fmt: skip
    return table


def _per_pass(rows: list[dict[str, Any]], threshold: float) -> float:
    """Tokens per pass at the checkpoint's threshold."""
    name = workload.denoising(threshold)
    return float(next(row["tokens per pass"] for row in rows if row["way"] == name))
