"""Settings of every test run: one thread, fixed hypothesis, its own cache folder, no network."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before anything loads an OpenMP library; several workers share few cores.
os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.load_profile("fixed")

# A process interprets Triton kernels or compiles them: each kind has a run of pytest of its own.
_INTERPRETS = os.environ.get("TRITON_INTERPRET", "0") != "0"
collect_ignore_glob = ["test_*.py"] if _INTERPRETS else ["interpreted/*"]

_CACHE = Path(tempfile.mkdtemp(prefix="clover-cache-"))


def pytest_configure(config: pytest.Config) -> None:
    """The runner remembers file hashes in the user's cache; tests must not."""
    os.environ["XDG_CACHE_HOME"] = str(_CACHE)
    # A shell starts background jobs with Ctrl-C ignored, and children would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Only where a test module has imported torch already: importing it here costs seconds."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_network() -> Iterator[None]:
    """Nothing here may depend on another machine, nor reach one by accident."""

    def refuse(self: socket.socket, *arguments: Any) -> None:
        raise RuntimeError(f"a test tried to connect to {arguments[0]!r}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket.socket, "connect_ex", refuse)
        yield
