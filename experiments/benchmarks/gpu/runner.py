"""Stages, each a process with a time limit, each result a line of JSON.

A line is on disk as soon as its stage has ended. Killed at any moment and started again with the
same files, the runner goes on with what is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
RESULTS, LOG = "results.jsonl", "log.txt"
_LOGGED_BYTES = 20_000  # the end of a stage's output
AT_ONCE = 4  # stages that do not need the device alone
_LOOK_S = 0.02  # between looks at who has ended


@dataclass(frozen=True)
class Stage:
    """One thing to find out.

    Attributes:
        name: Name in the results.
        call: ``module:function`` of a generator that yields figures as soon as they are known.
        arguments: Of the function, behind the settings.
        expected_s: About how long it takes on a GPU. It begins only if so much time is left.
        limit_s: When it is killed.
        dry: Whether it is a part of the dry run.
        alone: Whether nothing else may run meanwhile: its figures are times or memory.
    """

    name: str
    call: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    expected_s: float = 30.0
    limit_s: float = 120.0
    dry: bool = True
    alone: bool = True


def run_stages(
    stages: Sequence[Stage],
    out: Path,
    *,
    done: Iterable[Path] = (),
    deadline_s: float | None = None,
    settings: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> int:
    """Run the stages that are not finished yet; return how many of them failed or ran out of time.

    Args:
        stages: In the order of their worth.
        out: Folder of the results; those that it has count as well.
        done: Files of results of earlier calls.
        deadline_s: Seconds from now at which everything ends.
        settings: What all stages get to know.
        environment: Environment of the stages; unset: this process's.
        facts: Written into every line, such as the commit.
    """
    settings, facts = dict(settings or {}), dict(facts or {})
    dry = bool(settings.get("dry"))
    deadline = time.monotonic() + (float("inf") if deadline_s is None else deadline_s)
    out.mkdir(parents=True, exist_ok=True)
    finished = _finished([*done, out / RESULTS], dry)
    failures = 0
    running: list[_Running] = []

    def wait(most: int) -> None:
        """Wait until at most so many stages run; write what they found."""
        nonlocal failures
        while len(running) > most:
            ended = next((one for one in running if one.has_ended()), None)
            if ended is None:
                time.sleep(_LOOK_S)
                continue
            running.remove(ended)
            line = {"stage": ended.stage.name, **ended.result(out / LOG), **facts}
            line["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
            append(out / RESULTS, line | ({"dry": True} if dry else {}))
            finished.update({ended.stage.name} if line["status"] == "ok" else ())
            failures += line["status"] != "ok"
            _say(line)

    try:
        for stage in stages:
            if stage.name in finished:
                continue
            alone = stage.alone or any(one.stage.alone for one in running)
            wait(0 if alone else AT_ONCE - 1)
            left = deadline - time.monotonic()
            if left < (1.0 if dry else stage.expected_s):
                print(f"{stage.name}: left out, {left:.0f} s are not enough", flush=True)
                continue
            print(f"{stage.name} ...", flush=True)
            limit_s = min(stage.limit_s, left)
            given = {**settings, "limit_s": limit_s}
            running.append(_Running(stage, given, limit_s, environment))
        wait(0)
    finally:
        for one in running:
            one.end()
    return failures


def _say(line: Mapping[str, Any]) -> None:
    said = line.get("error", json.dumps(line["figures"])).strip().splitlines()
    print(f"{line['stage']}: {line['status']}, {line['seconds']:.0f} s, {said[-1]}", flush=True)


def _finished(files: Iterable[Path], dry: bool) -> set[str]:
    lines = [line for line in read_results(files) if line["status"] == "ok"]
    return {line["stage"] for line in lines if bool(line.get("dry")) == dry}


def read_results(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the results of files that exist; a line that a kill has cut in half is left out."""
    found = []
    for path in dict.fromkeys(Path(file).resolve() for file in files):
        if path.exists():
            for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    line = json.loads(text)
                    if isinstance(line, dict) and {"stage", "status"} <= set(line):
                        found.append(line)
    return found


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Write a line so that it outlasts this process and, on an honest disk, the machine."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # half a line: what wrote it was killed
                file.write(b"\n")
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


class _Running:
    """A stage under way, in a process group of its own."""

    def __init__(
        self,
        stage: Stage,
        settings: Mapping[str, Any],
        limit_s: float,
        environment: Mapping[str, str] | None,
    ) -> None:
        self.stage, self._limit_s, self._began = stage, limit_s, time.monotonic()
        self._scratch = tempfile.TemporaryDirectory()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # `result` closes it
        self._report = Path(self._scratch.name) / "report.json"
        given = json.dumps({"settings": settings, "arguments": dict(stage.arguments)})
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "experiments.benchmarks.gpu.child",
                stage.call,
                given,
                str(self._report),
            ],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,  # closes when this process goes: the stage then ends itself
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def has_ended(self) -> bool:
        """Whether it has come to its end, or its time is up."""
        late = time.monotonic() - self._began > self._limit_s
        return late or self._process.poll() is not None

    def end(self) -> None:
        """End it with all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def result(self, log: Path) -> dict[str, Any]:
        """End it; return status, seconds and figures."""
        status = self._process.poll()
        self.end()
        seconds = time.monotonic() - self._began
        with self._scratch, self._output:
            text = _tail(self._output)
            found = json.loads(self._report.read_text()) if self._report.exists() else {}
        with log.open("a", encoding="utf-8") as file:
            file.write(f"=== {self.stage.name}\n{text}\n")
        line = {"figures": {}, "device": "", "torch": "", **found}
        if status is None:
            error = f"killed after {self._limit_s:.0f} s\n{text[-1500:]}"
            line |= {"status": "timeout", "error": error}
        elif "status" not in found:  # not even an exception: killed, or it never came to its code
            error = f"ended with status {status}\n{text[-1500:]}"
            line |= {"status": "failed", "error": error}
        command = f"--stages {self.stage.name}"
        return {**line, "seconds": round(seconds, 2), "command": command}


def _tail(output: Any) -> str:
    output.seek(0, os.SEEK_END)
    output.seek(max(0, output.tell() - _LOGGED_BYTES))
    return output.read().decode(errors="replace")
