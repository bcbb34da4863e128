"""The table of checkpoint faults: what is broken, and the one line that must say so."""

from __future__ import annotations

import os
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from clover_compile.checkpoint import Checkpoint
from clover_compile.errors import CloverError, Faults
from tests.checkpoints import (
    Edit,
    Weights,
    config,
    generation,
    header,
    index,
    is_one_line,
    make_tiny,
    save_weights,
    shard,
    split_experts,
    text,
    weights,
)

GDN = "model.layers.0.linear_attn."
RIGHT = GDN + "conv_right_weight"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "c"))


def rope(**values: Any) -> Edit:
    parameters = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    return config(rope_parameters={**parameters, **values})


def resized(name: str) -> Edit:
    return weights(lambda w: w.update({name: w[name][..., :-1]}))


def renamed(old: str, new: str) -> Edit:
    return header(lambda h: h.update({new: h.pop(old)}))


def field(name: str, **values: Any) -> Edit:
    return header(lambda h: h[name].update(values))


def swapped(names: tuple[str, str]) -> Edit:
    def change(homes: dict[str, str]) -> None:
        a, b = names
        homes[a], homes[b] = homes[b], homes[a]

    return index(change)


def twice(folder: Path) -> None:
    first, second = shard(folder)
    path = folder / first
    from safetensors.numpy import load_file

    name = sorted(load_file(path))[0]
    save_weights(folder, {**load_file(folder / second), name: load_file(path)[name]}, second)


def both(*edits: Edit) -> Edit:
    def edit(folder: Path) -> None:
        for one in edits:
            one(folder)

    return edit


