"""Watches the memory of one interpreted launch: out of bounds, and races between programs.

The interpreter runs programs one after another and would let both pass unseen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

NOBODY, SEVERAL = -1, -2


class BadAccess(RuntimeError):
    """A kernel touched what it must not; the message names the array and what happened."""


def _span(array: Tensor) -> int:
    """Bytes from the first to behind the last element of a view."""
    if array.numel() == 0:
        return 0
    last = sum((n - 1) * step for n, step in zip(array.shape, array.stride(), strict=True))
    return (last + 1) * array.element_size()


class Watched:
    """The arrays of one launch; `program` is the one that runs.

    Bounds are those of the view: from its first to its last element, gaps between rows included.
    Within a launch a program may read what it wrote itself; what another program writes it may
    neither read nor write, before or after.
    """

    def __init__(self, arrays: Mapping[str, Tensor], writable: set[int]) -> None:
        kept = sorted(arrays.items(), key=lambda item: item[1].data_ptr())
        self.names = [name for name, array in kept if _span(array)]
        held = [arrays[name] for name in self.names]
        self.starts = np.array([x.data_ptr() for x in held], dtype=np.uint64)
        self.spans = np.array([_span(x) for x in held], dtype=np.uint64)
        self.sizes = [x.element_size() for x in held]
        self.writable = [x.untyped_storage().data_ptr() in writable for x in held]
        self.writer: dict[int, Any] = {}
        self.reader: dict[int, Any] = {}
        for i, size in enumerate(self.sizes):
            if self.writable[i]:
                count = int(self.spans[i]) // size
                self.writer[i] = np.full(count, NOBODY, np.int32)
                self.reader[i] = np.full(count, NOBODY, np.int32)
        self.program = 0

    def touch(self, pointers: Any, mask: Any, store: bool) -> None:
        """Checks the addresses where `mask` holds; BadAccess if one is not allowed."""
        # The interpreter carries a mask made by arithmetic on masks as integers.
        pointers, mask = np.broadcast_arrays(pointers, mask.astype(np.bool_))
        at = pointers[mask].astype(np.uint64)
        if at.size == 0:
            return
        what = "store" if store else "load"
        if not self.names:
            raise BadAccess(f"{what} although every array is empty")
        where = np.searchsorted(self.starts, at, side="right").astype(np.int64) - 1
        into = at - self.starts[np.maximum(where, 0)]
        outside = (where < 0) | (into >= self.spans[np.maximum(where, 0)])
        if outside.any():
            near = self.names[max(0, int(where[outside][0]))]
            far = int(at[outside][0]) - int(self.starts[self.names.index(near)])
            raise BadAccess(f"{what} outside every array: {far} bytes from the start of {near}")
        for i in np.unique(where).tolist():
            if store and not self.writable[i]:
                raise BadAccess(f"store into {self.names[i]}, which is an input")
            if i in self.writer:
                self._claim(i, (into[where == i] // self.sizes[i]).astype(np.int64), store)

    def _claim(self, i: int, index: Any, store: bool) -> None:
        writer, reader = self.writer[i], self.reader[i]
        others = ~np.isin(writer[index], (NOBODY, self.program))
        if store:
            others |= ~np.isin(reader[index], (NOBODY, self.program))
        if others.any():
            first = int(index[others][0])
            raise BadAccess(
                f"race on {self.names[i]}[{first}]: program {self.program} "
                f"{'writes' if store else 'reads'} what another one "
                f"{'uses' if store else 'writes'}"
            )
        if store:
            writer[index] = self.program
        else:
            mine = np.isin(reader[index], (NOBODY, self.program))
            reader[index] = np.where(mine, self.program, SEVERAL)
