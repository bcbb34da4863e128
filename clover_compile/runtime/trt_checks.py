"""What must hold before TensorRT or an engine is opened: each fault names both values and a remedy.

Every check reads files, package metadata or the driver; none imports TensorRT, which takes seconds.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from clover_compile.runtime import cuda_driver
from clover_compile.runtime.errors import BadBundle, WrongMachine
from clover_compile.runtime.hashes import cache_folder, file_hash
from clover_compile.runtime.manifest import Checked
from clover_compile.runtime.strict_json import quote
from clover_compile.runtime.terminal import one_line
from clover_compile.runtime.versions import inside

PACKAGES = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx"}
"""Module -> package."""

KEYS: dict[str, type] = {
    "module": str, "versions": str, "capabilities": list, "plugin": str, "finished": bool,
}  # fmt: skip
"""What a manifest states under `device`."""


def check(checked: Checked, allow_native: bool, finishing: bool = False) -> dict[str, Any]:
    """The manifest's `device`; BadBundle or WrongMachine if this machine cannot open (or finish)
    the bundle."""
    if checked.manifest.get("engine") not in ("trt", None):
        what = f"it is for target {checked.manifest['target']}, which needs no finish"
        raise BadBundle(one_line(str(checked.path)), one_line(what), "run it as it is")
    stated = checked.manifest.get("device")
    faults = _stated(stated, checked)
    device: dict[str, Any] = stated if isinstance(stated, dict) else {}
    if not faults and (wrong_step := _finished(device, finishing)):
        raise BadBundle(one_line(str(checked.path)), *wrong_step)
    fault = faults[0] if faults else _nodes(checked)
    if fault:
        raise BadBundle(one_line(str(checked.path)), one_line(fault))
    for wrong in (_gpu(device), _version(device)):
        if wrong is not None:
            needs, here, remedy = map(one_line, wrong)
            path, target = one_line(str(checked.path)), checked.manifest["target"]
            raise WrongMachine(path=path, target=target, needs=needs, here=here, remedy=remedy)
    fault = _native(checked, device, allow_native)
    if fault:
        remedy = "give --allow-native if you trust where the bundle comes from"
        raise BadBundle(one_line(str(checked.path)), one_line(fault), remedy)
    return device


def _stated(device: object, checked: Checked) -> list[str]:
    if not isinstance(device, dict):
        return [f"manifest.json: device is {quote(device, 40)}"]
    faults = [
        f"manifest.json: device.{key} is {quote(device.get(key), 40)}"
        for key, kind in KEYS.items()
        if type(device.get(key)) is not kind
    ]
    if not faults and device["module"] not in PACKAGES:
        faults.append(f"manifest.json: device.module is {quote(device['module'], 40)}")
    if not faults and device["plugin"] not in checked.manifest["files"]:
        faults.append(f"the plugin {quote(device['plugin'])} is not in the bundle")
    return faults


def _finished(device: dict[str, Any], finishing: bool) -> tuple[str, str] | None:
    """What is wrong and what to do, where the bundle is at another step."""
    if finishing and device["finished"]:
        return "its engines are built already", "run it as it is"
    if not finishing and not device["finished"]:
        remedy = "run `clover-compile finish BUNDLE -o NEW`, or its finish.py"
        return "it has no engines yet", remedy
    return None


def _nodes(checked: Checked) -> str:
    """Every fused op is a plugin node of its Unit."""
    for name, unit in checked.manifest["units"].items():
        nodes = [node["op"] for node in unit.get("nodes", {}).values()]
        for op, row in checked.manifest["ops"].get(name, {}).items():
            if nodes.count(op) != row["count"]:
                found = nodes.count(op)
                return f"Unit {name} has {found} plugin nodes of {op} instead of {row['count']}"
    return ""


Wrong = tuple[str, str, str] | None
"""What is needed, what is here, and what to do."""


def wrong_gpu(capabilities: Sequence[int]) -> Wrong:
    """Whether the machine has a GPU of one of these compute capabilities (times ten)."""
    wanted = " or ".join(f"{x / 10:.1f}" for x in capabilities)
    needs, remedy = f"an NVIDIA GPU of compute capability {wanted}", "build for this machine"
    if cuda_driver.device_count() == 0:
        return needs, f"none ({cuda_driver.why_no_device()})", remedy
    here = cuda_driver.capability()
    if here in capabilities:
        return None
    return needs, f"{here / 10:.1f} ({cuda_driver.device_name()})", remedy


def _gpu(device: dict[str, Any]) -> Wrong:
    return wrong_gpu(device["capabilities"])


def _version(device: dict[str, Any]) -> Wrong:
    """An engine opens with the very version that built it; a builder may be any of the range."""
    package = PACKAGES[device["module"]]
    built = device.get("built_with")
    wanted = device["versions"] if built is None else f"=={built}"
    needs, remedy = f"{package} {wanted}", f"pip install '{package}{wanted}'"
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        return needs, "none", remedy
    fits = inside(found, device["versions"]) if built is None else found == built
    return None if fits else (needs, found, remedy)


def _native(checked: Checked, device: dict[str, Any], allowed: bool) -> str:
    """The bundle's library is code: it must be one this installation made, or be let in."""
    if allowed:
        return ""
    own = file_hash(checked.path / device["plugin"])
    name = Path(device["plugin"]).name
    known = glob.glob(str(cache_folder() / "plugin" / "*" / name))
    if any(file_hash(Path(x)) == own for x in known):
        return ""
    return f"its plugin has hash {own[:12]}, which is none that this installation compiled"
