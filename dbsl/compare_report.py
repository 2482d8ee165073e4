"""What a comparison says: CSV files of arms, single runs and curves, a picture, and a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from dbsl.comparison import MADE_ON, Run, averaged, table
from dbsl.study_files import write_table


def write_comparison(
    runs: Mapping[str, Sequence[Run]],
    baseline: str,
    target: float | None,
    folder: Path,
    command: str,
    name: str = "arms",
) -> str:
    """Write ``<name>.csv`` and ``.png``, and single runs with curves; return a table for people.

    Averaged weights, where runs have them, are an arm of their own beside that of the raw ones.

    Raises:
        ValueError: If no run is finished.
    """
    from dbsl.compare_plots import draw_arms  # slow to import

    shown = {}
    for arm, own in runs.items():
        shown[arm] = own
        if of_average := averaged(own):
            shown[f"{arm} (EMA)"] = of_average
    rows = table(shown, baseline, target)
    if not rows:
        raise ValueError("arms must have a finished run at least, got none")
    folder.mkdir(parents=True, exist_ok=True)
    made = {"date": date.today().isoformat(), "command": command}
    arms = [
        _plain(row) | {key: _common(shown[row["arm"]], key) for key in MADE_ON} | made
        for row in rows
    ]
    write_table(folder / f"{name}.csv", arms)
    singles = [
        {
            "arm": arm,
            "seed": run.seed,
            "accuracy": f"{100 * run.accuracy:.2f}",
            "loss": f"{run.loss:.4f}",
            "train_time_s": f"{run.train_time_s:.2f}",
            "total_time_s": f"{run.total_time_s:.1f}",
            "workers": run.workers,
            "epochs": run.epochs,
            "samples": run.samples,
            **{key: dict(run.made_on).get(key, "") for key in MADE_ON},
        }
        for arm, own in shown.items()
        for run in own
    ]
    write_table(folder / f"{name}_runs.csv", singles)
    curves = [
        {
            "arm": arm,
            "seed": run.seed,
            "train_time_s": f"{time_s:.2f}",
            "accuracy": f"{100 * accuracy:.2f}",
        }
        for arm, own in runs.items()
        for run in own
        for time_s, accuracy in run.curve
    ]
    write_table(folder / f"{name}_curves.csv", curves)
    draw_arms(runs, folder / f"{name}.png")
    width = max(len(row["arm"]) for row in rows)
    lines = [
        f"{'arm':<{width}}  seeds  accuracy %   95 %  over {baseline}   loss   time s  "
        f"to {rows[0]['target']:.1f} %  s/point",
        *(_line(row, width, len(baseline)) for row in rows),
        "accuracy and loss at the last epoch; differences are paired by seed; s/point: worker "
        f"seconds more than {baseline}'s for each point over it; {folder}",
    ]
    return "\n".join(lines)


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}


def _common(runs: Sequence[Run], key: str) -> str:
    """Return what runs were made on: one value, or all that there are."""
    return " / ".join(sorted({dict(run.made_on).get(key, "") for run in runs}))


def _line(row: Mapping[str, Any], width: int, baseline: int) -> str:
    def number(value: float, text: str) -> str:
        return format(value, text) if math.isfinite(value) else "-"

    difference = number(row["difference"], "+.2f")
    if math.isfinite(row["difference_ci95"]):
        difference += f" ± {row['difference_ci95']:.2f}"
    return (
        f"{row['arm']:<{width}}  {row['seeds']:>5}  {row['accuracy']:>10.2f}  "
        f"{number(row['ci95'], '.2f'):>5}  {difference:>{baseline + 5}}  {row['loss']:>5.3f}  "
        f"{row['train_time_s']:>7.1f}  {number(row['time_to_target_s'], '.1f'):>9}  "
        f"{number(row['cost_per_point_s'], '+.1f'):>7}"
    )
