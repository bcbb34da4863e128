"""Finds the demonstration checkpoints that come with the package."""

from __future__ import annotations

from pathlib import Path

from clover_compile.errors import NoModel
from clover_compile.runtime.nearest import did_you_mean
from clover_compile.tensor_names import spell

DEFAULT = "clover-airspace-tiny"


def bundled() -> dict[str, Path]:
    """Name -> folder of each bundled checkpoint."""
    here = Path(__file__).parent
    return {path.parent.name: path.parent for path in sorted(here.glob("*/config.json"))}


def find(name_or_path: str | Path | None = None) -> Path:
    """The folder of a checkpoint: a folder, else a bundled name; the default model for None.

    Raises NoModel.
    """
    if name_or_path is None:
        return bundled()[DEFAULT]
    path = Path(name_or_path)
    if path.is_dir():
        return path
    known = bundled()
    if str(name_or_path) in known:
        return known[str(name_or_path)]
    raise no_model(path, did_you_mean(str(name_or_path), known))


def no_model(path: Path, meant: str = "") -> NoModel:
    """The error for what is neither the folder of a checkpoint nor a bundled name."""
    found = "is a bundle" if path.is_dir() else "is a file" if path.exists() else "no such folder"
    return NoModel(model=spell(str(path)), found=found, meant=meant, known=", ".join(bundled()))
