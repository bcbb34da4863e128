"""Builds engines from the ONNX of a bundle, with TensorRT or TensorRT-RTX; also as a command:

    python -m clover_compile.runtime.trt_build REQUEST.json

The two products differ in the module's name alone. Needs no GPU with TensorRT-RTX, the target's GPU
with TensorRT.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PLUGIN, DOMAIN, VERSION = "TritonKernel", "clover", "1"

MAX_WORDS = 600


class EngineRefused(RuntimeError):
    """The builder did not take a network; the message holds its own words."""


@dataclass(frozen=True)
class Request:
    """One engine to build."""

    unit: str
    onnx: str
    engine: str
    """File to write."""
    plugins: Sequence[str]
    """Names of the nodes that must become plugin layers."""
    shapes: Mapping[str, Sequence[Sequence[int]]]
    """Input with sizes that vary -> least, usual and largest shape."""
    values: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Input whose value is a size (no array on the device) -> least, usual and largest value."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Output -> the input whose memory it takes over."""


@dataclass(frozen=True)
class Built:
    """What became of it."""

    unit: str
    inputs: list[str]
    outputs: list[str]
    shapes: dict[str, list[int]]
    """Of the outputs; -1 where a size varies."""
    plugins: list[str]
    """Names of the plugin layers, in order."""
    layers: int
    nbytes: int


def requests(units: Mapping[str, Mapping[str, Any]], source: Path, target: Path) -> list[Request]:
    """What the builder is asked for, from the manifest's Units: <unit>.onnx to <unit>.engine."""
    return [
        Request(
            name, str(source / f"{name}.onnx"), str(target / f"{name}.engine"),
            list(unit["nodes"]), unit["shapes"], unit["values"], unit["aliases"],
        )
        for name, unit in units.items()
    ]  # fmt: skip


class Builder:
    """One library, its plugin loaded."""

    def __init__(self, module: str, library: Path, say: Callable[[str], None]) -> None:
        """module: `tensorrt` or `tensorrt_rtx`. Raises EngineRefused without the plugin."""
        self.trt = importlib.import_module(module)
        self.say, self.words = say, list[str]()
        self.logger = quiet_logger(self.trt, self.words)
        self.plugin = load_plugin(self.trt, library)
        self.builder = self.trt.Builder(self.logger)
        self.cache: Any = None

    def build(self, request: Request) -> Built:
        """Builds and writes one engine."""
        self.words.clear()
        network = self.builder.create_network(0)
        parser = self.trt.OnnxParser(network, self.logger)
        if not parser.parse_from_file(request.onnx):
            faults = [parser.get_error(i).desc() for i in range(parser.num_errors)]
            raise self._refused(request, faults)
        found = self._check(request, network)
        plan = self.builder.build_serialized_network(network, self._config(request))
        if plan is None:
            raise self._refused(request, [])
        with Path(request.engine).open("wb") as file:
            file.write(plan)
        return Built(nbytes=plan.nbytes, **found)

    def _refused(self, request: Request, faults: list[str]) -> EngineRefused:
        # What the plugin objects to says more than what the parser makes of it.
        own = last_fault(self.plugin)
        words = own or " | ".join(dict.fromkeys([*self.words, *faults])) or "no reason given"
        return EngineRefused(f"{request.unit}: {' '.join(words.split())[:MAX_WORDS]}")

    def _check(self, request: Request, network: Any) -> dict[str, Any]:
        """Every fused op became a layer of the plugin, and no other layer stands for one."""
        kind = self.trt.LayerType.PLUGIN_V3
        layers = [network.get_layer(i) for i in range(network.num_layers)]
        plugins = [layer.name for layer in layers if layer.type == kind]
        outputs = [network.get_output(i) for i in range(network.num_outputs)]
        if sorted(plugins) != sorted(request.plugins):
            left = sorted(set(request.plugins) ^ set(plugins))
            raise EngineRefused(
                f"{request.unit}: {len(plugins)} plugin layers instead of "
                f"{len(request.plugins)}: {', '.join(left[:5])}; build the bundle again"
            )
        return {
            "unit": request.unit, "plugins": plugins, "layers": len(layers),
            "inputs": [network.get_input(i).name for i in range(network.num_inputs)],
            "outputs": [output.name for output in outputs],
            "shapes": {output.name: list(output.shape) for output in outputs},
        }  # fmt: skip

    def _config(self, request: Request) -> Any:
        trt = self.trt
        config = self.builder.create_builder_config()
        # Without it the builder refuses aliases: a Unit that should have none is built without.
        feature = trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03
        config.set_preview_feature(feature, bool(request.aliases))
        profile = self.builder.create_optimization_profile()
        for name, sizes in request.shapes.items():
            profile.set_shape(name, *(tuple(x) for x in sizes))
        for name, values in request.values.items():
            profile.set_shape_input(name, *([x] for x in values))
        config.add_optimization_profile(profile)
        config.progress_monitor = _monitor(trt, request.unit, self.say)
        if self.cache is not None:
            config.set_timing_cache(self.cache, False)
        return config

    def use_timings(self, known: bytes) -> None:
        """Starts from what was measured before (b"": nothing); see `timings`."""
        config = self.builder.create_builder_config()
        self.cache = config.create_timing_cache(known)

    def timings(self) -> bytes:
        """What the builds so far measured."""
        return b"" if self.cache is None else bytes(self.cache.serialize())


def load_plugin(trt: Any, library: Path) -> ctypes.CDLL:
    """Registers the plugin of a library; EngineRefused if it has none."""
    registry = trt.get_plugin_registry()
    registry.load_library(str(library))
    if registry.get_creator(PLUGIN, VERSION, DOMAIN) is None:
        raise EngineRefused(f"{library} registers no plugin {DOMAIN}::{PLUGIN}")
    return ctypes.CDLL(str(library))


def last_fault(plugin: ctypes.CDLL) -> str:
    """What the plugin last objected to; "" for nothing since it was last asked."""
    text = ctypes.create_string_buffer(1024)
    plugin.clover_last_fault(text, ctypes.c_int64(len(text)))
    return text.value.decode(errors="replace")


def quiet_logger(trt: Any, words: list[str]) -> Any:
    """A logger that keeps errors for the exception instead of printing them."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                words.append(message)

    return Logger()


def _monitor(trt: Any, unit: str, say: Callable[[str], None]) -> Any:
    """Tells each phase of a build as it ends."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            if parent is None:
                say(f"    {unit}: {name}")

        def step_complete(self, name: str, step: int) -> bool:
            return True

        def phase_finish(self, name: str) -> None:
            return None

    return Monitor()


def main(path: str) -> int:
    """Builds the engines of a request file and prints one JSON object; exit status 1 if refused."""
    asked = json.loads(Path(path).read_text())
    answer: dict[str, Any]
    try:
        builder = Builder(asked["module"], Path(asked["library"]), _say)
        answer = {"built": [asdict(builder.build(Request(**x))) for x in asked["engines"]]}
    except EngineRefused as error:
        answer = {"refused": str(error)}
    print(json.dumps(answer), flush=True)
    # RTX 1.7 may crash while its globals are torn down; everything is written by now.
    os._exit(int("refused" in answer))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
