"""add_norm against the reference."""

from __future__ import annotations

import pytest
import torch

from clover_compile.kernels.op import Case
from clover_compile.kernels.table import fused_op
from tests.interpreted.harness import DTYPES, arguments, check, interpret, one_sequence

OP = fused_op("rms_norm")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", one_sequence(OP), ids=lambda case: case.name)
def test_equals_the_reference(case: Case, dtype: str) -> None:
    check(OP, arguments(OP, case, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_stand_apart(dtype: str) -> None:
    """x is a slice of a wider array, as the joined projections make it; the rest is NaN."""
    g = torch.Generator().manual_seed(1)
    wide = torch.full((1, 5, 100), torch.nan).to(DTYPES[dtype])
    wide[..., :24] = torch.randn(1, 5, 24, generator=g).to(DTYPES[dtype])
    weight = torch.randn(24, generator=g).to(DTYPES[dtype])
    residual = torch.randn(1, 5, 24, generator=g).to(DTYPES[dtype])
    check(OP, (wide[..., :24], residual, weight, 1e-6), dtype)
    assert set(interpret(OP, (wide[..., :24], None, weight, 1e-6), ["normed"])) == {"normed"}
