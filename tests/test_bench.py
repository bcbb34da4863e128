"""The benchmark's plumbing on a tiny model: no figure of it is judged, only what it counts."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import __main__ as command
from bench import picking, speed, synthetic
from bench.table import table
from clover_compile import models
from clover_compile.build import build
from clover_compile.checkpoint import Checkpoint
from clover_compile.kernels.moe.reference import moe
from clover_compile.kernels.moe.spec import SPEC
from clover_compile.options import BuildOptions
from clover_compile.profiling.floor import experts_used, work
from clover_compile.profiling.rival import dense_moe
from tests import oracle
from tests.built import demonstration


@pytest.mark.ort
def test_a_round_of_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The demonstration model stands in for a synthetic one: its bundle is there already.
    (tmp_path / "tiny").symlink_to(models.find())
    (tmp_path / "tiny.clover").symlink_to(demonstration())
    arguments = ["--folder", str(tmp_path), "--sizes", "tiny", "--threads", "1", "--rounds", "1"]
    arguments += ["--vocabulary", "2048", "--demo", str(demonstration())]
    found = command.main(arguments)
    assert json.loads((tmp_path / "bench.json").read_text()) == found
    assert table(found) in capsys.readouterr().out
    one = found["sizes"]["tiny"]
    assert set(one["speed"]["1"]) == {call.name for call in speed.CALLS}
    assert set(found["pick"]["1"]) == set(picking.SETTINGS)
    for row in one["speed"]["1"].values():
        assert row["speedup"]["median"] > 0
        assert row["of floor"]["median"] > 0
    assert one["memory"]["peak"]["Pss"] > one["memory"]["weights"]
    for kind in found["first token"].values():
        assert kind["ratio"]["median"] > 0


@pytest.mark.ort
@pytest.mark.slow
def test_a_synthetic_checkpoint_is_proved(tmp_path: Path) -> None:
    checkpoint = synthetic.write(tmp_path / "tiny", "tiny")
    options = BuildOptions(model=checkpoint, output=tmp_path / "tiny.clover")
    assert build(options, lambda line: None)["outcome"] == "passed"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(synthetic.write(tmp_path_factory.mktemp("bench"), "tiny"))


@pytest.mark.parametrize("size", synthetic.SIZES)
def test_experts_hold_most_of_a_large_checkpoint(size: str) -> None:
    c = synthetic.config(size)
    expert = 3 * c["hidden_size"] * c["moe_intermediate_size"]
    experts = expert * c["num_experts"] * c["num_hidden_layers"]
    parameters = {"60M": 60e6, "300M": 300e6}.get(size)
    assert parameters is None or 0.6 * parameters < experts < parameters


def test_the_work_counts_every_byte_once(checkpoint: Checkpoint) -> None:
    c, shapes = checkpoint.config, {n: checkpoint.shape(n) for n in checkpoint.names}
    every = [30 * np.eye(c.num_experts)] * c.num_hidden_layers
    need = work(c, shapes, unit="preview", rows=8, prefix=0, keep=8, routers=every)
    # Each row is sure of another expert: even the last lies within the coreset's mass, 7/8 < 0.9.
    left = [s for n, s in shapes.items() if "embed_tokens" in n or "in_proj_b" in n]
    state = c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim
    state += (c.linear_conv_kernel_dim - 1) * c.conv_dim
    want = sum(map(prod, shapes.values())) - sum(map(prod, left)) + 8 * c.hidden_size
    assert need.experts == c.num_experts
    assert need.bytes == 4 * (want + len(c.gdn_layers) * state + 8 * c.vocab_size)


def test_one_row_reads_its_own_experts(checkpoint: Checkpoint) -> None:
    c, shapes = checkpoint.config, {n: checkpoint.shape(n) for n in checkpoint.names}
    one = [np.random.default_rng(0).random((1, c.num_experts))] * c.num_hidden_layers
    few = work(c, shapes, unit="commit", rows=1, prefix=9, keep=1, routers=one)
    none = work(c, shapes, unit="commit", rows=1, prefix=9, keep=0, routers=one)
    assert few.experts == c.num_experts_per_tok
    assert few.bytes - none.bytes == 4 * (c.vocab_size * c.hidden_size + c.vocab_size)
    assert few.flop - none.flop == 2 * c.vocab_size * c.hidden_size


@pytest.mark.parametrize("seed", range(6))
def test_experts_of_a_coreset_are_the_oracles(seed: int) -> None:
    c = oracle.Config(num_experts_per_tok=3, coreset_top_p=0.6)
    router = np.random.default_rng(seed).standard_normal((9, c.num_experts)) * 2
    p = oracle.softmax(router)
    allowed = oracle.Oracle(c, {}).coreset(p)
    best = np.argsort(-np.where(allowed, p, -1), -1, kind="stable")[:, : c.num_experts_per_tok]
    hit = {int(e) for e in best.ravel() if allowed[e]}
    assert experts_used(router, c.num_experts_per_tok, c.coreset_top_p)[0] == len(hit)


@pytest.mark.parametrize("case", list(SPEC.cases()), ids=lambda case: case.name)
def test_dense_experts_give_what_grouped_ones_do(case: Any) -> None:
    arguments = case.make(torch.Generator().manual_seed(0))
    for want, got in zip(moe(*arguments), dense_moe(*arguments), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
