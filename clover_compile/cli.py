"""The command line: build, run, verify, finish, profile, inspect, targets, models."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import click

from clover_compile import __version__, flags
from clover_compile.parameters import PLACE, TEXT, THREADS, Choice, Once
from clover_compile.runtime import streams
from clover_compile.runtime.errors import CloverError
from clover_compile.runtime.nearest import did_you_mean
from clover_compile.runtime.strict_json import quote
from clover_compile.runtime.terminal import one_line

DEBUG = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    help="Show tracebacks, and what every pass of a build does.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")


class Terminated(BaseException):
    """SIGTERM, as an exception, so that an unfinished build is cleaned up."""


def entry() -> None:
    """The `clover-compile` command."""
    sys.exit(status(sys.argv[1:]))


def status(arguments: list[str]) -> int:
    """Runs one command line; every error is one line on stderr. Returns the exit status."""
    debug = "--debug" in arguments or flags.debug()
    try:
        streams.prepare()
        signal.signal(signal.SIGTERM, _terminate)
        code = main(args=arguments, prog_name="clover-compile", standalone_mode=False, obj=debug)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except SystemExit as end:
        if "PacifyFlush" in type(sys.stdout).__name__:  # click met a broken pipe
            return streams.PIPE_CLOSED
        return end.code if isinstance(end.code, int) else 1
    except click.exceptions.NoArgsIsHelpError as error:
        streams.say(error.format_message())
        return 2
    except click.exceptions.ClickException as error:
        return _complain(f"{error.format_message()} (try --help)", 2)
    except BrokenPipeError:
        streams.abandon_stdout()
        return streams.PIPE_CLOSED
    except (KeyboardInterrupt, click.Abort):
        return _complain("interrupted; nothing was written", streams.INTERRUPTED)
    except Terminated:
        return _complain("terminated; nothing was written", streams.TERMINATED)
    except (CloverError, OSError) as error:
        if debug:
            traceback.print_exc()
        return _complain(_words(error), error.exit_status if isinstance(error, CloverError) else 1)
    except MemoryError:
        return _complain("out of memory; `clover-compile build --plan` says what a build needs", 1)
    except Exception as error:
        if debug:
            traceback.print_exc()
        name = type(error).__name__
        return _complain(f"{name}: {error}; this is a bug, --debug shows where", 1)


def _terminate(number: int, frame: object) -> None:
    raise Terminated


def _complain(words: str, code: int) -> int:
    streams.say(f"clover-compile: {one_line(words)}")
    return code


def _words(error: Exception) -> str:
    if isinstance(error, CloverError) or not isinstance(error, OSError):
        from clover_compile import advice

        return advice.words(error)
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}; nothing was written"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Compiles Clover checkpoints into engines that prove themselves.

    \b
    clover-compile build -o demo.clover      compile the bundled demonstration model
    clover-compile run demo.clover -p TEXT   ask it something
    clover-compile inspect demo.clover       what is inside, what was proved
    clover-compile profile demo.clover       where its time goes, which way to decode wins
    """


