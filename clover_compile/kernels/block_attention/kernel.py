"""Gated attention of a block to its prefix and itself: query heads of one key head are its rows.

A query tile holds `tile_q` folded rows: folded row f is query row f // group, head f % group of the
key head's group. Products take the storage dtype and sum in fp32; the softmax is fp32, to base 2.
"""

import triton
import triton.language as tl


@triton.jit
def _sizes(length, splits: tl.constexpr, unit: tl.constexpr):
    """Prefix rows per split, a multiple of `unit`, and how many splits have any; from length alone,
    so that the capacity of the cache cannot change a sum."""
    share = tl.maximum((length + unit * splits - 1) // (unit * splits), 1) * unit
    return share, (length + share - 1) // share


@triton.jit
def _normed(
    source, at, row, inside, cos, sin, factor,
    dim: tl.constexpr, columns: tl.constexpr, half: tl.constexpr, turning: tl.constexpr,
    cos_stride: tl.constexpr, sin_stride: tl.constexpr, eps: tl.constexpr,
):  # fmt: skip
    """Heads that start at source + at, normalised: their still channels [rows, columns], zero where
    channels turn, and their turned channels [rows, turning]; both in the storage dtype.

    Apart, because the angles of all columns would not fit into registers. A channel's partner is
    loaded at its own place once more, which needs no shuffle.
    """
    channel = tl.arange(0, columns)
    valid = inside[:, None] & (channel < dim)[None, :]
    own = tl.load(source + at[:, None] + channel[None, :], mask=valid, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(own * own, 1) / dim + eps)
    # Loaded again rather than kept: barriers hold loads back until there are registers for them.
    tl.debug_barrier()
    rests = (channel >= 2 * half) & (channel < dim)
    valid = inside[:, None] & rests[None, :]
    still = tl.load(source + at[:, None] + channel[None, :], mask=valid, other=0.0).to(tl.float32)
    weight = tl.load(factor + channel, mask=rests, other=0.0).to(tl.float32)
    still = (still * scale[:, None] * weight[None, :]).to(source.dtype.element_ty)
    tl.debug_barrier()
    channel = tl.arange(0, turning)
    turns = channel < 2 * half
    partner = (channel + half) % (2 * half)
    valid = inside[:, None] & turns[None, :]
    own = tl.load(source + at[:, None] + channel[None, :], mask=valid, other=0.0).to(tl.float32)
    other = tl.load(source + at[:, None] + partner[None, :], mask=valid, other=0.0).to(tl.float32)
    own *= tl.load(factor + channel, mask=turns, other=0.0).to(tl.float32)[None, :]
    other *= tl.load(factor + partner, mask=turns, other=0.0).to(tl.float32)[None, :]
    angle = (channel % half)[None, :]
    cosine = tl.load(cos + row[:, None] * cos_stride + angle, mask=valid, other=0.0)
    sine = tl.load(sin + row[:, None] * sin_stride + angle, mask=valid, other=0.0)
    sine = tl.where((channel < half)[None, :], -sine, sine)
    turned = (own * cosine + other * sine) * scale[:, None]
    return still, turned.to(source.dtype.element_ty)


@triton.jit
def _step(q, turned_q, k, turned_k, v, seen, top, mass, total, scale: tl.constexpr,
          precision: tl.constexpr):  # fmt: skip
    """Takes a tile of keys and values [tile, columns] into maximum, mass and weighted sum
    [columns, queries]. Keys stand on the M side: there warp groups read them from shared memory,
    while queries computed here would have to stay in registers beside the sum."""
    scores = tl.dot(k, tl.trans(q), input_precision=precision)
    scores = tl.dot(turned_k, tl.trans(turned_q), scores, input_precision=precision) * scale
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 0))
    keep = tl.exp2(top - higher)
    share = tl.exp2(scores - higher[None, :])
    mass = mass * keep + tl.sum(share, 0)
    total = tl.dot(tl.trans(v), share.to(v.dtype), total * keep[None, :], input_precision=precision)
    return higher, mass, total


