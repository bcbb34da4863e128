"""The kernels of clover::moe against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from clover_compile.gpu_check.values import truth
from clover_compile.kernels.budget import byte_floor, share_used
from clover_compile.kernels.moe.plan import BLOCKS, CHUNK, SLOTS, SPREAD
from clover_compile.kernels.moe.spec import Sizes, inputs
from clover_compile.kernels.op import Case
from clover_compile.kernels.plans import plan_of
from clover_compile.kernels.table import fused_op
from clover_compile.runtime.launcher import resolve
from tests.interpreted.harness import DTYPES, arguments, check, interpret, one_sequence

OP = fused_op("moe")
SMALL = Sizes(4, 3, hidden=16, width=8, shared=8)


def _made(sizes: Sizes, dtype: str = "fp32") -> list[Any]:
    return arguments(OP, Case("made", lambda g: inputs(sizes, g)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", one_sequence(OP), ids=lambda case: case.name)
def test_equals_the_reference(case: Case, dtype: str) -> None:
    check(OP, arguments(OP, case, dtype), dtype)


def test_every_number_of_rows() -> None:
    for rows in range(1, 34):
        check(OP, _made(replace(SMALL, rows=rows, block=rows % 2 == 0, top_p=0.7)), "fp32")


# More than 64 experts in use: the programs of `up` take several entries each. Sizes that are whole
# tiles take the loads without masks; sizes of several tiles and steps, ragged, those with masks.
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        ("fp32", Sizes(64, 4, experts=80, hidden=16, width=16, shared=16)),
        ("bf16", Sizes(40, 4, experts=72, hidden=16, width=16, shared=16, block=True)),
        ("bf16", Sizes(3, 1, experts=2, hidden=256, width=512, shared=512)),
        ("fp32", Sizes(66, 2, experts=3, hidden=32, width=32, shared=32, block=True, top_p=0.6)),
        ("fp32", Sizes(3, 2, experts=3, hidden=136, width=40, shared=264)),
        ("fp32", Sizes(3, 2, experts=3, hidden=40, width=264, shared=40)),
        ("fp32", Sizes(3, 2, experts=3, hidden=32, width=32, shared=16)),
        ("bf16", Sizes(65, 2, experts=3, hidden=40, width=264, shared=40)),
    ],
    ids=lambda s: s if isinstance(s, str) else f"{s.rows}-{s.experts}-{s.hidden}-{s.width}",
)
def test_several_tiles(dtype: str, sizes: Sizes) -> None:
    args = _made(sizes, dtype)
    if sizes.experts == 80:
        assert len(args[1].topk(sizes.top_k, -1)[1].unique()) > SPREAD
    check(OP, args, dtype)


def test_rows_that_are_scattered_lose_nothing_in_fp32() -> None:
    args = _made(replace(SMALL, rows=66, experts=3, top_k=2))
    got, meant = interpret(OP, args, ["y"])["y"], truth(OP, args)["y"]
    assert (got - meant).abs().max() <= 2e-6 * meant.abs().max()


# Around the edges of the variants and of a chunk; a second chunk with a list of its own.
@pytest.mark.parametrize(
    ("rows", "block"),
    [(64, True), (65, False), (96, True), (CHUNK, False), (CHUNK + SLOTS + 1, True)],
)
def test_edges_of_variants(rows: int, block: bool) -> None:
    args = _made(replace(SMALL, rows=rows, experts=5, top_k=2, block=block, top_p=0.8))
    plan = plan_of(OP, args)
    assert len(resolve(plan, {"n": rows}).variant.launches) == (3 if rows <= BLOCKS[-1] else 4)
    check(OP, args, "fp32")


def test_a_first_tile_that_is_not_full_before_a_second_chunk() -> None:
    """Its empty slots would be rows of the shared expert if that had one tile more."""
    args = _made(replace(SMALL, rows=CHUNK + SLOTS + 1, experts=3, top_k=1))
    args[1][..., 0] = -50.0
    args[1][0, [3, 40], 0] = 50.0
    check(OP, args, "fp32")


@pytest.mark.parametrize("rows", [6, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_stand_apart(rows: int, dtype: str) -> None:
    """Slices of wider arrays, as joined projections make them; the rest is NaN."""
    args = _made(replace(SMALL, rows=rows, block=True, top_p=0.7), dtype)
    for place, width in ((0, 24), (1, 15), (2, 3)):
        wide = torch.full((1, rows, width), torch.nan).to(DTYPES[dtype])
        wide[..., : args[place].shape[2]] = args[place]
        args[place] = wide[..., : args[place].shape[2]]
    check(OP, args, dtype)


@pytest.mark.parametrize("rows", [5, 70])
@pytest.mark.parametrize("block", [False, True])
def test_experts_that_nobody_uses_are_not_read(rows: int, block: bool) -> None:
    args = _made(replace(SMALL, rows=rows, top_k=2, block=block))
    args[1][..., 0] -= 50.0
    args[1][..., 3] = -torch.inf
    args[1][..., 7] -= 50.0
    meant = truth(OP, args)
    for expert in (0, 3, 7):
        args[3][expert] = torch.nan
        args[4][expert] = torch.nan
    got = interpret(OP, args)
    assert torch.allclose(got["y"], meant["y"], atol=1e-5)


@pytest.mark.parametrize("rows", [5, 70])
def test_an_expert_whose_weight_is_zero_is_not_read(rows: int) -> None:
    """Chosen because top_k is wide, but its share underflows."""
    args = _made(replace(SMALL, rows=rows, top_k=8, router="far"))
    args[1][..., 2] = -1e4
    args[3][2] = torch.nan
    check(OP, args, "fp32")


@pytest.mark.parametrize("rows", [4, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_ties_with_minus_zero(rows: int, dtype: str) -> None:
    args = _made(replace(SMALL, rows=rows, top_k=2), dtype)
    args[1] = torch.full_like(args[1], -1.0)
    args[1][..., 2], args[1][..., 5], args[1][..., 6] = -0.0, 0.0, 1.0
    check(OP, args, dtype)


def test_the_mass_ahead_of_an_expert_that_is_kept_is_below_the_bound() -> None:
    """Four experts of a quarter each, and a bound of a half: the third has exactly it ahead."""
    args = _made(replace(SMALL, rows=4, top_k=4, block=True, top_p=0.5))
    args[1] = torch.full_like(args[1], -torch.inf)
    args[1][..., 1:5] = 2.0
    assert interpret(OP, args)["kept"].tolist() == [2]
    check(OP, args, "fp32")


@pytest.mark.parametrize("rows", [4, 70])
def test_a_tie_at_the_edge_of_the_coreset_goes_to_the_lower_id(rows: int) -> None:
    """Two pairs with equal totals in each pair; three of the four experts are kept."""
    args = _made(replace(SMALL, rows=rows, top_k=4, block=True, top_p=0.75))
    args[1] = torch.full_like(args[1], -30.0)
    args[1][..., [1, 6]], args[1][..., [2, 4]] = 1.0, 0.9
    got = interpret(OP, args)
    assert got["kept"].tolist() == [3]
    args[1][..., 4] = -torch.inf
    args[9] = False
    args[7] = 3
    assert torch.allclose(got["y"], truth(OP, args)["y"], atol=1e-5)


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("opened", [-200.0, 200.0])
def test_extreme_shared_gates(rows: int, opened: float) -> None:
    args = _made(replace(SMALL, rows=rows))
    args[2] = torch.full_like(args[2], opened)
    check(OP, args, "fp32")


@pytest.mark.parametrize("rows", [9, 70])
def test_one_row_of_nan_stays_alone(rows: int) -> None:
    """Without a coreset no row depends on another."""
    args = _made(replace(SMALL, rows=rows))
    meant = truth(OP, args)["y"]
    args[0][0, 4], args[1][0, 4], args[2][0, 4] = torch.nan, torch.nan, torch.nan
    got = interpret(OP, args, ["y"])["y"]
    assert got[0, 4].isnan().all()
    others = [r for r in range(rows) if r != 4]
    assert torch.allclose(got[0, others], meant[0, others], atol=1e-5)


@pytest.mark.parametrize("rows", [9, 70])
def test_one_row_of_infinities_stays_alone(rows: int) -> None:
    args = _made(replace(SMALL, rows=rows))
    for i in (3, 4, 5, 6):
        args[i] = args[i].abs()
    args[0][0, 4] = 1e30
    got, meant = interpret(OP, args, ["y"])["y"], truth(OP, args)["y"]
    assert meant[0, 4].isposinf().all() and not got[0, 4].isfinite().any()
    others = [r for r in range(rows) if r != 4]
    assert torch.allclose(got[0, others], meant[0, others], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("block", [False, True])
def test_the_number_kept_may_be_unwanted(rows: int, block: bool) -> None:
    args = _made(replace(SMALL, rows=rows, block=block))
    check(OP, args, "fp32", ["y"])


def test_bytes_of_the_experts_in_use() -> None:
    args = _made(SMALL)
    plan = plan_of(OP, args)
    share = share_used(plan, 4, 2)
    assert share == {"gate_up": 0.25, "down": 0.25}
    unread = byte_floor(plan, {"n": 4}) - byte_floor(plan, {"n": 4}, share)
    one_expert: list[Tensor] = [args[3][0], args[4][0]]
    assert unread == 6 * 4 * sum(x.numel() for x in one_expert)
