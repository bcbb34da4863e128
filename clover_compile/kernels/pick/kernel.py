"""Response processing and the choice of a token, without writing logits back.

`scan_columns` reduces tiles of columns, `choose` merges a row's tiles and, if a temperature is
asked for, draws: it searches the sorted order by counts and masses above a threshold instead of
sorting. Entries of `scalars` are those of the reference's SCALARS, in order.
"""

import triton
import triton.language as tl


@triton.jit
def ramp(scalars, position, first: tl.constexpr):
    """strength * clip((position - start) / max(window, 1), 0, 1); the three stand from `first`."""
    strength, start = tl.load(scalars + first), tl.load(scalars + first + 1)
    window = tl.maximum(tl.load(scalars + first + 2), 1.0)
    return tl.minimum(tl.maximum((position - start) / window, 0.0), 1.0) * strength


@triton.jit
def penalise(
    x, ids, start, row, counts, scalars, draft, running,
    columns: tl.constexpr, tile: tl.constexpr, drafts: tl.constexpr,
):  # fmt: skip
    """Penalties of a tile of columns from `start`; with `running`, draft[0..row) counts too."""
    presence, frequency = tl.load(scalars), tl.load(scalars + 1)
    repetition = tl.load(scalars + 2)
    if (presence != 0.0) | (frequency != 0.0) | (repetition != 1.0):
        count = tl.load(counts + ids, mask=ids < columns, other=0)
        if running:
            at = tl.arange(0, drafts)
            ahead = tl.load(draft + at, mask=at < row, other=-1)
            if tl.sum(((ahead >= start) & (ahead < start + tile)).to(tl.int32), 0) > 0:
                for i in range(row):
                    count += (ids == tl.load(draft + i)).to(tl.int32)
        seen = count > 0
        x = tl.where(seen, x - (count.to(tl.float32) * frequency + presence), x)
        x = tl.where(seen, tl.where(x < 0.0, x * repetition, x / repetition), x)
    return x


@triton.jit
def processed(
    logits, counts, row0, close_open, scalars, draft, running, allow, start, row,
    columns: tl.constexpr, stride: tl.constexpr, allow_stride: tl.constexpr,
    mask_id: tl.constexpr, stop_ids: tl.constexpr, stops: tl.constexpr,
    think_end_id: tl.constexpr, tile: tl.constexpr, drafts: tl.constexpr,
):  # fmt: skip
    """Processed logits [tile] of a row from column `start`; -inf past the last column.

    stop_ids: `stops` ids of 32 bits each, the first lowest; think_end_id -1: none; drafts: power of
    two >= n. Ids that stand alone are looked at only in the tile that holds them.
    """
    ids = start + tl.arange(0, tile)
    inside = ids < columns
    wide = row.to(tl.int64)
    x = tl.load(logits + wide * stride + ids, mask=inside, other=float("-inf"))
    if (mask_id >= start) & (mask_id < start + tile):
        x = tl.where((ids == mask_id) & (x == x), float("-inf"), x)
    if allow is not None:
        allowed = tl.load(allow + wide * allow_stride + ids, mask=inside, other=0).to(tl.int1)
        x = tl.where(allowed | (x != x), x, float("-inf"))
    on = tl.load(running).to(tl.int1)
    x = penalise(x, ids, start, row, counts, scalars, draft, on, columns, tile, drafts)
    position = (tl.load(row0) + row).to(tl.float32)
    for i in tl.static_range(stops):
        stop = (stop_ids >> (32 * i)) & 0xFFFFFFFF
        if (stop >= start) & (stop < start + tile):
            x += tl.where(ids == stop, ramp(scalars, position, 3), 0.0)
    # No tile holds the id -1.
    if (think_end_id >= start) & (think_end_id < start + tile):
        at = tl.arange(0, drafts)
        ahead = tl.load(draft + at, mask=(at < row) & on, other=-1)
        thought = tl.sum((ahead == think_end_id).to(tl.int32), 0) > 0
        close = tl.load(close_open).to(tl.int1) & (thought == 0)
        think = tl.where(close, ramp(scalars, position, 6), 0.0)
        x += tl.where(ids == think_end_id, think, 0.0)
    return ids, x


