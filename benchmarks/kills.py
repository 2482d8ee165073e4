"""Kill runs at random moments, resume them, compare with the unbroken run bit by bit.

    python -m benchmarks.kills            # 50 kills, about 20 minutes on two cores

Simulated clusters are killed with SIGKILL in the middle of whatever they do; of real processes all
are (a machine that goes down), or one, which torchrun then restarts together with the others. What
is compared: model.safetensors, and every line of metrics.jsonl but for measured times.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from benchmarks.record import record
from dbsl.meter import MEASURED

ROOT = Path(__file__).resolve().parent.parent
COMMON = shlex.split(
    "--model test_resnet --train-samples 240 --eval-samples 40 --resolutions 16,32 --epochs 5 "
    "--lr-milestones 3 --slope 0.001 --intercept 0.01 --lr 0.02 --report-to none "
    "--dropout 0.1,0.2 --cpu-threads 1 --log-every 2"
)
ROUNDS = shlex.split("--large-batch-size 10 --small-workers 1 --rounds-per-epoch 2")
JOINT = ["--local-batch-sizes"]
SIMULATED = {
    "bsp": [*ROUNDS],
    "ssp": [*ROUNDS, "--sync", "ssp", "--slowdown", "0:2.0"],
    "asp": [*ROUNDS, "--sync", "asp", "--slowdown", "3:2.5", "--time-noise", "0.1"],
    "bsp, balance dynamic": [*ROUNDS, "--balance", "dynamic", "--slowdown", "3:2.5"],
    "step": ["--sync", "step", *JOINT, "4,4,8,12", "--rounds-per-epoch", "2"],
    "gradients bsp": ["--push", "gradients", *JOINT, "4,4,8,12", "--push-every", "3"],
    "gradients asp": ["--push", "gradients", "--sync", "asp", *JOINT, "4,4,8,12"],
}
REAL = {
    "bsp, 2 processes": (2, [*ROUNDS]),
    "bsp, 3 processes": (3, [*ROUNDS]),
    "step, 2 processes": (2, ["--sync", "step", *JOINT, "7,13"]),
    "step, 3 processes": (3, ["--sync", "step", *JOINT, "5,5,10"]),
}
SAVES = ("1", "0.004m")  # each epoch; about four times a second, in the middle of rounds


def main() -> None:
    """Run the kills and write results/kills.csv."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="modes whose name begins so")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(arguments.seed)
    modes = [m for m in [*SIMULATED, *REAL] if m.startswith(arguments.only or "")]
    unbroken, rows = {}, []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(arguments.kills):
            mode = modes[number % len(modes)]
            if mode not in unbroken:
                folder = Path(scratch) / f"unbroken-{len(unbroken)}"
                assert run(mode, folder) == 0, f"the unbroken run of {mode} failed"
                # From the run folder's first file to the last: the start before it is left out.
                times = [path.stat().st_mtime for path in folder.iterdir()]
                unbroken[mode] = fingerprint(folder), max(times) - min(times)
            rows.append(kill(mode, Path(scratch) / "killed", rng, *unbroken[mode]))
            print(json.dumps(rows[-1]), flush=True)
    good = sum(row["same_bits"] for row in rows)
    print(f"{good} of {len(rows)} runs ended with the bits of the unbroken one")
    if not arguments.only:
        record(ROOT / "results/kills.csv", rows, "python -m benchmarks.kills")
    sys.exit(good != len(rows))


def kill(mode: str, folder: Path, rng: random.Random, expected: str, whole_s: float) -> dict:
    """Start a run, kill it, resume it until it ends."""
    every, how = rng.choice(SAVES), "killed"
    arguments = ["--checkpoint-every", every, "--resume", "auto"]
    if mode in REAL and rng.random() < 0.5:
        how = "one rank killed, restarted by torchrun"
    while True:  # until it is killed before its end
        shutil.rmtree(folder, ignore_errors=True)
        moment = rng.uniform(0.0, 1.0) * whole_s
        done = run(mode, folder, *arguments, kill_after_s=moment, one_rank=how != "killed")
        if how != "killed" or not (folder / "summary.json").exists():
            break
    saved = sorted(p.parent.name for p in folder.glob("checkpoints/*/manifest.json"))
    attempts = 0
    while not (folder / "summary.json").exists() and attempts < 3:
        attempts += 1
        done = run(mode, folder, *arguments)
    return {
        "mode": mode,
        "how": how,
        "checkpoint_every": every,
        "killed_after_s": round(moment, 2),
        "unbroken_s": round(whole_s, 2),
        "checkpoints": len(saved),
        "resumed_times": attempts,
        "status": done,
        "same_bits": done == 0 and fingerprint(folder) == expected,
    }


def fingerprint(folder: Path) -> str:
    """Return a hash of a run's final weights and of its metrics but for times."""
    if not (folder / "model.safetensors").exists():
        return "no model"
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes())
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        row = {k: v for k, v in row.items() if "time" not in k and k not in MEASURED}
        digest.update(json.dumps(row, sort_keys=True).encode())
    return digest.hexdigest()


def run(
    mode: str,
    folder: Path,
    *arguments: str,
    kill_after_s: float | None = None,
    one_rank: bool = False,
) -> int:
    """Run train.py to its end, or kill it after some seconds; return its exit status."""
    if mode in SIMULATED:
        flags = [*COMMON, *SIMULATED[mode], "--output-dir", str(folder), *arguments]
        return _run_forked(flags, folder, kill_after_s)
    processes, own = REAL[mode]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), "--max-restarts", "1" if one_rank else "0"]
    command += ["train.py", *COMMON, *own, "--output-dir", str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    sink = open(os.environ.get("KILLS_OUTPUT", os.devnull), "a")  # noqa: SIM115
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=sink,
        stderr=sink,
        start_new_session=True,
    )
    if kill_after_s is not None:
        _wait_for_start(folder)
        time.sleep(kill_after_s)
        ranks = _children(process.pid)
        for victim in ranks[-1:] if one_rank else [process.pid, *ranks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
    return process.wait(600)


def _wait_for_start(folder: Path) -> None:
    deadline = time.monotonic() + 120
    while not (folder / "config.yaml").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def _children(parent: int) -> list[int]:
    out = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True
    ).stdout
    return [int(pid) for pid in out.split()]


def _run_forked(flags: list[str], folder: Path, kill_after_s: float | None) -> int:
    """Run in a fork of this process, which has everything imported: a start takes no seconds."""
    import train

    child = os.fork()
    if child == 0:
        status = 1
        try:
            sink = os.open(os.environ.get("KILLS_OUTPUT", os.devnull), os.O_WRONLY | os.O_APPEND)
            os.dup2(sink, 1)
            os.dup2(sink, 2)
            train.main(train.parse_config(train.Config, flags))
            status = 0
        except SystemExit as error:
            status = error.code
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    if kill_after_s is not None:
        _wait_for_start(folder)
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    main()
