"""`make demo`: compiles the bundled checkpoint and answers its demonstration messages."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from clover_compile import models
from clover_compile.build import build
from clover_compile.options import BuildOptions
from clover_compile.runtime import Session
from clover_compile.runtime.errors import CloverError

MESSAGES = 20


def messages(count: int) -> list[dict[str, str]]:
    """The first `count` held-out messages with their answers."""
    text = (models.find() / "messages.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()[:count]]


def ready(output: Path) -> None:
    """Builds the bundle unless one that still loads is there."""
    if (output / "manifest.json").exists():
        try:
            Session.load(output)
        except CloverError as error:
            print(f"rebuilding {output}: {error}", file=sys.stderr)
        else:
            print(f"{output}: built before, verdict still valid", file=sys.stderr)
            return
    options = BuildOptions(model=models.find(), output=output, force=True)
    build(options, lambda line: print(line, file=sys.stderr))


def answer(output: Path, count: int) -> int:
    """Prints every message with its answer; returns how many equal the expected one."""
    session = Session.load(output)
    equal = passes = tokens = 0
    seconds = 0.0
    for message in messages(count):
        start = time.perf_counter()
        out = session.generate(message["prompt"])
        took = time.perf_counter() - start
        right = out.text == message["answer"]
        equal, passes, tokens = (
            equal + right,
            passes + out.stats["passes"],
            tokens + len(out.token_ids),
        )
        seconds += took
        per_pass = len(out.token_ids) / out.stats["passes"]
        print(f"\n> {message['prompt']}\n{out.text}")
        print(
            f"  {'equals the expected answer' if right else 'expected ' + message['answer']}; "
            f"{out.stats['passes']} passes, {per_pass:.1f} tokens per pass, {took * 1e3:.0f} ms"
        )
    print(
        f"\n{equal} of {count} answers equal the expected one; "
        f"{tokens / passes:.1f} tokens per pass; "
        f"{seconds / count * 1e3:.0f} ms per answer."
        "\nThe task is synthetic and close to deterministic: not typical of language."
    )
    return equal


def main() -> None:
    """Command line of the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("build/demo.clover"))
    parser.add_argument("--messages", type=int, default=MESSAGES)
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    ready(options.output)
    answer(options.output, options.messages)


if __name__ == "__main__":
    main()
