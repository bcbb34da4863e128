"""Ranges for a profiler: pushed and popped in pairs where the library is, nothing where not."""

from __future__ import annotations

import pytest

from clover_compile.runtime import nvtx


class Library:
    """Notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []

    def nvtxRangePushA(self, name: bytes) -> int:
        self.calls.append(name)
        return 0

    def nvtxRangePop(self) -> int:
        self.calls.append(b"pop")
        return 0


def test_pairs_even_where_a_launch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(nvtx, "_library", lambda: library)
    with nvtx.named("preview: moe"):
        pass
    with pytest.raises(ValueError, match="launch"), nvtx.named("pick"):
        raise ValueError("launch")
    assert library.calls == [b"preview: moe", b"pop", b"pick", b"pop"]


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvtx, "LIBRARIES", ("libnothing-of-this-name.so",))
    nvtx._library.cache_clear()
    with nvtx.named("x"):
        pass
    nvtx._library.cache_clear()
