"""A whole real bundle, damaged in every way: refused in one line, and nothing of it opened."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clover_compile.runtime import Session, manifest
from clover_compile.runtime import bundle as opening
from clover_compile.runtime.errors import BadBundle, NoBundle
from tests import built
from tests.bundles import costs, edit, identity, sign
from tests.checkpoints import is_one_line
from tests.command import clover_compile

FLIPS = 200
OPENED: list[str] = []
"""What was opened although the bundle should have been refused before."""


class Engine:
    """Stands in for the engine; that it is made at all is the fault."""

    def __init__(self, checked: object) -> None:
        OPENED.append("engine")


@pytest.fixture(autouse=True)
def _nothing_opens(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # After `sound`, whose build opens what it made.
    OPENED.clear()
    monkeypatch.setitem(opening.ENGINES, "ort", f"{__name__}:Engine")
    for name in ("_rules", "_sizes", "_template"):
        monkeypatch.setattr(opening, name, lambda checked, name=name: OPENED.append(name))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the demonstration bundle, with costs; tests leave it as they found it."""
    folder = tmp_path_factory.mktemp("sound") / "x.clover"
    shutil.copytree(built.demonstration(), folder)
    sign(folder, "costs.json", costs(bundle=identity(folder)))
    manifest.read_bundle(folder)
    return folder


@pytest.fixture(scope="module")
def other(sound: Path) -> Path:
    """A sound bundle of the same shape in which every file differs from that of `sound`."""
    folder = Path(shutil.copytree(sound, sound.parent / "other.clover"))
    for path in _files(folder):
        with path.open("ab") as stream:
            stream.write(b" ")
    edit(folder, accepts=json.loads((sound / "manifest.json").read_text())["accepts"])
    sign(folder, "costs.json", costs(bundle=identity(folder)))
    manifest.read_bundle(folder)
    return folder


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _names() -> list[str]:
    folder = built.demonstration()
    return [path.relative_to(folder).as_posix() for path in _files(folder)] + ["costs.json"]


@pytest.fixture
def names() -> Iterator[str]:
    """Every file of the bundle, ours included."""
    return iter(_names())


def _refused(folder: Path) -> str:
    """The words of the refusal; nothing may have been opened. Costs are refused alone."""
    with contextlib.suppress(BadBundle, NoBundle):
        checked = manifest.read_bundle(folder)
        assert checked.costs is None and checked.costs_fault is not None
        assert checked.costs_fault.isprintable()
        return checked.costs_fault
    with pytest.raises((BadBundle, NoBundle)) as raised:
        Session.load(folder, unverified=True, allow_native=True)
    assert is_one_line(raised.value) and raised.value.exit_status == 2
    assert not OPENED
    return str(raised.value)


def _each(folder: Path, names: Iterator[str], damage: Callable[[Path], object]) -> int:
    """Damages one file after the other, each put back; returns how many there were."""
    everything = list(names)
    for name in everything:
        path, kept = folder / name, folder.parent / "kept"
        path.rename(kept)
        damage(path)
        try:
            assert Path(name).name in _refused(folder), name
        finally:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            kept.rename(path)
    manifest.read_bundle(folder)
    return len(everything)


def test_every_file_of_a_bundle_is_meant(names: Iterator[str]) -> None:
    known = {
        "manifest.json", "MANIFEST.sha256", "verdict.json", "costs.json", "probes.safetensors",
        "tokenizer.json", "chat_template.jinja", "generation.json", "runner.pyz",
        "requirements.txt",
    }  # fmt: skip
    assert known <= set(names)


