"""clover::moe as an ONNX function."""

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
    "x", "router", "shared_gate", "gate_up", "down", "shared_gate_up", "shared_down",
)  # fmt: skip

FLOAT = 1
"""ONNX's number of fp32."""

_UNROUTED = -1e30
"""Logit of an expert a row does not use; its exponential is 0."""

INTERLEAVED, COLUMNS = "interleaved", "columns"
"""Layout of gate_up [E, 2I, H]: row 2i is gate row i, row 2i + 1 is up row i.

`interleaved/P` [P * E, 2I / P, H] and `columns/P`, of down [E, H, I], [P * E, H, I / P]: every
expert in P parts, its p-th at p * E + e.
"""

PARTS, LEAST = 4, 64
"""The engine gives each thread a run of experts, so the few that one row uses fall unevenly: of 8,
two threads get 5 and 3. Experts are cut into as many parts as leave this much of I, at most PARTS;
then as many threads as there are parts, or half as many, have the same to do."""

_KERNELS = ("com.microsoft:MoE",)


def _whole(experts: int) -> str:
    """Without a coreset every expert competes."""
    return f"""
        inside = Identity(router)
        batch = Shape <start = 0, end = 1> (x)
        every = Constant <value = int32[1] {{{experts}}}> ()
        kept = Expand(every, batch)"""


def _coreset(experts: int, top_k: int, top_p: float) -> str:
    """inside: router, or _UNROUTED for experts outside the block's coreset; kept: its size.

    The running mass is summed in double, as the reference does.
    """
    return f"""
        p = Softmax <axis = -1> (router)
        best_k = {ints(top_k)}
        best_p, best = TopK <axis = -1> (p, best_k)
        nothing = {number(0)}
        p_shape = Shape(p)
        p_none = Expand(nothing, p_shape)
        member = ScatterElements <axis = -1> (p_none, best, best_p)
        row_axis = {ints(1)}
        total = ReduceSum <keepdims = 0> (member, row_axis)
        all_experts = {ints(experts)}
        total_sorted, order = TopK <axis = -1> (total, all_experts)
        last_axis = {ints(-1)}
        total_sum = ReduceSum <keepdims = 1> (total_sorted, last_axis)
        least = {number(1e-9)}
        total_safe = Max(total_sum, least)
        mass = Div(total_sorted, total_safe)
        mass_double = Cast <to = 11> (mass)
        last = {integer(-1)}
        mass_running = CumSum(mass_double, last)
        mass_upto = Cast <to = 1> (mass_running)
        before = Sub(mass_upto, mass)
        limit = {number(top_p)}
        below = Less(before, limit)
        place = Constant <value_ints = [{", ".join(["1"] + ["0"] * (experts - 1))}]> ()
        first = Cast <to = 9> (place)
        held = Or(below, first)
        held_number = Cast <to = 1> (held)
        total_none = Mul(total, nothing)
        held_by_id = ScatterElements <axis = -1> (total_none, order, held_number)
        keep = Cast <to = 9> (held_by_id)
        keep_rows = Unsqueeze(keep, row_axis)
        outside = {number(_UNROUTED)}
        inside = Where(keep_rows, router, outside)
        keep_count = Cast <to = 6> (keep)
        kept = ReduceSum <keepdims = 0> (keep_count, last_axis)"""


def _route(experts: int, top_k: int, element: int) -> str:
    """logits [N, E] whose softmax over the top-k is the row's weights; ties are decided here."""
    made = "logits" if element == FLOAT else "logits_wide"
    return f"""
        k = {ints(top_k)}
        chosen_logit, chosen = TopK <axis = -1> (inside, k)
        unrouted = {number(_UNROUTED)}
        logits_none = Min(router, unrouted)
        logits_rows = ScatterElements <axis = -1> (logits_none, chosen, chosen_logit)
        logits_shape = {ints(-1, experts)}
        {made} = Reshape(logits_rows, logits_shape)
        {_cast("logits_wide", "logits", element)}"""


def _cast(source: str, target: str, element: int) -> str:
    """Router and gate stay fp32; what meets rows of another type is cast to it."""
    return "" if element == FLOAT else f"{target} = Cast <to = {element}> ({source})"