@triton.jit
def _attend(
    query_gate, k, v, k_prefix, v_prefix, cos, sin, q_norm, k_norm, new_k, new_v,
    rows, head, tile, first, last, end,
    heads_kv: tl.constexpr, group: tl.constexpr, dim: tl.constexpr, half: tl.constexpr,
    query_stride: tl.constexpr, k_stride: tl.constexpr, v_stride: tl.constexpr,
    k_prefix_stride: tl.constexpr, v_prefix_stride: tl.constexpr,
    cos_stride: tl.constexpr, sin_stride: tl.constexpr,
    eps: tl.constexpr, scale: tl.constexpr, causal: tl.constexpr, columns: tl.constexpr,
    turning: tl.constexpr, tile_q: tl.constexpr, tile_k: tl.constexpr, tile_b: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """Prefix rows first..last, then block rows 0..end; stores the block's k and v where it is the
    last query row of a key tile that this tile holds, so that exactly one program does."""
    channel = tl.arange(0, columns)
    held = channel < dim
    wheel = tl.arange(0, turning)
    turns = wheel < 2 * half
    folded = tile * tile_q + tl.arange(0, tile_q)
    row = folded // group
    at = row.to(tl.int64) * query_stride + (head * group + folded % group) * 2 * dim
    q, turned_q = _normed(
        query_gate, at, row, row < rows, cos, sin, q_norm,
        dim, columns, half, turning, cos_stride, sin_stride, eps,
    )  # fmt: skip
    top = tl.full([tile_q], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([tile_q], dtype=tl.float32)
    total = tl.zeros([columns, tile_q], dtype=tl.float32)
    key = tl.arange(0, tile_k)
    old_k = k_prefix + first.to(tl.int64) * k_prefix_stride + head * dim
    old_v = v_prefix + first.to(tl.int64) * v_prefix_stride + head * dim
    k_at, v_at = key[:, None] * k_prefix_stride, key[:, None] * v_prefix_stride
    for start in range(first, last, tile_k):
        valid = start + key < last
        loaded = valid[:, None] & held[None, :]
        keys = tl.load(old_k + k_at + channel[None, :], mask=loaded, other=0.0)
        turned = valid[:, None] & turns[None, :]
        turned_keys = tl.load(old_k + k_at + wheel[None, :], mask=turned, other=0.0)
        values = tl.load(old_v + v_at + channel[None, :], mask=loaded, other=0.0)
        top, mass, total = _step(
            q, turned_q, keys, turned_keys, values, valid[:, None], top, mass, total,
            scale, precision,
        )  # fmt: skip
        old_k += tile_k * k_prefix_stride
        old_v += tile_k * v_prefix_stride
    mine = tl.arange(0, tile_b)
    for start in tl.range(0, end, tile_b, num_stages=1):
        key_row = start + mine
        valid = key_row < rows
        keys, turned_keys = _normed(
            k, key_row.to(tl.int64) * k_stride + head * dim, key_row, valid, cos, sin, k_norm,
            dim, columns, half, turning, cos_stride, sin_stride, eps,
        )  # fmt: skip
        loaded = valid[:, None] & held[None, :]
        from_v = v + key_row.to(tl.int64)[:, None] * v_stride + head * dim + channel[None, :]
        values = tl.load(from_v, mask=loaded, other=0.0)
        stored = valid & ((tl.minimum(start + tile_b, rows) - 1) * group // tile_q == tile)
        to = (key_row.to(tl.int64) * heads_kv + head)[:, None] * dim
        whole = stored[:, None] & held[None, :]
        if new_k is not None:
            rests = whole & (channel >= 2 * half)[None, :]
            tl.store(new_k + to + channel[None, :], keys, mask=rests)
            turned = stored[:, None] & turns[None, :]
            tl.store(new_k + to + wheel[None, :], turned_keys, mask=turned)
        if new_v is not None:
            tl.store(new_v + to + channel[None, :], values, mask=whole)
        seen = valid[:, None]
        if causal:
            seen = seen & (key_row[:, None] <= row[None, :])
        top, mass, total = _step(
            q, turned_q, keys, turned_keys, values, seen, top, mass, total, scale, precision
        )
    return row, folded % group, top, mass, total


@triton.jit
def _rows_seen(rows, tile, group: tl.constexpr, causal: tl.constexpr, tile_q: tl.constexpr):
    """Block rows a query tile sees."""
    end = rows
    if causal:
        end = tl.minimum(rows, ((tile + 1) * tile_q - 1) // group + 1)
    return end


@triton.jit
def attend(
    query_gate, k, v, k_prefix, v_prefix, length, cos, sin, q_norm, k_norm, y, new_k, new_v, rows,
    heads_kv: tl.constexpr, group: tl.constexpr, dim: tl.constexpr, half: tl.constexpr,
    query_stride: tl.constexpr, k_stride: tl.constexpr, v_stride: tl.constexpr,
    k_prefix_stride: tl.constexpr, v_prefix_stride: tl.constexpr,
    cos_stride: tl.constexpr, sin_stride: tl.constexpr,
    eps: tl.constexpr, scale: tl.constexpr, causal: tl.constexpr, columns: tl.constexpr,
    turning: tl.constexpr, tile_q: tl.constexpr, tile_k: tl.constexpr, tile_b: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """Long blocks: y [rows, heads, dim] gated, new_k, new_v [rows, heads_kv, dim] (None: unstored).

    query_gate: [rows, heads, 2, dim]; k, v: [rows, heads_kv, dim]; prefixes: [R, heads_kv, dim], of
    which length[0] rows are valid; cos, sin: [rows, half]; q_norm, k_norm: [dim]; rows as far apart
    as the strides say. columns: power of two >= dim; scale: that of the scores to base 2. Grid:
    query tiles, key heads.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    valid = tl.load(length)
    row, member, _, mass, total = _attend(
        query_gate, k, v, k_prefix, v_prefix, cos, sin, q_norm, k_norm, new_k, new_v,
        rows, head, tile, valid * 0, valid, _rows_seen(rows, tile, group, causal, tile_q),
        heads_kv, group, dim, half, query_stride, k_stride, v_stride,
        k_prefix_stride, v_prefix_stride, cos_stride, sin_stride,
        eps, scale, causal, columns, turning, tile_q, tile_k, tile_b, precision,
    )  # fmt: skip
    channel = tl.arange(0, columns)[:, None]
    stored = (row < rows)[None, :] & (channel < dim)
    query = head * group + member
    gates = row.to(tl.int64) * query_stride + (2 * query + 1) * dim
    gate = tl.load(query_gate + gates[None, :] + channel, mask=stored, other=0.0).to(tl.float32)
    out = total / mass[None, :] / (1.0 + tl.exp(-gate))
    to = (row.to(tl.int64) * heads_kv * group + query) * dim
    tl.store(y + to[None, :] + channel, out.to(y.dtype.element_ty), mask=stored)


@triton.jit
def attend_part(
    query_gate, k, v, k_prefix, v_prefix, length, cos, sin, q_norm, k_norm,
    part, weight, new_k, new_v, rows,
    heads_kv: tl.constexpr, group: tl.constexpr, dim: tl.constexpr, half: tl.constexpr,
    query_stride: tl.constexpr, k_stride: tl.constexpr, v_stride: tl.constexpr,
    k_prefix_stride: tl.constexpr, v_prefix_stride: tl.constexpr,
    cos_stride: tl.constexpr, sin_stride: tl.constexpr,
    eps: tl.constexpr, scale: tl.constexpr, causal: tl.constexpr, columns: tl.constexpr,
    turning: tl.constexpr, tile_q: tl.constexpr, tile_k: tl.constexpr, tile_b: tl.constexpr,
    precision: tl.constexpr,
    splits: tl.constexpr, unit: tl.constexpr,
):  # fmt: skip
    """Short blocks: one share of the keys for one query tile; arguments as for `attend`.

    Split 0 is the block itself, the others are shares of the valid prefix; those past its end
    write nothing and `merge` does not read them. part: [1 + splits, heads_kv, rows * group, dim]
    fp32, each row with weights that sum to 1; weight: [1 + splits, heads_kv, rows * group] fp32,
    log2 of what they summed to. Grid: 1 + splits, key heads, query tiles.
    """
    split, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    valid = tl.load(length)
    share, used = _sizes(valid, splits, unit)
    if split > used:
        return
    first = (split - 1) * share
    last = tl.minimum(first + share, valid)
    end = _rows_seen(rows, tile, group, causal, tile_q)
    if split == 0:
        last = first
    else:
        end = 0
    row, member, top, mass, total = _attend(
        query_gate, k, v, k_prefix, v_prefix, cos, sin, q_norm, k_norm, new_k, new_v,
        rows, head, tile, first, last, end,
        heads_kv, group, dim, half, query_stride, k_stride, v_stride,
        k_prefix_stride, v_prefix_stride, cos_stride, sin_stride,
        eps, scale, causal, columns, turning, tile_q, tile_k, tile_b, precision,
    )  # fmt: skip
    channel = tl.arange(0, columns)[:, None]
    inside = row < rows
    at = (split * heads_kv + head) * rows * group + row * group + member
    to = part + (at.to(tl.int64) * dim)[None, :] + channel
    tl.store(to, total / mass[None, :], mask=inside[None, :] & (channel < dim))
    tl.store(weight + at, top + tl.log2(mass), mask=inside)


@triton.jit
def merge(
    part, weight, query_gate, length, y, rows,
    heads_kv: tl.constexpr, group: tl.constexpr, dim: tl.constexpr, query_stride: tl.constexpr,
    columns: tl.constexpr, splits: tl.constexpr, unit: tl.constexpr,
    taken: tl.constexpr, parts: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """y = the parts that `attend_part` wrote, weighted and gated; part and weight are described
    there. taken: folded rows per program; parts: power of two > splits; chunk: parts taken at once.
    Grid: cdiv(rows * group, taken), key heads."""
    head = tl.program_id(1)
    _, used = _sizes(tl.load(length), splits, unit)
    folded = tl.program_id(0) * taken + tl.arange(0, taken)
    inside = folded < rows * group
    # Past the end the last row is merged once more and not stored.
    folded = tl.minimum(folded, rows * group - 1)
    channel = tl.arange(0, columns)
    held = channel < dim
    at, apart = head * rows * group + folded, heads_kv * rows * group
    index = tl.arange(0, parts)[:, None]
    logs = tl.load(weight + at[None, :] + index * apart, mask=index <= used, other=float("-inf"))
    top = tl.max(logs, 0)
    mass = tl.sum(tl.exp2(logs - top[None, :]), 0)
    total = tl.zeros([taken, columns], dtype=tl.float32)
    for start in range(0, used + 1, chunk):
        some = start + tl.arange(0, chunk)[:, None]
        place = at[None, :] + some * apart
        log = tl.load(weight + place, mask=some <= used, other=float("-inf"))
        mask = (some <= used)[:, :, None] & held[None, None, :]
        from_part = part + place.to(tl.int64)[:, :, None] * dim + channel[None, None, :]
        values = tl.load(from_part, mask=mask, other=0.0)
        total += tl.sum(values * tl.exp2(log - top[None, :])[:, :, None], 0)
    row, query = (folded // group).to(tl.int64), head * group + folded % group
    gates = (row * query_stride + (2 * query + 1) * dim)[:, None] + channel[None, :]
    gate = tl.load(query_gate + gates, mask=held[None, :], other=0.0).to(tl.float32)
    out = total / mass[:, None] / (1.0 + tl.exp(-gate))
    to = y + ((row * heads_kv * group + query) * dim)[:, None] + channel[None, :]
    tl.store(to, out.to(y.dtype.element_ty), mask=inside[:, None] & held[None, :])
