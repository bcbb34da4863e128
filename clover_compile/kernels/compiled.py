"""Ahead-of-time compilation of a plan's launches, without a GPU, and what the result costs."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from clover_compile.runtime.launch_plan import Launch, Operand, Plan, Variant

PTX = {80: 83, 86: 83, 89: 83, 90: 83, 100: 86, 120: 87}
"""PTX version times ten to write: what drivers of CUDA 12.3 (100: 12.7, 120: 12.8) and newer read.
Triton's own choice needs the newest."""


@dataclass(frozen=True)
class Compiled:
    """One kernel for one compute capability."""

    key: str
    """Kernel name and a hash of everything that selects its code."""
    capability: int
    cubin: bytes
    ptx: str
    shared: int
    """Bytes of dynamic shared memory per block."""
    warps: int
    """Warps per block to launch with; more than asked for where the compiler specialises warps."""
    scratch: int
    """Bytes of global scratch per program."""
    tensor_memory: int = 0
    """Columns of tensor memory (sm_100)."""

    def usage(self) -> Usage:
        """Registers, stack and instructions, read from the cubin."""
        return _usage(self.cubin)


@dataclass(frozen=True)
class Usage:
    """What a cubin says of itself."""

    registers: int
    stack: int
    """Bytes of stack per thread; spilled registers show here."""
    local: int
    opcodes: Mapping[str, int]
    """SASS instructions by opcode without modifiers."""

    @property
    def instructions(self) -> int:
        return sum(self.opcodes.values())


def operands(plan: Plan, variant: Variant) -> dict[str, Operand]:
    """Every array a variant's launches may name."""
    inputs = {name: x for name, x in plan.inputs.items() if x is not None}
    return {**inputs, **plan.outputs, **variant.workspace}


def signature(launch: Launch, arrays: Mapping[str, Operand]) -> dict[str, str]:
    """Triton's type per kernel parameter, in the kernel's order."""
    kernel = function(launch.kernel)
    types = {name: f"*{arrays[array].dtype}" for name, array in launch.arguments.items()}
    types |= dict.fromkeys(launch.integers, "i32") | dict.fromkeys(launch.constants, "constexpr")
    if set(types) != set(kernel.arg_names):
        odd = sorted(set(types) ^ set(kernel.arg_names))
        raise ValueError(f"{launch.kernel}: parameters and arguments differ: {odd}")
    return {name: types[name] for name in kernel.arg_names}


def key(launch: Launch, arrays: Mapping[str, Operand], capability: int) -> str:
    """Name of the compiled kernel: equal exactly where the code is."""
    parts = [
        launch.kernel, signature(launch, arrays), dict(launch.constants),
        launch.warps, launch.stages, capability,
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
    return f"{launch.kernel.split(':')[1]}-sm{capability}-{digest}"


def function(name: str) -> Any:
    """The @triton.jit function "module:function"."""
    module, attribute = name.split(":")
    return getattr(importlib.import_module(module), attribute)


def compile_launch(plan: Plan, variant: Variant, launch: Launch, capability: int) -> Compiled:
    """Compiles one launch; pointers are promised to be 16-byte aligned."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if triton.knobs.runtime.interpret:
        raise RuntimeError("a process interprets or compiles: unset TRITON_INTERPRET")
    arrays = operands(plan, variant)
    types = signature(launch, arrays)
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind[0] == "*"
    }
    source = ASTSource(
        fn=function(launch.kernel), signature=types, constexprs=dict(launch.constants),
        attrs=aligned,
    )  # fmt: skip
    made = triton.compile(
        source, target=GPUTarget("cuda", capability, 32),
        options={
            "num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": True,
            "ptx_version": PTX[capability],
        },
    )  # fmt: skip
    facts = made.metadata
    return Compiled(
        key(launch, arrays, capability), capability, made.asm["cubin"], made.asm["ptx"],
        facts.shared, facts.num_warps, facts.global_scratch_size or 0,
        getattr(facts, "tmem_size", 0) or 0,
    )  # fmt: skip


@cache
def tool(name: str) -> Path:
    """A CUDA binary tool that the Triton package carries (cuobjdump, nvdisasm, ptxas)."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    found = folder / name
    if not found.is_file():
        raise RuntimeError(f"the installed Triton carries no {name}")
    return found


@cache
def assembler(capability: int) -> str:
    """CUDA release of the assembler that makes this capability's cubins, e.g. "12.8"."""
    newer = "ptxas-blackwell"
    own = newer if capability >= 100 and tool("ptxas").with_name(newer).is_file() else "ptxas"
    found = re.search(r"release (\d+\.\d+)", _output(own, "--version"))
    assert found is not None
    return found[1]


def _usage(cubin: bytes) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output("cuobjdump", "-res-usage", file.name)
        code = _output("nvdisasm", "-c", file.name)
    numbers = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    found = re.findall(
        r"^\s+(?:/\*[0-9a-f]+\*/\s+)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)\b", code, re.M
    )
    return Usage(numbers["REG"], numbers["STACK"], numbers["LOCAL"], Counter(found))


def _output(name: str, *arguments: str) -> str:
    command = [str(tool(name)), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
