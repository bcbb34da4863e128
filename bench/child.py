"""What fresh processes do: `python bench/child.py TASK BUNDLE`; prints one JSON line.

TASK is `memory`, `answer` or `open`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any


def _mapped() -> dict[str, int]:
    """Pss, Rss and Pss_Anon of this process, bytes."""
    rows = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    sizes = {row[0].rstrip(":"): 1024 * int(row[1]) for row in rows}
    return {name: sizes[name] for name in ("Pss", "Rss", "Pss_Anon")}


def memory(bundle: Path, threads: int) -> dict[str, Any]:
    """Opens every Unit and uses it with many different ids; Pss at its peak and afterwards."""
    sys.path.insert(0, str(bundle / "runner.pyz"))
    import numpy as np

    from clover_compile.runtime.manifest import read_bundle
    from clover_compile.runtime.ort_engine import OrtEngine
    from clover_compile.runtime.session import Session

    peak, done = _mapped(), threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            now = _mapped()
            peak.update({name: max(size, now[name]) for name, size in peak.items()})

    base = _mapped()
    watcher = threading.Thread(target=watch)
    watcher.start()
    session = Session.load(bundle)
    session.engine = OrtEngine(read_bundle(bundle), threads) if threads else session.engine
    c = session.sizes
    ids = np.random.default_rng(0).integers(0, c.vocab_size - 1, 512).tolist()
    state = session.new_state()
    session.commit(state, ids)
    session.preview(state, ids[:32])
    options: dict[str, Any] = {"max_new_tokens": 32, "decode": "self-speculate"}
    session.generate(ids[:40], **options)
    session.generate(ids[:40], max_new_tokens=32)
    done.set()
    watcher.join()
    after = _mapped()
    peak.update({name: max(size, after[name]) for name, size in peak.items()})
    return {"base": base, "peak": peak, "after": after}


def answer(bundle: Path) -> None:
    """Answers one message with the bundle's own runner until the first tokens stand."""
    sys.path.insert(0, str(bundle / "runner.pyz"))
    from clover_compile.runtime import Session

    def first(step: Any) -> None:
        if any(step.fixed):
            _leave({"tokens": sum(step.fixed)})

    session = Session.load(bundle)
    session.generate("The no-fly zone at Mere Island is cancelled.", on_step=first)


def bare(bundle: Path) -> None:
    """Opens the bundle's ONNX files with ONNX Runtime's own defaults and nothing else."""
    import onnxruntime as ort

    files = sorted(bundle.glob("*.onnx"))
    sessions = [ort.InferenceSession(str(f), providers=["CPUExecutionProvider"]) for f in files]
    _leave({"files": len(sessions)})


def _leave(found: dict[str, Any]) -> None:
    """Prints and ends the process at once: closing down is no part of a first token."""
    print(json.dumps(found | {"time": time.time(), "cpu": time.process_time()}), flush=True)
    os._exit(0)


def main() -> None:
    """Runs the task that is named on the command line."""
    task, bundle = sys.argv[1], Path(sys.argv[2])
    if task == "memory":
        print(json.dumps(memory(bundle, int(sys.argv[3]))))
    else:
        {"answer": answer, "open": bare}[task](bundle)


if __name__ == "__main__":
    main()
