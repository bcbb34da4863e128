"""Random input wherever a file or a person gives some: an answer or one line, within limits."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from clover_compile import models
from clover_compile.checkpoint import Checkpoint
from clover_compile.checkpoint_layout import expected_shapes
from clover_compile.model.config import GenerationConfig, ModelConfig
from clover_compile.profiling.messages import read as read_messages
from clover_compile.runtime import session as session_module
from clover_compile.runtime.bundle import load
from clover_compile.runtime.chat import Text
from clover_compile.runtime.engine import Arrays
from clover_compile.runtime.errors import EngineFailed
from clover_compile.runtime.main import main
from clover_compile.runtime.rules import GenerationRules
from clover_compile.runtime.session import Session
from clover_compile.safetensors_header import read_header
from tests.bundles import costs, edit, identity, make_bundle, sign, write_manifest
from tests.checkpoints import make_tiny
from tests.fuzzing import Hang, fuzz, limits
from tests.test_chat import QWEN

DEMO = models.find()
CONFIG: dict[str, Any] = json.loads((DEMO / "config.json").read_text())
RULES = GenerationRules((768, 770), mask_token_id=767, block_size=16, threshold=0.9)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "<|", "|>", "im_end")

KEYS = st.sampled_from([*CONFIG, "text_config", "eos_token_id", "rope_scaling", "sliding_window"])
NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**63, 10**400, -(10**400), 0.0, 1.5, 1e308, 4.0]),
    st.floats(),
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.just("full_attention"),
    lambda inner: (
        st.lists(inner, max_size=9) | st.dictionaries(KEYS | st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)
GENERATION_KEYS = st.sampled_from(
    ["eos_token_id", "stop_token_ids", "pad_token_id", "repetition_penalty", "top_k", "top_p"]
    + ["dllm_length_penalty", "dllm_think_end_window", "dllm_think_end_token_id", "temperature"]
)
CHARACTERS = st.characters(exclude_categories=()) | st.sampled_from(
    "\ud800\udfff\0\x1b\ue000\ue001"
)
TEXTS = st.lists(st.text(CHARACTERS, max_size=12) | st.sampled_from(SPECIAL), max_size=6).map(
    "".join
) | st.builds(lambda x, n: x * n, st.sampled_from(("a", "<think>", "\n", "é")), st.just(50_000))
PLACES = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=3)


def _config(changes_and_gone: tuple[dict[str, Any], set[str]]) -> None:
    changes, gone = changes_and_gone
    data = copy.deepcopy(CONFIG)
    for place in (data, data["rope_parameters"], data["denoising_config"]):
        for key in gone & place.keys() - {"model_type"}:
            del place[key]
    config, unknown = ModelConfig.from_dict(data | changes)
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()
    assert all(type(key) is str for key in unknown)
    assert len(expected_shapes(config)) < 50_000


def _generation(data: dict[str, Any]) -> None:
    config, _ = GenerationConfig.from_dict(data, vocab_size=100, mask_token_id=99)
    assert set(config.stop_token_ids) - {99}
    assert config.repetition_penalty > 0


ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F16", "I8", "F99", "", None, 3]),
        "shape": st.lists(
            st.integers(-1, 4) | st.sampled_from([2**31, 2**63, True, 1.0]), max_size=4
        ),
        "data_offsets": st.lists(st.integers(-1, 40) | st.just(2**63), min_size=1, max_size=3),
    },
    optional={"more": st.none()},
)


def _tiled(sizes: list[tuple[int, str]]) -> bytes:
    """A header whose tensors tile their data, as the format wants."""
    entries, end = {}, 0
    for i, (count, dtype) in enumerate(sizes):
        start, end = end, end + count * (4 if dtype == "F32" else 2)
        entries[str(i)] = {"dtype": dtype, "shape": [count], "data_offsets": [start, end]}
    return json.dumps(entries).encode()


HEADERS = st.tuples(
    st.one_of(
        st.binary(max_size=64),
        st.dictionaries(st.text(max_size=6), ENTRY | st.none(), max_size=3).map(
            lambda d: json.dumps(d).encode()
        ),
        st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["F32", "F16"])), max_size=4).map(
            _tiled
        ),
    ),
    st.integers(0, 48),
    st.none() | st.integers(0, 2**64 - 1),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=2),
)


def _header(path: Path, case: tuple[bytes, int, int | None, list[tuple[int, int]]]) -> None:
    from safetensors import safe_open

    head, data, claim, flips = case
    raw = bytearray(struct.pack("<Q", len(head) if claim is None else claim) + head + bytes(data))
    path.write_bytes(_overwritten(bytes(raw), flips))
    tensors, faults = read_header(path)
    assert not any("\n" in fault for fault in faults)
    if not faults:
        # What we let through, the library that maps it must take too.
        with safe_open(path, framework="np") as opened:
            assert set(opened.keys()) == {tensor.name for tensor in tensors}


def _overwritten(data: bytes, places: list[tuple[int, int]]) -> bytes:
    raw = bytearray(data)
    for at, value in places:
        raw[at % len(raw)] = value
    return bytes(raw)


CHECKPOINT_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "model.safetensors",
)  # fmt: skip


def _checkpoint(folder: Path, case: tuple[str, list[tuple[int, int]]]) -> None:
    name, places = case
    path, kept = folder / name, (folder / name).read_bytes()
    # Of the weights only the header is read.
    near = [(at % 6000, value) for at, value in places] if name.endswith("tensors") else places
    path.write_bytes(_overwritten(kept, near))
    try:
        Checkpoint.open(folder)
    finally:
        path.write_bytes(kept)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in inner:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from _paths(item, (*path, key))


def _replaced(value: Any, case: list[tuple[int, Any]]) -> Any:
    """A copy with a few of the values inside replaced; `...` removes one."""
    out = copy.deepcopy(value)
    for number, new in case:
        paths = list(_paths(out))
        if not paths:
            break
        *way, last = paths[number % len(paths)]
        place = out
        for key in way:
            place = place[key]
        if new is ...:
            del place[last]
        else:
            place[last] = new
    return out


CHANGES = st.lists(st.tuples(st.integers(0, 10**6), VALUES | st.just(...)), min_size=1, max_size=3)


class Bundle:
    """A stub bundle that is broken and put together again."""

    def __init__(self, folder: Path) -> None:
        self.folder = make_bundle(folder)
        shutil.copy(DEMO / "tokenizer.json", folder / "tokenizer.json")
        (folder / "chat_template.jinja").write_text(QWEN)
        edit(folder)
        self.manifest = json.loads((folder / "manifest.json").read_text())
        self.files = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    def restore(self) -> None:
        """Every file as it was, and no costs."""
        (self.folder / "costs.json").unlink(missing_ok=True)
        for path, data in self.files.items():
            path.write_bytes(data)


def _manifest(bundle: Bundle, changes: list[tuple[int, Any]]) -> None:
    # With its hash and verdict repaired, so that the content is what is checked.
    try:
        write_manifest(bundle.folder, json.dumps(_replaced(bundle.manifest, changes)).encode())
        load(bundle.folder)
    finally:
        bundle.restore()


def _bytes(bundle: Bundle, case: tuple[int, list[tuple[int, int]], bool]) -> None:
    number, places, repaired = case
    path = sorted(bundle.files)[number % len(bundle.files)]
    data = _overwritten(bundle.files[path], places)
    try:
        path.write_bytes(data)
        if repaired and path.name == "manifest.json":
            write_manifest(bundle.folder, data)
        elif repaired and path.name not in ("MANIFEST.sha256", "verdict.json"):
            edit(bundle.folder)
        load(bundle.folder)
    finally:
        bundle.restore()


def _texts(bundle: Bundle, case: tuple[str, list[tuple[int, Any]]]) -> None:
    name, changes = case
    path = bundle.folder / name
    if name == "costs.json":
        content = costs(bundle=identity(bundle.folder))
    else:
        content = json.loads(bundle.files[path])
    changed = _replaced(content, changes)
    try:
        if name in ("verdict.json", "costs.json"):
            sign(bundle.folder, name, changed)
        else:
            path.write_text(json.dumps(changed))
            edit(bundle.folder)
        checked = load(bundle.folder)
    finally:
        bundle.restore()
    raise AssertionError(f"stub Units were opened: {checked}")


def _tokenizer(path: Path, changes: list[tuple[int, Any]]) -> None:
    changed = _replaced(json.loads((DEMO / "tokenizer.json").read_text()), changes)
    path.write_text(json.dumps(changed))
    text = Text(path, QWEN, RULES)
    text.decode(text.encode("No drones at <think> Mere Island."))


class Unreached:
    """An engine that cannot run: what gets here was taken."""

    def run(self, unit: str, feeds: Arrays, outputs: Any = None) -> Arrays:
        """Fails as an engine does."""
        raise EngineFailed(unit=unit, reason="reached")


def _session() -> Session:
    config, _ = ModelConfig.from_dict(CONFIG)
    text = Text(DEMO / "tokenizer.json", QWEN, RULES)
    return Session(Unreached(), config, RULES, 4096, text)


def _prompt(session: Session, case: tuple[str, bool, bool | None]) -> None:
    prompt, raw, thinking = case
    ids = session._encode(prompt, raw, thinking, None)
    if not raw:
        literals = [769, 770, 769] + ([771, 772] if thinking is False else [])
        assert [x for x in ids if x >= 768] == literals
    session.generate(prompt, 4, raw=raw, thinking=thinking)


WORDS = TEXTS | st.sampled_from(("system", "user", "assistant", "tool", "text", "function"))
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=10,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": WORDS | JSON_VALUES, "content": WORDS | JSON_VALUES},
        optional={"tool_calls": JSON_VALUES, "name": JSON_VALUES},
    )
    | JSON_VALUES,
    max_size=4,
)


def _conversation(session: Session, case: tuple[Any, Any]) -> None:
    messages, tools = case
    session.generate(messages, 4, tools=tools)


def _command(*words: str) -> None:
    """A command line must end in one line and a status, whatever it is given."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["x", *words])
    said = err.getvalue()
    assert status in (1, 2) and out.getvalue() == "" and said.count("\n") == 1, said
    assert "this is a bug" not in said and (status == 2 or "reached" in said), said


