"""Which batch size is worth having: steps to result at every size, everything else re-tuned.

    python -m dbsl.study --batch-sizes 16,32,64,128,256,512,1024 --goal-error 0.3 --trials 16
    python -m dbsl.study --plot studies/digits-resnet18       # read and draw, train nothing

After Shallue et al. (JMLR 20(112), 2019). Repeat the command to resume a study that was stopped or
killed; repeat it in a second shell to share the work.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import le
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import yaml
from filelock import FileLock

from dbsl.base.errors import (
    RunStopped,
    SettingError,
    as_given,
    plural,
)
from dbsl.base.files import check_folder, write_text
from dbsl.base.machine import threads_of_process
from dbsl.base.seeds import stream_seed
from dbsl.config.fields import Count, Role, Within, check_fields, refuse, with_role
from dbsl.config.hooks import settings_of_extras
from dbsl.config.image_settings import ImageConfig, check_images
from dbsl.config.parse import config_to_yaml, parse_flags, read_settings
from dbsl.config.settings import MachineConfig, RunConfig
from dbsl.data.dataset import load_data
from dbsl.model import check_model
from dbsl.optimizer import check_optimizer, default_learning_rate, optim
from dbsl.plan.stages import default_resolutions
from dbsl.run.accelerator import start_accelerator
from dbsl.run.folder import LOCK
from dbsl.run.stopping import Stopping
from dbsl.tools.study import store, trials
from dbsl.tools.study.queue import Queue, Search
from dbsl.tools.study.report import write_report
from dbsl.tools.study.scaling import OBJECTIVE, reached_at
from dbsl.tools.study.trials import Images, ImageTask, Range

SETTINGS = "study.yaml"
_LOOK_S = 1.0  # between looks at what other processes run
# Bounds of what is searched: one value, or a range's ends.
_Ends = partial(Within, lengths=(1, 2), order=le)
_OF_DATA = [own for own in settings_of_extras() if not issubclass(own, RunConfig)]


@dataclass(frozen=True)
class StudyConfig(
    *_OF_DATA, MachineConfig, ImageConfig
):  # every field is a flag, its comment the help
    """Count steps to a goal at every batch size; a range takes two values; one value is fixed."""

    # --- the study
    # classification error to fall under, in (0, 1); required
    goal_error: Annotated[float | None, Within(0, 1, open_low=True, open_high=True)] = None
    # samples per step
    batch_sizes: Annotated[tuple[Count, ...], Role.FREE] = (16, 32, 64, 128, 256, 512, 1024)
    trials: Annotated[Count, Role.FREE] = 16  # trials at every batch size
    # optimizers to study: sgd (no momentum), momentum, nesterov, or a name in timm.optim
    optimizers: Annotated[tuple[str, ...], Role.FREE] = ("nesterov",)
    # range of learning rate / (1 - momentum), searched on a log scale; unset: a tenth to a hundred
    # times the optimizer's default rate, 0.01 to 10 for SGD
    effective_lr: Annotated[tuple[float, ...] | None, _Ends(0, open_low=True)] = None
    # range of momentum, for optimizers that take it; 1 - momentum is searched on a log scale
    momentum: Annotated[tuple[float, ...], _Ends(0, 1, open_high=True)] = (0.5, 0.99)
    # range of last over first learning rate, searched on a log scale
    decay_factor: Annotated[tuple[float, ...], _Ends(0, 1, open_low=True)] = (0.01, 1.0)
    # range of the share of the step budget after which the learning rate stops falling
    decay_share: Annotated[tuple[float, ...], _Ends(0, 1, open_low=True)] = (0.25, 1.0)
    # range of weight decay, searched on a log scale; biases and norms have none
    weight_decay: Annotated[tuple[float, ...], _Ends(0)] = (5e-4,)
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
    # folders of studies to read and draw instead of training, published ones too
    plot: Annotated[tuple[str, ...] | None, Role.FREE] = None

    def __post_init__(self) -> None:
        missing = self.plot is None and self.goal_error is None
        refuse(
            [
                (self.plot in ((), ("",)), "plot must name a folder", "none"),
                (missing, "goal_error must be given, in (0, 1)", "none"),
            ]
        )
        for name in ("batch_sizes", "optimizers"):
            values = getattr(self, name)
            bad = not values or len(set(values)) < len(values)
            refuse([(bad, f"{name} must be one or more, each once", values)])
        check_fields(self)
        check_images(self)
        searched = len({*self.weight_decay}) > 1
        Within(0, open_low=searched).check("weight_decay", self.weight_decay)  # a log has no 0

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
        name = trials.TIMM_NAMES.get(optimizer, optimizer)
        rate = default_learning_rate(name)
        given = {
            "effective_learning_rate": (self.effective_lr or (rate / 10, 100 * rate), "LOG_SCALE"),
            "momentum": (self.momentum, "REVERSE_LOG_SCALE"),
            "end_learning_rate_factor": (self.decay_factor, "LOG_SCALE"),
            "learning_rate_decay_share": (self.decay_share, "LINEAR_SCALE"),
            "weight_decay": (self.weight_decay, "LOG_SCALE"),
        }
        if optimizer == "sgd" or not optim.get_optimizer_info(name).has_momentum:
            del given["momentum"]
        return {name: Range(own[0], own[-1], scale) for name, (own, scale) in given.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a study, or go on with one; with ``--plot`` read and draw finished ones."""
    config = parse_flags(StudyConfig, argv, prog="python -m dbsl.study")
    if config.plot is not None:
        _plot(config)
        return
    for optimizer in config.optimizers:
        if optimizer not in trials.TIMM_NAMES:
            check_optimizer(optimizer)
    torch.set_num_threads(config.cpu_threads or threads_of_process())
    accelerator = start_accelerator(config.mixed_precision, 60.0)
    if accelerator.num_processes > 1:
        raise SettingError(
            "a study must be launched once for each process, without a launcher of several, "
            f"got {accelerator.num_processes} processes"
        )
    config = replace(config, mixed_precision=accelerator.mixed_precision)
    images = _load(config, accelerator)
    folder, searches = _open(config, len(images.data.train))
    work = _Work(config, images, Queue(folder, searches))
    deadline = config.max_minutes and time.monotonic() + 60 * config.max_minutes
    stopping = Stopping(deadline, then="giving its trial back")
    with stopping:
        work.run_all(stopping)
    workloads = store.read_workloads([folder / store.dataset_name(config.dataset)])
    print(write_report(workloads, folder, config.goal_error))


