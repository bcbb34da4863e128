"""The one protocol everything in the runner is written against, and a clock around it.

Units and their arrays (B = 1; i is a layer number, numpy names):

    commit   ids i64[B,T] length i32[B] keep i32[] ring.i S.i k.i v.i
             -> logits f32[B,keep,V] ring.i.new S.i.new k.i.new v.i.new
    verify   ids length ring.i S.i k.i v.i -> logits f32[B,T,V] k.i.new v.i.new tape.i
    replay   ring.i S.i tape.i rows i32[B] -> ring.i.new S.i.new
    preview  ids i64[B,n] length ring.i S.i k.i v.i -> logits f32[B,n,V]
    pick     logits counts i32[B,V] row0 i32[B] close_open bool[B] scalars f32[12] draft i64[B,n]
             running bool[] noise f32[B,n] -> ids i64 confidence p_draft entropy f32, each [B,n]

    ring f32[B,K-1,C]  S f32[B,HV,DK,DV]  k, v f32[B,R,KV,D]  tape f32[B,T,C+2HV]

A Unit without layers of a kind has no such arrays.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Arrays = dict[str, Array]


class Engine(Protocol):
    """Runs a bundle's Units."""

    def run(self, unit: str, feeds: Arrays, outputs: Sequence[str] | None = None) -> Arrays:
        """Runs one Unit; returns the outputs asked for, all when None.

        Feeds may be read-only and are never changed. What is returned turns into numpy arrays and
        holds until the same Unit runs again: copy what must stay longer.
        """
        ...


class Sizes(Protocol):
    """What the runner must know of a model; ModelConfig and a bundle's sizes both fit."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def layer_types(self) -> tuple[str, ...]: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def linear_conv_kernel_dim(self) -> int: ...
    @property
    def linear_num_value_heads(self) -> int: ...
    @property
    def linear_key_head_dim(self) -> int: ...
    @property
    def linear_value_head_dim(self) -> int: ...
    @property
    def conv_dim(self) -> int: ...
    @property
    def gdn_layers(self) -> tuple[int, ...]: ...
    @property
    def attention_layers(self) -> tuple[int, ...]: ...


class Clock:
    """An engine that adds up the seconds and calls of each Unit."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def run(self, unit: str, feeds: Arrays, outputs: Sequence[str] | None = None) -> Arrays:
        """Runs one Unit of the engine behind the clock."""
        start = time.perf_counter()
        try:
            return self.engine.run(unit, feeds, outputs)
        finally:
            took = time.perf_counter() - start
            self.seconds[unit] = self.seconds.get(unit, 0.0) + took
            self.calls[unit] = self.calls.get(unit, 0) + 1


def scalar(value: int) -> Array:
    """An i32 [1] array."""
    return np.array([value], np.int32)
