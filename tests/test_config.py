"""ModelConfig and GenerationConfig: what they read, what they refuse, and that they never crash."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clover_compile.errors import Faults, NotClover
from clover_compile.model.config import GenerationConfig, ModelConfig
from clover_compile.models import find
from tests.checkpoints import is_one_line


def valid() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((find() / "config.json").read_text())
    return data


def faults(data: Any) -> tuple[str, ...]:
    with pytest.raises(Faults) as caught:
        ModelConfig.from_dict(data)
    assert is_one_line(caught.value)
    return caught.value.faults


def read_generation(data: dict[str, Any], **more: Any) -> GenerationConfig:
    return GenerationConfig.from_dict(data, vocab_size=100, mask_token_id=99, **more)[0]


def test_reads_the_bundled_config() -> None:
    config, unknown = ModelConfig.from_dict(valid())
    assert unknown == ()
    assert (config.rotary_dim, config.key_dim, config.value_dim) == (8, 128, 256)
    assert config.conv_dim == 512
    assert config.attention_layers == (3, 7)
    assert config.gdn_layers == (0, 1, 2, 4, 5, 6)
    assert config.is_attention(3)
    assert not config.is_attention(4)
    assert (config.threshold, config.coreset_enabled, config.coreset_top_p) == (0.95, True, 0.9)


def test_hash_follows_the_fields_and_nothing_else() -> None:
    plain, _ = ModelConfig.from_dict(valid())
    again, _ = ModelConfig.from_dict({**valid(), "transformers_version": "9"})
    other, _ = ModelConfig.from_dict({**valid(), "rms_norm_eps": 1e-5})
    assert plain.hash == again.hash != other.hash
    assert json.loads(json.dumps(plain.to_dict())) == plain.to_dict()


def test_defaults_are_those_of_the_spec() -> None:
    data = valid()
    for key in (
        "denoising_config",
        "moe_block_coreset_enabled",
        "moe_block_coreset_top_p",
        "tie_word_embeddings",
        "linear_conv_kernel_dim",
    ):
        del data[key]
    config, _ = ModelConfig.from_dict(data)
    assert (config.threshold, config.coreset_enabled, config.coreset_top_p) == (0.95, False, 1.0)
    assert not config.tie_word_embeddings
    assert config.linear_conv_kernel_dim == 4


def test_text_config_is_read_and_unknown_keys_carry_their_place() -> None:
    data = valid()
    inner = {k: data.pop(k) for k in list(data) if k not in ("model_type", "architectures")}
    inner["denoising_config"]["steps"] = 3
    inner["rope_parameters"]["original"] = 1
    inner["model_type"] = "clover_moe_text"
    outer = {**data, "vision_config": {}, "text_config": {**inner, "router_aux_loss_coef": 0.1}}
    config, unknown = ModelConfig.from_dict(outer)
    assert config == ModelConfig.from_dict(valid())[0]
    assert sorted(unknown) == [
        "text_config.denoising_config.steps",
        "text_config.rope_parameters.original",
        "text_config.router_aux_loss_coef",
        "vision_config",
    ]


@pytest.mark.parametrize("gone", ["rope_parameters", ("rope_theta", "partial_rotary_factor")])
def test_rope_values_may_stand_in_either_place(gone: str | tuple[str, ...]) -> None:
    data = {
        k: v for k, v in valid().items() if k not in (gone if isinstance(gone, tuple) else [gone])
    }
    assert ModelConfig.from_dict(data)[0].rope_theta == 1e4


def test_layer_types_and_interval_each_suffice() -> None:
    both, _ = ModelConfig.from_dict(valid())
    for key in ("layer_types", "full_attention_interval"):
        data = valid()
        del data[key]
        assert ModelConfig.from_dict(data)[0] == both
    irregular = valid()
    del irregular["full_attention_interval"]
    irregular["layer_types"] = ["full_attention"] * 8
    assert ModelConfig.from_dict(irregular)[0].gdn_layers == ()


def test_real_configs_hold_harmless_forms_of_the_fixed_keys() -> None:
    harmless = {
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "quantization_config": None,
        "rope_scaling": None,
        "num_shared_experts": 1,
        "mamba_ssm_dtype": "float32",
    }
    assert ModelConfig.from_dict({**valid(), **harmless})[1] == ()


def test_every_fault_is_listed() -> None:
    data = {**valid(), "hidden_size": True, "block_size": 0, "hidden_act": "gelu", "threshold": 1}
    del data["mask_token_id"]
    found = faults(data)
    assert len(found) == 4
    assert {fault.split()[0] for fault in found} == {
        "hidden_size",
        "block_size",
        "hidden_act",
        "mask_token_id",
    }


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"model_type": "qwen3_5_moe"}, '"qwen3_5_moe"'),
        ({}, "missing"),
        ({"model_type": ["clover_moe"]}, '["clover_moe"]'),
        ({"model_type": "clover_moe", "architectures": ["OtherLM"]}, '["OtherLM"]'),
        ({"model_type": "clover_moe", "text_config": {"model_type": "llama"}}, '"llama"'),
    ],
)
def test_another_model_is_named(model: dict[str, Any], named: str) -> None:
    with pytest.raises(NotClover, match="model_type is") as caught:
        ModelConfig.from_dict(model)
    assert named in str(caught.value)


@pytest.mark.parametrize("data", [[], 3, None, "clover_moe"])
def test_not_an_object(data: Any) -> None:
    assert "must hold a JSON object" in faults(data)[0]


def test_generation_stop_set_is_eos_stop_and_pad() -> None:
    data = {"eos_token_id": 7, "stop_token_ids": [3, 7], "pad_token_id": 1, "do_sample": True}
    config, unknown = GenerationConfig.from_dict(data, vocab_size=100, mask_token_id=99)
    assert config.stop_token_ids == (1, 3, 7)
    assert unknown == ("do_sample",)
    assert (config.repetition_penalty, config.length_penalty_start) == (1.0, 8192)
    assert (config.think_end_start, config.think_end_token_id) == (4096, None)
    assert config.to_dict()["stop_token_ids"] == [1, 3, 7]


@pytest.mark.parametrize(
    "model",
    [{"eos_token_id": [4, 5]}, {"eos_token_id": None, "text_config": {"eos_token_id": [5, 4]}}],
)
def test_generation_falls_back_on_the_models_eos(model: dict[str, Any]) -> None:
    assert read_generation({}, model=model).stop_token_ids == (4, 5)
    assert read_generation({"pad_token_id": 1}, model=model).stop_token_ids == (1, 4, 5)
    assert read_generation({"eos_token_id": 9}, model=model).stop_token_ids == (9,)