def _experts(top_k: int, parts: int) -> str:
    if parts == 1:
        return _moe("routed", "logits", top_k)
    # Of a row's weight every part gets an equal share: the sum is too small by `parts`, a power
    # of two, so nothing is rounded.
    return f"""
        logits_parts = Concat <axis = 1> ({", ".join(["logits"] * parts)})
        {_moe("routed_share", "logits_parts", top_k * parts)}
        parts = {number(parts)}
        routed = Mul(routed_share, parts)"""


def _moe(out: str, logits: str, top_k: int) -> str:
    return f"""
        {out} = com.microsoft.MoE <activation_type = "swiglu", swiglu_fusion = 1, k = {top_k},
            activation_alpha = 1.0, activation_beta = 0.0, normalize_routing_weights = 1>
            (x, {logits}, gate_up, , down)"""


def _shared(width: int, element: int) -> str:
    opened = "shared_open" if element == FLOAT else "shared_open_wide"
    return f"""
        shared_both = com.microsoft.FusedMatMul <transB = 1> (x, shared_gate_up)
        shared_sizes = {ints(width, width)}
        shared_g, shared_up = Split <axis = -1> (shared_both, shared_sizes)
        shared_act = com.microsoft.QuickGelu <alpha = 1.0> (shared_g)
        shared_mid = Mul(shared_act, shared_up)
        shared_out = com.microsoft.FusedMatMul <transB = 1> (shared_mid, shared_down)
        {opened} = Sigmoid(shared_gate)
        {_cast("shared_open_wide", "shared_open", element)}
        shared = Mul(shared_out, shared_open)"""


def _parts(width: int) -> int:
    """Into how many parts an expert of this width is cut, a power of two."""
    parts = PARTS
    while width % parts or width // parts < LEAST:
        parts //= 2
        if parts <= 1:
            return 1
    return parts


def _layouts(parts: int) -> dict[str, str]:
    if parts == 1:
        return {"gate_up": INTERLEAVED}
    return {"gate_up": f"{INTERLEAVED}/{parts}", "down": f"{COLUMNS}/{parts}"}


def function(
    inputs: Mapping[str, Shape], constants: Mapping[str, Any], element: int = FLOAT
) -> OnnxFunction:
    """Moe, or CoresetMoe where the block's rows share a coreset.

    element: ONNX's number of the type of rows and weights; router and shared_gate are fp32. Only
    where it is fp32, which is the CPU's, are experts cut into parts.
    """
    experts, width = fixed(inputs["gate_up"][0], inputs["shared_down"][1])
    parts = _parts(fixed(inputs["down"][2])[0]) if element == FLOAT else 1
    top_k, block = constants["top_k"], constants["block"]
    inside = _coreset(experts, top_k, constants["top_p"]) if block else _whole(experts)
    body = f"""
        {inside}
        {_route(experts, top_k, element)}
        {_experts(top_k, parts)}
        {_shared(width, element)}
        y = Add(routed, shared)"""
    return build(
        "CoresetMoe" if block else "Moe", _PARAMETERS, ("y", "kept"), body,
        returns=(0, 1), kernels=_KERNELS, layouts=_layouts(parts),
    )  # fmt: skip


def primitive(inputs: Mapping[str, Shape], constants: Mapping[str, Any]) -> OnnxFunction:
    """RoutedExperts: clover::routed_experts alone, as an unfused graph holds it.

    Its weights of a row add up to 1, so their logarithms serve as logits.
    """
    experts, top_k = fixed(inputs["gate_up"][0], inputs["weight"][1])
    parts = _parts(fixed(inputs["down"][2])[0])
    body = f"""
        nothing = {number(0)}
        usable = Greater(weight, nothing)
        weight_log = Log(weight)
        unrouted = {number(_UNROUTED)}
        chosen_logit = Where(usable, weight_log, unrouted)
        rows = Shape <start = 0, end = 1> (x)
        experts = {ints(experts)}
        logits_shape = Concat <axis = 0> (rows, experts)
        logits_none = Expand(unrouted, logits_shape)
        logits = ScatterElements <axis = -1> (logits_none, expert, chosen_logit)
        {_experts(top_k, parts)}"""
    names = ("x", "expert", "weight", "gate_up", "down")
    return build(
        "RoutedExperts", names, ("routed",), body,
        returns=(0,), kernels=_KERNELS, layouts=_layouts(parts),
    )  # fmt: skip
