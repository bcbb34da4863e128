"""File hashes, and the memory of large files that were hashed before."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

_LIMIT = 4096


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hex, streamed."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class Remembered:
    """Hashes of large files by (device, inode, size, mtime); a damaged memory counts as empty."""

    def __init__(self) -> None:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.path = Path(root) / "clover-compile" / "hashes.json"
        self.known: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self.path.read_text())
            if isinstance(found, dict):
                self.known = {str(k): str(v) for k, v in found.items()}

    def holds(self, file: Path, digest: str) -> bool:
        """Whether this very file was found to have the hash before."""
        return self.known.get(_key(file)) == digest

    def add(self, file: Path, digest: str) -> None:
        """Remembers a hash; a cache that cannot be written is no reason to stop."""
        self.known[_key(file)] = digest
        self.known = dict(list(self.known.items())[-_LIMIT:])
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(self.known))
            temporary.replace(self.path)


def _key(file: Path) -> str:
    stat = file.stat()
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"