def _plot(config: StudyConfig) -> None:
    workloads = store.read_workloads([Path(folder) for folder in config.plot])
    folder = Path(config.output_dir or config.plot[0])
    check_folder("output_dir", folder)
    print(write_report(workloads, folder, config.goal_error))


@dataclass(frozen=True)
class _Work:
    """A study's trials, and what they need."""

    config: StudyConfig
    images: Images
    queue: Queue

    def run_all(self, stopping: Stopping) -> None:
        """Run trials until all are done; wait for those of other processes, which may die."""
        waits = False

        def may_go_on() -> None:
            if stopping.reason:
                raise RunStopped("stopped; repeat the command to continue")

        while True:
            may_go_on()
            if taken := self.queue.take():
                self._run(*taken, may_go_on)
                continue
            if not (running := self.queue.running()):
                return
            if not waits:
                print(f"waiting for {plural(running, 'trial')} of other processes", flush=True)
            waits = True
            time.sleep(_LOOK_S)

    def _run(self, search: Search, given: Any, may_go_on: Callable[[], object]) -> None:
        """Run a trial that this process has taken on, and write it."""
        config, number, began = self.config, given.user_attrs["trial_id"], time.perf_counter()
        try:
            point = {
                name: given.suggest_float(name, own.low, own.high)
                for name, own in config.ranges(search.optimizer).items()
            }
            parameters = trials.trial_parameters(point, search.budget)
            of_trial = (f"trial {search.optimizer}", search.batch_size, number)
            seed = stream_seed(config.seed, *of_trial)
            trial = trials.run_trial(
                ImageTask(self.images, search.optimizer, search.batch_size, parameters, seed),
                number,
                parameters,
                budget=search.budget,
                goal=config.goal_error,
                spacing=config.eval_spacing,
                best=lambda: self.queue.best(search),
                early_stopping=config.early_stopping,
                may_go_on=may_go_on,
            )
            store.write_trial(search.folder, trial)
        except BaseException as error:
            self.queue.give_back(search, given)
            if isinstance(error, torch.OutOfMemoryError):
                text = "batch_sizes must fit into the device's memory"
                raise SettingError(f"{text}, got {search.batch_size} ({error})") from None
            raise
        self.queue.finish(search, given, trial.status, reached_at(trial, config.goal_error))
        least = np.nanmin(trial.measurements[OBJECTIVE])
        print(
            f"{search.optimizer}, batch {search.batch_size}, trial {number}/{config.trials}: "
            f"{trial.status} after {plural(trial.steps, 'step')}, least error {100 * least:.1f} %  "
            f"(lr {parameters['learning_rate']:.3g}, {time.perf_counter() - began:.1f} s)",
            flush=True,
        )


def _load(config: StudyConfig, accelerator: Any) -> Images:
    data = load_data(config, config.seed, accelerator.device)
    for size in config.batch_sizes:
        Within(1, len(data.train)).check("batch_sizes", size)
    resolution = config.resolution or default_resolutions(data.image_side)[-1]
    transform = data.transform(resolution, config.augmentation, config.seed)
    images = Images(config, data, transform, accelerator)
    least = check_model(images.build(config.seed), data, config.model, (resolution,))
    Within(least).check("batch_sizes", min(config.batch_sizes))
    return images


def _open(config: StudyConfig, train_samples: int) -> tuple[Path, list[Search]]:
    """Make a study's folder, or open it again if it is of the same study."""
    dataset = store.dataset_name(config.dataset)
    folder = Path(config.output_dir or f"studies/{dataset}-{config.model}")
    check_folder("output_dir", folder)
    _keep_settings(config, folder)
    searches = []
    for optimizer in config.optimizers:
        ranges = config.ranges(optimizer)
        for batch_size in sorted(config.batch_sizes):
            budget = config.budget(batch_size, train_samples)
            model = config.model.replace("/", "--")
            own = folder / dataset / model / optimizer / str(batch_size)
            values = {
                "batch_size": batch_size,
                "dataset": dataset,
                "early_stopping": config.early_stopping,
                "goal_error": config.goal_error,
                "model": config.model,
                "optimizer": optimizer,
                "parameter_configs": trials.search_entries(ranges),
                "train_steps": budget,
            }
            store.write_study(own, values)
            seed = stream_seed(config.seed, f"search {optimizer}/{batch_size}")
            points = trials.search_points(ranges, config.trials, seed)
            searches.append(Search(optimizer, batch_size, budget, own, points))
    return folder, searches


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
    for name in sorted(settings.keys() - free):  # an older study may have more
        text = f"{name} must be {as_given(before.get(name))} as in {path}, or output_dir another"
        refuse([(before.get(name) != now.get(name), text, now.get(name))])
