"""The page: what is drawn of a profile, in which order, with the profile itself embedded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from clover_compile.profiling.html import plots
from clover_compile.profiling.html.plots import CAUSAL, Bar, Cell, Point
from clover_compile.profiling.html.svg import printable
from clover_compile.profiling.text import WORDS, span

KINDS = {"causal": CAUSAL, "denoise": "denoise", "self-speculate": "draft", "auto": "auto"}
"""First word of a way -> class of its points."""


def render(found: Mapping[str, Any]) -> str:
    """The whole page; nothing in it is taken from elsewhere, and all text is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=StrictUndefined,
    )  # fmt: skip
    environment.filters |= {"span": span, "printable": printable}
    template = environment.get_template("report.html.jinja")
    work = found.get("workload")
    return template.render(
        found=found, work=work, words=WORDS, data=embedded(found), kind_of=kind_of,
        calls=[_call(call) for call in found.get("units", {}).get("calls", [])],
        passes=[_pass(one) for one in found.get("passes", [])],
        speedups=_speedups(found), costs=_costs(found),
        ways=_ways(work) if work else None, blocks=_blocks(work) if work else None,
    )  # fmt: skip


def embedded(value: Any) -> Markup:
    """JSON for a script element: no character of it can end the element or begin another."""
    text = json.dumps(value, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def kind_of(way: str) -> str:
    """The class of a way's mark."""
    return KINDS.get(way.split()[0], "auto")


def _svg(text: str) -> Markup:
    # Written by ElementTree, which escapes.
    return Markup(text)


def _bar(name: str, x: Mapping[str, float], floor: float | None = None) -> Bar:
    return Bar(name, x["median"], x["p10"], x["p90"], floor)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call and its plot."""
    shown = [
        op for op in call["ops"] if op["ms"]["median"] > 0.002 * call["ms"]["bundle"]["median"]
    ]
    rows = [_bar(op["op"], op["ms"], op["floor ms"]) for op in shown]
    title = f"{call['name']}: milliseconds by op, with floors"
    return {**call, "plot": _svg(plots.bars(title, rows, "ms")), "faster": _faster(call, shown)}


def _faster(call: Mapping[str, Any], shown: Sequence[Mapping[str, Any]]) -> Markup | None:
    """The plot of the ops against what they replaced."""
    rows = [_bar(op["op"], op["speedup"]) for op in shown if op["speedup"]]
    if not rows:
        return None
    title = f"{call['name']}: speed of every op over the unfused nodes it replaced"
    return _svg(plots.bars(title, rows, "times as fast", mark=1.0))


def _pass(one: Mapping[str, Any]) -> dict[str, Any]:
    """A modelled pass and its plot."""
    times = [(op["op"], op["modelled ms"]) for op in one["ops"]]
    title = f"{one['pass']}: modelled milliseconds by op"
    plot = plots.bars(title, [Bar(name, ms, ms, ms) for name, ms in times], "ms, modelled")
    return {**one, "plot": _svg(plot)}


def _speedups(found: Mapping[str, Any]) -> list[tuple[str, Markup]]:
    """A plot for every rival."""
    made = []
    calls = found.get("units", {}).get("calls", [])
    for rival, words in WORDS.items():
        rows = [_bar(c["name"], c["speedup"][rival]) for c in calls if rival in c["speedup"]]
        if rows:
            title = f"speed of the bundle over the {words}, by call"
            made.append((words, _svg(plots.bars(title, rows, "times as fast", mark=1.0))))
    return made


def _costs(found: Mapping[str, Any]) -> Markup:
    units = {
        unit: [(rows, 1e3 * cost) for rows, cost in points]
        for unit, points in found["costs"]["costs"].items()
        if points
    }
    return _svg(plots.lines("milliseconds of a call by its rows", units, "rows (log), ms (log)"))


def _ways(work: Mapping[str, Any]) -> Markup:
    rows: Sequence[Mapping[str, Any]] = work["ways"]
    judged = all(row["right"] is not None for row in rows)
    quality = "right" if judged else "as causal"
    points = [
        Point(row["way"], row["tokens per second"], row[quality], kind_of(row["way"]))
        for row in rows
    ]
    up = "right answers" if judged else "answers equal to causal decoding"
    return _svg(plots.scatter("quality against speed", points, "tokens per second", up))


def _blocks(work: Mapping[str, Any]) -> dict[str, Any]:
    """How answers came about."""
    fills, climbs = [], {}
    for number, answer in enumerate(work["answers"]):
        climbs[f"{answer['way']}, answer {number % 3 + 1}"] = _climb(answer["steps"])
        if answer["steps"][0]["kind"] == "denoise":
            starts = [step["start"] for step in answer["steps"]]
            longest = max(starts, key=starts.count)
            steps = [step for step in answer["steps"] if step["start"] == longest]
            title = f"the block from token {longest + 1} on, pass by pass"
            fills.append({**answer, "plot": _svg(plots.fill(title, _cells(steps)))})
    passes, rounds = work["rows fixed by a pass"], work["tokens of a round"]
    return {
        "fills": fills,
        "climb": _svg(plots.climbs("tokens after each step", climbs, "passes, rounds", "tokens")),
        "passes": _svg(plots.histogram("rows fixed by a pass", passes, "rows fixed by a pass")),
        "rounds": _svg(plots.histogram("tokens of a round", rounds, "tokens of a round")),
    }


def _climb(steps: Sequence[Mapping[str, Any]]) -> list[int]:
    """Tokens that stand after each step; a draft alone settles none."""
    return [step["start"] + sum(step["fixed"]) for step in steps if step["kind"] != "draft"]


def _cells(steps: Sequence[Mapping[str, Any]]) -> list[list[Cell]]:
    made, before = [], [False] * len(steps[0]["fixed"])
    for step in steps:
        columns = zip(step["pieces"], step["fixed"], before, step["confidence"], strict=True)
        made.append([Cell(text, fixed, fixed and not was, c) for text, fixed, was, c in columns])
        before = step["fixed"]
    return made
