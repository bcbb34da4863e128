"""A profile as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import Any

from clover_compile.runtime.terminal import one_line

WORDS = {"unfused": "unfused graph", "eager": "eager model", "against": "other bundle"}


def render(found: dict[str, Any]) -> str:
    """The whole profile."""
    body = [*_calls(found), *_passes(found), *_costs(found), *_workload(found)]
    alarm = wrap(f"WARNING: {one_line(found['warning'])}", 110) if found["warning"] else []
    parts = [_head(found), *alarm, *body, *alarm]
    notes = [f"note: {one_line(note)}" for note in found["notes"]]
    return "\n".join([*parts, *notes])


def _head(found: dict[str, Any]) -> str:
    name = f"{found['model']}  {found['target']}  {found['bundle'][:16]}\n"
    if found["kind"] == "modelled":
        return f"{name}MODELLED, NOT RUN; {found['prefix']} rows before every call"
    m = found["machine"]
    return (
        f"{name}"
        f"{m['processor']}, {found['threads']} of {m['cores']} cores, load {found['load']:.1f}; "
        f"{found['rounds']} rounds, {found['prefix']} rows before every call\n"
        "ms: median (p10-p90) of the rounds; ratios are medians of each round's own"
    )


def _calls(found: dict[str, Any]) -> Iterator[str]:
    for call in found.get("units", {}).get("calls", []):
        ms, near = call["ms"], call["of floor"]
        yield ""
        size = f"{call['bytes'] / 1e6:.2f} MB at {call['GB/s']:.0f} GB/s"
        if call["bound"] == "product":
            size = f"{call['flop'] / 1e9:.3f} GFLOP at {call['GFLOP/s']:.0f} GFLOP/s"
        yield (
            f"{call['name']}: {span(ms['bundle'], 2)} ms, {near['median']:.1f} x its floor of "
            f"{ms['floor']['median']:.2f} ms ({size})"
        )
        for name, ratio in call["speedup"].items():
            faster = f"{span(ratio, 2)} x as fast as the {WORDS[name]}"
            yield f"    {faster} ({ms[name]['median']:.2f} ms)"
        yield (
            f"    {'op':<16} {'calls':>5} {'kernels':>7} {'ms':>22} {'share':>6} {'MB':>9} "
            f"{'GFLOP':>7} {'floor ms':>8} {'x floor':>7} {'unfused':>9} {'speedup':>7}"
        )
        for op in call["ops"]:
            near = f"{op['of floor']:.1f}" if op["of floor"] else "-"
            before = f"{op['unfused']['ms']['median']:.3f}" if op["unfused"] else "-"
            faster = f"{op['speedup']['median']:.2f}" if op["speedup"] else "-"
            yield (
                f"    {op['op']:<16} {op['count']:>5} {op['kernels']:>7} {span(op['ms'], 3):>22} "
                f"{op['share']:>6.1%} {op['bytes'] / 1e6:>9.3f} {op['flop'] / 1e9:>7.3f} "
                f"{op['floor ms']:>8.3f} {near:>7} {before:>9} {faster:>7}"
            )
        total = f"    all ops are {call['sum of ops / pass']['median']:.0%} of the pass"
        before = call.get("unfused sum of ops / pass")
        yield total + (f", unfused {before['median']:.0%} of theirs" if before else "")


def _passes(found: dict[str, Any]) -> Iterator[str]:
    for one in found.get("passes", []):
        yield ""
        yield (
            f"{one['pass']}, {one['rows']} rows: {one['modelled ms']:.3f} ms modelled, "
            f"{one['launches']} launches, {one['flop'] / 1e9:.3f} GFLOP"
        )
        heads = f"{'launches':>8} {'MB at least':>17} {'floor ms':>8} {'GFLOP':>8} {'ms':>8}"
        yield f"    {'op':<16} {'calls':>5} {heads} {'share':>6}"
        for op in one["ops"]:
            low, high = (f"{x / 1e6:.3f}" for x in op["bytes"])
            size = low if low == high else f"{low}-{high}"
            floor = sum(op["floor ms"]) / 2
            yield (
                f"    {op['op']:<16} {op['count']:>5} {op['launches']:>8} {size:>17} "
                f"{floor:>8.4f} {op['flop'] / 1e9:>8.3f} {op['modelled ms']:>8.4f} "
                f"{op['share']:>6.1%}"
            )


def _costs(found: dict[str, Any]) -> Iterator[str]:
    even = found["break even"]
    yield ""
    yield f"costs ({found['costs']['kind']}), ms by rows"
    for unit, points in found["costs"]["costs"].items():
        yield f"    {unit:<8} " + "  ".join(f"{rows}: {1e3 * cost:.2f}" for rows, cost in points)
    yield f"    logits of a commit's last row: {1e3 * found['costs']['head']:.2f} more"
    per_pass = even["tokens per pass"]
    words = "never" if per_pass is None else f"{per_pass:.1f} tokens per pass"
    yield f"blocks pay from {words}"
    rounds = ", ".join(f"{tokens:.1f} at {w}" for w, tokens in even["tokens per round"].items())
    yield f"self-speculation pays from so many tokens per round: {rounds}"


def _workload(found: dict[str, Any]) -> Iterator[str]:
    work = found.get("workload")
    if work is None:
        return
    yield ""
    yield (
        f"{'way':<26} {'right':>6} {'causal':>6} {'/pass':>6} {'/round':>6} {'ms/answer':>18} "
        f"{'tokens/s':>8} {'faster':>16} {'cost':>6}"
    )
    causal = work["ways"][0]["cost per token"]
    for row in [*work["ways"], *work["auto"]]:
        if row is work["auto"][0]:
            yield "once more, beside auto with the costs found:"
        right = "-" if row["right"] is None else f"{row['right']:.0%}"
        counts = [row[f"tokens per {what}"] for what in ("pass", "round")]
        per_pass, per_round = (f"{x:.1f}" if x else "-" for x in counts)
        yield (
            f"{row['way']:<26} {right:>6} {row['as causal']:>6.0%} {per_pass:>6} {per_round:>6} "
            f"{span(row['ms per answer'], 0):>18} {row['tokens per second']:>8.0f} "
            f"{span(row['faster than causal'], 2):>16} {row['cost per token'] / causal:>6.2f}"
        )
    yield "right: answers as expected; causal: with the tokens of causal decoding;"
    yield "faster: tokens per second over causal's, message by message; cost: of a token by the"
    yield "cost table, causal = 1"
    best = work["winner"]
    yield _winner("fastest that is right as often as causal decoding", best["no worse"])
    yield _winner("fastest with its very text", best["same text"])
    if best["of all"]["way"] != best["no worse"]["way"]:
        yield _winner("fastest, right or not", best["of all"])


def _winner(what: str, best: dict[str, Any]) -> str:
    return f"{what}: {best['way']}, {span(best['faster than causal'], 2)} x causal decoding"


def span(x: dict[str, float], digits: int) -> str:
    """A median and its spread."""
    return f"{x['median']:.{digits}f} ({x['p10']:.{digits}f}-{x['p90']:.{digits}f})"
