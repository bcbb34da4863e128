"""clover::pick as an ONNX function."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from clover_compile.kernels.onnx_text import (
    LOWEST,
    OnnxFunction,
    Shape,
    build,
    fixed,
    integer,
    ints,
    number,
)
from clover_compile.kernels.pick.onnx_draw import draw
from clover_compile.kernels.pick.reference import SCALARS

_PARAMETERS = (
    "logits", "counts", "row0", "close_open", "scalars", "draft", "running", "noise", "allow",
)  # fmt: skip

_REASON = "standard operators; ONNX Runtime has no kernel for response processing"


def _rows() -> str:
    """earlier [B, n, n]: whether row j counts draft i; position [B, n, 1] fp32."""
    settings = ", ".join(SCALARS)
    return f"""
        zero = {integer(0)}
        one = {integer(1)}
        nothing = {number(0)}
        unity = {number(1)}
        column_axis = {ints(1)}
        last_axis = {ints(-1)}
        {settings} = Split <axis = 0, num_outputs = {len(SCALARS)}> (scalars)
        rows_all = Shape <start = 1, end = 2> (logits)
        rows = Squeeze(rows_all)
        row = Range(zero, rows, one)
        row_column = Unsqueeze(row, column_axis)
        behind = Less(row, row_column)
        drafted = GreaterOrEqual(draft, zero)
        drafted_row = Unsqueeze(drafted, column_axis)
        counted = And(behind, running)
        earlier_bool = And(counted, drafted_row)
        earlier = Cast <to = 1> (earlier_bool)
        first_row = Cast <to = 7> (row0)
        first_column = Unsqueeze(first_row, column_axis)
        position_whole = Add(first_column, row)
        position_flat = Cast <to = 1> (position_whole)
        position = Unsqueeze(position_flat, last_axis)"""


def _ids(always: list[int]) -> str:
    """touched [M]: every id whose logit may change (an id may stand there twice)."""
    return f"""
        presence_off = Equal(presence, nothing)
        frequency_off = Equal(frequency, nothing)
        repetition_off = Equal(repetition, unity)
        additive_off = And(presence_off, frequency_off)
        penalties_off = And(additive_off, repetition_off)
        seen = If (penalties_off) <
            then_branch = no_penalties () => (int64[m] seen_none) {{
                seen_none = Constant <value = int64[0] {{}}> ()
            }},
            else_branch = penalties () => (int64[m] seen_ids) {{
                batch_axis = {ints(0)}
                counts_most = ReduceMax <keepdims = 0> (counts, batch_axis)
                counts_some = Cast <to = 9> (counts_most)
                seen_rows = NonZero(counts_some)
                seen_ids = Squeeze(seen_rows, batch_axis)
            }}
        >
        draft_safe = Max(draft, zero)
        draft_flat = Reshape(draft_safe, last_axis)
        fixed = {ints(*always)}
        touched = Concat <axis = 0> (seen, draft_flat, fixed)"""


def _penalties(source: str) -> str:
    """touched_logits and penalised [B, n, M]; neutral settings change no bit."""
    return f"""
        touched_logits = Gather <axis = 2> ({source}, touched)
        counts_whole = Gather <axis = 1> (counts, touched)
        counts_flat = Cast <to = 1> (counts_whole)
        counts_before = Unsqueeze(counts_flat, column_axis)
        draft_column = Unsqueeze(draft, last_axis)
        draft_same = Equal(draft_column, touched)
        draft_number = Cast <to = 1> (draft_same)
        counts_added = MatMul(earlier, draft_number)
        count = Add(counts_before, counts_added)
        produced = Greater(count, nothing)
        by_count = Mul(count, frequency)
        reduction = Add(by_count, presence)
        reduced = Sub(touched_logits, reduction)
        is_negative = Less(reduced, nothing)
        multiplied = Mul(reduced, repetition)
        divided = Div(reduced, repetition)
        repeated = Where(is_negative, multiplied, divided)
        penalised = Where(produced, repeated, touched_logits)"""


def _ramp(name: str, strength: str, start: str, window: str) -> str:
    """{name}_ramp [B, n, 1]."""
    return f"""
        {name}_past = Sub(position, {start})
        {name}_window = Max({window}, unity)
        {name}_part = Div({name}_past, {name}_window)
        {name}_clipped = Clip({name}_part, nothing, unity)
        {name}_ramp = Mul({name}_clipped, {strength})"""


def _stops(stop_ids: list[int]) -> str:
    """stopped: penalised plus the length ramp on stop ids."""
    if not stop_ids:
        return "stopped = Identity(penalised)"
    return f"""
        {_ramp("stop", "length_penalty", "length_penalty_start", "length_penalty_window")}
        stop_ids = {ints(*stop_ids)}
        touched_column = Unsqueeze(touched, column_axis)
        stop_equal = Equal(touched_column, stop_ids)
        stop_number = Cast <to = 1> (stop_equal)
        is_stop = ReduceMax <keepdims = 0> (stop_number, last_axis)
        stop_added = Mul(stop_ramp, is_stop)
        stopped = Add(penalised, stop_added)"""


def _think(think_end_id: int) -> str:
    """ramped: stopped plus the think ramp while the reasoning is open."""
    if think_end_id < 0:
        return "ramped = Identity(stopped)"
    return f"""
        {_ramp("think", "think_end_bias", "think_end_start", "think_end_window")}
        think_id = {integer(think_end_id)}
        draft_ends = Equal(draft_column, think_id)
        draft_ends_number = Cast <to = 1> (draft_ends)
        ended = MatMul(earlier, draft_ends_number)
        not_ended = LessOrEqual(ended, nothing)
        close_axes = {ints(1, 2)}
        close_column = Unsqueeze(close_open, close_axes)
        closing = And(not_ended, close_column)
        closing_number = Cast <to = 1> (closing)
        think_open = Mul(think_ramp, closing_number)
        is_think = Equal(touched, think_id)
        think_number = Cast <to = 1> (is_think)
        think_added = Mul(think_open, think_number)
        ramped = Add(stopped, think_added)"""


def _write(source: str, mask_id: int) -> str:
    """x [B, n, V]: the processed logits; forbidden ones hold LOWEST, a NaN stays."""
    return f"""
        mask_id = {integer(mask_id)}
        is_mask = Equal(touched, mask_id)
        lowest = {number(LOWEST)}
        is_lowest = LessOrEqual(touched_logits, lowest)
        is_barred = Or(is_mask, is_lowest)
        is_nan = IsNaN(touched_logits)
        is_number = Not(is_nan)
        barred = And(is_barred, is_number)
        processed = Where(barred, lowest, ramped)
        processed_shape = Shape(processed)
        touched_all = Expand(touched, processed_shape)
        x = ScatterElements <axis = 2> ({source}, touched_all, processed)"""


def _chunk(vocab: int) -> int:
    """The divisor of the vocabulary nearest its root, 1 if there is none worth it."""
    root = math.isqrt(vocab)
    near = [d for d in range(max(root // 8, 16), root + 1) if vocab % d == 0]
    return near[-1] if near else 1


def _best(vocab: int) -> str:
    """best [B, n], the first maximum. An arg-max of maxima of chunks is six times faster here than
    one over the vocabulary."""
    chunk = _chunk(vocab)
    if chunk == 1:
        return "best = ArgMax <axis = -1, keepdims = 0> (x)"
    return f"""
        chunk_shape = {ints(0, 0, vocab // chunk, chunk)}
        chunks = Reshape(x, chunk_shape)
        chunk_best = ReduceMax <keepdims = 0> (chunks, last_axis)
        chunk_index = ArgMax <axis = -1, keepdims = 1> (chunk_best)
        chunk_rows = GatherND <batch_dims = 2> (chunks, chunk_index)
        chunk_place = ArgMax <axis = -1, keepdims = 0> (chunk_rows)
        chunk_start = Squeeze(chunk_index, last_axis)
        chunk_size = {integer(chunk)}
        chunk_offset = Mul(chunk_start, chunk_size)
        best = Add(chunk_offset, chunk_place)"""


def _probability(index: str, out: str) -> str:
    return f"""
        {out}_index = Unsqueeze({index}, last_axis)
        {out}_column = GatherElements <axis = -1> (p, {out}_index)
        {out} = Squeeze({out}_column, last_axis)"""


def _entropy(vocab: int) -> str:
    """entropy = max - log p(max) - sum p x, by a product per part of a row: p and x are read once.

    One fp32 sum over a large vocabulary loses digits: sums run by parts, and p is divided by its
    own sum, as the softmax before lost some too. An infinite x times a p of 0 shows as NaN in the
    result, which costs less than looking for one in x.
    """
    part = vocab // next(d for d in range(64, 0, -1) if vocab % d == 0)
    product = "com.microsoft.FusedMatMul <transB = 1>"
    return f"""
        {_probability("best", "best_p")}
        best_x_column = GatherElements <axis = -1> (x, best_p_index)
        best_x = Squeeze(best_x_column, last_axis)
        parts_shape = {ints(-1, 1, part)}
        p_parts = Reshape(p, parts_shape)
        x_parts = Reshape(x, parts_shape)
        mean_finite = {product} (p_parts, x_parts)
        mean_nan = IsNaN(mean_finite)
        mean_nan_number = Cast <to = 6> (mean_nan)
        some_nan = ReduceMax <keepdims = 0> (mean_nan_number)
        has_infinity = Cast <to = 9> (some_nan)
        mean_parts = If (has_infinity) <
            then_branch = with_infinity () => (float[a, b, c] mean_clipped) {{
                x_clipped = Max(x, lowest)
                clipped_parts = Reshape(x_clipped, parts_shape)
                mean_clipped = {product} (p_parts, clipped_parts)
            }},
            else_branch = finite () => (float[a, b, c] mean_same) {{
                mean_same = Identity(mean_finite)
            }}
        >
        p_part_sums = ReduceSum <keepdims = 0> (p_parts, last_axis)
        rows_shape = Shape(draft)
        parts_column = {ints(vocab // part)}
        by_part_shape = Concat <axis = 0> (rows_shape, parts_column)
        p_by_part = Reshape(p_part_sums, by_part_shape)
        p_sum = ReduceSum <keepdims = 0> (p_by_part, last_axis)
        mean_by_part = Reshape(mean_parts, by_part_shape)
        mean_raw = ReduceSum <keepdims = 0> (mean_by_part, last_axis)
        mean = Div(mean_raw, p_sum)
        best_share = Div(best_p, p_sum)
        best_log = Log(best_share)
        above = Sub(best_x, mean)
        entropy_any = Sub(above, best_log)
        entropy = Max(entropy_any, nothing)"""


def function(inputs: Mapping[str, Shape], constants: Mapping[str, Any]) -> OnnxFunction:
    """Pick. Only few ids' logits ever change: they are gathered, processed and written back."""
    (vocab,) = fixed(inputs["logits"][2])
    stop_ids, think_end_id = constants["stop_ids"], constants["think_end_id"]
    mask_id = constants["mask_id"]
    always = sorted({mask_id, *stop_ids} | ({think_end_id} if think_end_id >= 0 else set()))
    source, allowed = "logits", ""
    if "allow" in inputs:
        source = "allowed"
        allowed = f"""
            bar = {number(LOWEST)}
            logits_nan = IsNaN(logits)
            allow_some = Or(allow, logits_nan)
            allowed = Where(allow_some, logits, bar)"""
    body = f"""
        {allowed}
        {_rows()}
        {_ids(always)}
        {_penalties(source)}
        {_stops(stop_ids)}
        {_think(think_end_id)}
        {_write(source, mask_id)}
        {_best(vocab)}
        {draw(vocab)}
        p = Softmax <axis = -1> (x)
        {_probability("ids", "confidence")}
        {_probability("draft_safe", "draft_p")}
        drafted_number = Cast <to = 1> (drafted)
        p_draft = Mul(draft_p, drafted_number)
        {_entropy(vocab)}"""
    names = tuple(name for name in _PARAMETERS if name in inputs)
    outputs = ("ids", "confidence", "p_draft", "entropy")
    return build(
        "Pick", names, outputs, body,
        returns=(0, 1, 2, 3), kernels=("Softmax", "ScatterElements"), reason=_REASON,
    )  # fmt: skip
