"""The random draw of clover::pick as ONNX text.

Nearly every draw falls among a row's largest logits, and only their order matters for it. So they
alone are sorted; a row whose draw may lie beyond them is sorted whole, which takes a hundred times
as long over the release's vocabulary.
"""

from __future__ import annotations

from clover_compile.kernels.onnx_text import integer, ints, number

LISTED = 1024
"""Logits of a row that are sorted first."""


def _mass(at: str, count: int) -> str:
    """{at}_edge [.., count], the running mass of sorted probabilities {at}_p inside top-p, and
    {at}_total, its last; the sums run in double, as the reference's do."""
    return f"""
        {at}_axis = {integer(-1)}
        {at}_p_double = Cast <to = 11> ({at}_p)
        {at}_running = CumSum({at}_p_double, {at}_axis)
        {at}_upto = Cast <to = 1> ({at}_running)
        {at}_before = Sub({at}_upto, {at}_p)
        {at}_in_mass = LessOrEqual({at}_before, top_p)
        {at}_mass_p = Where({at}_in_mass, {at}_p, nothing)
        {at}_mass_double = Cast <to = 11> ({at}_mass_p)
        {at}_edge_double = CumSum({at}_mass_double, {at}_axis)
        {at}_edge = Cast <to = 1> ({at}_edge_double)
        {at}_end = {ints(count - 1)}
        {at}_total = Gather <axis = -1> ({at}_edge, {at}_end)"""


def _place(at: str, noise: str, total: str) -> str:
    """{at}_drawn [..]: the id at whose edge the noise is passed."""
    return f"""
        {at}_noise = Unsqueeze({noise}, last_axis)
        {at}_goal = Mul({at}_noise, {total})
        {at}_is_reached = Greater({at}_edge, {at}_goal)
        {at}_reached = Cast <to = 6> ({at}_is_reached)
        {at}_place = ArgMax <axis = -1, keepdims = 1> ({at}_reached)
        {at}_column = GatherElements <axis = -1> ({at}_order, {at}_place)
        {at}_drawn = Squeeze({at}_column, last_axis)"""


def _whole(vocab: int, x: str, noise: str) -> str:
    """whole_drawn [..] from a full sort of x [.., V]."""
    return f"""
        whole_ids = {ints(vocab)}
        whole_value, whole_order = TopK <axis = -1> ({x}, whole_ids)
        whole_cut = Gather <axis = -1> (whole_value, cut_index)
        whole_is_kept = GreaterOrEqual(whole_value, whole_cut)
        whole_kept = Where(whole_is_kept, whole_value, lowest)
        whole_hot = Div(whole_kept, heat)
        whole_p = Softmax <axis = -1> (whole_hot)
        {_mass("whole", vocab)}
        {_place("whole", noise, "whole_total")}"""


def _parts(vocab: int) -> int:
    """Into how many equal parts a row is summed: one fp32 sum over all of it loses digits."""
    return next(d for d in range(64, 0, -1) if vocab % d == 0)


def _list_probabilities(vocab: int) -> str:
    """list_p [B, n, L]; all_mass [B, n, 1], what top-k leaves in all; is_closed [B, n, 1], whether
    the list holds all that. With top-k it does, unless ties at the cut go on past its end."""
    parts = _parts(vocab)
    column = "[a, b, one]"
    return f"""
        list_p, all_mass, is_closed = If (has_top) <
            then_branch = cut_off () =>
                (float[a, b, l] cut_p, float{column} cut_all, bool{column} cut_closed) {{
                list_end_place = {ints(LISTED - 1)}
                list_cut_index = Min(cut_index, list_end_place)
                list_cut = Gather <axis = -1> (list_value, list_cut_index)
                list_is_kept = GreaterOrEqual(list_value, list_cut)
                list_kept = Where(list_is_kept, list_value, lowest)
                list_hot = Div(list_kept, heat)
                cut_p = Softmax <axis = -1> (list_hot)
                list_last_value = Gather <axis = -1> (list_value, list_end_place)
                cut_closed = Less(list_last_value, list_cut)
                cut_all = ReduceSum <keepdims = 1> (cut_p, last_axis)
            }},
            else_branch = no_cut () =>
                (float[a, b, l] open_p, float{column} open_all, bool{column} open_closed) {{
                all_hot = Div(x, heat)
                all_p = Softmax <axis = -1> (all_hot)
                open_p = GatherElements <axis = -1> (all_p, list_order)
                all_shape = {ints(0, 0, parts, vocab // parts)}
                all_parts = Reshape(all_p, all_shape)
                all_sums = ReduceSum <keepdims = 0> (all_parts, last_axis)
                open_all = ReduceSum <keepdims = 1> (all_sums, last_axis)
                open_closed = Less(open_all, nothing)
            }}
        >"""


