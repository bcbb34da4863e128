"""Reads a bundle's manifest and verdict and checks every file, before anything is opened."""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from clover_compile.runtime.costs import COSTS, CostTable
from clover_compile.runtime.errors import BadBundle, NoBundle
from clover_compile.runtime.hashes import Remembered, file_hash
from clover_compile.runtime.manifest_shape import (
    Files,
    canonical_json,
    readable_json,
    shape_faults,
)
from clover_compile.runtime.strict_json import JsonFault, parse_json, quote, read_file
from clover_compile.runtime.terminal import one_line
from clover_compile.runtime.versions import version_faults

__all__ = ["FORMAT_VERSION", "Checked", "bundle_id", "canonical_json", "read_bundle"]

FORMAT_VERSION = 1
OUTSIDE = ("manifest.json", "MANIFEST.sha256", "verdict.json")
UNFINISHED = re.compile(r"\..+\.building-(old-)?[0-9]+")
"""Name of the folder a build works in, `.<bundle>.building-<process>`."""

OPTIONAL = (COSTS,)
HASHED_EVERY_TIME = 1 << 30
"""Files up to this many bytes in all, small ones first, are hashed on every load."""

MAX_MANIFEST = 16 << 20
"""Most bytes of manifest.json, verdict.json and costs.json, each."""

MAX_SHOWN = 8
"""Faults named before the rest is only counted."""

RENEW = "`clover-compile verify` on it proves it again and writes a new verdict.json"
"""What mends a bundle of which only the verdict is missing or damaged."""

LOST = {"outcome": "unproved", "reason": "its verdict is lost or damaged"}
"""Stands for a verdict that cannot be read, while a new one is made."""

OUTCOMES = ("passed", "failed", "compiled, not run", "unproved")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Checked:
    """A bundle whose files are what its manifest says."""

    path: Path
    identity: str
    """SHA-256 of manifest.json, hex."""
    manifest: dict[str, Any]
    verdict: dict[str, Any]
    costs: CostTable | None = None
    """What costs.json says, if there is one that can be used."""
    costs_fault: str | None = None
    """Why the costs.json that is there cannot be used."""


def bundle_id(path: str | Path) -> str:
    """SHA-256 of a bundle's manifest.json, hex; raises NoBundle or BadBundle if it is damaged."""
    return _manifest(_folder(path))[1]


def read_bundle(
    path: str | Path, *, recheck: bool = False, unfinished: bool = False, renewing: bool = False,
    recosting: bool = False,
) -> Checked:  # fmt: skip
    """Checks names, sizes, hashes, verdict and versions; raises NoBundle, or BadBundle with all
    faults of the first kind found.

    `recheck` hashes large weights again even where an earlier check is remembered. `unfinished` is
    for the build itself: to everybody else the folder it works in is no bundle, even in the moment
    between its verdict and its renaming. `renewing` is for who will write the verdict anew: one
    that is missing, damaged or of another bundle counts as LOST. `recosting` is for who will write
    costs.json anew: whatever it holds is not looked at. Only `auto` needs costs, so what is wrong
    with them refuses nothing here and stands in the result.
    """
    path = _folder(path)
    if not unfinished and UNFINISHED.fullmatch(path.resolve().name):
        raise NoBundle(path, "a build that was cut off left it", "build it again")
    manifest, identity = _manifest(path)
    faults: list[str] = []
    files = _listed(manifest, faults)
    _present(path, files, faults)
    if not faults:
        _contents(path, files, recheck, faults)
    about: list[str] = []
    verdict = _verdict(path, identity, about)
    if about and renewing:
        verdict = dict(LOST)
    else:
        faults += about
    remedy = RENEW if faults and faults == about else None
    faults = faults or shape_faults(manifest, files) or version_faults(manifest["accepts"])
    if faults:
        more = [f"and {len(faults) - MAX_SHOWN} more"] if len(faults) > MAX_SHOWN else []
        raise BadBundle(one_line(str(path)), "; ".join(faults[:MAX_SHOWN] + more), remedy)
    costs, why = (None, None) if recosting else _costs(path, identity)
    return Checked(path, identity, manifest, verdict, costs, why)


def is_text(path: Path) -> bool:
    """Whether the absolute path can be spelled in UTF-8, as the engines' libraries want it."""
    try:
        return b"\0" not in str(path.absolute()).encode()
    except UnicodeEncodeError:
        return False


def _folder(path: str | Path) -> Path:
    path = Path(path)
    if not is_text(path):
        remedy = "rename or move it, or use a UTF-8 locale"
        raise NoBundle(path, "its name is no UTF-8 text here, which engines ask for", remedy)
    try:
        if not path.is_dir():
            raise NoBundle(path, "it is a file" if path.exists() else "no such folder")
        if not (path / "manifest.json").is_file():
            raise NoBundle(path, "no manifest.json in it")
    except (ValueError, OSError):  # a NUL in the name, or a folder that may not be entered
        raise NoBundle(path, "it cannot be opened") from None
    return path


def _bad(path: Path, faults: str) -> BadBundle:
    return BadBundle(one_line(str(path)), faults)


