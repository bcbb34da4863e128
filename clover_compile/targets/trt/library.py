"""Compiles the TensorRT plugin on first use and keeps the library by the hash of what made it."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from clover_compile.errors import NoCompiler, PluginFailed
from clover_compile.runtime.hashes import cache_folder

SOURCES = Path(__file__).parent / "plugin"
NAME = "libclover_trt.so"

HEADERS = (
    ("kernel_lens", "include/tensorrt", "NvInferRuntime.h"),
    ("triton", "backends/nvidia/include", "cuda.h"),
)
"""Package, folder of headers in it, a header that must be there."""

COMPILERS = ("g++", "clang++")

FLAGS = (
    "-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-static-libgcc",
    "-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wall", "-Wextra", "-Werror",
    "-Wno-unused-parameter", "-Wno-deprecated-declarations",
)  # fmt: skip
"""The library holds its own C++ runtime, hidden from the process, and links nothing of CUDA or
TensorRT: it loads wherever its glibc does."""


@dataclass(frozen=True)
class Library:
    """The compiled plugin."""

    path: Path
    sources: str
    """SHA-256 over sources, flags, compiler and header version."""


def sources() -> list[Path]:
    """The plugin's source files, in order."""
    return sorted(x for x in SOURCES.iterdir() if x.suffix in (".cpp", ".h"))


def library() -> Library:
    """The plugin for this machine's processor; compiled if it is not in the cache.

    Raises NoCompiler without a C++ compiler or headers, PluginFailed with the compiler's words.
    """
    compiler, headers = _compiler(), _headers()
    digest = _digest(compiler, headers)
    path = cache_folder() / "plugin" / digest[:16] / NAME
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / NAME
            _run(compiler, headers, made)
            made.replace(path)
    return Library(path, digest)


def _compiler() -> str:
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        raise NoCompiler(missing=" or ".join(COMPILERS), remedy="it comes with your system")
    return found


def _headers() -> list[Path]:
    folders = []
    for package, folder, header in HEADERS:
        spec = importlib.util.find_spec(package)
        places = [] if spec is None else list(spec.submodule_search_locations or [])
        found = next(
            (Path(x) / folder for x in places if (Path(x) / folder / header).is_file()), None
        )
        if found is None:
            remedy = "pip install 'clover-compile[trt]'"
            raise NoCompiler(missing=f"{header} (package {package})", remedy=remedy)
        folders.append(found)
    return folders


def _digest(compiler: str, headers: list[Path]) -> str:
    version = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, check=False)
    digest = hashlib.sha256()
    parts = [" ".join(FLAGS).encode(), Path(compiler).name.encode(), version.stdout]
    parts += [(folder / header).read_bytes()
              for folder, (_, _, header) in zip(headers, HEADERS, strict=True)]  # fmt: skip
    for part in parts + [x.name.encode() + b"\0" + x.read_bytes() for x in sources()]:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _run(compiler: str, headers: list[Path], made: Path) -> None:
    """Names are relative: the same sources make the same library."""
    includes = [word for folder in headers for word in ("-isystem", str(folder))]
    names = [x.name for x in sources() if x.suffix == ".cpp"]
    command = [compiler, *FLAGS, *includes, *names, "-o", str(made), "-ldl"]
    done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, check=False)
    if done.returncode:
        words = next((x for x in done.stderr.splitlines() if "error" in x), done.stderr[:200])
        raise PluginFailed(compiler=compiler, reason=words.strip())
