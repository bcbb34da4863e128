"""The committed state of one sequence."""

from __future__ import annotations

import numpy as np

from clover_compile.runtime.engine import Array, Arrays, Sizes, scalar
from clover_compile.runtime.errors import ContextFull

FIRST_ROWS = 256
"""Rows a cache starts with; it doubles when they are used up."""


class State:
    """Ring and S of the GDN layers, k and v of the attention layers, and the number of rows.

    Only a commit or a replay changes it. Cache buffers are zero beyond `length` and handed to
    the engine as views of exactly `length` rows.
    """

    def __init__(self, sizes: Sizes, context: int) -> None:
        self.sizes, self.context, self.length = sizes, context, 0
        heads, dk, dv = (
            sizes.linear_num_value_heads, sizes.linear_key_head_dim, sizes.linear_value_head_dim,
        )  # fmt: skip
        self._recurrent: Arrays = {}
        for i in sizes.gdn_layers:
            taps = sizes.linear_conv_kernel_dim - 1
            self._recurrent[f"ring.{i}"] = np.zeros((1, taps, sizes.conv_dim), np.float32)
            self._recurrent[f"S.{i}"] = np.zeros((1, heads, dk, dv), np.float32)
        rows = min(FIRST_ROWS, context)
        shape = (1, rows, sizes.num_key_value_heads, sizes.head_dim)
        self._cache: Arrays = {
            f"{kind}.{i}": np.zeros(shape, np.float32)
            for i in sizes.attention_layers
            for kind in ("k", "v")
        }

    def feeds(self) -> Arrays:
        """What a Unit that reads the state is given: read-only views, so none can write to it."""
        views = {name: _view(buffer[:, : self.length]) for name, buffer in self._cache.items()}
        return {"length": scalar(self.length), **self.recurrent(), **views}

    def recurrent(self) -> Arrays:
        """Ring and S alone, what `replay` is given."""
        return {name: _view(array) for name, array in self._recurrent.items()}

    def require(self, rows: int) -> None:
        """Raises ContextFull unless `rows` more rows fit."""
        if self.length + rows > self.context:
            raise ContextFull(needed=self.length + rows, context=self.context)

    def advance(self, rows: int, new: Arrays) -> None:
        """Takes the outputs of a commit, or those of a replay and its verify, over `rows` rows.

        Raises ContextFull, and then nothing has changed.
        """
        self.require(rows)
        stop = self.length + rows
        self._grow(stop)
        for name, buffer in self._cache.items():
            buffer[:, self.length : stop] = new[f"{name}.new"][:, :rows]
        for name in self._recurrent:
            self._recurrent[name] = new[f"{name}.new"]
        self.length = stop

    def fork(self) -> State:
        """An independent copy; later commits to either leave the other alone."""
        twin = State.__new__(State)
        twin.sizes, twin.context, twin.length = self.sizes, self.context, self.length
        # Recurrent arrays are replaced, never written to, so they can be shared.
        twin._recurrent = dict(self._recurrent)
        twin._cache = {name: _copy(buffer, self.length) for name, buffer in self._cache.items()}
        return twin

    def _grow(self, rows: int) -> None:
        for name, buffer in self._cache.items():
            if buffer.shape[1] < rows:
                more = min(self.context, max(rows, 2 * buffer.shape[1]))
                wide = np.zeros((1, more, *buffer.shape[2:]), np.float32)
                wide[:, : self.length] = buffer[:, : self.length]
                self._cache[name] = wide


def _view(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view


def _copy(buffer: Array, rows: int) -> Array:
    twin = np.zeros_like(buffer)
    twin[:, :rows] = buffer[:, :rows]
    return twin
