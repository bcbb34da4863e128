"""The Units' arrays by name: what goes in and what comes out, in order."""

from __future__ import annotations

from clover_compile.model.config import GenerationConfig, ModelConfig

UNITS = ("commit", "verify", "replay", "preview", "pick")

PICK_INPUTS = ("logits", "counts", "row0", "close_open", "scalars", "draft", "running", "noise")
PICK_OUTPUTS = ("ids", "confidence", "p_draft", "entropy")

ACTIVATIONS = ("ring", "k", "v", "tape")
"""First parts of the names of arrays that have the activation dtype."""

WIDE = (
    "A_log",
    "dt_bias",
    "bd_softmax_logit_scale",
    "bd_softmax_history_bias",
    "bd_softmax_history_c",
)
"""Last parts of the names of weights that are fp32 whatever the activation dtype."""


def units(c: ModelConfig) -> tuple[str, ...]:
    """The Units a model has; without GDN layers there is nothing to replay."""
    return tuple(name for name in UNITS if name != "replay" or c.gdn_layers)


def recurrent_names(c: ModelConfig) -> tuple[str, ...]:
    """`ring.i`, `S.i` of the GDN layers."""
    return tuple(f"{kind}.{i}" for i in c.gdn_layers for kind in ("ring", "S"))


def cache_names(c: ModelConfig) -> tuple[str, ...]:
    """`k.i`, `v.i` of the attention layers."""
    return tuple(f"{kind}.{i}" for i in c.attention_layers for kind in ("k", "v"))


def tape_names(c: ModelConfig) -> tuple[str, ...]:
    """`tape.i` of the GDN layers."""
    return tuple(f"tape.{i}" for i in c.gdn_layers)


def state_names(c: ModelConfig) -> tuple[str, ...]:
    """Every state array: the recurrent ones, then the cache."""
    return recurrent_names(c) + cache_names(c)


def fresh(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the arrays that take the place of (or, for k and v, follow) those given."""
    return tuple(f"{name}.new" for name in names)


def inputs(c: ModelConfig, unit: str) -> tuple[str, ...]:
    """Input names of a Unit, in order."""
    return {
        "commit": ("ids", "length", "keep", *state_names(c)),
        "verify": ("ids", "length", *state_names(c)),
        "replay": (*recurrent_names(c), *tape_names(c), "rows"),
        "preview": ("ids", "length", *state_names(c)),
        "pick": PICK_INPUTS,
    }[unit]


def outputs(c: ModelConfig, unit: str) -> tuple[str, ...]:
    """Output names of a Unit, in order."""
    return {
        "commit": ("logits", *fresh(recurrent_names(c)), *fresh(cache_names(c))),
        "verify": ("logits", *fresh(cache_names(c)), *tape_names(c)),
        "replay": fresh(recurrent_names(c)),
        "preview": ("logits",),
        "pick": PICK_OUTPUTS,
    }[unit]


def expected_ops(c: ModelConfig, unit: str) -> dict[str, int]:
    """How many of each fused op the finished graph of a Unit must hold."""
    gdn, attention, layers = len(c.gdn_layers), len(c.attention_layers), c.num_hidden_layers
    if unit == "pick":
        return {"pick": 1}
    if unit == "replay":
        return {"gdn_scan": gdn}
    mixer = "gdn_preview" if unit == "preview" else "gdn_scan"
    counts = {
        mixer: gdn,
        "block_attention": attention,
        "moe": layers,
        "rms_norm": 2 * layers + 1,
    }
    return {name: n for name, n in counts.items() if n}


def pick_constants(c: ModelConfig, g: GenerationConfig) -> tuple[int, list[int], int]:
    """mask id, stop ids and think-end id (-1: none) of the `pick` Unit."""
    end = -1 if g.think_end_token_id is None else g.think_end_token_id
    return c.mask_token_id, list(g.stop_token_ids), end
