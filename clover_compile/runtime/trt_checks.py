"""What must hold before TensorRT or an engine is opened: each fault names both values and a remedy.

Every check reads files, package metadata or the driver; none imports TensorRT, which takes seconds.
"""

from __future__ import annotations

import glob
from importlib import metadata
from pathlib import Path
from typing import Any

from clover_compile.runtime import cuda_driver
from clover_compile.runtime.errors import BadBundle
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
    """The manifest's `device`; BadBundle if this machine cannot open (or finish) the bundle."""
    device = checked.manifest.get("device")
    faults = _stated(device, checked)
    if not faults:
        assert isinstance(device, dict)
        faults = [
            fault
            for fault in (
                _finished(device, finishing), _nodes(checked), _gpu(device, checked),
                _version(device), _native(checked, device, allow_native),
            )
            if fault
        ]  # fmt: skip
    if faults:
        raise BadBundle(one_line(str(checked.path)), one_line(faults[0]))
    assert isinstance(device, dict)
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


def _finished(device: dict[str, Any], finishing: bool) -> str:
    if finishing and device["finished"]:
        return "its engines are built already: run it as it is"
    if not finishing and not device["finished"]:
        return "it has no engines yet: run `clover-compile finish BUNDLE -o NEW`, or its finish.py"
    return ""


def _nodes(checked: Checked) -> str:
    """Every fused op is a plugin node of its Unit."""
    for name, unit in checked.manifest["units"].items():
        nodes = [node["op"] for node in unit.get("nodes", {}).values()]
        for op, row in checked.manifest["ops"].get(name, {}).items():
            if nodes.count(op) != row["count"]:
                found = nodes.count(op)
                return f"Unit {name} has {found} plugin nodes of {op} instead of {row['count']}"
    return ""


def _gpu(device: dict[str, Any], checked: Checked) -> str:
    wanted = " or ".join(f"{x / 10:.1f}" for x in device["capabilities"])
    needs = f"{checked.manifest['target']} needs an NVIDIA GPU of compute capability {wanted}"
    if cuda_driver.device_count() == 0:
        return f"{needs}; this machine has none: move the bundle to one that has"
    here = cuda_driver.capability()
    if here not in device["capabilities"]:
        return (
            f"{needs}; this machine has {here / 10:.1f} ({cuda_driver.device_name()}): build for it"
        )
    return ""


def _version(device: dict[str, Any]) -> str:
    """An engine opens with the very version that built it; a builder may be any of the range."""
    package = PACKAGES[device["module"]]
    built = device.get("built_with")
    wanted = device["versions"] if built is None else f"=={built}"
    remedy = f"pip install '{package}{wanted}'"
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"needs {package} {wanted}, which is not installed: {remedy}"
    fits = inside(found, device["versions"]) if built is None else found == built
    return "" if fits else f"{package} {found} is installed, the bundle needs {wanted}: {remedy}"


def _native(checked: Checked, device: dict[str, Any], allowed: bool) -> str:
    """The bundle's library is code: it must be one this installation made, or be let in."""
    if allowed:
        return ""
    own = file_hash(checked.path / device["plugin"])
    name = Path(device["plugin"]).name
    known = glob.glob(str(cache_folder() / "plugin" / "*" / name))
    if any(file_hash(Path(x)) == own for x in known):
        return ""
    return (
        f"its plugin has hash {own[:12]}, which is none that this installation compiled: "
        "give --allow-native if you trust where the bundle comes from"
    )
