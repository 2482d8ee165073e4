"""Which batch size is worth having: steps to result at every size, everything else re-tuned.

    python -m dbsl.study --batch-sizes 16,32,64,128,256,512,1024 --goal-error 0.3 --trials 16
    python -m dbsl.study --plot studies/digits-resnet18       # read and draw, train nothing

After Shallue et al. (JMLR 20(112), 2019). Repeat the command to resume a study that was stopped or
killed; repeat it in a second shell to share the work.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import yaml
from filelock import FileLock

from dbsl.base.errors import EXIT_STOPPED, RunStopped, SettingError, as_given
from dbsl.base.files import check_folder, write_text
from dbsl.base.machine import threads_of_process
from dbsl.base.seeds import stream_seed
from dbsl.config.fields import Count, Role, Within, check_fields, refuse, with_role
from dbsl.config.hooks import settings_of_extras
from dbsl.config.image_settings import ImageConfig, check_images
from dbsl.config.parse import config_to_yaml, parse_flags, read_settings
from dbsl.config.settings import MachineConfig, RunConfig
from dbsl.data.dataset import load_data
from dbsl.model import check_sides
from dbsl.optimizer import check_optimizer, default_learning_rate, optim
from dbsl.plan.stages import default_resolutions
from dbsl.run.accelerator import start_accelerator
from dbsl.run.folder import LOCK
from dbsl.run.stopping import Stopping
from dbsl.tools.jobs import of_one_device
from dbsl.tools.study import store, trials
from dbsl.tools.study.report import write_report
from dbsl.tools.study.scaling import OBJECTIVE, Trial, reached_at
from dbsl.tools.study.trials import Images, Range

SETTINGS = "study.yaml"
_PARENT = "DBSL_STUDY_PARENT"  # variable of a process of several: the parent's id
_END_PATIENCE_S = 60.0  # for processes that were asked to stop
_OF_DATA = [own for own in settings_of_extras() if not issubclass(own, RunConfig)]


@dataclass(frozen=True)
class StudyConfig(
    *_OF_DATA, MachineConfig, ImageConfig
):  # every field is a flag, its comment the help
    """Count steps to a goal at every batch size; a range takes two values; one value is fixed."""

    # --- the study
    goal_error: float | None = None  # classification error to fall under, in (0, 1); required
    # samples per step
    batch_sizes: Annotated[tuple[Count, ...], Role.FREE] = (16, 32, 64, 128, 256, 512, 1024)
    trials: Annotated[Count, Role.FREE] = 16  # trials at every batch size
    # optimizers to study: sgd (no momentum), momentum, nesterov, or a name in timm.optim
    optimizers: Annotated[tuple[str, ...], Role.FREE] = ("nesterov",)
    # range of learning rate / (1 - momentum), searched on a log scale; unset: a tenth to a hundred
    # times the optimizer's default rate, 0.01 to 10 for SGD
    effective_lr: Annotated[tuple[float, ...] | None, Within(0, open_low=True)] = None
    # range of momentum, for optimizers that take it; 1 - momentum is searched on a log scale
    momentum: Annotated[tuple[float, ...], Within(0, 1, open_high=True)] = (0.5, 0.99)
    # range of last over first learning rate, searched on a log scale
    decay_factor: Annotated[tuple[float, ...], Within(0, 1, open_low=True)] = (0.01, 1.0)
    # range of the share of the step budget after which the learning rate stops falling
    decay_share: Annotated[tuple[float, ...], Within(0, 1, open_low=True)] = (0.25, 1.0)
    # range of weight decay, searched on a log scale; biases and norms have none
    weight_decay: Annotated[tuple[float, ...], Within(0)] = (5e-4,)
    max_steps: Annotated[int | None, Within(1)] = None  # steps that a trial may take
    # samples that a trial may train on; with neither this nor --max-steps: 40 epochs
    max_examples: Annotated[int | None, Within(1)] = None
    # steps between measurements, as a share of the steps so far
    eval_spacing: Annotated[float, Within(0)] = 0.05
    # end a trial at the goal, or when it can no longer be the best
    early_stopping: bool = True
    # --- model and step
    model: str = "resnet18"  # timm name of the model
    # image side in pixels; unset: the images' own
    resolution: Annotated[int | None, Within(1)] = None
    # dropout before the classifier, in [0, 1)
    dropout: Annotated[float, Within(0, 1, open_high=True)] = 0.0
    # label smoothing, in [0, 1)
    label_smoothing: Annotated[float, Within(0, 1, open_high=True)] = 0.0
    # --- the launch
    # folder of the study; unset: studies/<dataset>-<model>
    output_dir: Annotated[str | None, Role.FREE] = None
    # processes that run trials at a time on this machine; several GPUs are dealt out to them
    processes: Annotated[Count, Role.FREE] = 1
    # studies to read and draw instead of training: folders or tar archives, published ones too
    plot: Annotated[tuple[str, ...] | None, Role.FREE] = None
    # column of the measurements that the goal is about, with --plot
    objective: str = OBJECTIVE

    def __post_init__(self) -> None:
        if self.goal_error is not None and self.objective == OBJECTIVE:
            Within(0, 1, open_low=True, open_high=True).check("goal_error", self.goal_error)
        refuse([(self.plot in ((), ("",)), "plot must name a folder or an archive", "none")])
        if self.plot is None and self.goal_error is None:
            raise SettingError("goal_error must be given, in (0, 1), got none")
        other = self.plot is None and self.objective != OBJECTIVE
        refuse([(other, f"objective must be {OBJECTIVE} except with plot", self.objective)])
        for name in ("batch_sizes", "optimizers"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise SettingError(f"{name} must be one or more, each once, got {as_given(values)}")
        check_fields(self)
        check_images(self)
        rates = () if self.effective_lr is None else ("effective_lr",)
        for name in (*rates, "momentum", "decay_factor", "decay_share"):
            _ends(name, getattr(self, name))
        low, high = _ends("weight_decay", self.weight_decay)
        Within(0, open_low=low != high).check("weight_decay", low)  # a log scale has no 0

    def budget(self, batch_size: int, train_samples: int) -> int:
        """Return the steps that a trial may take at a batch size."""
        if self.max_steps is not None and self.max_examples is None:
            return self.max_steps
        steps = max(1, (self.max_examples or 40 * train_samples) // batch_size)
        return min(steps, self.max_steps or steps)

    def ranges(self, optimizer: str) -> dict[str, Range]:
        """Return what is searched for an optimizer, by the names that parameters have.

        The best learning rate / (1 - momentum) differs less between momenta than the best rate.
        """
        log, name = "LOG_SCALE", trials.TIMM_NAMES.get(optimizer, optimizer)
        has_momentum = optimizer != "sgd" and optim.get_optimizer_info(name).has_momentum
        momentum = Range(*_ends("momentum", self.momentum), "REVERSE_LOG_SCALE")
        rate = default_learning_rate(name)
        rates = self.effective_lr or (rate / 10, 100 * rate)
        return {
            "effective_learning_rate": Range(*_ends("effective_lr", rates), log),
            **({"momentum": momentum} if has_momentum else {}),
            "end_learning_rate_factor": Range(*_ends("decay_factor", self.decay_factor), log),
            "learning_rate_decay_share": Range(
                *_ends("decay_share", self.decay_share), "LINEAR_SCALE"
            ),
            "weight_decay": Range(*_ends("weight_decay", self.weight_decay), log),
        }


def _ends(name: str, values: Sequence[float]) -> tuple[float, float]:
    if len(values) not in (1, 2) or values[0] > values[-1]:
        raise SettingError(f"{name} must be one value, or a range's ends, got {as_given(values)}")
    return values[0], values[-1]


def main(argv: Sequence[str] | None = None) -> None:
    """Run a study, or go on with one; with ``--plot`` read and draw finished ones."""
    argv = sys.argv[1:] if argv is None else list(argv)
    config = parse_flags(StudyConfig, argv, prog="python -m dbsl.study")
    if config.plot is not None:
        _plot(config)
        return
    for optimizer in config.optimizers:
        if optimizer not in trials.TIMM_NAMES:
            check_optimizer(optimizer)
    is_child = _PARENT in os.environ
    threads = config.cpu_threads or threads_of_process(config.processes)
    torch.set_num_threads(threads)
    accelerator = start_accelerator(config.mixed_precision, 60.0)
    if accelerator.num_processes > 1:
        raise SettingError(
            "processes must set the number of trials at a time, without a launcher of several "
            f"processes, got {accelerator.num_processes} launched"
        )
    config = replace(config, mixed_precision=accelerator.mixed_precision)
    work = _open(config, _load(config, accelerator))
    deadline = config.max_minutes and time.monotonic() + 60 * config.max_minutes
    with Stopping(deadline, then="giving its trial back") as stopping:
        if config.processes > 1:
            _in_processes(config, argv, threads, stopping)
        else:
            try:
                _run_all(work, stopping)
            except RunStopped:
                if is_child:  # its parent says so for all
                    raise SystemExit(EXIT_STOPPED) from None
                raise
    if not is_child:
        workloads = store.read_workloads([work.folder / store.dataset_name(config.dataset)])
        print(write_report(workloads, work.folder, config.goal_error))
        if running := work.claims.running():
            print(f"{running} trials still run in other processes; the last one writes the report")


def _plot(config: StudyConfig) -> None:
    workloads = store.read_workloads([Path(folder) for folder in config.plot])
    folder = Path(config.output_dir or config.plot[0])
    alone = config.output_dir is None and folder.is_file()
    refuse([(alone, "output_dir must be given with an archive", f"{folder} alone")])
    check_folder("output_dir", folder)
    budgets = (config.max_steps, config.max_examples)
    print(write_report(workloads, folder, config.goal_error, config.objective, budgets))


@dataclass(frozen=True)
class _Work:
    """An open study folder, and what its trials need."""

    config: StudyConfig
    folder: Path
    images: Images
    claims: store.Claims

    def run(self, claim: store.Claim, may_go_on: Callable[[], object]) -> None:
        """Run a trial that this process has taken on, and write it."""
        config, (optimizer, batch_size) = self.config, _studies(self.config)[claim.study]
        budget = config.budget(batch_size, len(self.images.data.train))
        seed = stream_seed(config.seed, f"search {claim.study}")
        points = trials.search_points(config.ranges(optimizer), config.trials, seed)
        parameters = trials.trial_parameters(points[claim.trial_id - 1], budget)
        seed = stream_seed(config.seed, f"trial {optimizer}", batch_size, claim.trial_id)
        began = time.perf_counter()
        trial = trials.run_trial(
            trials.ImageTask(self.images, optimizer, batch_size, parameters, seed),
            claim.trial_id,
            parameters,
            budget=budget,
            goal=config.goal_error,
            spacing=config.eval_spacing,
            best=lambda: self.claims.best(claim.study),
            early_stopping=config.early_stopping,
            may_go_on=may_go_on,
        )
        store.write_trial(_folder_of(config, self.folder, optimizer, batch_size), trial)
        print(
            f"{optimizer}, batch {batch_size}, trial {claim.trial_id}/{config.trials}: "
            f"{_outcome(trial, config.goal_error)}  "
            f"(lr {parameters['learning_rate']:.3g}, {time.perf_counter() - began:.1f} s)",
            flush=True,
        )


def _run_all(work: _Work, stopping: Stopping) -> None:
    parent = os.environ.get(_PARENT)

    def may_go_on() -> None:
        if stopping.reason or (parent and os.getppid() != int(parent)):
            raise RunStopped("stopped; repeat the command to continue")

    while True:
        may_go_on()
        claim = work.claims.claim()
        if claim is None:
            return
        try:
            work.run(claim, may_go_on)
        except BaseException as error:
            work.claims.give_back(claim)
            if isinstance(error, torch.OutOfMemoryError):
                _, batch_size = _studies(work.config)[claim.study]
                raise SettingError(
                    f"batch_sizes must fit into the device's memory, got {batch_size} ({error})"
                ) from None
            raise
        work.claims.finish(claim)


def _outcome(trial: Trial, goal: float) -> str:
    if trial.status == "INFEASIBLE":
        return f"diverged before step {trial.steps}"
    if trial.status == "INCOMPLETE":
        return f"stopped at step {trial.steps}, a better one was there before"
    reached = reached_at(trial, goal)
    if reached < float("inf"):
        return f"{reached:.0f} steps to the goal"
    error = 100 * trial.measurements[OBJECTIVE].min()
    return f"goal not reached in {trial.steps} steps, least error {error:.1f} %"


def _in_processes(
    config: StudyConfig, argv: Sequence[str], threads: int, stopping: Stopping
) -> None:
    """Run trials in several processes of this command; all end with this one."""
    one = ["--processes", "1", "--cpu-threads", str(threads)]
    children = []
    for index in range(config.processes):
        environment = os.environ | {_PARENT: str(os.getpid())} | of_one_device(index)
        command = [sys.executable, "-m", "dbsl.study", *argv, *one]
        # In a session of its own: Ctrl-C reaches this process alone, which asks them to stop.
        children.append(subprocess.Popen(command, env=environment, start_new_session=True))

    def stop() -> None:
        for child in children:
            child.terminate()  # nothing happens to one that has ended

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
        raise RunStopped("stopped; repeat the command to continue")
    failed = [child.returncode for child in children if child.returncode]
    if failed:
        raise SettingError(
            f"all processes must end with status 0, got status {failed[0]} of {len(failed)} (see "
            "above); repeat the command to continue"
        )


def _load(config: StudyConfig, accelerator: Any) -> Images:
    data = load_data(config, config.seed, accelerator.device)
    for size in config.batch_sizes:
        Within(1, len(data.train)).check("batch_sizes", size)
    resolution = config.resolution or default_resolutions(data.image_side)[-1]
    transform = data.transform(resolution, config.augmentation, config.seed)
    images = Images(config, data, transform, accelerator)
    least = check_sides(config.model, images.build(config.seed), data, (resolution,))
    Within(least).check("batch_sizes", min(config.batch_sizes))
    return images


def _open(config: StudyConfig, images: Images) -> _Work:
    """Make a study's folder, or open it again if it is of the same study."""
    dataset = store.dataset_name(config.dataset)
    folder = Path(config.output_dir or f"studies/{dataset}-{config.model}")
    studies = _studies(config)
    folders = {name: _folder_of(config, folder, *own) for name, own in studies.items()}
    try:
        _keep_settings(config, folder)
        claims = store.Claims(folder, folders, config.trials, config.goal_error)
        for name, (optimizer, batch_size) in studies.items():
            values = {
                "batch_size": batch_size,
                "dataset": dataset,
                "early_stopping": config.early_stopping,
                "goal_error": config.goal_error,
                "model": config.model,
                "optimizer": optimizer,
                "parameter_configs": trials.search_entries(config.ranges(optimizer)),
                "train_steps": config.budget(batch_size, len(images.data.train)),
            }
            store.write_study(folders[name], values)
    except OSError as error:
        raise SettingError(
            f"output_dir must be a folder that can be written, got {folder} ({error})"
        ) from None
    return _Work(config, folder, images, claims)


