"""Checkpoint: what it opens, how tensors come out, and the table of faults it must name."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from clover_compile import checkpoint as module
from clover_compile.checkpoint import Checkpoint
from clover_compile.errors import CheckpointChanged, NoModel
from clover_compile.models import bundled, find
from clover_compile.safetensors_header import map_private
from clover_compile.tensor_names import fold, listed
from tests.checkpoints import (
    config,
    edit_json,
    generation,
    load_weights,
    make_tiny,
    read_parts,
    save_weights,
    shard,
    split_experts,
    weights,
    write_parts,
)

GDN, ATTENTION = "model.layers.0.linear_attn.", "model.layers.1.self_attn."
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
RIGHT = GDN + "conv_right_weight"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "c"))


def same(left: Checkpoint, right: Checkpoint) -> bool:
    """True when both hold the same tensors, bit for bit."""
    return left.names == right.names and all(
        torch.equal(left.tensor(name), right.tensor(name)) for name in left.names
    )


def test_opens_and_gives_every_tensor_as_stored(tiny: Path) -> None:
    c, stored = Checkpoint.open(tiny), load_weights(tiny)
    assert set(c.names) == set(stored)
    for name in c.names:
        assert np.array_equal(c.tensor(name).numpy(), stored[name])
        assert c.tensor(name).shape == c.shape(name)
    assert c.generation.stop_token_ids == (256, 258)
    assert c.unknown_keys == ()
    assert c.tokenizer_path.is_file()
    assert "<|im_start|>" in (c.chat_template or "")
    assert c.parameters == sum(value.size for value in stored.values())


def test_the_bundled_model_opens() -> None:
    assert find() == bundled()["clover-airspace-tiny"] == find("clover-airspace-tiny")
    c = Checkpoint.open(find())
    assert (len(c.names), c.parameters) == (165, 2_953_904)
    assert c.stored_dtype("lm_head.weight") == "bfloat16"
    assert c.stored_dtype("model.norm.weight") == "float32"
    assert c.nonfinite() == []
    assert find(str(find())) == find()
    with pytest.raises(NoModel, match="clover-airspace-tiny"):
        find("no-such-model")


def test_import_is_light() -> None:
    code = (
        "import sys, clover_compile.checkpoint, clover_compile.models; "
        "print({'torch', 'numpy', 'tokenizers', 'jinja2', 'safetensors'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_other_ways_to_store_the_same_weights(tiny: Path, folder: Path) -> None:
    plain, stored = Checkpoint.open(tiny), load_weights(tiny)
    stored[RIGHT] = stored[RIGHT][:, None]
    renamed = {
        k.replace("model.", "model.language_model.", 1): v for k, v in split_experts(stored).items()
    }
    save_weights(folder, renamed)
    assert len(renamed) > len(stored)
    assert same(Checkpoint.open(folder), plain)


def test_a_tied_head_is_absent(folder: Path) -> None:
    config(tie_word_embeddings=True)(folder)
    weights(lambda w: w.pop("lm_head.weight"))(folder)
    c = Checkpoint.open(folder)
    assert "lm_head.weight" not in c.names
    assert c.config.tie_word_embeddings


def test_shards_and_links(tiny: Path, folder: Path, tmp_path: Path) -> None:
    names = shard(folder, 3)
    (tmp_path / "blobs").mkdir()
    for name in (*names, "config.json", "tokenizer.json"):
        (folder / name).rename(tmp_path / "blobs" / name)
        (folder / name).symlink_to(tmp_path / "blobs" / name)
    c = Checkpoint.open(folder)
    assert same(c, Checkpoint.open(tiny))
    assert set(names) < set(c.files)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_converted_on_request(folder: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import load_file, save_file

    halves = {k: v.to(dtype) for k, v in load_file(folder / "model.safetensors").items()}
    save_file(halves, folder / "model.safetensors")
    c = Checkpoint.open(folder)
    assert c.stored_dtype(GATE_UP) == str(dtype).removeprefix("torch.")
    assert c.stored_bytes(GATE_UP) == 2 * halves[GATE_UP].numel()
    assert torch.equal(c.tensor(GATE_UP), halves[GATE_UP].float())
    assert torch.equal(c.tensor(GATE_UP, dtype), halves[GATE_UP])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's memory map")
def test_an_unconverted_tensor_is_a_view_of_the_file(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    c = Checkpoint.open(folder)
    tensor = c.tensor("lm_head.weight")
    mapped = [
        [int(x, 16) for x in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(folder / "model.safetensors"))
    ]
    assert any(low <= tensor.data_ptr() < high for low, high in mapped)
    assert c.tensor("lm_head.weight").data_ptr() == tensor.data_ptr()
    assert c.tensor("lm_head.weight", torch.float16).data_ptr() != tensor.data_ptr()
    tensor.zero_()
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.skipif(sys.platform != "linux", reason="only there is a private map charged in full")
def test_a_file_larger_than_the_memory_can_be_mapped(tmp_path: Path) -> None:
    sparse = tmp_path / "sparse"
    sparse.write_bytes(b"x")
    os.truncate(sparse, 1 << 40)
    with map_private(sparse) as mapped:
        assert mapped[0] == ord("x")
        assert mapped[(1 << 40) - 1] == 0


def test_misaligned_data_comes_out_aligned(tiny: Path, folder: Path) -> None:
    head, data = read_parts(folder / "model.safetensors")
    raw = json.dumps(head).encode()
    write_parts(folder / "model.safetensors", raw + b" " * (1 + -len(raw) % 8), data)
    c = Checkpoint.open(folder)
    assert c.tensor("lm_head.weight").data_ptr() % 4 == 0
    assert same(c, Checkpoint.open(tiny))


def test_nonfinite_names_the_tensors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 64)
    w = split_experts(load_weights(folder))
    down = "model.layers.1.mlp.experts.3.down_proj.weight"
    w["lm_head.weight"][-1, -1] = np.nan
    w[down][0, 0] = -np.inf
    w[GDN + "A_log"][1] = np.inf
    w["model.norm.weight"][:] = np.finfo(np.float32).max
    save_weights(folder, w)
    found = Checkpoint.open(folder).nonfinite()
    assert sorted(found) == sorted([GDN + "A_log", down, "lm_head.weight"])


def test_source_hashes(folder: Path) -> None:
    c = Checkpoint.open(folder)
    expected = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()
    }
    assert c.source_hashes() == expected
    assert set(c.files) == set(expected)


def test_a_file_changed_after_opening_is_refused(folder: Path) -> None:
    first, second = Checkpoint.open(folder), Checkpoint.open(folder)
    weights(lambda w: w.update({RIGHT: w[RIGHT].astype(np.float16)}))(folder)
    with pytest.raises(CheckpointChanged, match="not what was validated"):
        first.tensor(RIGHT)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointChanged, match="do not change a checkpoint in use"):
        second.nonfinite()


def test_template_file_goes_before_the_tokenizers(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert Checkpoint.open(folder).chat_template == "{{ messages[0].content }}"
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    assert Checkpoint.open(folder).chat_template == "D"
    (folder / "tokenizer_config.json").unlink()
    assert Checkpoint.open(folder).chat_template is None


def test_stop_ids_may_come_from_the_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    config(eos_token_id=7)(folder)
    assert Checkpoint.open(folder).generation.stop_token_ids == (7,)


def test_unknown_keys_of_both_files_are_listed(folder: Path) -> None:
    config(use_cache=True)(folder)
    generation(do_sample=True, temperature=0.7, top_k=20, top_p=0.8)(folder)
    assert Checkpoint.open(folder).unknown_keys == ("use_cache", "generation_config.do_sample")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(NoModel, match="no such folder"):
        Checkpoint.open(tmp_path / "nothing")


def test_fold_lists_every_name() -> None:
    names = [f"a.{i}.b.{j}.c" for i in (0, 1, 3) for j in range(4)] + [
        "a.07.b",
        "x",
        "a.9.d",
        "q\n",
    ]
    assert set(fold(names)) == {"a.{0-1,3}.b.{0-3}.c", "a.07.b", "x", "a.9.d", '"q\\n"'}
    assert listed(f"x{i}" for i in range(1000)).endswith("x399 and 600 more")
