"""`clover-compile verify`: proves a finished bundle again and renews its verdict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from clover_compile import bundle, models, prove
from clover_compile.build import DTYPES
from clover_compile.checkpoint import Checkpoint
from clover_compile.errors import OtherModel
from clover_compile.model.load import load_model
from clover_compile.runtime.bundle import load


def reprove(path: Path, model: str | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Compares with the stored probes, or afresh with the eager model of `model`.

    Raises OtherModel if that checkpoint is not the one the bundle was built from, VerdictError if
    the bundle does not agree; the old verdict then stays.
    """
    loaded = load(path, unverified=True, recheck=True)
    manifest = loaded.manifest
    truth = None
    if model is not None:
        checkpoint = Checkpoint.open(models.find(model))
        found = checkpoint.source_hashes()
        differing = sorted(n for n, h in manifest["sources"].items() if found.get(n) != h)
        if differing:
            raise OtherModel(model=model, files=", ".join(differing))
        eager = load_model(checkpoint.config, checkpoint.tensor, DTYPES[manifest["dtype"]])
        truth = prove.Truth(eager, checkpoint, loaded.context).arrays()
    verdict = prove.prove(loaded, manifest["dtype"], say, truth)
    bundle.write_verdict(path, verdict)
    return verdict
