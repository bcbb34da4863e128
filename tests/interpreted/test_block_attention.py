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
KEYS = tiles(90, 16, 1).keys


def made(sizes: Sizes, causal: bool, dtype: str = "fp32") -> list[Any]:
    """The reference's arguments."""
    return arguments(OP, Case("", partial(inputs, sizes, causal)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", one_sequence(OP), ids=lambda case: case.name)
def test_equals_the_reference(case: Case, dtype: str) -> None:
    check(OP, arguments(OP, case, dtype), dtype)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "block"])
@pytest.mark.parametrize("rows", range(1, 34))
def test_every_number_of_rows(rows: int, causal: bool) -> None:
    """Three heads on one, so that query tiles end inside a row."""
    sizes = Sizes(rows, 40, (33,), heads=3, heads_kv=1, poison=NAN)
    check(OP, made(sizes, causal, "bf16"), "bf16")


@pytest.mark.parametrize("length", [0, 1, KEYS - 1, KEYS, KEYS + 1, UNIT - 1, UNIT, UNIT + 1])
@pytest.mark.parametrize("rows", [3, 65], ids=["split", "whole"])
def test_prefixes_around_the_edges_of_tiles(rows: int, length: int) -> None:
    sizes = Sizes(rows, length + 1, (length,), heads=2, heads_kv=1, poison=INF)
    check(OP, made(sizes, length % 2 == 0), "fp32")


@pytest.mark.parametrize("most", [8, 64])
def test_prefixes_longer_than_one_unit_per_split(most: int) -> None:
    """Every split then takes two units, and the last splits of the grid have nothing to do."""
    splits = SHORT[most][1]
    sizes = Sizes(most, splits * UNIT + 7, (splits * UNIT + 1,), heads=1, heads_kv=1, poison=NAN)
    check(OP, made(sizes, True), "fp32")


@pytest.mark.parametrize("rows", [5, 66])
def test_capacity_changes_no_bit(rows: int) -> None:
    """The same prefix in a longer cache gives the same sums in the same order."""
    short = made(Sizes(rows, UNIT + 2, (UNIT + 1,), heads=2, heads_kv=1), False)
    long = list(short)
    for i in (3, 4):
        rest = torch.full((1, 3 * UNIT, 1, 8), NAN)
        long[i] = torch.cat([short[i][:, : UNIT + 1], rest], 1)
    a, b = interpret(OP, short), interpret(OP, long)
    assert all(torch.equal(a[name], b[name]) for name in OP.outputs)


@pytest.mark.parametrize("rows", [12, 70])
def test_the_smaller_tiles_and_a_head_of_24(rows: int) -> None:
    """What architectures without warp-group products take; sizes that are no power of two."""
    sizes = Sizes(rows, 50, (45,), heads=5, heads_kv=1, dim=24, rotary=12, poison=NAN)
    check(OP, made(sizes, True), "fp32", capability=86)


def test_a_query_tile_that_ends_on_the_first_row_of_a_key_tile() -> None:
    """Row 32 is the last of folded rows 1024..1087; it sees itself, alone in its tile of keys."""
    check(OP, made(Sizes(33, 0, (0,), heads=33, heads_kv=1), True), "fp32")


@pytest.mark.parametrize("rows", [5, 65])
def test_rows_that_stand_apart(rows: int) -> None:
    """Inputs are slices of wider arrays; what lies between their rows is NaN."""
    args = made(Sizes(rows, 37, (35,), heads=4, poison=NAN), True)
    for i in (0, 1, 2, 3, 4, 6, 7):
        x = args[i]
        wide = torch.full((1, x.shape[1], 2 * x.shape[2] + i, *x.shape[3:]), NAN)
        wide[:, :, i : i + x.shape[2]] = x
        args[i] = wide[:, :, i : i + x.shape[2]]
    check(OP, args, "fp32")


@pytest.mark.parametrize("rows", [4, 65])
@pytest.mark.parametrize("outputs", [("y",), ("y", "new_v"), ("new_k", "y")], ids="+".join)
def test_only_what_is_read_is_written(outputs: tuple[str, ...], rows: int) -> None:
    check(OP, made(Sizes(rows, 9, (9,), heads=2, heads_kv=1), False), "fp32", outputs)


@pytest.mark.parametrize("rows", [7, 65])
@pytest.mark.parametrize("factor", [1e-4, 30.0])
def test_extreme_sizes(rows: int, factor: float) -> None:
    """Heads near zero, where the epsilon matters, and scores that leave one key all the mass."""
    args = made(Sizes(rows, 40, (40,), heads=2, heads_kv=1), True)
    args[0], args[1] = args[0] * factor, args[1] * factor
    args[3], args[8] = args[3] * factor, args[8] * max(factor, 1.0)
    check(OP, args, "fp32")


@pytest.mark.parametrize("rows", [3, 65], ids=["split", "whole"])
def test_a_query_that_no_key_is_like(rows: int) -> None:
    """Every score is far below what the exponential of fp32 reaches; all keys count alike."""
    args = made(Sizes(rows, 4, (3,), heads=2, heads_kv=1, poison=NAN), False)
    query = args[0].view(1, rows, 2, 2, 8)[:, :, :, 0]
    for x, last in ((query, 1.0), (args[1], -1.0), (args[3][:, :3], -250.0)):
        x.zero_()
        x[..., -1] = last
    args[8], args[9] = torch.full((8,), 90.0), torch.full((8,), 90.0)
    check(OP, args, "fp32")
