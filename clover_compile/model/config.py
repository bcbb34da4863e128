"""The sizes and decoding constants of one Clover checkpoint, checked as its JSON is read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from clover_compile.errors import Faults, NotClover
from clover_compile.model.config_fixed import refuse_changes, refuse_rope_changes
from clover_compile.model.config_reader import INT32_MAX, Reader, Source
from clover_compile.runtime.strict_json import quote

MODEL_TYPE = "clover_moe"
ARCHITECTURE = "CloverMoeModelLM"
LAYER_KINDS = ("linear_attention", "full_attention")
MAX_BLOCK = 256

# Required integers and the largest value taken: a hostile config must not make us loop for long.
_SIZES = {
    "vocab_size": INT32_MAX,
    "hidden_size": 2**20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "linear_num_key_heads": 2**16,
    "linear_key_head_dim": 2**16,
    "linear_num_value_heads": 2**16,
    "linear_value_head_dim": 2**16,
    "num_experts": 4096,
    "num_experts_per_tok": 4096,
    "moe_intermediate_size": 2**20,
    "shared_expert_intermediate_size": 2**20,
    "max_position_embeddings": INT32_MAX,
}
# Asked for by someone else or informative only, so not "unknown".
_ELSEWHERE = (
    "model_type",
    "architectures",
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
)


@dataclass(frozen=True)
class ModelConfig:
    """Everything the model's maths depends on; names are those of config.json where it has one."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    partial_rotary_factor: float
    rope_theta: float
    linear_conv_kernel_dim: int
    linear_num_key_heads: int
    linear_key_head_dim: int
    linear_num_value_heads: int
    linear_value_head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    block_size: int
    mask_token_id: int
    threshold: float
    coreset_enabled: bool
    coreset_top_p: float

    @property
    def rotary_dim(self) -> int:
        """Leading dims of a head that RoPE turns (even)."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def key_dim(self) -> int:
        """GDN key channels: key heads x key head dim."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """GDN value channels: value heads x value head dim."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the GDN convolution: query, key and value."""
        return 2 * self.key_dim + self.value_dim

    def is_attention(self, layer: int) -> bool:
        """True when `layer` mixes by full attention, False when it is a GDN layer."""
        return self.layer_types[layer] == "full_attention"

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        """Numbers of the GDN layers, ascending."""
        return tuple(i for i in range(self.num_hidden_layers) if not self.is_attention(i))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Numbers of the full-attention layers, ascending."""
        return tuple(i for i in range(self.num_hidden_layers) if self.is_attention(i))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**dataclasses.asdict(self), "layer_types": list(self.layer_types)}

    @cached_property
    def hash(self) -> str:
        """Hex SHA-256 of the canonical JSON of the fields."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> tuple[ModelConfig, tuple[str, ...]]:
        """Check config.json's object; return the config and the keys nothing here knows.

        Raises NotClover for another model, else Faults with every fault found.
        """
        if not isinstance(data, dict):
            raise Faults("config.json", (f"must hold a JSON object, not {quote(data)}",))
        _require_clover(data)
        faults: list[str] = []
        top = Reader([Source("", data)], faults)
        reader = Reader([*top.nested("text_config"), *top.sources], faults)
        for key in _ELSEWHERE:
            reader.values(key)
        values: dict[str, Any] = {k: reader.integer(k, 1, high) for k, high in _SIZES.items()}
        values["rms_norm_eps"] = reader.number("rms_norm_eps", 1e-30, 1)
        values["tie_word_embeddings"] = reader.flag("tie_word_embeddings", False)
        values["linear_conv_kernel_dim"] = reader.integer("linear_conv_kernel_dim", 4, 4, 4)
        refuse_changes(reader)
        rope = _read_rope(reader, values)
        denoising = _read_decoding(reader, values)
        values["layer_types"] = _layer_types(reader, values["num_hidden_layers"])
        _check_divisions(values, faults)
        if faults:
            raise Faults("config.json", tuple(faults))
        unknown = reader.unknown() + rope.unknown() + denoising.unknown()
        return cls(**values), tuple(unknown)


