"""Matches the tensors a checkpoint stores with the tensors its config calls for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from clover_compile.model.config import ModelConfig
from clover_compile.safetensors_header import StoredTensor
from clover_compile.tensor_names import NUMBER, listed, ranges, spell

Shape = tuple[int, ...]
_SINGLE = re.compile(
    r"(model\.layers\.[0-9]+\.mlp\.experts)\.([0-9]+)\.(gate|up|down)_proj\.weight"
)


def expected_shapes(c: ModelConfig) -> dict[str, Shape]:
    """Canonical name -> shape of every tensor the model reads, layer by layer, globals last."""
    shapes: dict[str, Shape] = {}
    for i in range(c.num_hidden_layers):
        layer: dict[str, Shape] = {
            "input_layernorm.weight": (c.hidden_size,),
            **(_attention(c) if c.is_attention(i) else _gdn(c)),
            "post_attention_layernorm.weight": (c.hidden_size,),
            **_moe(c),
        }
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in layer.items()})
    shapes["model.embed_tokens.weight"] = (c.vocab_size, c.hidden_size)
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


def _attention(c: ModelConfig) -> dict[str, Shape]:
    query, kv, hidden = c.num_attention_heads * c.head_dim, c.num_key_value_heads, c.hidden_size
    return {
        "self_attn.q_proj.weight": (2 * query, hidden),
        "self_attn.k_proj.weight": (kv * c.head_dim, hidden),
        "self_attn.v_proj.weight": (kv * c.head_dim, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (c.head_dim,),
        "self_attn.k_norm.weight": (c.head_dim,),
    }


def _gdn(c: ModelConfig) -> dict[str, Shape]:
    hidden, heads, taps = c.hidden_size, c.linear_num_value_heads, c.linear_conv_kernel_dim
    return {
        "linear_attn.in_proj_qkv.weight": (c.conv_dim, hidden),
        "linear_attn.in_proj_z.weight": (c.value_dim, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (c.conv_dim, 1, taps),
        "linear_attn.conv_right_weight": (c.conv_dim, taps - 1),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.bd_softmax_logit_scale": (heads,),
        "linear_attn.bd_softmax_history_bias": (heads,),
        "linear_attn.bd_softmax_history_c": (heads,),
        "linear_attn.norm.weight": (c.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (hidden, c.value_dim),
    }


def _moe(c: ModelConfig) -> dict[str, Shape]:
    hidden, inner, shared = (
        c.hidden_size,
        c.moe_intermediate_size,
        c.shared_expert_intermediate_size,
    )
    return {
        "mlp.gate.weight": (c.num_experts, hidden),
        "mlp.experts.gate_up_proj": (c.num_experts, 2 * inner, hidden),
        "mlp.experts.down_proj": (c.num_experts, hidden, inner),
        "mlp.shared_expert.gate_proj.weight": (shared, hidden),
        "mlp.shared_expert.up_proj.weight": (shared, hidden),
        "mlp.shared_expert.down_proj.weight": (hidden, shared),
        "mlp.shared_expert_gate.weight": (1, hidden),
    }


class Layout:
    """For each canonical tensor the stored parts whose concatenation it is, plus all faults."""

    def __init__(self, config: ModelConfig, stored: Iterable[StoredTensor]) -> None:
        self.shapes = expected_shapes(config)
        self.parts: dict[str, tuple[StoredTensor, ...]] = {}
        self.faults: list[str] = []
        self._tied = config.tie_word_embeddings
        self._missing: list[str] = []
        self._misshapen: dict[tuple[Shape, Shape], list[str]] = {}
        self._whole: dict[str, StoredTensor] = {}
        self._singles: dict[str, dict[str, dict[int, StoredTensor]]] = {}
        for tensor in stored:
            self._place(tensor)
        for name, shape in self.shapes.items():
            self._resolve(name, shape)
        self._report()

    def _place(self, tensor: StoredTensor) -> None:
        name = canonical(tensor.name)
        match = _SINGLE.fullmatch(name)
        if match and NUMBER.fullmatch(match[2]):
            slot = self._singles.setdefault(match[1], {}).setdefault(match[3], {})
            taken = slot.setdefault(int(match[2]), tensor)
        else:
            taken = self._whole.setdefault(name, tensor)
        if taken is not tensor:
            files = f"{spell(taken.file.name)} and {spell(tensor.file.name)}"
            self.faults.append(f"{spell(name)} is there twice ({files})")

    def _resolve(self, name: str, shape: Shape) -> None:
        tensor = self._whole.pop(name, None)
        if tensor is not None:
            right_taps = name.endswith("conv_right_weight")
            if tensor.shape != shape and not (
                right_taps and tensor.shape == (shape[0], 1, shape[1])
            ):
                self._misshapen.setdefault((tensor.shape, shape), []).append(tensor.name)
            self.parts[name] = (tensor,)
            return
        experts, _, kind = name.rpartition(".")
        singles = self._singles.get(experts)
        if not singles:
            self._missing.append(name)
        elif kind == "gate_up_proj":
            gate, up = (self._take(experts, k, shape, shape[1] // 2) for k in ("gate", "up"))
            self.parts[name] = tuple(t for pair in zip(gate, up, strict=False) for t in pair)
        else:
            self.parts[name] = tuple(self._take(experts, "down", shape, shape[1]))

    def _take(self, experts: str, kind: str, shape: Shape, rows: int) -> list[StoredTensor]:
        """Remove and return one projection of experts 0..E-1; whatever is left over is extra."""
        slot = self._singles[experts].pop(kind, {})
        count = shape[0]
        absent = set(range(count)) - slot.keys()
        if absent:
            self._missing.append(f"{experts}.{ranges(absent)}.{kind}_proj.weight")
        for tensor in slot.values():
            if tensor.shape != (rows, shape[2]):
                key = (tensor.shape, (rows, shape[2]))
                self._misshapen.setdefault(key, []).append(tensor.name)
        beyond = {e: slot[e] for e in slot if e >= count}
        self._whole.update({canonical(t.name): t for t in beyond.values()})
        return [slot[e] for e in sorted(slot) if e < count]

    def _report(self) -> None:
        left = [t for kinds in self._singles.values() for s in kinds.values() for t in s.values()]
        extra = [t.name for t in (*self._whole.values(), *left)]
        if self._missing:
            self.faults.append("missing tensors: " + listed(self._missing))
        if "lm_head.weight" in self._whole and self._tied:
            extra.remove("lm_head.weight")
            self.faults.append(
                "lm_head.weight is there although tie_word_embeddings is true: "
                "remove the tensor or set the key to false"
            )
        if extra:
            self.faults.append("tensors Clover does not have: " + listed(extra) + " (remove them)")
        for (found, wanted), names in self._misshapen.items():
            verb = "is" if len(names) == 1 else "are"
            sizes = f"{list(found)}, but the config says {list(wanted)}"
            self.faults.append(f"{listed(names)} {verb} {sizes}")


def canonical(name: str) -> str:
    """The name with prefix `model.` for a tensor stored under `model.language_model.`."""
    inner = name.removeprefix("model.language_model.")
    return name if inner == name else "model." + inner


def check_index(weight_map: Mapping[str, str], stored: Iterable[StoredTensor]) -> list[str]:
    """Faults where the shards hold other tensors than the index says."""
    faults: list[str] = []
    unlisted: list[str] = []
    seen: dict[str, StoredTensor] = {}
    for tensor in stored:
        home = weight_map.get(tensor.name)
        if home is None:
            unlisted.append(tensor.name)
        elif home != tensor.file.name and tensor.name not in seen:
            where = f"{spell(tensor.file.name)}, not in {spell(home)}"
            faults.append(f"{spell(tensor.name)} is in {where}, where the index has it")
        seen.setdefault(tensor.name, tensor)
    if unlisted:
        faults.append("tensors the index does not list: " + listed(unlisted))
    absent = [name for name in weight_map if name not in seen]
    if absent:
        faults.append("tensors the index lists but no shard holds: " + listed(absent))
    return faults
