"""costs.json, optional and in the way of `auto` alone, and a verdict.json that is lost or stays."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clover_compile import reprove
from clover_compile.profiling import cost_table, doubts, run
from clover_compile.profiling.html.report import render
from clover_compile.profiling.text import render as render_text
from clover_compile.runtime import bundle as opening
from clover_compile.runtime import sealing
from clover_compile.runtime.cores import processor
from clover_compile.runtime.costs import CostTable
from clover_compile.runtime.errors import BadBundle
from clover_compile.runtime.main import main
from clover_compile.runtime.manifest import read_bundle
from clover_compile.runtime.sealing import write_costs
from clover_compile.runtime.session import Session
from tests.built import demonstration
from tests.bundles import costs, edit, identity, make_bundle, sign
from tests.command import clover_compile
from tests.oracle_engine import oracle_session


def test_costs_are_read_with_the_bundle(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "x.clover")
    assert read_bundle(folder).costs is None and read_bundle(folder).costs_fault is None
    write_costs(folder, costs(bundle=identity(folder)))
    found = read_bundle(folder)
    assert found.costs is not None and found.costs_fault is None
    assert found.costs.cost("preview", 1) == 0.25
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.clover"]


def _edited(folder: Path) -> None:
    sign(folder, "costs.json", costs(bundle=identity(folder)))
    data = (folder / "costs.json").read_text()
    assert "0.25" in data
    (folder / "costs.json").write_text(data.replace("0.25", "0.20"))


def _respelled(folder: Path) -> None:
    sign(folder, "costs.json", costs(bundle=identity(folder)))
    data = (folder / "costs.json").read_text()
    (folder / "costs.json").write_text(data.replace("0.25", "25e-2"))


UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda f: (f / "costs.json").write_text("{"), "costs.json is not valid JSON"),
    "empty": (lambda f: (f / "costs.json").write_text(""), "costs.json is not valid JSON"),
    "no text": (lambda f: (f / "costs.json").write_bytes(b"\xff"), "costs.json is not UTF-8"),
    "unsigned": (lambda f: (f / "costs.json").write_text('{"bundle": "x"}'), "was changed"),
    "edited": (_edited, "costs.json was changed"),
    "respelled": (_respelled, "not spelled as it was written"),
    "foreign": (
        lambda f: sign(f, "costs.json", costs(bundle="0" * 64)), "costs.json is of another bundle",
    ),
    "no table": (
        lambda f: sign(
            f, "costs.json", costs(bundle=identity(f), costs={"commit": [[1, 1.0]]})
        ),
        "must name the Units",
    ),
}  # fmt: skip


@pytest.fixture(params=UNUSABLE.values(), ids=list(UNUSABLE))
def unusable(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A bundle whose costs cannot be used, and the words that say why."""
    folder = make_bundle(tmp_path / "x.clover")
    damage, words = request.param
    damage(folder)
    return folder, words


def test_unusable_costs_refuse_nothing_here(unusable: tuple[Path, str]) -> None:
    folder, words = unusable
    found = read_bundle(folder)
    assert found.costs is None and words in str(found.costs_fault)
    ignored = read_bundle(folder, recosting=True)
    assert ignored.costs is None and ignored.costs_fault is None
    assert read_bundle(folder, renewing=True).verdict["outcome"] == "passed"


