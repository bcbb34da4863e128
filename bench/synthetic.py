"""Writes synthetic Clover checkpoints: random weights in the sizes that timings need.

Layers, routing and ratios follow the release: three GDN layers to one attention layer, many narrow
experts that hold most weights. Tokenizer and template are the demonstration checkpoint's.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from clover_compile import models
from clover_compile.model.clover import Clover
from clover_compile.model.config import ModelConfig

_RATIOS = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "full_attention_interval": 4, "max_position_embeddings": 4096,
}  # fmt: skip

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64, "num_hidden_layers": 4, "head_dim": 16, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "vocab_size": 1024,
    },
    "60M": {
        "hidden_size": 512, "num_hidden_layers": 8, "head_dim": 64, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4,
        "moe_intermediate_size": 112, "shared_expert_intermediate_size": 112, "vocab_size": 8192,
    },
    "300M": {
        "hidden_size": 768, "num_hidden_layers": 12, "head_dim": 96, "linear_key_head_dim": 96,
        "linear_value_head_dim": 96, "num_experts": 64, "num_experts_per_tok": 8,
        "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
        "vocab_size": 24576,
    },
}  # fmt: skip
"""Name of a size -> what it changes of the demonstration's config.json."""

SCALE = 0.02
"""Standard deviation of a matrix. At 0.06 fp32 rounding alone moves the state of a model this wide
by more than the proof allows, in the eager model too."""

_DRAWS: dict[str, tuple[float, float]] = {
    "model.embed_tokens.weight": (0.0, 1.0),
    "lm_head.weight": (0.0, 0.3),
    "conv1d.weight": (0.0, 0.4),
    "conv_right_weight": (0.0, 0.2),
    "linear_attn.norm.weight": (1.0, 0.1),
    "dt_bias": (0.0, 0.5),
    "A_log": (0.0, 0.7),
    "bd_softmax_logit_scale": (8.0, 1.0),
    "bd_softmax_history_bias": (3.5, 0.3),
    "bd_softmax_history_c": (1.0, 0.2),
}
"""End of a tensor's name -> mean and standard deviation; other tensors are of mean 0 and SCALE."""

ROUTER_SPREAD = 2.0
"""Standard deviation of a router's logits: neither uniform nor always the same experts."""


def config(size: str) -> dict[str, Any]:
    """The config.json of a size."""
    data: dict[str, Any] = json.loads((models.find() / "config.json").read_text())
    data |= _RATIOS | SIZES[size] | {"dtype": "float32"}
    data["mask_token_id"] = data["vocab_size"] - 1
    every = data["full_attention_interval"]
    data["layer_types"] = [
        "linear_attention" if (i + 1) % every else "full_attention"
        for i in range(data["num_hidden_layers"])
    ]
    return data


def write(folder: Path, size: str, seed: int = 0) -> Path:
    """Writes the checkpoint of a size, fp32, into `folder` (made if need be) and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    data = config(size)
    model_config, _ = ModelConfig.from_dict(data)
    with torch.device("meta"):
        model = Clover(model_config)
    generator = np.random.default_rng(seed)
    weights = {
        name: _draw(name, tuple(x.shape), model_config, generator)
        for name, x in model.named_parameters()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(data, indent=1))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(models.find() / name, folder / name)
    return folder


def _draw(
    name: str, shape: tuple[int, ...], c: ModelConfig, generator: np.random.Generator
) -> NDArray[np.float32]:
    mean, deviation = next((x for end, x in _DRAWS.items() if name.endswith(end)), (0.0, SCALE))
    if name.endswith("mlp.gate.weight"):
        deviation = ROUTER_SPREAD / math.sqrt(c.hidden_size)
    drawn = generator.standard_normal(shape, np.float32)
    drawn *= np.float32(deviation)
    drawn += np.float32(mean)
    return drawn
