"""Routing in a block coreset, grouped SwiGLU experts and the shared expert.

At most 64 rows: `gate`, `up`, `down`; every expert in use is one entry of a list, and its rows are
the block's own, masked. More rows: `gate`, `group`, `up`, `down`; each chunk of rows has a list of
its own whose entries are tiles of an expert's rows, and `down` scatters them back. The list starts
with the shared expert's tiles. An entry's activations are scaled by the rows' weights before
they are rounded, so that `down` is one long sum over entries in the order of the list.
"""

import triton
import triton.language as tl


@triton.jit
def _by_row(values):
    """[rows] against [parts, rows, lanes]."""
    return tl.expand_dims(tl.expand_dims(values, 1), 0)


@triton.jit
def _best(logits, allowed, column, top_k: tl.constexpr, narrow: tl.constexpr):
    """Mask of each row's top_k allowed logits, ties to the lower id.

    One integer orders a logit and its id: 16 bits each if the logits are bfloat16 (narrow).
    """
    value = tl.where(logits == 0.0, 0.0, logits)  # -0 ties with 0
    bits = value.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    if narrow:
        lowest: tl.constexpr = -(2**31)
        key = (ordered & -65536) | (65535 - column)
    else:
        lowest: tl.constexpr = -(2**63)
        key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
    key = tl.where(allowed, key, lowest + 1)
    for _ in range(top_k):
        key = tl.where(key == _by_row(tl.max(tl.max(key, 0), 1)), lowest, key)
    return (key == lowest) & allowed


@triton.jit
def _softmax(logits, among):
    """Softmax of each row over the columns of the mask `among`, 0 elsewhere."""
    inside = tl.where(among, logits, float("-inf"))
    power = tl.exp(inside - _by_row(tl.max(tl.max(inside, 0), 1)))
    return power * _by_row(1.0 / tl.sum(tl.sum(power, 0), 1))


@triton.jit
def _totals(logits, real, live, column, top_k: tl.constexpr, narrow: tl.constexpr):
    """[parts, lanes]: the probability each expert has in the live rows whose top_k it is in."""
    member = _best(logits, real, column, top_k, narrow)
    return tl.sum(tl.where(member & live, _softmax(logits, real), 0.0), 1)


@triton.jit
def _coreset(total, top_p: tl.constexpr, parts: tl.constexpr, lanes: tl.constexpr):
    """Mask [parts, lanes] of experts kept: descending total, ties to the lower id, mass ahead <
    top_p.

    Every expert adds up the mass of those ahead of it, `lanes` at a time: nothing is sorted.
    """
    lane = tl.arange(0, lanes)
    part = tl.arange(0, parts)[:, None]
    column = part * lanes + lane[None, :]
    scale = 1.0 / tl.maximum(tl.sum(tl.sum(total, 0), 0), 1e-9)
    ahead = tl.zeros([parts, lanes, lanes], tl.float32)
    mine = tl.expand_dims(total, 1)
    for p in range(parts):
        other = _by_row(tl.sum(tl.where(part == p, total, 0.0), 0))
        lower = _by_row(p * lanes + lane) < tl.expand_dims(column, 1)
        before = (other > mine) | ((other == mine) & lower)
        ahead += tl.where(before, other * scale, 0.0)
    top = tl.max(tl.max(total, 0), 0)
    first = tl.min(tl.min(tl.where(total == top, column, 2147483647), 0), 0)
    return (tl.sum(ahead, 1) < top_p) | (column == first)


