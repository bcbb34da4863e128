"""The experts over fp8 weights against the reference."""

from __future__ import annotations

import pytest

from clover_compile.kernels.op import Case
from clover_compile.kernels.table import fused_op
from tests.interpreted.harness import DTYPES, arguments, check, one_sequence

OP = fused_op("moe_fp8")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", one_sequence(OP), ids=lambda case: case.name)
def test_equals_the_reference(case: Case, dtype: str) -> None:
    check(OP, arguments(OP, case, dtype), dtype)
