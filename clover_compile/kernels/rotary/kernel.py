"""Rotary angles: one program per row."""

import triton
import triton.language as tl


@triton.jit
def angles(length, turns, cosine, sine, half: tl.constexpr, columns: tl.constexpr):
    """cos and sin of 2 pi times the fraction of (length + row) * turns. Grid: rows.

    The fraction is exact, so the nearest quarter turn is taken off and what is left, at most an
    eighth, goes through the Taylor series: tl.cos of any fp32 angle would need local memory.
    """
    row = tl.program_id(0)
    at = tl.arange(0, columns)
    inside = at < half
    position = (tl.load(length) + row).to(tl.float64)
    turn = position * tl.load(turns + at, mask=inside, other=0.0)
    quarters = tl.floor(turn * 4.0 + 0.5)
    x = ((turn - quarters * 0.25) * 6.283185307179586).to(tl.float32)
    s = x * x
    near_sine = x * (1.0 - s / 6.0 * (1.0 - s / 20.0 * (1.0 - s / 42.0 * (1.0 - s / 72.0))))
    near_cosine = 1.0 - s / 2.0 * (
        1.0 - s / 12.0 * (1.0 - s / 30.0 * (1.0 - s / 56.0 * (1.0 - s / 90.0)))
    )
    quarter = quarters.to(tl.int64) % 4
    odd = quarter % 2 == 1
    c = tl.where(odd, near_sine, near_cosine)
    d = tl.where(odd, near_cosine, near_sine)
    tl.store(
        cosine + row * half + at, tl.where((quarter == 1) | (quarter == 2), -c, c), mask=inside
    )
    tl.store(sine + row * half + at, tl.where(quarter >= 2, -d, d), mask=inside)
