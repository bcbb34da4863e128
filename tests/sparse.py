"""A checkpoint of the released model's sizes that takes no disk: every weight is a hole."""

from __future__ import annotations

import json
import shutil
import struct
from math import prod
from pathlib import Path
from typing import Any

import torch

from clover_compile import models
from clover_compile.gpu_check.layers import SIZES
from clover_compile.kernels import release
from clover_compile.model.clover import Clover
from clover_compile.model.config import ModelConfig

LAYERS = release.GDN_LAYERS + release.ATTENTION_LAYERS


def config(layers: int = LAYERS) -> ModelConfig:
    """The released sizes with the first `layers` layers."""
    return ModelConfig.from_dict(_raw(layers))[0]


def _raw(layers: int) -> dict[str, Any]:
    source = models.find()
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    own = {"num_hidden_layers": layers, "layer_types": (kinds * layers)[:layers]}
    return {**json.loads((source / "config.json").read_text()), **SIZES, **own}


def write(folder: Path, layers: int = LAYERS) -> Path:
    """Writes the checkpoint, with its first `layers` layers; returns the folder."""
    source = models.find()
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(source / name, folder / name)
    (folder / "config.json").write_text(json.dumps(_raw(layers)))
    with torch.device("meta"):
        model = Clover(config(layers))
    header: dict[str, Any] = {}
    end = 0
    for name, value in model.named_parameters():
        size = 2 * prod(value.shape)
        header[name] = {"dtype": "BF16", "shape": list(value.shape),
                        "data_offsets": [end, end + size]}  # fmt: skip
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)
    return folder
