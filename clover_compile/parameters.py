"""Kinds of options of the command line: each refuses what the library would take in silence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clover_compile.runtime.nearest import did_you_mean
from clover_compile.runtime.strict_json import quote

if TYPE_CHECKING:
    _Choice = click.Choice[str]
    _Type = click.ParamType[Any]
else:  # older releases of click have no generic classes
    _Choice = click.Choice
    _Type = click.ParamType


class Once(click.Option):
    """An option with one value; click alone would silently take the last of several."""

    def __init__(self, *names: Any, default: Any = None, **settings: Any) -> None:
        settings["multiple"], settings["default"] = True, default and (default,)
        super().__init__(*names, **settings)

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """The only value, or None; raises UsageError for a second one."""
        values = super().process_value(ctx, value)
        if values and len(values) > 1:
            raise click.UsageError(f"{self.opts[0]} is given more than once; give it once")
        return values[0] if values else None


class Choice(_Choice):
    """A word of a fixed set; another one is told with the nearest of them."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """The word itself; raises BadParameter with the known ones."""
        if value in self.choices:
            return value
        known, meant = ", ".join(self.choices), did_you_mean(value, self.choices)
        return self.fail(
            f"{quote(value, 100)} is unknown{meant}; give one of: {known}", param, ctx
        )  # fmt: skip


class Threads(_Type):
    """How many threads; more than there are processors only wait for each other."""

    name = "integer"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """The number; raises BadParameter beyond the processors of this machine."""
        most = os.cpu_count() or 1
        return click.IntRange(1, most).convert(value, param, ctx)


class Text(_Type):
    """A name or path; an empty one, as of a variable that is not set, would be the folder here."""

    name = "text"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """The text itself; raises BadParameter for an empty one."""
        if value == "":
            self.fail("it is empty; give a name or a path", param, ctx)
        return value


class Place(Text):
    """The same as a Path."""

    name = "path"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """A Path; raises BadParameter for an empty one."""
        return Path(super().convert(value, param, ctx))


TEXT, PLACE, THREADS = Text(), Place(), Threads()
