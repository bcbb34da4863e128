"""Reads a bundle's manifest and verdict and checks every file, before anything is opened."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from clover_compile.runtime.errors import BadBundle, NoBundle
from clover_compile.runtime.hashes import Remembered, file_hash
from clover_compile.runtime.strict_json import JsonFault, quote, read_file, read_json

FORMAT_VERSION = 1
OUTSIDE = ("manifest.json", "MANIFEST.sha256", "verdict.json")
OPTIONAL = ("costs.json",)
HASHED_EVERY_TIME = 1 << 30
"""Files up to this many bytes in all, small ones first, are hashed on every load."""

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


def canonical_json(value: Any) -> bytes:
    """The one spelling of a JSON value that hashes are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def read_bundle(path: str | Path, *, recheck: bool = False) -> Checked:
    """Checks names, sizes, hashes, verdict and versions; raises NoBundle or BadBundle with all faults.

    `recheck` hashes large weights again even where an earlier check is remembered.
    """
    path = Path(path)
    if not path.is_dir():
        raise NoBundle(path=path, reason="no such folder")
    if not (path / "manifest.json").is_file():
        raise NoBundle(path=path, reason="no manifest.json in it")
    manifest, identity = _manifest(path)
    faults: list[str] = []
    files = _listed(manifest, faults)
    _present(path, files, faults)
    if not faults:
        _contents(path, files, recheck, faults)
    verdict = _verdict(path, identity, faults)
    if not faults:
        _shape(path, manifest, files, faults)
        faults += _versions(manifest.get("accepts"))
    if faults:
        raise BadBundle(path, "; ".join(faults))
    return Checked(path, identity, manifest, verdict)


