"""The command line of the runner, shared by `clover-compile run` and a bundle's runner.pyz."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clover_compile.runtime import streams
from clover_compile.runtime.errors import (
    BadPrompt,
    CloverError,
    Faults,
    MissingPackage,
    NoBundle,
)
from clover_compile.runtime.strict_json import JsonFault, parse_value, quote, read_file
from clover_compile.runtime.terminal import one_line, printable

if TYPE_CHECKING:
    from clover_compile.runtime.live import Live
    from clover_compile.runtime.session import Generation, Prompt, Session

MAX_MESSAGES = 16 << 20
"""Most bytes of a --messages file."""

RECOST = "--decode auto will refuse it: run `clover-compile profile BUNDLE` again"

RENEW = "--decode auto goes by them all the same: run `clover-compile profile BUNDLE` here"

FORWARDED = (
    "max_new_tokens", "decode", "accept", "width", "block_size", "threshold", "temperature",
    "top_k", "top_p", "seed", "thinking", "exact", "raw",
)  # fmt: skip
"""Options handed on to `Session.generate` when they are given."""


def main(
    argv: Sequence[str], bundle: Path | None = None, prog: str = "clover-compile run",
    words: Callable[[Exception], str] = str,
) -> int:  # fmt: skip
    """Runs one command line and returns its exit status; never raises.

    With `bundle` the command line names none, and that bundle may load its own native code. `words`
    spells the message of an error of ours: the compiler half knows more to advise.
    """
    debug = "--debug" in argv
    try:
        streams.prepare()
        _run(argv, bundle, prog)
        sys.stdout.flush()
        return 0
    except SystemExit as end:  # argparse printed its help or its complaint
        return int(end.code or 0)
    except BrokenPipeError:
        streams.abandon_stdout()
        return streams.PIPE_CLOSED
    except KeyboardInterrupt:
        _complain(prog, "interrupted")
        return streams.INTERRUPTED
    except Exception as error:
        if debug:
            traceback.print_exc()
        else:
            _complain(prog, _words(error, words))
        return error.exit_status if isinstance(error, CloverError) else 1


def _run(argv: Sequence[str], bundle: Path | None, prog: str) -> None:
    try:
        from clover_compile.runtime.arguments import parser
        from clover_compile.runtime.request import AUTO

        arguments = parser(prog, with_bundle=bundle is None).parse_args(argv)
        if bundle is None and not arguments.bundle:
            raise NoBundle("", "no name was given")
        path = Path(arguments.bundle) if bundle is None else bundle
        prompt = _prompt(arguments)
        allow_native = arguments.allow_native or bundle is not None
        session = _load(path, arguments.unverified, allow_native)
    except ModuleNotFoundError as error:
        raise _missing(error, bundle) from error
    chosen = {name: getattr(arguments, name) for name in FORWARDED if hasattr(arguments, name)}
    if chosen.get("exact") and chosen.get("accept") == "release":
        raise Faults("request", ("--exact excludes --accept release; give one of them",))
    if session.costs_fault and chosen.get("decode") != AUTO:
        streams.say(f"{prog}: warning: {one_line(session.costs_fault)}; {RECOST}")
    caution = session.costs_caution() if chosen.get("decode") == AUTO else None
    if caution:
        streams.say(f"{prog}: warning: {one_line(caution)}; {RENEW}")
    live = _live(session) if arguments.live else None
    try:
        answer = session.generate(prompt, on_step=live, **chosen)
    finally:
        if live is not None:
            live.close()
    if arguments.json:
        print(json.dumps(_object(answer), allow_nan=False))
        return
    _print_answer(answer)
    streams.say(_summary(answer))


def _load(path: Path, unverified: bool, allow_native: bool) -> Session:
    from clover_compile.runtime.session import Session

    return Session.load(path, unverified=unverified, allow_native=allow_native)


def _missing(error: ModuleNotFoundError, bundle: Path | None) -> Exception:
    if (error.name or "").split(".")[0] == "clover_compile":
        return error
    requirements = (bundle or Path("BUNDLE")) / "requirements.txt"
    return MissingPackage(package=error.name, requirements=requirements)


def _prompt(arguments: argparse.Namespace) -> Prompt:
    """The prompt the command line names: text, a conversation, or ids."""
    if arguments.prompt is not None:
        text: str = arguments.prompt
        return text
    if arguments.prompt_ids is not None:
        return _ids(arguments.prompt_ids)
    if not arguments.messages:
        raise BadPrompt(where="--messages", reason="no file was given")
    return _messages(Path(arguments.messages))


def _ids(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit() and len(part) <= 10):
            raise BadPrompt(where="--prompt-ids", reason=f"{quote(part, 40)} is not a token id")
    return [int(part) for part in parts]


def _messages(path: Path) -> Sequence[dict[str, Any]]:
    """The conversation in a file: a JSON array of messages, each {role, content}."""
    where = one_line(f"--messages {path}")
    try:
        messages = parse_value(read_file(path, MAX_MESSAGES))
    except JsonFault as fault:
        raise BadPrompt(where=where, reason=fault) from None
    if not isinstance(messages, list) or not messages:
        reason = 'must hold a JSON array such as [{"role": "user", "content": "Hello"}]'
        raise BadPrompt(where=where, reason=reason)
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            reason = f"message {number} must be an object, not {quote(message, 40)}"
            raise BadPrompt(where=where, reason=reason)
    return messages


def _live(session: Session) -> Live:
    from clover_compile.runtime.live import Live

    text = session.text
    assert text is not None
    # The answer goes to stdout, so what moves is drawn on stderr.
    return Live(sys.stderr, lambda ids: text.decode(ids)[0], session.rules.mask_token_id)


def _object(answer: Generation) -> dict[str, Any]:
    return {
        "token_ids": list(answer.token_ids),
        "text": answer.text,
        "reasoning": answer.reasoning,
        "finish_reason": answer.finish_reason,
        "stats": answer.stats,
    }


def _print_answer(answer: Generation) -> None:
    """The answer for people: its control characters cannot reach the terminal."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if answer.reasoning:
        streams.say(printable(answer.reasoning) + "\n")
    print(printable(answer.text))


def _summary(answer: Generation) -> str:
    stats = answer.stats
    steps = [
        f"{stats[name]} {name}"
        for name in ("blocks", "passes", "rounds", "commits")
        if stats.get(name)
    ]
    steps += [f"{count} x {choice}" for choice, count in stats.get("choices", {}).items()]
    seconds = sum(stats.get("seconds", {}).values())
    tokens = f"{stats['new_tokens']} tokens ({answer.finish_reason})"
    return ", ".join([tokens, *steps, f"{seconds:.2f} s"])


def _words(error: Exception, words: Callable[[Exception], str]) -> str:
    """One line about an error that is safe to print."""
    if isinstance(error, CloverError):
        return words(error)
    if isinstance(error, MemoryError):
        return "out of memory; shorten the prompt, or use a machine with more"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    return f"{type(error).__name__}: {error}; this is a bug, --debug shows where"


def _complain(prog: str, words: str) -> None:
    streams.say(f"{prog}: {one_line(words)}")
