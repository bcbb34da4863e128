"""What is known of each GPU architecture that a target names: one record, public figures.

Nothing else branches on the name of a GPU. Shared memory: bytes a block may use, from NVIDIA's
table of compute capabilities. Bandwidth and memory: the vendor's data sheets, in 1e9 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """One GPU."""

    name: str
    capability: int
    """Compute capability times ten."""
    shared: int
    """Bytes of shared memory one block may use."""
    bandwidth: float
    """Bytes per second of device memory."""
    memory: int
    """Bytes of device memory."""
    fp8: bool
    """e4m3 operands in matrix instructions."""

    @property
    def wgmma(self) -> bool:
        """Warp-group matrix instructions (sm_90 alone)."""
        return self.capability == 90


_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


def _gpu(name: str, capability: int, bandwidth: float, memory: float) -> Architecture:
    shared, fp8 = _LIMIT[capability], capability >= 89
    return Architecture(name, capability, shared, bandwidth * 1e9, int(memory * 1e9), fp8)


ARCHITECTURES: dict[str, Architecture] = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100", 80, 2039, 80),
        _gpu("rtx3090", 86, 936, 24),
        _gpu("l40s", 89, 864, 48),
        _gpu("rtx4090", 89, 1008, 24),
        _gpu("h100", 90, 3350, 80),
        _gpu("h200", 90, 4800, 141),
        _gpu("b200", 100, 8000, 180),
        _gpu("rtx5090", 120, 1792, 32),
    )
}
"""GPU by the name a target ends in."""

CAPABILITIES = tuple(_LIMIT)
"""The compute capabilities kernels are compiled for."""


def shared_limit(capability: int) -> int:
    """Bytes of shared memory a block may use at this compute capability."""
    return _LIMIT[capability]
