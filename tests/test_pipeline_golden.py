"""What each pass does to a graph, as text: the smallest Unit after every pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from clover_compile.checkpoint import Checkpoint
from clover_compile.errors import PassFailed
from clover_compile.model.load import load_model
from clover_compile.passes.base import Event, Pass, run_passes
from clover_compile.passes.clean_up import CleanUp
from clover_compile.passes.count_ops import CountOps
from clover_compile.passes.fuse import Fuse
from clover_compile.passes.observe import dump
from clover_compile.passes.pipeline import PIPELINE
from clover_compile.unit import Unit, trace_unit
from tests.checkpoints import make_tiny
from tests.golden import check_golden


@pytest.fixture
def replay(tmp_path: Path) -> Unit:
    """The `replay` Unit of the smallest model, as traced."""
    opened = Checkpoint.open(make_tiny(tmp_path / "model"))
    return trace_unit(load_model(opened.config, opened.tensor), opened.generation, "replay")


def test_replay_after_each_pass(replay: Unit) -> None:
    sections: list[str] = []
    last = ""

    def note(event: Event) -> None:
        nonlocal last
        text = event.unit.text()
        body = "  (unchanged)\n" if text == last else text
        sections.append(f"== {event.label}: {event.rewrites} rewrites\n{body}")
        last = text

    run_passes(replay, PIPELINE, note)
    check_golden("replay_after_each_pass", "\n".join(sections))


def test_the_dump_holds_one_text_per_pass(replay: Unit, tmp_path: Path) -> None:
    run_passes(replay, PIPELINE, dump(tmp_path))
    files = sorted(path.name for path in (tmp_path / "replay").iterdir())
    labels = ["trace", *(step.label() for step in PIPELINE)]
    assert files == [f"{i:02}-{label}.txt" for i, label in enumerate(labels)]
    assert (tmp_path / "replay" / files[-1]).read_text() == replay.text()


def test_a_forgotten_fusion_is_seen_in_the_finished_graph(replay: Unit) -> None:
    with pytest.raises(PassFailed) as failed:
        run_passes(replay, (CleanUp(), Fuse("rms_norm"), CountOps()), lambda event: None)
    assert str(failed.value).startswith(
        "pass count-ops on Unit replay: expected 1 gdn_scan, found 0; "
        "clover.delta_rule.default was left unfused (passes already run: clean-up, fuse-rms_norm)"
    )


def test_a_second_fusion_finds_nothing_more(replay: Unit) -> None:
    counts = run_passes(replay, (Fuse("gdn_scan"),), lambda event: None)
    again = run_passes(replay, (Fuse("gdn_scan"),), lambda event: None)
    assert (counts["fuse-gdn_scan"], again["fuse-gdn_scan"]) == (1, 0)


def test_a_pass_that_raises_is_named(replay: Unit) -> None:
    class Broken(Pass):
        name = "broken"

        def apply(self, unit: Unit) -> int:
            raise ZeroDivisionError("by accident")

    with pytest.raises(PassFailed, match="pass broken on Unit replay: ZeroDivisionError: by acc"):
        run_passes(replay, (Broken(),), lambda event: None)
