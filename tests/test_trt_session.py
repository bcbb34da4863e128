"""The TensorRT session over a stand-in: what it binds, aliases, copies and refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from clover_compile import models
from clover_compile.checkpoint import Checkpoint
from clover_compile.errors import NoCompiler
from clover_compile.model import interface
from clover_compile.model.load import load_model
from clover_compile.passes.base import run_passes
from clover_compile.passes.pipeline import PIPELINE
from clover_compile.prove import rules_of
from clover_compile.runtime import cuda_device, trt_engine
from clover_compile.runtime.errors import EngineFailed
from clover_compile.runtime.manifest import Checked
from clover_compile.runtime.program_engine import Stale
from clover_compile.runtime.session import Session
from clover_compile.runtime.trt_engine import TrtEngine
from clover_compile.targets.triton.store import write_store
from clover_compile.targets.trt.build import TensorRtTarget, profile
from clover_compile.targets.trt.library import library
from clover_compile.targets.trt.lowering import Lowering
from clover_compile.unit import Unit, source_of, trace_unit
from tests.trt_twin import Engine, HostMemory, HostRing, HostStream, module

CHECKPOINT = Checkpoint.open(models.find())
CONTEXT = 320
WAYS: dict[str, dict[str, Any]] = {
    "denoise": {"decode": "denoise"},
    "causal": {"decode": "causal"},
    "exact": {"decode": "self-speculate", "accept": "exact"},
    "release": {"decode": "self-speculate", "accept": "release"},
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """A session over the demonstration model's graphs in fp32."""
    try:
        plugin = library().path
    except NoCompiler as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("session")
    model = load_model(CHECKPOINT.config, CHECKPOINT.tensor, torch.float32)
    units, rows, engines = dict[str, Unit](), dict[str, Any](), dict[str, Engine]()
    for name in interface.units(CHECKPOINT.config):
        unit = units[name] = trace_unit(model, CHECKPOINT.generation, name)
        run_passes(unit, (*PIPELINE, *TensorRtTarget.tail), lambda event: None)
        graph = Lowering(unit, ()).lower()
        shapes, values = profile(graph, CONTEXT)
        rows[name] = {
            "file": f"{name}.engine", "inputs": list(unit.inputs), "outputs": list(unit.outputs),
            "weights": [x.name for x in graph.weights], "aliases": graph.aliases(),
            "shapes": shapes, "values": values,
        }  # fmt: skip
        engines[name] = Engine(graph)
        (folder / f"{name}.engine").write_bytes(name.encode())
    weights, _ = write_store(folder, units, {}, source_of(dict(model.named_parameters())))
    device = {"module": "stand_in", "plugin": str(plugin)}
    manifest = {"units": rows, "weights": weights, "target": "trt-rtx", "device": device}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "stand_in", module(engines))
        patch.setattr(trt_engine, "check", lambda checked, allow: device)
        patch.setattr(cuda_device, "make_current", lambda: None)
        patch.setattr(cuda_device, "Memory", HostMemory)
        patch.setattr(cuda_device, "Stream", HostStream)
        patch.setattr(cuda_device, "PinnedRing", HostRing)
        engine: Any = TrtEngine(Checked(folder, "", manifest, {}))
        yield Session(engine, CHECKPOINT.config, rules_of(CHECKPOINT), CONTEXT)


@pytest.mark.parametrize("way", WAYS)
def test_it_gives_the_stored_tokens(way: str, opened: Session) -> None:
    for line in (models.find() / "oracle_tokens.jsonl").read_text().splitlines()[:2]:
        stored = json.loads(line)
        out = opened.generate(stored["prompt_ids"], max_new_tokens=128, **WAYS[way])
        assert list(out.token_ids) == stored["causal" if way == "exact" else way]


def test_commit_updates_ring_and_state_in_place(opened: Session) -> None:
    state: Any = opened.new_state()
    held = dict(state.arrays)
    opened.commit(state, [1, 2, 3])
    before = {n: opened.engine.device.read(x).copy() for n, x in held.items()}  # type: ignore[attr-defined]
    opened.commit(state, [4])
    assert all(state.arrays[n] is held[n] for n in held)
    for name, array in held.items():
        now = opened.engine.device.read(array)  # type: ignore[attr-defined]
        if name[0] in "kv":
            assert (now[:, :3] == before[name][:, :3]).all() and now[:, 3].any()
            assert (now[:, 4:] == before[name][:, 4:]).all()
        else:
            assert not (now == before[name]).all(), name


def test_a_forked_state_owns_its_buffers(opened: Session) -> None:
    state = opened.new_state()
    opened.commit(state, [1, 2, 3])
    fork = state.fork()
    before = opened.preview(fork, [4, 831, 831])
    opened.commit(state, [5, 6])
    assert (opened.preview(fork, [4, 831, 831]) == before).all()
    assert (fork.length, state.length) == (3, 5)


def test_numpy_in_numpy_out(opened: Session) -> None:
    """As a proof calls it: arrays of the host, rows of the cache as many as are valid."""
    from clover_compile import probes

    c = CHECKPOINT.config
    state = probes.empty_state(c)
    engine = opened.engine
    new = probes.commit(engine, c, state, np.array([[1, 2, 3]]), 2)
    assert all(isinstance(x, np.ndarray) for x in new.values())
    assert new["logits"].shape == (1, 2, c.vocab_size)
    device: Any = opened.new_state()
    logits = opened.commit(device, [1, 2, 3])
    assert np.abs(new["logits"][0] - logits[-2:]).max() == 0
    after = probes.advance(c, state, new, 3)
    feeds = {"ids": np.array([[4, 5]]), **{n: after[n] for n in interface.state_names(c)}}
    given = engine.run("preview", {**feeds, "length": after["length"].astype(np.int32)})["logits"]
    assert np.abs(given[0] - opened.preview(device, [4, 5])).max() < 1e-4


def test_what_lies_outside_the_profile_is_refused(opened: Session) -> None:
    state = opened.new_state()
    feeds: dict[str, Any] = {
        "ids": np.ones((1, 257), np.int64),
        "keep": np.array(0, np.int32),
        **state.feeds(),
    }
    with pytest.raises(EngineFailed, match=r"ids is \[1, 257\], the engine takes \[1, 1\] to"):
        opened.engine.run("commit", feeds)
    feeds |= {"ids": np.ones((1, 2), np.int64), "keep": np.array(300, np.int32)}
    with pytest.raises(EngineFailed, match="keep is 300, the engine takes 0 to 256"):
        opened.engine.run("commit", feeds)
    with pytest.raises(EngineFailed, match="no such Unit"):
        opened.engine.run("nothing", {})
    with pytest.raises(EngineFailed, match="row0 is missing"):
        opened.engine.run("pick", {"logits": np.zeros((1, 1, 832), np.float32),
                                   "counts": np.zeros((1, 832), np.int32)})  # fmt: skip


def test_an_output_lives_until_its_unit_runs_again(opened: Session) -> None:
    state = opened.new_state()
    opened.commit(state, [1, 2, 3])
    feeds = {"ids": np.full((1, 2), 831), **state.feeds()}
    first = opened.engine.run("preview", feeds)["logits"]
    opened.engine.run("preview", feeds)
    with pytest.raises(Stale):
        first[0]


def test_an_engine_that_fails_says_why(opened: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = opened.engine
    monkeypatch.setattr(engine.units["preview"].context, "fail", True)
    engine.words.append("out of memory")
    with pytest.raises(EngineFailed, match="Unit preview could not run: out of memory"):
        opened.preview(opened.new_state(), [1])
