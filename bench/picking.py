"""The `pick` Unit over the release's vocabulary, by itself."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort
import torch

from clover_compile.checkpoint import Checkpoint
from clover_compile.kernels.pick.spec import NEUTRAL, PENALTIES
from clover_compile.model.clover import Clover
from clover_compile.passes.base import run_passes
from clover_compile.passes.pipeline import PIPELINE
from clover_compile.profiling.rounds import clock_for, seconds, spread
from clover_compile.runtime.engine import Arrays
from clover_compile.targets.ort_cpu.lowering import attach, lower
from clover_compile.unit import trace_unit

VOCABULARY, ROWS = 248_320, 32

SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {},
    "penalties": PENALTIES,
    "drawn": {"temperature": 1.0},
    "drawn, top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50.0, "top_p": 0.9},
}


def unit_file(checkpoint: Checkpoint, vocabulary: int) -> bytes:
    """The Unit's ONNX file as `ort-cpu` writes it, for another vocabulary."""
    c = dataclasses.replace(checkpoint.config, vocab_size=vocabulary, mask_token_id=vocabulary - 1)
    with torch.device("meta"):
        model = Clover(c)
    unit = trace_unit(model, checkpoint.generation, "pick")
    run_passes(unit, PIPELINE, lambda event: None)
    return attach(lower(unit), {})


def measure(file: bytes, vocabulary: int, threads: int, rounds: int) -> dict[str, Any]:
    """Milliseconds by setting."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    clock = clock_for(threads)
    took: dict[str, list[float]] = {name: [] for name in SETTINGS}
    feeds = {name: _feeds(vocabulary, values) for name, values in SETTINGS.items()}
    for turn in range(rounds + 1):
        for name in SETTINGS:
            spent = seconds(partial(session.run, None, feeds[name]), clock)
            if turn:  # the first sizes the buffers
                took[name].append(1e3 * spent)
    return {name: spread(values) for name, values in took.items()}


def _feeds(vocabulary: int, values: dict[str, float]) -> Arrays:
    """Logits as peaked as those of a model that is unsure, and 200 ids seen before."""
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((1, ROWS, vocabulary), np.float32) * 2.5
    counts = np.zeros((1, vocabulary), np.int32)
    counts[0, generator.integers(0, vocabulary, 200)] = 1
    return {
        "logits": logits,
        "counts": counts,
        "row0": np.array([200], np.int32),
        "close_open": np.array([False]),
        "scalars": np.array(list((NEUTRAL | values).values()), np.float32),
        "draft": np.full((1, ROWS), -1, np.int64),
        "running": np.array(False),
        "noise": generator.random((1, ROWS), np.float32),
    }
