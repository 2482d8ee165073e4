"""What a run's settings must meet once launch, data, workers and plans are known."""

from __future__ import annotations

from accelerate import Accelerator

from dbsl.base.errors import SettingError
from dbsl.base.words import plural
from dbsl.data.sources import TrainingData
from dbsl.run.config import RunConfig, takes_joint_steps
from dbsl.run.run import Run
from dbsl.run.workers import Workers


def check_processes(config: RunConfig, accelerator: Accelerator) -> None:
    """Raise ``SettingError`` for a setting that goes with another number of processes."""
    processes = accelerator.num_processes
    if config.time_noise and processes > 1:
        raise SettingError(
            f"time_noise must be 0 with several processes, whose times are real, "
            f"got {config.time_noise:g}"
        )
    if config.link_gbps is not None and processes > 1:
        raise SettingError(
            "link_gbps must be unset with several processes, whose network is real, "
            f"got {config.link_gbps:g}"
        )
    if config.wire != "float32" and processes == 1:
        raise SettingError(
            f"wire must be float32 in one process, where nothing is sent, got {config.wire}"
        )
    if config.sync_batch_norm and (processes == 1 or accelerator.device.type != "cuda"):
        raise SettingError(
            f"sync_batch_norm must be false except with a process per worker on CUDA devices, got "
            f"true in {processes} processes on {accelerator.device.type}"
        )


def check_micro_batches(known: Workers, least: int) -> None:
    """Raise ``SettingError`` for micro-batches smaller than `least` samples."""
    sizes = [size for row in (known.micro_batch_sizes or {}).values() for size in row]
    if sizes and min(sizes) < least:
        raise SettingError(
            f"micro_batch_size must be at least {least}, since batch norm sees one value a channel "
            f"of a single sample, got {min(sizes)}"
        )


def check_samples(data: TrainingData, config: RunConfig, least: int) -> None:
    """Raise ``SettingError`` unless each worker can have `least` samples in each round."""
    samples = len(data.train)
    rounds = 1 if takes_joint_steps(config) else config.rounds_per_epoch
    needed = config.workers * rounds * least
    if samples < needed:
        why = ", whose batch norm needs 2 at a time" if least > 1 else ""
        raise SettingError(
            f"dataset must have at least {needed} training {data.unit}s for {config.workers} "
            f"workers in {plural(rounds, 'round')} an epoch{why}, got {samples}: lower --workers "
            f"(--nproc-per-node, --num_processes) or --rounds-per-epoch, or add {data.unit}s"
        )


def check_room(run: Run) -> None:
    """Raise ``SettingError`` unless the images that are read at once have room in the cache."""
    config, data = run.config, run.data
    if config.cache_gib is None:
        return
    in_order = run.evaluation_batch if getattr(config, "eval_train", False) else 0
    batch = max(run.largest_batch, run.statistics_batch if run.ema else 0)
    data.train.check_room(batch, in_order=in_order)
    data.evaluation.check_room(1, in_order=run.evaluation_batch)
