"""Opens a checkpoint folder: everything is validated from headers before a weight is read."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clover_compile.checkpoint_layout import Layout, check_index
from clover_compile.checkpoint_text import (
    SETTINGS_FILE,
    TEMPLATE_FILE,
    read_template,
    read_tokens,
    tokenizer_faults,
)
from clover_compile.errors import CheckpointChanged, Faults
from clover_compile.model.config import GenerationConfig, ModelConfig
from clover_compile.models import no_model
from clover_compile.runtime.strict_json import JsonFault, quote, read_json
from clover_compile.safetensors_header import StoredTensor, map_private, read_header
from clover_compile.tensor_names import spell

if TYPE_CHECKING:
    import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Read when present; which of them must be there is checked one by one.
TEXTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    SETTINGS_FILE,
    TEMPLATE_FILE,
)
MAX_CONFIG = 4 << 20
_CHUNK = 1 << 22


class Checkpoint:
    """A validated Clover checkpoint. Names are canonical: fused experts, `model.layers.{i}.`."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        generation: GenerationConfig,
        unknown_keys: tuple[str, ...],
        layout: Layout,
        chat_template: str | None,
        chat_tokens: dict[str, str],
        files: tuple[str, ...],
    ) -> None:
        self.folder = folder
        self.config = config
        self.generation = generation
        self.unknown_keys = unknown_keys
        self.chat_template = chat_template
        self.chat_tokens = chat_tokens
        self.files = files
        self.tokenizer_path = folder / "tokenizer.json"
        self._layout = layout
        self._maps: dict[Path, mmap.mmap] = {}
        files_used = {part.file for parts in layout.parts.values() for part in parts}
        self._stamps = {file: _stamp(file) for file in files_used}

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Validate `folder`; raises NoModel, NotClover, or Faults listing every fault found."""
        folder = Path(folder)
        if not folder.is_dir() or (folder / "MANIFEST.sha256").is_file():
            raise no_model(folder)
        faults: list[str] = []
        raw, config, unknown = _read_config(folder, faults)
        generation, more = _read_generation(folder, raw, config, faults)
        files, stored = _read_weights(folder, faults)
        layout = None
        if config is not None and stored is not None:
            layout = Layout(config, stored)
            faults += layout.faults
        faults += tokenizer_faults(folder / "tokenizer.json", config.vocab_size if config else None)
        template, template_faults = read_template(folder)
        tokens, token_faults = read_tokens(folder)
        # Either may find the file they share unreadable: that is one fault.
        faults += dict.fromkeys(template_faults + token_faults)
        if faults or config is None or generation is None or layout is None:
            raise Faults(spell(str(folder)), tuple(faults))
        return cls(
            folder, config, generation, unknown + more, layout, template, tokens, files
        )  # fmt: skip

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical tensor names in layer order; no lm_head.weight when the head is tied."""
        return tuple(self._layout.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Canonical shape of a tensor (right taps as [C, 3])."""
        return self._layout.shapes[name]

    def stored_dtype(self, name: str) -> str:
        """`float32`, `float16` or `bfloat16`; parts that differ are stored as if float32."""
        found = {part.dtype for part in self._layout.parts[name]}
        return found.pop() if len(found) == 1 else "float32"

    def stored_bytes(self, name: str) -> int:
        """Bytes the tensor takes in the files."""
        return sum(part.nbytes for part in self._layout.parts[name])

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor in its canonical shape, as `dtype` (float32 when None).

        Without a conversion and without stacking it is a view of the memory-mapped file (private:
        writing to it does not change the file). Raises CheckpointChanged.
        """
        import torch

        dtype = dtype or torch.float32
        shape, parts = self._layout.shapes[name], self._layout.parts[name]
        if len(parts) == 1:
            return self._map(parts[0]).to(dtype).reshape(shape)
        out = torch.empty(prod(shape), dtype=dtype)
        start = 0
        for part in parts:
            value = self._map(part).reshape(-1)
            out[start : start + value.numel()] = value
            start += value.numel()
        return out.reshape(shape)

    def nonfinite(self) -> list[str]:
        """Stored names of the tensors that hold a NaN or an Inf; reads every weight, in chunks."""
        import torch

        found = []
        buffer = bytearray(_CHUNK)
        for parts in self._layout.parts.values():
            for part in parts:
                dtype = getattr(torch, part.dtype)
                self._check_unchanged(part.file)
                for size in _read_chunks(part, buffer):
                    chunk = torch.frombuffer(memoryview(buffer)[:size], dtype=dtype)
                    # Minimum and maximum hand on NaN, so two numbers stand for the chunk.
                    low, high = torch.aminmax(chunk)
                    if not (low.isfinite() and high.isfinite()):
                        found.append(part.name)
                        break
        return found

    def source_hashes(self) -> dict[str, str]:
        """File name -> hex SHA-256 of every file used; reads all of them (streamed)."""
        hashes = {}
        for name in self.files:
            with (self.folder / name).open("rb") as stream:
                hashes[name] = hashlib.file_digest(stream, "sha256").hexdigest()
        return hashes

    @cached_property
    def parameters(self) -> int:
        """Number of stored weights."""
        return sum(prod(shape) for shape in self._layout.shapes.values())

    def release(self) -> None:
        """Gives back the memory of everything that was read through a mapping; tensors that are
        views of one stay usable and are read again."""
        for mapped in self._maps.values():
            if hasattr(mapped, "madvise"):
                mapped.madvise(mmap.MADV_DONTNEED)

    def _map(self, part: StoredTensor) -> torch.Tensor:
        """A stored tensor as a view of its mapped file, or a copy where the file misaligns it."""
        import torch

        dtype = getattr(torch, part.dtype)
        if part.file not in self._maps:
            self._check_unchanged(part.file)
            self._maps[part.file] = map_private(part.file)
        tensor = torch.frombuffer(
            self._maps[part.file], dtype=dtype, count=prod(part.shape), offset=part.start
        ).reshape(part.shape)
        return tensor.clone() if tensor.data_ptr() % tensor.element_size() else tensor

    def _check_unchanged(self, file: Path) -> None:
        if _stamp(file) != self._stamps[file]:
            raise CheckpointChanged(file=spell(str(file)), reason="it is not what was validated")


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """What changes when a file is replaced or written to; None when it is gone."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read_config(
    folder: Path, faults: list[str]
) -> tuple[dict[str, Any], ModelConfig | None, tuple[str, ...]]:
    try:
        raw: dict[str, Any] = read_json(folder / "config.json", MAX_CONFIG)
    except JsonFault as fault:
        faults.append(f"config.json {fault}")
        return {}, None, ()
    try:
        return raw, *ModelConfig.from_dict(raw)
    except Faults as error:
        faults += [f"config.json: {fault}" for fault in error.faults]
        return raw, None, ()


def _read_generation(
    folder: Path, raw: dict[str, Any], config: ModelConfig | None, faults: list[str]
) -> tuple[GenerationConfig | None, tuple[str, ...]]:
    name = "generation_config.json"
    data: dict[str, Any] = {}
    try:
        if (folder / name).exists() or (folder / name).is_symlink():
            data = read_json(folder / name, MAX_CONFIG)
        # Without a usable config the ids cannot be judged, the rest still can.
        vocab, mask = (config.vocab_size, config.mask_token_id) if config else (2**31, -1)
        generation, unknown = GenerationConfig.from_dict(
            data, vocab_size=vocab, mask_token_id=mask, model=raw
        )
    except JsonFault as fault:
        faults.append(f"{name} {fault}")
    except Faults as error:
        faults += [f"{name}: {fault}" for fault in error.faults]
    else:
        return generation, tuple(f"generation_config.{key}" for key in unknown)
    return None, ()


def _read_weights(
    folder: Path, faults: list[str]
) -> tuple[tuple[str, ...], list[StoredTensor] | None]:
    """The names of all files used, and the tensors of the weight files (None after a fault)."""
    before = len(faults)
    shards, weight_map = _weight_files(folder, faults)
    stored: list[StoredTensor] = []
    for shard in shards:
        tensors, wrong = read_header(folder / shard)
        stored += tensors
        faults += [f"{spell(shard)} {fault}" for fault in wrong]
    # Tensors of a broken or unknown file would be reported missing, which would hide the cause.
    if len(faults) > before:
        return (), None
    if weight_map is not None:
        faults += check_index(weight_map, stored)
    texts = TEXTS if weight_map is None else (*TEXTS, INDEX)
    return tuple([name for name in texts if (folder / name).is_file()] + shards), stored


def _weight_files(folder: Path, faults: list[str]) -> tuple[list[str], dict[str, str] | None]:
    """The weight files by name, and the index's map when there is one."""
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    weight_map = None
    if (folder / INDEX).exists() or (folder / INDEX).is_symlink():
        try:
            weight_map = _read_index(folder / INDEX)
        except JsonFault as fault:
            faults.append(f"{INDEX} {fault}")
            return [], None
        shards = sorted(set(weight_map.values()))
    elif SINGLE in present:
        shards = [SINGLE]
    else:
        hint = ", and there is no index for the shards" if present else ""
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
            hint = "; pickled weights are never read, convert them to safetensors"
        faults.append(f"{SINGLE} is missing{hint}")
        return [], None
    stray = [spell(name) for name in present if name not in shards]
    if stray:
        owner = INDEX if weight_map is not None else f"a checkpoint of one file, {SINGLE}"
        faults.append(f"{', '.join(stray)}: not part of {owner}; remove it")
    return shards, weight_map


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise JsonFault("holds no weight_map")
    bad = {quote(file): None for file in weight_map.values() if not _bare(file)}
    if bad:
        allowed = "only bare names of .safetensors files are allowed"
        raise JsonFault(f"has {', '.join([*bad][:20])} in weight_map: {allowed}")
    return weight_map


def _bare(file: object) -> bool:
    """True for a name that cannot lead out of the folder."""
    return isinstance(file, str) and file.endswith(".safetensors") and not set(file) & set("/\\\0")


def _read_chunks(part: StoredTensor, buffer: bytearray) -> Iterator[int]:
    """Fill `buffer` with the tensor's bytes piece by piece; yields the size of each piece."""
    left = part.nbytes
    with part.file.open("rb") as stream:
        stream.seek(part.start)
        while left:
            size = stream.readinto(memoryview(buffer)[: min(left, len(buffer))])
            if not size:
                raise CheckpointChanged(file=spell(str(part.file)), reason="it became shorter")
            left -= size
            yield size
