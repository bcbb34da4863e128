"""Opens a `triton-*` bundle on the GPU it was compiled for. Never run where it is built."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from clover_compile.runtime import streams
from clover_compile.runtime.cuda_device import CudaArray, CudaDevice, Module
from clover_compile.runtime.cuda_driver import CudaError
from clover_compile.runtime.errors import BadBundle
from clover_compile.runtime.gpu_needs import GpuNeeds
from clover_compile.runtime.launch_plan import ITEMSIZE, Launch, Plan, strides_of
from clover_compile.runtime.manifest import Checked
from clover_compile.runtime.program_engine import ProgramEngine, state_layout
from clover_compile.runtime.program_files import read_plans, read_programs, read_table
from clover_compile.runtime.state_pool import Layout
from clover_compile.runtime.terminal import one_line

STORED = {
    "float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16",
    "float8_e4m3fn": "fp8e4nv",
}  # fmt: skip
"""dtypes of the weight store -> their names in launch plans."""

PIECE = 64 * 2**20
"""Bytes of weights copied at a time."""


def open_engine(checked: Checked) -> ProgramEngine:
    """The engine of a checked bundle; WrongMachine with both values if it does not fit here."""
    try:
        return _open(checked)
    except CudaError as error:
        raise _refuse(checked, str(error)) from None


def _open(checked: Checked) -> ProgramEngine:
    kernels = read_table(checked, "kernels.json")
    programs = read_programs(checked)
    state = state_layout(programs["commit"], checked.manifest["context"])
    _needs(checked, kernels, state).check(one_line(str(checked.path)))
    described, plans = read_table(checked, "plans.json"), read_plans(checked)
    device = CudaDevice(_modules(checked.path, kernels["kernels"]), _keys(plans, described))
    return ProgramEngine(programs, plans, upload(checked, device), device)


def _refuse(checked: Checked, fault: str) -> BadBundle:
    return BadBundle(one_line(str(checked.path)), one_line(fault))


def _needs(checked: Checked, kernels: Mapping[str, Any], state: Layout) -> GpuNeeds:
    """Weights and one state, which at the model's whole context is gigabytes."""
    # One that is the first rows of another lies at the same place: the longest comes last.
    entries = sorted(checked.manifest["weights"].values(), key=_bytes)
    weights = {(w["offset"], w["file"]): _bytes(w) for w in entries}
    target = checked.manifest["target"]
    held = sum(weights.values()) + sum(prod(s) * ITEMSIZE[kind] for kind, s in state.values())
    return GpuNeeds(target, kernels["capability"], kernels["driver"], held)


def _bytes(weight: Mapping[str, Any]) -> int:
    count = 1
    for size in weight["shape"]:
        count *= size
    return count * ITEMSIZE[STORED[weight["dtype"]]]


def _modules(folder: Path, table: Mapping[str, Any]) -> dict[str, Module]:
    return {
        key: Module(
            (folder / "kernels" / f"{key}.cubin").read_bytes(), row["function"],
            tuple(row["parameters"]), row["warps"], row["shared"],
        )
        for key, row in table.items()
    }  # fmt: skip


def _keys(plans: Mapping[str, Plan], described: Mapping[str, Any]) -> Callable[[Launch], str]:
    """Kernel key of a launch of one of these plans."""
    found = {
        id(launch): key
        for name, plan in plans.items()
        for variant, row in zip(plan.variants, described[name]["kernels"], strict=True)
        for launch, key in zip(variant.launches, row, strict=True)
    }
    return lambda launch: found[id(launch)]


def upload(checked: Checked, device: CudaDevice) -> dict[str, CudaArray]:
    """Copies the mapped weights to the device; a weight inside another shares its memory."""
    stored = checked.manifest["weights"]
    largest: dict[tuple[str, int], str] = {}
    for name, w in stored.items():
        place = (w["file"], w["offset"])
        if place not in largest or _bytes(w) > _bytes(stored[largest[place]]):
            largest[place] = name
    total, done, found = sum(_bytes(stored[n]) for n in largest.values()), 0, {}
    for name in largest.values():
        w = stored[name]
        array = device.empty(STORED[w["dtype"]], tuple(w["shape"]))
        with (
            (checked.path / w["file"]).open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            for start in range(0, _bytes(w), PIECE):
                piece = data[w["offset"] + start : w["offset"] + min(_bytes(w), start + PIECE)]
                device.upload(array, start, piece)
                done += len(piece)
                line = f"loading weights {done / 1e9:.1f} of {total / 1e9:.1f} GB"
                streams.progress(line, last=done == total)
        found[name] = array
    for name, w in stored.items():
        shape = tuple(w["shape"])
        whole = found[largest[(w["file"], w["offset"])]]
        found.setdefault(name, device.view(whole, 0, shape, strides_of(shape)))
    return found
