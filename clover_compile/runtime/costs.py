"""What costs.json says: the cost of each Unit by its rows, and how well guesses fared before.

Costs are seconds where a profile measured them and modelled seconds elsewhere; only their ratios
matter to who chooses a way to decode.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from clover_compile.runtime.strict_json import quote

COSTS = "costs.json"
UNITS = ("commit", "verify", "replay", "preview", "pick")
KINDS = ("measured", "modelled")
MAX_POINTS = 1024
MAX_TEXT = 2000
"""Most characters of a processor's name and of a doubt."""

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Outlook:
    """What may be expected of guesses before any is made."""

    exact: tuple[float, ...]
    """Chance that draft r + 1 is kept once the drafts before it were, under the exact rule."""
    release: tuple[float, ...]
    """The same under the release's rule."""
    rows_per_pass: float
    """Rows that a pass over a block fixes."""
    tokens_per_block: float
    """Tokens that a resolved block emits."""

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {
            "exact": list(self.exact), "release": list(self.release),
            "rows_per_pass": self.rows_per_pass, "tokens_per_block": self.tokens_per_block,
        }  # fmt: skip


@dataclass(frozen=True)
class Origin:
    """Where costs were measured; `auto` goes by the costs all the same."""

    processor: str
    threads: int
    doubt: str | None
    """Why the profile was not believed by itself."""

    def cautions(self, processor: str, threads: int | None) -> Iterator[str]:
        """What speaks against the costs on that processor with so many threads, if they count."""
        if self.processor != processor:
            yield f"measured on {quote(self.processor, 60)}, not on this machine"
        if threads is not None and self.threads != threads:
            yield f"measured with {self.threads} thread{'s' * (self.threads > 1)}, {threads} in use"
        if self.doubt:
            yield f"doubted when they were measured ({self.doubt})"


@dataclass(frozen=True)
class CostTable:
    """Costs by Unit and row count, straight lines between the counts that are known."""

    kind: str
    """`measured` or `modelled`."""
    units: Mapping[str, Points]
    """Unit -> (rows, cost) in ascending rows; a `commit` without logits."""
    head: float
    """What one row of logits adds to a commit."""
    outlook: Outlook
    origin: Origin | None = None
    """None where the costs are modelled, or do not say."""

    def cost(self, unit: str, rows: int, logits: bool = False) -> float:
        """The cost of one call; `logits`: a commit that also answers the last row's logits."""
        points = self.units.get(unit, ())
        if not points:  # no GDN layer, so nothing is ever replayed
            return 0.0
        counts = [count for count, _ in points]
        right = min(max(bisect_left(counts, rows), 1), len(points) - 1)
        if len(points) == 1 or rows <= counts[0]:
            return points[0][1] + logits * self.head
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        return y0 + (y1 - y0) * (rows - x0) / (x1 - x0) + logits * self.head

    def caution(self, processor: str, threads: int | None) -> str | None:
        """Why these may not be the costs on that processor with so many threads."""
        if self.kind == "modelled":
            return "the costs are modelled, not measured"
        if self.origin is None:
            return "nothing says where the costs were measured"
        found = list(self.origin.cautions(processor, threads))
        return f"the costs were {'; '.join(found)}" if found else None

    def step(self) -> float:
        """A token of causal decoding."""
        return self.cost("commit", 1, logits=True) + self.cost("pick", 1)

    def draft(self, width: int) -> float:
        """A round of self-speculation of that width."""
        passes = sum(self.cost(unit, width) for unit in ("preview", "verify", "replay"))
        return passes + 2 * self.cost("pick", width)

    def look(self, rows: int) -> float:
        """A pass over a block of so many rows."""
        return self.cost("preview", rows) + self.cost("pick", rows)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostTable:
        """The table that a costs.json holds; raises ValueError saying what is wrong with it."""
        kind, costs, outlook = data.get("kind"), data.get("costs"), data.get("outlook")
        if kind not in KINDS:
            raise ValueError(f"kind is {quote(kind, 40)}, not measured or modelled")
        if not isinstance(costs, dict) or not set(costs) - {"replay"} == set(UNITS) - {"replay"}:
            raise ValueError("costs must name the Units commit, verify, preview, pick, replay")
        if not isinstance(outlook, dict):
            raise ValueError("outlook is missing")
        units = {unit: _points(unit, points) for unit, points in costs.items()}
        rows, tokens = (
            _number(outlook.get(x), x, 1.0) for x in ("rows_per_pass", "tokens_per_block")
        )
        exact, release = (_chances(outlook.get(rule), rule) for rule in ("exact", "release"))
        head = _number(data.get("head"), "head", 0.0)
        outlook = Outlook(exact, release, rows, tokens)
        return cls(kind, units, head, outlook, _origin(data.get("origin")))

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {
            "kind": self.kind,
            "costs": {unit: [list(x) for x in points] for unit, points in self.units.items()},
            "head": self.head,
            "outlook": self.outlook.to_json(),
            "origin": self.origin and asdict(self.origin),
        }


def _origin(data: object) -> Origin | None:
    if data is None:
        return None
    if not isinstance(data, dict) or set(data) != {"processor", "threads", "doubt"}:
        raise ValueError(f"origin is {quote(data, 40)}")
    processor, threads, doubt = data["processor"], data["threads"], data["doubt"]
    texts = [processor] if doubt is None else [processor, doubt]
    if not all(isinstance(x, str) and 0 < len(x) <= MAX_TEXT for x in texts):
        raise ValueError(f"origin holds {quote(processor, 40)} and {quote(doubt, 40)} as texts")
    if type(threads) is not int or not 1 <= threads <= MAX_POINTS:
        raise ValueError(f"origin.threads is {quote(threads, 40)}")
    return Origin(processor, threads, doubt)


def _points(unit: str, rows: object) -> Points:
    if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_POINTS:
        raise ValueError(f"costs of {quote(unit, 40)} are not a list of pairs")
    points = []
    for pair in rows:
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) is not int:
            raise ValueError(f"costs of {quote(unit, 40)} hold {quote(pair, 40)}")
        points.append((pair[0], _number(pair[1], f"a cost of {unit}", 0.0)))
    counts = [count for count, _ in points]
    if counts[0] < 1 or any(b <= a for a, b in itertools.pairwise(counts)):
        raise ValueError(f"rows of {quote(unit, 40)} do not ascend from 1")
    if min(cost for _, cost in points) <= 0:
        raise ValueError(f"a cost of {quote(unit, 40)} is not above 0")
    return tuple(points)


def _chances(values: object, rule: str) -> tuple[float, ...]:
    if not isinstance(values, list) or not 1 <= len(values) <= MAX_POINTS:
        raise ValueError(f"outlook.{rule} is not a list of chances")
    found = tuple(_number(x, f"outlook.{rule}", 0.0) for x in values)
    if max(found) > 1:
        raise ValueError(f"outlook.{rule} holds a chance above 1")
    return found


def _number(value: object, name: str, least: float) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(float(str(value))) or float(str(value)) < least:
        raise ValueError(f"{name} is {quote(value, 40)}, not a number of {least:g} or more")
    return float(str(value))
