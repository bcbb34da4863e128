"""The random draw of clover::pick as ONNX text."""

from __future__ import annotations

from clover_compile.kernels.onnx_text import integer, ints, number


def _whole(vocab: int) -> str:
    """drawn [B, n] from a full sort; the sums run in double, as the reference's do."""
    return f"""
        all_ids = {ints(vocab)}
        value, order = TopK <axis = -1> (x, all_ids)
        cut = Gather <axis = -1> (value, cut_index)
        is_kept = GreaterOrEqual(value, cut)
        value_kept = Where(is_kept, value, lowest)
        value_hot = Div(value_kept, heat)
        draw_p = Softmax <axis = -1> (value_hot)
        draw_double = Cast <to = 11> (draw_p)
        axis = {integer(-1)}
        running_double = CumSum(draw_double, axis)
        upto = Cast <to = 1> (running_double)
        before = Sub(upto, draw_p)
        in_mass = LessOrEqual(before, top_p)
        mass_p = Where(in_mass, draw_p, nothing)
        mass_double = Cast <to = 11> (mass_p)
        edge_double = CumSum(mass_double, axis)
        edge = Cast <to = 1> (edge_double)
        edge_last = {ints(vocab - 1)}
        total = Gather <axis = -1> (edge, edge_last)
        noise_column = Unsqueeze(noise, last_axis)
        goal = Mul(noise_column, total)
        is_reached = Greater(edge, goal)
        reached = Cast <to = 6> (is_reached)
        place = ArgMax <axis = -1, keepdims = 1> (reached)
        drawn_column = GatherElements <axis = -1> (order, place)
        drawn = Squeeze(drawn_column, last_axis)"""


def draw(vocab: int) -> str:
    """ids [B, n]: best, or a draw where the temperature is above 0."""
    return f"""
        is_hot = Greater(temperature, nothing)
        ids = If (is_hot) <
            then_branch = hot () => (int64[a, b] drawn) {{
                least_heat = {number(1e-6)}
                heat = Max(temperature, least_heat)
                size = {integer(vocab)}
                top_whole = Cast <to = 7> (top_k)
                has_top = Greater(top_whole, zero)
                top_wanted = Where(has_top, top_whole, size)
                top_count = Min(top_wanted, size)
                cut_index = Sub(top_count, one)
                {_whole(vocab)}
            }},
            else_branch = cold () => (int64[a, b] same_best) {{
                same_best = Identity(best)
            }}
        >"""
