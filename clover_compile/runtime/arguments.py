"""What the runner's command line takes, and the help that teaches it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from clover_compile.runtime.nearest import did_you_mean
from clover_compile.runtime.request import ACCEPT, DEFAULTS, ROLES, WAYS
from clover_compile.runtime.terminal import one_line

_EXAMPLES = """\
examples:
  {prog} -p "No drones within 2 km of 51.5N 0.1W."
  {prog} -p TEXT --decode causal            one token a pass, for comparison
  {prog} -p TEXT --decode self-speculate    drafts checked by the causal pass
  {prog} --messages chat.json --live        watch the block fill in
  {prog} -p TEXT --json | jq .stats         one JSON object, nothing else

A prompt is never read from stdin. The answer goes to stdout, everything else to stderr.
Exit status: 0 answered, 2 wrong usage or input, 1 any other failure, 130 interrupted.
"""


class _Parser(argparse.ArgumentParser):
    """Complains in one line and never shows its usage unasked."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As ever, but an option that does not exist is told with the nearest that does."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            meant = did_you_mean(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return found

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {one_line(message)}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)


class _Once(argparse.Action):
    """Stores a value; argparse alone would silently take the last of several."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace,
        values: str | Sequence[Any] | None, option_string: str | None = None,
    ) -> None:  # fmt: skip
        _require_first(self, namespace)
        if values == []:  # `--option=--`: some versions of argparse drop the value
            if self.type is not None:
                raise argparse.ArgumentError(self, "invalid value: '--'")
            values = "--"
        setattr(namespace, self.dest, values)


class _OnceEither(argparse.BooleanOptionalAction):
    """The same for a pair `--x` and `--no-x`."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace,
        values: str | Sequence[Any] | None, option_string: str | None = None,
    ) -> None:  # fmt: skip
        _require_first(self, namespace)
        super().__call__(parser, namespace, values, option_string)


def _require_first(action: argparse.Action, namespace: argparse.Namespace) -> None:
    # Before it is given, every such option is absent or None.
    if getattr(namespace, action.dest, None) is not None:
        raise argparse.ArgumentError(action, "given more than once; give it once")


def parser(prog: str, with_bundle: bool) -> argparse.ArgumentParser:
    """The parser; options of a generation that are not given are absent from its result."""
    shown = f"{prog} BUNDLE" if with_bundle else prog
    made = _Parser(
        prog=prog,
        description="Answer a prompt with a compiled Clover bundle.",
        epilog=_EXAMPLES.format(prog=shown),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if with_bundle:
        made.add_argument("bundle", metavar="BUNDLE", help="folder that clover-compile build wrote")
    _add_prompt(made)
    _add_decoding(made)
    _add_sampling(made)
    _add_output(made)
    return made


def _add_prompt(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("prompt (exactly one)")
    one = group.add_mutually_exclusive_group(required=True)
    one.add_argument(
        "-p", "--prompt", action=_Once, metavar="TEXT",
        help="one user message; --prompt=TEXT if it starts with -",
    )  # fmt: skip
    one.add_argument(
        "--messages", action=_Once, metavar="FILE",
        help=f"a JSON array of messages, each with content and a role: {', '.join(ROLES)}",
    )  # fmt: skip
    one.add_argument(
        "--prompt-ids", action=_Once, metavar="1,2,3", help="token ids, taken as they are"
    )
    made.add_argument(
        "--raw", action="store_true", default=argparse.SUPPRESS,
        help="encode TEXT as it is, without the chat template; it may spell special tokens",
    )  # fmt: skip
    made.add_argument(
        "--thinking", action=_OnceEither, default=argparse.SUPPRESS,
        help="set the chat template's switch for thinking (default: the template's own)",
    )  # fmt: skip


def _add_decoding(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("decoding")
    _option(group, "--max-new-tokens", int, "N", "most tokens of the answer")
    _option(
        group,
        "--decode",
        str,
        "WAY",
        f"{', '.join(WAYS)}; or auto, the cheapest of them by the bundle's costs",
    )
    _option(
        group, "--accept", str, "RULE", f"{' or '.join(ACCEPT)}: when self-speculate keeps a draft"
    )
    _option(group, "--width", int, "W", "rows of a round of self-speculate")
    _option(group, "--threshold", float, "X", "confidence that fixes a row", "the checkpoint's")
    _option(
        group,
        "--block-size",
        int,
        "N",
        "rows of a block; divides the trained one",
        "the checkpoint's",
    )
    group.add_argument(
        "--exact", action="store_true", default=argparse.SUPPRESS,
        help="only ways whose text is that of causal decoding",
    )  # fmt: skip


def _add_sampling(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("sampling")
    _option(group, "--temperature", float, "T", "0 is greedy")
    _option(group, "--top-k", int, "K", "draw among the K likeliest; 0 is off")
    _option(group, "--top-p", float, "P", "draw among the likeliest that hold this mass")
    _option(group, "--seed", int, "N", "the same seed repeats a draw")


def _add_output(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("running and output")
    flags = {
        "--live": "show the answer filling in, on stderr",
        "--json": "print one object: token_ids, text, reasoning, finish_reason, stats",
        "--unverified": "run a bundle that was not proved on the target",
        "--allow-native": "let the bundle load its own shared libraries",
        "--debug": "show a traceback when something goes wrong",
    }
    for name, words in flags.items():
        group.add_argument(name, action="store_true", help=words)


def _option(
    group: argparse._ArgumentGroup, name: str, kind: type, metavar: str, words: str, shown: str = ""
) -> None:
    """An option of a generation; its default is the one of `Session.generate`."""
    default = shown or DEFAULTS[name.removeprefix("--").replace("-", "_")]
    group.add_argument(
        name, action=_Once, type=kind, metavar=metavar, default=argparse.SUPPRESS,
        help=f"{words} (default: {default})",
    )  # fmt: skip
