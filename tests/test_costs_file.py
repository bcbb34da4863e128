"""costs.json in a bundle: optional, signed, of that bundle, and renewed by who measures anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clover_compile.profiling import cost_table, doubts, run
from clover_compile.profiling.html.report import render
from clover_compile.profiling.text import render as render_text
from clover_compile.runtime.costs import CostTable
from clover_compile.runtime.errors import BadBundle
from clover_compile.runtime.manifest import read_bundle
from clover_compile.runtime.sealing import write_costs
from tests.bundles import costs, identity, make_bundle, sign


def test_costs_are_read_with_the_bundle(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "x.clover")
    assert read_bundle(folder).costs is None
    write_costs(folder, costs(bundle=identity(folder)))
    found = read_bundle(folder).costs
    assert found is not None
    assert found.cost("preview", 1) == 0.25
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.clover"]


def test_costs_that_are_no_table_are_refused(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "x.clover")
    sign(folder, "costs.json", costs(bundle=identity(folder), costs={"commit": [[1, 1.0]]}))
    with pytest.raises(BadBundle, match=r"must name the Units .*remove it or run `cl"):
        read_bundle(folder)


@pytest.mark.parametrize("content", ["{", '{"bundle": "other"}'])
def test_who_measures_costs_anew_needs_no_old_ones(tmp_path: Path, content: str) -> None:
    folder = make_bundle(tmp_path / "x.clover")
    (folder / "costs.json").write_text(content)
    with pytest.raises(BadBundle, match=r"costs\.json"):
        read_bundle(folder)
    assert read_bundle(folder, recosting=True).costs is None


def test_doubtful_costs_are_not_written_without_a_word(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "x.clover")
    table = CostTable.from_json(costs(bundle=identity(folder)))
    for doubt, said in ((None, None), ("busy", f"busy. {doubts.EFFECT}")):
        found: dict[str, Any] = {"bundle": identity(folder), "warning": doubt, "notes": []}
        run.write_costs_of(folder, table, found)
        assert read_bundle(folder).costs == table
        assert found["warning"] == said
        page = {**found, "kind": "modelled", "model": "m", "target": "t", "prefix": 1,
                "passes": [], "costs": table.to_json(), "receipt": None,
                "break even": cost_table.break_even(table, 4)}  # fmt: skip
        assert ("Warning:" in render(page)) == ("WARNING" in render_text(page)) == bool(doubt)