def _keep_settings(config: StudyConfig, folder: Path) -> None:
    """Write a study's settings, or check that they are those it was begun with."""
    settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    settings["augment"] = config.augmentation
    # A launch may change what changes no trial. What is evaluated does: it tells of the goal.
    free = {*with_role(type(config), Role.FREE | Role.NODE)} - {"eval_samples"}
    text = config_to_yaml({n: value for n, value in settings.items() if n not in free})
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SETTINGS
    with FileLock(folder / LOCK):  # another process may begin a study here at the same time
        if not path.exists():
            of_run = (folder / "config.yaml").exists()
            refuse([(of_run, "output_dir must not be a run's folder", str(folder))])
            write_text(path, text)
            return
    before, now = read_settings(path), yaml.safe_load(text)
    for name in sorted({*before, *now}):
        text = f"{name} must be {as_given(before.get(name))} as in {path}, or output_dir another"
        refuse([(before.get(name) != now.get(name), text, now.get(name))])


def _studies(config: StudyConfig) -> dict[str, tuple[str, int]]:
    """Return optimizer and batch size of each study, by its name in the store, in order of work."""
    return {f"{o}/{b}": (o, b) for o in config.optimizers for b in sorted(config.batch_sizes)}


def _folder_of(config: StudyConfig, folder: Path, optimizer: str, batch_size: int) -> Path:
    model = config.model.replace("/", "--")
    return folder / store.dataset_name(config.dataset) / model / optimizer / str(batch_size)
