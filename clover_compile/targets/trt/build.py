"""The `trt-*` targets: ONNX with plugin nodes, the plugin, cubins and weights; `trt-rtx`: engines.

What TensorRT needs beside the bundle's files stands in the manifest under `device`: module and
versions, compute capabilities, the plugin library, and per Unit the nodes, aliases and profile.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from clover_compile.errors import EngineBuildFailed, MissingExtra
from clover_compile.kernels.architecture import ARCHITECTURES
from clover_compile.passes.base import Pass
from clover_compile.runtime.trt_build import Built, requests
from clover_compile.runtime.trt_checks import wrong_gpu
from clover_compile.targets.base import Emitted, Say, Target
from clover_compile.targets.cubins import Cubins, compile_plans, plan_key
from clover_compile.targets.triton.join import JoinWriteGate
from clover_compile.targets.triton.store import write_store
from clover_compile.targets.trt import rtx
from clover_compile.targets.trt.angles import FuseAngles
from clover_compile.targets.trt.graph import FusedNode, Graph
from clover_compile.targets.trt.library import NAME, library, sources
from clover_compile.targets.trt.lowering import Lowering
from clover_compile.targets.trt.node import Attributes, attributes
from clover_compile.targets.trt.render import plugin_model
from clover_compile.unit import Source, Unit

PLUGIN = f"plugin/{NAME}"

ROWS = 256
"""Most rows of one call: a block's, or a commit's."""
USUAL = 32
"""Rows the builder tunes for."""

FINISH = '''\
"""Builds the engines of this bundle: python finish.py [-o NEW]; needs tensorrt and numpy."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNNER = HERE / "runner.pyz"
sys.path.insert(0, str(RUNNER))

try:
    from clover_compile.runtime import trt_finish
except ImportError as error:
    if (error.name or "").startswith("clover_compile"):
        sys.exit(f"finish.py: {RUNNER} is missing or damaged; fetch or build the bundle again")
    sys.exit(f"finish.py: the package {error.name} is not installed; run: "
             f"pip install -r {HERE / 'requirements.txt'}")

if not str(trt_finish.__file__).startswith(str(RUNNER)):
    sys.exit(f"finish.py: {RUNNER} is missing or damaged; fetch or build the bundle again")
