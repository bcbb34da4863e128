"""The `ort-cpu` target: one ONNX file per Unit over one shared fp32 weight store."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from clover_compile.targets.base import Emitted, Say, Target
from clover_compile.targets.ort_cpu.lowering import Lowered, StoredWeight, arrange, attach, lower
from clover_compile.unit import Source, Unit, Weight
from clover_compile.weight_store import Stored, write_weights

WEIGHTS = "weights/model.safetensors"

ACCEPTS = {"onnxruntime": ">=1.25,<2", "numpy": ">=2,<3"}
"""What a finished bundle runs on. ONNX Runtime 1.24 cannot load the delta rule's node; 1.25 to 1.32
answer alike."""


class OrtCpu(Target):
    """ONNX, opset 24, for ONNX Runtime's CPU provider."""

    name = "ort-cpu"
    engine: ClassVar[str] = "ort"
    requirements: ClassVar[tuple[str, ...]] = ("onnxruntime",)

    def emit(
        self, units: Mapping[str, Unit], source: Source, folder: Path, context: int, say: Say
    ) -> Emitted:  # fmt: skip
        """Writes <unit>.onnx for each Unit and the weight store."""
        return self.write(
            {name: lower(unit) for name, unit in units.items()}, units, source, folder
        )

    def write(
        self, lowered: Mapping[str, Lowered], units: Mapping[str, Unit], source: Source,
        folder: Path,
    ) -> Emitted:  # fmt: skip
        """Writes Units that were lowered already."""
        expressions = {w.name: w for unit in units.values() for w in unit.weights.values()}
        wanted = {stored.name: stored for one in lowered.values() for stored in one.weights}
        (folder / WEIGHTS).parent.mkdir()
        weights = write_weights(
            folder / WEIGHTS,
            [stored_weight(s, expressions[s.weight], source) for s in wanted.values()],
        )
        placement = {
            stored.name: (
                weights[stored.name]["file"],
                weights[stored.name]["offset"],
                4 * math.prod(stored.shape),
            )
            for stored in wanted.values()
        }

        for name, one in lowered.items():
            (folder / f"{name}.onnx").write_bytes(attach(one, placement))
        return Emitted(
            units={name: _entry(units[name], one) for name, one in lowered.items()},
            ops={name: _ops(one) for name, one in lowered.items()},
            weights=weights,
            built_with={p: version(p) for p in ("onnx", "onnxscript", "onnxruntime", "numpy")},
            accepts=ACCEPTS,
        )


def stored_weight(stored: StoredWeight, weight: Weight, source: Source) -> Stored:
    """A weight for the store, in the layout its file wants."""
    return Stored(
        stored.name,
        stored.shape,
        weight.dtype,
        lambda: arrange(weight.evaluate(source), stored.layout),
    )


def _entry(unit: Unit, lowered: Lowered) -> dict[str, Any]:
    return {
        "file": f"{unit.name}.onnx",
        "inputs": list(unit.inputs),
        "outputs": list(unit.outputs),
        "weights": sorted(stored.name for stored in lowered.weights),
    }


def _ops(lowered: Lowered) -> dict[str, dict[str, Any]]:
    return {
        op: {
            "count": row.count,
            "provider": ", ".join(row.kernels),
            "functions": list(row.functions),
            "reason": row.reason,
        }
        for op, row in lowered.ops.items()
    }
