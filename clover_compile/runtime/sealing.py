"""Writes what makes a folder a bundle: its manifest, that one's hash, and the verdict."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from clover_compile import __version__
from clover_compile.runtime.hashes import file_hash
from clover_compile.runtime.manifest import OPTIONAL, OUTSIDE, canonical_json
from clover_compile.runtime.manifest_shape import readable_json


def flush(folder: Path) -> None:
    """Makes sure that every file of a folder is on the disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Makes sure that a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Writes readable JSON with a stable order of keys."""
    path.write_bytes(readable_json(value))


def write_manifest(folder: Path, content: dict[str, Any]) -> str:
    """Writes manifest.json, with every file's size and hash, and its hash; returns the id."""
    files = {
        str(path.relative_to(folder)): {"sha256": file_hash(path), "size": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and str(path.relative_to(folder)) not in (*OUTSIDE, *OPTIONAL)
    }
    return _seal(folder, content | {"files": files, "written_by": __version__})


def complete_manifest(folder: Path, content: dict[str, Any]) -> str:
    """Adds what is known only at the end of a build; the files are not hashed again. Returns the
    id, which is another one: the verdict must name it.
    """
    return _seal(folder, json.loads((folder / "manifest.json").read_text()) | content)


def _seal(folder: Path, content: dict[str, Any]) -> str:
    write_json(folder / "manifest.json", content)
    identity = file_hash(folder / "manifest.json")
    (folder / "MANIFEST.sha256").write_text(identity + "\n")
    return identity


def write_verdict(folder: Path, verdict: dict[str, Any]) -> None:
    """Replaces verdict.json atomically; adds the hash of its own content."""
    _write_signed(folder, "verdict", verdict)


def write_costs(folder: Path, costs: dict[str, Any]) -> None:
    """Replaces costs.json likewise."""
    _write_signed(folder, "costs", costs)


def _write_signed(folder: Path, stem: str, content: dict[str, Any]) -> None:
    text = canonical_json(content)
    content = content | {"sha256": hashlib.sha256(text).hexdigest()}
    # Beside the bundle: nothing that does not belong to it may ever be seen inside.
    temporary = folder.resolve().parent / f".{folder.name}.{stem}-{os.getpid()}"
    try:
        write_json(temporary, content)
        sync(temporary)
        temporary.replace(folder / f"{stem}.json")
    finally:
        temporary.unlink(missing_ok=True)
