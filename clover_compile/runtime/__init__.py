"""The runner: opens a bundle and decodes with it; imports nothing from the compiler half."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clover_compile.runtime.errors import CloverError
    from clover_compile.runtime.session import Session

__all__ = ["CloverError", "Session"]


def __getattr__(name: str) -> Any:
    # Lazily, so that errors and manifests can be used without numpy.
    if name == "Session":
        from clover_compile.runtime.session import Session

        return Session
    if name == "CloverError":
        from clover_compile.runtime.errors import CloverError

        return CloverError
    raise AttributeError(name)
