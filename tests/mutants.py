"""`make mutants`: breaks the kernels one small piece at a time and sees whether their tests notice.

    TRITON_INTERPRET=1 python -m tests.mutants [OP ...] [--jobs N] [--at TEXT] [--look SECONDS]

Every sign, comparison, mask, index offset and fill value of kernels/<op>/kernel.py is flipped in
turn, and tests/interpreted/test_<op>*.py run on the result. A mutant that passes must stand in
tests/survivors.json with the reason why it cannot matter; anything else is exit status 1.

The unbroken kernels run first, and note which lines every test reaches and how long it takes: a
mutant then meets only the tests that reach it, the quick ones before the slow. `--look` leaves out
tests beyond so many seconds per mutant: what survives a look may still be noticed by the rest.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import importlib.util
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest

from clover_compile.kernels.table import KERNELS

ROOT = Path(__file__).parents[1]
SURVIVORS = Path(__file__).with_name("survivors.json")
SECONDS = 240
"""Of processor time: a mutant that takes more is named, its loop may no longer end."""

FIRST = 4
"""Tests that are tried before the others: those that noticed most so far."""

_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One changed place."""

    op: str
    name: str
    """Function, source line and what was done: what survivors.json lists."""
    line: int
    """Of the statement around it: a test that does not reach it cannot notice."""
    source: str


def _edits(node: ast.AST) -> Iterator[tuple[str, Callable[[ast.AST], None]]]:
    """What can be broken at a node: a description, and the change to make to a copy of it."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _SWAPS:
        swap = _SWAPS[type(node.op)]
        yield f"{type(node.op).__name__} to {swap.__name__}", lambda n: setattr(n, "op", swap())
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
        swap = _SWAPS[type(node.ops[0])]
        name = type(node.ops[0]).__name__
        yield f"{name} to {swap.__name__}", lambda n: setattr(n, "ops", [swap()])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "sign dropped", lambda n: setattr(n, "op", ast.UAdd())
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.load", "tl.store"):
        yield "offset by one", _shift
        for i, word in enumerate(node.keywords):
            if word.arg == "mask":
                yield "mask dropped", partial(_everywhere, index=i)
            if word.arg == "other":
                yield "fill of one", partial(_fill, index=i)


def _shift(call: ast.AST) -> None:
    assert isinstance(call, ast.Call)
    call.args[0] = ast.BinOp(call.args[0], ast.Add(), ast.Constant(1))


def _fill(call: ast.AST, index: int) -> None:
    assert isinstance(call, ast.Call)
    call.keywords[index].value = ast.Constant(1)


def _everywhere(call: ast.AST, index: int) -> None:
    """mask=m becomes m | True-like: a comparison that always holds, of the mask's shape."""
    assert isinstance(call, ast.Call)
    mask = call.keywords[index].value
    flipped = ast.BinOp(mask, ast.BitOr(), ast.UnaryOp(ast.Invert(), copy.deepcopy(mask)))
    call.keywords[index].value = flipped


def _path(op: str) -> Path:
    return ROOT / "clover_compile" / "kernels" / op / "kernel.py"


def mutants(op: str) -> Iterator[Mutant]:
    """Every mutant of an op's kernels."""
    whole = _path(op).read_text(encoding="utf-8")
    text, tree = whole.splitlines(), ast.parse(whole)
    seen: Counter[str] = Counter()
    for function in (n for n in tree.body if isinstance(n, ast.FunctionDef)):
        nodes = [n for statement in function.body for n in ast.walk(statement)]
        around = {n: part for statement in function.body for n, part in _statements(statement)}
        for index, node in enumerate(nodes):
            for what, change in _edits(node):
                broken = copy.deepcopy(tree)
                twin = next(n for n in broken.body if getattr(n, "name", "") == function.name)
                assert isinstance(twin, ast.FunctionDef)
                change([n for statement in twin.body for n in ast.walk(statement)][index])
                line = getattr(node, "lineno", function.lineno)
                name = f"{function.name}: {text[line - 1].strip()} [{what}]"
                seen[name] += 1
                if seen[name] > 1:
                    name += f" {seen[name]}"
                source = ast.unparse(ast.fix_missing_locations(broken))
                yield Mutant(op, name, around[node], source)


def _statements(node: ast.AST, line: int = 0) -> Iterator[tuple[ast.AST, int]]:
    """Every node from here down, and the line of the innermost statement that it is part of."""
    line = node.lineno if isinstance(node, ast.stmt) else line
    yield node, line
    for child in ast.iter_child_nodes(node):
        yield from _statements(child, line)


