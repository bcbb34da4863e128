"""State arrays on the device, handed out again once their state is gone.

A recorded graph holds the addresses of the state it was recorded over: the next request takes the
same arrays and so finds its graphs recorded, and no memory piles up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name of a state array -> its dtype and shape."""


class PoolDevice(Protocol):
    """What the pool needs of a device."""

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        """A contiguous array, holding anything."""

    def clear(self, array: Any) -> None:
        """Sets every byte of a contiguous array to zero."""


class StatePool:
    """The state arrays of one engine."""

    def __init__(self, device: PoolDevice, layout: Callable[[int], Layout]) -> None:
        """layout: the arrays of a state with room for so many rows."""
        self._device, self._layout = device, layout
        self._free: dict[int, list[dict[str, Any]]] = {}

    def take(self, context: int) -> dict[str, Any]:
        """Arrays of an empty sequence, and `length`; rows of k and v nobody wrote hold anything."""
        free = self._free.setdefault(context, [])
        arrays = free.pop() if free else self._make(context)
        for name, array in arrays.items():
            if name[0] not in "kv":
                self._device.clear(array)
        return arrays

    def _make(self, context: int) -> dict[str, Any]:
        made = {n: self._device.empty(*x) for n, x in self._layout(context).items()}
        return made | {"length": self._device.empty("i32", (1,))}

    def give_back(self, context: int, arrays: dict[str, Any]) -> None:
        """Takes the arrays of a state that is gone."""
        self._free[context].append(arrays)