@triton.jit
def gate(
    router, kept, share, expert, bits, count, n,
    experts: tl.constexpr, parts: tl.constexpr, lanes: tl.constexpr, rows: tl.constexpr,
    stride: tl.constexpr, top_k: tl.constexpr, top_p: tl.constexpr, block: tl.constexpr,
    narrow: tl.constexpr, words: tl.constexpr,
):  # fmt: skip
    """share fp32 [n, experts]: every row's weight of every expert, 0 where not routed.

    router: rows of `experts` logits, stride apart. kept (None: nobody asks): the size of the
    coreset. With `bits` (n <= 32 * words), what the rows use in ascending id: count i32
    [1], expert i32 [count], bits i32 [count, words] (bit r % 32 of word r // 32: row r is routed
    there). Tiles are [parts, rows, lanes] of parts * lanes >= experts columns: a row then lies in
    the registers of one warp. Grid: 1 if rows share a coreset or a list, else cdiv(n, rows).
    """
    columns: tl.constexpr = parts * lanes
    part = tl.arange(0, parts)[:, None]
    flat = part * lanes + tl.arange(0, lanes)[None, :]
    column = tl.expand_dims(flat, 1)
    row = _by_row(tl.arange(0, rows))
    real = column < experts
    allowed = real
    size = experts
    start = tl.program_id(0) * rows
    stop = start + rows
    if block or bits is not None:
        start = 0
        stop = n
    if block:
        total = tl.zeros([parts, lanes], tl.float32)
        for r in range(start, stop, rows):
            live = r + row < n
            at = router + tl.cast(r, tl.int64) * stride + (row * stride + column)
            logits = tl.load(at, mask=live & real, other=0.0).to(tl.float32)
            total += _totals(logits, real, live, column, top_k, narrow)
        allowed = real & tl.expand_dims(_coreset(total, top_p, parts, lanes), 1)
        size = tl.sum(tl.sum(tl.sum(allowed.to(tl.int32), 0), 1), 0)
    if kept is not None:
        tl.store(kept, size, mask=tl.program_id(0) == 0)
    low = tl.zeros([parts, lanes], tl.int32)
    high = tl.zeros([parts, lanes], tl.int32)
    for r in range(start, stop, rows):
        live = r + row < n
        at = router + tl.cast(r, tl.int64) * stride + (row * stride + column)
        logits = tl.load(at, mask=live & real, other=0.0).to(tl.float32)
        weight = _softmax(logits, _best(logits, allowed, column, top_k, narrow))
        at = share + tl.cast(r, tl.int64) * experts + (row * experts + column)
        tl.store(at, weight, mask=live & real)
        if bits is not None:
            word = tl.sum(tl.where((weight > 0.0) & live, 1 << (r + row) % 32, 0), 1)
            low |= tl.where(r < 32, word, 0)
            high |= tl.where(r < 32, 0, word)
    if bits is not None:
        low = tl.reshape(low, [columns])
        high = tl.reshape(high, [columns])
        used = (low | high) != 0
        one = used.to(tl.int32)
        entry = tl.cumsum(one, 0) - one
        tl.store(count, tl.sum(one, 0))
        tl.store(expert + entry, tl.arange(0, columns), mask=used)
        tl.store(bits + entry * words, low, mask=used)
        if words == 2:
            tl.store(bits + entry * words + 1, high, mask=used)


