"""Runs a bundle's finish.py beside a stand-in that only records what it is given to open.

    python tests/recording_tensorrt.py BUNDLE NEW RECORD.json

It is no TensorRT: it builds nothing, and says so. A GPU is claimed, which this machine has not.
"""

from __future__ import annotations

import importlib.metadata
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

opened: list[str] = []
given: list[str] = []
"""Paths handed to the stand-in."""
answers: dict[str, Any] = {}


class Anything:
    """Takes every call and attribute."""

    def __init__(self, *_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return Anything()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return Anything()


class Network(Anything):
    """Has one plugin layer for each node of the ONNX file."""

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.num_inputs = self.num_outputs = 0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def get_layer(self, i: int) -> Any:
        return self.layers[i]


class Parser(Anything):
    """Reads the names of nodes and nothing else."""

    def __init__(self, network: Network, _: Any) -> None:
        self.network = network

    def parse_from_file(self, path: str) -> bool:
        import onnx

        given.append(path)
        nodes = [n for n in onnx.load(path).graph.node if n.op_type == "TritonKernel"]
        self.network.layers = [SimpleNamespace(name=n.name, type="plugin") for n in nodes]
        return True


class Builder(Anything):
    def create_network(self, _: int) -> Network:
        return Network()

    def build_serialized_network(self, *_: Any) -> Any:
        return memoryview(b"recorded: no engine")


class Registry(Anything):
    def load_library(self, path: str) -> None:
        given.append(path)

    def get_creator(self, *names: str) -> Any:
        return names


class Runtime(Anything):
    def deserialize_cuda_engine(self, code: bytes) -> None:
        assert code == b"recorded: no engine"


def stand_in() -> ModuleType:
    """The module."""
    made: Any = ModuleType("tensorrt")
    made.__version__ = "11.0.0"
    made.ILogger, made.IProgressMonitor = Anything, Anything
    made.LayerType = SimpleNamespace(PLUGIN_V3="plugin")
    made.PreviewFeature = Anything()
    made.OnnxParser, made.Builder, made.Runtime = Parser, Builder, Runtime
    made.get_plugin_registry = Registry
    found: ModuleType = made
    return found


def main(bundle: Path, new: Path, record: Path) -> None:
    """Finishes the bundle as far as a stand-in can: until an engine would be opened."""
    version = importlib.metadata.version
    patched: Any = importlib.metadata
    patched.version = lambda name: "11.0.0" if name == "tensorrt" else version(name)
    sys.modules["tensorrt"] = stand_in()
    sys.path.insert(0, str(bundle / "runner.pyz"))
    from clover_compile.runtime import cuda_driver, trt_build

    facts: dict[str, Any] = {"device_count": 1, "capability": 90, "device_name": "none"}
    for name, value in facts.items():
        setattr(cuda_driver, name, lambda value=value: value)
    builder_cache = trt_build.Builder
    builder_cache.timings = lambda self: b""  # type: ignore[method-assign]
    sys.argv = ["finish.py", "-o", str(new)]
    status: Any = None
    sys.addaudithook(_note)
    try:
        runpy.run_path(str(bundle / "finish.py"), run_name="__main__")
    except SystemExit as end:
        status = end.code
    record.write_text(json.dumps({"status": status, "given": given, "opened": sorted(set(opened))}))


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str):
        opened.append(arguments[0])


if __name__ == "__main__":
    main(*(Path(x).absolute() for x in sys.argv[1:4]))
