"""The demonstration bundle: proved, equal to the oracle's stored tokens, closed in itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from clover_compile import models
from clover_compile.model import interface
from clover_compile.model.config import ModelConfig
from clover_compile.runtime import Session
from tests import built
from tests.command import clover_compile

WAYS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "denoise": ("denoise", "passes", {"decode": "denoise"}),
    "causal": ("causal", None, {"decode": "causal"}),
    "exact": ("causal", "exact_rounds", {"decode": "self-speculate", "accept": "exact"}),
    "release": ("release", "release_rounds", {"decode": "self-speculate"}),
}
"""Way -> key of its tokens, key of its passes or rounds, options."""


def lines(name: str) -> list[dict[str, Any]]:
    """A JSON Lines file of the demonstration checkpoint."""
    return [json.loads(line) for line in (models.find() / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def bundle() -> Path:
    """The demonstration bundle."""
    return built.demonstration()


@pytest.fixture(scope="module")
def session(bundle: Path) -> Session:
    """A session over it."""
    return Session.load(bundle)


def test_the_verdict_passed_and_says_why(bundle: Path) -> None:
    verdict = json.loads((bundle / "verdict.json").read_text())
    assert verdict["outcome"] == "passed"
    assert all(row["rows"] >= 32 for row in verdict["units"].values())
    assert all(row["max_error"] <= 1e-4 for row in verdict["units"].values())
    assert all(row["equal"] for row in verdict["generations"].values())
    assert verdict["preview_writes_nothing"]


def test_the_template_s_tokens_travel_with_the_bundle(bundle: Path, session: Session) -> None:
    assert json.loads((bundle / "generation.json").read_text())["eos_token"] == "<|im_end|>"
    assert (session.rules.bos_token, session.rules.eos_token) == (None, "<|im_end|>")


def test_verify_renews_a_verdict_that_is_damaged(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy.clover"))
    (copy / "verdict.json").write_text("{")
    refused = clover_compile("run", copy, "-p", "hi")
    assert (refused.exit_code, "verdict.json is not valid JSON" in refused.stderr) == (2, True)
    done = clover_compile("verify", copy)
    assert (done.exit_code, done.stdout) == (0, f"{copy}: passed\n"), done.stderr
    assert Session.load(copy).rules == Session.load(bundle).rules


def test_the_manifest_counts_every_fused_op(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    config = {k: v for k, v in manifest["model"]["config"].items() if k in _fields()}
    config["layer_types"] = tuple(config["layer_types"])
    c = ModelConfig(**config)
    for unit in interface.units(c):
        counts = {op: row["count"] for op, row in manifest["ops"][unit].items()}
        assert counts == interface.expected_ops(c, unit)
        assert all(row["provider"] for row in manifest["ops"][unit].values())


def _fields() -> set[str]:
    return set(ModelConfig.__dataclass_fields__)


def _compare(session: Session, way: str, count: int) -> tuple[int, int, int]:
    """Messages with the oracle's tokens, with its passes or rounds, and with the right answer."""
    tokens, turns, options = WAYS[way]
    same = steps = right = 0
    for message, want in list(
        zip(lines("messages.jsonl"), lines("oracle_tokens.jsonl"), strict=True)
    )[:count]:
        out = session.generate(message["prompt"], want["max_new_tokens"], **options)
        same += list(out.token_ids) == want[tokens]
        done = out.stats["passes" if way == "denoise" else "rounds"]
        steps += turns is None or done == want[turns]
        right += out.text == message["answer"]
    return same, steps, right


@pytest.mark.parametrize("way", WAYS)
def test_the_first_messages_equal_the_oracle(session: Session, way: str) -> None:
    assert _compare(session, way, 12)[:2] == (12, 12)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_all_messages_equal_the_oracle(session: Session, way: str) -> None:
    same, steps, right = _compare(session, way, 200)
    assert (same, steps) == (200, 200)
    assert right >= 199


def _without_compiler(folder: Path) -> dict[str, str]:
    """An environment in which torch, onnx and this package cannot be imported."""
    for name in ("torch", "onnx", "onnxscript"):
        (folder / f"{name}.py").write_text("raise ImportError('not in this environment')\n")
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


def test_runner_pyz_answers_alone(bundle: Path, tmp_path: Path) -> None:
    elsewhere = shutil.copytree(bundle, tmp_path / "moved.clover")
    empty = tmp_path / "empty"
    empty.mkdir()
    message = lines("messages.jsonl")[0]
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    done = subprocess.run(
        [sys.executable, str(elsewhere / "runner.pyz"), "-p", message["prompt"], "--json"],
        cwd=empty, env=_without_compiler(blocked), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"] == message["answer"]
    assert not list(empty.iterdir())


@pytest.mark.slow
def test_runner_pyz_answers_in_an_environment_of_its_requirements(
    bundle: Path, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "-r", str(bundle / "requirements.txt")]
    subprocess.run(install, check=True, timeout=600)
    message = lines("messages.jsonl")[1]
    done = subprocess.run(
        [str(python), str(bundle / "runner.pyz"), "-p", message["prompt"]],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == message["answer"], done.stderr
    absent = subprocess.run([str(python), "-c", "import torch"], capture_output=True)
    assert absent.returncode != 0


def _cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clover_compile.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_inspect_names_every_op_and_its_kernel(bundle: Path) -> None:
    done = _cli("inspect", str(bundle))
    assert done.returncode == 0, done.stderr
    for word in ("passed", "gdn_scan", "gdn_preview", "block_attention", "moe", "rms_norm", "pick"):
        assert word in done.stdout


def test_verify_with_and_without_the_checkpoint(bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle, tmp_path / "copy.clover")
    for extra in ([], ["--model", "clover-airspace-tiny"]):
        done = _cli("verify", str(copy), *extra, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["outcome"] == "passed"


def test_an_output_that_exists_is_refused(bundle: Path) -> None:
    done = _cli("build", "-o", str(bundle))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--force" in done.stderr


def test_parallel_sessions_equal_one_alone(bundle: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    shared = Session.load(bundle)
    messages = [m["prompt"] for m in lines("messages.jsonl")[:8]]
    alone = [shared.generate(m).token_ids for m in messages]
    with ThreadPoolExecutor(4) as pool:
        together = [out.token_ids for out in pool.map(shared.generate, messages)]
    assert together == alone


def test_a_bundle_accepts_what_the_package_does(bundle: Path) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    accepts = json.loads((bundle / "manifest.json").read_text())["accepts"]
    assert {f"{name}{span}" for name, span in accepts.items()} <= set(project["dependencies"])