sys.exit(trt_finish.main(sys.argv[1:], bundle=HERE))
'''


@dataclass(frozen=True)
class Made:
    """A Unit's graph and what its nodes hold."""

    graph: Graph
    attributes: Mapping[str, Attributes]
    """By node."""


class TensorRtTarget(Target):
    """A bundle that is finished where TensorRT and the GPU are."""

    engine: ClassVar[str] = "trt"
    tail: ClassVar[tuple[Pass, ...]] = (JoinWriteGate(), FuseAngles())
    module: ClassVar[str] = "tensorrt"
    versions: ClassVar[str] = ">=11,<12"
    requirements: ClassVar[tuple[str, ...]] = ("tensorrt>=11,<12",)

    def __init__(self, gpu: str) -> None:
        self.name = f"trt-{gpu}"
        self.plugin = library()  # what is missing is told before the minutes a build takes
        self.capabilities: tuple[int, ...] = (ARCHITECTURES[gpu].capability,)

    def cannot_run(self) -> str | None:
        """A bundle of these has no engine yet, on any machine."""
        (capability,) = self.capabilities
        return f"needs TensorRT 11 and an sm_{capability} GPU to finish"

    def emit(
        self, units: Mapping[str, Unit], source: Source, folder: Path, context: int, say: Say
    ) -> Emitted:  # fmt: skip
        """Writes <unit>.onnx, the plugin with its sources, weights and finish.py."""
        made = self._lower(units, say)
        described = {name: self._describe(one, units[name], context) for name, one in made.items()}
        for name, one in made.items():
            model = plugin_model(one.graph, one.attributes)
            (folder / f"{name}.onnx").write_bytes(model.SerializeToString(deterministic=True))
        _write_plugin(folder, self.plugin.path)
        weights, _ = write_store(folder, units, {}, source)
        emitted = Emitted(
            units=described,
            ops={name: _ops(one) for name, one in made.items()},
            weights=weights,
            built_with={p: version(p) for p in ("triton", "numpy", "onnx")},
            accepts={"numpy": ">=2,<3"},
            device={
                "module": self.module, "versions": self.versions,
                "capabilities": list(self.capabilities), "plugin": PLUGIN,
                "plugin_sources": self.plugin.sources, "finished": False,
            },
        )  # fmt: skip
        self._complete(folder, made, emitted, say)
        return emitted

    def _complete(
        self, folder: Path, made: Mapping[str, Made], emitted: Emitted, say: Say
    ) -> None:  # fmt: skip
        """What a bundle needs to be finished elsewhere."""
        (folder / "finish.py").write_text(FINISH)

    def _lower(self, units: Mapping[str, Unit], say: Say) -> dict[str, Made]:
        graphs = {name: Lowering(unit, self.capabilities).lower() for name, unit in units.items()}
        cubins: dict[int, Cubins] = {}
        for capability in self.capabilities:
            plans = {
                plan_key(node.plans[capability]): node.plans[capability]
                for graph in graphs.values()
                for node in graph.fused()
            }
            say(f"    kernels for compute capability {capability / 10:.1f}")
            cubins[capability] = compile_plans(plans, capability, self.name, say)
        return {
            name: Made(
                graph,
                {x.name: attributes(x.plans, cubins, x.aliases) for x in graph.fused()},
            )
            for name, graph in graphs.items()
        }

    def _describe(self, made: Made, unit: Unit, context: int) -> dict[str, Any]:
        """The Unit in the manifest."""
        shapes, values = profile(made.graph, context)
        return {
            "file": f"{unit.name}.onnx", "inputs": list(unit.inputs),
            "outputs": list(unit.outputs),
            "weights": [x.name for x in made.graph.weights],
            "nodes": {
                x.name: {"op": x.op.name, "kernels": list(made.attributes[x.name].kernels)}
                for x in made.graph.fused()
            },
            "aliases": made.graph.aliases(), "shapes": shapes, "values": values,
        }  # fmt: skip


class TensorRtRtxTarget(TensorRtTarget):
    """Finished engines for RTX cards: their builder needs no GPU."""

    module: ClassVar[str] = "tensorrt_rtx"
    versions: ClassVar[str] = ">=1.7,<2"
    requirements: ClassVar[tuple[str, ...]] = ("tensorrt-rtx",)

    def __init__(self, *capabilities: str) -> None:
        if rtx.rtx_library() is None:
            raise MissingExtra(package="tensorrt-rtx", extra="rtx")
        self.name = "trt-rtx"
        self.plugin = library()
        self.capabilities = tuple(int(x) for x in capabilities)

    def cannot_run(self) -> str | None:
        """Why the bundle cannot be proved on this machine, or None."""
        wrong = wrong_gpu(self.capabilities)
        return None if wrong is None else f"needs {wrong[0]}; this machine has {wrong[1]}"

    def _complete(
        self, folder: Path, made: Mapping[str, Made], emitted: Emitted, say: Say
    ) -> None:  # fmt: skip
        """Builds every engine and checks it against the manifest; the ONNX files go."""
        for one in rtx.build_engines(
            self.plugin.path, requests(emitted.units, folder, folder), say
        ):
            unit = emitted.units[one.unit]
            faults = engine_faults(unit, one, made[one.unit].attributes.values(), folder)
            if faults:
                raise EngineBuildFailed(reason=f"{one.unit}: {'; '.join(faults)}")
            unit["file"] = f"{one.unit}.engine"
            (folder / f"{one.unit}.onnx").unlink()
        emitted.built_with["tensorrt-rtx"] = version("tensorrt-rtx")
        emitted.device["finished"] = True


def engine_faults(
    unit: Mapping[str, Any], built: Built, nodes: Iterable[Attributes], folder: Path
) -> list[str]:
    """What of an engine is not as the manifest and its nodes say; empty if all is.

    That every fused op became a plugin layer is the builder's own check.
    """
    meant = {
        "inputs": [*unit["inputs"], *unit["weights"]], "outputs": unit["outputs"],
        "plugin layers": sorted(unit["nodes"]),
    }  # fmt: skip
    found = {
        "inputs": built.inputs,
        "outputs": built.outputs,
        "plugin layers": sorted(built.plugins),
    }
    faults = [f"{what} are {found[what]}, meant {meant[what]}" for what in meant
              if found[what] != meant[what]]  # fmt: skip
    plan = (folder / f"{built.unit}.engine").read_bytes()
    for node, held in zip(unit["nodes"], nodes, strict=True):
        faults += [f"{node}: its {what} is not in the engine, byte for byte"
                   for what, text in (("launch plan", held.plan), ("code", held.cubins))
                   if text not in plan]  # fmt: skip
    return faults


def profile(graph: Graph, context: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Least, usual and largest shape of every input that varies, and value of every size."""
    spans = {"T": (1, USUAL, ROWS), "n": (1, USUAL, ROWS), "R": (1, context, context)}
    shapes, values = {}, {}
    for array in graph.inputs:
        if any(isinstance(size, str) for size in array.shape):
            shapes[array.name] = [
                [spans[x][i] if isinstance(x, str) else x for x in array.shape] for i in range(3)
            ]
        if array.name == "keep":
            values[array.name] = [0, 1, ROWS]
    return shapes, values


def _write_plugin(folder: Path, plugin: Path) -> None:
    (folder / "plugin").mkdir()
    shutil.copyfile(plugin, folder / PLUGIN)
    for source in sources():
        shutil.copyfile(source, folder / "plugin" / source.name)


def _ops(made: Made) -> dict[str, dict[str, Any]]:
    counts = Counter(node.op.name for node in made.graph.fused())
    functions: dict[str, set[str]] = {name: set() for name in counts}
    for node in made.graph.fused():
        functions[node.op.name] |= _functions(node)
    return {
        name: {
            "count": count, "functions": sorted(functions[name]),
            "provider": "TensorRT plugin, Triton " + ", ".join(sorted(functions[name])),
            "reason": "",
        }
        for name, count in counts.items()
    }  # fmt: skip


def _functions(node: FusedNode) -> set[str]:
    plans = node.plans.values()
    launches = [x for plan in plans for v in plan.variants for x in v.launches]
    return {launch.kernel.split(":")[1] for launch in launches}
