"""The largest batch that is worth having, as a study or an earlier run found it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator

from dbsl.base.errors import SettingError
from dbsl.cluster.collectives import share_text
from dbsl.run.config import RunConfig

REPORT = "report.json"  # a study's


def useful_batch_size(config: RunConfig, accelerator: Accelerator) -> int:
    """Return the bound that ``batch_evidence`` sets, and print its source.

    A study gives its maximum useful batch, a run its gradient noise scale. The main process reads
    it for all.

    Raises:
        SettingError: On every process, if the folder says nothing of this dataset and model.
    """
    found = ""
    if accelerator.is_main_process:
        try:
            batch, source = find_evidence(config)
            found = f"{batch} {source}"
        except SettingError as error:
            found = f"error {error}"
    first, _, rest = share_text(found, accelerator).partition(" ")
    if first == "error":
        raise SettingError(rest)
    accelerator.print(f"large batches are at most {first}: {rest}")
    return int(first)


def find_evidence(config: RunConfig) -> tuple[int, str]:
    """Return the largest useful batch, and its source in words.

    Raises:
        SettingError: If ``batch_evidence`` says nothing of this dataset and model.
    """
    # A hub id's data may have been studied in a local folder.
    names = dict.fromkeys((dataset_name(config.dataset), config.dataset.rpartition("/")[2]))
    workload, *others = (f"{name}/{config.model}/{study_optimizer(config)}" for name in names)
    folder = Path(config.batch_evidence)
    studies = (_of_study(folder, name) for name in (workload, *others))
    found = next(filter(None, studies), None) or _of_run(folder, config)
    if not found:
        raise SettingError(
            f"batch_evidence must be the folder of a study of {workload}, or of a run of "
            f"{config.dataset} and {config.model} with a noise scale, got {folder}"
        )
    return found


def study_optimizer(config: RunConfig) -> str:
    """Return a run's optimizer by the name it has in studies."""
    if config.optimizer in ("sgd", "nesterov", "momentum") and config.momentum == 0:
        return "sgd"
    return {"sgd": "nesterov"}.get(config.optimizer, config.optimizer)


def _of_study(folder: Path, workload: str) -> tuple[int, str] | None:
    useful = _read(folder / REPORT).get(workload, {}).get("useful_batch_size")
    if not useful:
        return None
    return int(useful), f"the maximum useful batch of {workload} in {folder / REPORT}"


def _of_run(folder: Path, config: RunConfig) -> tuple[int, str] | None:
    scale = _read(folder / "summary.json").get("noise_scale")
    path = folder / "config.yaml"
    if not isinstance(scale, float | int) or not math.isfinite(scale) or not path.exists():
        return None
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    if (settings.get("dataset"), settings.get("model")) != (config.dataset, config.model):
        return None
    return max(1, round(scale)), f"the gradient noise scale of {folder / 'summary.json'}"


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingError(f"batch_evidence must be readable JSON, got {path} ({error})") from None
    return values if isinstance(values, dict) else {}


def dataset_name(dataset: str) -> str:
    """Return what a dataset is called in a layout: a path's last part; a hub id without slashes."""
    path = Path(dataset).expanduser()
    return path.resolve().stem if path.exists() else dataset.replace("/", "--")
