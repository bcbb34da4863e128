"""Makes checkpoint folders for tests and breaks them in chosen ways."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests import oracle

Weights = dict[str, np.ndarray]
Edit = Callable[[Path], object]

# Small enough that hundreds of folders cost nothing; one layer of each kind, unequal sizes.
TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "hidden_size": 24,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "shared_expert_intermediate_size": 14,
}


def make_checkpoint(
    folder: Path, seed: int = 0, scale: float = 0.06, dtype: Any = np.float32, **config: Any
) -> Path:
    """Write a checkpoint of random weights into `folder` and return it.

    `config` overrides fields of oracle.Config (4 layers, hidden 64, vocabulary 320 as it stands).
    """
    c = oracle.Config(**config)
    weights = oracle.random_weights(c, seed, scale)
    oracle.save_checkpoint(folder, c, weights, dtype)
    return folder


def make_tiny(folder: Path, **config: Any) -> Path:
    """Write the smallest checkpoint that has everything (sizes of TINY)."""
    return make_checkpoint(folder, **{**TINY, **config})


def is_one_line(error: BaseException) -> bool:
    """True when the message of an error is one ASCII line."""
    message = str(error)
    return message.isascii() and message.isprintable()


def edit_json(path: Path, changes: Mapping[str, Any] | None = None, **more: Any) -> None:
    """Set keys of a JSON object file; `...` as value removes the key."""
    data = json.loads(path.read_text())
    for key, value in {**(changes or {}), **more}.items():
        if value is ...:
            data.pop(key, None)
        else:
            data[key] = value
    path.write_text(json.dumps(data))


def load_weights(folder: Path) -> Weights:
    """Read model.safetensors as arrays."""
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def save_weights(folder: Path, weights: Weights, name: str = "model.safetensors") -> None:
    """Write arrays as one safetensors file."""
    from safetensors.numpy import save_file

    save_file({k: np.ascontiguousarray(v) for k, v in weights.items()}, folder / name)


def split_experts(weights: Weights) -> Weights:
    """The same weights with every expert stored by itself."""
    result: Weights = {}
    for name, value in weights.items():
        prefix, _, kind = name.rpartition(".")
        for e, one in enumerate(value if prefix.endswith("mlp.experts") else ()):
            if kind == "gate_up_proj":
                half = len(one) // 2
                result[f"{prefix}.{e}.gate_proj.weight"] = one[:half]
                result[f"{prefix}.{e}.up_proj.weight"] = one[half:]
            else:
                result[f"{prefix}.{e}.down_proj.weight"] = one
        if not prefix.endswith("mlp.experts"):
            result[name] = value
    return result


def shard(folder: Path, count: int = 2) -> list[str]:
    """Replace model.safetensors by `count` shards and an index; return the shard names."""
    weights = load_weights(folder)
    (folder / "model.safetensors").unlink()
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    homes = {name: names[i % count] for i, name in enumerate(sorted(weights))}
    for file in names:
        save_weights(folder, {k: v for k, v in weights.items() if homes[k] == file}, file)
    index = {"metadata": {"total_size": 0}, "weight_map": homes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return names


def read_parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """Split a safetensors file into its header object and its data."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_parts(path: Path, header: Mapping[str, Any] | bytes, data: bytes) -> None:
    """Write a safetensors file from a header (an object, or bytes as they are) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def config(**changes: Any) -> Edit:
    """An edit of config.json."""
    return lambda folder: edit_json(folder / "config.json", changes)


def generation(**changes: Any) -> Edit:
    """An edit of generation_config.json."""
    return lambda folder: edit_json(folder / "generation_config.json", changes)


def text(name: str, content: str | bytes | None) -> Edit:
    """An edit that replaces a whole file, or removes it when `content` is None."""

    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            data = content.encode() if isinstance(content, str) else content
            (folder / name).write_bytes(data)

    return edit


def weights(change: Callable[[Weights], object]) -> Edit:
    """An edit of the tensors of model.safetensors."""

    def edit(folder: Path) -> None:
        arrays = load_weights(folder)
        change(arrays)
        save_weights(folder, arrays)

    return edit


def header(change: Callable[[dict[str, Any]], object], cut: int = 0, pad: int = 0) -> Edit:
    """An edit of the header of model.safetensors; `cut` and `pad` bytes at the end of the data."""

    def edit(folder: Path) -> None:
        head, data = read_parts(folder / "model.safetensors")
        change(head)
        write_parts(folder / "model.safetensors", head, data[: len(data) - cut] + b"\0" * pad)

    return edit


def index(change: Callable[[dict[str, Any]], object]) -> Edit:
    """An edit of the weight map of a checkpoint that is sharded first."""

    def edit(folder: Path) -> None:
        shard(folder)
        path = folder / "model.safetensors.index.json"
        data = json.loads(path.read_text())
        change(data["weight_map"])
        path.write_text(json.dumps(data))

    return edit
