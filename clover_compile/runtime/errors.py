"""Every error the runner can raise: one class per mistake, each a one-line template.

The class docstring says why it happens and what to do; the error catalogue is generated from here.
"""

from __future__ import annotations

from typing import ClassVar


class CloverError(Exception):
    """Base of every error a user can meet; `str()` is one line: what, where and what to do."""

    template: ClassVar[str] = ""
    exit_status: ClassVar[int] = 1

    def __init__(self, **fields: object) -> None:
        super().__init__(self.template.format(**fields))
        self.fields = fields

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.fields)


def _rebuild(cls: type[CloverError], fields: dict[str, object]) -> CloverError:
    return cls(**fields)


class InputError(CloverError):
    """The request, the command line, the checkpoint or the bundle is not usable as given."""

    exit_status = 2


class RunError(CloverError):
    """Something went wrong while a correct request ran on a correct bundle."""


class Faults(InputError):
    """Several faults were found at once; all of them are listed, not only the first."""

    template = "{where}: {faults}"

    def __init__(self, where: str, faults: tuple[str, ...]) -> None:
        super().__init__(where=where, faults="; ".join(faults))
        self.faults = faults

    def __reduce__(self) -> tuple[object, ...]:
        return Faults, (self.fields["where"], self.faults)
