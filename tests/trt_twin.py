"""A stand-in for a GPU with TensorRT: host memory, and graphs run in ONNX Runtime.

It shows that the session binds, aliases, copies and refuses as it should. It is no TensorRT, runs
no kernel and no plugin, and nothing it does says how an engine answers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from clover_compile.targets.ort_cpu.lowering import arrange
from clover_compile.targets.trt.graph import Array, Graph
from clover_compile.targets.trt.render import function_model
from tests.onnx_runs import session

NAMES = {
    torch.float32: ("FLOAT", np.float32), torch.int64: ("INT64", np.int64),
    torch.int32: ("INT32", np.int32), torch.bool: ("BOOL", np.bool_),
}  # fmt: skip


class HostMemory:
    """In place of device memory."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._bytes = (ctypes.c_uint8 * size)() if size else None
        self.address = 0 if self._bytes is None else ctypes.addressof(self._bytes)


class HostStream:
    """Carries every copy out at once."""

    handle = SimpleNamespace(value=1)

    def wait(self) -> None:
        pass

    def upload(self, address: int, host: int, size: int) -> None:
        ctypes.memmove(address, host, size)

    def download(self, host: int, address: int, size: int) -> None:
        ctypes.memmove(host, address, size)

    def clear(self, address: int, size: int) -> None:
        ctypes.memset(address, 0, size)

    def copy(self, target: int, source: int, size: int) -> None:
        assert target != source
        ctypes.memmove(target, source, size)


class HostRing:
    """There is no page-locked memory: every copy waits."""

    def __init__(self, stream: HostStream) -> None:
        pass

    def hold(self, host: int, size: int) -> None:
        pass


class Engine:
    """One Unit's graph, its nodes expanded to functions."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        expanded = function_model(graph)
        self.session, self.layouts = session(expanded.model), expanded.layouts
        arrays = (*graph.inputs, *graph.weights, *graph.outputs)
        self.arrays: Mapping[str, Array] = {x.name: x for x in arrays}

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=NAMES[self.arrays[name].dtype][0])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(x if isinstance(x, int) else -1 for x in self.arrays[name].shape)

    def create_execution_context(self) -> Context:
        return Context(self)


class Context:
    """Reads inputs from, and writes outputs to, the addresses it was given."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.addresses: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        self.fail = False

    def set_tensor_address(self, name: str, address: int) -> None:
        assert address, name
        self.addresses[name] = address

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> None:
        for size, found in zip(self.engine.arrays[name].shape, shape, strict=True):
            if isinstance(size, str):
                self.sizes[size] = found
            assert isinstance(size, str) or size == found

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if "keep" in self.addresses:
            self.sizes["keep"] = int(self._at("keep", ()))
        shape = self.engine.arrays[name].shape
        return tuple(self.sizes[x] if isinstance(x, str) else x for x in shape)

    def _at(self, name: str, shape: tuple[int, ...]) -> Any:
        kind: Any = np.dtype(NAMES[self.engine.arrays[name].dtype][1])
        count = max(1, prod(shape)) if not shape else prod(shape)
        pointer = (ctypes.c_uint8 * (count * kind.itemsize)).from_address(self.addresses[name])
        return np.frombuffer(pointer, kind).reshape(shape)

    def execute_async_v3(self, stream: int) -> bool:
        if self.fail:
            return False
        graph = self.engine.graph
        feeds = {}
        for x in (*graph.inputs, *graph.weights):
            shape = tuple(self.sizes[n] if isinstance(n, str) else n for n in x.shape)
            value = self._at(x.name, shape).copy()
            layout = self.engine.layouts.get(x.name, "")
            feeds[x.name] = arrange(torch.from_numpy(value), layout).numpy() if layout else value
        names = [x.name for x in graph.outputs]
        # A kernel may write an output while it reads: only aliased memory is shared.
        for name, value in zip(names, self.engine.session.run(names, feeds), strict=True):
            self._at(name, value.shape)[...] = value
        return True


def module(engines: Mapping[str, Engine]) -> Any:
    """In place of the module tensorrt: engines by the Unit's name as their code."""

    class Runtime:
        def __init__(self, _: Any) -> None:
            pass

        def deserialize_cuda_engine(self, code: bytes) -> Engine:
            return engines[code.decode()]

    class Logger:
        ERROR = INTERNAL_ERROR = 0

    registry = SimpleNamespace(load_library=lambda path: None, get_creator=lambda *names: names)
    return SimpleNamespace(
        Runtime=Runtime, ILogger=Logger, get_plugin_registry=lambda: registry
    )  # fmt: skip