def _manifest(path: Path) -> tuple[dict[str, Any], str]:
    try:
        data = read_file(path / "manifest.json")
        manifest: dict[str, Any] = read_json(path / "manifest.json")
    except JsonFault as fault:
        raise BadBundle(path, f"manifest.json {fault}") from None
    identity = hashlib.sha256(data).hexdigest()
    try:
        stated = read_file(path / "MANIFEST.sha256", 4096).decode("ascii", "replace").strip()
    except JsonFault as fault:
        raise BadBundle(path, f"MANIFEST.sha256 {fault}") from None
    if stated != identity:
        raise BadBundle(
            path, f"manifest.json has hash {identity[:12]}, MANIFEST.sha256 says {quote(stated[:12])}"
        )
    version = manifest.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise BadBundle(
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
        plain = name == str(pure) and not pure.is_absolute() and "\\" not in name and "\0" not in name
        if not plain or ".." in pure.parts or name in (*OUTSIDE, *OPTIONAL, "."):
            faults.append(f"manifest.json lists the path {quote(name)}")
            continue
        digest = entry.get("sha256") if isinstance(entry, dict) else None
        size = entry.get("size") if isinstance(entry, dict) else None
        if not (isinstance(digest, str) and _HASH.fullmatch(digest)) or type(size) is not int:
            faults.append(f"manifest.json has no hash and size for {quote(name)}")
            continue
        files[name] = digest, size
    return files


def _present(path: Path, files: Mapping[str, tuple[str, int]], faults: list[str]) -> None:
    found: set[str] = set()
    for entry in path.rglob("*"):
        name = entry.relative_to(path).as_posix()
        if entry.is_symlink():
            faults.append(f"{quote(name)} is a symbolic link")
        elif entry.is_file():
            found.add(name)
        elif not entry.is_dir():
            faults.append(f"{quote(name)} is not a regular file")
    needed = {*files, *OUTSIDE}
    faults += [f"{quote(name)} is missing" for name in sorted(needed - found)]
    extra = found - needed - set(OPTIONAL)
    faults += [f"{quote(name)} does not belong to the bundle" for name in sorted(extra)]
    for name in sorted(found & set(files)):
        size = (path / name).stat().st_size
        if size != files[name][1]:
            faults.append(f"{quote(name)} has {size} bytes instead of {files[name][1]}")


def _contents(
    path: Path, files: Mapping[str, tuple[str, int]], recheck: bool, faults: list[str]
) -> None:
    remembered = Remembered()
    total = 0
    for name in sorted(files, key=lambda n: (files[n][1], n)):
        digest, size = files[name]
        total += size
        large = total > HASHED_EVERY_TIME
        file = path / name
        if large and not recheck and remembered.holds(file, digest):
            continue
        found = file_hash(file)
        if found != digest:
            faults.append(f"{quote(name)} has hash {found[:12]} instead of {digest[:12]}")
        elif large:
            remembered.add(file, digest)


def _verdict(path: Path, identity: str, faults: list[str]) -> dict[str, Any]:
    verdict = _signed(path, "verdict.json", identity, faults)
    if verdict and verdict.get("outcome") not in OUTCOMES:
        faults.append(f"verdict.json has the outcome {quote(verdict.get('outcome'))}")
    if (path / "costs.json").exists():
        _signed(path, "costs.json", identity, faults)
    return verdict


def _signed(path: Path, name: str, identity: str, faults: list[str]) -> dict[str, Any]:
    """A file outside the manifest that names the bundle and carries the hash of its own content."""
    try:
        content: dict[str, Any] = read_json(path / name)
    except JsonFault as fault:
        faults.append(f"{name} {fault}")
        return {}
    own = content.get("sha256")
    rest = {key: value for key, value in content.items() if key != "sha256"}
    digest = hashlib.sha256(canonical_json(rest)).hexdigest()
    if own != digest:
        faults.append(f"{name} was changed: its content has hash {digest[:12]}, it says {quote(own)}")
    elif content.get("bundle") != identity:
        faults.append(f"{name} is of another bundle: {quote(content.get('bundle'))[:14]}")
    return content


def _shape(
    path: Path, manifest: Mapping[str, Any], files: Mapping[str, tuple[str, int]], faults: list[str]
) -> None:
    """The parts of the manifest the runner relies on have the types it relies on."""
    for key, kind in (
        ("target", str), ("engine", str), ("context", int), ("units", dict), ("weights", dict),
        ("model", dict), ("dtype", str),
    ):  # fmt: skip
        if type(manifest.get(key)) is not kind:
            faults.append(f"manifest.json: {key} is {quote(manifest.get(key))}")
    if faults:
        return
    for name, unit in manifest["units"].items():
        if not isinstance(unit, dict) or unit.get("file") not in files:
            faults.append(f"manifest.json: Unit {quote(name)} has no file in the bundle")
    for name, weight in manifest["weights"].items():
        if not _weight_fits(weight, files):
            faults.append(f"manifest.json: weight {quote(name)} lies outside the bundle's files")


def _weight_fits(weight: Any, files: Mapping[str, tuple[str, int]]) -> bool:
    if not isinstance(weight, dict) or weight.get("file") not in files:
        return False
    offset, shape = weight.get("offset"), weight.get("shape")
    sizes = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
    size = sizes.get(str(weight.get("dtype")))
    if type(offset) is not int or not isinstance(shape, list) or size is None:
        return False
    for n in shape:
        if type(n) is not int or n < 0:
            return False
        size *= n
    return 0 <= offset and offset + size <= files[weight["file"]][1]


def _versions(accepts: Any) -> list[str]:
    """Faults of installed packages outside the ranges (">=1.24,<2") the bundle accepts."""
    if not isinstance(accepts, dict):
        return ["manifest.json: accepts is missing"]
    faults = []
    for package, span in accepts.items():
        try:
            found = metadata.version(str(package))
        except metadata.PackageNotFoundError:
            faults.append(f"needs {package} {span}, which is not installed; pip install '{package}{span}'")
            continue
        if not _inside(found, str(span)):
            faults.append(
                f"{package} {found} is installed, the bundle accepts {span}; "
                f"pip install '{package}{span}'"
            )
    return faults


def _inside(version: str, span: str) -> bool:
    have = _release(version)
    for part in span.split(","):
        match = re.fullmatch(r"\s*(>=|<|==)\s*([0-9.]+)\s*", part)
        if match is None:
            return False
        bound = _release(match[2])
        width = max(len(have), len(bound))
        a, b = have + (0,) * (width - len(have)), bound + (0,) * (width - len(bound))
        if not {">=": a >= b, "<": a < b, "==": a == b}[match[1]]:
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(x) for x in match[0].split(".")) if match else ()
