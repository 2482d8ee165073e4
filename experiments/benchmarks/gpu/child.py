"""The process of one stage.

python -m experiments.benchmarks.gpu.child MODULE:FUNCTION JSON REPORT
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ERROR_LINES = 25


@dataclass(frozen=True)
class Settings:
    """What a stage gets to know.

    Attributes:
        dry: Tiny sizes, on whatever device there is.
        data: A folder of CIFAR-100, a hub id, or ``digits``.
        work: Folder for runs; what is left in it a later call goes on with.
        limit_s: Seconds until the stage is killed.
    """

    dry: bool = False
    data: str = "uoft-cs/cifar100"
    work: str = "runs/gpu"
    limit_s: float = 600.0


def main() -> None:
    """Run a stage; write what it has found after each figure, so that a kill leaves the rest."""
    call, given, path = sys.argv[1:]
    threading.Thread(target=_end_with_the_runner, daemon=True).start()
    given, report = json.loads(given), {"figures": {}}
    try:
        module, _, name = call.partition(":")
        stage = getattr(importlib.import_module(module), name)
        for figures in stage(Settings(**given["settings"]), **given["arguments"]):
            report["figures"] |= figures
            report |= _device()  # now: many stages import torch when they begin
            _write(Path(path), report)
        report["status"] = "ok"
    except BaseException as error:
        traceback.print_exc()
        lines = traceback.format_exc().splitlines()[-_ERROR_LINES:]
        report |= {
            "status": "timeout" if isinstance(error, TimeoutError) else "failed",
            "error": "\n".join(lines),
        }
    report |= _device()
    _write(Path(path), report)
    sys.exit(report["status"] != "ok")


def _write(path: Path, report: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report))
    temporary.replace(path)


def _device() -> dict[str, str]:
    torch = sys.modules.get("torch")  # a stage that does not need it does not wait for it
    if torch is None:
        return {}
    try:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    except RuntimeError as error:  # the stage's fault has taken the device along
        name = f"cuda ({str(error).strip().splitlines()[0]})"
    return {"device": name, "torch": torch.__version__}


def _end_with_the_runner() -> None:
    """End this process and all that it has started when the runner is gone, killed or not."""
    os.read(0, 1)  # nothing is ever written: returns at the end of the pipe
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
