"""Routing in a block coreset, grouped SwiGLU experts and the shared expert.

At most 64 rows: `gate`, `up`, `down`; every expert in use is one entry of a list, and its rows are
the block's own, masked. More rows: `choose`, `group`, `up`, `down`; each chunk of rows has a list
of its own whose entries are tiles of an expert's rows, and `down` scatters them back. The list
starts with the shared expert's tiles. An entry's activations are scaled by the rows' weights before
they are rounded, so that `down` is one long sum over entries in the order of the list.
"""

import triton
import triton.language as tl


@triton.jit
def _by_row(values):
    """[rows] against [parts, rows, lanes]."""
    return tl.expand_dims(tl.expand_dims(values, 1), 0)


@triton.jit
def _by_column(values, parts: tl.constexpr, lanes: tl.constexpr):
    """[columns] against [parts, rows, lanes]."""
    return tl.expand_dims(tl.reshape(values, [parts, lanes]), 1)


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
    """Per column, the probability it has in the live rows whose top_k it is in."""
    member = _best(logits, real, column, top_k, narrow)
    total = tl.sum(tl.where(member & live, _softmax(logits, real), 0.0), 1)
    return tl.reshape(total, [total.numel])


@triton.jit
def _coreset(total, column, top_p: tl.constexpr):
    """Mask of the experts kept: descending total, ties to the lower id, mass ahead < top_p."""
    bits = total.to(tl.int32, bitcast=True)  # totals are not negative: ordered as their bits
    ordered = tl.sort(bits, descending=True)
    sorted_total = ordered.to(tl.float32, bitcast=True)
    mass = sorted_total / tl.maximum(tl.sum(sorted_total, 0), 1e-9)
    held = (tl.cumsum(mass, 0) - mass < top_p) | (column == 0)
    last = tl.min(tl.where(held, ordered, 0x7FFFFFFF), 0)
    ties = tl.sum(held.to(tl.int32), 0) - tl.sum((bits > last).to(tl.int32), 0)
    tied = (bits == last).to(tl.int32)
    return (bits > last) | ((tied > 0) & (tl.cumsum(tied, 0) <= ties))


