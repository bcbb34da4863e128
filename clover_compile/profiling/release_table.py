"""The released model's passes on every GPU, from static floors, as docs/performance.md shows them:
`python -m clover_compile.profiling.release_table`.
"""

from __future__ import annotations

from clover_compile.kernels import costs
from clover_compile.kernels.architecture import ARCHITECTURES

STEP, PREVIEWS, VERIFY, COMMIT = 8, (32, 48, 96), 96, 163
"""Experts read per layer: by a step; by previews of a small, a usual and a wide coreset; by a
verify of 16 rows; by the commit of a block of text."""

PARAMETERS = 34.66e9
RESERVE = 2e9
"""Bytes of the device that weights cannot have."""


def render() -> str:
    """The table in Markdown."""
    found = {(row["pass"], row["experts"]): row["modelled_ms"] for row in costs.passes()}
    heads = ["GPU", "step", *(f"preview, {n} experts" for n in PREVIEWS), "verify", "commit",
             "blocks pay from", "rounds of 16 pay from", "bf16 weights fit"]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "| --- " + "| ---: " * (len(heads) - 2) + "| --- |"]
    rows = costs.ROWS["commit"]
    for gpu in ARCHITECTURES.values():
        ms = {key: times[gpu.name] for key, times in found.items()}
        step, commit = ms["step", STEP], ms["commit", COMMIT] / rows
        previews = [ms["preview", n] for n in PREVIEWS]
        pays = [preview / (step - commit) for preview in previews]
        around = ms["preview", PREVIEWS[1]] + ms["verify", VERIFY] + ms["replay", 32]
        fits = "yes" if gpu.memory >= 2 * PARAMETERS + RESERVE else "no"
        times = [step, *previews, ms["verify", VERIFY], ms["commit", COMMIT]]
        cells = [gpu.name, *(f"{x:.2f}" for x in times), f"{pays[0]:.1f}–{pays[-1]:.1f}",
                 f"{around / step:.1f}", fits]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(render())
