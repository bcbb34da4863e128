"""From a checkpoint folder to a proved bundle: load, trace, fuse, lower, prove, publish."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import platform
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import save

from clover_compile import bundle, locate, oversize, prove, trace
from clover_compile.checkpoint import Checkpoint
from clover_compile.errors import (
    ModelOverflows,
    NonfiniteWeights,
    PassFailed,
)
from clover_compile.model import interface
from clover_compile.model.clover import Clover
from clover_compile.model.config import GenerationConfig
from clover_compile.model.load import load_model
from clover_compile.options import BuildOptions, context_of
from clover_compile.passes import observe
from clover_compile.passes.base import Event, run_passes
from clover_compile.passes.pipeline import PIPELINE
from clover_compile.runtime import sealing
from clover_compile.runtime.bundle import load
from clover_compile.runtime.errors import NotANumber
from clover_compile.runtime.manifest import FORMAT_VERSION, canonical_json, read_bundle
from clover_compile.targets.base import Emitted, Target
from clover_compile.targets.table import known
from clover_compile.targets.table import target as find_target
from clover_compile.tensor_names import spell
from clover_compile.unit import Unit, source_of, trace_unit

UNDER_CONSTRUCTION = {"outcome": "unproved", "reason": "the build has not finished"}

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
          "fp8": torch.bfloat16}  # fmt: skip

CHECK_SIZES = ((33, 70), (5, 0), (70, 130))
"""Rows and prefix of the numeric checks after each pass: several chunk buckets, an empty prefix."""


@dataclass
class Report:
    """What a build tells while it runs and when it is done."""

    say: Callable[[str], None]
    started: float = field(default_factory=time.perf_counter)
    starts: dict[str, float] = field(default_factory=dict)
    """When each stage began, in seconds."""
    debug: bool = False

    def stage(self, name: str) -> None:
        """Starts a stage; `say` gets one line."""
        self.starts[name] = time.perf_counter() - self.started
        self.say(f"[{self.starts[name]:6.1f} s] {name}")

    def seconds(self) -> dict[str, float]:
        """How long each stage took, the last one until now."""
        ends = [*self.starts.values(), time.perf_counter() - self.started][1:]
        spans = zip(self.starts.items(), ends, strict=True)
        return {name: round(end - start, 2) for (name, start), end in spans}


def build(options: BuildOptions, say: Callable[[str], None], debug: bool = False) -> dict[str, Any]:
    """Builds a bundle at `options.output`; returns its id, outcome and figures.

    Raises InputError for what the caller can mend and BuildError otherwise; either way nothing is
    left at the output.
    """
    report = Report(say, debug=debug)
    target = find_target(options.target)
    bundle.check_output(options.output, options.force)
    dtype = known(options.target).dtype(target.name, options.dtype)
    options = replace(options, dtype=dtype)
    report.stage("checking the checkpoint")
    checkpoint = Checkpoint.open(options.model)
    context = context_of(options, checkpoint.config)
    if bad := checkpoint.nonfinite():
        raise NonfiniteWeights(tensors=", ".join(bad))
    with bundle.workspace(options.output, options.force) as folder:
        shortage = oversize.shortage(options, checkpoint)
        if shortage is None:
            passes, emitted = _compile(checkpoint, context, options, target, folder, report)
        else:
            passes, emitted = _compile_unseen(
                checkpoint, context, options, target, folder, report, shortage
            )
        gc.collect()  # the eager model, whose memory the proof needs
        _write_texts(folder, checkpoint)
        bundle.write_runner(folder, target.requirements)
        content = _manifest(options, target, checkpoint, context, passes, emitted, report)
        identity = sealing.write_manifest(folder, content)
        sealing.write_verdict(folder, {"bundle": identity, **UNDER_CONSTRUCTION})
        verdict = _verdict(target, folder, options, report, shortage)
        # The proof itself takes memory, often the most.
        peak = peak_memory()
        identity = sealing.complete_manifest(folder, {"peak_memory_bytes": peak})
        sealing.flush(folder)
        sealing.write_verdict(folder, verdict | {"bundle": identity})
    report.stage(f"done: {verdict['outcome']}")
    return {
        "bundle": str(options.output), "id": identity, "outcome": verdict["outcome"],
        "reason": verdict["reason"], "peak_memory_bytes": peak,
        "seconds": round(time.perf_counter() - report.started, 1),
    }  # fmt: skip


Compiled = tuple[dict[str, dict[str, int]], Emitted]
"""Rewrites by Unit and pass, and what was written."""


def _compile(
    checkpoint: Checkpoint, context: int, options: BuildOptions, target: Target, folder: Path,
    report: Report,
) -> Compiled:  # fmt: skip
    """Traces, fuses and lowers the model, and stores what its eager form answers to the probes."""
    report.stage("loading the eager model")
    model = load_model(checkpoint.config, checkpoint.tensor, DTYPES[options.dtype])
    with _explained(model, checkpoint, context, options, report):
        units, passes = fused_units(model, checkpoint.generation, options, target, report)
        report.stage(f"lowering for {target.name}")
        source = source_of(dict(model.named_parameters()))
        emitted = target.emit(units, source, folder, context, report.say)
        report.stage("running the probes on the eager model")
        truth = prove.Truth(model, checkpoint, context)
        # Not save_file: a full disk must be an OSError.
        (folder / "probes.safetensors").write_bytes(save(truth.arrays()))
    return passes, emitted


def _compile_unseen(
    checkpoint: Checkpoint, context: int, options: BuildOptions, target: Target, folder: Path,
    report: Report, shortage: str,
) -> Compiled:  # fmt: skip
    """The same where the eager model does not fit: passes are checked on a twin, no probes."""
    report.stage(f"nothing can be proved here: {shortage}; checking the passes on a small twin")
    small, generation = oversize.twin(checkpoint.config, checkpoint.generation)
    fused_units(small, generation, options, target, report)
    report.stage("tracing the model at its own sizes")
    dtype = DTYPES[options.dtype]
    model = oversize.shell(checkpoint.config, dtype)
    units, passes = fused_units(model, checkpoint.generation, options, target, report, check=False)
    report.stage(f"lowering for {target.name}")
    source = oversize.source(checkpoint, dtype)
    return passes, target.emit(units, source, folder, context, report.say)


def _verdict(
    target: Target, folder: Path, options: BuildOptions, report: Report, shortage: str | None
) -> dict[str, Any]:
    """The proof, or why this machine cannot give one."""
    if shortage is not None:
        read_bundle(folder, unfinished=True)
        reason = f"no probes: {shortage}; every pass was checked on a small twin alone"
        if why := target.cannot_run():
            reason += f"; compiled, not run: {why}"
        return {"outcome": "unproved", "reason": reason, "dtype": options.dtype}
    if why := target.cannot_run():
        # What the proof would do first: nothing is written that the runner refuses as damaged.
        read_bundle(folder, unfinished=True)
        return {"outcome": "compiled, not run", "reason": why, "dtype": options.dtype}
    report.stage("proving the bundle")
    loaded = load(folder, unverified=True, unfinished=True)
    return prove.prove(loaded, options.dtype, report.say)


def fused_units(
    model: Clover, generation: GenerationConfig, options: BuildOptions, target: Target,
    report: Report, check: bool = True,
) -> tuple[dict[str, Unit], dict[str, dict[str, int]]]:  # fmt: skip
    """Traces and fuses every Unit; also the rewrites by Unit and pass.

    check: run each Unit after every pass; the model's weights are read for it.
    """
    # In fp32 whatever the model's dtype: in 16 bits any reordered sum moves every later row.
    stored = source_of(dict(model.named_parameters()))

    def source(name: str) -> torch.Tensor:
        return stored(name).float()

    units: dict[str, Unit] = {}
    passes: dict[str, dict[str, int]] = {}
    for name in interface.units(model.config):
        report.stage(f"tracing and fusing {name}")
        unit = trace_unit(model, generation, name)
        examples = [
            trace.example(model.config, name, rows, prefix, seed, torch.float32)
            for seed, (rows, prefix) in enumerate(CHECK_SIZES)
        ]
        observers = [observe.check(examples, source)] if check else []
        if options.dump_passes is not None:
            observers.append(observe.dump(options.dump_passes))
        if report.debug:
            observers.append(_tell(report))
        passes[name] = run_passes(
            unit, PIPELINE + target.passes(options.dtype), observe.both(*observers)
        )
        units[name] = unit
    return units, passes


@contextlib.contextmanager
def _explained(
    model: Clover, checkpoint: Checkpoint, context: int, options: BuildOptions, report: Report
) -> Iterator[None]:
    """Turns an error whose cause is NaN in the eager model into one that names the layer."""
    try:
        yield
    except (NotANumber, PassFailed):
        prompts = locate.probe_prompts(model.config, context)
        report.say("looking for the layer that gives NaN or Inf")
        finding = locate.find(model, checkpoint, context, prompts, report.say)
        if finding is None:
            raise
        name = spell(str(options.model))
        raise ModelOverflows(model=name, dtype=options.dtype, finding=finding) from None


def _tell(report: Report) -> Callable[[Event], None]:
    def tell(event: Event) -> None:
        nodes = len(event.unit.graph.nodes)
        report.say(
            f"    {event.label}: {event.rewrites} rewrites, {nodes} nodes, {event.seconds:.2f} s"
        )

    return tell


def _write_texts(folder: Path, checkpoint: Checkpoint) -> None:
    shutil.copyfile(checkpoint.tokenizer_path, folder / "tokenizer.json")
    if checkpoint.chat_template is not None:
        (folder / "chat_template.jinja").write_text(checkpoint.chat_template)
    sealing.write_json(folder / "generation.json", prove.rules_of(checkpoint).to_dict())


def _manifest(
    options: BuildOptions, target: Target, checkpoint: Checkpoint, context: int,
    passes: dict[str, dict[str, int]], emitted: Emitted, report: Report,
) -> dict[str, Any]:  # fmt: skip
    config = checkpoint.config.to_dict()
    return {
        "format_version": FORMAT_VERSION,
        "target": target.name,
        "engine": target.engine,
        "dtype": options.dtype,
        "model": {"config": config, "hash": _digest(config), "name": options.model.name},
        "sources": checkpoint.source_hashes(),
        "unknown_keys": list(checkpoint.unknown_keys),
        "context": context,
        "units": emitted.units,
        "passes": passes,
        "ops": emitted.ops,
        "weights": emitted.weights,
        "precision": _precision(emitted.weights),
        "built_with": {"python": platform.python_version(), "torch": version("torch")}
        | emitted.built_with,
        "accepts": emitted.accepts,
        "device": emitted.device,
        "static": emitted.static,
        "quantisation": emitted.quantisation,
        "seconds": report.seconds(),
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


def _precision(weights: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Bytes and dtype by group of weights; one that is the first rows of another counts once."""
    groups: dict[str, dict[str, Any]] = {}
    longest: dict[tuple[str, int], str] = {}
    for name in sorted(weights, key=lambda name: math.prod(weights[name]["shape"])):
        longest[weights[name]["file"], weights[name]["offset"]] = name
    for name in sorted(longest.values(), key=list(weights).index):
        entry = weights[name]
        key = next(
            (k for k in ("experts", "linear_attn", "self_attn", "mlp", "norm") if k in name),
            "other",
        )
        group = groups.setdefault(f"{key} {entry['dtype']}", {"tensors": 0, "bytes": 0})
        group["tensors"] += 1
        group["bytes"] += getattr(torch, entry["dtype"]).itemsize * math.prod(entry["shape"])
    return groups


def peak_memory() -> int:
    """Peak resident memory of this program so far, bytes."""
    # getrusage counts what the process that started this one held as well.
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
