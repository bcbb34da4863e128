"""What a build will need, as its target tells it from the headers of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """Needs of one build."""

    memory_bytes: int
    """Peak resident memory of the process that builds."""
    disk_bytes: int
    """Size of the bundle."""
    minutes: tuple[float, float]
    """Shortest and longest it may take."""
    unproved_memory_bytes: int = 0
    """The same for a build that proves nothing, as one does where `memory_bytes` is not free."""
    weight_bytes: int = 0
    """Weights as the bundle stores them."""
    device_bytes: int = 0
    """Memory the bundle needs on the device it runs on, with one state of the whole context; 0
    where there is none."""
