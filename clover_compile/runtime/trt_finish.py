"""Finishes a `trt-*` bundle where TensorRT and the GPU are: builds engines, compares, writes anew.

`clover-compile finish` and the bundle's own finish.py end up here. Never run where this is built.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from clover_compile.runtime import cuda_driver, sealing
from clover_compile.runtime.engine import Array, Engine
from clover_compile.runtime.errors import CloverError, FinishFailed, OutputTaken
from clover_compile.runtime.hashes import cache_folder
from clover_compile.runtime.manifest import Checked, is_text, read_bundle
from clover_compile.runtime.session import Session
from clover_compile.runtime.terminal import one_line
from clover_compile.runtime.trt_build import Builder, EngineRefused, requests
from clover_compile.runtime.trt_checks import PACKAGES, check

Say = Callable[[str], None]

PROBES = "probes.safetensors"

OWN = ("manifest.json", "MANIFEST.sha256", "verdict.json", "costs.json", "finish.py")
"""Files of the parent that the new bundle does not take over, beside its ONNX."""

MAX_ERROR, TOP1 = 3e-2, 0.99
"""What stored logits must be met within, as in a proof: of the largest logit, and of the rows."""

LEFT = "its engines meet the stored probes; `clover-compile verify` gives the whole verdict"

NOTHING = "the bundle holds no probes, so nothing was compared"


def finish(path: Path, output: Path, say: Say, allow_native: bool = False) -> dict[str, Any]:
    """Builds the engines of the bundle at `path` and writes a new bundle to `output`.

    Returns {bundle, id, parent, outcome, reason, probes}. Raises OutputTaken, BadBundle if bundle,
    machine or versions do not fit, FinishFailed if TensorRT refuses a network or answers differ;
    then nothing is left at `output`.
    """
    checked = read_bundle(path, recheck=True)
    _check_output(output)
    device = check(checked, allow_native, finishing=True)
    folder = output.absolute().parent / f".{output.name}.building-{os.getpid()}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise OutputTaken(path=one_line(str(output)), reason=error.strerror) from None
    try:
        _link(checked, folder)
        _engines(checked, device, folder, say)
        identity = sealing.write_manifest(folder, _manifest(checked, device))
        waiting = {"outcome": "unproved", "reason": "it is being finished", "bundle": identity}
        sealing.write_verdict(folder, waiting)
        say("comparing with the stored probes")
        figures = _compare(read_bundle(folder, unfinished=True))
        sealing.flush(folder)
        verdict = {
            "outcome": "unproved", "reason": LEFT if figures else NOTHING, "probes": figures,
            "bundle": identity,
        }  # fmt: skip
        sealing.write_verdict(folder, verdict)
        folder.rename(output)
        sealing.sync(output.absolute().parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"bundle": str(output), "id": identity, "parent": checked.identity, **verdict}


def _check_output(output: Path) -> None:
    """Raises OutputTaken for what would fail only after the engines were built."""
    reason = ""
    try:
        if output.exists() or output.is_symlink():
            reason = "it exists"
        elif not is_text(output):
            reason = "its name is no UTF-8 text"
        elif any((x / "MANIFEST.sha256").is_file() for x in output.absolute().parents):
            reason = "it lies in a bundle, which takes nothing more"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    if reason:
        raise OutputTaken(path=one_line(str(output)), reason=reason)


def _link(checked: Checked, folder: Path) -> None:
    """Takes over the parent's files, by hard link where the file system can."""
    for name in checked.manifest["files"]:
        if name in OWN or name.endswith(".onnx"):
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(checked.path / name, folder / name)
        except OSError:
            shutil.copyfile(checked.path / name, folder / name)


def _engines(checked: Checked, device: Mapping[str, Any], folder: Path, say: Say) -> None:
    """Builds every engine; what TensorRT measured is kept for the next time."""
    gpu = "".join(c if c.isalnum() else "-" for c in cuda_driver.device_name())
    version = metadata.version(PACKAGES[device["module"]])
    timings = cache_folder() / "timings" / f"{device['module']}-{version}-{gpu}.cache"
    try:
        builder = Builder(device["module"], checked.path / device["plugin"], say)
        builder.use_timings(timings.read_bytes() if timings.is_file() else b"")
        for i, request in enumerate(requests(checked.manifest["units"], checked.path, folder), 1):
            say(f"building engine {i} of {len(checked.manifest['units'])}: {request.unit}")
            builder.build(request)
    except EngineRefused as error:
        raise FinishFailed(reason=str(error)) from None
    timings.parent.mkdir(parents=True, exist_ok=True)
    timings.write_bytes(builder.timings())


