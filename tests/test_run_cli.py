"""The runner's command line: arguments, output, exit statuses, and what may reach a terminal."""

from __future__ import annotations

import inspect
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clover_compile.runtime import session as session_module
from clover_compile.runtime.errors import ContextFull, NotProved
from clover_compile.runtime.live import Live
from clover_compile.runtime.main import main
from clover_compile.runtime.request import DEFAULTS
from clover_compile.runtime.session import Generation, Session
from clover_compile.runtime.step import Step
from clover_compile.runtime.terminal import one_line, printable

STATS = {
    "prompt_tokens": 3, "new_tokens": 2, "blocks": 1, "passes": 4, "commits": 1, "rounds": 0,
    "drafts_kept": 0, "tokens_per_pass": 0.5, "seconds": {"preview": 0.25},
}  # fmt: skip
NASTY = "a\x1b]0;owned\x07\x9b31m\u202eb\tc\r\nd\x7f\udc80"
MASK = 9


class FakeSession:
    """Answers with fixed words and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.loaded: dict[str, Any] = {}
        self.answer = Generation((5, 1), "fine", None, "stop", STATS)
        self.fails: BaseException | None = None
        self.refused: BaseException | None = None
        self.costs_fault: str | None = None
        self.rules = SimpleNamespace(mask_token_id=MASK)
        self.text = SimpleNamespace(decode=lambda ids: ("".join(f"<{i}>" for i in ids), None))

    def load(self, path: Path, **options: Any) -> FakeSession:
        if self.refused is not None:
            raise self.refused
        self.loaded = {"path": path, **options}
        return self

    def generate(self, prompt: Any, on_step: Any = None, **options: Any) -> Generation:
        if self.fails is not None:
            raise self.fails
        self.asked = {"prompt": prompt, **options}
        if on_step is not None:
            on_step(Step("denoise", 0, 0, (5, MASK), (True, False), (0.9, 0.2)))
            on_step(Step("denoise", 0, 1, (5, 1), (True, True), (0.9, 0.8)))
        return self.answer


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    """A session that stands in for every bundle; stdin must not be touched."""
    made = FakeSession()
    monkeypatch.setattr(session_module, "Session", made)
    monkeypatch.setattr(sys, "stdin", None)
    return made


def test_only_what_is_given_is_handed_on(fake: FakeSession) -> None:
    assert main(["x.clover", "-p", "hi"]) == 0
    assert fake.asked == {"prompt": "hi"}
    assert fake.loaded == {"path": Path("x.clover"), "unverified": False, "allow_native": False}


def test_a_prompt_of_two_dashes_is_text(fake: FakeSession) -> None:
    assert main(["x.clover", "--prompt=--"]) == 0
    assert fake.asked == {"prompt": "--"}


def test_every_option_arrives_with_its_type(fake: FakeSession) -> None:
    words = (
        "x.clover --prompt-ids 1,2,3 --decode causal --accept exact --width 8 --exact "
        "--threshold .5 --block-size 4 --max-new-tokens 7 --temperature .8 --top-k 3 --top-p .9 "
        "--seed 11 --no-thinking --raw --unverified --allow-native"
    )
    assert main(words.split()) == 0
    assert fake.asked == {
        "prompt": [1, 2, 3], "decode": "causal", "accept": "exact", "width": 8, "exact": True,
        "threshold": 0.5, "block_size": 4, "max_new_tokens": 7, "temperature": 0.8, "top_k": 3,
        "top_p": 0.9, "seed": 11, "thinking": False, "raw": True,
    }  # fmt: skip
    assert fake.loaded == {"path": Path("x.clover"), "unverified": True, "allow_native": True}


def test_the_defaults_shown_are_those_of_generate() -> None:
    parameters = inspect.signature(Session.generate).parameters
    assert {name: parameters[name].default for name in DEFAULTS} == DEFAULTS


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for word in ("examples:", "(default: 256)", "self-speculate", "--no-thinking", "Exit status"):
        assert word in out


def test_a_packed_runner_names_no_bundle_and_trusts_its_own(fake: FakeSession) -> None:
    assert main(["-p", "hi"], bundle=Path("y.clover"), prog="runner.pyz") == 0
    assert fake.loaded == {"path": Path("y.clover"), "unverified": False, "allow_native": True}
    assert main(["x.clover", "-p", "hi"], bundle=Path("y.clover"), prog="runner.pyz") == 2


ONCE = (
    "--max-new-tokens", "--decode", "--accept", "--width", "--threshold", "--block-size",
    "--temperature", "--top-k", "--top-p", "--seed",
)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "BUNDLE"),
        (["x"], "one of the arguments -p/--prompt --messages --prompt-ids is required"),
        (["x", "-p"], "expected one argument"),
        (["x", "-p", "a", "--prompt-ids", "1"], "not allowed with"),
        (["x", "-p", "a", "--messages", "f"], "not allowed with"),
        (["x", "-p", "a", "b"], "unrecognized arguments: b"),
        (["x", "-p", "a", "-p", "b"], "-p/--prompt: given more than once; give it once"),
        (["x", "-p", "a", "--prompt=a"], "-p/--prompt: given more than once"),
        (["x", "--messages", "f", "--messages", "f"], "--messages: given more than once"),
        (["x", "--prompt-ids", "1", "--prompt-ids", "2"], "--prompt-ids: given more than once"),
        (["x", "-p", "a", "--thinking", "--no-thinking"], "given more than once"),
        (["x", "-p", "a", "--no-thinking", "--no-thinking"], "given more than once"),
        *(
            (["x", "-p", "a", name, "0", name, "1"], f"{name}: given more than once")
            for name in ONCE
        ),
        (["x", "-p", "a", "--wid", "3"], "unrecognized arguments"),
        (["x", "-p", "a", "--width", "many"], "invalid int value"),
        (["x", "-p", "a", "--temperature", "\x1b[31m"], "\\x1b[31m"),
        (["x", "-p", "a", "--no-such\nthing"], "\\n"),
        (["x", "--prompt-ids", ""], "is not a token id"),
        (["x", "--prompt-ids=--"], '"--" is not a token id'),
        (["x", "-p", "a", "--seed=--"], "argument --seed: invalid"),
        (["x", "--prompt-ids", "1,,2"], "is not a token id"),
        (["x", "--prompt-ids", "1,-2"], '"-2" is not a token id'),
        (["x", "--prompt-ids", "1,2.5"], "is not a token id"),
        (["x", "--prompt-ids", "9" * 5000], "is not a token id"),
        (["x", "--prompt-ids", "٣"], "is not a token id"),
        (["x", "--messages", "no-such-file"], "is missing"),
        (["x", "--messages", "."], "is not a regular file"),
        (["x", "--messages", "a\x1bb"], "--messages a\\x1bb: is missing"),
        (["x", "--messages", "-"], "is missing"),
        (["x", "-p", "a", "--exact", "--accept", "release"], "--exact excludes"),
    ],
)
def test_wrong_usage_is_one_line_and_two(
    fake: FakeSession, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and says in captured.err
    assert captured.err.count("\n") == 1 and captured.err.rstrip("\n").isprintable()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", "must hold a JSON array"), ("{}", "must hold a JSON array"), ("", "not valid JSON"),
        ("[1]", "message 0 must be an object"), ('[{"role": "user", "role": "x"}]', "twice"),
        ("[" * 100_000, "nested deeper"), ('[{"a": NaN}]', "NaN"), (b"\xff", "not UTF-8"),
    ],
)  # fmt: skip
def test_a_wrong_conversation_is_refused(
    fake: FakeSession, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, says: str
) -> None:
    file = tmp_path / "m.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["x", "--messages", str(file)]) == 2
    assert says in capsys.readouterr().err


def test_a_conversation_is_handed_on(fake: FakeSession, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    (tmp_path / "m.json").write_text(json.dumps(messages))
    assert main(["x", "--messages", str(tmp_path / "m.json")]) == 0
    assert fake.asked["prompt"] == messages


def test_json_prints_one_object_and_nothing_else(
    fake: FakeSession, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answer = Generation((5, 1), NASTY, "why", "length", STATS)
    assert main(["x", "-p", "hi", "--json", "--live"]) == 0
    captured = capsys.readouterr()
    assert captured.out.isascii() and captured.out.count("\n") == 1
    assert json.loads(captured.out) == {
        "token_ids": [5, 1], "text": NASTY, "reasoning": "why", "finish_reason": "length",
        "stats": STATS,
    }  # fmt: skip
    assert "denoise at 0, pass 2, 2/2" in captured.err


def test_no_control_character_reaches_a_terminal(
    fake: FakeSession, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answer = Generation((5, 1), NASTY, NASTY, "stop", STATS)
    assert main(["x", "-p", "hi"]) == 0
    captured = capsys.readouterr()
    shown = "a\\x1b]0;owned\\x07\\x9b31m\\u202eb\tc\\x0d\nd\\x7f\\udc80"
    assert captured.out == shown + "\n"
    assert shown in captured.err and "2 tokens (stop), 1 blocks, 4 passes" in captured.err


def test_every_control_character_is_spelled_out() -> None:
    every = "".join(map(chr, range(0x300))) + "é\N{HEAVY CHECK MARK}\U0001f600"
    out = printable(every)
    assert all(c.isprintable() or c in "\t\n\xa0\xad" for c in out)
    assert out.endswith("é\N{HEAVY CHECK MARK}\U0001f600")
    assert one_line("a\nb\tc") == "a\\nb\\tc"


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (ContextFull(needed=9, context=8), 1, "needs 9 rows"),
        (MemoryError(), 1, "out of memory"),
        (PermissionError(13, "Permission denied", "f"), 1, "f: Permission denied"),
        (ZeroDivisionError("x\ny"), 1, "ZeroDivisionError: x\\ny; this is a bug"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_are_one_line_with_their_status(
    fake: FakeSession, capsys: pytest.CaptureFixture[str], error: Exception, status: int, says: str
) -> None:
    fake.fails = error
    assert main(["x", "-p", "hi"]) == status
    captured = capsys.readouterr()
    assert captured.out == "" and says in captured.err and captured.err.count("\n") == 1


def test_debug_shows_the_traceback(fake: FakeSession, capsys: pytest.CaptureFixture[str]) -> None:
    fake.fails = ZeroDivisionError("x")
    assert main(["x", "-p", "hi", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_refused_bundle_tells_the_verdicts_words(
    fake: FakeSession, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.refused = NotProved(path="x", outcome="unproved", reason='"ties"', remedy="")
    assert main(["x", "-p", "hi"]) == NotProved.exit_status
    captured = capsys.readouterr()
    assert captured.out == "" and "unproved" in captured.err and "ties" in captured.err


def test_a_missing_package_names_the_remedy(
    fake: FakeSession, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.refused = ModuleNotFoundError("No module named 'onnxruntime'", name="onnxruntime")
    assert main(["-p", "hi"], bundle=Path("y.clover")) == 1
    assert "pip install -r y.clover/requirements.txt" in capsys.readouterr().err


def test_a_closed_pipe_is_no_traceback() -> None:
    code = (
        "import sys\n"
        "from clover_compile.runtime import main as m\n"
        "m._run = lambda *a: [print('x' * 1000) for _ in range(1000)]\n"
        "sys.exit(m.main(['x', '-p', 'hi']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 141
    process.stderr.close()


def test_the_packed_runner_finds_the_bundle_around_it(tmp_path: Path) -> None:
    package = Path(session_module.__file__).parents[1]
    archive = tmp_path / "x.clover" / "runner.pyz"
    archive.parent.mkdir()
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr(
            "__main__.py", "from clover_compile.runtime.__main__ import entry\nentry()\n"
        )
        packed.write(package / "__init__.py", "clover_compile/__init__.py")
        for path in (package / "runtime").glob("*.py"):
            packed.write(path, f"clover_compile/runtime/{path.name}")
    done = subprocess.run(
        [sys.executable, "../x.clover/runner.pyz", "-p", "hi"], cwd=archive.parent,
        capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("runner.pyz: ") and "no manifest.json in it" in done.stderr
    assert str(archive.parent) in done.stderr


class Screen(io.StringIO):
    """A stream that claims to be a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def _decode(ids: Any) -> str:
    return "".join({5: "five", 6: "\x1b]six\n"}.get(i, "?") for i in ids)