def test_any_byte_flipped(sound: Path) -> None:
    draw, files = random.Random(0), _files(sound)
    for i in range(FLIPS):
        path = files[i % len(files)]
        # Half of them near the start, where the structure is.
        size = path.stat().st_size
        at = draw.randrange(size if draw.random() < 0.5 else min(size, 200))
        with path.open("r+b") as stream:
            old = os.pread(stream.fileno(), 1, at)
            new = bytes([old[0] ^ draw.choice((1 << draw.randrange(8), draw.randrange(1, 256)))])
            os.pwrite(stream.fileno(), new, at)
            try:
                words = _refused(sound)
            finally:
                os.pwrite(stream.fileno(), old, at)
        assert path.name in words or path.name == "manifest.json", (path, at, old, new)
    manifest.read_bundle(sound)


@pytest.mark.parametrize("name", ["verdict.json", "costs.json", "MANIFEST.sha256"])
def test_bytes_all_over_the_small_files(sound: Path, name: str) -> None:
    data, draw = (sound / name).read_bytes(), random.Random(1)
    of = identity(sound)
    for at in range(0, len(data), max(1, len(data) // 300)):
        spoiled = bytearray(data)
        spoiled[at] ^= draw.randrange(1, 256)
        (sound / name).write_bytes(spoiled)
        faults: list[str] = []
        try:
            if name == "MANIFEST.sha256":
                with pytest.raises(BadBundle):
                    manifest.bundle_id(sound)
            else:
                manifest._signed(sound, name, of, faults)
                assert faults, (name, at, data[at], spoiled[at])
        finally:
            (sound / name).write_bytes(data)


def test_any_file_missing(sound: Path, names: Iterator[str]) -> None:
    required = (name for name in names if name != "costs.json")
    assert _each(sound, required, lambda path: None) >= 14


def test_any_file_cut_short_or_longer(sound: Path) -> None:
    cuts: list[Callable[[bytes], bytes]] = [
        lambda data: data[:-1], lambda data: data[: len(data) // 2], lambda data: b"",
        lambda data: data + b"\n",
    ]  # fmt: skip
    for cut in cuts:

        def damage(path: Path, cut: Callable[[bytes], bytes] = cut) -> None:
            path.write_bytes(cut((sound.parent / "kept").read_bytes()))

        _each(sound, iter(_names()), damage)


def test_any_file_of_another_bundle(sound: Path, other: Path) -> None:
    for folder, source in ((sound, other), (other, sound)):

        def damage(path: Path, folder: Path = folder, source: Path = source) -> None:
            shutil.copy(source / path.relative_to(folder), path)

        _each(folder, iter(_names()), damage)


def test_anything_but_a_regular_file(sound: Path, names: Iterator[str]) -> None:
    def full(path: Path) -> None:
        path.mkdir()
        shutil.copy(sound.parent / "kept", path / path.name)

    everything = list(names)
    for damage in (
        os.mkfifo, Path.mkdir, full, lambda path: path.symlink_to(sound.parent / "kept"),
        lambda path: path.symlink_to(path.name), lambda path: path.symlink_to("/dev/zero"),
    ):  # fmt: skip
        _each(sound, iter(everything), damage)


@pytest.mark.parametrize("name", ["x", ".x", "units.json", "weights/x", "manifest.json.bak", "x/y"])
def test_anything_extra(sound: Path, name: str) -> None:
    extra = sound / name
    parent = extra.parent
    made = not parent.exists()
    parent.mkdir(exist_ok=True)
    for make in (
        Path.touch,
        os.mkfifo,
        Path.mkdir,
        lambda path: os.link(sound / "runner.pyz", path),
    ):
        make(extra)
        try:
            assert extra.name in _refused(sound)
        finally:
            extra.rmdir() if extra.is_dir() else extra.unlink()
    if made:
        parent.rmdir()
    manifest.read_bundle(sound)


@pytest.mark.parametrize("command", ["run", "verify", "inspect"])
def test_every_command_refuses_it_alike(sound: Path, command: str) -> None:
    path = sound / "runner.pyz"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    try:
        done = clover_compile(command, sound, *(["-p", "hi"] if command == "run" else []))
    finally:
        path.write_bytes(data)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert "runner.pyz" in done.stderr and done.stderr.count("\n") == 1
