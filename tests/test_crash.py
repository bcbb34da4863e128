"""Whatever ends a build, nothing that loads is left, and the next build finds its way clear."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clover_compile.bundle import check_output, exchange, workspace
from clover_compile.errors import CannotWrite, NotOurFolder, OutputExists
from clover_compile.runtime.errors import NoBundle
from clover_compile.runtime.manifest import read_bundle
from tests.bundles import make_bundle
from tests.checkpoints import make_tiny
from tests.interrupted import loadable

ROOT = Path(__file__).parents[1]
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("checkpoint") / "tiny")


def _builds(model: Path, output: Path, how: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Builds that meet `how`, and what each left behind."""
    output.parent.mkdir(exist_ok=True)
    words = [str(model), str(output), how, str(count), str(seed)]
    command = [sys.executable, "-m", "tests.interrupted", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == count
    return [row | {"stderr": done.stderr} for row in rows]


def _finished(row: dict[str, Any]) -> set[str]:
    """Only a build that came to its end may have made a bundle."""
    return {name for name in row["loadable"] if not name.endswith((".timed", ".done"))}


@pytest.mark.parametrize(
    "count", [pytest.param(5, id="5"), pytest.param(100, id="100", marks=pytest.mark.slow)]
)
def test_killed_builds_leave_nothing_that_loads(model: Path, tmp_path: Path, count: int) -> None:
    output = tmp_path / "out" / "x.clover"
    rows = _builds(model, output, "KILL", count, seed=count)
    for row in rows:
        assert row["status"] in (KILLED, 0)
        assert _finished(row) == ({output.name} if row["finished"] else set()), row
    killed = [row for row in rows if not row["finished"]]
    assert len(killed) >= count // 5  # how many is chance: the machine decides how fast it is
    assert count < 100 or any(row["left"] for row in killed)
    (last,) = _builds(model, output, "NONE", 1)
    assert (last["status"], last["finished"], last["left"]) == (0, True, [])


@pytest.mark.parametrize(
    "count", [pytest.param(5, id="5"), pytest.param(100, id="100", marks=pytest.mark.slow)]
)
def test_killed_replacements_leave_a_bundle_in_place(
    model: Path, tmp_path: Path, count: int
) -> None:
    output = tmp_path / "out" / "x.clover"
    rows = _builds(model, output, "FORCE", count, seed=count)
    for row in rows:
        assert row["status"] in (KILLED, 0)
        assert row["loadable"] == [output.name], row
    assert any(row["status"] == KILLED for row in rows)


def test_ctrl_c_cleans_up(model: Path, tmp_path: Path) -> None:
    rows = _builds(model, tmp_path / "out" / "x.clover", "INT", 5)
    for row in rows:
        assert row["status"] in (130, 0) and not row["left"], row
        assert row["finished"] == (row["status"] == 0)
    assert any(row["status"] == 130 for row in rows)
    assert "clover-compile: interrupted; nothing was written\n" in rows[0]["stderr"]
    assert "Traceback" not in rows[0]["stderr"]


def test_a_file_that_may_not_grow(model: Path, tmp_path: Path) -> None:
    (row,) = _builds(model, tmp_path / "out" / "x.clover", "FSIZE", 1)
    assert (row["status"], row["finished"], row["left"]) == (1, False, [])
    assert row["stderr"].splitlines()[-1] == ("clover-compile: File too large; nothing was written")


def test_a_full_disk(model: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("only root may mount a small disk")
    try:
        (row,) = _builds(model, disk / "x.clover", "NONE", 1)
        assert (row["status"], row["finished"], row["left"]) == (1, False, [])
        assert "No space left on device; nothing was written" in row["stderr"]
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _real(model: Path, output: Path, stage: str, number: signal.Signals) -> tuple[int, str]:
    """A real build that gets a signal as soon as it tells of `stage`."""
    command = [sys.executable, "-m", "clover_compile.cli", "build", str(model), "-o", str(output)]
    child = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    said = ""
    for line in child.stderr:
        said += line
        if stage in line:
            child.send_signal(number)
            break
    said += child.stderr.read()
    child.stderr.close()
    return child.wait(timeout=60), said


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param("tracing and fusing commit"),
        pytest.param("proving", marks=pytest.mark.slow),
    ],
)
def test_a_real_build_that_is_killed(model: Path, tmp_path: Path, stage: str) -> None:
    output = tmp_path / "out" / "x.clover"
    status, _ = _real(model, output, stage, signal.SIGKILL)
    assert (status, output.exists()) == (KILLED, False)
    # The folder and, if it was just being written, its verdict beside it.
    left = {path.name.lstrip(".")[: len("x.clover.building-")] for path in output.parent.iterdir()}
    assert left == {"x.clover.building-"} and not loadable(output.parent)
    (row,) = _builds(model, output, "NONE", 1)
    assert (row["finished"], row["left"]) == (True, [])


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["tracing and fusing commit", "lowering", "proving"])
def test_a_real_build_that_is_interrupted(model: Path, tmp_path: Path, stage: str) -> None:
    output = tmp_path / "out" / "x.clover"
    status, said = _real(model, output, stage, signal.SIGINT)
    assert (status, "Traceback" in said) == (130, False), said
    assert said.endswith("interrupted; nothing was written\n")
    assert not list(output.parent.iterdir())


