"""Every error the runner can raise: one class per mistake, each a one-line template.

The class docstring says why it happens and what to do; the error catalogue is generated from here.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from clover_compile.runtime.terminal import one_line


class CloverError(Exception):
    """Base of every error a user can meet; `str()` is one line: what, where and what to do."""

    template: ClassVar[str] = ""
    usual: ClassVar[str] = ""
    """The `remedy` of a template where nothing better is known."""
    exit_status: ClassVar[int] = 1

    def __init__(self, **fields: object) -> None:
        super().__init__(self.template.format(**fields))
        self.fields = fields

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.fields)


def _rebuild(cls: type[CloverError], fields: dict[str, object]) -> CloverError:
    return cls(**fields)


class InputError(CloverError):
    """The request, the command line, the checkpoint or the bundle is not usable as given; correct
    it and try again. Nothing was written.
    """

    exit_status = 2


class RunError(CloverError):
    """Something went wrong while a correct request ran on a correct bundle; no answer was given."""


class Faults(InputError):
    """Everything that is wrong with a checkpoint or a request, not only the first fault. Each says
    what is there and what is allowed; correct all of them.
    """

    template = "{where}: {faults}; correct this and try again"

    def __init__(self, where: str, faults: tuple[str, ...]) -> None:
        super().__init__(where=where, faults="; ".join(faults))
        self.faults = faults

    def __reduce__(self) -> tuple[object, ...]:
        return Faults, (self.fields["where"], self.faults)


class ContextFull(RunError):
    """The sequence would grow beyond the context the bundle was built for. Start a new state, or
    build again with a larger --context.
    """

    template = (
        "the sequence needs {needed} rows but this bundle holds {context}; start a new state or "
        "build with a larger --context"
    )


class NotANumber(RunError):
    """A Unit answered NaN, so no token can be chosen. Damaged files are refused when a bundle is
    opened, so it is the model itself that leaves the range of fp32 on this prompt: `--locate` names
    the first layer that does.
    """

    template = (
        "Unit {unit} answered NaN at pass {turn}, row {row} (response position {position}); "
        "find the layer with `clover-compile verify BUNDLE --model MODEL --locate`"
    )


class AutoNeedsCosts(InputError):
    """`--decode auto` picks the way by what each costs, and this bundle carries no costs, damaged
    ones or those of another bundle. `clover-compile profile` measures them on this machine and
    writes them into the bundle. No other way to decode needs them.
    """

    template = (
        "decode 'auto' needs the bundle's costs.json ({found}); run `clover-compile profile "
        "BUNDLE`, or name a way: {known}"
    )


class EngineFailed(RunError):
    """The engine's own library refused to open or run a Unit: too little memory, or a version that
    lacks a kernel. Install what the bundle's requirements.txt lists and verify the bundle.
    """

    template = (
        "Unit {unit} could not run: {reason}; check free memory and the bundle's requirements.txt"
    )


class FinishFailed(RunError):
    """TensorRT refused a network of the bundle, or the engines it built answer other than the model
    did when the bundle was compiled. Nothing was written.
    """

    template = (
        "the bundle could not be finished: {reason}; nothing was written: report this with the "
        "versions of TensorRT and driver"
    )


class OutputTaken(InputError):
    """`finish` writes a new bundle to a name that is free, in a folder that may be written to and
    is no part of a bundle. Nothing was written.
    """

    template = "{path}: {reason}; give another -o"


class NoBundle(InputError):
    """The path does not lead to a bundle that a build has finished. A killed build leaves none:
    build again.
    """

    template = "{path}: not a bundle ({reason}); {remedy}"
    usual = "give a folder that `clover-compile build MODEL -o NEW.clover` wrote"

    def __init__(self, path: Path | str, reason: str, remedy: str | None = None) -> None:
        shown = one_line(str(path))
        super().__init__(path=shown, reason=reason, remedy=remedy or self.usual)
        self.place, self.remedy = Path(path), remedy


class BadBundle(InputError):
    """The bundle is damaged, incomplete, mixed up with another, or made for other software. Nothing
    of it was opened; build it again, or fetch it again. If only verdict.json is at fault,
    `clover-compile verify` proves the bundle again and writes a new one.
    """

    template = "{path}: refused: {faults}; {remedy}"
    usual = "mend that, or fetch or build the bundle again"

    def __init__(self, path: object, faults: str, remedy: str | None = None) -> None:
        super().__init__(path=path, faults=faults, remedy=remedy or self.usual)


class WrongMachine(InputError):
    """The bundle is whole, but its kernels are machine code for one kind of GPU, and this machine
    has none, another one, too old a driver or too little memory. Run it where it fits, or build for
    this machine: `clover-compile targets` lists what there is.
    """

    template = (
        "{path}: {target} needs {needs}; this machine has {here}; run it elsewhere, or {remedy}"
    )


class NotProved(InputError):
    """The bundle's verdict is not `passed`: nobody has shown that it answers as the model does.
    Verify it on a machine that can run it, or take it as it is with `--unverified`.
    """

    template = (
        "{path}: {outcome}: {reason}; "
        "prove it with `clover-compile verify` where it can run{remedy}"
    )


class BadTokenizer(InputError):
    """tokenizer.json is missing, or the tokenizers library cannot read it. Fetch it again."""

    template = "{path}: not a usable tokenizer ({reason}); restore the checkpoint's tokenizer.json"


class TemplateFailed(InputError):
    """The chat template does not compile, refused the conversation, or wrote too much. Templates
    run in a sandbox: they can reach no files and no Python internals.
    """

    template = "chat template: {reason}; check the conversation, or give raw text"


class BadPrompt(InputError):
    """The prompt named on the command line cannot be read as a conversation or as token ids. Ids
    are numbers with commas between them, a conversation is a JSON array of messages. A message has
    content and a role, which is system, user, assistant or tool.
    """

    template = "{where}: {reason}; give -p TEXT, --messages FILE or --prompt-ids 1,2,3"


class MissingPackage(CloverError):
    """A library the runner needs is not installed beside this Python. The bundle's requirements.txt
    lists all of them.
    """

    template = "the package {package} is not installed; run: pip install -r {requirements}"


class OutputClosed(RunError):
    """Standard output was closed before the command started, so the result would be lost."""

    template = "{stream} is closed, so the result would be lost; give it a file or a pipe"
