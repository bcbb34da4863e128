"""What `inspect` and `targets` print for people: grouped, counted, aligned."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from clover_compile.inspection import _nodes
from clover_compile.targets import listing
from clover_compile.targets.table import TARGETS
from tests.command import clover_compile


def _unit(**ops: tuple[int, list[str]]) -> dict[str, Any]:
    """A Unit with so many nodes of each op, every node with these kernels."""
    nodes = {
        f"{op}_{i}": {"op": op, "kernels": kernels}
        for op, (count, kernels) in ops.items()
        for i in range(count)
    }
    return {"nodes": nodes}


def test_plugin_nodes_are_counted_by_unit_and_op() -> None:
    scan = ["scan_step-sm90-aaaa", "scan_step-sm90-bbbb", "scan-gate-sm90-cccc"]
    units = {
        "commit": _unit(gdn_scan=(30, scan), rms_norm=(81, ["norm-sm90-dddd"])),
        "pick": _unit(pick=(1, ["pick-sm86-eeee", "pick-sm120-eeee"])),
        "replay": {},
    }
    head, *lines = _nodes(units)
    assert "--json" in head
    assert [line.split() for line in lines] == [
        ["commit", "30", "gdn_scan", "3", "kernels", "for", "sm90:", "scan_step,", "scan-gate"],
        ["commit", "81", "rms_norm", "1", "kernels", "for", "sm90:", "norm"],
        ["pick", "1", "pick", "2", "kernels", "for", "sm86,", "sm120:", "pick"],
    ]
    assert _nodes({"commit": {}}) == []


def test_the_targets_are_a_table_of_80_columns() -> None:
    done = clover_compile("targets")
    assert done.exit_code == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    at = {word: lines[0].index(word) for word in ("weights", "builds here", "runs on")}
    rows = {line.split()[0]: line for line in lines if line.split()[:1] and line[0] != " "}
    assert set(TARGETS) <= set(rows)
    for name, row in TARGETS.items():
        line = rows[name]
        assert line[at["weights"] :].startswith(" ".join(row.dtypes) + " ")
        assert line[at["builds here"] :].startswith(("yes ", "no "))
        assert row.runs_on.startswith(line[at["runs on"] :])
        for column in at.values():
            assert line[column - 1] == " " and line[column] != " "


def test_what_is_missing_is_said_once() -> None:
    rows = {name: replace(row, packages=("torch",)) for name, row in TARGETS.items()}
    for name in ("triton-h100", "triton-h200"):
        rows[name] = replace(rows[name], packages=("torch", "no_such_module"))
    text = listing.render(rows)
    assert text.endswith("no: triton-h100, triton-h200 lack the module no_such_module")
    assert text.count("  no  ") == 2 and text.count("  yes  ") == len(TARGETS) - 2


def test_json_says_the_same() -> None:
    rows = json.loads(clover_compile("targets", "--json").stdout)
    assert {name: tuple(row["dtypes"]) for name, row in rows.items()} == {
        name: row.dtypes for name, row in TARGETS.items()
    }
