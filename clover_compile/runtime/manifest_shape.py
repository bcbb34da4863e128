"""Checks that what the runner reads of a manifest has the types and ranges it relies on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from clover_compile.runtime.strict_json import quote

Files = Mapping[str, tuple[str, int]]
"""Path -> (hash, size)."""

UNITS = ("commit", "verify", "preview", "pick")
"""Units every bundle has; `replay` is there only with GDN layers."""

DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
MAX_RANK = 8
LAYER_KINDS = ("linear_attention", "full_attention")

SIZES = (
    "vocab_size", "num_key_value_heads", "head_dim", "linear_conv_kernel_dim",
    "linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads",
    "linear_value_head_dim",
)  # fmt: skip
"""Whole numbers of the model's config that the state is made of."""

_LARGEST = 2**31 - 1


def canonical_json(value: Any) -> bytes:
    """The one spelling of a JSON value that hashes are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def readable_json(value: Any) -> bytes:
    """The one spelling of manifest.json, verdict.json and the like: indented, keys in order."""
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def shape_faults(manifest: Mapping[str, Any], files: Files) -> list[str]:
    """Everything in the manifest, beside its list of files, that the runner could trip over."""
    wanted = {
        "target": str, "engine": str, "dtype": str, "context": int, "units": dict,
        "weights": dict, "model": dict, "accepts": dict,
    }  # fmt: skip
    faults = [
        f"{key} is {quote(manifest.get(key), 40)}, not of type {kind.__name__}"
        for key, kind in wanted.items()
        if type(manifest.get(key)) is not kind
    ]
    if not faults:
        if not 1 <= manifest["context"] <= _LARGEST:
            faults.append(f"context is {manifest['context']}")
        faults += _model_faults(manifest["model"])
        faults += _unit_faults(manifest["units"], manifest["weights"], files)
        faults += [
            f"weight {quote(name)} lies outside the bundle's files or is misshapen"
            for name, weight in manifest["weights"].items()
            if not _weight_fits(weight, files)
        ]
    return [f"manifest.json: {fault}" for fault in faults]


def _model_faults(model: Mapping[str, Any]) -> list[str]:
    config = model.get("config")
    if not isinstance(config, dict):
        return [f"model.config is {quote(config, 40)}"]
    if model.get("hash") != hashlib.sha256(canonical_json(config)).hexdigest():
        return ["model.hash is not the hash of model.config"]
    faults = [
        f"model.config.{key} is {quote(config.get(key), 40)}"
        for key in SIZES
        if type(config.get(key)) is not int or not 1 <= config[key] <= _LARGEST
    ]
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or not kinds or any(kind not in LAYER_KINDS for kind in kinds):
        faults.append(f"model.config.layer_types is {quote(kinds, 40)}")
    return faults


def _unit_faults(units: Mapping[str, Any], weights: Mapping[str, Any], files: Files) -> list[str]:
    faults = [f"Unit {name} is missing" for name in UNITS if name not in units]
    for name, unit in units.items():
        if not isinstance(unit, dict) or not _listed(unit.get("file"), files):
            faults.append(f"Unit {quote(name)} has no file in the bundle")
            continue
        for key in ("inputs", "outputs", "weights"):
            listed = unit.get(key)
            if not isinstance(listed, list) or not all(isinstance(x, str) for x in listed):
                faults.append(f"Unit {quote(name)}: {key} is {quote(listed, 40)}")
            elif key == "weights" and not set(listed) <= set(weights):
                faults.append(f"Unit {quote(name)} uses weights that are not there")
    return faults


def _listed(file: object, files: Files) -> bool:
    return isinstance(file, str) and file in files


def _weight_fits(weight: object, files: Files) -> bool:
    if not isinstance(weight, dict) or not _listed(weight.get("file"), files):
        return False
    offset, shape, dtype = weight.get("offset"), weight.get("shape"), weight.get("dtype")
    width = DTYPE_BYTES.get(dtype) if isinstance(dtype, str) else None
    if type(offset) is not int or not isinstance(shape, list) or width is None:
        return False
    if len(shape) > MAX_RANK or any(type(n) is not int or n < 0 for n in shape):
        return False
    size = width
    for n in shape:
        size *= n
    end: int = files[weight["file"]][1]
    return offset >= 0 and offset % width == 0 and offset + size <= end
