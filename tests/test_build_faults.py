"""Every wrong input over the command line: one line, exit status 2, nothing written anywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.bundles import make_bundle
from tests.checkpoints import Edit, config, make_tiny, weights
from tests.command import Result, clover_compile
from tests.test_checkpoint_faults import FAULTS

NORM = "model.layers.1.input_layernorm.weight"
OUT = ("model", "-o", "x.clover")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def here(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the checkpoint `model` in it."""
    shutil.copytree(tiny_model, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything below a folder, with inode and time of change."""
    paths = [folder, *folder.rglob("*")]
    stats = {str(path): path.lstat() for path in paths}
    return {name: (s.st_ino, s.st_mtime_ns) for name, s in stats.items()}


def _refused(here: Path, arguments: tuple[str, ...], fragment: str) -> None:
    before = _tree(here)
    done = clover_compile("build", *arguments)
    assert _tree(here) == before
    assert done.exit_code == 2, done.output
    assert fragment in _last(done)
    assert done.stdout == "" and "Traceback" not in done.stderr


def _last(done: Result) -> str:
    """The error: the last line of stderr; before it stand only the names of stages."""
    *stages, last = done.stderr.splitlines()
    assert all(line.startswith("[") for line in stages), done.stderr
    assert last.startswith("clover-compile: ") and last.isascii()
    return last


@pytest.mark.parametrize(
    ("edit", "fragment"), [pytest.param(*row, id=row[1][:60]) for row in FAULTS]
)
def test_a_wrong_checkpoint(here: Path, edit: Edit, fragment: str) -> None:
    edit(here / "model")
    _refused(here, OUT, fragment)


def _spoiled(name: str, value: float) -> Edit:
    return weights(lambda w: w[name].__setitem__((0,) * w[name].ndim, np.float32(value)))


NONFINITE = [
    (_spoiled(NORM, np.nan), f"NaN or Inf in the weights: {NORM}"),
    (_spoiled("lm_head.weight", np.inf), "NaN or Inf in the weights: lm_head.weight"),
    (
        _spoiled("model.layers.0.mlp.experts.down_proj", -np.inf),
        "in the weights: model.layers.0.mlp.experts.down_proj",
    ),
    (_spoiled("model.layers.0.linear_attn.A_log", np.nan), "linear_attn.A_log"),
]


@pytest.mark.parametrize(("edit", "fragment"), NONFINITE)
def test_weights_that_are_no_numbers(here: Path, edit: Edit, fragment: str) -> None:
    edit(here / "model")
    _refused(here, OUT, fragment)


def _folder(here: Path) -> None:
    (here / "x.clover").mkdir()
    (here / "x.clover" / "precious").touch()


def _bundle(here: Path) -> None:
    make_bundle(here / "x.clover")


def _link(here: Path) -> None:
    make_bundle(here / "real.clover")
    (here / "x.clover").symlink_to("real.clover")


def _dangling(here: Path) -> None:
    (here / "x.clover").symlink_to("nowhere")


def _file(here: Path) -> None:
    (here / "x.clover").touch()


def _nothing(here: Path) -> None:
    """The working folder as it is."""


FORCE = (*OUT, "--force")
EXISTS, NOT_OURS = "x.clover: exists; give another -o", "x.clover: not a bundle (no manifest.json"

SURROUNDINGS: list[tuple[str, Callable[[Path], None], tuple[str, ...], str]] = [
    ("a bundle is there", _bundle, OUT, EXISTS),
    ("a folder is there", _folder, OUT, EXISTS),
    ("a file is there", _file, OUT, EXISTS),
    ("a link is there", _link, OUT, EXISTS),
    ("a broken link is there", _dangling, OUT, EXISTS),
    ("force, a folder", _folder, FORCE, NOT_OURS),
    ("force, a file", _file, FORCE, NOT_OURS),
    ("force, a link to a bundle", _link, FORCE, NOT_OURS),
    ("force, a broken link", _dangling, FORCE, NOT_OURS),
    ("force, the checkpoint", _nothing, ("model", "-o", "model", "--force"), "model: not a bundle"),
    ("force, here", _nothing, ("model", "-o", ".", "--force"), ".: not a bundle"),
    ("here", _nothing, ("model", "-o", "."), ".: exists"),
    ("a name of no text", _nothing, ("model", "-o", "\udcff.clover"), "its name is no UTF-8 text"),
    ("a name with a NUL", _nothing, ("model", "-o", "x\0y"), "its name is no UTF-8 text"),
    ("in the null device", _nothing, ("model", "-o", "/dev/null/x"), "/dev/null is not a folder"),
    ("a huge context", _nothing, (*OUT, "--context", "9" * 30), "and at most 4096"),
    ("inside a file", _file, ("model", "-o", "x.clover/y"), "is not a folder"),
    ("deep inside a file", _file, ("model", "-o", "x.clover/y/z"), "x.clover/y/z: cannot be writt"),
    ("a long name", _nothing, ("model", "-o", "x" * 300), "cannot be written (File name too long"),
    ("a name that breaks lines", _nothing, ("model", "-o", "x" * 256 + "\n"), "cannot be written"),
    ("no such model", _nothing, ("nowhere", "-o", "x"), "nowhere: no such folder"),
    ("a model of two lines", _nothing, ("no\nwhere", "-o", "x"), 'no\\nwhere": no such folder'),
    ("a file as model", _nothing, ("model/config.json", "-o", "x"), "is a file"),
    ("an empty folder as model", _folder, ("x.clover", "-o", "x"), "config.json is missing"),
    ("a bundle as model", _bundle, ("x.clover", "-o", "x"), "x.clover: is a bundle; give"),
    ("no such target", _nothing, (*OUT, "--target", "nope"), 'no target is called "nope"; give'),
    ("fp16", _nothing, (*OUT, "--dtype", "fp16"), "--dtype fp16 is not for target ort-cpu"),
    ("bf16", _nothing, (*OUT, "--dtype", "bf16"), "--dtype bf16 is not for target ort-cpu"),
    ("fp8", _nothing, (*OUT, "--dtype", "fp8"), "--dtype fp8 is not for target ort-cpu"),
    ("context 0", _nothing, (*OUT, "--context", "0"), "--context 0: give one above"),
    ("a negative context", _nothing, (*OUT, "--context", "-7"), "--context -7: give one above"),
    ("a context of one block", _nothing, (*OUT, "--context", "32"), "above the block size 32"),
    ("too long a context", _nothing, (*OUT, "--context", "4097"), "and at most 4096"),
]  # fmt: skip


@pytest.mark.parametrize("what", SURROUNDINGS, ids=lambda row: row[0])
def test_wrong_surroundings(
    here: Path, what: tuple[str, Callable[[Path], None], tuple[str, ...], str]
) -> None:
    _, prepare, arguments, fragment = what
    prepare(here)
    _refused(here, arguments, fragment)


@pytest.mark.parametrize("what", SURROUNDINGS, ids=lambda row: row[0])
def test_a_plan_is_refused_alike(
    here: Path, what: tuple[str, Callable[[Path], None], tuple[str, ...], str]
) -> None:
    _, prepare, arguments, fragment = what
    prepare(here)
    _refused(here, (*arguments, "--plan"), fragment)


USAGE = [
    (("--nope",), "No such option"),
    (("model", "model"), "unexpected extra argument"),
    (("--dtype", "int4"), '"int4" is unknown; give one of: fp32, fp16, bf16, fp8'),
    (("--context", "many"), "is not a valid integer"),
    (("--context", ""), "is not a valid integer"),
    (("",), "it is empty; give a name or a path"),
    (("-o", ""), "it is empty; give a name or a path"),
    (("--dump-passes", ""), "it is empty; give a name or a path"),
    (("--target", ""), 'no target is called ""; give one of'),
    (("--dtype", ""), '"" is unknown; give one of'),
    (("model", "--plan", "--dump-passes", "x"), "--dump-passes has no effect with --plan"),
    (("model", "--dump-passes", "model/config.json"), "model/config.json is not a folder"),
    (("model", "--dump-passes", "/dev/null/x"), "--dump-passes /dev/null/x: cannot be written"),
    (("-o",), "requires an argument"),
    *(
        ((name, one, name, other), f"{name} is given more than once; give it once")
        for name, one, other in (
            ("-o", "x", "y"),
            ("--target", "ort-cpu", "nope"),
            ("--dtype", "fp32", "bf16"),
            ("--context", "100", "200"),
            ("--dump-passes", "x", "y"),
        )
    ),
]


@pytest.mark.parametrize(("arguments", "fragment"), USAGE)
def test_wrong_usage(here: Path, arguments: tuple[str, ...], fragment: str) -> None:
    before = _tree(here)
    done = clover_compile("build", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert fragment in done.stderr and _tree(here) == before


@pytest.mark.parametrize("words", [("--model", "a", "--model", "b"), ("-p", "a", "-p", "b")])
def test_verify_takes_an_option_once(here: Path, words: tuple[str, ...]) -> None:
    done = clover_compile("verify", "x", "--locate", *words)
    assert (done.exit_code, f"{words[0]} is given more than once" in done.stderr) == (2, True)


OTHERS = [
    (("inspect", ""), "it is empty; give a name or a path"),
    (("verify", ""), "it is empty"),
    (("verify", "x", "--model", ""), "it is empty"),
    (("verify", "x", "--locate", "--allow-native"), "no effect with --locate"),
    (("profile", "x", "--model", ""), "it is empty"),
    (("profile", "x", "--against", ""), "it is empty"),
    (("profile", "x", "--messages", ""), "it is empty"),
    (("profile", "x", "-o", ""), "it is empty"),
    (("profile", "x", "--answers", "-1"), "not in the range"),
    (("profile", "x", "--rounds", "9" * 30 + "x"), "not a valid integer"),
    (("profile", "x", "--threads", "20000"), "20000 is not in the range 1<=x<="),
    (("profile", "x", "--threads", "0"), "0 is not in the range 1<=x<="),
    (("finish", "x", "-o", ""), "it is empty"),
    (("finish", "x"), "Missing option '-o'"),
    (("finish", "b", "-o", "model"), "model: it exists; give another -o"),
    (("finish", "b", "-o", "b/x"), "it lies in a bundle"),
    (("finish", "b", "-o", "\udcff"), "its name is no UTF-8 text"),
    (("finish", "b", "-o", "x\0y"), "its name is no UTF-8 text"),
    (("finish", "b", "-o", "x" * 300), "File name too long"),
    (("run", "", "-p", "x"), "not a bundle (no name was given)"),
    (("run", "b", "--messages", ""), "--messages: no file was given"),
    (("run", "\udcff", "-p", "x"), "its name is no UTF-8 text here"),
    (("run", "x\0y", "-p", "x"), "its name is no UTF-8 text"),
    (("inspect", "\udcff"), "its name is no UTF-8 text here"),
    (("targets", "x"), "unexpected extra argument"),
    (("models", "x"), "unexpected extra argument"),
]


@pytest.mark.parametrize(("words", "fragment"), OTHERS, ids=lambda x: ascii(x)[:60])
def test_wrong_usage_of_the_other_commands(
    here: Path, words: tuple[str, ...], fragment: str
) -> None:
    make_bundle(here / "b")
    before = _tree(here)
    done = clover_compile(*words)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.output
    assert fragment in done.stderr and done.stderr.isascii() and _tree(here) == before


def test_the_output_is_named_after_the_folder_itself(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the model is given as `.`, whose own name is empty."""
    make_bundle(here / "model" / "model.clover")
    monkeypatch.chdir(here / "model")
    done = clover_compile("build", ".", "--plan")
    assert done.exit_code == 2 and "model.clover: exists" in done.stderr


def test_debug_shows_a_traceback(here: Path) -> None:
    config(block_size=0)(here / "model")
    done = clover_compile("build", *OUT, "--debug")
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "out of memory; `clover-compile build --plan`"),
        (KeyError("x\ny"), "KeyError: 'x\\ny'; this is a bug, --debug shows where"),
        (OSError(28, "No space left on device"), "No space left on device; nothing was written"),
    ],
)
def test_what_nobody_foresaw_is_one_line_too(
    here: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("clover_compile.build.load_model", fail)
    before = set(_tree(here))
    done = clover_compile("build", *OUT)
    assert (done.exit_code, words in _last(done)) == (1, True), done.stderr
    assert set(_tree(here)) == before


def test_a_process_of_its_own_says_the_same(here: Path) -> None:
    config(block_size=0)(here / "model")
    before = _tree(here)
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "clover_compile.cli", "build", *OUT],
        capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("clover-compile: model: config.json: block_size")
    assert _tree(here) == before
