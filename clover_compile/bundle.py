"""Writes a bundle: every file into a temporary sibling, which takes its name once it is proved."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

from clover_compile.errors import CannotWrite, NotOurFolder, OutputExists
from clover_compile.runtime.manifest import is_text
from clover_compile.runtime.sealing import sync
from clover_compile.tensor_names import spell

REQUIREMENTS = ("numpy", "tokenizers", "jinja2", "safetensors")


@contextlib.contextmanager
def workspace(output: Path, force: bool) -> Iterator[Path]:
    """A temporary folder beside `output` that becomes `output` on success and is gone otherwise.

    Refuses an existing output unless `force`, and then replaces only a folder that holds one of
    our manifests. What killed builds of the same output left behind is removed first, after a
    bundle that one of them had moved aside is back in its place. `flush` the folder before its
    verdict is written: then nothing but the renaming comes after it.
    """
    check_output(output, force)
    folder = output.parent / f".{output.name}.building-{os.getpid()}"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _restore(output)
        check_output(output, force)
        _sweep(output)
        folder.mkdir()
    except OSError as error:
        raise _cannot(output, error.strerror) from None
    try:
        yield folder
        sync(folder)
        if output.exists():
            check_output(output, force)
            replace(folder, output)
        else:
            folder.rename(output)
        sync(output.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace(folder: Path, output: Path) -> None:
    """Puts `folder` in the place of `output`, a bundle, and removes that one.

    Where the system can swap two names there is no moment without a bundle at `output`. Elsewhere
    the old one is moved aside first, and a kill right then leaves it to `_restore`.
    """
    if exchange(folder, output):
        sync(output.parent)
        shutil.rmtree(folder)
        return
    old = output.parent / f".{output.name}.building-old-{os.getpid()}"
    output.rename(old)
    folder.rename(output)
    sync(output.parent)
    shutil.rmtree(old)


def exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step; False where the system or the file system cannot."""
    try:
        swap = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):  # not Linux, or a C library without it
        return False
    here, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(swap(here, os.fsencode(one), here, os.fsencode(other), both) == 0)


def _restore(output: Path) -> None:
    """Brings back the bundle that a killed build had moved aside but not yet replaced."""
    if output.exists() or output.is_symlink():
        return
    pattern = f".{glob.escape(output.name)}.building-old-*"
    aside = [old for old in output.parent.glob(pattern) if _is_abandoned(old)]
    whole = [old for old in aside if (old / "manifest.json").is_file()]
    if whole:
        max(whole, key=lambda old: old.stat().st_mtime).rename(output)


def check_output(output: Path, force: bool) -> None:
    """Raises OutputExists, NotOurFolder or CannotWrite if `output` may not be written."""
    if not is_text(output):
        raise _cannot(output, "its name is no UTF-8 text, which engines ask for")
    try:
        there = output.exists() or output.is_symlink()
    except OSError as error:
        raise _cannot(output, error.strerror) from None
    if not there:
        _takes_files(output.absolute().parent, output)
        return
    if not force:
        raise OutputExists(path=output)
    if output.is_symlink() or not output.is_dir() or not (output / "manifest.json").is_file():
        raise NotOurFolder(path=output)


def check_folder(folder: Path | None, option: str) -> None:
    """Raises CannotWrite if a folder that an option names cannot take files; nothing is made."""
    if folder is not None:
        _takes_files(folder, Path(f"{option} {folder}"))


def bundle_around(folder: Path) -> Path | None:
    """The bundle that `folder` is or lies in: a file more and it would be refused."""
    inside = folder.absolute()
    found = (x for x in (inside, *inside.parents) if (x / "MANIFEST.sha256").is_file())
    return next(found, None)


def _takes_files(folder: Path, where: Path) -> None:
    """Refuses early what would fail only after minutes; `where`: what the message names."""
    if (around := bundle_around(folder)) is not None:
        raise _cannot(where, f"{spell(str(around))} is a bundle, which takes nothing more")
    inside = folder.absolute()
    while not inside.exists() and inside != inside.parent:
        inside = inside.parent
    if not inside.is_dir():
        raise _cannot(where, f"{spell(str(inside))} is not a folder")
    if not os.access(inside, os.W_OK | os.X_OK):
        raise _cannot(where, f"{spell(str(inside))} is read-only")


def _cannot(output: Path, reason: str | None) -> CannotWrite:
    return CannotWrite(path=spell(str(output)), reason=reason)


def _sweep(output: Path) -> None:
    """Removes the leftovers of builds of this output whose process is gone."""
    name = glob.escape(output.name)
    for left in output.parent.glob(f".{name}.building-*"):
        if _is_abandoned(left):
            shutil.rmtree(left, ignore_errors=True)
    # Of a build, and of a `verify` or `profile` of a bundle that stood here.
    for pattern in (
        f"..{name}.building-*.verdict-*", f".{name}.verdict-*", f".{name}.costs-*"
    ):  # fmt: skip
        for left in output.parent.glob(pattern):
            if _is_abandoned(left):
                left.unlink(missing_ok=True)


def _is_abandoned(left: Path) -> bool:
    pid = left.name.rsplit("-", 1)[1]
    return not (pid.isdigit() and Path(f"/proc/{pid}").exists() and int(pid) != os.getpid())


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
    # What a build does not need here comes with the versions it accepts.
    lines = [x if ">" in x else f"{x}=={version(x).split('+')[0]}" for x in names]
    (folder / "requirements.txt").write_text("\n".join(lines) + "\n")


def _add(archive: zipfile.ZipFile, name: str, text: str) -> None:
    # A fixed time stamp: the same sources make the same bundle, byte for byte.
    info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    info.external_attr = 0o644 << 16
    archive.writestr(info, text, zipfile.ZIP_DEFLATED)