def raw_config(old: str, new: str) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))

    return edit


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def dangling(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("nowhere")


def fifo(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def repeat_experts(w: Weights) -> None:
    w.update({k: v for k, v in split_experts(w).items() if ".experts.0.down" in k})


def drop_expert(w: Weights) -> None:
    single = split_experts(w)
    w.clear()
    w.update({k: v for k, v in single.items() if ".experts.2." not in k})


VOCAB = "config.json: mask_token_id 320 is outside the vocabulary of 320"
A, B = GDN + "A_log", GDN + "dt_bias"
BLOCK = "config.json: block_size must be"

FAULTS = [
    # config.json as a file
    (text("config.json", None), "config.json is missing"),
    (text("config.json", "{"), "config.json is not valid JSON"),
    (text("config.json", "[1]"), "config.json must hold a JSON object, not [1]"),
    (text("config.json", b'{"a": "\xff"}'), "config.json is not UTF-8 text"),
    (text("config.json", '{"a":' * 5000 + "1" + "}" * 5000), "nested deeper than 64 levels"),
    (text("config.json", '{"a":' * 90 + "1" + "}" * 90), "nested deeper than 64 levels"),
    (fifo, "config.json is not a regular file"),
    (raw_config('"hidden_size"', '"vocab_size"'), 'config.json holds the key "vocab_size" twice'),
    (raw_config("1e-06", "NaN"), "config.json holds NaN"),
    (raw_config("1e-06", "-Infinity"), "config.json holds -Infinity"),
    (raw_config("1e-06", "1e999"), 'holds the number "1e999", which is out of range'),
    (raw_config("1e-06", "9" * 5000), "holds a number of 5000 digits"),
    # config.json: another model
    (config(model_type="qwen3_5_moe"), 'model_type is "qwen3_5_moe"'),
    (config(model_type=...), "model_type is missing"),
    (config(architectures=["CloverMoeForVision"]), '["CloverMoeForVision"]'),
    # config.json: types and ranges
    (config(vocab_size=True), "vocab_size must be an integer, not true"),
    (config(hidden_size=24.0), "hidden_size must be an integer, not 24.0"),
    (config(hidden_size="24"), 'hidden_size must be an integer, not "24"'),
    (config(num_experts=0), "num_experts must be in 1..4096, not 0"),
    (config(head_dim=-16), "head_dim must be in 1..65536, not -16"),
    (config(vocab_size=2**31), "vocab_size must be in 1..2147483647"),
    (config(num_hidden_layers=...), "config.json: num_hidden_layers is missing"),
    (config(rms_norm_eps=0), "rms_norm_eps must be in [1e-30, 1], not 0"),
    (config(rms_norm_eps="1e-6"), 'rms_norm_eps must be a number, not "1e-6"'),
    (config(tie_word_embeddings=1), "tie_word_embeddings must be true or false, not 1"),
    (config(text_config=3), "text_config must be an object, not 3"),
    (config(text_config={"hidden_size": 8}), "text_config.hidden_size is 8 but hidden_size is 24"),
    # config.json: keys that would change the maths
    (config(hidden_act="gelu"), 'hidden_act is "gelu", but only "silu" is supported'),
    (config(attention_bias=True), "attention_bias is true, but only false is supported"),
    (config(attn_output_gate=False), "attn_output_gate is false, but only true is supported"),
    (config(num_shared_experts=2), "num_shared_experts is 2, but only 1 is supported"),
    (config(norm_topk_prob=False), "norm_topk_prob is false, but only true is supported"),
    (config(mlp_only_layers=[0]), "mlp_only_layers is [0], but only [] is supported"),
    (config(decoder_sparse_step=2), "decoder_sparse_step is 2, but only 1 is supported"),
    (config(sliding_window=128), "sliding_window is 128, but only null is supported"),
    (config(use_sliding_window=True), "use_sliding_window is true"),
    (config(quantization_config={"bits": 4}), 'quantization_config is {"bits": 4}, but only null'),
    (config(linear_conv_kernel_dim=3), "linear_conv_kernel_dim must be in 4..4, not 3"),
    (config(mamba_ssm_dtype="bfloat16"), 'mamba_ssm_dtype is "bfloat16"'),
    (config(text_config={"hidden_act": "relu"}), 'text_config.hidden_act is "relu"'),
    (config(denoising_config={"algorithm": "entropy"}), 'algorithm "entropy" is unknown'),
    # config.json: rope
    (rope(rope_type="yarn"), 'rope_parameters.rope_type is "yarn"'),
    (
        config(rope_scaling={"type": "linear", "factor": 2}),
        "rope_scaling.factor is 2, but only 1.0",
    ),
    (config(rope_scaling="linear"), "rope_scaling must be an object"),
    (rope(rope_theta=1e4), "rope_parameters.rope_theta is 10000.0 but rope_theta is 10000000.0"),
    (config(partial_rotary_factor=0.5), "but partial_rotary_factor is 0.5: make them agree"),
    (both(rope(rope_theta=-1), config(rope_theta=-1)), "rope_theta must be in (0, 1e+12], not -1"),
    (rope(full_attention={}), "rope_parameters.full_attention: rope per layer type"),
    (both(config(rope_parameters=..., rope_theta=...)), "config.json: rope_theta is missing"),
    (config(head_dim=4), "turns 1 dims: RoPE needs an even number"),
    # config.json: relations
    (
        config(num_attention_heads=3),
        "num_attention_heads 3 is not divisible by num_key_value_heads 2",
    ),
    (config(linear_num_value_heads=3), "is not divisible by linear_num_key_heads 2"),
    (config(num_experts_per_tok=5), "num_experts_per_tok 5 is more than num_experts 4"),
    (config(layer_types=["linear_attention"]), "layer_types holds 1 kinds for 2 layers"),
    (config(layer_types=["mamba"] * 2), 'layer_types holds "mamba": only linear_attention and'),
    (config(layer_types="full_attention"), "layer_types must be a list"),
    (config(layer_types=["full_attention"] * 2), "layer_types[0] is full_attention, but full_att"),
    (config(layer_types=..., full_attention_interval=...), "layer_types is missing, and so is"),
    (config(full_attention_interval=0), "full_attention_interval must be in 1..2147483647, not 0"),
    # config.json: the block
    (config(block_size=0), f"{BLOCK} in 1..256, not 0"),
    (config(block_size=257), f"{BLOCK} in 1..256, not 257"),
    (config(block_size=...), "config.json: block_size is missing"),
    (config(mask_token_id=320), VOCAB),
    (config(mask_token_id=-1), "mask_token_id must be in 0..2147483647, not -1"),
    (config(mask_token_id=...), "config.json: mask_token_id is missing"),
    (config(denoising_config={"threshold": 1.5}), "denoising_config.threshold must be in [0, 1]"),
    (config(moe_block_coreset_top_p=-0.1), "moe_block_coreset_top_p must be in [0, 1], not -0.1"),
    (config(moe_block_coreset_enabled="yes"), 'must be true or false, not "yes"'),
    # generation_config.json
    (text("generation_config.json", None), "generation_config.json: no stop ids"),
    (text("generation_config.json", "x"), "generation_config.json is not valid JSON"),
    (generation(eos_token_id=...), "generation_config.json: no stop ids"),
    (generation(eos_token_id=[]), "generation_config.json: no stop ids"),
    (generation(eos_token_id=320), "eos_token_id holds 320, outside the vocabulary of 320"),
    (generation(stop_token_ids=[-1]), "stop_token_ids holds -1, outside the vocabulary"),
    (generation(pad_token_id="<pad>"), "pad_token_id must be a token id or a list of them"),
    (generation(eos_token_id=[True]), "eos_token_id must be a token id or a list of them"),
    (generation(eos_token_id=319), "the only stop id is the mask id 319"),
    (generation(repetition_penalty=0), "repetition_penalty must be in (0, 1e+06], not 0"),
    (generation(dllm_length_penalty_start=1.5), "dllm_length_penalty_start must be an integer"),
    (generation(dllm_think_end_token_id=500), "dllm_think_end_token_id must be in 0..319"),
    (generation(top_p=2), "generation_config.json: top_p must be in [0, 1], not 2"),
    # tensors against the config
    (weights(lambda w: w.pop(A)), f"missing tensors: {A}"),
    (weights(lambda w: (w.pop(A), w.pop(B))), f"missing tensors: {A}, {B}"),
    (config(num_hidden_layers=3, layer_types=...), "missing tensors: model.layers.2."),
    (weights(lambda w: w.update({"mtp.fc.weight": w[A]})), "does not have: mtp.fc.weight"),
    (
        weights(lambda w: w.update({f"model.visual.{i}.w": w[A] for i in range(9)})),
        "visual.{0-8}.w",
    ),
    (resized(A), f"{A} is [3], but the config says [4]"),
    (resized(RIGHT), f"{RIGHT} is [80, 2], but the config says [80, 3]"),
    (config(hidden_size=32), "layernorm.weight are [24], but the config says [32]"),
    (config(vocab_size=2**31 - 1, hidden_size=2**20), "but the config says [2147483647, 1048576]"),
    (config(tie_word_embeddings=True), "lm_head.weight is there although tie_word_embeddings"),
    (weights(lambda w: w.pop("lm_head.weight")), "missing tensors: lm_head.weight"),
    (weights(repeat_experts), "does not have: model.layers.{0-1}.mlp.experts.0.down_proj.weight"),
    (weights(drop_expert), "missing tensors: model.layers.{0-1}.mlp.experts.2."),
    (renamed(A, GDN + "A\nlog"), 'linear_attn.A\\nlog"'),
    (
        weights(lambda w: w.update({A.replace("model.", "model.language_model.", 1): w[A]})),
        f"{A} is there twice (model.safetensors and model.safetensors)",
    ),
    # the weight file
    (text("model.safetensors", None), "model.safetensors is missing"),
    (both(text("model.safetensors", None), text("pytorch_model.bin", "")), "pickled weights are"),
    (text("model.safetensors", b""), "is not a safetensors file: it holds 0 bytes"),
    (text("model.safetensors", b"\xff" * 64), "is truncated or corrupt: a header of 184467440737"),
    (text("model.safetensors", struct.pack("<Q", 9) + b"not json!"), "corrupt: the header is not"),
    (
        text("model.safetensors", struct.pack("<Q", 2) + b"{}"),
        "missing tensors: model.embed_tokens.weight, model.norm.weight",
    ),
    (text("extra.safetensors", b""), "extra.safetensors: not part of a checkpoint of one file"),
    (dangling, "model.safetensors is a broken link"),
    (truncated, "model.safetensors is truncated"),
    (header(lambda h: None, cut=1), "model.safetensors is truncated"),
    (header(lambda h: None, pad=7), "7 bytes follow the last tensor"),
    (header(lambda h: h.update(__metadata__={"a": 1})), "__metadata__ is not a table of strings"),
    (header(lambda h: h.update({A: [1]})), f"{A} is corrupt: its entry must hold dtype"),
    (field(A, dtype="I8"), f'{A} is stored as "I8": only F32, F16, BF16'),
    (
        header(lambda h: [h[k].update(dtype="I8") for k in h if ".A_log" not in k and k[0] != "_"]),
        "model.layers.{0-1}.input_layernorm.weight",
    ),
    (field(A, dtype="F64"), f'{A} is stored as "F64"'),
    (field(A, dtype="F8_E4M3"), f'{A} is stored as "F8_E4M3"'),
    (field(A, dtype="F16"), f"{A} is corrupt: [4] F16 does not fill 16 bytes"),
    (field(A, shape=[2**40, 2**40]), "does not fill 16 bytes"),
    (field(A, shape=[-4]), f"{A} is corrupt: shape [-4]"),
    (field(A, shape=[True]), f"{A} is corrupt: shape [true]"),
    (field(A, data_offsets=[16, 0]), f"{A} is corrupt: data_offsets [16, 0]"),
    (field(A, data_offsets=[0]), f"{A} is corrupt: data_offsets [0]"),
    (
        header(lambda h: h[A].update(data_offsets=h[B]["data_offsets"])),
        "overlaps the tensor before",
    ),
    (header(lambda h: h.pop(A)), "is corrupt: unused bytes before"),
    # shards
    (index(dict.clear), "model.safetensors.index.json holds no weight_map"),
    (index(lambda m: m.update({A: "../x.safetensors"})), "only bare names of .safetensors files"),
    (index(lambda m: m.update({A: "/x.safetensors"})), "only bare names of .safetensors files"),
    (index(lambda m: m.update({A: "x.bin"})), "only bare names of .safetensors files"),
    (index(lambda m: m.update({A: 3})), "index.json has 3 in weight_map"),
    (index(lambda m: m.update({A: "gone.safetensors"})), "gone.safetensors is missing"),
    (index(lambda m: m.pop(A)), f"tensors the index does not list: {A}"),
    (index(lambda m: m.update({"x": m[A]})), "the index lists but no shard holds: x"),
    (
        swapped((A, RIGHT.replace("conv_right_weight", "in_proj_a.weight"))),
        "where the index has it",
    ),
    (twice, "is there twice (model-00001-of-00002.safetensors and model-00002-of-00002"),
    (both(shard, text("z.safetensors", b"")), "z.safetensors: not part of model.safetensors.index"),
    (both(shard, text("model.safetensors.index.json", None)), "there is no index for the shards"),
    # tokenizer and template
    (text("tokenizer.json", None), "tokenizer.json is missing"),
    (text("tokenizer.json", "{}"), "tokenizer.json is broken"),
    (text("tokenizer.json", b"\xff"), "tokenizer.json is not UTF-8"),
    (both(config(vocab_size=260, mask_token_id=0)), "tokenizer.json holds id 264, outside the voc"),
    (text("chat_template.jinja", "{% for %}"), "chat_template.jinja chat_template is broken"),
    (text("chat_template.jinja", "{{ x | nofilter }}"), "nofilter"),
    (
        text("tokenizer_config.json", '{"chat_template": "{{"}'),
        "tokenizer_config.json chat_template",
    ),
    (text("tokenizer_config.json", '{"chat_template": 3}'), "chat_template must be text, not 3"),
    (text("tokenizer_config.json", "{"), "tokenizer_config.json is not valid JSON"),
    (text("tokenizer_config.json", '{"bos_token": 3}'), "json bos_token must be text of 1..256"),
    (text("tokenizer_config.json", '{"eos_token": ""}'), "json eos_token must be text of 1..256"),
    (text("tokenizer_config.json", '{"bos_token": {"id": 3}}'), "json bos_token must be text"),
    (text("tokenizer_config.json", '{"bos_token": "\\ud800"}'), "json bos_token must be text"),
    (text("tokenizer_config.json", '{"eos_token": "' + "x" * 257 + '"}'), "json eos_token must"),
]


@pytest.mark.parametrize(
    ("edit", "fragment"), [pytest.param(*row, id=row[1][:60]) for row in FAULTS]
)
def test_a_fault_is_one_clear_line(folder: Path, edit: Edit, fragment: str) -> None:
    edit(folder)
    with pytest.raises(CloverError) as caught:
        Checkpoint.open(folder)
    message = str(caught.value)
    assert fragment in message
    assert is_one_line(caught.value)
    assert caught.value.exit_status == 2


def test_faults_of_all_files_come_together(folder: Path) -> None:
    edits = (config(block_size=0, hidden_act="gelu"), generation(top_p=2), field(A, dtype="I8"))
    both(*edits, text("tokenizer.json", None), text("chat_template.jinja", "{{"))(folder)
    with pytest.raises(Faults) as caught:
        Checkpoint.open(folder)
    assert len(caught.value.faults) == 6
    assert str(caught.value).startswith(str(folder))


@pytest.mark.parametrize(
    "edit",
    [
        config(vocab_size=2**31 - 1, hidden_size=2**20, num_experts=4096),
        config(num_hidden_layers=1024, layer_types=...),
        field("lm_head.weight", shape=[2**62, 2**62], data_offsets=[0, 2**62]),
        text("model.safetensors", struct.pack("<Q", 99_999_999) + b"{"),
    ],
)
def test_sizes_that_lie_cost_no_memory(folder: Path, edit: Edit) -> None:
    edit(folder)
    tracemalloc.start()
    try:
        with pytest.raises(Faults):
            Checkpoint.open(folder)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
