"""The bidirectional Gated DeltaNet of a preview: one program per value head and tile of rows.

Everything stands transposed, channels or keys down and the tile's rows across, so that the rows are
the N side of every matrix product.
"""

import triton
import triton.language as tl


@triton.jit
def product(a, b, exact: tl.constexpr):
    """a @ b of fp32 tiles: in fp32 if `exact`, else with each operand as the sum of two bf16."""
    if exact:
        total = tl.dot(a, b, input_precision="ieee")
    else:
        a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
        a_low = (a - a_high.to(tl.float32)).to(tl.bfloat16)
        b_low = (b - b_high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(a_low, b_high)
        total = tl.dot(a_high, b_low, total)
        total = tl.dot(a_high, b_high, total)
    return total


@triton.jit
def inside(down, across, columns: tl.constexpr, padded: tl.constexpr):
    """Mask of a tile: rows where `down` holds, columns below `columns`."""
    mask = down[:, None]
    if columns < padded:
        mask = mask & (across < columns)[None, :]
    return mask


@triton.jit
def mixed(
    u, ring, taps, at, n, first, columns: tl.constexpr, padded: tl.constexpr,
    width: tl.constexpr, u_stride: tl.constexpr, kernel: tl.constexpr, slots: tl.constexpr,
):  # fmt: skip
    """silu of the both-sided convolution, fp32 [rows `at`, padded channels from `first`].

    Rows before the block come from the ring; rows after its end are zero. slots: power of two >=
    2 * kernel - 1, the taps.
    """
    count: tl.constexpr = 2 * kernel - 1
    slot, across = tl.arange(0, slots), tl.arange(0, padded)
    channel = first + across
    # Channels stand `count` elements apart in taps: one load of all of them is coalesced, a load
    # per tap is not. Volatile, so that no loop holds the weights of two convolutions in registers.
    known = inside(slot < count, across, columns, padded)
    place = taps + channel[None, :] * count + slot[:, None]
    weights = tl.load(place, mask=known, other=0.0, volatile=True).to(tl.float32)
    block = u + at[:, None] * u_stride + channel[None, :]
    earlier = ring + (at + (kernel - 1))[:, None] * width + channel[None, :]
    real = (across < columns)[None, :]
    total = tl.zeros([at.shape[0], padded], tl.float32)
    # A loop, not static: all taps at once would spill.
    for tap in range(count):
        shift = tap - (kernel - 1)
        row = at + shift
        old, new = (row < 0)[:, None], ((row >= 0) & (row < n))[:, None]
        if columns < padded:
            old, new = old & real, new & real
        value = tl.load(block + shift * u_stride, mask=new, other=0.0).to(tl.float32)
        value += tl.load(earlier + shift * width, mask=old, other=0.0).to(tl.float32)
        weight = tl.sum(tl.where(slot[:, None] == tap, weights, 0.0), 0)
        total += value * weight[None, :]
    return total / (1.0 + tl.exp(-total))


@triton.jit
def unit_length(x):
    """x / sqrt(sum x^2 + 1e-6) along axis 1; the constant is not the norm's eps."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def preview_head(
    u, z, a, ring, state, taps, decay, dt_bias, logit_scale, history_bias, history_c, norm, y, n,
    heads: tl.constexpr, key_heads: tl.constexpr, dk: tl.constexpr, dv: tl.constexpr,
    kernel: tl.constexpr, eps: tl.constexpr, calibration: tl.constexpr,
    u_stride: tl.constexpr, z_stride: tl.constexpr, a_stride: tl.constexpr,
    row_tile: tl.constexpr, key_tile: tl.constexpr,
    padded_dk: tl.constexpr, padded_dv: tl.constexpr, slots: tl.constexpr, exact: tl.constexpr,
):  # fmt: skip
    """y of one value head and `row_tile` rows; arrays as in the reference, batch of 1, n rows.

    calibration: block length at which the history slot needs no correction; padded_dk, padded_dv:
    powers of two >= 16; exact: fp32 storage. Grid: heads, row tiles.
    """
    head = tl.program_id(0)
    rows = tl.program_id(1) * row_tile + tl.arange(0, row_tile)
    width: tl.constexpr = 2 * key_heads * dk + heads * dv
    key_head = head // (heads // key_heads)
    k_first = (key_heads + key_head) * dk
    v_first = 2 * key_heads * dk + head * dv
    k_channel, v_channel = tl.arange(0, padded_dk), tl.arange(0, padded_dv)

    history = tl.load(
        state + head * dk * dv + k_channel[:, None] * dv + v_channel[None, :],
        mask=inside(k_channel < dk, v_channel, dv, padded_dv), other=0.0,
    )  # fmt: skip
    q = mixed(u, ring, taps, rows, n, key_head * dk, dk, padded_dk, width, u_stride, kernel, slots)
    q = tl.trans(unit_length(q))
    gate = tl.load(a + rows * a_stride + head, mask=rows < n, other=0.0).to(tl.float32)
    gate += tl.load(dt_bias + head)
    softplus = tl.maximum(gate, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(gate)))
    fade = tl.exp(tl.load(decay + head) * softplus) * dk**-0.5
    o = product(tl.trans(history), q, exact) * fade[None, :]

    # Softmax over the history slot, which is first, and the block, key tile by key tile.
    slot = tl.load(history_bias + head) + tl.load(history_c + head) * tl.log(n / calibration)
    top = tl.zeros([row_tile], tl.float32) + slot
    mass = tl.full([row_tile], 1.0, tl.float32)
    scale = tl.load(logit_scale + head)
    for start in range(0, n, key_tile):
        keys = start + tl.arange(0, key_tile)
        k = mixed(u, ring, taps, keys, n, k_first, dk, padded_dk, width, u_stride, kernel, slots)
        scores = product(unit_length(k), q, exact) * scale
        scores = tl.where((keys < n)[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        p = tl.exp(scores - new_top[None, :])
        keep = tl.exp(top - new_top)
        mass = mass * keep + tl.sum(p, 0)
        v = mixed(u, ring, taps, keys, n, v_first, dv, padded_dv, width, u_stride, kernel, slots)
        if exact:
            o = tl.dot(tl.trans(v), p, o * keep[None, :], input_precision="ieee")
        else:
            o = tl.dot(tl.trans(v.to(tl.bfloat16)), p.to(tl.bfloat16), o * keep[None, :])
        top = new_top
    o = o / mass[None, :]

    mask = (rows < n)[None, :]
    if dv < padded_dv:
        mask = mask & (v_channel < dv)[:, None]
    factor = tl.load(norm + v_channel, mask=v_channel < dv, other=0.0).to(tl.float32)
    o = o * tl.rsqrt(tl.sum(o * o, 0) / dv + eps)[None, :] * factor[:, None]
    channel = (head * dv + v_channel)[:, None]
    opened = tl.load(z + rows[None, :] * z_stride + channel, mask=mask, other=0.0).to(tl.float32)
    o = o * opened / (1.0 + tl.exp(-opened))
    tl.store(y + rows[None, :] * (heads * dv) + channel, o.to(y.dtype.element_ty), mask=mask)
