"""The GPU check without a GPU: its dry run, its refusal, and that it notices wrong kernels."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clover_compile.gpu_check import __main__ as check
from clover_compile.gpu_check import end_to_end, layers, values
from clover_compile.gpu_check.device import Gpu
from clover_compile.kernels import release
from clover_compile.kernels.architecture import ARCHITECTURES, CAPABILITIES
from clover_compile.kernels.table import KERNELS, fused_op
from clover_compile.prove import WAYS
from clover_compile.targets.cubins import is_released, jobs_of

PLACES = {place.name: place for place in release.places()}
SMALL = ("rms_norm", "gdn_preview", "gdn_scan-commit", "gdn_scan-replay", "block_attention-block")


def _main(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu-check", *flags])
    return check.main()


def test_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "deep" / "report.json"
    flags = ["--dry", "--only", "rms_norm", "--compile", "1", "--json", str(target)]
    assert _main(monkeypatch, *flags) == 0
    out = capsys.readouterr().out
    report = json.loads(target.read_text())
    assert check.DRY in out and report["note"] == check.DRY and "right" not in out
    assert "results" not in report and "times" not in report
    named = report["would_check"]
    assert {f"rms_norm n={rows} R=100" for rows in check.ROWS} <= set(named)
    assert {f"rms_norm {case.name}" for case in fused_op("rms_norm").cases()} & set(named)
    assert report["kernels"] >= 2 and not report["not_compiled"]


def test_every_op_is_checked_at_real_sizes_and_over_its_cases() -> None:
    real = {x.name.split()[0] for x in check.real_checks("", 90, "meta")}
    assert real == set(PLACES)
    cases = {x.op.name for x in check.case_checks("", 90, "meta")}
    assert cases == set(KERNELS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(monkeypatch) == 2
    assert "--dry" in capsys.readouterr().err


@pytest.mark.parametrize("name", SMALL)
def test_arguments_make_sense_to_the_reference(name: str) -> None:
    place = PLACES[name]
    given = values.arguments(place, 3, 4, "cpu", 0, spare=2)
    for value in values.truth(fused_op(place.op), given).values():
        assert not value.is_floating_point() or torch.isfinite(value).all()


def _spoilt(spoil: Callable[[Tensor], Tensor]) -> Callable[..., dict[str, Tensor]]:
    op = fused_op("rms_norm")

    def run(plan: Any, arrays: dict[str, Any], device: Any) -> dict[str, Tensor]:
        meant = values.truth(op, [arrays["x"], arrays["residual"], arrays["weight"], 1e-6])
        return {name: spoil(value).bfloat16() for name, value in meant.items()}

    return run


@pytest.mark.parametrize(
    ("spoil", "right"),
    [
        (lambda x: x, True),
        (lambda x: x * 1.03, False),
        (lambda x: x.roll(1, -1), False),
        (lambda x: torch.where(x == x.max(), torch.nan, x), False),
        (torch.zeros_like, False),
    ],
)
def test_compare_notices(
    spoil: Callable[[Tensor], Tensor], right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "run", _spoilt(spoil))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    one = next(x for x in check.real_checks("rms_norm", 90, "cpu") if "n=2 " in x.name)
    found = check.compare(one, Gpu({}, 90))
    assert found["right"] is right


def test_each_kernel_is_compiled_once() -> None:
    plan = PLACES["rms_norm"].plan(90)
    assert len(jobs_of([plan, plan, PLACES["rms_norm"].plan(90)], 90)) == 1


def test_a_driver_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from clover_compile.runtime import cuda_driver

    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(cuda_driver.CudaError, match="CUDA driver"):
        cuda_driver.driver_version()


def test_layers_launch_the_released_models_kernels() -> None:
    """So the budgets that other tests hold them to are those of what is timed."""
    lowered = layers.lower(layers.MODELS["one of each"], 90)
    plans = layers.plans_of(lowered).values()
    assert all(is_released(plan) for plan in plans)
    assert {plan.op for plan in plans} == {op for op in KERNELS if "fp8" not in op}
    assert layers.launches(lowered)["replay"] == 1


def test_forty_layers_from_three_models() -> None:
    """A layer of each kind costs 2 and 3 ms, what stands around them 10."""
    times = {
        name: {"preview": {"least_ms": 10 + 2 * kinds.count(layers.GDN)
                           + 3 * kinds.count(layers.ATTENTION)}}
        for name, kinds in layers.MODELS.items()
    }  # fmt: skip
    assert layers.extrapolate(times) == {"preview": 10 + 30 * 2 + 10 * 3}


def test_the_bundle_is_built_for_the_gpu_that_is_here() -> None:
    for capability in CAPABILITIES:
        gpu = end_to_end.target_for(capability).removeprefix("triton-")
        assert ARCHITECTURES[gpu].capability == capability
    (first,) = end_to_end.stored(1)
    assert first["tokens"].keys() == WAYS.keys()
    assert first["tokens"]["causal"] == first["tokens"]["self-speculate exact"]


def test_a_bundle_that_is_not_proved_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As it would be on a machine without the GPU it was compiled for."""
    verdict = {"outcome": "compiled, not run", "reason": "no GPU"}

    def build(options: Any, say: Any) -> dict[str, Any]:
        options.output.mkdir()
        (options.output / "verdict.json").write_text(json.dumps(verdict))
        return verdict

    monkeypatch.setattr("clover_compile.build.build", build)
    report = end_to_end.run(90, tmp_path)
    assert not report["right"] and "ways" not in report
