"""The gradient noise scale of a live run beside the critical batch that a study has found.

    python -m experiments.benchmarks.noise_scale studies/digits-test_efficientnet_gn studies/...

For every workload of every study folder it trains with train.py, four simulated workers, the
momentum and learning rate of the study's best trial at --batch, and a few seeds, and writes
experiments/results/noise_scale.csv.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml
from accelerate.state import AcceleratorState

import train
from dbsl.config.image_settings import ImageConfig
from dbsl.data.dataset import Data, load_data
from dbsl.log.rows import read_metrics
from dbsl.plan.stages import default_resolutions
from dbsl.tools.study.report import REPORT
from dbsl.tools.study.scaling import steps_to_result
from dbsl.tools.study.store import read_workloads
from experiments.benchmarks.record import record

ROOT = Path(__file__).resolve().parents[2]
WORKERS, STEPS = 4, 8  # steps of a round


def main(argv: Sequence[str] | None = None) -> None:
    """Train beside each study, and write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.benchmarks.noise_scale", description=__doc__.splitlines()[0]
    )
    parser.add_argument("studies", nargs="+", type=Path)
    parser.add_argument("--batch", type=int, default=32, help="of each worker")
    parser.add_argument("--epochs", type=int, nargs="+", default=[30], help="one, or by study")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "experiments/results/noise_scale.csv")
    arguments = parser.parse_args(argv)
    rows, many = [], len(arguments.studies)
    every = arguments.epochs * (many if len(arguments.epochs) == 1 else 1)
    for folder, epochs in zip(arguments.studies, every, strict=True):
        settings = yaml.safe_load((folder / "study.yaml").read_text(encoding="utf-8"))
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        for workload, studies in read_workloads([folder]).items():
            study = next(study for study in studies if study.batch_size == arguments.batch)
            best = steps_to_result(study, settings["goal_error"]).trial.parameters
            rows.append(_row(workload, settings, report[workload], best, epochs, arguments))
            record(arguments.output, rows, "python -m experiments.benchmarks.noise_scale")


def _row(
    workload: str,
    settings: Mapping[str, Any],
    report: Mapping[str, Any],
    best: Mapping[str, float],
    epochs: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    at_goal, at_end, reached = [], [], 0
    for seed in range(arguments.seeds):
        scales, errors = _train(settings, best, seed, epochs, arguments.batch)
        epoch = next((e for e in sorted(errors) if errors[e] < settings["goal_error"]), None)
        if epoch is not None and epoch in scales:
            reached += 1
            at_goal.append(scales[epoch])
        at_end.append(scales[max(scales)])
    return {
        "workload": workload,
        "goal_error": settings["goal_error"],
        "perfect_scaling_up_to": report["perfect_scaling_up_to"],
        "useful_batch_size": report["useful_batch_size"],
        "useful_is_seen": report["useful_is_seen"],
        "critical_batch_size": f"{report['critical_batch_size']:.3g}",
        "noise_scale_at_goal": f"{fmean(at_goal):.3g}" if at_goal else "",
        "sd": f"{stdev(at_goal):.2g}" if len(at_goal) > 1 else "",
        "seeds_at_goal": reached,
        "noise_scale_at_end": f"{fmean(at_end):.3g}",
        "sd_at_end": f"{stdev(at_end):.2g}" if len(at_end) > 1 else "",
        "seeds": arguments.seeds,
        "batch": arguments.batch,
        "learning_rate": f"{best['learning_rate']:.3g}",
        "momentum": f"{best.get('momentum', 0.0):.3g}",
        "epochs": epochs,
    }


def _train(
    settings: Mapping[str, Any], best: Mapping[str, float], seed: int, epochs: int, batch: int
) -> tuple[dict[int, float], dict[int, float]]:
    """Return the noise scale and the evaluation error by epoch."""
    kept = ("dataset", "label_column", "train_samples", "eval_samples", "augment", "model")
    AcceleratorState._reset_state(True)
    data = _data(settings)
    with tempfile.TemporaryDirectory() as scratch:
        config = train.Config(
            **{name: settings[name] for name in kept if name in settings},
            resolutions=(settings.get("resolution") or default_resolutions(data.image_side)[-1],),
            mixed_precision=settings["mixed_precision"],
            local_batch_sizes=(batch,) * WORKERS,
            rounds_per_epoch=max(1, len(data.train) // (WORKERS * STEPS * batch)),
            momentum=best.get("momentum", 0.0),
            weight_decay=best["weight_decay"],
            lr=best["learning_rate"],
            lr_milestones=(),
            warmup_epochs=0.0,
            epochs=epochs,
            slope=(0.001,),
            intercept=(0.001,),
            seed=seed,
            checkpoint_every=0,
            report_to="none",
            output_dir=f"{scratch}/run",
        )
        train.main(config)
        records = read_metrics(Path(scratch, "run/metrics.jsonl"))
    scales = {r["epoch"]: r["b_simple"] for r in records if r["event"] == "noise"}
    errors = {r["epoch"]: 1 - r["accuracy"] for r in records if r["event"] == "eval"}
    return {epoch: scale for epoch, scale in scales.items() if scale is not None}, errors


def _data(settings: Mapping[str, Any]) -> Data:
    names = ("label_column", "train_samples", "eval_samples")
    return load_data(
        ImageConfig(settings["dataset"], **{n: settings[n] for n in names if n in settings})
    )


if __name__ == "__main__":
    main()
