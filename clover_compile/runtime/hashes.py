"""File hashes, and the memory of large files that were hashed before."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path

from clover_compile.runtime.strict_json import JsonFault, read_json

_LIMIT = 4096
_KEY = re.compile(r"[0-9]+:[0-9]+:[0-9]+:-?[0-9]+")
_HASH = re.compile(r"[0-9a-f]{64}")


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hex, streamed."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class Remembered:
    """Hashes of large files by (device, inode, size, mtime); a damaged memory counts as empty."""

    def __init__(self) -> None:
        self.path = cache_folder() / "hashes.json"
        self.known: dict[str, str] = {}
        with contextlib.suppress(JsonFault, OSError):
            found = read_json(self.path, _LIMIT * 256)
            if all(_KEY.fullmatch(k) and _HASH.fullmatch(str(v)) for k, v in found.items()):
                self.known = {k: str(v) for k, v in found.items()}

    def holds(self, file: Path, digest: str) -> bool:
        """Whether this very file was found to have the hash before."""
        return self.known.get(_key(file)) == digest

    def add(self, file: Path, digest: str) -> None:
        """Remembers a hash; a cache that cannot be written is no reason to stop."""
        self.known[_key(file)] = digest
        self.known = dict(list(self.known.items())[-_LIMIT:])
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix="hashes.", dir=self.path.parent)
            try:
                with os.fdopen(handle, "w") as stream:
                    json.dump(self.known, stream)
                Path(name).replace(self.path)
            finally:
                Path(name).unlink(missing_ok=True)


def cache_folder() -> Path:
    """Where this user's copies of what can be made again lie; it may not exist yet."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # A relative path there is to be ignored; expanduser never fails, unlike Path.home().
    root = root if root.is_absolute() else Path(os.path.expanduser("~")) / ".cache"
    return root / "clover-compile"


def _key(file: Path) -> str:
    stat = file.stat()
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"