STEPS = (
    Step("denoise", 0, 0, (5, MASK, MASK), (True, False, False), (0.9, 0.1, 0.1)),
    Step("denoise", 0, 1, (5, 6, MASK), (True, True, False), (0.9, 0.9, 0.1)),
    Step("denoise", 3, 0, (MASK, 5, MASK), (False, True, False), (0.2, 0.9, 0.1)),
)


class TestLive:
    """The display of a response that fills in."""

    def test_plain_lines_without_a_terminal(self) -> None:
        stream = io.StringIO()
        live = Live(stream, _decode, MASK)
        for step in STEPS:
            live(step)
        live.close()
        assert stream.getvalue().splitlines() == [
            "denoise at 0, pass 1, 1/3: five__",
            "denoise at 0, pass 2, 2/3: five\\x1b]six\\n_",
            "denoise at 3, pass 1, 1/3: _five_",
        ]

    def test_a_terminal_is_repainted_and_left_clean(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shutil.get_terminal_size", _size(80, 24))
        stream = Screen()
        live = Live(stream, _decode, MASK)
        for step in STEPS:
            live(step)
        assert "\N{LIGHT SHADE}\N{LIGHT SHADE}" in stream.getvalue()
        assert "\\x1b]six\\n" in stream.getvalue() and "\x1b]" not in stream.getvalue()
        live.close()
        assert stream.getvalue().endswith("\r\x1b[J")

    def test_a_long_response_shows_its_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shutil.get_terminal_size", _size(10, 4))
        stream = Screen()
        live = Live(stream, lambda ids: "".join("界" if i else "x" for i in ids), MASK)
        live(Step("causal", 0, 0, (1,) * 200, (True,) * 200, (1.0,) * 200))
        live(Step("causal", 200, 0, (0,), (True,), (1.0,)))
        assert stream.getvalue().count("界") == 8 + 8
        assert "\x1b[1A" in stream.getvalue()


def _size(columns: int, lines: int) -> Callable[[], os.terminal_size]:
    return lambda: os.terminal_size((columns, lines))