def _messages_file(path: Path, content: Any) -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(data)
    _command("--messages", str(path))


def _workload_file(path: Path, lines: Any) -> None:
    data = lines if isinstance(lines, bytes) else "\n".join(map(json.dumps, lines)).encode()
    path.write_bytes(data)
    read_messages(path, 3)


PIECES = st.sampled_from(
    ["{{ m.content }}", "{{ bos_token }}", "{{ messages }}", "{{ tools | tojson }}", "{% endif %}",
     "{% for m in messages %}", "{% endfor %}", "{% if x %}", "{{ x.y.z }}", "{{ 1 // 0 }}",
     "{{ 'a' * 9999999 }}", "{{ m | join(m) }}", "{{ range(99999) | list }}", "{{ loop.index }}",
     "{% set x = messages * 999 %}", "{{ x ~ x }}", "{{ '%99999s' % x }}", "{{ x | upper }}",
     "{% macro f(x) %}", "{% endmacro %}", "{{ f(f) }}", "<|im_start|>", "{{ '\\ud800' }}",
     "{{ messages[0].content[::-1] }}", "{{ messages | map(attribute='role') | list }}",
     "{{ x | replace('a', x) }}", "{{ x | tojson(indent=9) }}", "{{ messages | sort }}",
     "{{ self }}", "{{ 9 ** 9 ** 9 }}", "{{ x | batch(9) | list }}", "{{ x | int ** 9 }}"]
)  # fmt: skip