@pytest.mark.parametrize("name", [".x.clover.building-7", ".x.clover.building-old-7"])
def test_the_folder_a_build_works_in_is_no_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = make_bundle(tmp_path / name)
    assert read_bundle(folder, unfinished=True).verdict["outcome"] == "passed"
    monkeypatch.chdir(folder)
    for path in (folder, Path()):
        with pytest.raises(NoBundle, match="a build that was cut off left it"):
            read_bundle(path)


def test_leftovers_of_others_stay(tmp_path: Path) -> None:
    running = tmp_path / f".x.clover.building-{os.getppid()}"
    other = tmp_path / ".y.clover.building-1"
    dead = [tmp_path / ".x.clover.building-99999999", tmp_path / ".x.clover.building-old-99999999"]
    for folder in (running, other, *dead):
        folder.mkdir()
    for name in ("..x.clover.building-99999999.verdict-99999999", ".x.clover.verdict-99999999"):
        (tmp_path / name).touch()
    with workspace(tmp_path / "x.clover", force=False):
        pass
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {running.name, other.name, "x.clover"}


KILL_AT = """
import os, signal, sys
from pathlib import Path
from clover_compile import bundle

output, moment = Path(sys.argv[1]), sys.argv[2]
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if moment == "swapped":
    bundle.shutil.rmtree = die
else:
    bundle.exchange = lambda one, other: False
    rename, done = Path.rename, []
    def counted(path, target):
        if len(done) == int(moment):
            die()
        done.append(path)
        return rename(path, target)
    Path.rename = counted
with bundle.workspace(output, force=True) as folder:
    (folder / "manifest.json").write_text("new")
"""
"""Replaces a bundle and dies once the names are swapped or, without a swap, before a renaming."""


def _killed_at(output: Path, moment: str) -> None:
    command = [sys.executable, "-c", KILL_AT, str(output), moment]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == KILLED


@pytest.mark.parametrize(("moment", "stands"), [("swapped", "new"), ("0", "old"), ("1", None)])
def test_a_kill_while_a_bundle_is_replaced_loses_neither(
    tmp_path: Path, moment: str, stands: str | None
) -> None:
    output = make_bundle(tmp_path / "x[1].clover")
    _killed_at(output, moment)
    found = (output / "manifest.json").read_text() if output.exists() else None
    assert stands == (found if found in (None, "new") else "old")
    # Whatever the next build is, a bundle is back in its place before anything is removed.
    with pytest.raises(OutputExists), workspace(output, force=False):
        pass
    assert (output / "manifest.json").read_text() == "new" or loadable(tmp_path) == [output.name]
    with workspace(output, force=True) as folder:
        (folder / "manifest.json").write_text("newer")
    assert [path.name for path in tmp_path.iterdir()] == [output.name]
    assert (output / "manifest.json").read_text() == "newer"


def test_a_bundle_moved_aside_by_a_running_build_stays_there(tmp_path: Path) -> None:
    aside = make_bundle(tmp_path / f".x.clover.building-old-{os.getppid()}")
    with workspace(tmp_path / "x.clover", force=False) as folder:
        (folder / "manifest.json").write_text("new")
    assert aside.exists() and (tmp_path / "x.clover" / "manifest.json").read_text() == "new"


def test_without_a_swap_of_names_a_bundle_is_replaced_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clover_compile.bundle.exchange", lambda one, other: False)
    output = make_bundle(tmp_path / "x.clover")
    with workspace(output, force=True) as folder:
        (folder / "manifest.json").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == [output.name]


def test_a_swap_that_fails_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "one").touch()
    assert not exchange(tmp_path / "one", tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_force_replaces_a_bundle_and_nothing_else(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "x.clover")
    with pytest.raises(OutputExists):
        check_output(bundle, force=False)
    with pytest.raises(RuntimeError), workspace(bundle, force=True):
        raise RuntimeError
    assert loadable(tmp_path) == ["x.clover"]
    with workspace(bundle, force=True) as folder:
        (folder / "manifest.json").write_text("{}")
    assert [path.name for path in bundle.iterdir()] == ["manifest.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["x.clover"]


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_force_refuses_what_is_no_bundle(tmp_path: Path, kind: str) -> None:
    output = tmp_path / "x.clover"
    if kind == "folder":
        output.mkdir()
        (output / "precious").touch()
    elif kind == "file":
        output.touch()
    else:
        output.symlink_to(make_bundle(tmp_path / "real.clover"))
    before = sorted(tmp_path.rglob("*"))
    for force, error in ((False, OutputExists), (True, NotOurFolder)):
        with pytest.raises(error), workspace(output, force):
            pass
    assert sorted(tmp_path.rglob("*")) == before


def test_an_output_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    output = tmp_path / "x.clover"

    def build() -> None:
        with workspace(output, force=False):
            (output / "precious").mkdir(parents=True)

    with pytest.raises(OutputExists):
        build()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["precious", "x.clover"]


def test_a_read_only_folder_is_refused_early(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CannotWrite, match="is not a folder"):
        check_output(tmp_path / "file" / "x.clover", force=False)
    with pytest.raises(CannotWrite), workspace(Path("/proc/x.clover"), force=False):
        pass
    with pytest.raises(CannotWrite):
        check_output(tmp_path / ("x" * 300), force=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused_early(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    with pytest.raises(CannotWrite, match="read-only"):
        check_output(closed / "x.clover", force=False)