@triton.jit
def group(
    share, expert, fill, member, weight, count, n,
    experts: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr, chunk: tl.constexpr,
    slots: tl.constexpr, entries: tl.constexpr,
):  # fmt: skip
    """Each chunk's rows by expert, in tiles of `slots`; ascending experts, ascending rows.

    share: as `gate` writes it. Per chunk: count i32 [1] tiles, at most `entries`; expert, fill
    i32 [entries]: whose tile, how many of its slots are taken; member i32 and weight fp32
    [entries, slots]: the row within the chunk and its weight. Grid: cdiv(n, chunk).
    """
    begin = tl.program_id(0).to(tl.int64) * chunk
    first_entry = tl.program_id(0).to(tl.int64) * entries
    left = n - begin
    share += begin * experts
    expert += first_entry
    fill += first_entry
    member += first_entry * slots
    weight += first_entry * slots
    row = tl.arange(0, rows)[:, None]
    column = tl.arange(0, columns)
    at = row * experts + column[None, :]
    real = (column < experts)[None, :]
    taken = tl.zeros([columns], tl.int32)
    for r in range(0, chunk, rows):
        value = tl.load(share + r * experts + at, mask=(r + row < left) & real, other=0.0)
        taken += tl.sum((value > 0.0).to(tl.int32), 0)
    tiles = (taken + slots - 1) // slots
    first = tl.cumsum(tiles, 0) - tiles
    tl.store(count + tl.program_id(0), tl.sum(tiles, 0))
    for tile in range(chunk // slots):
        has = tile < tiles
        tl.store(expert + first + tile, column, mask=has)
        tl.store(fill + first + tile, tl.minimum(taken - tile * slots, slots), mask=has)
    next_slot = first * slots
    for r in range(0, chunk, rows):
        value = tl.load(share + r * experts + at, mask=(r + row < left) & real, other=0.0)
        routed = value > 0.0
        one = routed.to(tl.int32)
        slot = next_slot[None, :] + tl.cumsum(one, 0) - one
        tl.store(member + slot, r + row + column[None, :] * 0, mask=routed)
        tl.store(weight + slot, value, mask=routed)
        next_slot += tl.sum(one, 0)


@triton.jit
def up(
    x, shared_gate, gate_up, shared_gate_up, gate_up_scale, shared_gate_up_scale, expert, share,
    fill, member, count, h, n,
    experts: tl.constexpr, hidden: tl.constexpr, width: tl.constexpr, shared_width: tl.constexpr,
    widest: tl.constexpr, x_stride: tl.constexpr, gate_stride: tl.constexpr, chunk: tl.constexpr,
    entries: tl.constexpr, shared_tiles: tl.constexpr, tile: tl.constexpr, slots: tl.constexpr,
    step: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """h [chunks, shared_tiles + entries, slots, widest] = weight * silu(gate) * up.

    Only slots that hold a row are written. Weights stand on the M side: `tile` gate rows above the
    `tile` up rows that belong to them. Without `member`, slot r is row r and share is by row and
    expert; with it, share is by entry and slot. Grid: cdiv(widest, tile), any number of programs
    among which the entries are dealt, chunks.
    """
    block = tl.program_id(2).to(tl.int64)
    used = shared_tiles + tl.load(count + block)
    slot = tl.arange(0, slots)
    k = tl.arange(0, step)
    line = tl.arange(0, 2 * tile)
    index = tl.program_id(0) * tile + line % tile
    column = tl.program_id(0) * tile + tl.arange(0, tile)
    for entry in range(tl.program_id(1), used, tl.num_programs(1)):
        shared = entry < shared_tiles
        routed = entry >= shared_tiles
        listed = block * entries + entry - shared_tiles
        which = tl.load(expert + listed, mask=routed, other=0).to(tl.int64)
        row = block * chunk + entry * slots + slot
        own = shared & (row < n)
        opened = tl.load(shared_gate + row * gate_stride, mask=own, other=0.0).to(tl.float32)
        if member is None:
            valid = routed & (slot < n)
            weight = tl.load(share + slot * experts + which, mask=valid, other=0.0)
            taken = weight > 0.0
            row = slot.to(tl.int64)
        else:
            taken = slot < tl.load(fill + listed, mask=routed, other=0)
            weight = tl.load(share + listed * slots + slot, mask=taken, other=0.0)
            mine = tl.load(member + listed * slots + slot, mask=taken, other=0)
            row = tl.where(shared, row, block * chunk + mine)
        weight = tl.where(shared, 1.0 / (1.0 + tl.exp(-opened)), weight)
        live = own | taken
        wide = tl.where(shared, shared_width, width)
        base = tl.where(shared, shared_gate_up, gate_up + which * (2 * width * hidden))
        a_line = tl.where(line < tile, index, wide + index).to(tl.int64)
        a_at = base + a_line[:, None] * hidden + k[None, :]
        b_at = x + row[None, :] * x_stride + k[:, None]
        total = tl.zeros([2 * tile, slots], tl.float32)
        for start in range(0, hidden, step):
            if hidden % step or width % tile or shared_width != width:
                inside = start + k < hidden
                a_mask = (index < wide)[:, None] & inside[None, :]
                a = tl.load(a_at + start, mask=a_mask, other=0.0)
                b = tl.load(b_at + start, mask=live[None, :] & inside[:, None], other=0.0)
            else:
                a = tl.load(a_at + start)
                b = tl.load(b_at + start, mask=live[None, :], other=0.0)
            total = tl.dot(a.to(b.dtype), b, total, input_precision=precision)
        if gate_up_scale is not None:
            factors = tl.where(shared, shared_gate_up_scale, gate_up_scale + which * (2 * width))
            factor = tl.load(factors + a_line, mask=index < wide, other=0.0)
            total = total * factor[:, None]
        halves = tl.permute(tl.reshape(total, [2, tile, slots]), [1, 2, 0])
        gated, upper = tl.split(halves)
        value = gated / (1.0 + tl.exp(-gated)) * upper * weight[None, :]
        place = (block * (shared_tiles + entries) + entry) * slots + slot
        at = place[None, :] * widest + column[:, None]
        inside = live[None, :] & (column < wide)[:, None]
        tl.store(h + at, value.to(h.dtype.element_ty), mask=inside)


@triton.jit
def _scattered(part, spread, total, precision: tl.constexpr):
    """total [tile, rows] plus part [tile, slots] at the rows that spread [slots, rows] names.

    A product with a matrix of 0 and 1. 16-bit storage: in two parts, exact to 16 bits together.
    """
    if precision == "ieee":
        total = tl.dot(part, spread.to(tl.float32), total, input_precision=precision)
    else:
        high = part.to(tl.bfloat16)
        low = (part - high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(high, spread.to(tl.bfloat16), total)
        total = tl.dot(low, spread.to(tl.bfloat16), total)
    return total


@triton.jit
def down(
    h, expert_down, shared_down, expert_down_scale, shared_down_scale, expert, fill, member, count,
    y, n,
    hidden: tl.constexpr, width: tl.constexpr, shared_width: tl.constexpr, widest: tl.constexpr,
    rows: tl.constexpr, chunk: tl.constexpr, entries: tl.constexpr, shared_tiles: tl.constexpr,
    tile: tl.constexpr, slots: tl.constexpr, step: tl.constexpr, words: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """y [n, hidden]: the sum of all entries of h times their expert's down matrix, in list order.

    One loop over (entry, k step) keeps the weight stream unbroken from one expert to the next.
    Without `member`, `fill` holds the bits that `gate` writes and slot r is row r; with it, an
    entry's slots are scattered to their rows. Grid: cdiv(hidden, tile), 1, chunks.
    """
    block = tl.program_id(2).to(tl.int64)
    used = shared_tiles + tl.load(count + block)
    slot = tl.arange(0, slots)
    k = tl.arange(0, step)
    line = tl.program_id(0) * tile + tl.arange(0, tile)
    steps: tl.constexpr = (widest + step - 1) // step
    left = n - block * chunk
    total = tl.zeros([tile, rows], tl.float32)
    broken = tl.zeros([tile, rows], tl.float32)
    # What the list says of a turn is read one turn ahead: the weight stream does not wait for it.
    which = tl.full((), 0, tl.int32)
    word = tl.full((), 0, tl.int32)
    more = tl.full((), 0, tl.int32)
    for turn in range(0, used * steps):
        entry = turn // steps
        column = turn % steps * step + k
        shared = entry < shared_tiles
        own = shared & (entry * slots + slot < left)
        if member is None:
            taken = (tl.where(slot < 32, word, more) >> slot % 32) & 1 != 0
        else:
            taken = slot < word
        live = own | taken
        wide = tl.where(shared, shared_width, width)
        base = tl.where(shared, shared_down, expert_down + which.to(tl.int64) * (hidden * width))
        a_at = base + line.to(tl.int64)[:, None] * wide + column[None, :]
        place = (block * (shared_tiles + entries) + entry) * slots + slot
        b_at = h + place[None, :] * widest + column[:, None]
        if widest % step or shared_width != width or hidden % tile:
            inside = column < wide
            a = tl.load(a_at, mask=(line < hidden)[:, None] & inside[None, :], other=0.0)
            b = tl.load(b_at, mask=live[None, :] & inside[:, None], other=0.0)
        else:
            a = tl.load(a_at)
            b = tl.load(b_at, mask=live[None, :], other=0.0)
        if expert_down_scale is not None:
            factors = tl.where(
                shared, shared_down_scale, expert_down_scale + which.to(tl.int64) * hidden
            )
            factor = tl.load(factors + line, mask=line < hidden, other=0.0)
        if member is None:
            if expert_down_scale is None:
                total = tl.dot(a, b, total, input_precision=precision)
            else:
                # One expert's scales are not the next one's: its product stands alone.
                part = tl.dot(a.to(b.dtype), b, input_precision=precision)
                total += part * factor[:, None]
        else:
            listed = block * entries + entry - shared_tiles
            mine = tl.load(member + listed * slots + slot, mask=taken, other=0)
            target = tl.where(shared, entry * slots + slot, mine)
            spread = (target[:, None] == tl.arange(0, rows)[None, :]) & live[:, None]
            part = tl.dot(a.to(b.dtype), b, input_precision=precision)
            if expert_down_scale is not None:
                part = part * factor[:, None]
            # 0 times NaN would reach the tile's other rows: what is not finite is only counted.
            finite = tl.abs(part) < float("inf")
            total = _scattered(tl.where(finite, part, 0.0), spread, total, precision)
            wrong = tl.where(finite, 0.0, 1.0).to(h.dtype.element_ty)
            broken = tl.dot(wrong, spread.to(wrong.dtype), broken, input_precision=precision)
        following = (turn + 1) // steps
        is_listed = (following >= shared_tiles) & (following < used)
        listed = block * entries + following - shared_tiles
        which = tl.load(expert + listed, mask=is_listed, other=0)
        word = tl.load(fill + listed * words, mask=is_listed, other=0)
        if words == 2:
            more = tl.load(fill + listed * words + 1, mask=is_listed, other=0)
    if member is not None:
        total = tl.where(broken > 0.0, float("nan"), total)
    row = block * chunk + tl.arange(0, rows)
    inside = (row < n)[None, :] & (line < hidden)[:, None]
    at = row[None, :] * hidden + line[:, None]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)
