"""Makes the smallest folder the runner takes for a bundle, and seals it again after a change."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from clover_compile.runtime.manifest_shape import canonical_json

OWN = ("manifest.json", "MANIFEST.sha256", "verdict.json", "costs.json")

CONFIG: dict[str, Any] = {
    "vocab_size": 8, "layer_types": ["linear_attention", "full_attention"],
    "num_key_value_heads": 1, "head_dim": 2, "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 1, "linear_key_head_dim": 2,
    "linear_num_value_heads": 1, "linear_value_head_dim": 2,
}  # fmt: skip
RULES = {"stop_token_ids": [1], "mask_token_id": 7, "block_size": 4, "threshold": 0.9}
PORTS = {"inputs": ["x"], "outputs": ["y"], "weights": ["w"]}
UNITS = ("commit", "verify", "preview", "pick")
WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3) + 1


def make_bundle(folder: Path, manifest: dict[str, Any] | None = None) -> Path:
    """Writes a sealed bundle whose Unit files are no more than stubs; `manifest` adds keys."""
    (folder / "units").mkdir(parents=True)
    (folder / "weights").mkdir()
    for name in UNITS:
        (folder / f"units/{name}.onnx").write_bytes(name.encode() * 5)
    offset = write_weight(folder / "weights/model.safetensors")
    (folder / "generation.json").write_text(json.dumps(RULES))
    (folder / "tokenizer.json").write_text("{}")
    weight = {"file": "weights/model.safetensors", "offset": offset, "shape": [2, 3]}
    content = {
        "format_version": 1, "target": "ort-cpu", "engine": "ort", "dtype": "fp32", "context": 64,
        "model": {"config": CONFIG, "hash": hashlib.sha256(canonical_json(CONFIG)).hexdigest()},
        "units": {name: {"file": f"units/{name}.onnx", **PORTS} for name in UNITS},
        "weights": {"w": {**weight, "dtype": "float32"}},
        "accepts": {"numpy": ">=2,<3"},
    }  # fmt: skip
    seal(folder, content | (manifest or {}))
    return folder


def write_weight(path: Path) -> int:
    """Stores WEIGHT as safetensors does; returns the offset of its first byte."""
    header = {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, WEIGHT.nbytes]}}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    path.write_bytes(struct.pack("<Q", len(text)) + text + WEIGHT.tobytes())
    return 8 + len(text)


def seal(folder: Path, manifest: dict[str, Any]) -> None:
    """Lists the files as they are now (unless `manifest` does) and writes our own three."""
    listed = {
        path.relative_to(folder).as_posix(): {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "size": path.stat().st_size,
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).as_posix() not in OWN
    }  # fmt: skip
    write_manifest(folder, json.dumps({"files": listed} | manifest).encode())


def write_manifest(folder: Path, data: bytes) -> None:
    """Writes manifest.json as given, its hash, and a verdict that goes with it."""
    (folder / "manifest.json").write_bytes(data)
    identity = hashlib.sha256(data).hexdigest()
    (folder / "MANIFEST.sha256").write_text(identity + "\n")
    sign(folder, "verdict.json", {"bundle": identity, "outcome": "passed", "reason": ""})


def costs(**changes: Any) -> dict[str, Any]:
    """What a costs.json holds beside the id of its bundle."""
    line = [[1, 0.25], [32, 1.5]]
    units = dict.fromkeys(("commit", "verify", "replay", "preview", "pick"), line)
    chances = {"exact": [0.5, 0.25], "release": [0.5]}
    outlook = {**chances, "rows_per_pass": 2.5, "tokens_per_block": 20}
    return {"kind": "measured", "costs": units, "head": 0.75, "outlook": outlook, **changes}


def sign(folder: Path, name: str, content: dict[str, Any]) -> None:
    """Writes verdict.json or costs.json with the hash of its own content, which may hold numbers
    that no JSON of ours holds."""
    spelled = json.dumps(content, sort_keys=True, separators=(",", ":"))
    signed = {**content, "sha256": hashlib.sha256(spelled.encode()).hexdigest()}
    (folder / name).write_text(json.dumps(signed, indent=1, sort_keys=True) + "\n")


def edit(folder: Path, **changes: Any) -> None:
    """Sets keys of the manifest (`...` removes one) and seals the bundle again."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("files")
    for key, value in changes.items():
        manifest.pop(key, None)
        if value is not ...:
            manifest[key] = value
    seal(folder, manifest)


def edit_inside(folder: Path, key: str, name: str, **changes: Any) -> None:
    """Changes the entry `name` of a table of the manifest, such as `weights`."""
    table = json.loads((folder / "manifest.json").read_text())[key]
    table[name] = {**table[name], **changes}
    edit(folder, **{key: table})


def identity(folder: Path) -> str:
    """The bundle's id as MANIFEST.sha256 states it."""
    return (folder / "MANIFEST.sha256").read_text().strip()
