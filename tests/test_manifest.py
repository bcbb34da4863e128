"""Whatever is wrong with a bundle is refused in one line before anything of it is opened."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from clover_compile.runtime import hashes, manifest
from clover_compile.runtime.bundle import load
from clover_compile.runtime.errors import BadBundle, CloverError, NotProved
from clover_compile.runtime.manifest import bundle_id, read_bundle
from clover_compile.runtime.versions import inside, version_faults
from tests.bundles import (
    CONFIG,
    RULES,
    costs,
    edit,
    edit_inside,
    identity,
    make_bundle,
    seal,
    sign,
    write_manifest,
)  # fmt: skip

Fault = Callable[[Path], object]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _flip(name: str, at: int = 0) -> Fault:
    def fault(b: Path) -> None:
        data = bytearray((b / name).read_bytes())
        data[at] ^= 1
        (b / name).write_bytes(data)

    return fault


def _write(name: str, data: str | bytes) -> Fault:
    def fault(b: Path) -> None:
        (b / name).parent.mkdir(exist_ok=True)
        (b / name).write_bytes(data.encode() if isinstance(data, str) else data)

    return fault


def _remove(name: str) -> Fault:
    return lambda b: (b / name).unlink()


def _truncate(b: Path) -> None:
    os.truncate(b / "weights/model.safetensors", 100)


def _swap(b: Path) -> None:
    (b / "units/commit.onnx").rename(b / "t")
    (b / "units/verify.onnx").rename(b / "units/commit.onnx")
    (b / "t").rename(b / "units/verify.onnx")


def _link_file(b: Path) -> None:
    shutil.move(b / "units/pick.onnx", b.parent / "elsewhere")
    (b / "units/pick.onnx").symlink_to(b.parent / "elsewhere")


def _link_folder(b: Path) -> None:
    shutil.move(b / "weights", b.parent / "weights")
    (b / "weights").symlink_to(b.parent / "weights")


def _fifo(b: Path) -> None:
    os.mkfifo(b / "units/pipe")


def _fifo_in_place(b: Path) -> None:
    (b / "tokenizer.json").unlink()
    os.mkfifo(b / "tokenizer.json")


def _link_verdict(b: Path) -> None:
    (b / "verdict.json").rename(b.parent / "elsewhere")
    (b / "verdict.json").symlink_to(b.parent / "elsewhere")


def _folder_verdict(b: Path) -> None:
    (b / "verdict.json").unlink()
    (b / "verdict.json").mkdir()


def _fifo_for(name: str) -> Fault:
    def fault(b: Path) -> None:
        (b / name).unlink()
        os.mkfifo(b / name)

    return fault


def _cut_id(b: Path) -> None:
    (b / "MANIFEST.sha256").write_text(identity(b))


def _fifo_verdict(b: Path) -> None:
    (b / "verdict.json").unlink()
    os.mkfifo(b / "verdict.json")


def _other_verdict(b: Path) -> None:
    other = make_bundle(b.parent / "other.clover", {"context": 32})
    shutil.copy(other / "verdict.json", b / "verdict.json")


def _verdict(**content: object) -> Fault:
    return lambda b: sign(b, "verdict.json", {"bundle": identity(b), **content})


def _edited_verdict(b: Path) -> None:
    text = (b / "verdict.json").read_text().replace('"reason": ""', '"reason": "x"')
    (b / "verdict.json").write_text(text)


def _listed(name: str) -> Fault:
    return lambda b: edit(b, files={name: {"sha256": "0" * 64, "size": 1}})


def _raw_manifest(data: str | bytes) -> Fault:
    return lambda b: write_manifest(b, data.encode() if isinstance(data, str) else data)


def _config(**changes: object) -> Fault:
    def fault(b: Path) -> None:
        config = {**CONFIG, **changes}
        digest = hashlib.sha256(manifest.canonical_json(config)).hexdigest()
        edit(b, model={"config": config, "hash": digest})

    return fault


def _weight(**changes: object) -> Fault:
    return lambda b: edit_inside(b, "weights", "w", **changes)


def _unit(**changes: object) -> Fault:
    return lambda b: edit_inside(b, "units", "verify", **changes)


def _edit(**changes: object) -> Fault:
    return lambda b: edit(b, **changes)


def _generation(**changes: object) -> Fault:
    def fault(b: Path) -> None:
        (b / "generation.json").write_text(json.dumps({**RULES, **changes}))
        edit(b)

    return fault


def _no_rules(b: Path) -> None:
    (b / "generation.json").write_text("x")
    edit(b)


def _manifest_folder(b: Path) -> None:
    (b / "manifest.json").unlink()
    (b / "manifest.json").mkdir()


def _template(b: Path) -> None:
    (b / "chat_template.jinja").write_bytes(b"\xff\xfe")
    edit(b)


OUTSIDE = "lies outside the bundle's files"
DIGEST = "0" * 64
FAULTS: list[tuple[str, Fault, str]] = [
    ("no folder", shutil.rmtree, "no such folder"),
    ("no manifest", _remove("manifest.json"), "no manifest.json in it"),
    ("a manifest that is a folder", _manifest_folder, "no manifest.json in it"),
    ("manifest flipped", _flip("manifest.json", 5), "MANIFEST.sha256 says"),
    ("id flipped", _flip("MANIFEST.sha256"), "MANIFEST.sha256 says"),
    ("id missing", _remove("MANIFEST.sha256"), "MANIFEST.sha256 is missing"),
    ("id not text", _write("MANIFEST.sha256", b"\xff" * 64), "MANIFEST.sha256 says"),
    ("id too long", _write("MANIFEST.sha256", b"0" * 9000), "MANIFEST.sha256 holds"),
    ("Unit flipped", _flip("units/commit.onnx"), '"units/commit.onnx" has hash'),
    ("weight flipped", _flip("weights/model.safetensors", -1), 'model.safetensors" has hash'),
    ("weight header flipped", _flip("weights/model.safetensors"), 'model.safetensors" has hash'),
    ("tokenizer flipped", _flip("tokenizer.json"), '"tokenizer.json" has hash'),
    ("weights truncated", _truncate, "has 100 bytes instead of"),
    ("file grown", _write("tokenizer.json", "{}{}"), "has 4 bytes instead of 2"),
    ("file emptied", _write("tokenizer.json", ""), "has 0 bytes instead of 2"),
    ("file missing", _remove("units/pick.onnx"), '"units/pick.onnx" is missing'),
    ("file extra", _write("notes.txt", "x"), '"notes.txt" does not belong'),
    ("hidden file extra", _write(".DS_Store", "x"), '".DS_Store" does not belong'),
    ("file extra below", _write("units/extra.so", "x"),
        '"units/extra.so" does not belong'),
    ("file with a strange name", _write("a\x1b[2J", "x"), '"a\\u001b[2J" does not belong'),
    ("files swapped", _swap, '"units/commit.onnx" has'),
    ("file a link", _link_file, '"units/pick.onnx" is a symbolic link'),
    ("folder a link", _link_folder, '"weights" is a symbolic link'),
    ("dangling link", lambda b: (b / "x").symlink_to("nowhere"), '"x" is a symbolic link'),
    ("a pipe", _fifo, '"units/pipe" is not a regular file'),
    ("a pipe for a file", _fifo_in_place, '"tokenizer.json" is not a regular file'),
    ("verdict missing", _remove("verdict.json"), 'verdict.json is missing'),
    ("verdict of another bundle", _other_verdict, "verdict.json is of another bundle"),
    ("id padded", _write("MANIFEST.sha256", "0" * 64 + " \n"), "MANIFEST.sha256 says"),
    ("id without its newline", _cut_id, "MANIFEST.sha256 says"),
    ("a pipe for the id", _fifo_for("MANIFEST.sha256"), "MANIFEST.sha256 is not a regular file"),
    ("a pipe for the verdict", _fifo_verdict, '"verdict.json" is not a regular file'),
    ("a pipe for the manifest", _fifo_for("manifest.json"), "no manifest.json in it"),
    ("a folder for the verdict", _folder_verdict, 'the empty folder "verdict.json" does'),
    ("a link for the verdict", _link_verdict, '"verdict.json" is a symbolic link'),
    ("token a number", _generation(bos_token=3), "bos_token is 3"),
    ("token endless", _generation(eos_token="x" * 300), 'eos_token is "xxx'),
    ("token half a pair", _generation(eos_token="\ud800"), 'eos_token is "\\ud800"'),
    ("verdict edited", _edited_verdict, "verdict.json was changed"),
    ("verdict empty", _write("verdict.json", "{}"), "verdict.json was changed"),
    ("verdict no JSON", _write("verdict.json", "passed"), "verdict.json is not valid JSON"),
    ("verdict a list", _write("verdict.json", "[]"), "must hold a JSON object"),
    ("verdict unknown", _verdict(outcome="fine"), 'the outcome "fine"'),
    ("verdict strange", _verdict(outcome=["passed"]), "the outcome [\"passed\"]"),
    ("format newer", _edit(format_version=2), "format version 2, this runner reads 1"),
    ("format true", _edit(format_version=True), "format version true"),
    ("format 1.0", _edit(format_version=1.0), "format version 1.0"),
    ("format missing", _edit(format_version=...), "format version null"),
    ("version too old", _edit(accepts={"numpy": ">=99"}), "the bundle accepts >=99; pip install"),
    ("version too new", _edit(accepts={"numpy": "<2"}), "the bundle accepts <2; pip install"),
    ("package missing", _edit(accepts={"no-such-thing": ">=1"}), "which is not installed"),
    ("range unreadable", _edit(accepts={"numpy": "~=2"}), "is no range"),
    ("range no text", _edit(accepts={"numpy": 2}), "is no range"),
    ("package a path", _edit(accepts={"../x\n": ">=1"}), "is no range"),
    ("path absolute", _listed("/etc/passwd"), 'lists the path "/etc/passwd"'),
    ("path upward", _listed("units/../../x"), 'lists the path "units/../../x"'),
    ("path with a dot", _listed("./x"), 'lists the path "./x"'),
    ("path of Windows", _listed("..\\x"), "lists the path"),
    ("path with NUL", _listed("a\0b"), "lists the path"),
    ("path with a newline", _listed("a\nb"), "lists the path"),
    ("path a surrogate", _listed("\ud800"), "lists the path"),
    ("path empty", _listed(""), 'lists the path ""'),
    ("path our own", _listed("verdict.json"), 'lists the path "verdict.json"'),
    ("size a float", lambda b: edit(b, files={"x": {"sha256": DIGEST, "size": 1.0}}), "no hash"),
    ("empty folder", lambda b: (b / "empty").mkdir(), "the empty folder \"empty\" does not"),
    ("size huge", lambda b: edit(b, files={"tokenizer.json": {"sha256": DIGEST, "size": 10**30}}),
        "has 2 bytes instead of 1000000000000000000000000000000"),
    ("hash short", lambda b: edit(b, files={"x": {"sha256": "0", "size": 1}}), "no hash"),
    ("entry a list", lambda b: edit(b, files={"x": []}), "no hash"),
    ("files a list", _edit(files=[]), "lists no files"),
    ("manifest empty", _raw_manifest(b""), "manifest.json is not valid JSON"),
    ("manifest a list", _raw_manifest("[]"), "must hold a JSON object"),
    ("manifest binary", _raw_manifest(b"\xff\xfe\0"), "is not UTF-8"),
    ("manifest nested", _raw_manifest('{"a":' * 5000 + "1" + "}" * 5000), "nested deeper"),
    ("manifest of brackets", _raw_manifest("[" * 200_000), "nested deeper"),
    ("key twice", _raw_manifest('{"a": 1, "a": 2}'), 'holds the key "a" twice'),
    ("NaN", _raw_manifest('{"a": NaN}'), "NaN, which is not a JSON number"),
    ("number huge", _raw_manifest('{"a": ' + "9" * 5000 + "}"), "a number of 5000 digits"),
    ("number infinite", _raw_manifest('{"a": 1e999}'), "out of range"),
    ("units a list", _edit(units=[]), "units is []"),
    ("context a string", _edit(context="64"), 'context is "64"'),
    ("context negative", _edit(context=-1), "context is -1"),
    ("engine missing", _edit(engine=...), "engine is null"),
    ("engine unknown", _edit(engine="x\x1b"), 'engine "x\\u001b"; this runner has: ort'),
    ("Unit missing", lambda b: edit(b, units={}), "Unit commit is missing"),
    ("Unit without file", _unit(file="no.onnx"), 'Unit "verify" has no file'),
    ("Unit file a list", _unit(file=["units/commit.onnx"]), 'Unit "verify" has no file'),
    ("Unit outputs numbers", _unit(outputs=[1]), 'Unit "verify": outputs is [1]'),
    ("Unit of strange weights", _unit(weights=["v"]), "uses weights that are not there"),
    ("weight past the end", _weight(offset=10**20), OUTSIDE),
    ("weight before the start", _weight(offset=-4), OUTSIDE),
    ("weight crooked", _weight(offset=2), OUTSIDE),
    ("weight too large", _weight(shape=[2**62, 2**62]), OUTSIDE),
    ("weight negative", _weight(shape=[-2, -3]), OUTSIDE),
    ("weight of true", _weight(shape=[True, 3]), OUTSIDE),
    ("weight of strange type", _weight(dtype="object"), OUTSIDE),
    ("weight type a list", _weight(dtype=[]), OUTSIDE),
    ("weight elsewhere", _weight(file="../w"), OUTSIDE),
    ("weight file a table", _weight(file={}), OUTSIDE),
    ("model without config", _edit(model={}), "model.config is null"),
    ("model hash wrong", lambda b: edit(b, model={"config": CONFIG, "hash": DIGEST}), "model.hash"),
    ("size text", _config(head_dim="2"), 'model.config.head_dim is "2"'),
    ("vocabulary zero", _config(vocab_size=0), "model.config.vocab_size is 0"),
    ("layers unknown", _config(layer_types=["mamba"]), "model.config.layer_types is"),
    ("rules no JSON", _no_rules, "generation.json is"),
    ("rule unknown", _generation(beam=3), 'generation.json: unknown key "beam"'),
    ("rule text", _generation(presence_penalty="1"), 'presence_penalty is "1"'),
    ("no stop ids", _generation(stop_token_ids=[]), "stop_token_ids is []"),
    ("stop id outside", _generation(stop_token_ids=[8]), "outside the vocabulary of 8"),
    ("block too large", _generation(block_size=257), "block_size is 257"),
    ("template binary", _template, "chat_template.jinja: "),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "words"), [(f, w) for _, f, w in FAULTS], ids=[n for n, _, _ in FAULTS]
)
def test_a_damaged_bundle_is_refused(tmp_path: Path, fault: Fault, words: str) -> None:
    folder = make_bundle(tmp_path / "x.clover")
    fault(folder)
    with pytest.raises(CloverError) as raised:
        load(folder)
    message = str(raised.value)
    assert words in message
    assert message.isprintable() and len(message) < 2000
    assert raised.value.exit_status == 2


@pytest.mark.parametrize("outcome", ["failed", "compiled, not run", "unproved"])
def test_what_is_not_proved_is_refused_with_its_reason(tmp_path: Path, outcome: str) -> None:
    folder = make_bundle(tmp_path / "x.clover")
    _verdict(outcome=outcome, reason="no GPU\nhere")(folder)
    with pytest.raises(NotProved) as raised:
        load(folder)
    message = str(raised.value)
    assert outcome in message and "no GPU" in message and message.isprintable()
    assert ("--unverified" in message) == (outcome != "failed")


RENEWED: dict[str, Fault] = {
    "missing": _remove("verdict.json"),
    "empty": _write("verdict.json", ""),
    "flipped": _flip("verdict.json", 3),
    "edited": _edited_verdict,
    "of another bundle": _other_verdict,
    "unknown": _verdict(outcome="fine"),
}


@pytest.mark.parametrize("fault", RENEWED.values(), ids=RENEWED)
def test_who_renews_a_verdict_needs_none(tmp_path: Path, fault: Fault) -> None:
    folder = make_bundle(tmp_path / "x.clover")
    fault(folder)
    with pytest.raises(BadBundle, match=r"verdict\.json"):
        read_bundle(folder)
    assert read_bundle(folder, renewing=True).verdict["outcome"] == "unproved"


@pytest.mark.parametrize(
    "fault",
    [
        _link_verdict, _folder_verdict, _fifo_verdict, _flip("units/pick.onnx"),
    ],
)  # fmt: skip
def test_who_renews_a_verdict_needs_all_the_rest(tmp_path: Path, fault: Fault) -> None:
    folder = make_bundle(tmp_path / "x.clover")
    fault(folder)
    with pytest.raises(BadBundle):
        read_bundle(folder, renewing=True)


def test_a_sound_verdict_counts_while_it_is_renewed(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "x.clover")
    _verdict(outcome="failed", reason="logits differ")(folder)
    with pytest.raises(NotProved):
        load(folder, unverified=True, renewing=True)


def test_a_verdict_is_spelled_in_one_way(tmp_path: Path) -> None:
    folder, name = make_bundle(tmp_path / "x.clover"), "verdict.json"
    sign(folder, name, costs(bundle=identity(folder), outcome="passed", x=0.1))
    for old, new in ((b" ", b"  "), (b"0.1", b"0.10"), (b"0.1", b"1e-1"), (b"\n}\n", b"}\n")):
        data = (folder / name).read_bytes()
        assert old in data
        (folder / name).write_bytes(data.replace(old, new))
        with pytest.raises(BadBundle, match="not spelled as it was written"):
            read_bundle(folder)
        (folder / name).write_bytes(data)
    read_bundle(folder)


def test_unverified_never_means_failed(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "x.clover")
    _verdict(outcome="failed", reason="logits differ")(folder)
    with pytest.raises(NotProved):
        load(folder, unverified=True)


def test_a_sound_bundle_is_read(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "x.clover")
    sign(folder, "costs.json", costs(bundle=identity(folder)))
    checked = read_bundle(folder)
    assert checked.identity == identity(folder) == bundle_id(folder)
    assert checked.verdict["outcome"] == "passed"


def test_hard_links_and_a_linked_bundle_folder_are_fine(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "x.clover")
    os.link(folder / "weights/model.safetensors", tmp_path / "same")
    (tmp_path / "y.clover").symlink_to(folder)
    assert read_bundle(tmp_path / "y.clover").identity == identity(folder)


def test_many_faults_are_counted(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "x.clover")
    for i in range(50):
        (folder / f"{i}.txt").touch()
    with pytest.raises(CloverError, match="and 42 more"):
        read_bundle(folder)


class TestLargeWeights:
    """Weights beyond the limit are hashed once and then remembered."""

    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(manifest, "HASHED_EVERY_TIME", 150)
        return make_bundle(tmp_path / "x.clover")

    @pytest.fixture
    def hashed(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        names: list[str] = []

        def file_hash(path: Path) -> str:
            names.append(path.name)
            return hashes.file_hash(path)

        monkeypatch.setattr(manifest, "file_hash", file_hash)
        return names

    def test_hashed_once(self, folder: Path, hashed: list[str]) -> None:
        for _ in range(3):
            read_bundle(folder)
        assert hashed.count("model.safetensors") == 1
        assert hashed.count("tokenizer.json") == 3

    def test_recheck_hashes_again(self, folder: Path, hashed: list[str]) -> None:
        read_bundle(folder)
        read_bundle(folder, recheck=True)
        assert hashed.count("model.safetensors") == 2

    def test_a_touched_file_is_hashed_again(self, folder: Path) -> None:
        read_bundle(folder)
        _flip("weights/model.safetensors", -1)(folder)
        with pytest.raises(CloverError, match="has hash"):
            read_bundle(folder)

    @pytest.mark.parametrize(
        "content",
        ["", "[", "[]", '{"a": 1}', "[" * 100_000, '{"1:2:3:4": "x"}', "\udc80", "{}"],
        ids=str.__len__,
    )
    def test_a_damaged_memory_is_ignored(
        self, folder: Path, hashed: list[str], content: str, tmp_path: Path
    ) -> None:
        read_bundle(folder)
        memory = tmp_path / "cache/clover-compile/hashes.json"
        memory.write_bytes(content.encode("utf-8", "surrogateescape"))
        read_bundle(folder)
        assert hashed.count("model.safetensors") == 2

    def test_no_memory_at_all(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert read_bundle(folder).identity == bundle_id(folder)

    def test_nothing_is_left_beside_the_memory(self, folder: Path, tmp_path: Path) -> None:
        read_bundle(folder)
        assert [p.name for p in (tmp_path / "cache/clover-compile").iterdir()] == ["hashes.json"]


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("1.24.0", ">=1.24,<2", True), ("1.23.9", ">=1.24,<2", False), ("2.0", ">=1.24,<2", False),
        ("2.13.0+cpu", ">=2.11", True), ("1.10", ">=1.9", True), ("1.24", "==1.24.0", True),
        ("1.24.1", "!=1.24.1", False), ("1.24.1", "> 1.24 , <= 1.24.1", True),
        ("1.25.0rc1", ">=1.25", True), ("unknown", ">=0", False), ("1", "", False),
        ("1", ">=", False), ("1", ">=1;x", False),
    ],
)  # fmt: skip
def test_versions_compare_as_numbers(version: str, wanted: str, fits: bool) -> None:
    assert inside(version, wanted) == fits


def test_the_remedy_names_both_versions() -> None:
    (fault,) = version_faults({"numpy": ">=99,<100"})
    assert ">=99,<100" in fault and "numpy" in fault and "pip install 'numpy>=99,<100'" in fault


def test_seal_is_the_identity_on_a_sealed_bundle(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "x.clover")
    before = json.loads((folder / "manifest.json").read_text())
    files = before.pop("files")
    seal(folder, before)
    assert json.loads((folder / "manifest.json").read_text())["files"] == files
