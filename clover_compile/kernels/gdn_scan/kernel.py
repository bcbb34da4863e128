"""The causal Gated DeltaNet of a commit: a program per value head, chunk after chunk of rows.

Inside a chunk the delta rule is a triangular system, solved by block halving down to single rows:
each inverse met on the way stands for a run of contractions, so no entry exceeds 1 and a repeated
token is as safe as any other. Tiles are [dv, rows] and [dv, dk], the wide side on M. Operands of 16
bits come in two halves, so that the fp32 state loses nothing; the key channels come in two parts,
taken in turn by loops that are not unrolled, and the state is read where it is needed rather than
held: all of it at once does not fit in registers.
"""

import triton
import triton.language as tl


@triton.jit
def _mixed(
    u, ring, conv, row, column, inside, start, end,
    u_stride: tl.constexpr, width: tl.constexpr, taps: tl.constexpr,
):  # fmt: skip
    """silu of the convolution at rows start + row (u stands at row `start`) of some channels.

    row and column broadcast against each other; rows from `end` on and other channels count as 0.
    """
    total = 0.0
    # Four 16-bit taps are one word: read one by one they cost a register of address each.
    packed: tl.constexpr = taps == 4 and conv.dtype.element_ty.primitive_bitwidth == 16
    if packed:
        word = tl.load(conv.to(tl.pointer_type(tl.int64)) + column, mask=inside, other=0)
    for j in tl.static_range(taps):
        at = row + (j - taps + 1)
        before = start + at < 0
        source = tl.where(before, ring + (at + taps - 1) * width, u + at * u_stride) + column
        x = tl.load(source, mask=(start + at < end) & inside, other=0.0).to(tl.float32)
        if packed:
            tap = (word >> 16 * j).to(tl.int16).to(conv.dtype.element_ty, bitcast=True)
        else:
            tap = tl.load(conv + column * taps + j, mask=inside, other=0.0)
        total += x * tap.to(tl.float32)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _gates(
    b, a, decay, dt_bias, row, counts, b_stride: tl.constexpr, a_stride: tl.constexpr
):  # fmt: skip
    """Log-decay and beta of one head (all pointers stand at it); other rows get exactly 0."""
    x = tl.load(a + row * a_stride, mask=counts, other=0.0).to(tl.float32) + tl.load(dt_bias)
    e = tl.exp(-tl.abs(x))
    # log(1 + e) has an error of an ulp of 1: too much for a gate that hardly forgets.
    log1p = tl.where(e < 0.001, e - 0.5 * e * e, tl.log(1.0 + e))
    g = tl.maximum(tl.load(decay) * (tl.maximum(x, 0.0) + log1p), -200.0)
    rate = tl.load(b + row * b_stride, mask=counts, other=0.0).to(tl.float32)
    return tl.where(counts, g, 0.0), tl.where(counts, 1.0 / (1.0 + tl.exp(-rate)), 0.0)


@triton.jit
def _halves(x, kind: tl.constexpr):
    """x as high + low of type `kind`, which together keep 16 bits or more of it (fp32: high)."""
    high = x.to(kind)
    return high, (x - high.to(tl.float32)).to(kind)


@triton.jit
def _dot(x_high, x_low, y_high, y_low, total):
    """total + x @ y as exact as the halves allow; fp32 halves need no second one."""
    if x_high.dtype == tl.float32:
        return tl.dot(x_high, y_high, total, input_precision="ieee")
    total = tl.dot(x_low, y_high, total)
    total = tl.dot(x_high, y_high, total)
    return tl.dot(x_high, y_low, total)


@triton.jit
def _inverse(system, early, late, levels: tl.constexpr, kind: tl.constexpr):
    """Inverse of I + system (strictly upper, fp32) whose first 2^levels rows count, by halving."""
    zeros = tl.zeros(system.shape, tl.float32)
    inverse = tl.where(early == late, 1.0, 0.0)
    for level in tl.static_range(levels):
        half = early // (1 << level) != late // (1 << level)
        whole = early // (2 << level) == late // (2 << level)
        between = tl.where(half & whole, system, 0.0)
        if level == 0:
            inverse -= between
        else:
            high, low = _halves(inverse, kind)
            between_high, between_low = _halves(between, kind)
            between = _dot(high, low, between_high, between_low, zeros)
            between_high, between_low = _halves(between, kind)
            inverse -= _dot(between_high, between_low, high, low, zeros)
    return inverse


