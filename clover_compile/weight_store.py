"""Writes the weights of a bundle: one safetensors file, streamed tensor by tensor."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 64
"""Every tensor starts at a multiple of this, so that mapped weights suit vector loads."""

PIECE = 4 * 2**20
"""Bytes written at a time."""

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor to be stored; `value` is called once, when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    value: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def write_weights(
    path: Path,
    tensors: Sequence[Stored],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, dict[str, Any]]:
    """Writes the file; returns name -> {file, offset (bytes from the start), shape, dtype}.

    Holds one tensor at a time. `progress` is told bytes written and bytes in all.
    """
    header: dict[str, Any] = {}
    position = 0
    for t in tensors:
        position = -(-position // ALIGNMENT) * ALIGNMENT
        offsets = [position, position + t.nbytes]
        header[t.name] = {
            "dtype": _DTYPES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": offsets,
        }
        position += t.nbytes
    text = json.dumps(_without_holes(header), separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    start = 8 + len(text)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for t in tensors:
            stream.seek(start + header[t.name]["data_offsets"][0])
            value = t.value().contiguous()
            if tuple(value.shape) != t.shape or value.dtype != t.dtype:
                raise ValueError(
                    f"{t.name}: {tuple(value.shape)} {value.dtype} instead of {t.shape}"
                )
            _write(stream, value.reshape(-1).view(torch.uint8).numpy())
            progress(stream.tell() - start, position)
        stream.truncate(start + _end(header))
    return {
        t.name: {
            "file": f"{path.parent.name}/{path.name}",
            "offset": start + header[t.name]["data_offsets"][0],
            "shape": list(t.shape),
            "dtype": str(t.dtype).removeprefix("torch."),
        }
        for t in tensors
    }


def _write(stream: BinaryIO, data: NDArray[np.uint8]) -> None:
    """Writes `data`; pieces of zeros are skipped, which leaves holes where the disk has them."""
    for start in range(0, len(data), PIECE):
        piece = data[start : start + PIECE]
        if piece.any():
            stream.write(piece.data)
        else:
            stream.seek(len(piece), os.SEEK_CUR)


def _end(header: Mapping[str, Any]) -> int:
    return max((entry["data_offsets"][1] for entry in header.values()), default=0)


def _without_holes(header: dict[str, Any]) -> dict[str, Any]:
    """Fills the gaps between aligned tensors with named padding: the format allows no holes."""
    filled: dict[str, Any] = {}
    position = 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if begin > position:
            filled[f"padding.{position}"] = {
                "dtype": "U8", "shape": [begin - position], "data_offsets": [position, begin],
            }  # fmt: skip
        filled[name] = entry
        position = end
    return filled
