"""Residual add and RMS norm: one program per row."""

import triton
import triton.language as tl


@triton.jit
def add_norm(
    x, residual, weight, total, normed,
    width: tl.constexpr, x_stride: tl.constexpr, residual_stride: tl.constexpr,
    eps: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """total = x + residual (None: x), rounded to the storage dtype; normed from the rounded sum.

    x, residual: rows of `width` elements, strides apart; total, normed: contiguous (total None: not
    stored). columns: power of two >= width. Grid: rows.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, columns)
    inside = at < width
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        more = tl.load(residual + row * residual_stride + at, mask=inside, other=0.0)
        value += more.to(tl.float32)
    value = value.to(normed.dtype.element_ty)
    if total is not None:
        tl.store(total + row * width + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * width + at, (wide * scale * factor).to(value.dtype), mask=inside)