@main.command()
@click.argument("model", required=False, type=TEXT)
@click.option(
    "--target", cls=Once, default="ort-cpu", show_default=True, help="See `clover-compile targets`."
)
@click.option(
    "-o",
    "output",
    cls=Once,
    type=PLACE,
    help="Bundle to write.  [default: MODEL.clover]",
)
@click.option(
    "--dtype",
    cls=Once,
    type=Choice(["fp32", "fp16", "bf16", "fp8"]),
    help="Precision of the weights.  [default: the target's first]",
)
@click.option(
    "--context",
    cls=Once,
    type=int,
    help="Most rows a sequence may reach.  [default: the model's own]",
)
@click.option("--force", is_flag=True, help="Replace a bundle that is there already.")
@click.option(
    "--dump-passes",
    cls=Once,
    type=PLACE,
    help="Write the graph after each pass here.",
)
@click.option(
    "--plan",
    is_flag=True,
    help="Say what the build and its bundle will need and whether it fits (exit status 1 where it "
    "does not); build nothing.",
)
@JSON
@DEBUG
@click.pass_obj
def build(
    debug: bool, model: str | None, target: str, output: Path | None, dtype: str | None,
    context: int | None, force: bool, dump_passes: Path | None, plan: bool, as_json: bool,
) -> int:  # fmt: skip
    """Compiles MODEL, a checkpoint folder or a bundled model, and proves the result.

    MODEL defaults to the bundled demonstration model. The bundle appears only after it agreed with
    the eager model; a build that fails leaves nothing, and what a killed one leaves is never a
    bundle and is removed by the next.
    """

    from clover_compile import bundle, models
    from clover_compile.options import TARGETS_OWN, BuildOptions
    from clover_compile.targets.table import known

    if plan and dump_passes is not None:
        raise click.UsageError("--dump-passes has no effect with --plan, which runs no pass")
    folder = models.find(model)
    options = BuildOptions(
        model=folder, output=output or Path(f"{folder.resolve().name}.clover"), target=target,
        dtype=dtype or TARGETS_OWN, context=context, force=force, dump_passes=dump_passes,
    )  # fmt: skip
    # What needs no torch is refused before torch is imported, which takes seconds.
    row = known(options.target)
    bundle.check_output(options.output, options.force)
    bundle.check_folder(dump_passes, "--dump-passes")
    row.dtype(options.target, options.dtype)
    if plan:
        from clover_compile import plan as planner

        needs = planner.plan(options)
        click.echo(json.dumps(needs) if as_json else planner.render(needs))
        return 0 if needs["fits"] else 1
    from clover_compile import build as builder

    result = builder.build(options, streams.say, debug)
    if as_json:
        click.echo(json.dumps(result))
    else:
        click.echo(f"{result['bundle']}: {_outcome(result)}")
    return 0


def _outcome(verdict: dict[str, Any]) -> str:
    return ": ".join(x for x in (verdict["outcome"], verdict.get("reason")) if x)


@main.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(arguments: tuple[str, ...]) -> None:
    """Answers a prompt with a bundle (`clover-compile run --help` for its options)."""
    from clover_compile import advice
    from clover_compile.runtime.main import main as runner

    sys.exit(runner(list(arguments), prog="clover-compile run", words=advice.words))


@main.command()
@click.argument("path", type=PLACE)
@click.option(
    "--model",
    cls=Once,
    type=TEXT,
    help="Compare with this checkpoint's eager model, afresh, instead of the stored probes.",
)
@click.option(
    "--locate",
    is_flag=True,
    help="Only find the first part of the eager model that gives NaN or Inf; exit status 1 if one "
    "does. Without --model the bundled models are tried.",
)
@click.option(
    "-p",
    "prompt",
    cls=Once,
    help="With --locate: the message to answer, instead of the probes.",
)
@click.option("--allow-native", is_flag=True, help="Let the bundle load a library of its own.")
@JSON
@DEBUG
def verify(
    path: Path, model: str | None, locate: bool, prompt: str | None, allow_native: bool,
    as_json: bool,
) -> int:  # fmt: skip
    """Proves a bundle again, on this machine, and renews its verdict.

    A verdict.json that is missing or damaged is replaced too; any other damage is refused.
    """
    if prompt is not None and not locate:
        raise click.UsageError("-p is for --locate; to ask a bundle, use `clover-compile run`")
    if allow_native and locate:
        raise click.UsageError("--allow-native has no effect with --locate, which opens no bundle")

    from clover_compile.reprove import find_nan, reprove

    if locate:
        found = find_nan(path, model, prompt, streams.say)
        row = {"found": found and found.to_dict()}
        click.echo(json.dumps(row) if as_json else f"{path}: {found or 'no NaN and no Inf'}")
        return int(found is not None)
    verdict = reprove(path, model, streams.say, allow_native)
    click.echo(json.dumps(verdict) if as_json else f"{path}: {_outcome(verdict)}")
    return 0


@main.command()
@click.argument("path", type=PLACE)
@click.option(
    "-o",
    "output",
    cls=Once,
    required=True,
    type=PLACE,
    help="The new bundle, which must not exist.",
)
@click.option(
    "--allow-native",
    is_flag=True,
    help="Load the bundle's own plugin even if this installation did not compile it.",
)
@JSON
@DEBUG
def finish(path: Path, output: Path, allow_native: bool, as_json: bool) -> int:
    """Builds the engines of a `trt-*` bundle, on the GPU it is for, and proves them.

    PATH stays as it is; the new bundle records its id. Needs TensorRT 11. Where the compiler is not
    installed, `python PATH/finish.py` does the same but for the whole proof.
    """
    from clover_compile.runtime.trt_finish import finish as build_engines

    result = build_engines(path, output, streams.say, allow_native)
    if result["probes"]:
        from clover_compile.reprove import reprove

        result |= reprove(output, None, streams.say, allow_native)
    click.echo(json.dumps(result) if as_json else f"{output}: {_outcome(result)}")
    return 0


