"""The `ort-cuda` target: one ONNX file per Unit for ONNX Runtime's CUDA provider."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from clover_compile.passes.base import Pass
from clover_compile.runtime.ort_provider import CUDA_PROVIDER, PACKAGE, wrong_provider
from clover_compile.targets.base import Emitted, Say, Target
from clover_compile.targets.ort_cpu.build import WEIGHTS, stored_weight
from clover_compile.targets.ort_cuda.render import CudaModel, cuda_model, place
from clover_compile.targets.trt.angles import FuseAngles
from clover_compile.targets.trt.lowering import Lowering
from clover_compile.unit import Source, Unit
from clover_compile.weight_store import write_weights


class OrtCuda(Target):
    """ONNX in bf16 or fp16 over one weight store."""

    name = "ort-cuda"
    engine: ClassVar[str] = "ort"
    tail: ClassVar[tuple[Pass, ...]] = (FuseAngles(),)
    requirements: ClassVar[tuple[str, ...]] = (PACKAGE,)

    def cannot_run(self) -> str | None:
        """Why the bundle cannot be proved on this machine, or None."""
        wrong = wrong_provider()
        return None if wrong is None else f"needs {wrong[0]}; this machine has {wrong[1]}"

    def emit(
        self, units: Mapping[str, Unit], source: Source, folder: Path, context: int, say: Say
    ) -> Emitted:  # fmt: skip
        """Writes <unit>.onnx for each Unit and the weight store."""
        graphs = {name: Lowering(unit, ()).lower() for name, unit in units.items()}
        made = {name: cuda_model(graph) for name, graph in graphs.items()}
        known = {w.name: w for unit in units.values() for w in unit.weights.values()}
        wanted = {s.name: s for one in made.values() for s in one.weights}
        (folder / WEIGHTS).parent.mkdir()
        weights = write_weights(
            folder / WEIGHTS, [stored_weight(s, known[s.weight], source) for s in wanted.values()]
        )
        placement = {
            name: (weights[name]["file"], weights[name]["offset"],
                   prod(s.shape) * known[s.weight].dtype.itemsize)
            for name, s in wanted.items()
        }  # fmt: skip
        for name, one in made.items():
            (folder / f"{name}.onnx").write_bytes(place(one, graphs[name], placement))
        return Emitted(
            units={name: _entry(units[name], one) for name, one in made.items()},
            ops={name: _ops(units[name], one) for name, one in made.items()},
            weights=weights,
            built_with={p: version(p) for p in ("onnx", "numpy")},
            accepts={"numpy": ">=2,<3"},
            device={"provider": CUDA_PROVIDER},
        )


def _entry(unit: Unit, made: CudaModel) -> dict[str, Any]:
    return {
        "file": f"{unit.name}.onnx", "inputs": list(unit.inputs), "outputs": list(unit.outputs),
        "weights": sorted(stored.name for stored in made.weights),
    }  # fmt: skip


def _ops(unit: Unit, made: CudaModel) -> dict[str, dict[str, Any]]:
    counts = unit.count_ops()
    return {
        op: {
            "count": counts.get(op, 1),
            "provider": ", ".join(dict.fromkeys(k for f in found for k in f.kernels)),
            "functions": [f.name for f in found],
            "reason": "; ".join(dict.fromkeys(f.reason for f in found if f.reason)),
        }
        for op, found in made.functions.items()
    }
