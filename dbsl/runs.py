"""A run from its settings to its summary: its processes and its folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from dbsl.base.machine import check_installed, threads_of_process
from dbsl.checkpoint import resume
from dbsl.checkpoint.checkpoint import Checkpoint, PlainFolder
from dbsl.config.complete import found_by, with_found
from dbsl.config.hooks import Extra, Extras
from dbsl.config.parse import run_folder_of
from dbsl.config.settings import RunConfig, check_effects
from dbsl.data.dataset import Data, load_data
from dbsl.data.sources import TrainingData
from dbsl.log.lines import print_run
from dbsl.log.log import RunLog, check_result
from dbsl.log.rows import evaluation_row
from dbsl.model import save_model
from dbsl.optimizer import check_optimizer, default_learning_rate
from dbsl.plan.types import EpochEnd
from dbsl.run import accelerator as processes
from dbsl.run.folder import LockedFolder, check_alike, default_folder, read_code
from dbsl.run.plans import Plans, count_workers, settle_islands
from dbsl.run.stopping import Stopping, deadline_of
from dbsl.run.turns import WorkerTurn, refuse_order
from dbsl.run.workers import Workers

Metrics = Mapping[str, Any] | None


def start_accelerator(given: RunConfig) -> Accelerator:
    """Connect the processes; refuse settings and code unlike rank 0's (a collective)."""
    check_installed()
    config = with_found(given)
    check_optimizer(given.optimizer, given.optimizer_settings, given.momentum, given.weight_decay)
    torch.set_num_threads(config.cpu_threads or threads_of_process())  # results' bits depend on it
    config = _with_rate(replace(config, cpu_threads=torch.get_num_threads()))
    check = partial(check_alike, config, read_code())
    return processes.start_accelerator(config.mixed_precision, config.worker_timeout, check)


def load_images(config: RunConfig, accelerator: Accelerator) -> Data:
    """Return the images that the settings name, as samples by number, on the device."""
    with processes.first_on_node(accelerator):  # one process decodes, the others read its cache
        return load_data(config, config.seed, accelerator.device)


def _with_rate(config: RunConfig) -> RunConfig:
    return config if config.lr else replace(config, lr=default_learning_rate(config.optimizer))


