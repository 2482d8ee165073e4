"""How plans follow uneven machines: ``python -m experiments.benchmarks.balance``.

No training: workers' times come from their true time models with seeded noise, the split from the
planner that train.py uses with ``--sync step``. Three workers of speeds 1, 2 and 4 with the same
fixed cost of a step, 50 epochs, 100 seeds; then four equal workers under the disturbance of Ye et
al. (probability 0.1 an epoch, 4 to 20 epochs, here twice as slow), 200 epochs, 100 seeds.

Imbalance is the slowest worker's expected step time over the mean; utilisation the workers' compute
time over the time of the epoch.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np

from dbsl.config.settings import Balance, RunConfig
from dbsl.extras.emulate import Emulation, parse_disturb
from dbsl.plan.follow import PlanMaker, Planner
from dbsl.plan.machines import KnownWorkers
from dbsl.plan.types import RoundReport, TimeModel

SAMPLES, PER_WORKER = 50_000, 128
# Not the seeds 0 to 99, on which the rule's constants were chosen.
SEEDS = range(1000, 1100)
PLANNED = TimeModel(0.0005, 0.015)


def make_planner(workers: int, balance: Balance) -> Planner:
    """Return the planner of a run that starts from equal parts."""
    config = RunConfig(
        sync="step",
        workers=workers,
        global_batch_size=PER_WORKER * workers,
        resolutions=(32,),
        balance=balance,
        min_batch_size=1,
    )
    models = {32: TimeModel.of(PLANNED, workers)}
    known = KnownWorkers(models, {32: [PER_WORKER] * workers}, measured=False)
    maker = PlanMaker(config, known, SAMPLES, least=1)
    plans = {32: maker.first(32, print)}
    return Planner(plans, lambda epoch: 32, models, balance=balance, maker=maker)


def play(
    true: list[TimeModel], balance: Balance, epochs: int, emulation: Emulation
) -> dict[str, list[float]]:
    """Return time, utilisation and imbalance of each epoch, and how often the split changed."""
    planner = make_planner(len(true), balance)
    history: dict[str, list[float]] = {"time_s": [], "utilisation": [], "imbalance": []}
    for epoch in range(epochs):
        plan = planner.at(epoch).plan
        expected = [
            model.time(mine.samples, mine.steps) * emulation.factor(worker, epoch)
            for worker, (mine, model) in enumerate(zip(plan.workers, true, strict=True))
        ]
        times = [t * emulation.noise_factor(w, epoch, 0) for w, t in enumerate(expected)]
        for worker, (mine, time_s) in enumerate(zip(plan.workers, times, strict=True)):
            counts = (mine.local_batch_size, mine.samples, mine.steps, time_s, 0.0, 1.0)
            planner.observe(RoundReport(worker, epoch, 0, 32, *counts, compute_time_s=time_s))
        history["time_s"].append(max(times))
        history["utilisation"].append(sum(times) / max(times) / len(times))
        history["imbalance"].append(max(expected) / statistics.mean(expected))
    history["changes"] = [planner.changes]
    return history


def uneven(balance: Balance, noise: float) -> dict[str, object]:
    """Return a row on speeds 1, 2 and 4."""
    true = [TimeModel(PLANNED.slope * 4 / speed, PLANNED.intercept) for speed in (1, 2, 4)]
    runs = [
        play(true, balance, 50, Emulation(noise=noise, seed=seed))
        for seed in (SEEDS if noise else SEEDS[:1])
    ]
    late = [max(run["imbalance"][10:]) for run in runs]
    mean = [statistics.mean(run["imbalance"][10:]) for run in runs]
    return {
        "case": "speeds 1,2,4",
        "epoch_noise": noise,
        "balance": balance,
        "imbalance_epoch_1": f"{statistics.mean(r['imbalance'][0] for r in runs):.3f}",
        "imbalance_epoch_3": f"{statistics.mean(r['imbalance'][2] for r in runs):.3f}",
        "imbalance_11_to_50": f"{statistics.mean(mean):.3f}",
        "worst_epoch_11_to_50_median": f"{statistics.median(late):.3f}",
        "below_1.05_11_to_50": f"{_share_below(runs, 10):.3f}",
        "below_1.05_33_to_50": f"{_share_below(runs, 32):.3f}",
        "changes_in_50_median": statistics.median(r["changes"][0] for r in runs),
        "utilisation": f"{statistics.mean(statistics.mean(r['utilisation']) for r in runs):.3f}",
        "time_to_equal_split": "",
    }


def _share_below(runs: list[dict[str, list[float]]], first: int) -> float:
    return float(np.mean([np.array(run["imbalance"][first:]) < 1.05 for run in runs]))


def disturbed(balance: Balance) -> dict[str, object]:
    """Return a row on equal workers that are disturbed."""
    emulations = [
        Emulation(disturbance=parse_disturb("0.1:4-20:2"), noise=0.02, seed=seed) for seed in SEEDS
    ]
    true = [PLANNED] * 4
    runs = [play(true, balance, 200, emulation) for emulation in emulations]
    equal = [sum(play(true, "none", 200, emulation)["time_s"]) for emulation in emulations]
    ratios = [sum(run["time_s"]) / time_s for run, time_s in zip(runs, equal, strict=True)]
    low, high = np.quantile(ratios, [0.05, 0.95])
    return {
        "case": "disturbed 0.1:4-20:2",
        "epoch_noise": 0.02,
        "balance": balance,
        "imbalance_epoch_1": "",
        "imbalance_epoch_3": "",
        "imbalance_11_to_50": "",
        "worst_epoch_11_to_50_median": "",
        "below_1.05_11_to_50": "",
        "below_1.05_33_to_50": "",
        "changes_in_50_median": statistics.median(r["changes"][0] for r in runs) / 4,
        "utilisation": f"{statistics.mean(statistics.mean(r['utilisation']) for r in runs):.3f}",
        "time_to_equal_split": f"{statistics.mean(ratios):.3f} ({low:.3f} to {high:.3f})",
    }


def main() -> None:
    """Run all cases and write experiments/results/balance.csv."""
    from experiments.benchmarks.record import record

    rules: tuple[Balance, ...] = ("none", "dbs", "dynamic")
    # 10 % noise of each step is less than 1 % of an epoch's 131 steps; of each epoch it is 10 %.
    noises = (0.0, round(0.1 / 131**0.5, 4), 0.1)
    rows = [uneven(balance, noise) for noise in noises for balance in rules]
    rows += [disturbed(balance) for balance in rules]
    record(
        Path("experiments/results/balance.csv"), rows, "python -m experiments.benchmarks.balance"
    )


if __name__ == "__main__":
    main()
