"""Reads and checks the header of one safetensors file, and maps the file without reading it."""

from __future__ import annotations

import mmap
import struct
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path

from clover_compile.runtime.strict_json import JsonFault, parse_json, quote
from clover_compile.tensor_names import listed, spell

# The format allows 100 MB, but even 30,000 tensors take under 5.
MAX_HEADER = 32 << 20
MAX_RANK = 8

# Stored floats we accept, and the dtype's name in torch.
FLOATS = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}

NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Python names the flag from 3.13 on."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a file holds it; `start` is the absolute offset of its `nbytes` bytes."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_header(path: Path) -> tuple[list[StoredTensor], list[str]]:
    """Return the tensors of `path` in the order of their data, and all faults of the file."""
    if not path.is_file():
        return [], ["is a broken link" if path.is_symlink() else "is missing"]
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            head = stream.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                return [], [_bad_length(size, length)]
            text = stream.read(length)
    except OSError as error:
        return [], [f"cannot be read ({error.strerror})"]
    try:
        entries = parse_json(text)
    except JsonFault as fault:
        return [], [f"is corrupt: the header {fault}"]
    return _check(path, entries, 8 + length, size)


def _bad_length(size: int, length: int) -> str:
    if size < 10:
        return f"is not a safetensors file: it holds {size} bytes"
    return f"is truncated or corrupt: a header of {length} bytes in a file of {size}"


def _check(
    path: Path, entries: dict[str, object], data_start: int, size: int
) -> tuple[list[StoredTensor], list[str]]:
    tensors: list[StoredTensor] = []
    faults: list[str] = []
    wrong: dict[str, list[str]] = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            if not isinstance(entry, dict) or any(type(v) is not str for v in entry.values()):
                faults.append("is corrupt: __metadata__ is not a table of strings")
            continue
        result = _entry(path, name, entry, data_start)
        if isinstance(result, StoredTensor):
            tensors.append(result)
        else:
            wrong.setdefault(result, []).append(name)
    # Whole files of quantised weights are one fault, not thousands.
    faults += [f"{listed(names)} {what}" for what, names in wrong.items()]
    tensors.sort(key=lambda t: (t.start, t.nbytes))
    # A refused entry leaves a gap of its own making, so the layout is judged only without one.
    return tensors, faults or _layout_faults(tensors, data_start, size)


def _entry(path: Path, name: str, entry: object, data_start: int) -> StoredTensor | str:
    """One checked tensor, or what is wrong with it."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return "is corrupt: its entry must hold dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in FLOATS:
        known = ", ".join(FLOATS)
        return f"is stored as {quote(dtype)}: only {known} are supported, no quantised weights"
    if not _counts(shape) or len(shape) > MAX_RANK:
        return f"is corrupt: shape {quote(shape)}"
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"is corrupt: data_offsets {quote(offsets)}"
    width = FLOATS[dtype][1]
    nbytes = offsets[1] - offsets[0]
    if prod(shape) * width != nbytes:
        return f"is corrupt: {quote(shape)} {dtype} does not fill {nbytes} bytes"
    return StoredTensor(name, path, FLOATS[dtype][0], tuple(shape), data_start + offsets[0], nbytes)


def _counts(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _layout_faults(tensors: list[StoredTensor], data_start: int, size: int) -> list[str]:
    """Overlaps, holes and a wrong end: the format wants the tensors to tile the data exactly."""
    end = data_start
    faults = []
    for tensor in tensors:
        if tensor.start < end:
            faults.append(f"is corrupt: {spell(tensor.name)} overlaps the tensor before it")
        elif tensor.start > end:
            faults.append(f"is corrupt: unused bytes before {spell(tensor.name)}")
        end = max(end, tensor.start + tensor.nbytes)
    if end > size:
        faults.append(f"is truncated: {size} of {end} bytes are there; fetch it again")
    elif end < size:
        faults.append(f"is corrupt: {size - end} bytes follow the last tensor")
    return faults


def map_nothing(size: int) -> mmap.mmap:
    """`size` bytes of address space that take memory only where they are touched."""
    if not sys.platform.startswith("linux"):
        return mmap.mmap(-1, size)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    return mmap.mmap(-1, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def map_private(path: Path) -> mmap.mmap:
    """Map a whole file so that writes stay in memory; costs address space, not memory."""
    with path.open("rb") as stream:
        if not sys.platform.startswith("linux"):
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        # A writable private mapping is charged in full, so a file larger than the memory would be
        # refused; MAP_NORESERVE lifts that.
        flags = mmap.MAP_PRIVATE | NORESERVE
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        return mmap.mmap(stream.fileno(), 0, flags=flags, prot=prot)
