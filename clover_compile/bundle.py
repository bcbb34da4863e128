"""Writes a bundle: every file into a temporary sibling, which takes its name once it is proved."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clover_compile import __version__
from clover_compile.errors import NotOurFolder, OutputExists
from clover_compile.runtime.manifest import canonical_json

OUTSIDE = ("manifest.json", "MANIFEST.sha256", "verdict.json", "costs.json")
"""Files the manifest does not list."""

REQUIREMENTS = ("numpy", "tokenizers", "jinja2", "safetensors")


@contextlib.contextmanager
def workspace(output: Path, force: bool) -> Iterator[Path]:
    """A temporary folder beside `output` that becomes `output` on success and is gone otherwise.

    Refuses an existing output unless `force`, and then replaces only a folder that holds one of
    our manifests. What killed builds of the same output left behind is removed first.
    """
    check_output(output, force)
    _sweep(output)
    folder = output.parent / f".{output.name}.building-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
        _flush(folder)
        if output.exists():
            check_output(output, force)
            old = output.parent / f".{output.name}.building-old-{os.getpid()}"
            output.rename(old)
            folder.rename(output)
            shutil.rmtree(old)
        else:
            folder.rename(output)
        _sync(output.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_output(output: Path, force: bool) -> None:
    """Raises OutputExists or NotOurFolder if `output` may not be written."""
    if not output.exists() and not output.is_symlink():
        return
    if not force:
        raise OutputExists(path=output)
    if output.is_symlink() or not output.is_dir() or not (output / "manifest.json").is_file():
        raise NotOurFolder(path=output)


def _sweep(output: Path) -> None:
    """Removes the leftovers of builds of this output whose process is gone."""
    for left in output.parent.glob(f".{output.name}.building-*"):
        pid = left.name.rsplit("-", 1)[1]
        if not (pid.isdigit() and Path(f"/proc/{pid}").exists() and int(pid) != os.getpid()):
            shutil.rmtree(left, ignore_errors=True)


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Writes readable JSON with a stable order of keys."""
    path.write_text(json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n")


def write_runner(folder: Path, engine_requirements: tuple[str, ...]) -> None:
    """Packs the runtime as runner.pyz and pins what it needs in requirements.txt."""
    from importlib.metadata import version

    package = Path(__file__).parent
    with zipfile.ZipFile(folder / "runner.pyz", "w", zipfile.ZIP_DEFLATED) as archive:
        _add(
            archive, "__main__.py", "from clover_compile.runtime.__main__ import entry\n\nentry()\n"
        )
        _add(archive, "clover_compile/__init__.py", (package / "__init__.py").read_text())
        for path in sorted((package / "runtime").rglob("*.py")):
            _add(archive, str(Path("clover_compile") / path.relative_to(package)), path.read_text())
    names = sorted({*REQUIREMENTS, *engine_requirements})
    lines = [f"{name}=={version(name).split('+')[0]}" for name in names]
    (folder / "requirements.txt").write_text("\n".join(lines) + "\n")


def _add(archive: zipfile.ZipFile, name: str, text: str) -> None:
    # A fixed time stamp: the same sources make the same bundle, byte for byte.
    info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    info.external_attr = 0o644 << 16
    archive.writestr(info, text, zipfile.ZIP_DEFLATED)


def write_manifest(folder: Path, content: dict[str, Any]) -> str:
    """Writes manifest.json, with every file's size and hash, and its hash; returns the id."""
    files = {
        str(path.relative_to(folder)): {"sha256": _sha256(path), "size": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and str(path.relative_to(folder)) not in OUTSIDE
    }
    return _seal(folder, content | {"files": files, "written_by": __version__})


def complete_manifest(folder: Path, content: dict[str, Any]) -> str:
    """Adds what is known only at the end of a build; the files are not hashed again. Returns the
    id, which is another one: the verdict must name it.
    """
    return _seal(folder, json.loads((folder / "manifest.json").read_text()) | content)


def _seal(folder: Path, content: dict[str, Any]) -> str:
    write_json(folder / "manifest.json", content)
    identity = _sha256(folder / "manifest.json")
    (folder / "MANIFEST.sha256").write_text(identity + "\n")
    return identity


def write_verdict(folder: Path, verdict: dict[str, Any]) -> None:
    """Replaces verdict.json atomically; adds the hash of its own content."""
    text = canonical_json(verdict)
    verdict = verdict | {"sha256": hashlib.sha256(text).hexdigest()}
    # Beside the bundle: nothing that does not belong to it may ever be seen inside.
    temporary = folder.resolve().parent / f".{folder.name}.verdict-{os.getpid()}"
    write_json(temporary, verdict)
    _sync(temporary)
    temporary.replace(folder / "verdict.json")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