@triton.jit
def _unit_rows(
    u, ring, conv, row, column, start, end, scale: tl.constexpr, kind: tl.constexpr,
    u_stride: tl.constexpr, width: tl.constexpr, taps: tl.constexpr,
    dk: tl.constexpr, dk_part: tl.constexpr, parts: tl.constexpr,
):  # fmt: skip
    """Mixed rows of dk channels from `column` on at unit length, times scale, in `parts` (1 or 2)
    tiles [rows, dk_part]: halves of the first, halves of the last."""
    ki = tl.arange(0, dk_part)
    last = _mixed(
        u, ring, conv, row[:, None], (column + ki)[None, :], (ki < dk)[None, :], start, end,
        u_stride, width, taps,
    )  # fmt: skip
    squares = tl.sum(last * last, 1)
    first = last
    if parts == 2:
        ki += dk_part
        last = _mixed(
            u, ring, conv, row[:, None], (column + ki)[None, :], (ki < dk)[None, :], start, end,
            u_stride, width, taps,
        )  # fmt: skip
        squares += tl.sum(last * last, 1)
    factor = (tl.rsqrt(squares + 1e-6) * scale)[:, None]
    first_high, first_low = _halves(first * factor, kind)
    last_high, last_low = _halves(last * factor, kind)
    return first_high, first_low, last_high, last_low


@triton.jit
def _either(i, first_high, first_low, last_high, last_low):
    """The halves of part i, 0 or 1."""
    return tl.where(i == 0, first_high, last_high), tl.where(i == 0, first_low, last_low)


@triton.jit
def _inner(
    x_high, x_low, x2_high, x2_low, y_high, y_low, y2_high, y2_low, total, parts: tl.constexpr
):  # fmt: skip
    """total + x @ y' over both parts of rows x and y."""
    for i in range(parts):
        high, low = _either(i, x_high, x_low, x2_high, x2_low)
        part_high, part_low = _either(i, y_high, y_low, y2_high, y2_low)
        total = _dot(high, low, tl.trans(part_high), tl.trans(part_low), total)
    return total


@triton.jit
def _write_ring(
    new_ring, u, ring, column, inside, end,
    u_stride: tl.constexpr, width: tl.constexpr, taps: tl.constexpr, ring_tile: tl.constexpr,
):  # fmt: skip
    """The taps - 1 rows before row `end` of some channels."""
    step = tl.arange(0, ring_tile)[:, None]
    at = end + step - (taps - 1)
    source = tl.where(at < 0, ring + (end + step) * width, u + at.to(tl.int64) * u_stride) + column
    mask = (step < taps - 1) & inside
    tl.store(new_ring + step * width + column, tl.load(source, mask=mask, other=0.0), mask=mask)


