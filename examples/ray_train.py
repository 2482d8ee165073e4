"""Ray Train runs train.py's loop: it places the workers, and starts them again when one is lost.

    pip install "ray[train]"
    python -m examples.ray_train --output-dir runs/ray --ray-workers 2 --small-ratio 0.5
    python -m examples.ray_train --output-dir runs/ray --ray-workers 1-4 --gpu --sync step

All other flags are train.py's. `1-4` uses as many workers as the cluster has room for. When a
worker dies, Ray restarts all, and they resume from the newest checkpoint in the run folder, with
the same number of workers or another. All nodes must see that folder, and this one.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import train
from dbsl.base.errors import EXIT_STOPPED, RunStopped, one_line_errors
from dbsl.config.parse import parse_config

ROOT = Path(train.__file__).resolve().parent


def train_worker(settings: dict[str, Any]) -> str | None:
    """Train on one worker, in Ray's process group; return why it was stopped."""
    os.chdir(settings["folder"])  # Ray's workers have folders of their own
    try:
        train.main(parse_config(train.Config, settings["flags"]))
    except RunStopped as stopped:  # --max-minutes: not a failure, so Ray does not restart it
        return str(stopped)
    return None


def _numbers(text: str) -> tuple[int, ...]:
    """Return the number of workers, or the minimum and maximum."""
    numbers = tuple(int(n) if n.isdigit() else 0 for n in text.split("-"))
    if len(numbers) > 2 or min(numbers) < 1 or numbers != tuple(sorted(numbers)):
        raise argparse.ArgumentTypeError(f"must be a number of workers, or as in 1-4, got {text}")
    return numbers


def main() -> None:
    """Train on Ray's workers; exit with status 75 if the run was stopped, to be resumed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output-dir", required=True, help="run folder, which all nodes see")
    parser.add_argument(
        "--ray-workers", type=_numbers, default=(2,), help="their number, or as in 1-4"
    )
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--max-failures", type=int, default=3, help="restarts after lost workers")
    arguments, others = parser.parse_known_args()
    folder = Path(arguments.output_dir).resolve()
    numbers = arguments.ray_workers
    flags = ["--resume", "auto", "--output-dir", str(folder), *others]
    with one_line_errors():  # a wrong flag ends it here, not in each worker's restarts
        parse_config(train.Config, flags)
    # Workers find train.py here, and print lines once although a tracker wraps stdout.
    environment = {"PYTHONPATH": str(ROOT), "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}
    ray.init(runtime_env={"env_vars": environment}, ignore_reinit_error=True)
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"flags": flags, "folder": os.getcwd()},
        scaling_config=ScalingConfig(
            num_workers=numbers if len(numbers) > 1 else numbers[0], use_gpu=arguments.gpu
        ),
        # Ray's own records; the checkpoints are train.py's, in its run folder.
        run_config=RunConfig(
            name=folder.name,
            storage_path=str(folder.parent / "ray"),
            failure_config=FailureConfig(max_failures=arguments.max_failures),
        ),
    )
    stopped = trainer.fit().return_value
    if stopped:
        print(stopped)
        raise SystemExit(EXIT_STOPPED)


if __name__ == "__main__":
    main()
