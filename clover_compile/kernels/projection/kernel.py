"""x W^T for a few rows or many: weight rows on the M side of the product, the rows of x on N."""

import triton
import triton.language as tl


@triton.jit
def _product(
    x, weight, scale, y, rows,
    width: tl.constexpr, outputs: tl.constexpr, x_stride: tl.constexpr,
    tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * tile_n + tl.arange(0, tile_n)
    feature = tl.program_id(1) * tile_m + tl.arange(0, tile_m)
    row_in = row < rows
    # Outputs past the last read it once more and are not stored.
    source = tl.minimum(feature, outputs - 1)
    column = tl.arange(0, tile_k)
    w_at = weight + source.to(tl.int64)[:, None] * width + column[None, :]
    x_at = x + row.to(tl.int64)[None, :] * x_stride + column[:, None]
    total = tl.zeros([tile_m, tile_n], dtype=tl.float32)
    for start in range(0, width, tile_k):
        if width % tile_k == 0:
            w = tl.load(w_at + start)
            values = tl.load(x_at + start, mask=row_in[None, :], other=0.0)
        else:
            inside = start + column < width
            w = tl.load(w_at + start, mask=inside[None, :], other=0.0)
            values = tl.load(x_at + start, mask=inside[:, None] & row_in[None, :], other=0.0)
        total = tl.dot(w.to(values.dtype), values, total, input_precision=precision)
    if scale is not None:
        total = total * tl.load(scale + source)[:, None]
    y_at = y + row.to(tl.int64)[None, :] * outputs + feature[:, None]
    stored = row_in[None, :] & (feature < outputs)[:, None]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=stored)


@triton.jit
def project(
    x, weight, scale, y, rows,
    width: tl.constexpr, outputs: tl.constexpr, x_stride: tl.constexpr,
    tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """y = x weight^T, summed in fp32 in the order of the columns, stored in y's dtype.

    x: `rows` rows of `width`, x_stride apart; weight: [outputs, width]; y: [rows, outputs], both
    contiguous; scale fp32 [outputs] where the weight is stored in fp8, else None.
    Grid: tiles of rows (neighbours share a weight tile), tiles of outputs.
    """
    _product(x, weight, scale, y, rows, width, outputs, x_stride, tile_m, tile_n, tile_k, precision)


@triton.jit
def project_narrow(
    x, weight, scale, y, rows,
    width: tl.constexpr, outputs: tl.constexpr, x_stride: tl.constexpr,
    tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """`project` for few outputs, under a name of its own because its budget differs: tiles of 16 or
    32 outputs are too small for warp-group instructions but spread the weight over more programs.
    """
    _product(x, weight, scale, y, rows, width, outputs, x_stride, tile_m, tile_n, tile_k, precision)
