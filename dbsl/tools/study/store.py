"""Studies on the disk, in the layout of the measurements that Shallue et al. released.

That is (github.com/google-research/google-research/tree/master/batch_science)
``dataset/model/optimizer/batch_size/study.json`` and, for every trial, ``trial_id/metadata.json``
and ``trial_id/measurements.csv``. What is written here has more entries in ``study.json`` than
those; readers of the released data ignore them. A trial whose ``metadata.json`` is written is done.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from dbsl.base.errors import SettingError, in_line, require
from dbsl.base.files import write_text
from dbsl.tools.study.scaling import OBJECTIVE, Study, Trial

STUDY, METADATA, MEASUREMENTS = "study.json", "metadata.json", "measurements.csv"
COLUMNS = ["step", "train/cross_entropy_error", "val/cross_entropy_error", OBJECTIVE]


def dataset_name(dataset: str) -> str:
    """Return what a dataset is called in a layout: a path's last part; a hub id without slashes."""
    path = Path(dataset).expanduser()
    return path.resolve().stem if path.exists() else dataset.replace("/", "--")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a study's or a trial's JSON file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(values, indent=2, sort_keys=True) + "\n")


def write_trial(folder: Path, trial: Trial) -> None:
    """Write a trial into its study's folder; without ``metadata.json`` there is no trial."""
    own, table = folder / str(trial.trial_id), trial.measurements
    own.mkdir(parents=True, exist_ok=True)
    form = {"float_format": "%.7g", "na_rep": "nan", "lineterminator": "\n"}
    write_text(own / MEASUREMENTS, table.where(np.isfinite(table)).to_csv(index=False, **form))
    metadata = {name: getattr(trial, name) for name in ("status", "steps", "trial_id")}
    write_json(own / METADATA, metadata | {"parameters": dict(trial.parameters)})


def is_written(folder: Path, trial_id: int) -> bool:
    """Whether a study's folder has a trial, whole."""
    return (folder / str(trial_id) / METADATA).exists()


def read_workloads(roots: Iterable[Path]) -> dict[str, list[Study]]:
    """Return all studies under some folders, by workload, sizes ascending."""
    workloads: dict[str, dict[int, Study]] = {}
    for root in roots:
        files = sorted(root.rglob(STUDY))
        require(files, f"folder must have a {STUDY} in it or below", str(root))
        for study in map(_read_study, files):
            sizes = workloads.setdefault(study.workload, {})
            twice = f"{study.workload} at {study.batch_size} a second time in {root}"
            text = "a workload must have one study of each batch size"
            require(study.batch_size not in sizes, text, twice)
            sizes[study.batch_size] = study
    return {name: [sizes[b] for b in sorted(sizes)] for name, sizes in sorted(workloads.items())}


def _read_study(path: Path) -> Study:
    """Return a study; trials that are being written are not there yet."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        names, trials = [values[name] for name in ("dataset", "model", "optimizer")], []
        for of_trial in path.parent.glob(f"*/{METADATA}"):
            trials.append(_read_trial(path := of_trial))
        trials.sort(key=lambda trial: trial.trial_id)
        goal = values.get("goal_error")
        ends = goal is not None and values.get("early_stopping", False)
        return Study(*names, values["batch_size"], tuple(trials), goal, ends)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        reason = f"no entry {error}" if isinstance(error, KeyError) else in_line(error)
        text = f"study files must be as a study writes them, got {path} ({reason})"
        raise SettingError(text) from None


def _read_trial(path: Path) -> Trial:
    values = json.loads(path.read_text(encoding="utf-8"))
    columns = ["step", OBJECTIVE]
    table = pandas.read_csv(path.with_name(MEASUREMENTS), usecols=columns, dtype=float)
    about = (values[name] for name in ("trial_id", "status", "steps", "parameters"))
    return Trial(*about, table)
