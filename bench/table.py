"""The figures of a run as one table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def table(found: dict[str, Any]) -> str:
    """The whole run as text, a line a figure."""
    return "\n".join([*_machine(found), *_speed(found), *_rest(found)])


def _machine(found: dict[str, Any]) -> Iterator[str]:
    m = found["machine"]
    yield f"{m['processor']}, {m['cores']} cores, load {m['load']:.1f}; {found['rounds']} rounds"
    yield "ms: median (p10-p90) of the rounds; ratios: median of the rounds' own, not of medians"
    yield "1t, one thread: its processor time; more threads: time passed"
    yield ""


def _speed(found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{'':5} {'':3} {'':17} {'bundle, ms':>22} {'eager, ms':>10} {'form':8} "
        f"{'eager/bundle':>20} {'floor, ms':>10} {'bundle/floor':>20}  bound by"
    )
    for size, one in found["sizes"].items():
        for threads, calls in one["speed"].items():
            for name, row in calls.items():
                form, ms, floor = row["faster eager"], row["ms"], row["floor"]
                limit = f"{floor['bytes'] / 1e6:.0f} MB at {floor['GB/s']['median']:.0f} GB/s"
                if floor["bound"] == "product":
                    rate = floor["GFLOP/s"]["median"]
                    limit = f"{floor['flop'] / 1e9:.1f} GFLOP at {rate:.0f} GFLOP/s"
                yield (
                    f"{size:5} {threads:>2}t {name:17} {_span(ms['ort']):>22} "
                    f"{ms[form]['median']:10.1f} {form:8} {_span(row['speedup'], 2):>20} "
                    f"{ms['floor']['median']:10.2f} {_span(row['of floor'], 2):>20}  {limit}"
                )
    yield ""


def _rest(found: dict[str, Any]) -> Iterator[str]:
    for size, one in found["sizes"].items():
        m = one["memory"]
        yield (
            f"{size}: Pss at its peak {m['peak']['Pss'] / 1e6:.0f} MB, weights "
            f"{m['weights'] / 1e6:.0f} MB: {m['peak/weights']:.2f} x, "
            f"{m['above weights'] / 1e6:.0f} MB above; "
            f"anonymous {m['peak']['Pss_Anon'] / 1e6:.0f} MB; bare interpreter "
            f"{m['base']['Pss'] / 1e6:.0f} MB"
        )
    for threads, settings in found["pick"].items():
        for name, ms in settings.items():
            yield f"pick, 32 x {found['vocabulary']}, {threads} threads, {name}: {_span(ms)} ms"
    for kind, first in found["first token"].items():
        yield (
            f"first token of a fresh process {_span(first['answer'], 0)} {kind}, bare open of the "
            f"same files {_span(first['open'], 0)} {kind}: {_span(first['ratio'], 2)} x"
        )


def _span(x: dict[str, float], digits: int = 1) -> str:
    return f"{x['median']:.{digits}f} ({x['p10']:.{digits}f}-{x['p90']:.{digits}f})"