@pytest.fixture
def runs(unusable: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """The same, with an engine that answers in the place of the bundle's stubs."""
    engine = oracle_session(context=120)[0]

    def load(path: Path, **options: object) -> opening.LoadedBundle:
        checked = read_bundle(path)
        return opening.LoadedBundle(
            checked.path, checked.identity, checked.manifest, checked.verdict, engine.sizes,
            engine.rules, engine.context, engine.engine, None,  # type: ignore[arg-type]
            checked.costs, checked.costs_fault,
        )  # fmt: skip

    monkeypatch.setattr(opening, "load", load)
    return unusable


@pytest.mark.parametrize("way", ["causal", "denoise", "self-speculate"])
def test_a_named_way_runs_and_one_line_warns(
    runs: tuple[Path, str], capsys: pytest.CaptureFixture[str], way: str
) -> None:
    folder, words = runs
    arguments = [str(folder), "--prompt-ids", "1,2", "--decode", way, "--max-new-tokens", "4"]
    assert main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert '"token_ids"' in captured.out
    (line,) = captured.err.splitlines()
    assert words in line and "profile BUNDLE` again" in line and line.isprintable()


def test_auto_is_refused_with_the_reason(
    runs: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, words = runs
    assert main([str(folder), "--prompt-ids", "1,2", "--decode", "auto"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert words in captured.err and "run `clover-compile profile BUNDLE`" in captured.err


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("verdict.json")])
def test_what_is_no_file_does_not_belong(tmp_path: Path, make: Callable[[Path], None]) -> None:
    folder = make_bundle(tmp_path / "x.clover")
    make(folder / "costs.json")
    with pytest.raises(BadBundle, match=r"costs\.json") as raised:
        read_bundle(folder)
    assert str(raised.value).count("costs.json") == 1


def test_inspect_says_what_is_wrong_with_them(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "x.clover")
    (folder / "costs.json").write_text("{")
    done = clover_compile("inspect", "--json", folder)
    assert done.exit_code == 0 and '"costs_fault": "costs.json is not valid JSON' in done.stdout


ORIGIN = {"processor": "some processor", "threads": 2, "doubt": None}


def test_where_costs_were_measured_is_told(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(demonstration(), tmp_path / "x.clover"))
    origin = ORIGIN | {"doubt": "the machine was\nbusy"}
    write_costs(folder, costs(bundle=identity(folder), origin=origin))
    done = clover_compile("inspect", folder)
    assert done.exit_code == 0
    assert "measured, for --decode auto; some processor, 2 threads\n" in done.stdout
    assert "WARNING    the machine was\\nbusy\n" in done.stdout
    write_costs(folder, costs(bundle=identity(folder), origin=ORIGIN))
    assert "WARNING" not in clover_compile("inspect", folder).stdout


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        (ORIGIN, None),
        (None, "nothing says where the costs were measured"),
        (ORIGIN | {"processor": "an\x1bother"}, 'measured on "an\\u001bother", not'),
        (ORIGIN | {"threads": 1}, "measured with 1 thread, 2 in use"),
        (ORIGIN | {"threads": 8}, "measured with 8 threads, 2 in use"),
        (ORIGIN | {"doubt": "load 9"}, "costs were doubted when they were measured (load 9)"),
        (
            {"processor": "x", "threads": 1, "doubt": "load 9"},
            'measured on "x", not on this machine; measured with 1 thread, 2 in use; doubted when',
        ),
    ],
    ids=["same", "unknown", "another machine", "fewer", "more", "doubted", "all three"],
)
def test_auto_goes_by_them_and_one_line_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    origin: dict[str, Any] | None, words: str | None,
) -> None:  # fmt: skip
    session = oracle_session(context=120)[0]
    session.costs = CostTable.from_json(costs(origin=origin))
    monkeypatch.setattr(session.engine, "threads", 2, raising=False)
    monkeypatch.setattr("clover_compile.runtime.session.processor", lambda: "some processor")
    monkeypatch.setattr(Session, "load", lambda *a, **k: session)
    arguments = ["x.clover", "--prompt-ids", "1,2", "--max-new-tokens", "4", "--json"]
    for way in ("auto", "causal"):
        assert main([*arguments, "--decode", way]) == 0
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == (way == "auto" and words is not None)
        assert all(
            str(words) in x and "profile BUNDLE` here" in x and x.isprintable() for x in lines
        )


