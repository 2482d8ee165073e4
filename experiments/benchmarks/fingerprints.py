"""Weights and metrics of every kind of run, as checksums: a change of structure moves none.

    python -m experiments.benchmarks.fingerprints --output before.json
    python -m experiments.benchmarks.fingerprints --against before.json     # after the change

Bits differ between kinds of CPU, so that both belong on one machine. Every case is a run of
train.py by its flags, and knows nothing of the code behind them. Runs of several processes have
syncs whose result does not depend on the workers' timing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from dbsl.log.rows import read_metrics

BASE = (
    "--model test_resnet --train-samples 60 --eval-samples 20 --resolutions 16,32 --epochs 3 "
    "--lr-milestones 2 --slope 0.001 --intercept 0.01 --lr 0.02 --dropout 0.1,0.3 "
    "--report-to none --cpu-threads 1 --checkpoint-every 1 --log-every 2 --mixed-precision no"
)
ROUNDS = "--small-workers 1 --large-batch-size 3 --rounds-per-epoch 2"
JOINT = "--local-batch-sizes 3,3,4,6"
CASES = {
    "bsp": ROUNDS,
    "bsp bf16": f"{ROUNDS} --mixed-precision bf16",
    "progressive, sqrt, linear rates": f"{ROUNDS} --schedule progressive --update-factor sqrt "
    "--lr-scaling linear --warmup-epochs 1",
    "cosine": f"{ROUNDS} --lr-schedule cosine --warmup-epochs 1",
    "one worker": "--workers 1 --local-batch-sizes 8",
    "adamw, forgetting": f"{ROUNDS} --optimizer adamw --lr 0.001 --reset-momentum round",
    "ssp": f"{ROUNDS} --sync ssp --slowdown 0:2.0 --reset-momentum stage",
    "asp": f"{ROUNDS} --sync asp --slowdown 3:2.5 --emulate noise=0.1",
    "asp half": f"{ROUNDS} --sync asp --merge half --emulate disturb=0.3:1-2:3",
    "balance dynamic": f"{ROUNDS} --balance dynamic --slowdown 3:3.0",
    "balance dbs": "--workers 4 --large-batch-size 3 --balance dbs --slowdown 3:3.0",
    "asp balance": f"{ROUNDS} --sync asp --balance dynamic --slowdown 3:3.0",
    "step": f"{JOINT} --sync step --drop-last",
    "step balance": f"{JOINT} --sync step --balance dynamic --slowdown 3:3.0",
    "gradients": f"{JOINT} --push gradients:2",
    "gradients asp, slowed": f"{JOINT} --push gradients --sync asp --slowdown 1:2.0",
    "delta": f"{ROUNDS} --merge delta --ema-decay 0.6 --mixup 0.4 --cutmix 1.0",
    "paper augmentation": f"{ROUNDS} --augment paper --label-smoothing 0.1 --eval-train",
    "bsp micro-batches": f"{ROUNDS} --micro-batch-size 2",
    "step micro-batches": f"{JOINT} --sync step --micro-batch-size 2 --clip-grad 1",
    "gradients micro-batches": f"{JOINT} --push gradients --micro-batch-size 2",
    "gradients ssp": f"{JOINT} --push gradients --sync ssp --slowdown 1:2.0",
    "bsp int4": f"{ROUNDS} --wire int4",
    "delta int8": f"{ROUNDS} --merge delta --wire int8",
    "step bf16 wire": f"{JOINT} --sync step --wire bf16",
    "one link": f"{ROUNDS} --emulate gbps=0.1 ms=5",
    "noise scale": f"{JOINT} --sync step --noise-scale",
}
RESUMED = (
    *("bsp", "asp", "ssp", "balance dynamic", "step", "gradients", "delta"),
    *("bsp bf16", "step micro-batches", "step balance", "bsp int4", "gradients asp, slowed"),
)
RANKS = {
    "bsp": (3, ROUNDS),
    "bsp, two": (2, ROUNDS),
    "delta": (3, f"{ROUNDS} --merge delta"),
    "step": (3, "--local-batch-sizes 3,3,4 --sync step"),
    "step, two": (2, "--local-batch-sizes 3,4 --sync step"),
    "step micro-batches, two": (2, "--local-batch-sizes 3,4 --sync step --micro-batch-size 2"),
    "step powersgd, two": (2, "--local-batch-sizes 3,4 --sync step --wire powersgd:1:2"),
    "bsp int4, two": (2, f"{ROUNDS} --wire int4"),
    "islands of two": (4, "--small-workers 1 --large-batch-size 6 --worker-processes 2"),
    "gradients": (3, "--local-batch-sizes 3,3,4 --push gradients"),
    "asp, one worker and a server": (
        2,
        "--workers 1 --sync asp --dedicated-server --large-batch-size 3 --rounds-per-epoch 2",
    ),
}
STOPS = 5  # sessions of a resumed run that end after a step
_NOISY = ("images_per_s", "memory_gib")  # with all times: what differs from run to run
_ROOT = Path(__file__).resolve().parents[2]


def fingerprint(folder: Path) -> dict[str, str]:
    """Return the checksums of a run's weights and of its metrics without times."""
    rows = read_metrics(folder / "metrics.jsonl")
    kept = [{k: v for k, v in row.items() if "time" not in k and k not in _NOISY} for row in rows]
    sums = {"metrics": hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]}
    for weights in sorted(folder.glob("model*.safetensors")):
        sums[weights.name] = hashlib.sha256(weights.read_bytes()).hexdigest()[:16]
    return sums


