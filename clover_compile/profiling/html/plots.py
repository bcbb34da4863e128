"""The plots of a report, each a function from figures to a drawing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clover_compile.profiling.html.svg import CHARACTER, Drawing

WIDTH = 400
"""Of every plot, in the units of its labels: about what a phone shows unscaled."""

ROW, TOP, BOTTOM = 24.0, 8.0, 40.0


@dataclass(frozen=True)
class Bar:
    """A measured value, its spread, and the least it could be."""

    name: str
    value: float
    low: float
    high: float
    floor: float | None = None


def bars(title: str, rows: Sequence[Bar], unit: str, mark: float | None = None) -> str:
    """Horizontal bars with spread and floor; `mark`: a value worth a line, such as 1 for ratios."""
    left = 12 + CHARACTER * max((len(row.name) for row in rows), default=1)
    drawing = Drawing(WIDTH, TOP + ROW * len(rows) + BOTTOM, title)
    reach = [max(1.06 * row.value, row.floor or 0.0) for row in rows]
    top = max([*reach, mark or 0.0, 1e-12])
    scale = (WIDTH - left - 56) / top
    for x in ticks(top, 4):
        drawing.line(left + x * scale, TOP, left + x * scale, TOP + ROW * len(rows), "grid")
        drawing.text(left + x * scale, TOP + ROW * len(rows) + 16, f"{x:g}", "tick", "middle")
    drawing.text(WIDTH, TOP + ROW * len(rows) + 33, unit, "tick", "end")
    for i, row in enumerate(rows):
        y = TOP + i * ROW
        middle = y + ROW / 2
        tip = f"{row.name}: {row.value:.3g} ({row.low:.3g} to {row.high:.3g}) {unit}"
        drawing.text(left - 8, middle + 4, row.name, "label", "end")
        drawing.rect(left, y + 4, row.value * scale, ROW - 9, "bar", tip)
        high = min(row.high, top)
        drawing.line(left + row.low * scale, middle, left + high * scale, middle, "spread")
        if row.high > top:
            more = "\N{BLACK RIGHT-POINTING SMALL TRIANGLE}"
            drawing.text(left + top * scale, middle + 4, more, "tick", "start")
        if row.floor:
            x = left + row.floor * scale
            drawing.line(x, y + 2, x, y + ROW - 3, "floor")
        drawing.text(WIDTH, middle + 4, short(row.value), "label", "end")
    if mark is not None:
        drawing.line(left + mark * scale, TOP, left + mark * scale, TOP + ROW * len(rows), "mark")
    return drawing.render()


def histogram(title: str, counts: Sequence[tuple[int, int]], what: str) -> str:
    """How often each number occurred."""
    height = 150.0
    drawing = Drawing(WIDTH, height + 46, title)
    last = max((number for number, _ in counts), default=1)
    step = (WIDTH - 40) / max(1, last)
    most = max((count for _, count in counts), default=1)
    for number, count in counts:
        x, tall = 30 + (number - 1) * step, (height - 20) * count / most
        drawing.rect(x + 1, height - tall, step - 2, tall, "bar", f"{number}: {count} times")
        if step > 18 or count == most:
            drawing.text(x + step / 2, height - tall - 4, str(count), "tick", "middle")
    drawing.line(30, height, WIDTH - 10, height, "axis")
    for number in (int(x) for x in ticks(last, 8) if x >= 1 and x == int(x)):
        drawing.text(30 + (number - 0.5) * step, height + 15, str(number), "tick", "middle")
    drawing.text(WIDTH / 2, height + 36, what, "tick", "middle")
    return drawing.render()


CAUSAL = "causal"


@dataclass(frozen=True)
class Point:
    """A way to decode."""

    name: str
    x: float
    y: float
    kind: str


def scatter(title: str, points: Sequence[Point], across: str, up: str) -> str:
    """Quality, from 0 to 1, against speed; the names of points are told by their colour."""
    height, left, low = 220.0, 46.0, min([point.y for point in points] + [0.9])
    low = max(0.0, math.floor((low - 0.02) * 10) / 10)
    drawing = Drawing(WIDTH, height + 44, title)
    top = 1.08 * max(point.x for point in points)

    def place(x: float, y: float) -> tuple[float, float]:
        up = (y - low) / (1.02 - low)
        return left + x / top * (WIDTH - left - 14), height - up * (height - 14)

    for x in ticks(top, 5):
        drawing.line(place(x, low)[0], 10, place(x, low)[0], height, "grid")
        drawing.text(place(x, low)[0], height + 16, f"{x:g}", "tick", "middle")
    for y in (low, (low + 1) / 2, 1.0):
        drawing.line(left, place(0, y)[1], WIDTH - 10, place(0, y)[1], "grid")
        drawing.text(left - 6, place(0, y)[1] + 4, f"{y:.0%}", "tick", "end")
    # What all are compared with lies on top.
    for point in sorted(points, key=lambda x: x.kind == CAUSAL):
        tip = f"{point.name}: {point.x:.0f} {across}, {point.y:.0%} {up}"
        drawing.dot(*place(point.x, point.y), 6, f"point {point.kind}", tip)
    drawing.text(WIDTH - 10, height + 36, across, "tick", "end")
    drawing.text(4, height + 36, f"\N{UPWARDS ARROW} {up}", "tick", "start")
    return drawing.render()


def lines(title: str, rows: Mapping[str, Sequence[tuple[float, float]]], across: str) -> str:
    """Costs by rows, both axes logarithmic."""
    height, left, right = 220.0, 46.0, 72.0
    drawing = Drawing(WIDTH, height + 40, title)
    points = [point for line in rows.values() for point in line]
    x1 = math.log(max(x for x, _ in points)) or 1.0
    y0, y1 = math.log(min(y for _, y in points)), math.log(max(y for _, y in points))
    y1 = max(y1, y0 + 0.1)

    def place(x: float, y: float) -> tuple[float, float]:
        up = (math.log(y) - y0) / (y1 - y0)
        return left + math.log(x) / x1 * (WIDTH - left - right), height - 8 - up * (height - 24)

    for x in (1, 4, 16, 64, 256):
        if math.log(x) <= x1 + 1e-9:
            drawing.line(place(x, math.exp(y0))[0], 10, place(x, math.exp(y0))[0], height, "grid")
            drawing.text(place(x, math.exp(y0))[0], height + 14, str(x), "tick", "middle")
    for exponent in range(math.floor(y0 / math.log(10)), math.ceil(y1 / math.log(10)) + 1):
        y = 10.0**exponent
        if y0 - 0.01 <= math.log(y) <= y1 + 0.01:
            drawing.line(left, place(1, y)[1], WIDTH - right, place(1, y)[1], "grid")
            drawing.text(left - 5, place(1, y)[1] + 4, f"{y:g}", "tick", "end")
    ends = sorted((place(*line[-1])[1], name) for name, line in rows.items())
    label = -99.0
    for i, (end, name) in enumerate(ends):
        label = max(end, label + 13)
        drawing.text(place(*rows[name][-1])[0] + 6, label + 4, name, f"label line{i % 5}")
        places = [place(*point) for point in rows[name]]
        drawing.path(places, f"line line{i % 5}", name)
        for at, point in zip(places, rows[name], strict=True):
            tip = f"{name}, {point[0]:g} rows: {point[1]:.3g} ms"
            drawing.dot(*at, 2.5, f"line{i % 5} solid", tip)
    drawing.text(WIDTH - right, height + 32, across, "tick", "end")
    return drawing.render()


@dataclass(frozen=True)
class Cell:
    """One row of a block in one pass."""

    text: str
    fixed: bool
    new: bool
    """Fixed in this very pass."""
    confidence: float


def fill(title: str, passes: Sequence[Sequence[Cell]]) -> str:
    """A block filling in: a line a pass, a cell a row, the shade its confidence."""
    left, size = 26.0, 22.0
    width = max(len(cells) for cells in passes)
    step = (WIDTH - left - 4) / width
    drawing = Drawing(WIDTH, TOP + size * len(passes) + 6, title)
    for i, cells in enumerate(passes):
        y = TOP + i * size
        drawing.text(left - 6, y + 15, str(i + 1), "tick", "end")
        for j, cell in enumerate(cells):
            state = "fixed now" if cell.new else "fixed before" if cell.fixed else "open"
            kind = "cell new" if cell.new else "cell kept" if cell.fixed else "cell open"
            shade = 0.25 + 0.75 * cell.confidence if cell.new else None
            tip = f"row {j + 1}, pass {i + 1}: {cell.text!r}, {state}, {cell.confidence:.0%}"
            drawing.rect(left + j * step, y + 2, step - 1, size - 4, kind, tip, shade)
    return drawing.render()


def climbs(title: str, rows: Mapping[str, Sequence[int]], across: str, up: str) -> str:
    """Tokens after each step, one line an answer."""
    height, left = 200.0, 40.0
    drawing = Drawing(WIDTH, height + 40, title)
    wide = max(len(values) for values in rows.values())
    top = max(values[-1] for values in rows.values())

    def place(x: float, y: float) -> tuple[float, float]:
        return left + x / wide * (WIDTH - left - 14), height - y / top * (height - 16)

    for y in ticks(top, 4):
        drawing.line(left, place(0, y)[1], WIDTH - 10, place(0, y)[1], "grid")
        drawing.text(left - 6, place(0, y)[1] + 4, f"{y:g}", "tick", "end")
    for x in ticks(wide, 6):
        drawing.text(place(x, 0)[0], height + 16, f"{x:g}", "tick", "middle")
    for i, (name, values) in enumerate(rows.items()):
        points = [place(0, 0), *(place(n + 1, value) for n, value in enumerate(values))]
        drawing.path(points, f"line line{i // 3 % 5}", name)
        drawing.dot(*points[-1], 3, f"line{i // 3 % 5} solid", name)
    drawing.text(WIDTH - 10, height + 34, across, "tick", "end")
    drawing.text(4, height + 34, f"\N{UPWARDS ARROW} {up}", "tick", "start")
    return drawing.render()


def ticks(top: float, count: int) -> list[float]:
    """Round values from 0 to `top`, about `count` of them."""
    raw = top / count
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    return [round(i * step, 10) for i in range(int(top / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A value with as many digits as one reads at a glance."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