def _sure() -> str:
    """unsure [m]: rows (of all B n) whose draw the list does not decide.

    It does if nothing beyond it counts; or if everything does and the noise is passed within.
    """
    return """
        no_limit = GreaterOrEqual(top_p, unity)
        is_open = And(no_limit, no_top)
        is_inside = Greater(list_total, list_goal)
        is_open_inside = And(is_open, is_inside)
        is_sure = Or(is_complete, is_open_inside)
        is_unsure = Not(is_sure)
        unsure_flat = Reshape(is_unsure, last_axis)
        unsure_rows = NonZero(unsure_flat)
        unsure = Squeeze(unsure_rows, first_axis)
        unsure_number = Cast <to = 6> (unsure_flat)
        unsure_most = ReduceMax <keepdims = 0> (unsure_number)
        some_unsure = Cast <to = 9> (unsure_most)"""


def _listed(vocab: int) -> str:
    """drawn [B, n] from the list, and rows of which it is not sure from a full sort."""
    return f"""
        list_ids = {ints(LISTED)}
        list_value, list_order = TopK <axis = -1> (x, list_ids)
        {_list_probabilities(vocab)}
        {_mass("list", LISTED)}
        list_last = Gather <axis = -1> (list_in_mass, list_end)
        is_past = Not(list_last)
        no_top = Not(has_top)
        is_past_open = And(is_past, no_top)
        is_complete = Or(is_closed, is_past_open)
        list_mass = Where(is_complete, list_total, all_mass)
        {_place("list", "noise", "list_mass")}
        {_sure()}
        drawn = If (some_unsure) <
            then_branch = beyond () => (int64[a, b] drawn_mended) {{
                x_rows_shape = {ints(-1, vocab)}
                x_rows = Reshape(x, x_rows_shape)
                x_unsure = Gather <axis = 0> (x_rows, unsure)
                noise_flat = Reshape(noise, last_axis)
                noise_unsure = Gather <axis = 0> (noise_flat, unsure)
                {_whole(vocab, "x_unsure", "noise_unsure")}
                list_flat = Reshape(list_drawn, last_axis)
                mended = ScatterElements <axis = 0> (list_flat, unsure, whole_drawn)
                drawn_shape = Shape(list_drawn)
                drawn_mended = Reshape(mended, drawn_shape)
            }},
            else_branch = inside () => (int64[a, b] drawn_listed) {{
                drawn_listed = Identity(list_drawn)
            }}
        >"""


def draw(vocab: int) -> str:
    """ids [B, n]: best, or a draw where the temperature is above 0."""
    if vocab > LISTED:
        body = _listed(vocab)
    else:
        body = _whole(vocab, "x", "noise") + "\ndrawn = Identity(whole_drawn)"
    return f"""
        is_hot = Greater(temperature, nothing)
        ids = If (is_hot) <
            then_branch = hot () => (int64[a, b] drawn) {{
                least_heat = {number(1e-6)}
                heat = Max(temperature, least_heat)
                size = {integer(vocab)}
                first_axis = {ints(0)}
                top_whole = Cast <to = 7> (top_k)
                has_top = Greater(top_whole, zero)
                top_wanted = Where(has_top, top_whole, size)
                top_count = Min(top_wanted, size)
                cut_index = Sub(top_count, one)
                {body}
            }},
            else_branch = cold () => (int64[a, b] same_best) {{
                same_best = Identity(best)
            }}
        >"""
