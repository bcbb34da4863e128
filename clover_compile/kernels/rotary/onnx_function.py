"""The rotary angles as an ONNX function."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from clover_compile.kernels.onnx_text import OnnxFunction, Shape, build, integer, ints


def function(inputs: Mapping[str, Shape], constants: Mapping[str, Any]) -> OnnxFunction:
    """Rotary: fp64 until the angle is reduced."""
    body = f"""
        zero = {integer(0)}
        one = {integer(1)}
        rows_all = Shape <start = 1, end = 2> (ids)
        rows = Squeeze(rows_all)
        row = Range(zero, rows, one)
        column = {ints(1)}
        start = Cast <to = 7> (length)
        start_column = Unsqueeze(start, column)
        position = Add(start_column, row)
        position_wide = Cast <to = 11> (position)
        last = {ints(2)}
        position_cell = Unsqueeze(position_wide, last)
        turn = Mul(position_cell, turns)
        whole = Floor(turn)
        fraction = Sub(turn, whole)
        circle = Constant <value = double {{{2 * math.pi!r}}}> ()
        angle_wide = Mul(fraction, circle)
        angle = Cast <to = 1> (angle_wide)
        cos = Cos(angle)
        sin = Sin(angle)"""
    return build(
        "Rotary", ("ids", "length", "turns"), ("cos", "sin"), body, returns=(0, 1),
        kernels=("Cos", "Sin"),
    )  # fmt: skip
