"""scan_columns and choose against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from clover_compile.gpu_check.values import truth
from clover_compile.kernels.op import Case
from clover_compile.kernels.pick.spec import PENALTIES, RAMPS, Sizes, inputs
from clover_compile.kernels.table import fused_op
from clover_compile.runtime.launcher import BadLaunch
from tests.interpreted.harness import arguments, interpret, one_sequence

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


def sized(sizes: Sizes, seed: int = 0) -> list[Any]:
    """Arguments of these sizes."""
    return list(inputs(sizes, torch.Generator().manual_seed(seed)))


def scattered(rows: int, columns: int, scalars: dict[str, float]) -> list[Any]:
    """A draw with a large gap between any two masses: logits 0, -3, -6, ... at scattered ids."""
    args = sized(Sizes(rows, columns, counted=False, scalars=scalars | {"temperature": 1.5}))
    order = torch.stack([torch.randperm(columns) for _ in range(rows)])
    args[0] = -3.0 * order[None].float().clamp(max=25)
    return args


@pytest.mark.parametrize("levels", [None, 2])
def test_columns_in_several_tiles(levels: int | None) -> None:
    """The best stands in any tile; among equals the lowest id wins across tiles."""
    sizes = Sizes(4, 4100, scalars=PENALTIES | RAMPS, running=True, levels=levels, counted=False)
    args = sized(sizes)
    args[0][0, 1, 4099] = args[0][0, 2, 2048] = args[0][0, 3, 2048] = 90.0
    # In rows 1 and 3 an id drafted before, alone in its tile and in row 3 the first of it, loses to
    # this one by its penalty.
    args[0][0, 1, 1000] = args[0][0, 3, 1000] = 80.0
    args[5][0] = torch.tensor([4099, 2047, 2048, 7])
    check_pick(args)


@pytest.mark.parametrize("scalars", [{}, {"top_k": 3.0}, {"top_p": 0.6}])
def test_a_draw_over_several_tiles(scalars: dict[str, float]) -> None:
    args = scattered(2, 2100, scalars)
    for noise in (0.0, 0.5, 0.999):
        args[7] = torch.full((1, 2), noise)
        check_pick(args)


def test_equal_logits_are_drawn_in_the_order_of_their_ids() -> None:
    """One value everywhere: the noise alone tells which id."""
    args = sized(Sizes(4, 40, levels=1, counted=False, scalars={"temperature": 1.0}, stops=()))
    args[7] = torch.tensor([[0.0, 0.26, 0.51, 0.985]])
    check_pick(args)
    assert len(set(interpret(OP, args)["ids"][0].tolist())) == 4


def test_zeros_of_both_signs_are_equal() -> None:
    args = sized(Sizes(1, 40, levels=1, counted=False, scalars={"temperature": 1.0}, stops=()))
    args[0][0, 0, 20:] = -0.0
    args[7] = torch.tensor([[0.3]])
    check_pick(args)


def test_many_rows_count_the_drafts_before_them() -> None:
    args = sized(Sizes(70, 24, scalars=PENALTIES, running=True, draft=(3, 3, -1, 11, 8)))
    check_pick(args)


def test_the_greedy_choice_reads_no_noise() -> None:
    args = sized(Sizes(2))
    args[7] = torch.full((1, 2), torch.nan)
    check_pick(args)


def test_more_rows_than_a_plan_takes_are_refused() -> None:
    args = sized(Sizes(257, 8))
    with pytest.raises(BadLaunch, match="outside every guard"):
        interpret(OP, args)


@pytest.mark.parametrize("think", [0, 1])
def test_any_id_may_end_the_thinking(think: int) -> None:
    """The first of a tile, and the one that stands for a masked draft if a fill is wrong."""
    check_pick(sized(Sizes(scalars=RAMPS, running=True, think=think, draft=(5,))))


def test_the_first_draft_alone_ends_the_thinking() -> None:
    check_pick(sized(Sizes(9, scalars=RAMPS, running=True, draft=(7, *[-1] * 8), think=7)))


def test_a_tile_in_which_nothing_is_allowed() -> None:
    args = sized(Sizes(1, 4100, allow=True))
    args[8][..., 100:] = False
    args[8][..., 7] = True
    check_pick(args)


def test_a_draw_among_equals_whose_bits_end_in_ones() -> None:
    """Nothing lies above them within the last four bits, yet something does lie above them."""
    args = sized(Sizes(3, 40, counted=False, scalars={"temperature": 1.0}, stops=()))
    args[0][:] = -40.0
    args[0][..., 6] = 2.0
    args[0][..., [9, 12, 20]] = torch.tensor(0x3F80000F, dtype=torch.int32).view(torch.float32)
    args[7] = torch.tensor([[0.5, 0.7, 0.9]])
    check_pick(args)
    assert interpret(OP, args)["ids"][0].tolist() == [9, 12, 20]


def test_the_mask_and_a_stop_may_be_the_first_of_their_tile() -> None:
    args = sized(Sizes(scalars=RAMPS, stops=(0,)))
    check_pick(args)
    args[0][..., 0] = 50.0
    args[9] = 0
    check_pick(args)


def test_tiles_that_do_not_exist_hold_no_maximum() -> None:
    """Three tiles are merged as four."""
    args = sized(Sizes(2, 4100, counted=False))
    args[0] -= 60.0
    check_pick(args)


def test_equals_are_counted_across_tiles() -> None:
    args = sized(Sizes(2, 2100, levels=1, counted=False, scalars={"temperature": 1.0}, stops=()))
    args[7] = torch.tensor([[0.3, 0.9]])
    check_pick(args)
    assert (interpret(OP, args)["ids"][0] > torch.tensor([500, 1500])).all()


def test_a_nucleus_of_equals_whose_bits_end_in_zeros() -> None:
    """Nothing lies above them, and the draw goes over all three."""
    scalars = {"temperature": 1.0, "top_p": 0.9}
    args = sized(Sizes(3, 40, counted=False, scalars=scalars, stops=()))
    args[0][:] = -40.0
    args[0][..., [9, 12, 20]] = 8.0
    args[7] = torch.tensor([[0.1, 0.5, 0.9]])
    check_pick(args)
    assert interpret(OP, args)["ids"][0].tolist() == [9, 12, 20]


def test_the_last_of_equals_where_the_sums_round_up() -> None:
    """The largest noise there is: in some rows the masses promise a fourth of three equals."""
    rows = 6
    args = sized(Sizes(rows, 40, counted=False, scalars={"temperature": 1.0}, stops=()))
    args[0][:] = -40.0
    args[0][..., [9, 12, 20]] = torch.linspace(0.5, 1.5, rows)[None, :, None]
    args[0][..., 6] = 2.0
    args[0][..., :2, [9, 12, 20]] = torch.tensor([[0.6473684310913086], [0.6719298362731934]])
    args[7] = torch.full((1, rows), 1.0 - 2.0**-24)
    check_pick(args)
    assert (interpret(OP, args)["ids"] == 20).all()
