"""What to do about a path that is no bundle; a build is advised only where it would begin."""

from __future__ import annotations

import shlex
from pathlib import Path

from clover_compile.bundle import bundle_around, check_output
from clover_compile.checkpoint import Checkpoint
from clover_compile.errors import CloverError
from clover_compile.runtime.errors import NoBundle
from clover_compile.runtime.terminal import one_line

NEW = Path("NEW.clover")


def words(error: Exception) -> str:
    """The message of an error; of NoBundle with the advice that fits what is there."""
    if not isinstance(error, NoBundle) or error.place is None or error.remedy is not None:
        return str(error)
    try:
        remedy = _remedy(error.place)
    except (OSError, ValueError):  # a name that no file can have
        remedy = None
    return str(NoBundle(error.place, str(error.fields["reason"]), remedy))


def _remedy(path: Path) -> str | None:
    if (path / "config.json").exists():
        return _compile(path)
    if (around := bundle_around(path.absolute().parent)) is not None:
        return f"give the bundle around it, {_word(around)}"
    if not path.exists() and _may_be_written(path):
        return f"make one with `clover-compile build -o {_word(path)}`"
    return None


def _compile(path: Path) -> str:
    try:
        Checkpoint.open(path)
    except CloverError as error:
        return f"it looks like a checkpoint, but a build would refuse it too: {error}"
    output = Path(f"{path.resolve().name}.clover")
    name = output if _may_be_written(output) else NEW
    return f"it is a checkpoint: `clover-compile build {_word(path)} -o {_word(name)}` compiles it"


def _may_be_written(output: Path) -> bool:
    try:
        check_output(output, force=False)
    except CloverError:
        return False
    return True


def _word(path: Path) -> str:
    """A path as one word of a command line."""
    return shlex.quote(one_line(str(path)))
