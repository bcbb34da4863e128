"""The checker: sizes, docstrings, forbidden words, and tests that never run."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "clover_compile"
TESTS = ROOT / "tests"
BENCH = ROOT / "bench"

FILE_LINES, MEDIAN_LINES, FUNCTION_LINES, KERNEL_LINES = 500, 130, 60, 150

# Patterns that do not match their own spelling here.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|farm|root)/")
REGISTRY = re.compile(
    r"\b(?:[\w-]+\.)*(?:pypi|pythonhosted|npmjs|conda|anaconda|download\.pytorch)(?:\.[\w-]+)*"
    r"\.(?:org|com|net|io)\b"
)
ENVIRONMENT = re.compile(r"\bos\.(?:environ|getenv)\b")
READS_ENVIRONMENT = {"flags.py", "runtime/hashes.py"}
"""The runner cannot import flags.py; it reads where the user's cache is."""


def _modules(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _length(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _repository_texts() -> Iterator[tuple[Path, str]]:
    """Text files that are in the repository or would be added to it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            if b"\0" not in data[:8192]:
                yield path, data.decode("utf-8", "replace")


def test_files_are_short() -> None:
    long = {
        _name(p): _length(p) for p in _modules(PACKAGE, TESTS, BENCH) if _length(p) > FILE_LINES
    }
    assert not long
    assert statistics.median(map(_length, _modules(PACKAGE))) <= MEDIAN_LINES


def test_functions_are_short() -> None:
    long = {}
    for path in _modules(PACKAGE, TESTS, BENCH):
        limit = KERNEL_LINES if path.name == "kernel.py" else FUNCTION_LINES
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > limit:
                    long[f"{_name(path)}:{node.name}"] = lines
    assert not long


def test_every_module_says_what_it_is_for() -> None:
    silent = [_name(p) for p in _modules(PACKAGE, TESTS, BENCH) if not ast.get_docstring(_tree(p))]
    assert not silent


def test_no_machine_paths_and_no_registry_hosts() -> None:
    found = [
        f"{_name(path)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for path, text in _repository_texts()
        for pattern in (MACHINE_PATH, REGISTRY)
        for match in pattern.finditer(text)
    ]
    assert not found


def test_the_environment_is_read_in_one_place() -> None:
    readers = {
        path.relative_to(PACKAGE).as_posix()
        for path in _modules(PACKAGE)
        if ENVIRONMENT.search(path.read_text(encoding="utf-8"))
    }
    assert readers <= READS_ENVIRONMENT


def test_every_test_class_and_file_collects_a_test() -> None:
    idle = []
    for path in TESTS.rglob("test_*.py"):
        tree = _tree(path)
        classes = [
            n for n in tree.body if isinstance(n, ast.ClassDef) and n.name.startswith("Test")
        ]
        # pytest skips a class with a constructor, with no more than a warning.
        idle += [
            f"{_name(path)}:{node.name}"
            for node in classes
            if not _has_test(node) or any(_is(f, "__init__") for f in node.body)
        ]
        if not (_has_test(tree) or classes):
            idle.append(_name(path))
    assert not idle


def test_no_test_is_left_out_without_a_reason() -> None:
    left_out = [
        f"{_name(path)}:{node.lineno}"
        for path in _modules(TESTS)
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Attribute)
        if node.attr == "xfail" or (node.attr in ("skip", "skipif") and id(node) not in _told(path))
    ]
    assert not left_out


def _told(path: Path) -> set[int]:
    """The calls of skip and skipif that say why, by identity of what is called."""
    return {
        id(call.func)
        for call in ast.walk(_tree(path))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if any(word.arg == "reason" for word in call.keywords)
        or (call.func.attr == "skip" and call.args)
    }


def test_the_signposts_point_into_the_package() -> None:
    for name in ("passes", "kernels", "targets"):
        assert (ROOT / name).readlink() == Path("clover_compile") / name


def _has_test(node: ast.Module | ast.ClassDef) -> bool:
    return any(_is(f, "test") for f in node.body)


def _is(node: ast.stmt, start: str) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.startswith(start)
