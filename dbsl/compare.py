"""Arms of a comparison side by side: runs them with several seeds, then a table and a picture.

    python -m dbsl.compare configs/mini/*.yaml --seeds 3

Every YAML is an arm, a config of train.py. A run that is finished is not run again and one that was
stopped goes on, so that the same command takes up where it was left.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tyro.conf import Positional

from dbsl.checkpoint import FOLDER as CHECKPOINTS
from dbsl.comparison import Run, read_run, table
from dbsl.config import in_range
from dbsl.errors import EXIT_STOPPED, RunStopped, one_line_errors
from dbsl.flags import parse_flags
from dbsl.study_files import write_table

SCRIPT = Path(__file__).resolve().parent.parent / "train.py"
_OWN = ("seed", "output_dir", "resume", "config")  # settings that a comparison gives by itself


@dataclass(frozen=True)
class CompareConfig:  # every field is a flag, its comment the help
    """Run arms (configs of train.py) with several seeds and compare them."""

    arms: Positional[tuple[str, ...]]  # YAML files, each an arm
    seeds: int = 3  # of each arm: 0, 1, ...
    baseline: str | None = None  # the arm that others are compared with; unset: the first
    target: float | None = None  # accuracy to time, in (0, 1]; unset: the least of the arms' means
    runs_dir: str = "runs"  # each run in <runs_dir>/<folder of the arms>-<arm>-s<seed>
    output_dir: str | None = None  # of table and picture; unset: results/<folder of the arms>
    report_only: bool = False  # of what is finished; train nothing

    def __post_init__(self) -> None:
        in_range("seeds", self.seeds, 1)
        if self.target is not None:
            in_range("target", self.target, 0, 1, open_low=True)
        names = [Path(arm).stem for arm in self.arms]
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"arms must be one or more YAML files with names of their own, "
                f"got {', '.join(names) or 'none'}"
            )
        if self.baseline is not None and self.baseline not in names:
            raise ValueError(f"baseline must be one of {', '.join(names)}, got {self.baseline}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is not finished, and report."""
    config = parse_flags(CompareConfig, argv, prog="python -m dbsl.compare")
    arms = {Path(arm).stem: Path(arm) for arm in config.arms}
    settings = {name: _read_arm(path) for name, path in arms.items()}
    group = Path(config.arms[0]).resolve().parent.name
    folders = {
        (name, seed): Path(config.runs_dir) / f"{group}-{name}-s{seed}"
        for seed in range(config.seeds)  # all arms with one seed before any with the next
        for name in arms
    }
    for (name, _), folder in folders.items():
        _check_same(name, settings[name], folder)
    if not config.report_only:
        for number, ((name, seed), folder) in enumerate(folders.items(), 1):
            if not (folder / "summary.json").exists():
                print(f"run {number}/{len(folders)}: {name}, seed {seed}", flush=True)
                _run(arms[name], settings[name], seed, folder)
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    for (name, _), folder in folders.items():
        if (folder / "summary.json").exists():
            runs[name].append(read_run(folder))
    output = Path(config.output_dir or f"results/{group}")
    print(write_comparison(runs, config.baseline or next(iter(arms)), config.target, output))


def write_comparison(
    runs: Mapping[str, Sequence[Run]], baseline: str, target: float | None, folder: Path
) -> str:
    """Write ``arms.csv``, ``runs.csv`` and ``arms.png``; return the table for people.

    Raises:
        ValueError: If no run is finished.
    """
    from dbsl.compare_plots import draw_arms  # slow to import

    rows = table(runs, baseline, target)
    if not rows:
        raise ValueError("arms must have a finished run at least, got none")
    folder.mkdir(parents=True, exist_ok=True)
    write_table(folder / "arms.csv", [_plain(row) for row in rows])
    singles = [
        {
            "arm": name,
            "seed": run.seed,
            "accuracy": f"{100 * run.accuracy:.2f}",
            "loss": f"{run.loss:.4f}",
            "train_time_s": f"{run.train_time_s:.1f}",
            "samples": run.samples,
        }
        for name, own in runs.items()
        for run in own
    ]
    write_table(folder / "runs.csv", singles)
    draw_arms(runs, folder / "arms.png")
    width = max(len(row["arm"]) for row in rows)
    lines = [
        f"{'arm':<{width}}  seeds  accuracy %   95 %  over {baseline}   loss   time s  "
        f"to {rows[0]['target']:.1f} %",
        *(_line(row, width, len(baseline)) for row in rows),
        f"accuracy and loss at the last epoch; differences are paired by seed; {folder}",
    ]
    return "\n".join(lines)


def _run(arm: Path, settings: Mapping[str, Any], seed: int, folder: Path) -> None:
    if folder.exists() and not any((folder / CHECKPOINTS).glob("*/*")):
        shutil.rmtree(folder)  # it was ended before it had anything to go on from
    command = [sys.executable, str(SCRIPT), "--config", str(arm), "--seed", str(seed)]
    command += ["--output-dir", str(folder), "--resume", "auto"]
    if "report_to" not in settings:
        command += ["--report-to", "none"]
    status = subprocess.run(command, check=False).returncode
    if status == EXIT_STOPPED:
        raise RunStopped("stopped; the same command goes on")
    if status:
        raise ValueError(f"every run must end well, got status {status} of {folder} (see above)")


def _read_arm(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"arms must be readable YAML files, got {path} ({reason})") from None
    if not isinstance(settings, dict):
        raise ValueError(f"arms must map settings to values, got {path}")
    for name in _OWN:
        if name in settings:
            raise ValueError(f"an arm must leave {name} to the comparison, got it in {path}")
    return settings


def _check_same(name: str, settings: Mapping[str, Any], folder: Path) -> None:
    """Refuse a run that was made with other settings than its arm has now."""
    path = folder / "config.yaml"
    if not path.exists():
        return
    made = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    for key, value in settings.items():
        before = made.get(key)
        if key in made and _as_list(before) != _as_list(value) and value not in ("auto", None):
            raise ValueError(
                f"{key} of arm {name} must be {before} as in {path}, or runs_dir another, "
                f"got {value}"
            )


def _as_list(value: Any) -> list[str]:
    parts = value if isinstance(value, list) else str(value).split(",")
    return [str(part).strip() for part in parts]


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}


def _line(row: Mapping[str, Any], width: int, baseline: int) -> str:
    def number(value: float, text: str) -> str:
        return format(value, text) if math.isfinite(value) else "-"

    difference = number(row["difference"], "+.2f")
    if math.isfinite(row["difference_ci95"]):
        difference += f" ± {row['difference_ci95']:.2f}"
    return (
        f"{row['arm']:<{width}}  {row['seeds']:>5}  {row['accuracy']:>10.2f}  "
        f"{number(row['ci95'], '.2f'):>5}  {difference:>{baseline + 5}}  {row['loss']:>5.3f}  "
        f"{row['train_time_s']:>7.1f}  {number(row['time_to_target_s'], '.1f'):>9}"
    )


if __name__ == "__main__":
    with one_line_errors():
        main()
