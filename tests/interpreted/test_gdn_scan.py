"""The scan kernel against the reference: lengths, gates, replays, what is read and written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from clover_compile.gpu_check.values import truth
from clover_compile.kernels.call import UnplannedCall
from clover_compile.kernels.gdn_scan.spec import Sizes, inputs
from clover_compile.kernels.op import Case
from clover_compile.kernels.plans import plan_of
from clover_compile.kernels.table import fused_op
from tests.interpreted.harness import DTYPES, arguments, check, interpret, one_sequence

OP = fused_op("gdn_scan")
CHUNKS = {80: 16, 90: 32}
"""Rows a kernel solves together, by compute capability."""


def small(dtype: str, rows: int, **sizes: Any) -> list[Any]:
    """Arguments at sizes that take both tiles of the key channels, neither of them full."""
    made = {"key_heads": 1, "heads": 2, "dk": 24, "dv": 12} | sizes
    return arguments(OP, Case("small", lambda g: inputs(Sizes(rows, **made), g)), dtype)


def given(args: list[Any], name: str) -> Tensor:
    found = args[OP.parameters.index(name)]
    assert isinstance(found, Tensor)
    return found


def put(args: list[Any], **values: Any) -> list[Any]:
    """`args` with some parameters replaced."""
    return [values.get(name, x) for name, x in zip(OP.parameters, args, strict=True)]


LONG = {"rows-70": DTYPES, "rows-130": ("bf16",), "repeated": ("fp32",)}
"""Cases that take seconds, and the dtypes in which they are slow tests only."""


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{case.name}-{dtype}",
                     marks=[pytest.mark.slow] if dtype in LONG.get(case.name, ()) else [])
        for case in one_sequence(OP)
        for dtype in DTYPES
    ],
)  # fmt: skip
def test_equals_the_reference(case: Case, dtype: str) -> None:
    check(OP, arguments(OP, case, dtype), dtype)


@pytest.mark.parametrize(
    ("capability", "rows"),
    [(90, rows) for rows in (*range(1, 34), 64, 65)]
    + [(80, rows) for rows in (15, 16, 17, 32, 33)],
)
def test_every_length_around_a_chunk(capability: int, rows: int) -> None:
    check(OP, small("fp32", rows, heads=1), "fp32", capability=capability)


@pytest.mark.parametrize("rows", [1, 5, 17, 35])
def test_halves_keep_the_state_exact(rows: int) -> None:
    """bf16 operands in two halves: the state is far better than one bf16 product would leave it."""
    args = small("bf16", rows)
    got, meant = interpret(OP, args)["new_state"], truth(OP, args)["new_state"]
    assert (got - meant).abs().max() <= 5e-5 * meant.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 35])
def test_a_verify_writes_y_alone(rows: int, dtype: str) -> None:
    check(OP, small(dtype, rows), dtype, ["y"])


def test_without_y_all_is_written_but_y() -> None:
    """Then v is split over programs: 3 of 64 columns here, the last one not full."""
    args = small("fp32", 5, key_heads=2, heads=2, dk=8, dv=140)
    check(OP, args, "fp32", ["new_ring", "new_state"])
    check(OP, args, "fp32", ["new_ring"])


@pytest.mark.parametrize("capability", CHUNKS)
@pytest.mark.parametrize("kept", [0, 1, 3, 16, 17, 32, 33, 34])
def test_a_replay_reads_nothing_of_later_rows(kept: int, capability: int) -> None:
    args = small("fp32", 34, replay=(kept,))
    meant = truth(OP, args)
    for name in ("u", "b", "a"):
        given(args, name)[:, kept:] = torch.nan
    got = interpret(OP, args, ["new_ring", "new_state"], capability)
    assert torch.equal(got["new_ring"], meant["new_ring"])
    assert (got["new_state"] - meant["new_state"]).abs().max() <= 2e-5


@pytest.mark.parametrize("rows", [1, 6, 20, 40])
def test_a_replay_of_no_rows_leaves_every_bit(rows: int) -> None:
    args = small("bf16", rows, replay=(0,))
    given(args, "state")[..., ::2] *= -0.0
    got = interpret(OP, args, ["new_ring", "new_state"])
    for new, old in (("new_ring", "ring"), ("new_state", "state")):
        bits = torch.int16 if old == "ring" else torch.int32
        assert torch.equal(got[new].view(bits), given(args, old).view(bits))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_stand_apart(dtype: str) -> None:
    """u, z, b and a are slices of one joined projection; what lies between is NaN."""
    args = small(dtype, 19)
    names = ("u", "z", "b", "a")
    widths = [given(args, name).shape[2] + 3 for name in names]
    joined = torch.full((1, 19, sum(widths)), torch.nan).to(DTYPES[dtype])
    for name, piece in zip(names, joined.split(widths, 2), strict=True):
        piece[..., :-3] = given(args, name)
        args = put(args, **{name: piece[..., :-3]})
    check(OP, args, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_closed_gates_leave_every_bit(dtype: str) -> None:
    args = small(dtype, 18)
    given(args, "a").fill_(-1e30)
    given(args, "b").fill_(-1e30)
    assert torch.equal(interpret(OP, args)["new_state"], given(args, "state"))


@pytest.mark.parametrize("a", [-1e30, -6.0, 0.0, 1e30])
@pytest.mark.parametrize("b", [-1e30, 1e30])
def test_gates_from_end_to_end(a: float, b: float) -> None:
    """Gates that forget everything stand beside gentle ones, whose decay must stay exact."""
    args = small("fp32", 33, a=a, b=b)
    given(args, "decay")[0] = -20.0
    check(OP, args, "fp32")


@pytest.mark.parametrize("a", [-9.0, -7.0])
def test_gentle_gates_over_many_rows(a: float) -> None:
    """g = -16 log(1 + e^a) per row: at -9 what one row loses is below an ulp of 1, what all lose is
    not; at -7 the second term of the series counts."""
    args = small("fp32", 130, same=True, heads=1)
    args = put(args, a=torch.full((1, 130, 1), a), decay=torch.full((1,), -16.0))
    args = put(args, b=torch.full((1, 130, 1), -8.0), dt_bias=torch.zeros(1))
    check(OP, args, "fp32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [2, 5])
def test_another_number_of_taps(taps: int, dtype: str) -> None:
    check(OP, small(dtype, 5, taps=taps), dtype)


def test_what_no_plan_covers_is_refused() -> None:
    with pytest.raises(UnplannedCall, match="no z"):
        plan_of(OP, put(small("fp32", 3), rows=torch.tensor([2], dtype=torch.int32)))
