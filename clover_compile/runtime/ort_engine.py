"""ONNX Runtime: one session per Unit over one memory-mapped weight store.

On the CPU in fp32; the files of `ort-cuda` name their weights themselves, for the CUDA provider,
which was never run where this is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from clover_compile.runtime.cores import cores
from clover_compile.runtime.engine import Array, Arrays
from clover_compile.runtime.errors import EngineFailed, WrongMachine
from clover_compile.runtime.manifest import Checked
from clover_compile.runtime.ort_provider import wrong_provider
from clover_compile.runtime.terminal import one_line

CPU_PROVIDER = "CPUExecutionProvider"

PREPACKED = ("preview",)
"""Units whose weights ONNX Runtime may copy into its own layout. A preview is worth it; a second
copy for the others would double the memory for a few percent."""


class OrtEngine:
    """Runs the Units of an `ort-*` bundle; safe to use from several threads."""

    def __init__(self, checked: Checked, threads: int | None = None) -> None:
        self._path = checked.path
        self.threads = threads or cores()
        self._provider = (checked.manifest.get("device") or {}).get("provider", CPU_PROVIDER)
        if self._provider != CPU_PROVIDER and (wrong := wrong_provider()) is not None:
            needs, here, remedy = wrong
            path, target = one_line(str(checked.path)), checked.manifest["target"]
            raise WrongMachine(path=path, target=target, needs=needs, here=here, remedy=remedy)
        self._weights = _map_weights(checked) if self._provider == CPU_PROVIDER else {}
        self._values = {
            name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in self._weights.items()
        }
        self._sessions = {
            name: self._open(name, unit) for name, unit in checked.manifest["units"].items()
        }

    def run(self, unit: str, feeds: Arrays, outputs: Sequence[str] | None = None) -> Arrays:
        """Runs one Unit; feeds that are contiguous are passed without a copy."""
        if unit not in self._sessions:
            raise EngineFailed(unit=unit, reason="the bundle has no such Unit")
        session, names = self._sessions[unit]
        wanted = names if outputs is None else list(outputs)
        try:
            return dict(zip(wanted, session.run(wanted, feeds), strict=True))
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise EngineFailed(unit=unit, reason=reason) from error

    @property
    def weights(self) -> dict[str, Array]:
        """Every stored weight by name, as a view of its mapped file."""
        return self._weights

    def _options(self, name: str) -> ort.SessionOptions:
        """Settings of one Unit's session."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        # Threads of one session would go on spinning while the next session needs the cores.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        # What it would log is in the exception, and stderr is ours.
        options.log_severity_level = 4
        if name not in PREPACKED:
            options.add_session_config_entry("session.disable_prepacking", "1")
        return options

    def _open(self, name: str, unit: dict[str, Any]) -> tuple[ort.InferenceSession, list[str]]:
        options = self._options(name)
        for weight in unit["weights"] if self._values else ():
            options.add_initializer(weight, self._values[weight])
        try:
            session = ort.InferenceSession(
                str(self._path / unit["file"]),
                options,
                providers=list(dict.fromkeys((self._provider, CPU_PROVIDER))),
            )
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise EngineFailed(unit=name, reason=reason) from error
        return session, [output.name for output in session.get_outputs()]


def _map_weights(checked: Checked) -> dict[str, Array]:
    """Every weight as a view of its mapped file; nothing is read before it is used."""
    maps: dict[str, Array] = {}
    weights = {}
    for name, entry in checked.manifest["weights"].items():
        file = entry["file"]
        if file not in maps:
            maps[file] = np.memmap(checked.path / file, np.uint8, "r")
        size = int(np.prod(entry["shape"], dtype=np.int64)) * np.dtype(entry["dtype"]).itemsize
        part = maps[file][entry["offset"] : entry["offset"] + size]
        weights[name] = part.view(entry["dtype"]).reshape(entry["shape"])
    return weights