@pytest.mark.parametrize(
    "origin",
    [
        3, {}, ORIGIN | {"more": 1}, ORIGIN | {"threads": 0}, ORIGIN | {"threads": True},
        ORIGIN | {"threads": 10**30}, ORIGIN | {"processor": None}, ORIGIN | {"doubt": 1},
        ORIGIN | {"processor": ""}, ORIGIN | {"processor": "x" * 5000}, ORIGIN | {"doubt": ""},
    ],
    ids=lambda origin: str(origin)[:60],
)  # fmt: skip
def test_an_origin_that_is_none(origin: Any) -> None:
    with pytest.raises(ValueError, match="origin"):
        CostTable.from_json(costs(origin=origin))


def test_modelled_costs_are_called_so() -> None:
    table = CostTable.from_json(costs(kind="modelled"))
    assert table.caution("any", 2) == "the costs are modelled, not measured"


def test_the_processor_is_named(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU @ 2: GHz\n")
    assert processor(tmp_path) == "Some CPU @ 2: GHz"
    assert processor(tmp_path / "nowhere") and processor()


def _lost(folder: Path) -> None:
    (folder / "verdict.json").unlink()


def _cut(folder: Path) -> None:
    (folder / "verdict.json").write_text("{")


def _foreign(folder: Path) -> None:
    sign(folder, "verdict.json", {"bundle": "0" * 64, "outcome": "passed", "reason": ""})


@pytest.mark.parametrize("damage", [_lost, _cut, _foreign])
@pytest.mark.parametrize("command", ["run", "inspect", "finish"])
def test_a_lost_verdict_is_told_once_with_what_mends_it(
    tmp_path: Path, command: str, damage: Callable[[Path], None]
) -> None:
    folder = make_bundle(tmp_path / "x.clover")
    damage(folder)
    words: dict[str, list[str | Path]] = {"run": ["-p", "hi"], "finish": ["-o", tmp_path / "y"]}
    more = words.get(command, [])
    done = clover_compile(command, folder, *more)
    assert (done.exit_code, done.stdout) == (2, "")
    told, remedy = done.stderr.split("refused: ")[1].split("; ")
    assert told.count("verdict.json") == 1
    assert "`clover-compile verify` on it proves it again" in remedy


def test_another_fault_beside_it_has_another_remedy(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "x.clover")
    _lost(folder)
    (folder / "extra").touch()
    with pytest.raises(BadBundle, match="fetch or build the bundle again") as raised:
        read_bundle(folder)
    assert "clover-compile verify" not in str(raised.value)


def test_a_verdict_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof took minutes: its outcome is said, and that the old verdict stays."""
    folder = make_bundle(tmp_path / "x.clover", {"dtype": "fp32"})
    (folder / "probes.safetensors").write_bytes(b"x")
    edit(folder)
    old = (folder / "verdict.json").read_bytes()
    monkeypatch.setattr(reprove, "load", lambda path, **options: read_bundle(path))
    monkeypatch.setattr("clover_compile.prove.prove", lambda *rest: {"outcome": "passed"})

    def full(path: Path, content: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sealing, "write_json", full)
    done = clover_compile("verify", folder)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "the proof ended with: passed; verdict.json stays as it was (No space" in done.stderr
    assert (folder / "verdict.json").read_bytes() == old
    assert [path.name for path in tmp_path.iterdir()] == ["x.clover"]


def test_doubtful_costs_are_not_written_without_a_word(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "x.clover")
    table = CostTable.from_json(costs(bundle=identity(folder)))
    for doubt, said in ((None, None), ("busy", f"busy. {doubts.EFFECT}")):
        found: dict[str, Any] = {
            "bundle": identity(folder), "warning": doubt, "notes": [], "prefix": 1,
        }  # fmt: skip
        run.write_costs_of(folder, table, found)
        assert read_bundle(folder).costs == table
        assert found["warning"] == said
        page = {**found, "kind": "modelled", "model": "m", "target": "t",
                "passes": [], "costs": table.to_json(), "receipt": None,
                "break even": cost_table.break_even(table, 4)}  # fmt: skip
        assert ("Warning:" in render(page)) == ("WARNING" in render_text(page)) == bool(doubt)
