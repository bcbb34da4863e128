"""The folder of a report: looked at before anything is measured, gone if nothing comes of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from clover_compile.errors import CannotWrite
from clover_compile.profiling.html.write import FILES, report_folder
from tests.bundles import make_bundle
from tests.command import clover_compile


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/")])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_found_first(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    make(tmp_path / name)
    with pytest.raises(CannotWrite, match=rf"{name}.*no regular file"), report_folder(tmp_path):
        raise AssertionError("it was not found")


def test_folders_that_stay_empty_go(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    for folder in (tmp_path / "x/y/z", tmp_path / "kept"):
        with pytest.raises(KeyboardInterrupt), report_folder(folder):
            raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    with report_folder(tmp_path / "x/y"):
        (tmp_path / "x/mine").touch()
    with pytest.raises(KeyError), report_folder(tmp_path / "x/z/report"):
        raise KeyError
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["mine", "y"]


def test_a_profile_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "x.clover")
    done = clover_compile("profile", folder, "-o", tmp_path / "new/report")
    assert done.exit_code != 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.clover"]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(CannotWrite, match="it is no folder"), report_folder(tmp_path / "taken"):
        raise AssertionError("it was not found")
