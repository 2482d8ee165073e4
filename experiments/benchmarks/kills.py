"""Kill runs at random moments, resume them, compare with the unbroken run bit by bit.

    python -m experiments.benchmarks.kills --cases 200

Each case is of another mode: every way to meet, to push and to balance, one round an epoch or more,
in float32 and in bf16, simulated and in real processes. (What real processes do without a barrier,
or balance by times they measure, is another run each time: it has no bits to compare.)

Simulated clusters are killed with SIGKILL in the middle of whatever they do; so are real processes,
all of them (a machine that goes down) or one, which torchrun then restarts with the others. What
is compared: model.safetensors, and every line of metrics.jsonl but for measured times, speed and
memory.
"""

from __future__ import annotations

import argparse
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
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.benchmarks.ranks import fork_rank, free_port, preload
from experiments.benchmarks.record import record

ROOT = Path(__file__).resolve().parents[2]
COMMON = shlex.split(
    "--model test_resnet --train-samples 240 --eval-samples 40 --resolutions 16,32 --epochs 5 "
    "--lr-milestones 3 --slope 0.001 --intercept 0.01 --lr 0.02 --report-to none "
    "--dropout 0.1,0.2 --cpu-threads 1"
)
ROUNDS = shlex.split("--large-batch-size 10 --small-workers 1 --rounds-per-epoch 2")
# A run of a few dozen steps: the case is over in seconds.
SMALL = shlex.split(
    "--train-samples 96 --eval-samples 20 --resolutions 8,16 --epochs 4 --lr-milestones 2 "
    "--log-every 1"
)
SPEEDS = shlex.split("--slowdown 3:2.5 --emulate noise=0.1")
OTHERS = {  # what else has state
    "bsp, delta, EMA, mixing": "--merge delta --ema-decay 0.6 --mixup 0.4 --cutmix 1.0",
    "asp, half, AdamW": "--sync asp --merge half --optimizer adamw --lr 0.002",
}
TOO_LATE = -1000  # no exit status: the run was over when its rank was to be killed
SAVES = ("1", "0.0008m")  # each epoch; about twenty times a second, in the middle of rounds


@dataclass(frozen=True)
class Mode:
    """A kind of run: its processes (1: a simulated cluster) and its own flags."""

    processes: int
    flags: tuple[str, ...]


def all_modes() -> dict[str, Mode]:
    """Return every mode whose bits are promised, by name."""
    modes = {}

    def add(processes: int, name: str, *flags: str) -> None:
        where = f"{processes} processes" if processes > 1 else "simulated"
        for precision, called in (("no", "float32"), ("bf16", "bf16")):
            mode = Mode(processes, (*flags, "--mixed-precision", precision))
            modes[f"{name}, {called}, {where}"] = mode

    for processes, parts in ((1, "4,4,8,12"), (2, "7,13"), (3, "5,5,10")):
        simulated = processes == 1
        syncs = ("bsp", "ssp", "asp") if simulated else ("bsp",)
        speeds = SPEEDS if simulated else ()
        for balance in ("none", "dynamic", "dbs") if simulated else ("none",):
            how = ("--balance", balance, *speeds)
            for rounds in ("1", "2"):
                every = ("--rounds-per-epoch", rounds)
                shares = ("--large-batch-size", "5", "--small-workers", "1", *every)
                for sync in syncs:
                    name = f"{sync}, balance {balance}, rounds {rounds}"
                    add(processes, name, "--sync", sync, *shares, *how)
                    joint = ("--sync", sync, "--push", f"gradients:{rounds}")
                    name = f"{sync}, push gradients of {rounds}, balance {balance}"
                    add(processes, name, *joint, "--local-batch-sizes", parts, *how)
                joint = ("--sync", "step", "--local-batch-sizes", parts, *every)
                add(processes, f"step, balance {balance}, rounds {rounds}", *joint, *how)
        for wire in ("bf16", "int8", "int2"):
            add(processes, f"bsp, {wire}", *shares, "--wire", wire)
        if not simulated:
            add(processes, "step, powersgd", *joint, "--wire", "powersgd:2:3")
    for name, text in OTHERS.items():
        flags = ("--large-batch-size", "5", "--small-workers", "1", "--rounds-per-epoch", "2")
        add(1, name, *flags, *shlex.split(text))
    return modes


