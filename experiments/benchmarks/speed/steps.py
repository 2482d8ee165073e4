"""Images per second of train.py, of the bare step and of other trainers, in turn.

Every arm runs in a process of its own and waits while another one is timed. A ratio is taken
between turns that followed each other, so that a slow spell of the machine falls on both.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from experiments.benchmarks.speed.arms import Settings

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 900.0


class Arm:
    """A process that trains on so many images when it is asked to."""

    def __init__(self, name: str, settings: Settings) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "experiments.benchmarks.speed.arms",
                name,
                json.dumps(asdict(settings)),
            ],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        if self._line() != "ready":
            raise RuntimeError(f"the arm {name!r} did not start")

    def run(self, images: int) -> tuple[float, int]:
        """Return images per second, and the peak memory so far in MiB."""
        self._process.stdin.write(f"{images}\n")
        self._process.stdin.flush()
        answer = json.loads(self._line())
        return answer["images"] / answer["seconds"], answer["peak_mib"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _line(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            said = self._errors.read()[-1500:]
            raise RuntimeError(f"an arm ended with status {self._process.wait()}: {said}")
        return line.strip()


class TimmScript:
    """timm's own training script, stopped with SIGSTOP between its turns.

    It tells of every update on a line of its log, which is what is counted. Its loader processes
    stop with it.
    """

    def __init__(self, script: Path, settings: Settings) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        flags = timm_flags(settings, self._scratch.name)
        self._batch = settings.batch
        self._process = subprocess.Popen(
            [sys.executable, "-m", "experiments.benchmarks.speed.timm_script", str(script), *flags],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._next_update()
        self._send(signal.SIGSTOP)

    def run(self, images: int) -> tuple[float, int]:
        """See `Arm.run`."""
        self._send(signal.SIGCONT)
        self._next_update()  # which was under way when it was stopped
        began, updates = time.perf_counter(), max(1, round(images / self._batch))
        for _ in range(updates):
            self._next_update()
        seconds = time.perf_counter() - began
        self._send(signal.SIGSTOP)
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return updates * self._batch / seconds, int(re.search(r"VmHWM:\s+(\d+)", status)[1]) >> 10

    def close(self) -> None:
        """End the process and its loaders."""
        self._send(signal.SIGKILL)
        self._process.communicate()
        self._scratch.cleanup()

    def _next_update(self) -> None:
        said = []
        for line in self._process.stdout:
            if line.startswith("Train: "):
                return
            said.append(line)
        raise RuntimeError(f"timm's script ended: {''.join(said[-5:])}")

    def _send(self, number: int) -> None:
        os.killpg(self._process.pid, number)


def timm_flags(settings: Settings, output: str) -> list[str]:
    """Return flags of timm's script for the same data, model, batch, precision and device."""
    flags = ["--data-dir", settings.dataset, "--model", settings.model, "--opt", "sgd"]
    flags += ["--batch-size", str(settings.batch), "--log-interval", "1", "--epochs", "9"]
    flags += ["--img-size", str(settings.resolution), "--workers", "2", "--no-prefetcher"]
    flags += ["--device", "cuda" if torch.cuda.is_available() else "cpu"]
    flags += ["--lr", "0.01", "--scale", "1", "1", "--ratio", "1", "1", "--output", output]
    if settings.precision == "bf16":
        flags += ["--amp", "--amp-dtype", "bfloat16"]
    return flags


def compare(arms: Mapping[str, Any], images: int, turns: int) -> dict[str, dict[str, Any]]:
    """Let arms take turns, in alternating order; return their images per second, turn by turn."""
    rates: dict[str, list[float]] = {name: [] for name in arms}
    peaks: dict[str, int] = {}
    for arm in arms.values():  # warm up
        arm.run(1)
        arm.run(images // 2)
    for turn in range(turns):
        order = list(arms) if turn % 2 == 0 else list(arms)[::-1]
        for name in order:
            rate, peaks[name] = arms[name].run(images)
            rates[name].append(rate)
    return {name: {"rates": rates[name], "peak_mib": peaks[name]} for name in arms}


def ratio(found: Mapping[str, Mapping[str, Any]], one: str, other: str) -> float:
    """Return the median over turns of one arm's rate over another's."""
    pairs = zip(found[one]["rates"], found[other]["rates"], strict=True)
    return median(a / b for a, b in pairs)


def training_rows(
    base: Settings,
    precisions: Sequence[str],
    resolutions: Sequence[int],
    *,
    images: int,
    turns: int,
    timm_script: Path | None,
    compiled: bool = False,
) -> list[dict[str, Any]]:
    """Return a row for each arm, precision and resolution."""
    rows = []
    for precision in precisions:
        for resolution in resolutions:
            settings = replace(base, precision=precision, resolution=resolution)
            arms: dict[str, Any] = {}
            try:
                arms["bare step"] = Arm("bare", settings)
                arms["train.py, 1 worker"] = Arm("rounds", settings)
                arms["train.py, 4 workers"] = Arm("rounds", replace(settings, workers=4))
                if compiled:
                    arms["train.py --compile"] = Arm("rounds", replace(settings, compiled=True))
                arms["plain loop"] = Arm("plain", settings)
                arms["plain loop, 2 loaders"] = Arm("plain", replace(settings, loader_workers=2))
                if precision != "no":
                    arms["plain loop, float32"] = Arm("plain", replace(settings, precision="no"))
                if timm_script is not None:
                    arms["timm's script"] = TimmScript(timm_script, settings)
                found = compare(arms, images, turns)
            finally:
                for arm in arms.values():
                    arm.close()
            rows += [
                {
                    "part": "training",
                    "what": name,
                    "precision": "float32" if precision == "no" else precision,
                    "resolution": resolution,
                    "batch": base.batch,
                    "median": f"{median(values['rates']):.1f}",
                    "low": f"{min(values['rates']):.1f}",
                    "high": f"{max(values['rates']):.1f}",
                    "unit": "images/s",
                    "of_bare_step": f"{ratio(found, name, 'bare step'):.3f}",
                    "train.py_over_it": f"{ratio(found, 'train.py, 1 worker', name):.3f}",
                    "peak_mib": values["peak_mib"],
                }
                for name, values in found.items()
            ]
    return rows
