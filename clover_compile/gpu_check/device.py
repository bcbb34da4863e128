"""Precompiled kernels on a CUDA device, under torch's context and streams."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from torch import Tensor

from clover_compile.kernels.call import DTYPES, TORCH, poisoned
from clover_compile.kernels.compiled import Compiled, compile_launch, key, signature
from clover_compile.runtime.cuda_driver import Kernel
from clover_compile.runtime.launch_plan import Launch, Operand
from clover_compile.targets.cubins import Job


def _compile(job: Job) -> Compiled | str:
    try:
        return compile_launch(job.plan, job.variant, job.launch, job.capability)
    except Exception as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        return f"{job.launch.kernel}: {first[0]}"


def compile_all(made: Mapping[str, Job], workers: int | None = None) -> dict[str, Compiled | str]:
    """Compiles in parallel; a kernel that does not compile gives its error instead."""
    workers = workers or os.cpu_count() or 1
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        return dict(zip(made, pool.map(_compile, made.values(), chunksize=2), strict=True))


class Gpu:
    """A launcher device: torch CUDA tensors and cubins launched through the driver."""

    def __init__(self, compiled: Mapping[str, Compiled | str], capability: int) -> None:
        self.compiled, self.capability = compiled, capability
        self.poison = True
        """Fill new arrays with NaN (integers: the largest); off while times are taken."""
        self._loaded: dict[str, Kernel] = {}

    def describe(self, array: Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        return DTYPES[array.dtype], tuple(array.shape), tuple(array.stride())

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Tensor:
        if not self.poison:
            return torch.empty(shape, dtype=TORCH[dtype], device="cuda")
        return poisoned(dtype, shape, "cuda")

    def launch(
        self, launch: Launch, grid: tuple[int, int, int], arrays: Mapping[str, Tensor],
        integers: Mapping[str, int],
    ) -> None:  # fmt: skip
        named = {
            name: Operand(DTYPES[arrays[parameter].dtype], ())
            for parameter, name in launch.arguments.items()
        }
        name = key(launch, named, self.capability)
        kernel = self._loaded.get(name) or self._load(name)
        given = {**{k: x.data_ptr() for k, x in arrays.items()}, **integers}
        order = [k for k in signature(launch, named) if k in given]
        misaligned = [k for k in arrays if given[k] % 16]
        if misaligned:
            raise ValueError(f"{name}: {misaligned} not aligned to 16 bytes")
        small = [k in integers for k in order]
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch(grid, [given[k] for k in order], small, stream)

    def _load(self, name: str) -> Kernel:
        found = self.compiled[name]
        if isinstance(found, str):
            raise RuntimeError(f"did not compile: {found}")
        function = name.split("-sm")[0]
        self._loaded[name] = Kernel(found.cubin, function, found.warps, found.shared)
        return self._loaded[name]