@triton.jit
def _write_rings(
    new_ring, u, ring, head, part, end, u_stride: tl.constexpr, width: tl.constexpr,
    key_heads: tl.constexpr, share: tl.constexpr, dk: tl.constexpr, dv: tl.constexpr,
    taps: tl.constexpr, dk_tile: tl.constexpr, dv_tile: tl.constexpr, ring_tile: tl.constexpr,
):  # fmt: skip
    """The ring's channels of a program: its own of v; q and k if it is their key head's first."""
    vi = part * dv_tile + tl.arange(0, dv_tile)
    _write_ring(
        new_ring, u, ring, (2 * key_heads * dk + head * dv + vi)[None, :], (vi < dv)[None, :], end,
        u_stride, width, taps, ring_tile,
    )  # fmt: skip
    if (head % share == 0) & (part == 0):
        ki = tl.arange(0, dk_tile)
        for of_k in tl.static_range(2):
            _write_ring(
                new_ring, u, ring, ((of_k * key_heads + head // share) * dk + ki)[None, :],
                (ki < dk)[None, :], end, u_stride, width, taps, ring_tile,
            )  # fmt: skip


@triton.jit
def _cells(i, head, vi, dk: tl.constexpr, dv: tl.constexpr, dk_part: tl.constexpr):
    """Where part i of a head's state lies, as a tile [dv, dk_part], and which of it exists."""
    ki = i * dk_part + tl.arange(0, dk_part)
    cell = (head * dk + ki[None, :]) * dv + vi[:, None]
    return cell, (ki < dk)[None, :] & (vi < dv)[:, None]


@triton.jit
def _copy_if_none(
    new_state, state, end, head, part, dk: tl.constexpr, dv: tl.constexpr,
    dk_part: tl.constexpr, parts: tl.constexpr, dv_tile: tl.constexpr,
):  # fmt: skip
    """Where no row counts, the state itself: to add zeros would turn -0 into 0."""
    if end <= 0:
        tl.debug_barrier()
        vi = part * dv_tile + tl.arange(0, dv_tile)
        for i in range(parts):
            cell, inside = _cells(i, head, vi, dk, dv, dk_part)
            tl.store(new_state + cell, tl.load(state + cell, mask=inside, other=0.0), mask=inside)


@triton.jit
def gdn_scan(
    u, z, b, a, ring, state, conv, decay, dt_bias, norm, rows, y, new_ring, new_state, n,
    u_stride: tl.constexpr, z_stride: tl.constexpr, b_stride: tl.constexpr, a_stride: tl.constexpr,
    key_heads: tl.constexpr, heads: tl.constexpr, dk: tl.constexpr, dv: tl.constexpr,
    taps: tl.constexpr, eps: tl.constexpr, chunk: tl.constexpr, levels: tl.constexpr,
    single: tl.constexpr,
    dk_part: tl.constexpr, parts: tl.constexpr, dv_tile: tl.constexpr, ring_tile: tl.constexpr,
):  # fmt: skip
    """y, new ring and new state (each None: not wanted) after the first `rows` (None: n) rows.

    Shapes as in the reference; rows of u, z, b, a stand their strides apart. single: n <= chunk;
    otherwise new_state must be there and carries the state from chunk to chunk. levels: 2^levels
    rows of a chunk count at most. dk_part, dv_tile, ring_tile: powers of two; parts (1 or 2) of
    dk_part hold dk, ring_tile taps - 1, and dv_tile all of dv where y is wanted. No output may
    share memory with an input: heads share channels of the ring. Grid: heads, cdiv(dv, dv_tile).
    """
    program, part = tl.program_id(0), tl.program_id(1)
    share: tl.constexpr = heads // key_heads
    width: tl.constexpr = 2 * key_heads * dk + heads * dv
    kind: tl.constexpr = tl.float32 if u.dtype.element_ty == tl.float32 else tl.bfloat16
    end = n
    if rows is not None:
        end = tl.minimum(tl.load(rows), n)
    if new_ring is not None:
        _write_rings(
            new_ring, u, ring, program, part, end, u_stride, width, key_heads, share, dk, dv,
            taps, dk_part * parts, dv_tile, ring_tile,
        )  # fmt: skip
    square = tl.zeros((chunk, chunk), tl.float32)
    tile = tl.zeros((dv_tile, chunk), tl.float32)
    first_state = state
    stop = chunk if single else end
    for start in tl.range(0, stop, chunk, disable_licm=True):
        # A zero that the compiler cannot see through: what depends on it is not computed ahead of
        # the loop, where it would hold registers all along.
        zero = 0 if single else tl.minimum(end - start - 1, 0)
        head, row = program + zero, zero + tl.arange(0, chunk)
        early, late = row[:, None], row[None, :]
        vi = part * dv_tile + tl.arange(0, dv_tile)
        in_v = vi < dv
        q_column = head // share * dk
        k_column, v_column = key_heads * dk + q_column, 2 * key_heads * dk + head * dv + vi
        counts = start + row < end
        g, beta = _gates(
            b + head, a + head, decay + head, dt_bias + head, row, counts, b_stride, a_stride
        )
        # Sums of multiples of 2^-8 are exact, those of the remainders small: differences stay good.
        coarse = tl.floor(g * 256.0) * 0.00390625
        fine = g - coarse
        coarse_sum, fine_sum = tl.cumsum(coarse, 0), tl.cumsum(fine, 0)
        coarse_all, fine_all = tl.sum(coarse, 0), tl.sum(fine, 0)
        gap = coarse_sum[None, :] - coarse_sum[:, None] + (fine_sum[None, :] - fine_sum[:, None])
        decays = tl.where(early <= late, tl.exp(gap), 0.0)
        since = tl.exp(coarse_sum + fine_sum)

        k_high, k_low, k2_high, k2_low = _unit_rows(
            u, ring, conv, row, k_column, start, end, 1.0, kind,
            u_stride, width, taps, dk, dk_part, parts,
        )  # fmt: skip
        if y is not None:
            q_high, q_low, q2_high, q2_low = _unit_rows(
                u, ring, conv, row, q_column, start, end, dk ** -0.5, kind,
                u_stride, width, taps, dk, dk_part, parts,
            )  # fmt: skip
            # The other way round, q' would be an operand here and, far below, once more: registers.
            weights = _inner(
                q_high, q_low, q2_high, q2_low, k_high, k_low, k2_high, k2_low, square, parts
            )
            weights = tl.trans(weights) * decays
        system = _inner(
            k_high, k_low, k2_high, k2_low, k_high, k_low, k2_high, k2_low, square, parts
        )
        system = tl.where(early < late, system * decays * beta[None, :], 0.0)
        inverse_high, inverse_low = _halves(_inverse(system, early, late, levels, kind), kind)

        v = _mixed(
            u, ring, conv, row[:, None], v_column[None, :], in_v[None, :], start, end,
            u_stride, width, taps,
        )  # fmt: skip
        high, low = _halves(v * beta[:, None], kind)
        delta = _dot(tl.trans(high), tl.trans(low), inverse_high, inverse_low, tile)
        known = tile
        if y is not None:
            o = tile
        for i in range(parts):
            cell, inside = _cells(i, head, vi, dk, dv, dk_part)
            kept = tl.load(state + cell, mask=inside, other=0.0)
            kept_high, kept_low = _halves(kept, kind)
            part_high, part_low = _either(i, k_high, k_low, k2_high, k2_low)
            known = _dot(kept_high, kept_low, tl.trans(part_high), tl.trans(part_low), known)
            if y is not None:
                part_high, part_low = _either(i, q_high, q_low, q2_high, q2_low)
                o = _dot(kept_high, kept_low, tl.trans(part_high), tl.trans(part_low), o)
        high, low = _halves(-(beta * since)[None, :] * known, kind)
        delta = _dot(high, low, inverse_high, inverse_low, delta)

        if y is not None:
            o *= since[None, :]
            o = tl.dot(delta.to(kind), weights.to(kind), o, input_precision="ieee")
            o = tl.trans(o * tl.rsqrt(tl.sum(o * o, 0) / dv + eps)[None, :])
            at = row[:, None] * z_stride + head * dv + vi[None, :]
            seen = counts[:, None] & in_v[None, :]
            gate = tl.load(z + at, mask=seen, other=0.0).to(tl.float32)
            o *= tl.load(norm + vi, mask=in_v, other=0.0).to(tl.float32)[None, :]
            o *= gate / (1.0 + tl.exp(-gate))
            at = row[:, None] * (heads * dv) + head * dv + vi[None, :]
            tl.store(y + at, o.to(y.dtype.element_ty), mask=seen)

        if new_state is not None:
            left = tl.exp(coarse_all - coarse_sum + (fine_all - fine_sum))
            high, low = _halves(delta * left[None, :], kind)
            for i in range(parts):
                cell, inside = _cells(i, head, vi, dk, dv, dk_part)
                kept = tl.load(state + cell, mask=inside, other=0.0)
                kept *= tl.exp(coarse_all + fine_all)
                part_high, part_low = _either(i, k_high, k_low, k2_high, k2_low)
                kept = _dot(high, low, part_high, part_low, kept)
                tl.store(new_state + cell, kept, mask=inside)
        if not single:
            # Another thread may have stored what this one loads next.
            tl.debug_barrier()
            state = new_state
            u += chunk * u_stride
            b += chunk * b_stride
            a += chunk * a_stride
            if y is not None:
                z += chunk * z_stride
                y += chunk * heads * dv
    if rows is not None and new_state is not None:
        _copy_if_none(new_state, first_state, end, program, part, dk, dv, dk_part, parts, dv_tile)
