"""Which batch size is worth having: steps to result at every batch size, everything else re-tuned.

    python -m dbsl.study --batch-sizes 16,32,64,128,256,512,1024 --goal-error 0.3 --trials 16
    python -m dbsl.study --plot studies/digits-resnet18       # read and draw, train nothing

After Shallue et al. (JMLR 20(112), 2019). Stopped or killed, the same command goes on; the same
command in another shell helps.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from dbsl.base.bounds import in_range
from dbsl.base.cores import threads_of_process
from dbsl.base.errors import EXIT_STOPPED, RunStopped
from dbsl.base.files import write_text
from dbsl.base.flags import parse_flags
from dbsl.base.seeds import stream_seed
from dbsl.data.dataset import Data, load_configured
from dbsl.data.transforms import Transform
from dbsl.jobs import seeing
from dbsl.model import check_optimizer, least_batch
from dbsl.plan.sampler import evaluation_batch_size
from dbsl.plan.stages import default_resolutions
from dbsl.run.accelerator import start_accelerator
from dbsl.run.evidence import dataset_name
from dbsl.run.parse import config_to_yaml
from dbsl.run.stopping import Stopping
from dbsl.study.config import StudyConfig
from dbsl.study.files import read_workloads, study_folder, write_study, write_trial
from dbsl.study.report import write_report
from dbsl.study.scaling import OBJECTIVE
from dbsl.study.search import Claim, TrialStore
from dbsl.study.trials import Images, ImageTask, reached_at, run_trial

SETTINGS = "study.yaml"
_OPTIMIZERS = ("sgd", "momentum", "nesterov")
_PARENT = "DBSL_STUDY_PARENT"
# Settings that may change from one launch to the next: none changes a trial.
_MAY_CHANGE = ("batch_sizes", "optimizers", "trials", "processes", "cpu_threads", "max_minutes")
_MAY_CHANGE += ("output_dir", "plot", "loader_workers", "eval_batch_size", "max_bad_images")
_END_PATIENCE_S = 60.0  # for processes that were asked to stop


def main(argv: Sequence[str] | None = None) -> None:
    """Run a study, or go on with one; with ``--plot`` read and draw finished ones."""
    argv = sys.argv[1:] if argv is None else list(argv)
    config = parse_flags(StudyConfig, argv, prog="python -m dbsl.study")
    if config.plot is not None:
        workloads = read_workloads([Path(folder) for folder in config.plot])
        folder = Path(config.output_dir or config.plot[0])
        if folder.is_file():
            raise ValueError(f"output_dir must be given with an archive, got {folder} alone")
        budgets = (config.max_steps, config.max_examples)
        print(write_report(workloads, folder, config.goal_error, config.objective, budgets))
        return
    for optimizer in config.optimizers:
        if optimizer not in _OPTIMIZERS:
            check_optimizer(optimizer)
    folder = Path(config.output_dir or f"studies/{dataset_name(config.dataset)}-{config.model}")
    is_child = _PARENT in os.environ
    threads = config.cpu_threads or threads_of_process(config.processes)
    torch.set_num_threads(threads)
    accelerator = start_accelerator(config.mixed_precision, 60.0)
    if accelerator.num_processes > 1:
        raise ValueError(
            f"processes must say how many trials run at a time, without a launcher of several, "
            f"got {accelerator.num_processes} launched"
        )
    config = replace(config, mixed_precision=accelerator.mixed_precision)
    images = _load(config, accelerator)
    store = _open(config, folder, images.data)
    deadline = config.max_minutes and time.monotonic() + 60 * config.max_minutes
    with Stopping(deadline, then="giving its trial back") as stopping:
        if config.processes > 1:
            _in_processes(config, argv, threads, stopping)
        else:
            try:
                _work(config, folder, images, store, stopping)
            except RunStopped:
                if is_child:  # its parent says so for all
                    raise SystemExit(EXIT_STOPPED) from None
                raise
    if not is_child:
        workloads = read_workloads([folder / dataset_name(config.dataset)])
        print(write_report(workloads, folder, config.goal_error))
        running = sum(store.counts(name)["running"] for name in _studies(config))
        if running:
            print(f"{running} trials still run in other processes; the last to end reports them")


def _work(
    config: StudyConfig, folder: Path, images: Images, store: TrialStore, stopping: Stopping
) -> None:
    """Run trials until none waits."""
    studies = _studies(config)
    spaces = {name: config.space(optimizer) for name, (optimizer, _) in studies.items()}
    distributions = {name: space.distributions() for name, space in spaces.items()}
    parent = os.environ.get(_PARENT)

    def may_go_on() -> None:
        if stopping.reason or (parent and os.getppid() != int(parent)):
            raise RunStopped("stopped; the same command goes on")

    while True:
        may_go_on()
        claim = store.claim(distributions)
        if claim is None:
            return
        optimizer, batch_size = studies[claim.study]
        try:
            _run_claim(config, folder, images, store, claim, optimizer, batch_size, may_go_on)
        except BaseException as error:
            store.give_back(claim)
            if isinstance(error, torch.OutOfMemoryError):
                raise ValueError(
                    f"batch_sizes must fit into the device's memory, got {batch_size} ({error})"
                ) from None
            raise


def _run_claim(
    config: StudyConfig,
    folder: Path,
    images: Images,
    store: TrialStore,
    claim: Claim,
    optimizer: str,
    batch_size: int,
    may_go_on: Any,
) -> None:
    budget = config.budget(batch_size, len(images.data.train))
    parameters = config.space(optimizer).parameters(claim.searched, budget)
    seed = stream_seed(config.seed, f"trial {optimizer}", batch_size, claim.trial_id)
    began = time.perf_counter()
    trial = run_trial(
        ImageTask(images, optimizer, batch_size, parameters, seed),
        claim.trial_id,
        parameters,
        budget=budget,
        goal=config.goal_error,
        spacing=config.eval_spacing,
        best=lambda: store.best(claim.study),
        early_stopping=config.early_stopping,
        may_go_on=may_go_on,
    )
    # Files first: if the process dies before the store knows, the trial runs again and is the same.
    write_trial(_folder_of(config, folder, optimizer, batch_size), trial)
    reached = reached_at(trial, config.goal_error)
    store.finish(claim, trial.status, reached)
    took = time.perf_counter() - began
    came_to = {
        "INFEASIBLE": f"diverged before step {trial.steps}",
        "INCOMPLETE": f"stopped at step {trial.steps}, a better one was there before",
    }.get(trial.status, f"{reached:.0f} steps to the goal")
    if trial.status == "COMPLETE" and reached == float("inf"):
        error = 100 * trial.measurements[OBJECTIVE].min()
        came_to = f"goal not reached in {trial.steps} steps, least error {error:.1f} %"
    print(
        f"{optimizer}, batch {batch_size}, trial {claim.trial_id}/{config.trials}: {came_to}  "
        f"(lr {parameters['learning_rate']:.3g}, {took:.1f} s)",
        flush=True,
    )


def _in_processes(
    config: StudyConfig, argv: Sequence[str], threads: int, stopping: Stopping
) -> None:
    """Run trials in several processes of this command; all end with this one.

    Raises:
        RunStopped: If it was asked to stop.
        ValueError: If one of them failed.
    """
    one = ["--processes", "1", "--cpu-threads", str(threads)]
    children = []
    devices = torch.cuda.device_count()
    for index in range(config.processes):
        environment = os.environ | {_PARENT: str(os.getpid())}
        if devices > 1:
            environment |= seeing(index % devices)
        command = [sys.executable, "-m", "dbsl.study", *argv, *one]
        # In a session of its own: Ctrl-C reaches this process alone, which asks them to stop.
        children.append(subprocess.Popen(command, env=environment, start_new_session=True))

    def stop() -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)

    stopping.on_signal = stop
    try:
        for child in children:
            child.wait()
    finally:
        stop()
        for child in children:
            try:
                child.wait(_END_PATIENCE_S)
            except subprocess.TimeoutExpired:
                child.kill()
    if stopping.reason:
        raise RunStopped("stopped; the same command goes on")
    failed = [child.returncode for child in children if child.returncode]
    if failed:
        raise ValueError(
            f"all processes must end well, got status {failed[0]} of {len(failed)} (see above); "
            "the same command goes on"
        )


def _load(config: StudyConfig, accelerator: Any) -> Images:
    data = load_configured(config, config.seed, accelerator.device)
    for size in config.batch_sizes:
        in_range("batch_sizes", size, 1, len(data.train))
    resolution = config.resolution or default_resolutions(data.image_side)[-1]
    transform = Transform(resolution, config.augment, data.mirror, data.mean, data.std, config.seed)
    images = Images(
        data,
        config.model,
        transform,
        config.dropout,
        config.label_smoothing,
        evaluation_batch_size(
            config.eval_batch_size, accelerator.device.type, max(config.batch_sizes)
        ),
        accelerator,
    )
    least = least_batch(images.build(config.seed), data.example(1, resolution)[0])
    in_range("batch_sizes", min(config.batch_sizes), least)
    return images


def _open(config: StudyConfig, folder: Path, data: Data) -> TrialStore:
    """Make a study's folder, or open it again, with all trials that are to be run.

    Raises:
        ValueError: If it is the folder of another study.
    """
    settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    kept = {name: value for name, value in settings.items() if name not in _MAY_CHANGE}
    text = config_to_yaml(kept)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / SETTINGS
        if path.exists():
            before = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            now = yaml.safe_load(text)
            for name in sorted({*before, *now}):
                if before.get(name) != now.get(name):
                    raise ValueError(
                        f"{name} must be {before.get(name)} as in {path}, or output_dir another, "
                        f"got {now.get(name)}"
                    )
        else:
            write_text(path, text)
        store = TrialStore(folder)
    except OSError as error:
        raise ValueError(
            f"output_dir must be a folder that can be written, got {folder} ({error})"
        ) from None
    for name, (optimizer, batch_size) in _studies(config).items():
        space = config.space(optimizer)
        store.fill(name, space.distributions(), config.trials, config.seed)
        values = {
            "batch_size": batch_size,
            "dataset": dataset_name(config.dataset),
            "early_stopping": config.early_stopping,
            "goal_error": config.goal_error,
            "model": config.model,
            "optimizer": optimizer,
            "parameter_configs": space.entries(),
            "train_steps": config.budget(batch_size, len(data.train)),
        }
        write_study(_folder_of(config, folder, optimizer, batch_size), values)
    return store


def _studies(config: StudyConfig) -> dict[str, tuple[str, int]]:
    """Return optimizer and batch size of each study, by its name in the store, in order of work."""
    return {f"{o}/{b}": (o, b) for o in config.optimizers for b in sorted(config.batch_sizes)}


def _folder_of(config: StudyConfig, folder: Path, optimizer: str, batch_size: int) -> Path:
    return study_folder(folder, config.dataset, config.model, optimizer, batch_size)
