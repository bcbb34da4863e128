"""clover::gdn_scan as an ONNX function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clover_compile.kernels.gdn_scan.onnx_parts import (
    convolution,
    delta_rule,
    gated_norm,
    unit_heads,
)
from clover_compile.kernels.onnx_text import OnnxFunction, Shape, build, fixed, ints, number

_PARAMETERS = ("u", "z", "b", "a", "ring", "state", "conv", "decay", "dt_bias", "norm", "rows")

_KERNELS = ("com.microsoft:LinearAttention",)


def _ring(taps: int, replay: bool) -> str:
    """The rows before the next call: the last ones, or those before row `rows`."""
    if not replay:
        return f"""
            ring_from = {ints(1 - taps)}
            ring_to = {ints(2**62)}
            ring_axis = {ints(1)}
            new_ring = Slice(full, ring_from, ring_to, ring_axis)"""
    steps = ", ".join(map(str, range(taps - 1)))
    return f"""
        ring_axis = {ints(1)}
        ring_steps = Constant <value = int64[1, {taps - 1}] {{{steps}}}> ()
        kept = Cast <to = 7> (rows)
        kept_column = Unsqueeze(kept, ring_axis)
        ring_rows = Add(kept_column, ring_steps)
        ring_last = {ints(2)}
        ring_index = Unsqueeze(ring_rows, ring_last)
        new_ring = GatherND <batch_dims = 1> (full, ring_index)"""


def _gates(replay: bool) -> str:
    """Log-decay and beta; rows of a replay that do not count get exactly 0 for both."""
    body = """
        a_biased = Add(a, dt_bias)
        step = Softplus(a_biased)
        g = Mul(step, decay)
        beta = Sigmoid(b)"""
    if not replay:
        return body.replace("g =", "gate =").replace("beta =", "rate =")
    return f"""{body}
        length = Shape <start = 1, end = 2> (u)
        length_scalar = Squeeze(length)
        first = Constant <value_int = 0> ()
        one = Constant <value_int = 1> ()
        row = Range(first, length_scalar, one)
        late_flat = GreaterOrEqual(row, kept_column)
        late_axis = {ints(2)}
        late = Unsqueeze(late_flat, late_axis)
        zero = {number(0)}
        gate = Where(late, zero, g)
        rate = Where(late, zero, beta)"""


def function(inputs: Mapping[str, Shape], constants: Mapping[str, Any]) -> OnnxFunction:
    """GdnScan, or GdnReplay where there is no z: it then returns ring and state only."""
    heads, dk, dv, taps = fixed(*inputs["state"][1:], inputs["conv"][1])
    key_heads, replay = constants["key_heads"], "rows" in inputs
    body = f"""
        full = Concat <axis = 1> (ring, u)
        {_ring(taps, replay)}
        {convolution("full", "conv", taps, "mixed")}
        {unit_heads("mixed", key_heads, heads, dk, dv)}
        {_gates(replay)}
        flat = {ints(0, 0, -1)}
        {delta_rule(key_heads, heads, dk, dk**-0.5, "v", "gate", "rate")}"""
    names = tuple(name for name in _PARAMETERS if name in inputs)
    if "z" not in inputs:
        unused = tuple(name for name in names if name != "norm")
        outputs = ("new_ring", "new_state")
        return build("GdnReplay", unused, outputs, body, returns=(1, 2), kernels=_KERNELS)
    body += gated_norm("o", heads, dv, constants["eps"])
    everything = ("y", "new_ring", "new_state")
    return build("GdnScan", names, everything, body, returns=(0, 1, 2), kernels=_KERNELS)


def primitive(inputs: Mapping[str, Shape], constants: Mapping[str, Any]) -> OnnxFunction:
    """DeltaRule: clover::delta_rule alone, as an unfused graph holds it."""
    key_heads, dk, heads, dv = fixed(*inputs["q"][2:], *inputs["v"][2:])
    body = f"""
        v_flat = Reshape(v, flat)
        {delta_rule(key_heads, heads, dk, 1.0, "v_flat", "g", "beta")}
        o_shape = {ints(0, 0, heads, dv)}
        o_heads = Reshape(o, o_shape)"""
    body = f"flat = {ints(0, 0, -1)}\n{body}"
    names = ("q", "k", "v", "g", "beta", "state")
    return build(
        "DeltaRule", names, ("o_heads", "new_state"), body, returns=(0, 1), kernels=_KERNELS
    )