@triton.jit
def gate(
    router, kept, expert, share, bits, count, n,
    experts: tl.constexpr, parts: tl.constexpr, lanes: tl.constexpr, rows: tl.constexpr,
    stride: tl.constexpr, top_k: tl.constexpr, top_p: tl.constexpr, block: tl.constexpr,
    narrow: tl.constexpr, words: tl.constexpr,
):  # fmt: skip
    """The experts that n <= rows rows use, in ascending id, and the rows' weights. Grid: 1.

    router: rows of `experts` logits, stride apart. Writes expert i32 [count], bits i32 [count,
    words] (bit r % 32 of word r // 32: row r is routed there), share fp32 [n, experts] (0: not
    routed), and to kept (None: nobody asks) the size of the coreset. Tiles are [parts, rows, lanes]
    of parts * lanes >= experts columns: a row then lies in the registers of one warp.
    """
    columns: tl.constexpr = parts * lanes
    every = tl.arange(0, columns)
    column = _by_column(every, parts, lanes)
    row = _by_row(tl.arange(0, rows))
    live = row < n
    real = column < experts
    inside = live & real
    logits = tl.load(router + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    allowed = real
    size = experts
    if block:
        total = _totals(logits, real, live, column, top_k, narrow)
        core = _coreset(total, every, top_p) & (every < experts)
        size = tl.sum(core.to(tl.int32), 0)
        allowed = _by_column(core.to(tl.int32), parts, lanes) > 0
    if kept is not None:
        tl.store(kept, size)
    weight = _softmax(logits, _best(logits, allowed, column, top_k, narrow))
    tl.store(share + row * experts + column, weight, mask=inside)
    routed = (weight > 0.0) & live
    found = tl.zeros([columns], tl.int32)
    for word in tl.static_range(words):
        mine = tl.where(routed & (row // 32 == word), 1 << row % 32, 0)
        found = found | tl.reshape(tl.sum(mine, 1), [columns])
    used = (found != 0).to(tl.int32)
    entry = tl.cumsum(used, 0) - used
    tl.store(count, tl.sum(used, 0))
    tl.store(expert + entry, every, mask=used > 0)
    for word in tl.static_range(words):
        mine = tl.where(routed & (row // 32 == word), 1 << row % 32, 0)
        found = tl.reshape(tl.sum(mine, 1), [columns])
        tl.store(bits + entry * words + word, found, mask=used > 0)


@triton.jit
def choose(
    router, kept, share, n,
    experts: tl.constexpr, parts: tl.constexpr, lanes: tl.constexpr, rows: tl.constexpr,
    stride: tl.constexpr, top_k: tl.constexpr, top_p: tl.constexpr, block: tl.constexpr,
    narrow: tl.constexpr,
):  # fmt: skip
    """share fp32 [n, experts]: every row's weight of every expert, 0 where not routed.

    Grid: 1 if the rows share a coreset, else cdiv(n, rows); otherwise as `gate`.
    """
    columns: tl.constexpr = parts * lanes
    every = tl.arange(0, columns)
    column = _by_column(every, parts, lanes)
    row = _by_row(tl.arange(0, rows))
    real = column < experts
    allowed = real
    size = experts
    start = tl.program_id(0) * rows
    stop = start + rows
    if block:
        start = 0
        stop = n
        total = tl.zeros([columns], tl.float32)
        for r in range(0, n, rows):
            at = (r + row).to(tl.int64) * stride + column
            live = r + row < n
            logits = tl.load(router + at, mask=live & real, other=0.0).to(tl.float32)
            total += _totals(logits, real, live, column, top_k, narrow)
        core = _coreset(total, every, top_p) & (every < experts)
        size = tl.sum(core.to(tl.int32), 0)
        allowed = _by_column(core.to(tl.int32), parts, lanes) > 0
    if kept is not None:
        if tl.program_id(0) == 0:
            tl.store(kept, size)
    for r in range(start, stop, rows):
        at = (r + row).to(tl.int64)
        inside = (r + row < n) & real
        logits = tl.load(router + at * stride + column, mask=inside, other=0.0).to(tl.float32)
        weight = _softmax(logits, _best(logits, allowed, column, top_k, narrow))
        tl.store(share + at * experts + column, weight, mask=inside)


@triton.jit
def group(
    share, expert, fill, member, weight, count, n,
    experts: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr, chunk: tl.constexpr,
    slots: tl.constexpr, entries: tl.constexpr,
):  # fmt: skip
    """Each chunk's rows by expert, in tiles of `slots`; ascending experts, ascending rows.

    share: as `choose` writes it. Per chunk: count i32 [1] tiles, at most `entries`; expert, fill
    i32 [entries]: whose tile, how many of its slots are taken; member i32 and weight fp32
    [entries, slots]: the row within the chunk and its weight. Grid: cdiv(n, chunk).
    """
    begin = tl.program_id(0).to(tl.int64) * chunk
    share += begin * experts
    list_at = tl.program_id(0).to(tl.int64) * entries
    expert += list_at
    fill += list_at
    member += list_at * slots
    weight += list_at * slots
    left = n - begin
    row = tl.arange(0, rows)[:, None]
    column = tl.arange(0, columns)
    real = (column < experts)[None, :]
    taken = tl.zeros([columns], tl.int32)
    for r in range(0, chunk, rows):
        at = r + row
        value = tl.load(
            share + at * experts + column[None, :], mask=(at < left) & real, other=0.0
        )
        taken += tl.sum((value > 0.0).to(tl.int32), 0)
    tiles = (taken + slots - 1) // slots
    first = tl.cumsum(tiles, 0) - tiles
    tl.store(count + tl.program_id(0), tl.sum(tiles, 0))
    for tile in range(chunk // slots):
        has = tile < tiles
        tl.store(expert + first + tile, column, mask=has)
        tl.store(fill + first + tile, tl.minimum(taken - tile * slots, slots), mask=has)
    seen = first * slots
    for r in range(0, chunk, rows):
        at = r + row
        value = tl.load(
            share + at * experts + column[None, :], mask=(at < left) & real, other=0.0
        )
        routed = value > 0.0
        one = routed.to(tl.int32)
        slot = seen[None, :] + tl.cumsum(one, 0) - one
        tl.store(member + slot, at + column[None, :] * 0, mask=routed)
        tl.store(weight + slot, value, mask=routed)
        seen += tl.sum(one, 0)


@triton.jit
def up(
    x, shared_gate, gate_up, shared_gate_up, expert, share, fill, member, count, h, n,
    experts: tl.constexpr, hidden: tl.constexpr, width: tl.constexpr, shared_width: tl.constexpr, widest: tl.constexpr,
    x_stride: tl.constexpr, gate_stride: tl.constexpr, chunk: tl.constexpr, entries: tl.constexpr,
    shared_tiles: tl.constexpr, tile: tl.constexpr, slots: tl.constexpr, step: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """h [chunks, shared_tiles + entries, slots, widest] = weight * silu(gate) * up, taken slots.

    Weights stand on the M side: `tile` gate rows above the `tile` up rows that belong to them.
    Without `member`, slot r is row r, routed where its share is not 0. Grid: cdiv(widest, tile),
    any number of programs that share the entries, chunks.
    """
    at_chunk = tl.program_id(2).to(tl.int64)
    used = shared_tiles + tl.load(count + at_chunk)
    slot = tl.arange(0, slots)
    half = tl.arange(0, 2 * tile)
    k = tl.arange(0, step)
    for entry in range(tl.program_id(1), used, tl.num_programs(1)):
        shared = entry < shared_tiles
        listed = at_chunk * entries + entry - shared_tiles
        which = tl.load(expert + listed, mask=entry >= shared_tiles, other=0).to(tl.int64)
        row = at_chunk * chunk + entry * slots + slot
        own = shared & (row < n)
        opened = tl.load(shared_gate + row * gate_stride, mask=own, other=0.0).to(tl.float32)
        weight = 1.0 / (1.0 + tl.exp(-opened))
        if member is None:
            listed_row = (slot < n) & (entry >= shared_tiles)
            other = tl.load(share + slot * experts + which, mask=listed_row, other=0.0)
            taken = other > 0.0
            row = slot.to(tl.int64)
        else:
            full = tl.load(fill + listed, mask=entry >= shared_tiles, other=0)
            taken = slot < full
            other = tl.load(share + listed * slots + slot, mask=taken, other=0.0)
            mine = tl.load(member + listed * slots + slot, mask=taken, other=0)
            row = tl.where(shared, row, at_chunk * chunk + mine)
        weight = tl.where(shared, weight, other)
        live = own | taken
        wide = tl.where(shared, shared_width, width)
        index = tl.program_id(0) * tile + half % tile
        line = tl.where(half < tile, index, wide + index).to(tl.int64)
        base = tl.where(shared, shared_gate_up, gate_up + which * (2 * width * hidden))
        a_at = base + line[:, None] * hidden + k[None, :]
        b_at = x + row[None, :] * x_stride + k[:, None]
        total = tl.zeros([2 * tile, slots], tl.float32)
        for start in range(0, hidden, step):
            a_mask = index[:, None] < wide
            b_mask = live[None, :]
            if hidden % step:
                a_mask = a_mask & (start + k < hidden)[None, :]
                b_mask = b_mask & (start + k < hidden)[:, None]
            if width % tile or shared_width != width or hidden % step:
                a = tl.load(a_at + start, mask=a_mask, other=0.0)
            else:
                a = tl.load(a_at + start)
            b = tl.load(b_at + start, mask=b_mask, other=0.0)
            total = tl.dot(a, b, total, input_precision=precision)
        both = tl.permute(tl.reshape(total, [2, tile, slots]), [1, 2, 0])
        gated, upper = tl.split(both)
        value = gated / (1.0 + tl.exp(-gated)) * upper * weight[None, :]
        column = tl.program_id(0) * tile + tl.arange(0, tile)
        place = (at_chunk * (shared_tiles + entries) + entry) * slots + slot
        inside = live[None, :] & (column < wide)[:, None]
        tl.store(
            h + place[None, :] * widest + column[:, None], value.to(h.dtype.element_ty), mask=inside
        )


@triton.jit
def down(
    h, expert_down, shared_down, expert, fill, member, count, y, n,
    hidden: tl.constexpr, width: tl.constexpr, shared_width: tl.constexpr, widest: tl.constexpr,
    rows: tl.constexpr, chunk: tl.constexpr, entries: tl.constexpr, shared_tiles: tl.constexpr,
    tile: tl.constexpr, slots: tl.constexpr, step: tl.constexpr, words: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """y [n, hidden]: the sum of all entries of h times their expert's down matrix, in list order.

    One loop over (entry, k step) keeps the weight stream unbroken from one expert to the next.
    Without `member`, `fill` holds the bits that `gate` writes and slot r is row r; with it, an
    entry's slots are scattered to their rows by a product with a matrix of 0 and 1, in two parts of
    16 bits. Grid: cdiv(hidden, tile), 1, chunks.
    """
    at_chunk = tl.program_id(2).to(tl.int64)
    used = shared_tiles + tl.load(count + at_chunk)
    slot = tl.arange(0, slots)
    line = tl.program_id(0) * tile + tl.arange(0, tile)
    place = tl.arange(0, rows)
    k = tl.arange(0, step)
    steps: tl.constexpr = (widest + step - 1) // step
    left = n - at_chunk * chunk
    total = tl.zeros([tile, rows], tl.float32)
    # What the list says of a turn is read one turn ahead: the weight stream does not wait for it.
    which = tl.full((), 0, tl.int32)
    word = tl.full((), 0, tl.int32)
    more = tl.full((), 0, tl.int32)
    for turn in range(0, used * steps):
        entry = turn // steps
        column = turn % steps * step + k
        shared = entry < shared_tiles
        listed = at_chunk * entries + entry - shared_tiles
        wide = tl.where(shared, shared_width, width)
        base = tl.where(shared, shared_down, expert_down + which.to(tl.int64) * (hidden * width))
        own = shared & (entry * slots + slot < left)
        if member is None:
            taken = tl.where(slot < 32, word, more) >> slot % 32 & 1 != 0
        else:
            taken = slot < word
        live = own | taken
        a_mask = (column < wide)[None, :]
        b_mask = live[None, :]
        if widest % step or shared_width != width:
            b_mask = b_mask & (column < wide)[:, None]
        if hidden % tile:
            a_mask = a_mask & (line < hidden)[:, None]
        a_at = base + line.to(tl.int64)[:, None] * wide + column[None, :]
        if widest % step or shared_width != width or hidden % tile:
            a = tl.load(a_at, mask=a_mask, other=0.0)
        else:
            a = tl.load(a_at)
        at = (at_chunk * (shared_tiles + entries) + entry) * slots + slot
        b = tl.load(h + at[None, :] * widest + column[:, None], mask=b_mask, other=0.0)
        if member is None:
            total = tl.dot(a, b, total, input_precision=precision)
        else:
            part = tl.dot(a, b, input_precision=precision)
            mine = tl.load(member + listed * slots + slot, mask=taken, other=0)
            mine = tl.where(shared, entry * slots + slot, mine)
            spread = (mine[:, None] == place[None, :]) & live[:, None]
            if h.dtype.element_ty == tl.float32:
                spread = spread.to(tl.float32)
                total = tl.dot(part, spread, total, input_precision=precision)
            else:
                spread = spread.to(tl.bfloat16)
                high = part.to(tl.bfloat16)
                low = (part - high.to(tl.float32)).to(tl.bfloat16)
                total = tl.dot(high, spread, total)
                total = tl.dot(low, spread, total)
        following = (turn + 1) // steps
        ahead = at_chunk * entries + following - shared_tiles
        is_listed = (following >= shared_tiles) & (following < used)
        which = tl.load(expert + ahead, mask=is_listed, other=0)
        word = tl.load(fill + ahead * words, mask=is_listed, other=0)
        if words == 2:
            more = tl.load(fill + ahead * words + 1, mask=is_listed, other=0)
    row = at_chunk * chunk + place
    inside = (row < n)[None, :]
    if hidden % tile:
        inside = inside & (line < hidden)[:, None]
    tl.store(
        y + row[None, :] * hidden + line[:, None], total.to(y.dtype.element_ty), mask=inside
    )
