"""Training under disturbance, split or not: ``python -m experiments.benchmarks.disturbed``.

Four simulated workers with ``--sync step``; each is slowed three times with probability 0.1 an
epoch, for 4 to 20 epochs (the test of Ye et al.), 10 % noise on top. The split must change the time
and not the result: digits at 16 px, 16 samples a worker at first, 3 seeds, last-epoch loss. timm's
``test_efficientnet_gn`` normalises each sample by itself; ``test_resnet`` has batch norm, which
sees what its worker has. About six minutes on two cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev

SEEDS, EPOCHS = 3, 16
T_95 = 4.303  # Student's t for two degrees of freedom
ARMS = (
    ("test_efficientnet_gn", "none", 2),
    ("test_efficientnet_gn", "dbs", 2),
    ("test_efficientnet_gn", "dynamic", 2),
    ("test_resnet", "none", 2),
    ("test_resnet", "dynamic", 2),
    ("test_resnet", "dynamic", 8),
)  # model, balance, the least that a worker may get (min_batch_size)
ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, model: str, balance: str, least: int, seed: int) -> dict[str, float]:
    """Train once and return the last loss, the virtual seconds and the utilisation."""
    flags = f"""--workers 4 --model {model} --resolutions 16 --epochs {EPOCHS} --lr-milestones 10,14
        --sync step --balance {balance} --disturb 0.1:4-20:3 --time-noise 0.1 --large-batch-size 16
        --slope 0.001 --intercept 0.01 --lr 0.05 --seed {seed}
        --min-batch-size {least} --report-to none --eval-every 4"""
    command = [sys.executable, "train.py", "--output-dir", str(folder), *flags.split()]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600, stdout=subprocess.DEVNULL)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [r for r in metrics if r["event"] == "eval"][-1]
    idle = [mean(r["workers_idle_time_share"].values()) for r in metrics if r["event"] == "times"]
    return {
        "loss": last["loss"],
        "accuracy": last["accuracy"],
        "virtual_s": last["virtual_time_s"],
        "utilisation": 1 - mean(idle),
    }


def main() -> None:
    """Run all arms and write experiments/results/disturbed.csv."""
    from experiments.benchmarks.record import record

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model, balance, least in ARMS:
            name = f"{folder}/{model}-{balance}-{least}"
            runs = [run(Path(f"{name}-{s}"), model, balance, least, s) for s in range(SEEDS)]
            if balance == "none":
                equal = runs
            ratios = [a["virtual_s"] / b["virtual_s"] for a, b in zip(runs, equal, strict=True)]
            differences = [a["loss"] - b["loss"] for a, b in zip(runs, equal, strict=True)]
            half = T_95 * stdev(differences) / SEEDS**0.5 if balance != "none" else 0.0
            rows.append(
                {
                    "model": model,
                    "balance": balance,
                    "min_batch_size": least,
                    "seeds": SEEDS,
                    "time_to_equal_split": f"{mean(ratios):.3f}",
                    "utilisation": f"{mean(r['utilisation'] for r in runs):.3f}",
                    "last_loss": f"{mean(r['loss'] for r in runs):.4f}",
                    "last_loss_sd": f"{stdev(r['loss'] for r in runs):.4f}",
                    "loss_less_equal_split_95": f"{mean(differences):+.4f} +- {half:.4f}",
                    "accuracy": f"{mean(r['accuracy'] for r in runs):.4f}",
                }
            )
    record(
        Path("experiments/results/disturbed.csv"),
        rows,
        "python -m experiments.benchmarks.disturbed",
    )


if __name__ == "__main__":
    main()
