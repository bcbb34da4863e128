"""The interpreter device: exact bfloat16, no access out of bounds, no race between programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from clover_compile.kernels.interpreter import Interpreter, install, self_test
from clover_compile.runtime.launch_plan import Launch

install()


def _copy(x, y, first: tl.constexpr, count: tl.constexpr, shift: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * count + tl.arange(0, count)
    tl.store(y + at * shift, tl.load(x + at + first))


def _swap(y, count: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, count)
    other = tl.load(y + (1 - tl.program_id(0)) * count + at)
    tl.store(y + tl.program_id(0) * count + at, other)


copy: Any = triton.jit(_copy)
swap: Any = triton.jit(_swap)


def launch(
    kernel: str, arrays: dict[str, Any], programs: int, **constants: int
) -> dict[str, Any]:  # fmt: skip
    device = Interpreter()
    made = {k: device.empty("fp32", x) if isinstance(x, tuple) else x for k, x in arrays.items()}
    call = Launch(f"{__name__}:{kernel}", (1, 1, 1), dict.fromkeys(arrays, ""), constants)
    try:
        device.launch(call, (programs, 1, 1), made, {})
    except interpreter.InterpreterError as error:
        raise error.__cause__ or error from None
    return made


def test_copy_is_allowed() -> None:
    x = torch.arange(8.0)
    made = launch("copy", {"x": x, "y": (8,)}, 2, first=0, count=4, shift=1)
    assert torch.equal(made["y"], x)


@pytest.mark.parametrize(
    ("arrays", "first", "shift", "said"),
    [
        ({"x": torch.ones(8), "y": (8,)}, 1, 1, "load outside"),
        ({"x": torch.ones(8), "y": (8,)}, -1, 1, "load outside"),
        ({"x": torch.ones(9)[1:], "y": (8,)}, -1, 1, "load outside"),
        ({"x": torch.ones(8), "y": (7,)}, 0, 1, "store outside"),
        ({"x": torch.ones(8), "y": torch.ones(8)}, 0, 1, "input"),
        ({"x": torch.ones(8), "y": (8,)}, 0, 0, "race"),
    ],
)
def test_refused(arrays: dict[str, Any], first: int, shift: int, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        launch("copy", arrays, 2, first=first, count=4, shift=shift)


def test_reading_what_another_program_writes_is_a_race() -> None:
    with pytest.raises(RuntimeError, match="race"):
        launch("swap", {"y": (8,)}, 2, count=4)


@pytest.mark.parametrize("name", ["create_dot", "binary_op", "cast_impl", "create_fp_to_fp"])
def test_the_self_test_notices_a_lost_patch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own method in place of the patched one, or of the patched function."""
    builder = interpreter.InterpreterBuilder
    if name == "create_fp_to_fp":
        monkeypatch.setattr(interpreter, "_convert_float", truncate)
    else:
        monkeypatch.setattr(builder, name, getattr(builder, name).__closure__[0].cell_contents)
    with pytest.raises((RuntimeError, interpreter.InterpreterError)):
        self_test()


def truncate(data: Any, source: Any, target: Any, *_: Any) -> Any:
    """The cast of a lost patch: bits cut off."""
    shift = source.primitive_bitwidth - target.primitive_bitwidth
    bits = data.view(f"u{data.itemsize}")
    return (bits >> shift if shift > 0 else bits).astype(f"u{target.primitive_bitwidth // 8}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16])
def test_every_value_is_rounded_as_torch_does(dtype: torch.dtype) -> None:
    """All 65,536 bfloat16 values, and floats between neighbouring ones."""
    exact = torch.arange(65536).to(torch.int32).to(torch.int16).view(torch.bfloat16).float()
    exact = exact[exact.abs() < 400]
    x = torch.cat([exact, exact * 1.001953125, exact * 1.00390625])
    x = torch.nn.functional.pad(x, (0, -len(x) % 1024))
    device = Interpreter()
    names = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv", torch.float16: "fp16"}
    y = device.empty(names[dtype], (len(x),))
    call = Launch(
        f"{__name__}:copy", (1, 1, 1), {"x": "x", "y": "y"}, {"first": 0, "count": 1024, "shift": 1}
    )
    device.launch(call, (len(x) // 1024, 1, 1), {"x": x, "y": y}, {})
    assert torch.equal(y.float(), x.to(dtype).float())


def test_interpreter_mode_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        install()