def _manifest(checked: Checked, device: Mapping[str, Any]) -> dict[str, Any]:
    """The parent's manifest with engines in the place of ONNX."""
    version = metadata.version(PACKAGES[device["module"]])
    units = {
        name: {**unit, "file": f"{name}.engine"} for name, unit in checked.manifest["units"].items()
    }
    return {
        **checked.manifest, "units": units, "parent": checked.identity,
        "device": {**device, "finished": True, "built_with": version,
                   "built_on": cuda_driver.device_name()},
    }  # fmt: skip


# The stored probes, through the public session.


def _compare(checked: Checked) -> dict[str, float]:
    """Largest error and top-1 agreement over the stored rows, if the bundle holds any;
    FinishFailed where they miss."""
    from clover_compile.runtime.bundle import rules_and_sizes
    from clover_compile.runtime.trt_engine import TrtEngine

    if PROBES not in checked.manifest["files"]:
        return {}
    rules, sizes = rules_and_sizes(checked)
    engine: Engine = TrtEngine(checked, allow_native=True)
    session = Session(engine, sizes, rules, checked.manifest["context"])
    return compare(session, read_arrays(checked.path / PROBES))


def compare(session: Session, probes: Mapping[str, Array]) -> dict[str, float]:
    """Runs the stored commits and previews; rows that follow a near-tie are not compared."""
    state, start = session.new_state(), 0
    worst, agree, rows = 0.0, 0.0, 0
    prompt, blocks = probes["in.prompt"][0], probes["in.blocks"][0]
    block = session.rules.block_size
    for part in ("near", "far"):
        want = probes[f"out.commit.{part}"][0]
        stop = int(probes["in.first"]) if part == "near" else len(prompt)
        pairs = [
            (f"commit.{part}", session.commit(state, prompt[start:stop].tolist())[-len(want) :])
        ]
        start = stop
        half = blocks[: len(blocks) // 2] if part == "near" else blocks[len(blocks) // 2 :]
        for i in range(sum(n.startswith(f"out.preview.{part}.") for n in probes) // 2):
            ids = half[i * block : (i + 1) * block][: len(half)]
            pairs.append((f"preview.{part}.{i}", session.preview(state, ids.tolist())))
        for name, found in pairs:
            count = int(probes[f"out.{name}.rows"])
            meant, got = probes[f"out.{name}"][0, :count], found[:count]
            if count:
                scale = max(float(np.abs(meant).max()), 1e-12)
                # NaN must not lose against a number.
                worst = float(np.maximum(worst, np.abs(meant - got).max() / scale))
                agree += float((meant.argmax(-1) == got.argmax(-1)).sum())
                rows += count
    share = agree / max(rows, 1)
    if not (worst <= MAX_ERROR and share >= TOP1):
        raise FinishFailed(
            reason=f"logits differ by {worst:.1e} of the largest (allowed {MAX_ERROR:.0e}), top-1 "
            f"agrees in {share:.1%} of {rows} rows (allowed {TOP1:.0%})"
        )
    return {"rows": rows, "max_error": worst, "top1": share}


def read_arrays(path: Path) -> dict[str, Array]:
    """The arrays of a safetensors file of numbers numpy knows."""
    kinds = {"F64": "f8", "F32": "f4", "I64": "i8", "I32": "i4", "BOOL": "?"}
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    made = {}
    for name, row in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            start, stop = (8 + length + x for x in row["data_offsets"])
            flat = np.frombuffer(data[start:stop], np.dtype(kinds[row["dtype"]]))
            made[name] = flat.reshape(row["shape"])
    return made


def main(arguments: Sequence[str], bundle: Path) -> int:
    """finish.py: finishes the bundle it lies in."""
    parser = argparse.ArgumentParser(
        prog="finish.py", description="Builds the engines of this bundle and writes a new bundle."
    )
    default = bundle.with_name(f"{bundle.name.removesuffix('.clover')}-finished.clover")
    parser.add_argument("-o", "--output", type=Path, default=default, metavar="NEW",
                        help="the new bundle  [default: %(default)s]")  # fmt: skip
    asked = parser.parse_args(arguments)
    try:
        result = finish(bundle, asked.output, _say, allow_native=True)
    except CloverError as error:
        _say(f"finish.py: {one_line(str(error))}")
        return error.exit_status
    print(f"{result['bundle']}: {result['outcome']}: {result['reason']}")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
