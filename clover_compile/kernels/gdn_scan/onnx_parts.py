"""Pieces of ONNX text that the Gated DeltaNet functions share."""

from __future__ import annotations

from clover_compile.kernels.onnx_text import floats, ints


def convolution(source: str, weight: str, taps: int, out: str) -> str:
    """out [B, T, C] = silu of the depthwise convolution of source [B, T + taps - 1, C] with
    weight [C, taps]: shifted products, several times faster than a convolution kernel here."""
    lines = [f"conv_axis = {ints(1)}"]
    for j in range(taps):
        end = j - taps + 1 if j < taps - 1 else 2**62
        lines += [
            f"tap{j}_from = {ints(j)}",
            f"tap{j}_to = {ints(end)}",
            f"tap{j}_rows = Slice({source}, tap{j}_from, tap{j}_to, conv_axis)",
            f"tap{j}_index = Constant <value_int = {j}> ()",
            f"tap{j}_weight = Gather <axis = 1> ({weight}, tap{j}_index)",
            f"tap{j} = Mul(tap{j}_rows, tap{j}_weight)",
        ]
    terms = ", ".join(f"tap{j}" for j in range(taps))
    lines += [
        f"conv_sum = Sum({terms})",
        f"{out} = com.microsoft.QuickGelu <alpha = 1.0> (conv_sum)",
    ]
    return "\n".join(lines)


def unit_heads(source: str, key_heads: int, heads: int, dk: int, dv: int) -> str:
    """q, k [B, T, HK, DK] of unit length and v [B, T, HV * DV] from convolved rows [B, T, C].

    x / sqrt(sum x^2 + 1e-6) is an RMS norm with that epsilon over DK and weights DK^-1/2.
    """
    key_dim = key_heads * dk
    return f"""
        qk_sizes = {ints(2 * key_dim, heads * dv)}
        qk_flat, v = Split <axis = 2> ({source}, qk_sizes)
        qk_shape = {ints(0, 0, 2 * key_heads, dk)}
        qk_heads = Reshape(qk_flat, qk_shape)
        qk_scale = {floats(*[dk**-0.5] * dk)}
        qk_unit = RMSNormalization <axis = -1, epsilon = {1e-6 / dk!r}> (qk_heads, qk_scale)
        head_sizes = {ints(key_heads, key_heads)}
        q, k = Split <axis = 2> (qk_unit, head_sizes)"""


def delta_rule(
    key_heads: int, heads: int, dk: int, scale: float, v: str, gate: str, rate: str
) -> str:
    """o [B, T, HV * DV] and new_state from q, k [B, T, HK, DK], v [B, T, HV * DV], log-decay and
    beta [B, T, HV] and the state; q is multiplied by `scale`. Uses `flat`, the shape (0, 0, -1)."""
    expand = "k_all = Identity(k)"
    if heads > key_heads:
        expand = f"""
            k_axis = {ints(3)}
            k_column = Unsqueeze(k, k_axis)
            k_copies = {ints(1, 1, 1, heads // key_heads, 1)}
            k_all = Expand(k_column, k_copies)"""
    return f"""
        q_flat = Reshape(q, flat)
        {expand}
        k_flat = Reshape(k_all, flat)
        o, new_state = com.microsoft.LinearAttention <update_rule = "gated_delta",
            q_num_heads = {key_heads}, kv_num_heads = {heads}, scale = {scale!r}>
            (q_flat, k_flat, {v}, state, {gate}, {rate})"""


def gated_norm(source: str, heads: int, dv: int, eps: float) -> str:
    """y [B, T, HV * DV] = RMS norm of source per head times norm times silu(z)."""
    return f"""
        o_shape = {ints(0, 0, heads, dv)}
        o_heads = Reshape({source}, o_shape)
        o_normed = RMSNormalization <axis = -1, epsilon = {eps!r}> (o_heads, norm)
        y_shape = {ints(0, 0, heads * dv)}
        o_rows = Reshape(o_normed, y_shape)
        z_gate = com.microsoft.QuickGelu <alpha = 1.0> (z)
        y = Mul(o_rows, z_gate)"""
