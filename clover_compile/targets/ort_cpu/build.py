"""The `ort-cpu` target: one ONNX file per Unit over one shared fp32 weight store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import torch

from clover_compile.targets.base import Emitted, Target
from clover_compile.targets.ort_cpu.lowering import Lowered, attach, layout_value, lower
from clover_compile.unit import Source, Unit
from clover_compile.weight_store import Stored, write_weights

WEIGHTS = "weights/model.safetensors"
