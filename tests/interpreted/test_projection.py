"""The projection kernels against the reference."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from clover_compile.kernels.op import Case
from clover_compile.kernels.plans import plan_of
from clover_compile.kernels.projection.plan import tile_of_outputs
from clover_compile.kernels.projection.spec import inputs
from clover_compile.kernels.table import fused_op
from clover_compile.runtime.launcher import resolve
from tests.interpreted.harness import DTYPES, arguments, check, one_sequence

OP = fused_op("projection")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", one_sequence(OP), ids=lambda case: case.name)
def test_equals_the_reference(case: Case, dtype: str) -> None:
    check(OP, arguments(OP, case, dtype), dtype)


@pytest.mark.parametrize("rows", range(1, 34))
def test_every_number_of_rows(rows: int) -> None:
    case = Case("", partial(inputs, rows, 24, 17, rows % 2 == 0))
    check(OP, arguments(OP, case, "bf16"), "bf16")


# Wide enough that the table chooses each tile of outputs; 257 rows are the first of a prompt.
@pytest.mark.parametrize(
    ("rows", "outputs", "tile"),
    [(2, 6100, 64), (3, 1537, 32), (2, 257, 16), (257, 1025, 128), (257, 65, 64)],
)
def test_every_tile(rows: int, outputs: int, tile: int) -> None:
    args = arguments(OP, Case("", partial(inputs, rows, 136, outputs, True)), "bf16")
    launches = resolve(plan_of(OP, args), {"n": rows}).variant.launches
    assert [launch.constants["tile_m"] for launch in launches] == [tile]
    check(OP, args, "bf16")


def test_a_tile_is_small_only_where_programs_are_few() -> None:
    """Outputs of the released model's projections -> outputs per program."""
    tiles = {n: tile_of_outputs(n) for n in (12_352, 9216, 248_320, 2048, 257)}
    assert tiles == {12_352: 64, 9216: 64, 248_320: 64, 2048: 32, 257: 16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_rows_that_stand_apart(dtype: str, wide: bool) -> None:
    """x is a slice of a wider array; what lies between its rows is NaN."""
    g = torch.Generator().manual_seed(1)
    x = torch.full((1, 18, 56), torch.nan).to(DTYPES[dtype])
    x[..., 8:48] = torch.randn(1, 18, 40, generator=g).to(DTYPES[dtype])
    weight = torch.randn(33, 40, generator=g).to(DTYPES[dtype])
    check(OP, (x[..., 8:48], weight, wide), dtype)
