"""The run folder: claimed by one run, and each file in it whole or absent."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

from dbsl.config import config_to_yaml
from dbsl.files import write_text
from dbsl.plan import Plan


def make_run_folder(config: Any, plans: Mapping[int, Plan], accelerator: Accelerator) -> Path:
    """Create a run's folder with its ``config.yaml`` and ``plan.json`` on the main process.

    The folder is ``config.output_dir`` or a new one under ``runs/``. ``config.yaml`` leaves the
    folder's name out: read back, it repeats the run elsewhere.

    Raises:
        ValueError: On every process, if the folder exists or cannot be made.
    """
    folder = Path(config.output_dir or _default_folder(config))
    error = None
    if accelerator.is_main_process:
        try:
            folder.mkdir(parents=True)
            settings = {name: v for name, v in asdict(config).items() if name != "output_dir"}
            write_text(folder / "config.yaml", config_to_yaml(settings))
            rows = {f"{resolution} px": asdict(plan) for resolution, plan in plans.items()}
            write_text(folder / "plan.json", json.dumps(rows, indent=2))
        except FileExistsError:
            error = f"output_dir must be a new folder, got {folder}, which exists"
        except OSError as reason:
            error = f"output_dir must be a folder that can be written, got {folder} ({reason})"
    failed = torch.tensor([error is not None], dtype=torch.int32, device=accelerator.device)
    if broadcast(failed).item():  # the other processes must stop too, not wait for this one
        raise ValueError(error or f"output_dir {folder} was refused on the main process")
    return folder


def _default_folder(config: Any) -> str:
    dataset = Path(config.dataset).stem or "data"
    return f"runs/{dataset}-{config.model}-{time.strftime('%Y%m%d-%H%M%S')}"
