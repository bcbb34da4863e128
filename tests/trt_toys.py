"""Stand-ins for TensorRT tests: kernels without code, and the plugin's library by its C entries."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from clover_compile.kernels.compiled import Compiled, key, operands
from clover_compile.runtime.launch_plan import Plan
from clover_compile.targets.cubins import Cubins
from clover_compile.targets.trt.library import library

ROOM = 1 << 20


def hollow_cubins(
    plans: Mapping[str, Plan], capability: int, target: str = "", say: Any = None
) -> Cubins:  # fmt: skip
    """What compile_plans gives, but for the code: an ELF mark and the kernel's key."""
    cubins = Cubins(capability, {}, {})
    for name, plan in plans.items():
        cubins.keys[name] = []
        for variant in plan.variants:
            keys = [key(x, operands(plan, variant), capability) for x in variant.launches]
            cubins.keys[name].append(keys)
            for k, launch in zip(keys, variant.launches, strict=True):
                code = b"\x7fELF" + k.encode()
                cubins.compiled[k] = Compiled(k, capability, code, "", 0, launch.warps, 0)
                function = launch.kernel.split(":")[1]
                cubins.rows[k] = {"function": function, "warps": launch.warps, "shared": 0}
    return cubins


@cache
def plugin() -> ctypes.CDLL:
    """The plugin's library."""
    return ctypes.CDLL(str(library().path))


def evaluate(expression: str, names: Mapping[str, int]) -> int:
    """The C++ value of an expression; ValueError if it has none."""
    found = ctypes.c_int64()
    text = ctypes.create_string_buffer(ROOM)
    spelled = (ctypes.c_char_p * len(names))(*(x.encode() for x in names))
    values = (ctypes.c_int64 * len(names))(*names.values())
    status = plugin().clover_evaluate(
        expression.encode(), len(names), spelled, values, ctypes.byref(found), text,
        ctypes.c_int64(ROOM),
    )  # fmt: skip
    if status:
        raise ValueError(text.value.decode())
    return found.value


def resolve(
    plan: bytes, cubins: bytes, capability: int, shapes: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """What the plugin would launch for inputs of these shapes; ValueError with its objection."""
    text = ctypes.create_string_buffer(ROOM)
    ranks = (ctypes.c_int32 * len(shapes))(*(len(x) for x in shapes))
    flat = [size for shape in shapes for size in shape]
    dims = (ctypes.c_int64 * len(flat))(*flat)
    status = plugin().clover_resolve(
        plan, ctypes.c_int64(len(plan)), cubins, ctypes.c_int64(len(cubins)), capability, ranks,
        dims, len(shapes), text, ctypes.c_int64(ROOM),
    )  # fmt: skip
    if status:
        raise ValueError(text.value.decode())
    found: dict[str, Any] = json.loads(text.value)
    return found


def scratch(folder: Path, name: str, data: bytes) -> str:
    """Writes a file and returns its path."""
    (folder / name).write_bytes(data)
    return str(folder / name)
