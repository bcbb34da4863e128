"""What an error tells to do next works: builds that are advised begin, words are those meant."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from clover_compile import cli, models
from clover_compile.parameters import Choice
from clover_compile.runtime.arguments import parser
from clover_compile.runtime.errors import NoBundle
from clover_compile.runtime.nearest import nearest
from clover_compile.runtime.request import ACCEPT, AUTO, WAYS
from clover_compile.targets.table import TARGETS
from tests.bundles import make_bundle
from tests.checkpoints import make_tiny
from tests.command import clover_compile

COMMAND = re.compile(r"`clover-compile (build [^`]*)`")
COMMANDS = ("inspect", "run", "verify", "profile", "finish")


def _checkpoint(here: Path) -> None:
    make_tiny(here / "place")


def _checkpoint_whose_name_is_taken(here: Path) -> None:
    make_tiny(here / "place")
    (here / "place.clover").touch()


def _damaged_checkpoint(here: Path) -> None:
    make_tiny(here / "place")
    (here / "place" / "config.json").write_text("{}")


def _folder(here: Path) -> None:
    (here / "place").mkdir()


def _file(here: Path) -> None:
    (here / "place").touch()


def _inside_a_bundle(here: Path) -> None:
    make_bundle(here / "x.clover")
    (here / "place").symlink_to("x.clover/weights")


def _nothing(here: Path) -> None:
    """No such path."""


PLACES: list[tuple[str, Callable[[Path], None], str, str | None]] = [
    ("a checkpoint", _checkpoint, "place", "build place -o place.clover"),
    ("its name taken", _checkpoint_whose_name_is_taken, "place", "build place -o NEW.clover"),
    ("a damaged checkpoint", _damaged_checkpoint, "place", None),
    ("a folder", _folder, "place", "build MODEL -o NEW.clover"),
    ("a file", _file, "place", "build MODEL -o NEW.clover"),
    ("nothing", _nothing, "place", "build -o place"),
    ("a name with a space", _nothing, "my place", "build -o 'my place'"),
    ("below a file", _file, "place/x", "build MODEL -o NEW.clover"),
]
"""What is there, the path given, and the build that is advised."""


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("row", PLACES, ids=lambda row: row[0])
def test_a_build_that_is_advised_would_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str,
    row: tuple[str, Callable[[Path], None], str, str | None],
) -> None:  # fmt: skip
    _, prepare, given, advised = row
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    more = {"run": ["-p", "hi"], "finish": ["-o", "y"]}.get(command, [])
    done = clover_compile(command, given, *more)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "not a bundle" in done.stderr
    found = COMMAND.search(done.stderr)
    assert (found and found[1]) == advised, done.stderr
    if advised and "MODEL" not in advised:
        plan = clover_compile(*shlex.split(advised), "--plan")
        assert plan.exit_code == 0, plan.output


def test_a_damaged_checkpoint_is_called_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _damaged_checkpoint(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = clover_compile("inspect", "place")
    refused = clover_compile("build", "place", "--plan")
    words = refused.stderr.removeprefix("clover-compile: ").strip()
    assert words in done.stderr and "a build would refuse it too" in done.stderr


def test_a_part_of_a_bundle_leads_to_it(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "x.clover")
    for inside in ("weights", "manifest.json", "no/such"):
        done = clover_compile("inspect", bundle / inside)
        assert done.exit_code == 2 and f"give the bundle around it, {bundle}" in done.stderr


def test_a_killed_build_is_to_be_built_again(tmp_path: Path) -> None:
    left = make_bundle(tmp_path / ".x.clover.building-12")
    done = clover_compile("inspect", left)
    assert done.exit_code == 2 and done.stderr.endswith("left it); build it again\n")


def test_the_runner_alone_knows_no_checkpoint(tmp_path: Path) -> None:
    _checkpoint(tmp_path)
    said = str(NoBundle(tmp_path / "place", "no manifest.json in it"))
    assert "give a folder that `clover-compile build MODEL -o NEW.clover` wrote" in said


MISTYPED = [
    (("build", "--target", "triton-h10"), "triton-h100"),
    (("build", "--target", "ORT-CPU"), "ort-cpu"),
    (("build", "--dtype", "bf61"), "bf16"),
    (("build", "clover-airspace-tny"), "clover-airspace-tiny"),
    (("build", "--targt", "ort-cpu"), "--target"),
    (("biuld",), "build"),
    (("verify", "x", "--locat"), "--locate"),
    (("profile", "x", "--against", "eagr"), "eager"),
    (("run", "x", "-p", "a", "--decod", "causal"), "--decode"),
    (("run", "x", "-p", "a", "--decod=causal"), "--decode"),
    (("run", "x", "-p", "a", "--no-thinkin"), "--no-thinking"),
]


@pytest.mark.parametrize(("arguments", "meant"), MISTYPED, ids=lambda x: str(x))
def test_a_mistyped_word_is_told_with_the_nearest(arguments: tuple[str, ...], meant: str) -> None:
    done = clover_compile(*arguments)
    assert done.exit_code == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert f"did you mean '{meant}'?" in done.stderr.replace("Did", "did")


@pytest.mark.parametrize("arguments", [row[0] for row in MISTYPED[:4]])
def test_a_word_like_none_is_told_without(arguments: tuple[str, ...]) -> None:
    done = clover_compile(*arguments[:-1], "zzzzzzzz")
    assert done.exit_code == 2 and "did you mean" not in done.stderr.lower()


def test_every_known_word_is_found_without_one_letter() -> None:
    options = parser("x", with_bundle=True)._option_string_actions
    for known in ((*WAYS, AUTO), ACCEPT, tuple(TARGETS), tuple(models.bundled()), tuple(options)):
        for word in known:
            cut = word[:-2] + word[-1]
            assert len(word) < 5 or cut in known or nearest(cut, known) is not None, word
    assert nearest("xyz", WAYS) is None and nearest(3, WAYS) is None


def test_every_option_of_fixed_words_has_them() -> None:
    """No option is a choice of the library's own, which says no nearest word."""
    import click

    for command in cli.main.commands.values():
        for option in command.params:
            assert not isinstance(option.type, click.Choice) or isinstance(option.type, Choice)