@triton.jit
def scan_columns(
    logits, counts, row0, close_open, scalars, draft, running, allow,
    top, best, mass, moment, draft_logit,
    columns: tl.constexpr, stride: tl.constexpr, allow_stride: tl.constexpr,
    mask_id: tl.constexpr, stop_ids: tl.constexpr, stops: tl.constexpr,
    think_end_id: tl.constexpr, tile: tl.constexpr, drafts: tl.constexpr, splits: tl.constexpr,
):  # fmt: skip
    """One row's tile of columns: its maximum, the lowest id of it, sum e and sum (x - max) e.

    e = exp(x - max). top, mass, moment: fp32 [n, tiles]; best: i32 [n, tiles]; draft_logit: fp32
    [n], the processed logit of the row's draft. A NaN is left out of the maximum, and the sum
    carries it. Grid: n, tiles.
    """
    row, split = tl.program_id(0), tl.program_id(1)
    ids, x = processed(
        logits, counts, row0, close_open, scalars, draft, running, allow, split * tile, row,
        columns, stride, allow_stride, mask_id, stop_ids, stops, think_end_id, tile, drafts,
    )  # fmt: skip
    known = tl.where(x == x, x, float("-inf"))
    peak = tl.max(known, 0)
    shift = tl.where(peak > float("-inf"), peak, 0.0)
    e = tl.exp(x - shift)
    at = row * splits + split
    tl.store(top + at, peak)
    tl.store(best + at, tl.min(tl.where(known == peak, ids, 2147483647), 0))
    tl.store(mass + at, tl.sum(e, 0))
    tl.store(moment + at, tl.sum(tl.where(e > 0.0, (x - shift) * e, 0.0), 0))
    meant = tl.load(draft + row)
    if (meant >= split * tile) & (meant < split * tile + tile):
        tl.store(draft_logit + row, tl.sum(tl.where(ids == meant, x, 0.0), 0))


