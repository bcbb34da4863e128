"""Embedding rows by id: one program per row and part of the width."""

import triton
import triton.language as tl


@triton.jit
def embed(ids, weight, y, width: tl.constexpr, columns: tl.constexpr):
    """y[row] = weight[ids[row]]. columns: power of two. Grid: rows, ceil(width / columns)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = at < width
    source = tl.load(ids + row) * width
    tl.store(y + row * width + at, tl.load(weight + source + at, mask=inside), mask=inside)
