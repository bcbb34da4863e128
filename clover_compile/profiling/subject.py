"""The bundle that is profiled, opened with a number of threads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from clover_compile.errors import NeedsThisModel
from clover_compile.model.config import ModelConfig
from clover_compile.runtime.bundle import LoadedBundle, load
from clover_compile.runtime.engine import Engine
from clover_compile.runtime.manifest import Checked
from clover_compile.runtime.session import Session
from clover_compile.tensor_names import spell


@dataclass(frozen=True)
class Subject:
    """An open bundle."""

    loaded: LoadedBundle
    engine: Engine
    threads: int

    @property
    def checked(self) -> Checked:
        """What an engine opens."""
        x = self.loaded
        return Checked(x.path, x.identity, x.manifest, x.verdict)

    @property
    def config(self) -> ModelConfig:
        """The model's sizes: a bundle keeps them under the names of the config."""
        return cast(ModelConfig, self.loaded.sizes)

    @property
    def manifest(self) -> dict[str, Any]:
        """The bundle's manifest."""
        return self.loaded.manifest

    def session(self) -> Session:
        """A session that has learned nothing yet."""
        x = self.loaded
        return Session(self.engine, x.sizes, x.rules, x.context, x.text, x.costs)


def open_subject(path: Path, threads: int, allow_native: bool) -> Subject:
    """Opens a bundle; whatever its old costs.json holds is not looked at."""
    loaded = load(path, allow_native=allow_native, recosting=True)
    engine = loaded.engine
    if loaded.manifest["engine"] == "ort":
        from clover_compile.runtime.ort_engine import OrtEngine

        checked = Checked(loaded.path, loaded.identity, loaded.manifest, loaded.verdict)
        engine = OrtEngine(checked, threads)
    return Subject(loaded, engine, threads)


def open_rival(path: Path, subject: Subject, allow_native: bool) -> Subject:
    """Opens the bundle to compare with; raises NeedsThisModel if it is of another model."""
    rival = open_subject(path, subject.threads, allow_native)
    if rival.manifest["model"]["hash"] != subject.manifest["model"]["hash"]:
        raise NeedsThisModel(path=spell(str(path)))
    return rival
