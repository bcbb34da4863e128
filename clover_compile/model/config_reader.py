"""Takes typed values out of JSON objects and collects every fault on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from clover_compile.runtime.strict_json import quote

INT32_MAX = 2**31 - 1
REQUIRED = object()
Check = Callable[[object], str | None]


class Source:
    """One JSON object with the label its keys get in messages, and the keys asked for so far."""

    def __init__(self, label: str, data: dict[str, object]) -> None:
        self.label = label
        self.data = data
        self.seen: set[str] = set()


class Reader:
    """Reads keys from one or more sources; a key that two of them spell differently is a fault."""

    def __init__(self, sources: Sequence[Source], faults: list[str]) -> None:
        self.sources = list(sources)
        self.faults = faults

    def values(self, key: str) -> list[tuple[str, object]]:
        """Return (label, value) for each source that holds `key`; null counts as absent."""
        found = []
        for source in self.sources:
            source.seen.add(key)
            value = source.data.get(key)
            if value is not None:
                found.append((source.label + key, value))
        return found

    def integer(self, key: str, low: int, high: int, default: object = REQUIRED) -> int | None:
        """Return an int in [low, high]; None after a fault. Neither true nor 4.0 is an int."""

        def check(value: object) -> str | None:
            if type(value) is not int:
                return f"must be an integer, not {quote(value)}"
            if not low <= value <= high:
                return f"must be in {low}..{high}, not {quote(value)}"
            return None

        value = self._pick(key, check, default)
        return value if type(value) is int else None

    def number(
        self,
        key: str,
        low: float,
        high: float,
        default: object = REQUIRED,
        above_low: bool = False,
    ) -> float | None:
        """Return a float in [low, high] (an int is taken as one); None after a fault."""
        span = f"in {'(' if above_low else '['}{low:g}, {high:g}]"

        def check(value: object) -> str | None:
            if type(value) not in (int, float):
                return f"must be a number, not {quote(value)}"
            # Comparing before converting keeps huge integers and NaN out of float().
            inside = low <= value <= high  # type: ignore[operator]
            if not inside or (above_low and value == low):
                return f"must be {span}, not {quote(value)}"
            return None

        value = self._pick(key, check, default)
        return float(value) if isinstance(value, int | float) else None

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false; the default after a fault."""

        def check(value: object) -> str | None:
            return None if type(value) is bool else f"must be true or false, not {quote(value)}"

        value = self._pick(key, check, default)
        return value if isinstance(value, bool) else default

    def ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Return the token ids of a key that holds one id or a list of them."""

        def check(value: object) -> str | None:
            items = value if isinstance(value, list) else [value]
            for item in items:
                if type(item) is not int:
                    return f"must be a token id or a list of them, not {quote(value)}"
                if not 0 <= item < vocab_size:
                    return f"holds {quote(item)}, outside the vocabulary of {vocab_size}"
            return None

        value = self._pick(key, check, None)
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list) else (value,)  # type: ignore[return-value]

    def nested(self, key: str) -> list[Source]:
        """Return the objects held under `key` as sources labelled `key.`."""
        found = []
        for label, value in self.values(key):
            if isinstance(value, dict):
                found.append(Source(label + ".", value))
            else:
                self.faults.append(f"{label} must be an object, not {quote(value)}")
        return found

    def unknown(self) -> list[str]:
        """Return the labelled keys that nobody asked for, in the order of the file."""
        return [s.label + key for s in self.sources for key in s.data if key not in s.seen]

    def _pick(self, key: str, check: Check, default: object) -> object:
        """Check every spelling of `key`; return the value, the default, or None after a fault."""
        good: list[tuple[str, object]] = []
        found = self.values(key)
        for label, value in found:
            fault = check(value)
            if fault is None:
                good.append((label, value))
            else:
                self.faults.append(f"{label} {fault}")
        if not found and default is REQUIRED:
            self.faults.append(f"{key} is missing")
        for label, value in good[1:]:
            if value != good[0][1]:
                first, other = f"{good[0][0]} is {quote(good[0][1])}", f"{label} is {quote(value)}"
                self.faults.append(f"{first} but {other}: make them agree")
        if good:
            return good[0][1]
        return None if found or default is REQUIRED else default