MODES = all_modes()
_MEASURED = ("time", "images_per_s", "memory")  # in the names of figures that runs do not repeat


def main() -> None:
    """Run the cases and write experiments/results/kills.csv."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200, help=f"of {len(MODES)} modes in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="modes whose name begins so")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    preload()
    rng = random.Random(arguments.seed)
    modes = [name for name in MODES if name.startswith(arguments.only or "")]
    rng.shuffle(modes)
    unbroken, rows = {}, []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(arguments.cases):
            mode = modes[number % len(modes)]
            if mode not in unbroken:
                folder = Path(scratch) / f"unbroken-{len(unbroken)}"
                assert run(mode, folder) == 0, f"the unbroken run of {mode} failed"
                # From the run folder's first file to the last: the start before it is left out.
                times = [path.stat().st_mtime for path in folder.iterdir()]
                unbroken[mode] = fingerprint(folder), max(times) - min(times)
            began = time.perf_counter()
            row = kill(mode, Path(scratch) / "killed", rng, *unbroken[mode])
            rows.append(row | {"case_s": round(time.perf_counter() - began, 1)})
            print(json.dumps(rows[-1]), flush=True)
    good = sum(row["same_bits"] for row in rows)
    print(f"{good} of {len(rows)} runs ended with the bits of the unbroken one")
    if not arguments.only:
        record(
            ROOT / "experiments/results/kills.csv",
            rows,
            f"python -m experiments.benchmarks.kills --cases {arguments.cases}",
        )
    sys.exit(good != len(rows))


def kill(mode: str, folder: Path, rng: random.Random, expected: str, whole_s: float) -> dict:
    """Start a run, kill it, resume it until it ends."""
    every, how = rng.choice(SAVES), "killed"
    arguments = ["--checkpoint-every", every, "--resume", "auto"]
    if MODES[mode].processes > 1 and rng.random() < 0.5:
        how = "one rank killed, restarted by torchrun"
    while True:  # until it is killed before its end
        shutil.rmtree(folder, ignore_errors=True)
        moment = rng.uniform(0.0, 1.0) * whole_s
        done = run(mode, folder, *arguments, kill_after_s=moment, one_rank=how != "killed")
        late = (folder / "summary.json").exists() if how == "killed" else done == TOO_LATE
        if not late:
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
        values = json.loads(line).items()
        row = {k: v for k, v in values if not any(word in k for word in _MEASURED)}
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
    processes = MODES[mode].processes
    flags = [*COMMON, *SMALL, *MODES[mode].flags, "--output-dir", str(folder), *arguments]
    if not one_rank:
        return _run_forked(flags, processes, folder, kill_after_s)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), "--max-restarts", "1", "train.py", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open(os.environ.get("KILLS_OUTPUT", os.devnull), "a") as sink:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    _wait_for_start(folder)
    time.sleep(kill_after_s)
    ranks, over = children(process.pid), (folder / "summary.json").exists()
    if ranks and not over:
        os.kill(ranks[-1], signal.SIGKILL)
    status = process.wait(600)
    return TOO_LATE if over or not ranks else status


def _wait_for_start(folder: Path) -> None:
    deadline = time.monotonic() + 120
    while not (folder / "config.yaml").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def children(parent: int) -> list[int]:
    """Return the ids of a process's children."""
    out = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True
    ).stdout
    return [int(pid) for pid in out.split()]


def _run_forked(flags: list[str], processes: int, folder: Path, kill_after_s: float | None) -> int:
    """Run in forks of this process, which has everything imported: a start takes no seconds."""
    port = free_port()
    ranks = [fork_rank(flags, rank, processes, port) for rank in range(processes)]
    if kill_after_s is not None:
        _wait_for_start(folder)
        time.sleep(kill_after_s)
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    return next(filter(None, statuses), 0)


if __name__ == "__main__":
    main()
