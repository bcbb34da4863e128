"""scan_columns and choose against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from clover_compile.kernels.op import Case
from clover_compile.kernels.pick.spec import Sizes, inputs
from clover_compile.kernels.table import fused_op
from tests.interpreted.harness import arguments, interpret, one_sequence, truth

OP = fused_op("pick")


def check_pick(args: Sequence[Any]) -> None:
    """AssertionError unless ids are equal and the rest is close; of a row with a NaN only the
    confidence is promised."""
    got, meant = interpret(OP, args), truth(OP, args)
    bad = args[0].isnan().any(-1)
    assert torch.equal(got["confidence"].isnan(), bad)
    assert ((got["ids"] >= 0) & (got["ids"] < args[0].shape[-1])).all()
    for name, value in got.items():
        assert value.dtype == meant[name].dtype
        torch.testing.assert_close(value[~bad], meant[name][~bad], rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("case", one_sequence(OP), ids=lambda case: case.name)
def test_equals_the_reference(case: Case) -> None:
    check_pick(arguments(OP, case, "fp32"))