@main.command()
@click.argument("path", type=PLACE)
@click.option(
    "--model", cls=Once, type=TEXT, help="The checkpoint it was built from, unless bundled."
)
@click.option("--against", cls=Once, type=TEXT, help="Another bundle of the model, or `eager`.")
@click.option(
    "--messages",
    cls=Once,
    type=PLACE,
    help='What to ask: a JSON object a line, {"prompt": TEXT, "answer": TEXT}.  '
    "[default: the bundled model's own]",
)
@click.option(
    "--answers",
    cls=Once,
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="How many of the messages to ask.",
)
@click.option(
    "--max-new-tokens",
    cls=Once,
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Most tokens of an answer.",
)
@click.option(
    "--rounds",
    cls=Once,
    type=click.IntRange(2),
    default=9,
    show_default=True,
    help="How often everything is measured, by turns.",
)
@click.option(
    "--threads",
    cls=Once,
    type=THREADS,
    help="At most the processors here.  [default: all cores]",
)
@click.option(
    "-o",
    "output",
    cls=Once,
    type=PLACE,
    help="Folder for report.html, report.json and receipt.json.",
)
@click.option("--allow-native", is_flag=True, help="Let the bundle load its own shared libraries.")
@JSON
@DEBUG
def profile(
    path: Path, model: str | None, against: str | None, messages: Path | None, answers: int,
    max_new_tokens: int, rounds: int, threads: int | None, output: Path | None,
    allow_native: bool, as_json: bool,
) -> int:  # fmt: skip
    """Measures a bundle on this machine: every Unit and op, and every way to decode.

    What each Unit costs is written into the bundle's costs.json, which `run --decode auto` chooses
    by. The times are this machine's: profile where the bundle will run, while nothing else does. A
    bundle that cannot run here is modelled from its own programs instead, and marked so.
    """
    from clover_compile.profiling.options import ProfileOptions
    from clover_compile.profiling.run import profile as measure
    from clover_compile.profiling.text import render

    if against not in (None, "eager") and not Path(against).exists():
        meant = did_you_mean(against, ("eager",))
        raise click.UsageError(f"--against {quote(against)}{meant}: no such bundle, nor `eager`")
    options = ProfileOptions(
        path, model, against, messages, answers, max_new_tokens, rounds, threads, output,
        allow_native,
    )  # fmt: skip
    found = measure(options, streams.say)
    click.echo(json.dumps(found) if as_json else render(found))
    if output is not None:
        streams.say(f"{output}: report.html, report.json, receipt.json")
    return 0


@main.command()
@click.argument("path", type=PLACE)
@JSON
@DEBUG
def inspect(path: Path, as_json: bool) -> int:
    """Shows what a bundle holds: model, Units, fused ops and who serves them, verdict."""
    from clover_compile.inspection import describe, render

    found = describe(path)
    click.echo(json.dumps(found) if as_json else render(found))
    return 0


@main.command()
@JSON
@DEBUG
def targets(as_json: bool) -> None:
    """Lists the targets: what each emits, where it runs, and what is missing here."""
    from clover_compile.targets import listing
    from clover_compile.targets.table import TARGETS

    rows = {
        name: {
            "emits": row.emits,
            "runs_on": row.runs_on,
            "dtypes": row.dtypes,
            "needs": row.packages,
            "missing": row.missing(),
        }
        for name, row in TARGETS.items()
    }
    if as_json:
        click.echo(json.dumps(rows))
        return
    click.echo(listing.render(TARGETS))


@main.command()
@JSON
@DEBUG
def models(as_json: bool) -> int:
    """Lists the checkpoints that come with the package."""

    from clover_compile.checkpoint import Checkpoint
    from clover_compile.models import bundled

    rows: dict[str, dict[str, Any]] = {}
    for name, folder in bundled().items():
        opened = Checkpoint.open(folder)
        rows[name] = {"folder": str(folder), "parameters": opened.parameters}
    if as_json:
        click.echo(json.dumps(rows))
    else:
        for name, row in rows.items():
            click.echo(f"{name}  {row['parameters'] / 1e6:.2f} M parameters  {row['folder']}")
    return 0


if __name__ == "__main__":
    entry()