def _require_clover(data: dict[str, Any]) -> None:
    inner = data.get("text_config")
    kinds = [data.get("model_type")]
    if isinstance(inner, dict) and inner.get("model_type") not in (None, MODEL_TYPE + "_text"):
        kinds.append(inner["model_type"])
    for kind in kinds:
        if kind != MODEL_TYPE:
            raise NotClover(found="missing" if kind is None else quote(kind))
    names = data.get("architectures")
    if names is not None and not (isinstance(names, list) and ARCHITECTURE in names):
        raise NotClover(found=f"{quote(MODEL_TYPE)} with architectures {quote(names)}")


def _read_rope(reader: Reader, values: dict[str, Any]) -> Reader:
    sources = [*reader.nested("rope_parameters"), *reader.nested("rope_scaling")]
    rope = Reader(sources, reader.faults)
    refuse_rope_changes(reader, rope)
    both = Reader([*sources, *reader.sources], reader.faults)
    values["rope_theta"] = both.number("rope_theta", 0, 1e12, above_low=True)
    values["partial_rotary_factor"] = both.number("partial_rotary_factor", 0, 1, above_low=True)
    return rope


def _read_decoding(reader: Reader, values: dict[str, Any]) -> Reader:
    denoising = Reader(reader.nested("denoising_config"), reader.faults)
    for label, value in denoising.values("algorithm"):
        if value != "low_confidence":
            known = "the only algorithm there is is low_confidence"
            reader.faults.append(f"{label} {quote(value)} is unknown: {known}")
    values["threshold"] = denoising.number("threshold", 0, 1, 0.95)
    values["coreset_enabled"] = reader.flag("moe_block_coreset_enabled", False)
    values["coreset_top_p"] = reader.number("moe_block_coreset_top_p", 0, 1, 1.0)
    values["block_size"] = reader.integer("block_size", 1, MAX_BLOCK)
    values["mask_token_id"] = reader.integer("mask_token_id", 0, INT32_MAX)
    return denoising


def _layer_types(reader: Reader, layers: int | None) -> tuple[str, ...]:
    """The kind of each layer, from the list, the interval, or both when they agree."""
    interval = reader.integer("full_attention_interval", 1, INT32_MAX, None)
    by_interval = tuple(
        LAYER_KINDS[interval is not None and (i + 1) % interval == 0] for i in range(layers or 0)
    )
    found = reader.values("layer_types")
    if not found:
        if interval is None and not reader.values("full_attention_interval"):
            reader.faults.append("layer_types is missing, and so is full_attention_interval")
        return by_interval
    label, kinds = found[0]
    if any(other != kinds for _, other in found[1:]):
        reader.faults.append(f"{label} and {found[1][0]} differ: make them agree")
    if not isinstance(kinds, list):
        reader.faults.append(f"{label} must be a list, not {quote(kinds)}")
        return by_interval
    if layers is not None and len(kinds) != layers:
        reader.faults.append(f"{label} holds {len(kinds)} kinds for {layers} layers")
    strange = [kind for kind in kinds if kind not in LAYER_KINDS]
    if strange:
        known = " and ".join(LAYER_KINDS)
        reader.faults.append(f"{label} holds {quote(strange[0])}: only {known} exist")
    elif interval is not None and len(kinds) == layers and tuple(kinds) != by_interval:
        layer = next(i for i, kind in enumerate(kinds) if kind != by_interval[i])
        reader.faults.append(
            f"{label}[{layer}] is {kinds[layer]}, but full_attention_interval "
            f"{interval} makes it {by_interval[layer]}"
        )
    return tuple(str(kind) for kind in kinds)


def _check_divisions(v: dict[str, Any], faults: list[str]) -> None:
    """Relations between values; those that are already faulty are None and skipped."""
    for whole, part in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        if v[whole] and v[part] and v[whole] % v[part]:
            faults.append(f"{whole} {v[whole]} is not divisible by {part} {v[part]}")
    top, experts = v["num_experts_per_tok"], v["num_experts"]
    if top and experts and top > experts:
        faults.append(f"num_experts_per_tok {top} is more than num_experts {experts}")
    if v["mask_token_id"] is not None and v["vocab_size"]:
        _check_mask(v["mask_token_id"], v["vocab_size"], faults)
    if v["head_dim"] and v["partial_rotary_factor"]:
        turned = int(v["head_dim"] * v["partial_rotary_factor"])
        if turned < 2 or turned % 2:
            faults.append(
                f"head_dim {v['head_dim']} x partial_rotary_factor {v['partial_rotary_factor']:g} "
                f"turns {turned} dims: RoPE needs an even number of at least 2"
            )