class _Marked(ast.NodeTransformer):
    """Calls `mark` with the line of every statement of a kernel before the statement."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse"):
            block = getattr(node, name, None)
            if isinstance(block, list) and not isinstance(node, ast.Module):
                setattr(node, name, [part for s in block for part in (self._mark(s), s)])
        return node

    @staticmethod
    def _mark(statement: ast.stmt) -> ast.stmt:
        called = ast.Call(ast.Name("mark", ast.Load()), [ast.Constant(statement.lineno)], [])
        return ast.copy_location(ast.Expr(called), statement)


@dataclass
class _Reach:
    """A pytest plugin: the statements that every test reaches, and its processor time."""

    mark: set[int] = field(default_factory=set)
    lines: dict[str, list[int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self.mark.clear()
        began = time.process_time()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.process_time() - began
            self.lines[item.nodeid] = sorted(self.mark)


@dataclass
class _Chosen:
    """A pytest plugin: runs these tests in this order, and writes down which one failed."""

    tests: list[str]
    witness: Path

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        place = {name: i for i, name in enumerate(self.tests)}
        items[:] = sorted((i for i in items if i.nodeid in place), key=lambda i: place[i.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.witness.write_text(report.nodeid, encoding="utf-8")


def _test(op: str, source: str, plugin: object, mark: Callable[[int], None] | None = None) -> int:
    """Runs in a child of its own: exit status of pytest where the op has these kernels."""
    module = f"clover_compile.kernels.{op}.kernel"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.py"
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None and spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        vars(made)["mark"] = mark
        sys.modules[module] = made
        spec.loader.exec_module(made)
        files = sorted((ROOT / "tests/interpreted").glob(f"test_{op}*.py"))
        flags = ["-o", "timeout=0", "-x", "-q", "--no-header", "-p", "no:cacheprovider",
                 "-p", "pytest_timeout", "-m", "not slow"]  # fmt: skip
        return int(pytest.main([*flags, *map(str, files)], plugins=[plugin]))


def _fork(work: Callable[[], int]) -> int:
    """A child that does it, without a word."""
    child = os.fork()
    if child == 0:
        status = 70
        with contextlib.suppress(BaseException):
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            status = work()
        os._exit(status)
    return child


def reach(op: str) -> dict[str, tuple[set[int], float]]:
    """Test -> the statements of the op's unbroken kernels that it reaches, and its seconds."""
    tree = ast.parse(_path(op).read_text(encoding="utf-8"))
    marked = ast.unparse(ast.fix_missing_locations(_Marked().visit(tree)))
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "reach.json"

        def work() -> int:
            found = _Reach()
            status = _test(op, marked, found, found.mark.add)
            answer.write_text(json.dumps([found.lines, found.seconds]), encoding="utf-8")
            return status

        _, status = os.waitpid(_fork(work), 0)
        if status != 0:
            raise SystemExit(f"{op}: its tests fail on the unbroken kernels")
        lines, seconds = json.loads(answer.read_text(encoding="utf-8"))
    return {name: (set(lines[name]), seconds[name]) for name in lines}


def _start(mutant: Mutant, tests: list[str], witness: Path) -> int:
    def work() -> int:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        return _test(mutant.op, mutant.source, _Chosen(tests, witness))

    return _fork(work)


def run(made: list[Mutant], jobs: int, look: float) -> list[Mutant]:
    """The mutants of an op whose tests passed; `look`: seconds of tests that each may meet."""
    waiting, running, alive = list(reversed(made)), dict[int, tuple[Mutant, Path]](), []
    done, began = 0, time.monotonic()
    noticed = Counter[str]()
    reached = reach(made[0].op)
    quick = sorted(reached, key=lambda test: reached[test][1])
    folder = Path(tempfile.mkdtemp())
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            witness = folder / str(len(waiting))
            first = [name for name, _ in noticed.most_common(FIRST)]
            tests = [t for t in dict.fromkeys([*first, *quick]) if mutant.line in reached[t][0]]
            ends = accumulate(reached[t][1] for t in tests)
            tests = [t for t, end in zip(tests, ends, strict=True) if end <= look]
            if not tests:
                done += 1
                alive.append(mutant)
                print(f"unreached {mutant.op}:{mutant.line} {mutant.name}", flush=True)
                continue
            running[_start(mutant, tests, witness)] = mutant, witness
        if not running:
            break
        child, status = os.wait()
        mutant, witness = running.pop(child)
        if witness.exists():
            noticed[witness.read_text(encoding="utf-8")] += 1
        done += 1
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            print(f"timed out {mutant.op}:{mutant.line} {mutant.name}", flush=True)
        code = os.waitstatus_to_exitcode(status)
        if code > int(pytest.ExitCode.TESTS_FAILED):
            raise SystemExit(f"{mutant.op}: the tests did not run on {mutant.name} (status {code})")
        if code == 0:
            alive.append(mutant)
            print(f"survived  {mutant.op}:{mutant.line} {mutant.name}", flush=True)
        if done % 25 == 0:
            print(f"{done}/{len(made)} in {time.monotonic() - began:.0f} s", file=sys.stderr)
    shutil.rmtree(folder)
    return alive


def main() -> int:
    """0 if every survivor is listed with a reason and every listed one survived."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("ops", nargs="*", metavar="OP", help="ops to break (all)")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once (2)")
    parser.add_argument("--at", default="", help="only mutants whose name holds this")
    parser.add_argument("--look", type=float, default=math.inf, help="seconds of tests (all)")
    options = parser.parse_args()
    # What every child needs, once: pytest would rewrite hypothesis again in each (3 s).
    for name in ("tests.interpreted.harness", "hypothesis"):
        importlib.import_module(name)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    known: dict[str, dict[str, str]] = json.loads(SURVIVORS.read_text(encoding="utf-8"))
    failed = False
    for op in options.ops or [op for op in KERNELS if "fp8" not in op]:
        made = [m for m in mutants(op) if options.at in m.name]
        alive = {m.name for m in run(made, options.jobs, options.look)} if made else set()
        reasons = known.get(op, {})
        new = sorted(alive - reasons.keys())
        gone = sorted(reasons.keys() & {m.name for m in made} - alive)
        print(f"{op}: {len(made)} mutants, {len(made) - len(alive)} noticed, "
              f"{len(alive) - len(new)} cannot matter, {len(new)} unexplained")  # fmt: skip
        for name in gone:
            print(f"listed, but noticed now: {name}")
        for name in new:
            print(f"unexplained: {name}")
        failed |= bool(new or gone)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
