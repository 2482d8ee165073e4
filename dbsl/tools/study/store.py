"""Studies on the disk, in the layout of the measurements that Shallue et al. released.

That is (github.com/google-research/google-research/tree/master/batch_science)
``dataset/model/optimizer/batch_size/study.json`` and, for every trial, ``trial_id/metadata.json``
and ``trial_id/measurements.csv``. What is written here has more entries in ``study.json`` than
those; readers of the released data ignore them. A trial whose ``metadata.json`` is written is done.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dbsl.base.errors import SettingError, in_line
from dbsl.base.files import write_table, write_text
from dbsl.config.fields import refuse
from dbsl.tools.study.scaling import OBJECTIVE, STATUSES, Study, Trial

STUDY, METADATA, MEASUREMENTS = "study.json", "metadata.json", "measurements.csv"
COLUMNS = ("step", "train/cross_entropy_error", "val/cross_entropy_error")
COLUMNS += ("val/classification_error",)


def dataset_name(dataset: str) -> str:
    """Return what a dataset is called in a layout: a path's last part; a hub id without slashes."""
    path = Path(dataset).expanduser()
    return path.resolve().stem if path.exists() else dataset.replace("/", "--")


def write_study(folder: Path, values: Mapping[str, Any]) -> None:
    """Write a study's ``study.json``, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / STUDY, json.dumps(values, indent=2, sort_keys=True) + "\n")


def write_trial(folder: Path, trial: Trial) -> None:
    """Write a trial into its study's folder; without ``metadata.json`` there is no trial."""
    own, rows = folder / str(trial.trial_id), zip(*trial.measurements.values(), strict=True)
    texts = ([f"{value:.7g}" if np.isfinite(value) else "nan" for value in row] for row in rows)
    table = [dict(zip(trial.measurements, row, strict=True)) for row in texts]
    write_table(own / MEASUREMENTS, table)
    metadata = {name: getattr(trial, name) for name in ("status", "steps", "trial_id")}
    metadata["parameters"] = dict(trial.parameters)
    write_text(own / METADATA, json.dumps(metadata, indent=2, sort_keys=True) + "\n")


def is_written(folder: Path, trial_id: int) -> bool:
    """Whether a study's folder has a trial, whole."""
    return (folder / str(trial_id) / METADATA).exists()


def read_workloads(roots: Iterable[Path]) -> dict[str, list[Study]]:
    """Return all studies under some folders, by workload, sizes ascending."""
    workloads: dict[str, dict[int, Study]] = {}
    for root in roots:
        folders = sorted(path.parent for path in root.rglob(STUDY)) if root.is_dir() else []
        refuse([(not folders, f"folder must have a {STUDY} in it or below", str(root))])
        for study in map(read_study, folders):
            sizes = workloads.setdefault(study.workload, {})
            shown = f"{study.workload} at {study.batch_size} a second time in {root}"
            text = "a workload must have one study of each batch size"
            refuse([(study.batch_size in sizes, text, shown)])
            sizes[study.batch_size] = study
    return {name: [sizes[b] for b in sorted(sizes)] for name, sizes in sorted(workloads.items())}


def read_study(folder: Path) -> Study:
    """Return a study; trials that are being written are not there yet."""
    path = folder / STUDY
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        batch_size = int(values["batch_size"])
        refuse([(batch_size < 1, "batch_size must be at least 1", batch_size)])
        goal = None if values.get("goal_error") is None else float(values["goal_error"])
        names = (str(values[name]) for name in ("dataset", "model", "optimizer"))
        trials = []
        for number in sorted(int(own.name) for own in folder.iterdir() if own.name.isdecimal()):
            path = folder / str(number)
            if is_written(folder, number):
                trials.append(_read_trial(path))
        ends = goal is not None and bool(values.get("early_stopping"))
        return Study(*names, batch_size, tuple(trials), goal, ends)
    except KeyError as error:
        reason = f"no entry {error}"
    except (AttributeError, OSError, TypeError, ValueError) as error:
        reason = in_line(error)
    raise SettingError(f"study files must be as a study writes them, got {path} ({reason})")


def _read_trial(folder: Path) -> Trial:
    values = json.loads((folder / METADATA).read_text(encoding="utf-8"))
    status = values["status"]
    refuse([(status not in STATUSES, f"status must be one of {', '.join(STATUSES)}", status)])
    with open(folder / MEASUREMENTS, encoding="utf-8", newline="") as file:
        header, *rows = list(csv.reader(file)) or [[]]
    missing = [name for name in ("step", OBJECTIVE) if name not in header]
    refuse([(missing, f"measurements must have the columns step and {OBJECTIVE}", header)])
    table = np.array([[float(v or "nan") for v in row] for row in rows], dtype=np.float64)
    columns = dict(zip(header, table.reshape(len(rows), len(header)).T, strict=True))
    return Trial(
        int(values["trial_id"]), status, int(values["steps"]), values["parameters"], columns
    )