def _check_mask(mask: int, vocab: int, faults: list[str]) -> None:
    if mask >= vocab:
        faults.append(f"mask_token_id {mask} is outside the vocabulary of {vocab}")
    elif vocab < 2:
        faults.append("vocab_size 1 leaves no token beside the mask")


@dataclass(frozen=True)
class GenerationConfig:
    """What decides where an answer ends and how logits are processed before a token is picked."""

    stop_token_ids: tuple[int, ...]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    length_penalty: float
    length_penalty_start: int
    length_penalty_window: int
    think_end_bias: float
    think_end_start: int
    think_end_window: int
    think_end_token_id: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**dataclasses.asdict(self), "stop_token_ids": list(self.stop_token_ids)}

    @classmethod
    def from_dict(
        cls,
        data: dict[str, Any],
        *,
        vocab_size: int,
        mask_token_id: int,
        model: dict[str, Any] | None = None,
    ) -> tuple[GenerationConfig, tuple[str, ...]]:
        """Check generation_config.json's object; return it and the keys nothing here knows.

        `model` is config.json's object: its eos_token_id serves when `data` has no stop id.
        Raises Faults with every fault found.
        """
        faults: list[str] = []
        if not isinstance(data, dict):
            raise Faults("generation_config.json", (f"must be an object, not {quote(data)}",))
        reader = Reader([Source("", data)], faults)
        stop = _stop_ids(reader, vocab_size, mask_token_id, model or {})
        values: dict[str, Any] = {
            "presence_penalty": reader.number("presence_penalty", -1e6, 1e6, 0.0),
            "frequency_penalty": reader.number("frequency_penalty", -1e6, 1e6, 0.0),
            # Logits are divided by it, so zero and negative values have no meaning.
            "repetition_penalty": reader.number("repetition_penalty", 0, 1e6, 1.0, above_low=True),
            "length_penalty": reader.number("dllm_length_penalty", -1e6, 1e6, 0.0),
            "length_penalty_start": reader.integer("dllm_length_penalty_start", 0, INT32_MAX, 8192),
            "length_penalty_window": reader.integer(
                "dllm_length_penalty_window", 0, INT32_MAX, 8192
            ),
            "think_end_bias": reader.number("dllm_think_end_bias", -1e6, 1e6, 0.0),
            "think_end_start": reader.integer("dllm_think_end_start", 0, INT32_MAX, 4096),
            "think_end_window": reader.integer("dllm_think_end_window", 0, INT32_MAX, 4096),
        }
        think_end = reader.integer("dllm_think_end_token_id", 0, vocab_size - 1, None)
        # Sampling is asked for per request; these keys are checked and otherwise unused.
        reader.number("temperature", 0, 1e6, 0.0)
        reader.integer("top_k", 0, INT32_MAX, 0)
        reader.number("top_p", 0, 1, 1.0)
        reader.values("bos_token_id")
        if faults:
            raise Faults("generation_config.json", tuple(faults))
        config = cls(stop_token_ids=stop, think_end_token_id=think_end, **values)
        return config, tuple(reader.unknown())


def _stop_ids(reader: Reader, vocab_size: int, mask: int, model: dict[str, Any]) -> tuple[int, ...]:
    ends = {*reader.ids("eos_token_id", vocab_size), *reader.ids("stop_token_ids", vocab_size)}
    named = reader.values("eos_token_id") + reader.values("stop_token_ids")
    if not ends and all(value == [] for _, value in named):
        inner = model.get("text_config")
        sources = [Source("config.json ", d) for d in (inner, model) if isinstance(d, dict)]
        fallback = Reader(sources, reader.faults)
        ends = set(fallback.ids("eos_token_id", vocab_size))
        if not ends and all(value == [] for _, value in fallback.values("eos_token_id")):
            reader.faults.append("no stop ids: eos_token_id and stop_token_ids are missing")
    if ends == {mask}:
        reader.faults.append(f"the only stop id is the mask id {mask}, which is never produced")
    return tuple(sorted(ends | set(reader.ids("pad_token_id", vocab_size))))
