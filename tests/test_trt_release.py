"""TensorRT-RTX engines at the released model's sizes: one GDN and one attention layer.

    .venv/bin/python -m tests.test_trt_release

prints time, peak memory and sizes. Weights are inputs of an engine, so none has a value here.
"""

from __future__ import annotations

import dataclasses
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clover_compile import models, oversize
from clover_compile.checkpoint import Checkpoint
from clover_compile.errors import NoCompiler
from clover_compile.kernels import release
from clover_compile.model import interface
from clover_compile.model.config import ModelConfig
from clover_compile.passes.base import run_passes
from clover_compile.passes.pipeline import PIPELINE
from clover_compile.runtime.trt_build import requests
from clover_compile.targets.trt.build import TensorRtRtxTarget, engine_faults
from clover_compile.targets.trt.library import library
from clover_compile.targets.trt.render import plugin_model
from clover_compile.targets.trt.rtx import build_engines, rtx_library
from clover_compile.unit import trace_unit

CONTEXT = 262_144

Say = Callable[[str], None]


def config() -> ModelConfig:
    """Two layers of the released model, a GDN and an attention layer."""
    return dataclasses.replace(
        Checkpoint.open(models.find()).config,
        vocab_size=release.VOCABULARY, hidden_size=release.HIDDEN, num_hidden_layers=2,
        layer_types=("linear_attention", "full_attention"),
        num_attention_heads=release.QUERY_HEADS, num_key_value_heads=release.KV_HEADS,
        head_dim=release.DIM, linear_num_key_heads=release.KEY_HEADS,
        linear_num_value_heads=release.HEADS, linear_key_head_dim=release.DK,
        linear_value_head_dim=release.DV, linear_conv_kernel_dim=release.TAPS,
        num_experts=release.EXPERTS, num_experts_per_tok=release.TOP_K,
        moe_intermediate_size=release.WIDTH,
        shared_expert_intermediate_size=release.SHARED,
        partial_rotary_factor=release.ROTARY / release.DIM,
        max_position_embeddings=CONTEXT, mask_token_id=release.VOCABULARY - 1,
    )  # fmt: skip


def engines(folder: Path, say: Say, capability: str = "89") -> dict[str, dict[str, Any]]:
    """Builds every Unit's engine; Unit -> what was measured and found."""
    c = config()
    model = oversize.shell(c, torch.bfloat16)
    generation = Checkpoint.open(models.find()).generation
    target = TensorRtRtxTarget(capability)
    units = {}
    for name in interface.units(c):
        units[name] = trace_unit(model, generation, name)
        run_passes(units[name], (*PIPELINE, *target.tail), lambda event: None)
    made = target._lower(units, say)
    rows: dict[str, dict[str, Any]] = {}
    for name, one in made.items():
        described = target._describe(one, units[name], CONTEXT)
        model_file = folder / f"{name}.onnx"
        model_file.write_bytes(plugin_model(one.graph, one.attributes).SerializeToString())
        start, unit = time.perf_counter(), {name: described}
        (built,) = build_engines(library().path, requests(unit, folder, folder), say)
        rows[name] = {
            "seconds": time.perf_counter() - start,
            "onnx": model_file.stat().st_size,
            "engine": built.nbytes,
            "layers": built.layers,
            "plugins": len(built.plugins),
            # Of the largest builder process so far.
            "peak": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
            "weights": sum(w.nbytes for w in units[name].weights.values()),
            "cubins": sum(len(x.cubins) for x in one.attributes.values()),
            "faults": engine_faults(described, built, one.attributes.values(), folder),
        }
    return rows


@pytest.mark.slow
@pytest.mark.trt
def test_engines_of_two_real_layers(tmp_path: Path) -> None:
    if rtx_library() is None:
        pytest.skip("needs the package tensorrt-rtx")
    try:
        library()
    except NoCompiler as error:
        pytest.skip(str(error))
    for name, row in engines(tmp_path, lambda line: None).items():
        assert not row["faults"], name
        # The weights, gigabytes of them, are no part of it.
        assert row["engine"] < 100e6 and (row["weights"] > 2e9) == (name in MANY), name


MANY = ("commit", "verify", "preview")

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        for unit, row in engines(Path(name), lambda line: print(line, file=sys.stderr)).items():
            shown = {k: f"{v / 1e6:.1f} MB" if v and v > 1e5 else v for k, v in row.items()
                     if k not in ("seconds", "faults")}  # fmt: skip
            print(f"{unit:<8} {row['seconds']:.2f} s  {shown}  {row['faults'] or 'as meant'}")