class RunFolder(PlainFolder, AbstractContextManager):
    """A run's folder: its settings, its results, and the checkpoint that it resumes.

    Everything is read and checked before `begin` writes anything. `config` has the settings with
    all that this launch decides: workers, precision, learning rate.
    """

    is_finished = False  # nothing is left to train

    def __init__(self, given: RunConfig, accelerator: Accelerator) -> None:
        self._began = time.perf_counter()
        self._given, self._accelerator, self._code = given, accelerator, read_code()
        self._deadline, self._stopping = deadline_of(given.max_minutes), None
        self.log: RunLog | None = None  # metrics, lines, trackers

    def __enter__(self) -> RunFolder:
        with ExitStack() as exits:
            self._open(exits)
            self._exits = exits.pop_all()
        return self

    def _open(self, exits: ExitStack) -> None:
        """Fill in open settings, lock the folder, and find the checkpoint to resume."""
        given, accelerator = self._given, self._accelerator
        # Open settings are auto, and threads, where unlike nodes have their own.
        count, nodes = accelerator.num_processes, processes.nodes_of(accelerator)
        threads = processes.common_threads(accelerator)
        found_out = {"mixed_precision": accelerator.mixed_precision, "cpu_threads": threads}
        config = settle_islands(_with_rate(replace(with_found(given), **found_out)), count, nodes)
        before = config.resume and run_folder_of(config.resume, config.output_dir)
        if before and not (before / "config.yaml").is_file():
            before = None  # auto's first start
        self.folder = before or Path(config.output_dir or default_folder(config))
        if not config.plan_only:
            # First, so that no time is spent on measuring if the folder cannot be written.
            how = {"new": before is None, "named": bool(before or config.output_dir)}
            self._locked = exits.enter_context(LockedFolder(self.folder, accelerator, **how))
            self.folder = self._locked.path
        self.found = found = before and resume.find_checkpoint(before, config, accelerator)
        if before and resume.is_finished(before, found, config):
            self.is_finished, self.config = True, config
            accelerator.print(f"{self.folder} is finished: nothing to resume")
            return
        if before is None:
            check_effects(config, count)
        elif found is None:
            accelerator.print(f"{before} has no checkpoint yet: the run starts again")
        changes = resume.changes_for(config, found, count, given)
        now = replace(config, **changes)
        said = {n: v for n, v in changes.items() if getattr(given, n) is not None}
        self._given = replace(given, **said)
        self._unset = self._given.workers is None and count == 1
        self.config = count_workers(settle_islands(now, count, nodes), count)
        Extras.of(self.config).first(Extra.machine, self.config, accelerator)  # to refuse early

    def tell(self, plans: Plans, data: TrainingData, model: nn.Module) -> None:
        """Print what the run would do: the plan of each resolution, with timelines."""
        print_run(plans, data, model, self._accelerator, unset=self._unset)

    def begin(self, workers: Workers, checkpoint: Checkpoint) -> None:
        """Write the given and found settings, and take over the folder if the run resumes.

        Everything has been read and fits; from here on, the folder is written.
        """
        self.workers, self._checkpoint, found = workers, checkpoint, self.found
        accelerator, plans, resumed = self._accelerator, workers.plans, checkpoint.resumed
        stopping = Stopping(self._deadline, on_signal=workers.cluster.interrupt)
        self._stopping = self._exits.enter_context(stopping)
        # First, because a folder without settings cannot be resumed.
        found_out = self.complete(plans.config).found
        self._locked.write_settings(self._given, found_out, plans.first)
        self._locked.keep_script(self._code)
        if found:
            resume.take_over_folder(found, plans.config, accelerator)
        state = None
        if resumed and resumed.state["log"]:
            state = {**resumed.state["log"], "stages": resumed.state["stages"]}
        done = min(found.manifest.epoch if found else 0, plans.config.epochs - 1)
        shown = (plans, workers.data, workers.raw_model, accelerator, self.folder)
        print_run(*shown, begin=done, unset=self._unset)
        self.log = RunLog(self.folder, workers, state)
        self._exits.enter_context(self.log)
        self._exits.push(self._sum_up)
        self.log.started(workers.stopwatch.start_training(self._began))

    @property
    def stop_reason(self) -> str | None:
        """Why the run must stop, or None."""
        return self._stopping and self._stopping.reason

    def complete(self, config: RunConfig) -> RunConfig:
        """Return the settings with the found values, by name, beside the given ones."""
        processes = self._accelerator.num_processes
        return replace(config, found=found_by(self._given, config, processes))

    def plan(self, turn: WorkerTurn) -> None:
        """Record the plan of a turn if it has changed."""
        refuse_order(self.log is None, "call run.begin before its first turn", "none")
        self.log.plan(turn.epoch, turn.plan)

    def log_rounds(self) -> None:
        """Record the workers' reports of their rounds, and lost workers."""
        self.log.hear(self.workers.cluster)

    def epoch(self, end: EpochEnd, metrics: Metrics) -> None:
        """Record the end of an epoch, and print a line."""
        workers = self.workers
        result = None if metrics is None else evaluation_row(metrics, workers.side)
        clocks = {"train_time_s": workers.train_time_s, "virtual_time_s": workers.cluster.time_s}
        self.log.epoch_end(end.epoch, result, **clocks)

    def is_best(self, metrics: Mapping[str, Any]) -> bool:
        """Return whether metrics not yet recorded have the best accuracy so far."""
        found = evaluation_row(metrics, self.workers.side)
        return self.log.is_best(found["accuracy"], found["loss"])

    def evaluate_more(
        self, end: EpochEnd, metrics: Metrics, evaluate: Callable[[], Mapping[str, Any]]
    ) -> Metrics:
        """Return metrics with extras' additions; the model has the merged weights."""
        return self.workers.plans.extras.evaluated(self, end, metrics, evaluate)

    def save_model(self, name: str) -> None:
        """Write the model's current weights, on the main process."""
        workers = self.workers
        if self._accelerator.is_main_process:
            save_model(workers.raw_model, self.folder, workers.side, workers.data, name=name)

    def _sum_up(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.log.sum_up()
            self._checkpoint.clean_up()

    def __exit__(self, *error: Any) -> None:
        """Summarize the run unless an exception ended it, and unlock the folder."""
        self._exits.__exit__(*error)
        if error[0] is None:
            self._accelerator.end_training()
            if self.is_finished or self.log is not None:
                check_result(self.folder, self.config, self._accelerator)