@triton.jit
def ordered(x):
    """fp32 as uint32 that sort alike; both zeros give one key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def value_of(key):
    """The fp32 whose `ordered` key this is."""
    bits = key.to(tl.int32, bitcast=True)
    return (bits ^ (~(bits >> 31) | -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def draw(
    logits, counts, row0, close_open, scalars, draft, running, allow, noise, row, peak,
    columns: tl.constexpr, stride: tl.constexpr, allow_stride: tl.constexpr,
    mask_id: tl.constexpr, stop_ids: tl.constexpr, stops: tl.constexpr,
    think_end_id: tl.constexpr, tile: tl.constexpr, drafts: tl.constexpr,
):  # fmt: skip
    """The id drawn for a row and its processed logit, without sorting.

    Up to three searches find a place in the order by value (descending), then id: the top-k cut
    (weights 1), where top-p ends, and the draw (weights exp((x - peak) / T) of what is above the
    cut). Each finds the largest key whose total weight from there up passes a target, four bits per
    reading of the row; among the columns of that key the lowest ids come first. Masses are fp32
    sums in a fixed order, not the reference's: a bound within about 1e-6 of a column's edge may
    fall to its neighbour. Counts are exact below 2^24 columns.
    """
    temperature = tl.maximum(tl.load(scalars + 9), 1e-6)
    top_k, top_p = tl.load(scalars + 10), tl.load(scalars + 11)
    digits = tl.arange(0, 16)
    cut = tl.full([], 0, tl.uint32)
    key = tl.full([], 0, tl.uint32)
    kept = tl.full([], -1.0, tl.float32)
    members = tl.full([], 1.0, tl.float32)
    for search in range(3):
        bounded = (top_k >= 1.0) & (top_k < columns)
        if (search == 2) | ((search == 1) & (top_p < 1.0)) | ((search == 0) & bounded):
            key = tl.full([], 0, tl.uint32)
            above = tl.full([], 0.0, tl.float32)
            reached = tl.full([], 0.0, tl.float32)
            target = tl.full([], 0.0, tl.float32)
            for level in range(8):
                marks = key + (digits.to(tl.uint32) << (28 - 4 * level))
                sums = tl.zeros([16, tile], tl.float32)
                for start in range(0, columns, tile):
                    ids, x = processed(
                        logits, counts, row0, close_open, scalars, draft, running, allow, start,
                        row, columns, stride, allow_stride, mask_id, stop_ids, stops,
                        think_end_id, tile, drafts,
                    )  # fmt: skip
                    weight = tl.where(search == 0, 1.0, tl.exp((x - peak) / temperature))
                    found = ordered(x)
                    weight = tl.where((found >= cut) & (ids < columns), weight, 0.0)
                    sums += tl.where(found[None, :] >= marks[:, None], weight[None, :], 0.0)
                total = tl.sum(sums, 1)
                if level == 0:
                    all_of_it = tl.sum(tl.where(digits == 0, total, 0.0), 0)
                    kept = tl.where(kept < 0.0, all_of_it, kept)
                    target = tl.where(search == 0, top_k.to(tl.int32) - 1.0, top_p * all_of_it)
                    target = tl.where(search == 2, tl.load(noise + row) * kept, target)
                digit = tl.maximum(tl.sum((total > target).to(tl.int32), 0) - 1, 0)
                reached = tl.sum(tl.where(digits == digit, total, 0.0), 0)
                more = tl.sum(tl.where(digits == digit + 1, total, 0.0), 0)
                above = tl.where(digit < 15, more, above)
                key = tl.sum(tl.where(digits == digit, marks, 0), 0).to(tl.uint32)
            each = tl.exp((value_of(key) - peak) / temperature)
            members = tl.maximum(tl.floor((target - above) / each) + 1.0, 1.0)
            upto = tl.minimum(above + members * each, reached)
            kept = tl.where(reached > target, upto, reached)
            if search == 0:
                cut = key
                kept = tl.full([], -1.0, tl.float32)
    drawn, last = tl.full([], columns, tl.int32), tl.full([], 0, tl.int32)
    before = tl.full([], 0, tl.int32)
    for start in range(0, columns, tile):
        ids, x = processed(
            logits, counts, row0, close_open, scalars, draft, running, allow, start, row, columns,
            stride, allow_stride, mask_id, stop_ids, stops, think_end_id, tile, drafts,
        )  # fmt: skip
        alike = (ordered(x) == key) & (ids < columns)
        order = before + tl.cumsum(alike.to(tl.int32), 0)
        hit = alike & (order.to(tl.float32) == members)
        drawn = tl.minimum(drawn, tl.min(tl.where(hit, ids, columns), 0))
        last = tl.maximum(last, tl.max(tl.where(alike, ids, 0), 0))
        before += tl.sum(alike.to(tl.int32), 0)
    return tl.where(drawn < columns, drawn, last), value_of(key)


@triton.jit
def choose(
    logits, counts, row0, close_open, scalars, draft, running, allow, noise,
    top, best, mass, moment, draft_logit, ids, confidence, p_draft, entropy,
    columns: tl.constexpr, stride: tl.constexpr, allow_stride: tl.constexpr,
    mask_id: tl.constexpr, stop_ids: tl.constexpr, stops: tl.constexpr,
    think_end_id: tl.constexpr, tile: tl.constexpr, drafts: tl.constexpr,
    splits: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """Merges a row's `splits` tiles (padded: power of two above), draws if a temperature is asked
    for, and writes what pick returns, each [n]. Grid: n."""
    row = tl.program_id(0)
    at = tl.arange(0, padded)
    place, there = row * splits + at, at < splits
    tops = tl.load(top + place, mask=there, other=float("-inf"))
    ids_of = tl.load(best + place, mask=there, other=2147483647)
    masses = tl.load(mass + place, mask=there, other=0.0)
    moments = tl.load(moment + place, mask=there, other=0.0)
    peak = tl.max(tops, 0)
    token = tl.min(tl.where(tops == peak, ids_of, 2147483647), 0)
    gap = tl.where(tops > float("-inf"), tops - peak, 0.0)
    share = tl.where(tops > float("-inf"), tl.exp(gap), 0.0)
    total = tl.sum(masses * share, 0)
    spread = tl.sum((moments + gap * masses) * share, 0)
    logit = peak
    if tl.load(scalars + 9) > 0.0:
        token, logit = draw(
            logits, counts, row0, close_open, scalars, draft, running, allow, noise, row, peak,
            columns, stride, allow_stride, mask_id, stop_ids, stops, think_end_id, tile, drafts,
        )  # fmt: skip
    meant = tl.load(draft + row)
    drafted = tl.load(draft_logit + row, mask=meant >= 0, other=float("-inf"))
    tl.store(ids + row, token.to(tl.int64))
    tl.store(confidence + row, tl.exp(logit - peak) / total)
    tl.store(p_draft + row, tl.where(meant >= 0, tl.exp(drafted - peak) / total, 0.0))
    tl.store(entropy + row, tl.log(total) - spread / total)