def _manifest(path: Path) -> tuple[dict[str, Any], str]:
    try:
        data = read_file(path / "manifest.json", MAX_MANIFEST)
    except JsonFault as fault:
        raise _bad(path, f"manifest.json {fault}") from None
    identity = hashlib.sha256(data).hexdigest()
    try:
        stated = read_file(path / "MANIFEST.sha256", 4096)
    except JsonFault as fault:
        raise _bad(path, f"MANIFEST.sha256 {fault}") from None
    if stated != f"{identity}\n".encode():
        said = quote(stated[:12].decode("ascii", "replace"))
        raise _bad(path, f"manifest.json has hash {identity[:12]}, MANIFEST.sha256 says {said}")
    try:
        manifest: dict[str, Any] = parse_json(data)
    except JsonFault as fault:
        raise _bad(path, f"manifest.json {fault}") from None
    version = manifest.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise _bad(
            path,
            f"format version {quote(version)}, this runner reads {FORMAT_VERSION}; build it again "
            "with this version",
        )
    return manifest, identity


def _listed(manifest: Mapping[str, Any], faults: list[str]) -> dict[str, tuple[str, int]]:
    """Path -> (hash, size) of the files the manifest lists."""
    files: dict[str, tuple[str, int]] = {}
    listed = manifest.get("files")
    if not isinstance(listed, dict):
        faults.append("manifest.json lists no files")
        return files
    for name, entry in listed.items():
        pure = PurePosixPath(name)
        # A surrogate or a control character is not printable and in no name of ours.
        plain = name == str(pure) and name.isprintable() and "\\" not in name
        own = name in (*OUTSIDE, *OPTIONAL, ".")
        if not plain or own or pure.is_absolute() or ".." in pure.parts:
            faults.append(f"manifest.json lists the path {quote(name)}")
            continue
        digest = entry.get("sha256") if isinstance(entry, dict) else None
        size = entry.get("size") if isinstance(entry, dict) else None
        if not (isinstance(digest, str) and _HASH.fullmatch(digest)) or type(size) is not int:
            faults.append(f"manifest.json has no hash and size for {quote(name)}")
            continue
        files[name] = digest, size
    return files


def _present(path: Path, files: Files, faults: list[str]) -> None:
    """The folder holds exactly the listed files and our own, all regular and of the right size.

    Whether a verdict and costs are there is for who reads them.
    """
    found: dict[str, int] = {}
    folders: list[str] = []
    for entry in path.rglob("*"):
        name = entry.relative_to(path).as_posix()
        status = entry.lstat()
        if stat.S_ISREG(status.st_mode):
            found[name] = status.st_size
        elif stat.S_ISDIR(status.st_mode):
            folders.append(name)
        else:
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
            faults.append(f"{quote(name)} is {kind}")
            found[name] = files[name][1] if name in files else 0
    missing = set(files) - set(found)
    faults += [f"{quote(name)} is missing" for name in sorted(missing)]
    extra = set(found) - {*files, *OUTSIDE, *OPTIONAL}
    faults += [f"{quote(name)} does not belong to the bundle" for name in sorted(extra)]
    for name in sorted(set(found) & set(files)):
        if found[name] != files[name][1]:
            faults.append(f"{quote(name)} has {found[name]} bytes instead of {files[name][1]}")
    for name in folders:
        if not any(file.startswith(f"{name}/") for file in (*files, *found)):
            faults.append(f"the empty folder {quote(name)} does not belong to the bundle")


def _contents(path: Path, files: Files, recheck: bool, faults: list[str]) -> None:
    remembered = Remembered()
    total = 0
    for name in sorted(files, key=lambda n: (files[n][1], n)):
        digest, size = files[name]
        total += size
        large = total > HASHED_EVERY_TIME
        file = path / name
        if large and not recheck and remembered.holds(file, digest):
            continue
        try:
            found = file_hash(file)
        except OSError as error:
            faults.append(f"{quote(name)} cannot be read ({error.strerror})")
            continue
        if found != digest:
            faults.append(f"{quote(name)} has hash {found[:12]} instead of {digest[:12]}")
        elif large:
            remembered.add(file, digest)


def _verdict(path: Path, identity: str, faults: list[str]) -> dict[str, Any]:
    verdict = _signed(path, "verdict.json", identity, faults)
    if verdict and verdict.get("outcome") not in OUTCOMES:
        faults.append(f"verdict.json has the outcome {quote(verdict.get('outcome'), 40)}")
    return verdict


def _costs(path: Path, identity: str) -> tuple[CostTable | None, str | None]:
    """The costs, if there are any, or why they cannot be used."""
    if not (path / COSTS).exists():
        return None, None
    faults: list[str] = []
    content = _signed(path, COSTS, identity, faults)
    if faults:
        return None, faults[0]
    try:
        return CostTable.from_json(content), None
    except ValueError as fault:
        return None, f"{COSTS}: {fault}"


def _signed(path: Path, name: str, identity: str, faults: list[str]) -> dict[str, Any]:
    """A file outside the manifest that names the bundle and carries the hash of its own content.

    It must also be spelled as we spell it: then no byte of it can change unnoticed. What is there
    but no regular file is told by `_present`.
    """
    if (path / name).is_symlink() or ((path / name).exists() and not (path / name).is_file()):
        return {}
    try:
        data = read_file(path / name, MAX_MANIFEST)
        content: dict[str, Any] = parse_json(data)
    except JsonFault as fault:
        faults.append(f"{name} {fault}")
        return {}
    own = content.get("sha256")
    rest = {key: value for key, value in content.items() if key != "sha256"}
    digest = hashlib.sha256(canonical_json(rest)).hexdigest()
    if own != digest:
        says = f"says {quote(own[:12])}" if isinstance(own, str) else "names none"
        faults.append(f"{name} was changed: its content has hash {digest[:12]}, it {says}")
    elif data != readable_json(content):
        faults.append(f"{name} was changed: it is not spelled as it was written")
    elif content.get("bundle") != identity:
        faults.append(f"{name} is of another bundle: {quote(content.get('bundle'), 16)}")
    return content
