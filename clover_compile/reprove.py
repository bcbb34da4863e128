"""`clover-compile verify`: proves a finished bundle again, or looks for NaN in its model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from clover_compile import locate, models, prove
from clover_compile.build import DTYPES
from clover_compile.checkpoint import Checkpoint
from clover_compile.errors import Faults, NeedsCheckpoint, NoProbes, OtherModel, VerdictKept
from clover_compile.model.load import load_model
from clover_compile.runtime import sealing
from clover_compile.runtime.bundle import load
from clover_compile.runtime.chat import Text
from clover_compile.runtime.manifest import read_bundle
from clover_compile.tensor_names import spell


def reprove(
    path: Path, model: str | None, say: Callable[[str], None], allow_native: bool = False
) -> dict[str, Any]:
    """Compares with the stored probes, or afresh with the eager model of `model`, and writes the
    verdict, also in the place of one that is missing, damaged or of another bundle.

    Raises OtherModel if that checkpoint is not the one the bundle was built from, VerdictError if
    the bundle does not agree; the old verdict then stays.
    """
    if (
        model is None
        and "probes.safetensors" not in read_bundle(path, renewing=True).manifest["files"]
    ):
        raise NoProbes(path=spell(str(path)))
    loaded = load(
        path, unverified=True, allow_native=allow_native, recheck=True, renewing=True
    )  # fmt: skip
    manifest = loaded.manifest
    truth = None
    if model is not None:
        checkpoint = named_checkpoint(manifest, model)
        eager = load_model(checkpoint.config, checkpoint.tensor, DTYPES[manifest["dtype"]])
        truth = prove.Truth(eager, checkpoint, loaded.context).arrays()
    verdict = prove.prove(loaded, manifest["dtype"], say, truth)
    try:
        sealing.write_verdict(path, verdict)
    except OSError as error:
        outcome, reason = verdict["outcome"], error.strerror
        raise VerdictKept(path=spell(str(path)), outcome=outcome, reason=reason) from None
    return verdict


def find_nan(
    path: Path, model: str | None, prompt: str | None, say: Callable[[str], None]
) -> locate.Finding | None:
    """Where the eager model of a bundle first gives NaN or Inf; None if it stays finite.

    Generates by every way to decode from `prompt`, one user message, or from the probes. Writes
    nothing. Raises OtherModel, NeedsCheckpoint, or Faults for a prompt that is not usable.
    """
    manifest = read_bundle(path).manifest
    checkpoint = named_checkpoint(manifest, model) if model else bundled_checkpoint(path, manifest)
    say(f"looking for NaN and Inf in {spell(str(checkpoint.folder))}")
    eager = load_model(checkpoint.config, checkpoint.tensor, DTYPES[manifest["dtype"]])
    context = manifest["context"]
    if prompt is None:
        seed = int(load_file(path / "probes.safetensors")["in.seed"])
        prompts = locate.probe_prompts(checkpoint.config, context, (seed,))
    elif prompt == "":
        raise Faults("-p", ("the prompt is empty",))
    else:
        rules = prove.rules_of(checkpoint)
        text = Text(checkpoint.tokenizer_path, checkpoint.chat_template, rules)
        prompts = iter([text.encode(prompt)])
    return locate.find(eager, checkpoint, context, prompts, say)


def named_checkpoint(manifest: dict[str, Any], model: str) -> Checkpoint:
    """The checkpoint `model`, which must be the one of the manifest."""
    checkpoint = Checkpoint.open(models.find(model))
    if differing := _differing(manifest, checkpoint):
        raise OtherModel(model=spell(model), files=", ".join(differing))
    return checkpoint


def bundled_checkpoint(path: Path, manifest: dict[str, Any]) -> Checkpoint:
    """The bundled checkpoint a bundle was built from; raises NeedsCheckpoint if there is none."""
    for folder in models.bundled().values():
        checkpoint = Checkpoint.open(folder)
        if not _differing(manifest, checkpoint):
            return checkpoint
    name = spell(str(manifest["model"].get("name", "a checkpoint")))
    raise NeedsCheckpoint(path=spell(str(path)), name=name)


def _differing(manifest: dict[str, Any], checkpoint: Checkpoint) -> list[str]:
    found = checkpoint.source_hashes()
    return sorted(spell(n) for n, h in manifest["sources"].items() if found.get(n) != h)