def _template(case: tuple[list[str], str]) -> None:
    pieces, prompt = case
    Text(DEMO / "tokenizer.json", "".join(pieces), RULES).encode(prompt)


Case = tuple[int, Any, Callable[..., object], str]
"""Examples of a quick run, strategy, check, what is made for it."""

CASES: dict[str, Case] = {
    "config": (
        300, st.tuples(st.dictionaries(KEYS, VALUES, max_size=4), st.sets(KEYS, max_size=2)),
        _config, "",
    ),
    "generation config": (
        100,
        st.dictionaries(GENERATION_KEYS, VALUES | st.lists(st.integers(-1, 101)), max_size=4),
        _generation, "",
    ),
    "safetensors header": (300, HEADERS, _header, "path"),
    "checkpoint files": (
        40, st.tuples(st.sampled_from(CHECKPOINT_FILES), PLACES), _checkpoint, "checkpoint",
    ),
    "manifest": (100, CHANGES, _manifest, "bundle"),
    "bundle bytes": (
        60, st.tuples(st.integers(0, 99), PLACES, st.booleans()), _bytes, "bundle",
    ),
    "bundle texts": (
        80, st.tuples(st.sampled_from(("generation.json", "verdict.json", "costs.json")), CHANGES),
        _texts, "bundle",
    ),
    "tokenizer": (30, CHANGES, _tokenizer, "path"),
    "prompt": (
        100, st.tuples(TEXTS, st.booleans(), st.none() | st.booleans()), _prompt, "session",
    ),
    "conversation": (
        100, st.tuples(MESSAGES, st.none() | st.lists(JSON_VALUES, max_size=2)), _conversation,
        "session",
    ),
    "messages file": (
        60, MESSAGES | JSON_VALUES | st.binary(max_size=60), _messages_file, "path",
    ),
    "workload file": (
        60,
        st.lists(st.fixed_dictionaries({"prompt": TEXTS | MESSAGES}) | JSON_VALUES, max_size=3)
        | st.binary(max_size=60),
        _workload_file, "path",
    ),
    "prompt ids": (
        60, TEXTS | st.text("0123456789,- ", max_size=20),
        lambda text: _command(f"--prompt-ids={text}"), "",
    ),
    "template": (60, st.tuples(st.lists(PIECES, max_size=8), TEXTS), _template, ""),
}  # fmt: skip


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], Any]]:
    """What the checks work on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    reached = _session()
    monkeypatch.setattr(session_module.Session, "load", lambda *_, **__: reached)
    return {
        "path": lambda: tmp_path / "model.safetensors",
        "checkpoint": lambda: make_tiny(tmp_path / "checkpoint"),
        "bundle": lambda: Bundle(tmp_path / "x.clover"),
        "session": lambda: reached,
    }


@pytest.mark.parametrize(
    "seconds", [pytest.param(0, id="quick"), pytest.param(9, id="long", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", CASES)
def test_anything_gives_an_answer_or_one_line(
    made: dict[str, Callable[[], Any]], name: str, seconds: float
) -> None:
    examples, strategy, check, needs = CASES[name]
    given = [made[needs]()] if needs else []
    assert (
        fuzz(strategy, lambda example: check(*given, example), examples, seconds) >= examples // 2
    )


def test_the_limits_bite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzzing.MOST_SECONDS", 0.05)
    with pytest.raises(Hang), limits():
        sum(1 for _ in iter(int, 1))
    monkeypatch.setattr("tests.fuzzing.MOST_SECONDS", 20)
    with pytest.raises(MemoryError), limits():
        bytearray(2 << 30)
    for fault in (ValueError("x"), EngineFailed(unit="x", reason="two\nlines")):

        def check(example: int, fault: Exception = fault) -> None:
            raise fault

        with pytest.raises((ValueError, AssertionError)):
            fuzz(st.integers(), check, 3)
