"""A drawing as inline SVG: shapes by class name, colours from the page's style sheet."""

from __future__ import annotations

from xml.etree import ElementTree

CHARACTER = 7.2
"""Width of a character of a label, about."""


class Drawing:
    """One drawing; everything written into it is escaped."""

    def __init__(self, width: float, height: float, title: str) -> None:
        """`title`: what the drawing shows, for who cannot see it."""
        self.width, self.height = width, height
        self._root = ElementTree.Element(
            "svg",
            {"viewBox": f"0 0 {_number(width)} {_number(height)}", "role": "img",
             "aria-label": title, "preserveAspectRatio": "xMinYMin meet"},
        )  # fmt: skip

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, tip: str = "",
        shade: float | None = None,
    ) -> None:  # fmt: skip
        """A rectangle; `shade`: its opacity."""
        sizes = {"x": x, "y": y, "width": max(0.0, width), "height": max(0.0, height)}
        self._add("rect", sizes, kind, tip, shade)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """A line."""
        self._add("line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2}, kind)

    def dot(self, x: float, y: float, radius: float, kind: str, tip: str = "") -> None:
        """A disc."""
        self._add("circle", {"cx": x, "cy": y, "r": radius}, kind, tip)

    def path(self, points: list[tuple[float, float]], kind: str, tip: str = "") -> None:
        """A line through points."""
        made = self._add("polyline", {}, kind, tip)
        made.set("points", " ".join(f"{_number(x)},{_number(y)}" for x, y in points))

    def text(self, x: float, y: float, words: str, kind: str = "label", anchor: str = "") -> None:
        """A line of text; `anchor`: start, middle or end."""
        made = self._add("text", {"x": x, "y": y}, kind)
        if anchor:
            made.set("text-anchor", anchor)
        made.text = printable(words)

    def render(self) -> str:
        """The element's text."""
        return ElementTree.tostring(self._root, encoding="unicode")

    def _add(
        self, tag: str, sizes: dict[str, float], kind: str, tip: str = "",
        shade: float | None = None,
    ) -> ElementTree.Element:  # fmt: skip
        values = {name: _number(x) for name, x in sizes.items()}
        made = ElementTree.SubElement(self._root, tag, {**values, "class": kind})
        if shade is not None:
            made.set("opacity", _number(shade))
        if tip:
            ElementTree.SubElement(made, "title").text = printable(tip)
        return made


def printable(text: str) -> str:
    """The text without characters that XML does not know, which a model may well write."""
    return "".join(x if x.isprintable() else "\N{REPLACEMENT CHARACTER}" for x in text)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
