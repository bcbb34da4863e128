"""`verify --locate`: the first part of the eager model that gives NaN or Inf, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from clover_compile import locate, probes, prove
from clover_compile.build import build
from clover_compile.checkpoint import Checkpoint
from clover_compile.errors import ModelOverflows
from clover_compile.model.load import load_model
from clover_compile.options import BuildOptions
from tests.bundles import make_bundle
from tests.checkpoints import Edit, Weights, make_tiny, weights
from tests.command import Result, clover_compile

LETTER, TOKEN = "U", ord("U") - ord("!")
"""A character of one token that the probes of seed 0 do not hold."""


def _overflow(layer: int) -> Edit:
    """Finite weights whose product in one layer's shared expert leaves fp32."""

    def change(w: Weights) -> None:
        for kind in ("gate", "up"):
            w[f"model.layers.{layer}.mlp.shared_expert.{kind}_proj.weight"] *= np.float32(1e20)

    return weights(change)


def _overflow_at_one_token(w: Weights) -> None:
    """Only TOKEN reaches hidden column 0, and only layer 0's shared expert reads it."""
    for name, value in w.items():
        writes = name.endswith(
            ("out_proj.weight", "o_proj.weight", "shared_expert.down_proj.weight")
        )
        if writes:
            value[0] = 0
        elif name.endswith("experts.down_proj"):
            value[:, 0] = 0
    table = w["model.embed_tokens.weight"]
    table[:, 0] = 0
    table[TOKEN] = 0
    table[TOKEN, 0] = 10
    w["lm_head.weight"][TOKEN] = 0  # it is never an answer
    for kind in ("gate", "up"):
        w[f"model.layers.0.mlp.shared_expert.{kind}_proj.weight"][:, 0] = 1e20


def _stand_in(folder: Path, checkpoint: Path) -> Path:
    """A bundle that says it was built from `checkpoint`; its Units are stubs."""
    opened = Checkpoint.open(checkpoint)
    folder.mkdir()
    save_file({"in.seed": np.array(0)}, folder / "probes.safetensors")
    sources = {"sources": opened.source_hashes(), "context": 200}
    return make_bundle(folder, sources)


def _verify(*arguments: str | Path) -> Result:
    return clover_compile("verify", *arguments)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "model", block_size=8)


@pytest.mark.parametrize("layer", [0, 1])
def test_it_names_the_layer_that_overflows(model: Path, tmp_path: Path, layer: int) -> None:
    _overflow(layer)(model)
    assert not Checkpoint.open(model).nonfinite()
    bundle = _stand_in(tmp_path / "x.clover", model)
    done = _verify(bundle, "--model", model, "--locate")
    assert done.exit_code == 1, done.output
    assert f"layer {layer}: model.layers.{layer}.mlp.moe gives NaN" in done.stdout
    found = json.loads(_verify(bundle, "--model", model, "--locate", "--json").stdout)["found"]
    assert (found["layer"], found["unit"], found["position"]) == (layer, "commit", 0)


def test_a_prompt_of_ones_own_is_looked_at(model: Path, tmp_path: Path) -> None:
    weights(_overflow_at_one_token)(model)
    bundle = _stand_in(tmp_path / "x.clover", model)
    quiet = _verify(bundle, "--model", model, "--locate", "-p", "hello")
    assert (quiet.exit_code, "no NaN" in quiet.stdout) == (0, True), quiet.output
    done = _verify(bundle, "--model", model, "--locate", "-p", f"hello {LETTER}", "--json")
    found = json.loads(done.stdout)["found"]
    assert (done.exit_code, found["layer"], found["position"]) == (1, 0, 12), found


def test_a_model_that_stays_finite(model: Path, tmp_path: Path) -> None:
    opened = Checkpoint.open(model)
    eager = load_model(opened.config, opened.tensor)
    hooks = sum(len(part._forward_hooks) for part in eager.modules())
    assert locate.find(eager, opened, 100, [[1, 2, 3]]) is None
    assert sum(len(part._forward_hooks) for part in eager.modules()) == hooks


def test_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    bundle = _stand_in(tmp_path / "x.clover", model)
    other = make_tiny(tmp_path / "other", block_size=8, seed=5)
    done = _verify(bundle, "--model", other, "--locate")
    assert (done.exit_code, "not the checkpoint" in done.stderr) == (2, True)


def test_without_a_model_only_a_bundled_one_is_found(model: Path, tmp_path: Path) -> None:
    done = _verify(_stand_in(tmp_path / "x.clover", model), "--locate")
    assert (done.exit_code, "give --model" in done.stderr) == (2, True)
    from clover_compile.models import find

    bundle = _stand_in(tmp_path / "demo.clover", find())
    done = _verify(bundle, "--locate", "-p", "The zone is cancelled.")
    assert (done.exit_code, "no NaN" in done.stdout) == (0, True), done.output


def test_a_prompt_is_for_locate_only(tmp_path: Path) -> None:
    assert _verify(tmp_path, "-p", "x").exit_code == 2


def test_the_probes_of_seed_0_do_not_hold_the_token(model: Path) -> None:
    given = probes.inputs(Checkpoint.open(model).config, 0)
    assert not any((given[name] == TOKEN).any() for name in ("prompt", "blocks", "drafts"))


@pytest.mark.slow
def test_a_build_of_a_model_that_overflows_names_the_layer(model: Path, tmp_path: Path) -> None:
    _overflow(1)(model)
    output = tmp_path / "out" / "x.clover"
    with pytest.raises(ModelOverflows, match=r"layer 1: model\.layers\.1\.mlp\.moe gives NaN"):
        build(BuildOptions(model=model, output=output), lambda line: None)
    assert not list(output.parent.iterdir())


@pytest.mark.slow
def test_a_bundle_that_answers_nan_and_its_layer(model: Path, tmp_path: Path) -> None:
    weights(_overflow_at_one_token)(model)
    output = tmp_path / "x.clover"
    assert build(BuildOptions(model=model, output=output), print)["outcome"] == "passed"
    prompt = f"hello {LETTER}"
    done = clover_compile("run", output, "-p", prompt)
    assert (done.exit_code, "--locate" in done.stderr) == (1, True), done.output
    done = _verify(output, "--model", model, "--locate", "-p", prompt)
    assert (done.exit_code, "layer 0: " in done.stdout) == (1, True), done.output
    assert _verify(output, "--model", model, "--locate").exit_code == 0


def test_every_generation_is_announced(model: Path, tmp_path: Path) -> None:
    bundle = _stand_in(tmp_path / "x.clover", model)
    done = _verify(bundle, "--model", model, "--locate", "--json")
    assert json.loads(done.stdout) == {"found": None}
    lines = [line for line in done.stderr.splitlines() if line.startswith("[")]
    said = [line.partition("] ")[2] for line in lines]
    assert said == [f"prompt {i} of 2, {way}" for i in (1, 2) for way in prove.WAYS]
    assert all(line.isprintable() for line in done.stderr.splitlines())


def test_an_empty_message_is_refused_as_run_does(model: Path, tmp_path: Path) -> None:
    bundle = _stand_in(tmp_path / "x.clover", model)
    done = _verify(bundle, "--model", model, "--locate", "-p", "")
    assert (done.exit_code, done.stdout) == (2, "") and "the prompt is empty" in done.stderr
