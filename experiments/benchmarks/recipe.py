"""Settings that change from one learning-rate stage to the next: is any of them worth a flag?

    python -m experiments.benchmarks.recipe --cifar100 FOLDER --imagenette FOLDER --seeds 3

An arm is a chain of `train.py` calls on one run folder: it trains a stage, and is resumed with
other settings for the next. Stages end where the learning rate falls. Accuracy is of held-out
training images, at the last epoch. The first seed tries every learning rate, the others the one
that was best for the arm on that data set.

Sources of the arms: fewer merges as the learning rate falls (QSR, arXiv 2310.14423), local steps
after joint ones (post-local SGD, arXiv 1808.07217), averaged weights of the last stage (SWAP, arXiv
2001.02312), small batches towards the end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from experiments.benchmarks.demos.table import Table

ROOT = Path(__file__).resolve().parents[2]
JOINT: dict[str, Any] = {"sync": "step", "local-batch-sizes": "32,32,32,32", "small-workers": 0}
ROUNDS: dict[str, Any] = {"sync": "bsp", "local-batch-sizes": "None"}
MERGES_4: dict[str, Any] = {"rounds-per-epoch": 4, "small-workers": 0}
ARMS: dict[str, Sequence[dict[str, Any]]] = {  # settings by stage; the last holds for those after
    "all large, 4 merges": [MERGES_4],
    "all large, 8 merges": [MERGES_4 | {"rounds-per-epoch": 8}],
    "dual batch, 4 merges": [MERGES_4 | {"small-workers": 3}],
    "ddp": [JOINT],
    "merges 8, 4, 1": [MERGES_4 | {"rounds-per-epoch": n} for n in (8, 4, 1)],
    "small workers 0, 3, 4": [MERGES_4 | {"small-workers": n} for n in (0, 3, 4)],
    "both": [
        {"rounds-per-epoch": rounds, "small-workers": small}
        for rounds, small in ((8, 0), (4, 3), (1, 4))
    ],
    "ddp, then dual batch": [JOINT, ROUNDS | MERGES_4 | {"small-workers": 3}],
    "slow momentum": [MERGES_4 | {"merge": "delta", "outer-lr": 0.7, "outer-momentum": 0.5}],
    "average of the last epochs": [MERGES_4 | {"ema-decay": 0.5}],
}
# By data set: base, ends of stages, settings. Large batches are such that eight merges an epoch
# leave every worker a full batch between two of them.
WORKLOADS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "cifar100": ("mini", (11, 17, 20), {"holdout": 0.1, "large-batch-size": 128}),
    "imagenette": ("imagenette", (6, 8, 10), {"holdout": 0.3, "large-batch-size": 64}),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run what the table lacks; several processes of this command may not share a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in WORKLOADS:
        parser.add_argument(f"--{name}", help="its folder")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--lr", nargs="+", type=float, default=[0.2, 0.4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("experiments/results/recipe.csv"))
    arguments = parser.parse_args(argv)
    folders = {name: getattr(arguments, name) for name in WORKLOADS}
    if not any(folders.values()):
        parser.error("the folder of at least one data set must be given")
    table = Table(
        arguments.output, ("arm", "workload", "lr", "turn"), "experiments.benchmarks.recipe"
    )

    def run(case: tuple[int, str, str, float]) -> None:
        seed, workload, arm, lr = case
        if folders[workload] and not table.has(arm, workload, lr, seed):
            found = measure(arm, workload, folders[workload], lr, seed)
            table.add(arm, workload, lr, seed, found)

    for seed in range(arguments.seeds):
        cases = list(itertools.product([seed], WORKLOADS, arguments.arms, arguments.lr))
        if seed:
            cases = [case for case in cases if case[3] == best_rate(table.rows, *case[1:3])]
        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(run, cases))


def best_rate(rows: Sequence[Mapping[str, Any]], workload: str, arm: str) -> float | None:
    """Return the learning rate of an arm that was best on a data set with the first seed."""
    mine = [
        row for row in rows if (row["arm"], row["workload"], row["turn"]) == (arm, workload, "0")
    ]
    best = max(mine, key=lambda row: float(row["accuracy"]), default=None)
    return best and float(best["lr"])


def measure(arm: str, workload: str, folder: str, lr: float, seed: int) -> dict[str, float]:
    """Return accuracy on held-out images and virtual seconds of an arm's chain of runs."""
    base, ends, common = WORKLOADS[workload]
    stages = ARMS[arm]
    with tempfile.TemporaryDirectory() as scratch:
        run_folder = Path(scratch, "run")
        parts = range(len(ends)) if len(stages) > 1 else [len(ends) - 1]  # nothing changes
        for number in parts:
            flags = {"epochs": ends[number], "lr": lr, "seed": seed, "schedule": "fixed"}
            flags |= {"dataset": folder, "eval-samples": "None", "warmup-epochs": 2}
            flags |= {"eval-every": 100}  # at the end alone
            flags |= common | stages[min(number, len(stages) - 1)]
            command = [sys.executable, "train.py", "--no-save-best", "--no-noise-scale"]
            command += ["--config", f"experiments/configs/base/{base}.yaml", "--report-to", "none"]
            # The end of this part is a milestone of the next.
            command += ["--lr-milestones", *map(str, ends[:number])]
            if run_folder.exists():
                command += ["--resume", str(run_folder), "--allow-config-change"]
            else:
                command += ["--output-dir", str(run_folder)]
            for name, value in flags.items():
                command += [f"--{name}", str(value)]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} ended with: {done.stderr[-2000:]}")
        lines = (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    evaluation = [row for row in map(json.loads, lines) if row["event"] == "eval"][-1]
    accuracy = evaluation.get("ema_accuracy", evaluation["accuracy"])
    return {"virtual_s": evaluation["virtual_time_s"], "accuracy": accuracy}


if __name__ == "__main__":
    main()
