"""Config keys that would change the maths: each must be absent or hold Clover's value."""

from __future__ import annotations

from clover_compile.model.config_reader import Reader
from clover_compile.runtime.strict_json import quote

# A key maps to the values under which it changes nothing. null always counts as absent, so an
# empty tuple means "must be absent or null". `sliding_window` has its own rule below.
FIXED: dict[str, tuple[object, ...]] = {
    # activation and biases
    "hidden_act": ("silu",),
    "hidden_activation": ("silu",),
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "mlp_bias": (False,),
    "use_bias": (False,),
    "swiglu_limit": (),
    # attention
    "attn_output_gate": (True,),
    "use_qk_norm": (True,),
    "use_sliding_window": (False,),
    "attention_chunk_size": (),
    "attn_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "no_rope_layers": (),
    "dual_chunk_attention_config": (),
    "rope_interleave": (False,),
    # gated delta net
    "linear_conv_bias": (False,),
    "linear_allow_neg_eigval": (False,),
    "allow_neg_eigval": (False,),
    "mamba_ssm_dtype": ("float32",),
    # experts
    "num_shared_experts": (1,),
    "n_shared_experts": (1,),
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "first_k_dense_replace": (0,),
    "moe_layer_freq": (1,),
    "scoring_func": ("softmax",),
    "topk_method": ("greedy",),
    "n_group": (1,),
    "topk_group": (1,),
    "routed_scaling_factor": (1.0,),
    "moe_router_enable_expert_bias": (False,),
    # scales around the layers and the head
    "final_logit_softcapping": (),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "scale_emb": (1.0,),
    # stored weights
    "quantization_config": (),
    "compression_config": (),
}


def refuse_changes(reader: Reader) -> None:
    """Add a fault for every key of FIXED that holds another value."""
    for key, allowed in FIXED.items():
        for label, value in reader.values(key):
            if not any(_same(value, one) for one in allowed):
                reader.faults.append(_refusal(label, value, allowed))
    # Qwen configs keep a window width beside `use_sliding_window: false`, where it means nothing.
    windows = reader.values("sliding_window")
    if not any(value is False for _, value in reader.values("use_sliding_window")):
        reader.faults += [_refusal(label, value, ()) for label, value in windows]


def refuse_rope_changes(reader: Reader, rope: Reader) -> None:
    """Add a fault for a rope type or factor not the default; `rope` reads the rope objects."""
    for key in ("rope_type", "type"):
        for label, value in rope.values(key):
            if value != "default":
                rope.faults.append(_refusal(label, value, ("default",)))
    for label, value in rope.values("factor"):
        if not _same(value, 1.0):
            rope.faults.append(_refusal(label, value, (1.0,)))
    # Sections give text, image and video their own positions; text alone has one, so they drop out.
    for key in ("mrope_section", "mrope_interleaved"):
        rope.values(key)
    for source in rope.sources:
        for key in ("full_attention", "linear_attention"):
            if key in source.data:
                source.seen.add(key)
                reader.faults.append(f"{source.label}{key}: rope per layer type is not supported")


def _same(value: object, allowed: object) -> bool:
    """Equality that keeps booleans apart from numbers."""
    return isinstance(value, bool) == isinstance(allowed, bool) and value == allowed


def _refusal(label: str, value: object, allowed: tuple[object, ...]) -> str:
    only = " or ".join(quote(one) for one in allowed) or "null"
    return f"{label} is {quote(value)}, but only {only} is supported"
