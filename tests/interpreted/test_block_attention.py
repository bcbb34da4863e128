"""The attention kernels against the reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from clover_compile.kernels.block_attention.plan import SHORT, UNIT, tiles
from clover_compile.kernels.block_attention.spec import Sizes, inputs
from clover_compile.kernels.op import Case
from clover_compile.kernels.table import fused_op
from tests.interpreted.harness import DTYPES, arguments, check, interpret, one_sequence

OP = fused_op("block_attention")
NAN, INF = float("nan"), float("inf")
KEYS = tiles(90, 16).keys


def made(sizes: Sizes, causal: bool, dtype: str = "bf16") -> list[Any]:
    return arguments(OP, Case("", partial(inputs, sizes, causal)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", one_sequence(OP), ids=lambda case: case.name)
def test_equals_the_reference(case: Case, dtype: str) -> None:
    check(OP, arguments(OP, case, dtype), dtype)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "block"])
@pytest.mark.parametrize("rows", range(1, 34))
def test_every_number_of_rows(rows: int, causal: bool) -> None:
    sizes = Sizes(rows, 40, (33,), heads=3, heads_kv=1, poison=NAN)
    check(OP, made(sizes, causal), "bf16")


@pytest.mark.parametrize("length", [0, 1, KEYS - 1, KEYS, KEYS + 1, UNIT - 1, UNIT, UNIT + 1])
@pytest.mark.parametrize("rows", [3, 65])
def test_prefixes_around_the_edges_of_tiles(rows: int, length: int) -> None:
    """One row of the prefix more is NaN; the last valid one counts as much as any."""
    sizes = Sizes(rows, length + 1, (length,), heads=2, heads_kv=1, poison=NAN)
    check(OP, made(sizes, length % 2 == 0, "fp32"), "fp32")
