"""clover::block_attention as an ONNX function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clover_compile.kernels.onnx_text import (
    OnnxFunction,
    Shape,
    build,
    fixed,
    integer,
    ints,
    number,
)

_PARAMETERS = (
    "query_gate", "k", "v", "k_prefix", "v_prefix", "length", "cos", "sin", "q_norm", "k_norm",
)  # fmt: skip

_HIDDEN = 2**40
"""A column index no row reaches."""


def _project(heads: int, heads_kv: int, dim: int, rotary: int, eps: float) -> str:
    """Normed and rotated q [B, T, H * D] and new_k [B, T, KV, D], new_v, gate."""
    rotate = f"rotary_embedding_dim = {rotary}, interleaved = 0"
    return f"""
        flat = {ints(0, 0, -1)}
        query_shape = {ints(0, 0, heads, 2 * dim)}
        query_heads = Reshape(query_gate, query_shape)
        query_sizes = {ints(dim, dim)}
        q_heads, gate_heads = Split <axis = 3> (query_heads, query_sizes)
        q_normed = RMSNormalization <axis = -1, epsilon = {eps!r}> (q_heads, q_norm)
        q_flat = Reshape(q_normed, flat)
        q = RotaryEmbedding <num_heads = {heads}, {rotate}> (q_flat, cos, sin)
        gate = Reshape(gate_heads, flat)
        kv_shape = {ints(0, 0, heads_kv, dim)}
        k_heads = Reshape(k, kv_shape)
        k_normed = RMSNormalization <axis = -1, epsilon = {eps!r}> (k_heads, k_norm)
        k_flat = Reshape(k_normed, flat)
        k_rotated = RotaryEmbedding <num_heads = {heads_kv}, {rotate}> (k_flat, cos, sin)
        new_k = Reshape(k_rotated, kv_shape)
        new_v = Reshape(v, kv_shape)"""


def _visible(causal: bool) -> str:
    """seen [B, 1, T, R + T]: a column's index (-1: prefix, else its row in the block) against the
    row's."""
    return f"""
        zero = {integer(0)}
        one = {integer(1)}
        rows_all = Shape <start = 1, end = 2> (k)
        rows = Squeeze(rows_all)
        prefix_all = Shape <start = 1, end = 2> (k_prefix)
        prefix = Squeeze(prefix_all)
        row = Range(zero, rows, one)
        slot = Range(zero, prefix, one)
        column_axis = {ints(1)}
        valid_rows = Cast <to = 7> (length)
        valid_column = Unsqueeze(valid_rows, column_axis)
        valid = Less(slot, valid_column)
        always = {integer(-1)}
        never = {integer(_HIDDEN)}
        slot_index = Where(valid, always, never)
        batch = Shape <start = 0, end = 1> (k)
        block_shape = Concat <axis = 0> (batch, rows_all)
        block_index = Expand(row, block_shape)
        index_flat = Concat <axis = 1> (slot_index, block_index)
        index_axes = {ints(1, 2)}
        index = Unsqueeze(index_flat, index_axes)
        row_column = Unsqueeze(row, column_axis)
        row_least = {integer(0 if causal else _HIDDEN - 1)}
        row_limit = Max(row_column, row_least)
        seen = LessOrEqual(index, row_limit)"""


def _cache() -> str:
    """keys, values [B, R + T, KV, D]; prefix rows that do not count are cleared first, as a masked
    score does not hide a NaN. The caller usually passes none: then nothing is copied twice."""
    kv = "float[batch, columns, heads, width]"
    return f"""
        fewest = ReduceMin <keepdims = 0> (valid_rows)
        partly = Less(fewest, prefix)
        keys, values = If (partly) <
            then_branch = cleared () => ({kv} keys_clean, {kv} values_clean) {{
                row_axes = {ints(2, 3)}
                row_valid = Unsqueeze(valid, row_axes)
                nothing = {number(0)}
                k_clear = Where(row_valid, k_prefix, nothing)
                v_clear = Where(row_valid, v_prefix, nothing)
                keys_clean = Concat <axis = 1> (k_clear, new_k)
                values_clean = Concat <axis = 1> (v_clear, new_v)
            }},
            else_branch = whole () => ({kv} keys_whole, {kv} values_whole) {{
                keys_whole = Concat <axis = 1> (k_prefix, new_k)
                values_whole = Concat <axis = 1> (v_prefix, new_v)
            }}
        >"""


def function(inputs: Mapping[str, Shape], constants: Mapping[str, Any]) -> OnnxFunction:
    """CausalAttention or BlockAttention."""
    heads_kv, dim, width, half = fixed(
        *inputs["k_prefix"][2:], inputs["query_gate"][2], inputs["cos"][2]
    )
    heads = width // (2 * dim)
    body = f"""
        {_project(heads, heads_kv, dim, 2 * half, constants["eps"])}
        {_visible(constants["causal"])}
        {_cache()}
        keys_flat = Reshape(keys, flat)
        values_flat = Reshape(values, flat)
        mixed = Attention <q_num_heads = {heads}, kv_num_heads = {heads_kv}, scale = {dim**-0.5!r}>
            (q, keys_flat, values_flat, seen)
        open = Sigmoid(gate)
        y = Mul(mixed, open)"""
    name = "CausalAttention" if constants["causal"] else "BlockAttention"
    outputs = ("y", "new_k", "new_v")
    return build(name, _PARAMETERS, outputs, body, returns=(0, 1, 2), kernels=("Attention",))
