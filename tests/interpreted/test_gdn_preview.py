"""preview_head against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from clover_compile.kernels.call import UnplannedCall
from clover_compile.kernels.gdn_preview.spec import Sizes, inputs
from clover_compile.kernels.op import Case
from clover_compile.kernels.plans import plan_of
from clover_compile.kernels.table import fused_op
from clover_compile.runtime.launcher import resolve
from tests.interpreted.harness import DTYPES, arguments, check, interpret, one_sequence

OP = fused_op("gdn_preview")


def made(sizes: Sizes, dtype: str) -> list[Any]:
    """Arguments of these sizes."""
    return arguments(OP, Case("", lambda g: inputs(sizes, g)), dtype)


def cases() -> Iterator[Any]:
    """Every case and dtype; the blocks that take seconds are left to `make test-all`."""
    for case in one_sequence(OP):
        rows = int(case.make(torch.Generator())[0].shape[1])
        for dtype in DTYPES:
            late = rows > 70 or (rows > 33 and dtype == "bf16")
            marks = (pytest.mark.slow,) if late else ()
            yield pytest.param(case, dtype, marks=marks, id=f"{case.name}-{dtype}")


@pytest.mark.parametrize(("case", "dtype"), list(cases()))
def test_equals_the_reference(case: Case, dtype: str) -> None:
    check(OP, arguments(OP, case, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 15, 16, 17])
@pytest.mark.parametrize("capability", [80, 90])
def test_edges_of_the_tiles(rows: int, capability: int, dtype: str) -> None:
    """Heads of no power of two; on 80 a second step of keys begins at row 16."""
    sizes = Sizes(rows, key_heads=1, heads=2, dk=20, dv=18)
    check(OP, made(sizes, dtype), dtype, capability=capability)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [2, 5])
def test_another_number_of_taps(taps: int, dtype: str) -> None:
    check(OP, made(Sizes(5, key_heads=1, heads=2, taps=taps), dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_stand_apart(dtype: str) -> None:
    """u, z and a are slices of one projection; what lies between the slices is NaN."""
    args = made(Sizes(5, key_heads=1, heads=2), dtype)
    joined = torch.full((1, 5, 100), torch.nan).to(DTYPES[dtype])
    start = 0
    for i in range(3):
        part = joined[..., start : start + args[i].shape[2]]
        part.copy_(args[i])
        args[i], start = part, start + args[i].shape[2] + 8
    check(OP, args, dtype)


def amid_nan(x: torch.Tensor) -> torch.Tensor:
    """The same values with NaN before and behind them in memory."""
    wide = torch.full((x.numel() + 512,), torch.nan, dtype=x.dtype)
    return wide[256 : 256 + x.numel()].view(x.shape).copy_(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_beside_the_arrays_is_read(dtype: str) -> None:
    args = made(Sizes(5, key_heads=1, heads=1), dtype)
    check(OP, [amid_nan(x) if isinstance(x, torch.Tensor) else x for x in args], dtype)


@pytest.mark.parametrize("history", [-1e4, 1e4])
@pytest.mark.parametrize("a", [-1e4, 1e4])
def test_extremes_at_once_in_a_repeated_block(a: float, history: float) -> None:
    sizes = Sizes(20, key_heads=1, heads=2, same=True, a=a, history=history)
    check(OP, made(sizes, "bf16"), "bf16")


def test_history_keeps_more_than_the_storage_dtype() -> None:
    """All mass on the history slot: its product may lose no more than y's own rounding."""
    args = made(Sizes(3, key_heads=1, heads=1, dk=128, dv=64, history=1e4, a=-1e4), "bf16")
    args[3].zero_()
    right = OP.reference(*(x.float() if isinstance(x, torch.Tensor) else x for x in args))
    error = (interpret(OP, args)["y"].float() - right).abs()
    assert (error <= right.abs() * 2.0**-8 + 1e-6).all()


def test_tiles_by_capability() -> None:
    args = made(Sizes(5), "bf16")
    for capability, rows, tiles in ((90, 64, 4), (90, 65, 3), (80, 65, 5)):
        plan = plan_of(OP, args, capability=capability)
        call = resolve(plan, {"n": rows})
        assert call.grid(call.variant.launches[0]) == (6, tiles, 1)


def test_sizes_that_do_not_fit_are_refused() -> None:
    args = made(Sizes(5), "bf16")
    args[0] = args[0][..., :-1]
    with pytest.raises(UnplannedCall, match="do not fit together"):
        plan_of(OP, args)
