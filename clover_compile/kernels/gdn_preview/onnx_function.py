"""clover::gdn_preview as an ONNX function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clover_compile.kernels.gdn_preview.reference import CALIBRATION_ROWS
from clover_compile.kernels.gdn_scan.onnx_parts import convolution, gated_norm, unit_heads
from clover_compile.kernels.onnx_text import OnnxFunction, Shape, build, fixed, ints, number

_PARAMETERS = (
    "u", "z", "a", "ring", "state", "taps", "decay", "dt_bias",
    "logit_scale", "history_bias", "history_c", "norm",
)  # fmt: skip

_REASON = "ONNX Runtime has no attention kernel with a history slot whose value differs by row"


def _window(width: int) -> str:
    """full = [ring | block | zeros]: taps past the block's end contribute nothing."""
    return f"""
        window_axis = {ints(1)}
        window_pads = {ints(0, width // 2)}
        window_zero = {number(0)}
        block = Pad(u, window_pads, window_zero, window_axis)
        full = Concat <axis = 1> (ring, block)"""


def _heads(key_heads: int, heads: int, dk: int, dv: int) -> str:
    """Head-major q, k [B, HK, 1, T, D], v [B, HK, R, T, DV] and the state grouped alike."""
    repeat = heads // key_heads
    return f"""
        one_axis = {ints(2)}
        q_major = Transpose <perm = [0, 2, 1, 3]> (q)
        q_group = Unsqueeze(q_major, one_axis)
        k_columns = Transpose <perm = [0, 2, 3, 1]> (k)
        k_group = Unsqueeze(k_columns, one_axis)
        v_shape = {ints(0, 0, key_heads, repeat, dv)}
        v_heads = Reshape(v, v_shape)
        v_group = Transpose <perm = [0, 2, 3, 1, 4]> (v_heads)
        state_shape = {ints(0, key_heads, repeat, dk, dv)}
        state_group = Reshape(state, state_shape)
        head_shape = {ints(key_heads, repeat, 1, 1)}"""


def _history(key_heads: int, heads: int, dk: int) -> str:
    """The slot's logit [B, HK, R, T, 1] and value, the state's read-out under the row's gate."""
    return f"""
        rows = Shape <start = 1, end = 2> (u)
        rows_float = Cast <to = 1> (rows)
        calibration = {number(CALIBRATION_ROWS)}
        rows_ratio = Div(rows_float, calibration)
        rows_log = Log(rows_ratio)
        slot_change = Mul(history_c, rows_log)
        slot_flat = Add(history_bias, slot_change)
        slot_heads = Reshape(slot_flat, head_shape)
        a_biased = Add(a, dt_bias)
        step = Softplus(a_biased)
        gate = Mul(step, decay)
        kept_rows = Exp(gate)
        kept_major = Transpose <perm = [0, 2, 1]> (kept_rows)
        kept_shape = {ints(0, key_heads, heads // key_heads, -1, 1)}
        kept = Reshape(kept_major, kept_shape)
        root = {number(dk**-0.5)}
        kept_scaled = Mul(kept, root)
        read = MatMul(q_group, state_group)
        history = Mul(read, kept_scaled)
        slot_shape = Shape(kept)
        slot = Expand(slot_heads, slot_shape)"""


def function(inputs: Mapping[str, Shape], constants: Mapping[str, Any]) -> OnnxFunction:
    """GdnPreview."""
    heads, dk, dv, width = fixed(*inputs["state"][1:], inputs["taps"][1])
    key_heads = constants["key_heads"]
    body = f"""
        {_window(width)}
        {convolution("full", "taps", width, "mixed")}
        {unit_heads("mixed", key_heads, heads, dk, dv)}
        {_heads(key_heads, heads, dk, dv)}
        {_history(key_heads, heads, dk)}
        alike = MatMul(q_group, k_group)
        scale_heads = Reshape(logit_scale, head_shape)
        scores = Mul(alike, scale_heads)
        slots = Concat <axis = -1> (slot, scores)
        p = Softmax <axis = -1> (slots)
        p_sizes = Concat <axis = 0> (one, rows)
        p_slot, p_block = Split <axis = -1> (p, p_sizes)
        from_block = MatMul(p_block, v_group)
        from_history = Mul(p_slot, history)
        o_group = Add(from_block, from_history)
        o_major = Transpose <perm = [0, 3, 1, 2, 4]> (o_group)
        {gated_norm("o_major", heads, dv, constants["eps"])}"""
    body = f"one = {ints(1)}\n{body}"
    return build(
        "GdnPreview", _PARAMETERS, ("y",), body,
        returns=(0,), kernels=("MatMul", "Softmax"), reason=_REASON,
    )  # fmt: skip
