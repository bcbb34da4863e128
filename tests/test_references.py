"""The references: as registered ops, on fake tensors, and against formulas in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from clover_compile.kernels.block_attention.reference import block_attention
from clover_compile.kernels.block_attention.spec import Sizes as AttentionSizes
from clover_compile.kernels.block_attention.spec import inputs as attention_inputs
from clover_compile.kernels.gdn_scan.reference import delta_rule
from clover_compile.kernels.moe.reference import moe
from clover_compile.kernels.moe.spec import Sizes as MoeSizes
from clover_compile.kernels.moe.spec import inputs as moe_inputs
from clover_compile.kernels.op import Case, normal
from clover_compile.kernels.table import OPS, fused_op
from tests import plain_formulas

CASES = [(name, case) for name in OPS for case in fused_op(name).cases()]


def generator() -> torch.Generator:
    """The randomness of one case."""
    return torch.Generator().manual_seed(0)


def results(found: Any) -> tuple[Tensor, ...]:
    """What an op returned, as a tuple."""
    return found if isinstance(found, tuple) else (found,)


def near(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether the largest difference is within `tolerance` of the largest value."""
    limit = tolerance * max(expected.abs().max().item(), 1e-30)
    return bool((found.double() - expected.double()).abs().max().item() <= limit)


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{n}-{c.name}" for n, c in CASES])
def test_registered_op_is_its_reference(name: str, case: Case) -> None:
    spec = fused_op(name)
    arguments = case.make(generator())
    expected = results(spec.reference(*arguments))
    found = results(spec.overload()(*arguments))
    assert len(expected) == len(spec.outputs)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments]
        shapes = results(spec.overload()(*fake))
    for a, b, c in zip(expected, found, shapes, strict=True):
        assert torch.equal(a.nan_to_num(-7.0), b.nan_to_num(-7.0))
        assert (a.shape, a.dtype) == (c.shape, c.dtype)
        if not case.name.startswith("nan"):
            assert torch.isfinite(a).all()


def test_schema_comes_from_the_reference() -> None:
    assert str(fused_op("rms_norm").overload()._schema) == (
        "clover::rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps) -> (Tensor, Tensor)"
    )
    assert fused_op("moe").parameters[-3:] == ("top_k", "top_p", "block")


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("kind", ["random", "repeated", "closed", "forgotten", "mixed"])
def test_delta_rule_is_the_recurrence(rows: int, kind: str) -> None:
    rand = partial(normal, generator())
    made = 1 if kind == "repeated" else rows
    q, k = (
        torch.nn.functional.normalize(rand(2, made, 2, 16), dim=-1).expand(-1, rows, -1, -1)
        for _ in range(2)
    )
    v, g = rand(2, made, 6, 12).expand(-1, rows, -1, -1), -rand(2, rows, 6).exp()
    beta, state = torch.sigmoid(rand(2, rows, 6)), rand(2, 6, 16, 12)
    if kind == "repeated":
        g, beta = torch.full_like(g, -1e-6), torch.full_like(beta, 1 - 1e-6)
    elif kind == "closed":
        g, beta = torch.zeros_like(g), torch.zeros_like(beta)
    elif kind == "forgotten":
        g = torch.full_like(g, -1e4)
    elif kind == "mixed":
        g[:, ::3], beta[:, 1::3] = -1e4, 0.0
    expected = plain_formulas.delta_rule(q, k, v, g, beta, state)
    for found, wanted in zip(delta_rule(q, k, v, g, beta, state), expected, strict=True):
        assert near(found, wanted, 5e-6)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [0, 3, 6])
def test_attention_sees_the_valid_prefix_and_its_block(causal: bool, length: int) -> None:
    sizes = AttentionSizes(4, 6, (length,), poison=float("nan"))
    made = list(attention_inputs(sizes, causal, generator()))
    made[6:8] = torch.ones(1, 4, 2), torch.zeros(1, 4, 2)  # no rotation
    query_gate, k, v, k_prefix, v_prefix = (x.double() for x in made[:5])
    q, gate = query_gate[0].view(4, 6, 16).split(8, -1)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        root = torch.sqrt(x.square().mean(-1, keepdim=True) + made[10])
        normed: Tensor = x / root * weight.double()
        return normed

    keys = torch.cat([k_prefix[0, :length], norm(k[0].view(4, 2, 8), made[9])])
    values = torch.cat([v_prefix[0, :length], v[0].view(4, 2, 8)])
    seen = [range(length + (t + 1 if causal else 4)) for t in range(4)]
    out = plain_formulas.attention(norm(q, made[8]), keys, values, seen)
    expected = (out * torch.sigmoid(gate)).flatten(1)
    assert near(block_attention(*made)[0][0], expected, 1e-6)


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("router", ["normal", "equal", "pairs", "same", "sharp", "far"])
@pytest.mark.parametrize(("top_k", "top_p"), [(1, 0.9), (3, 0.5), (8, 0.4), (3, 0.0)])
def test_moe_routes_as_written_out(block: bool, router: str, top_k: int, top_p: float) -> None:
    made = moe_inputs(MoeSizes(5, top_k, router=router, block=block, top_p=top_p), generator())
    x, logits, shared_gate, gate_up, down, shared_gate_up, shared_down = made[:7]
    everyone = set(range(logits.shape[-1]))
    kept = plain_formulas.kept_experts(logits[0], top_k, top_p) if block else everyone
    expected = plain_formulas.routed(x[0], logits[0], kept, gate_up, down, top_k)
    shared = plain_formulas.routed(
        x[0], torch.zeros(5, 1), {0}, shared_gate_up[None], shared_down[None], 1
    )
    expected += torch.sigmoid(shared_gate[0].double()) * shared
    y, count = moe(*made)
    assert count.tolist() == [len(kept)]
    assert near(y[0], expected, 1e-6)