def run(flags: str, folder: Path) -> int:
    """Run train.py in a fork of this process, which has torch loaded; return its status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.dup2(os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
            os.dup2(1, 2)
            sys.argv = ["train.py", *flags.split(), "--output-dir", str(folder)]
            runpy.run_path(str(_ROOT / "train.py"), run_name="__main__")
            status = 0
        except SystemExit as stopped:
            status = stopped.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_ranks(flags: str, folder: Path, ranks: int) -> int:
    """Run train.py in several processes; return the launcher's status."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "train.py", *flags.split()]
    with open(folder.with_suffix(".log"), "w") as log:
        return subprocess.run(
            [*command, "--output-dir", str(folder)], cwd=_ROOT, stdout=log, stderr=log
        ).returncode


def measure(scratch: Path, only: str) -> dict[str, dict[str, str] | str]:
    """Return the fingerprint of every case whose name has `only` in it."""
    found: dict[str, dict[str, str] | str] = {}

    def note(name: str, status: int, folder: Path) -> None:
        log = folder.with_suffix(".log")
        found[name] = fingerprint(folder) if status == 0 else _tail(log)
        print(f"{name}: {found[name]}", flush=True)
        if status and log.exists():  # whole: the folder goes
            print(log.read_text(), file=sys.stderr)

    for number, (name, flags) in enumerate(CASES.items()):
        if only in name:
            folder = scratch / f"run{number}"
            note(name, run(f"{BASE} {flags}", folder), folder)
    for number, name in enumerate(RESUMED):
        if only in (title := f"{name}, resumed at several steps"):
            folder = scratch / f"resumed{number}"
            status = run(f"{BASE} {CASES[name]} --max-minutes 0.000001", folder)
            for _ in range(STOPS - 1):
                again = f"--resume {folder} --max-minutes 0.000001"
                status = run(again, folder) if status == 75 else 1
            status = run(f"--resume {folder} --max-minutes 600", folder) if status == 75 else 1
            note(title, status, folder)
    for number, (name, (ranks, flags)) in enumerate(RANKS.items()):
        if only in (title := f"{name}, in processes"):
            folder = scratch / f"ranks{number}"
            note(title, run_ranks(f"{BASE} {flags}", folder, ranks), folder)
    return found


def _tail(log: Path) -> str:
    lines = log.read_text().splitlines() if log.exists() else []
    return "failed: " + " | ".join(lines[-3:])


def main() -> None:
    """Take the fingerprints; compare them with those of before."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", help="JSON file to write")
    parser.add_argument("--against", help="JSON file of before")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.path.insert(0, str(_ROOT))
    os.chdir(_ROOT)
    import accelerate  # noqa: F401  imported once, before all forks
    import timm  # noqa: F401

    with tempfile.TemporaryDirectory() as scratch:
        found = measure(Path(scratch), options.only)
    if options.output:
        Path(options.output).write_text(json.dumps(found, indent=1) + "\n")
    failed = [name for name, value in found.items() if isinstance(value, str)]
    moved = []
    if options.against:
        before = json.loads(Path(options.against).read_text())
        moved = [name for name, value in found.items() if before.get(name) != value]
    print(f"{len(found)} cases, {len(failed)} failed, {len(moved)} moved: {moved or '-'}")
    sys.exit(bool(failed or moved))


if __name__ == "__main__":
    main()
