"""Measure steps to result at every batch size, with everything else re-tuned.

    python -m dbsl.study --batch-sizes 16,32,64,128,256,512,1024 --goal-error 0.3 --trials 16
    python -m dbsl.study --plot studies/digits-resnet18       # read and draw, train nothing

After Shallue et al. (JMLR 20(112), 2019). Repeat the command to resume a study that was stopped or
killed; repeat it in a second shell to share the work.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from operator import le
from pathlib import Path
from typing import Annotated

import torch
import yaml

from dbsl.base.errors import RunStopped, as_given, plural, require
from dbsl.base.files import check_folder, write_text
from dbsl.base.machine import threads_of_process
from dbsl.base.seeds import stream_seed
from dbsl.config.fields import Count, Role, Within, check_fields, with_role
from dbsl.config.hooks import settings_of_extras
from dbsl.config.image_settings import ImageConfig, check_images
from dbsl.config.parse import config_to_yaml, parse_flags, read_settings
from dbsl.config.settings import MachineConfig, RunConfig
from dbsl.optimizer import check_optimizer, default_learning_rate, optim
from dbsl.run.accelerator import start_accelerator
from dbsl.run.stopping import Stopping, deadline_of
from dbsl.tools.study import store, trials
from dbsl.tools.study.scaling import OBJECTIVE, write_report
from dbsl.tools.study.store import Queue, Search
from dbsl.tools.study.trials import Images, ImageTask, Range, run_trial

SETTINGS = "study.yaml"
# Bounds of a searched setting: one value, or a range's ends.
_Ends = partial(Within, lengths=(1, 2), order=le)
_OF_DATA = [own for own in settings_of_extras() if not issubclass(own, RunConfig)]


@dataclass(frozen=True)
class StudyConfig(*_OF_DATA, MachineConfig, ImageConfig):  # a comment is the help
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
        require(self.plot != (), "plot must name a folder", "none")
        given = self.plot is not None or self.goal_error is not None
        require(given, "goal_error must be given, in (0, 1)", "none")
        check_fields(self)
        check_images(self)
        searched = len({*self.weight_decay}) > 1
        Within(0, open_low=searched).check("weight_decay", self.weight_decay)  # 0 has no log

    def budget(self, batch_size: int, train_samples: int) -> int:
        """Return the steps that a trial may take at a batch size."""
        if self.max_steps is not None and self.max_examples is None:
            return self.max_steps
        steps = max(1, (self.max_examples or 40 * train_samples) // batch_size)
        return min(steps, self.max_steps or steps)

    def ranges(self, optimizer: str) -> dict[str, Range]:
        """Return the ranges searched for an optimizer, by parameter name.

        The best learning rate / (1 - momentum) varies less with momentum than the best rate.
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
    """Run or resume a study; with ``--plot``, read and draw finished ones."""
    config = parse_flags(StudyConfig, argv, prog="python -m dbsl.study")
    dataset = store.dataset_name(config.dataset)
    named = f"studies/{dataset}-{config.model}" if config.plot is None else config.plot[0]
    folder = Path(config.output_dir or named)
    check_folder("output_dir", folder)
    if config.plot is None:
        _run_trials(config, folder, dataset)
    roots = map(Path, config.plot or [folder / dataset])
    print(write_report(store.read_workloads(roots), folder, config.goal_error))


def _run_trials(config: StudyConfig, folder: Path, dataset: str) -> None:
    """Run the remaining trials; wait for those of other processes, which may die."""
    for optimizer in config.optimizers:
        check_optimizer(optimizer)
    torch.set_num_threads(config.cpu_threads or threads_of_process())
    accelerator = start_accelerator(config.mixed_precision, 60.0)
    text = "processes must be 1: launch a study once for each, without a launcher of several"
    require(accelerator.num_processes == 1, text, accelerator.num_processes)
    config = replace(config, mixed_precision=accelerator.mixed_precision)
    images = Images(config, accelerator)
    _keep_settings(config, folder)
    searches = _searches(config, folder / dataset, len(images.data.train))
    goal = config.goal_error if config.early_stopping else 0.0  # where trials end; 0: nowhere
    with Stopping(deadline_of(config.max_minutes), then="giving its trial back") as stopping:

        def check_stop() -> None:
            if stopping.reason:
                raise RunStopped("stopped; repeat the command to continue")

        queue = Queue(folder, searches, check_stop)
        for search, number in queue.trials():
            began, name, size = time.perf_counter(), search.optimizer, search.batch_size
            seed = stream_seed(config.seed, f"trial {name}", size, number)
            most_steps = partial(queue.best, search)
            task = ImageTask(images, search, number, seed)
            trial = run_trial(task, search, number, config.eval_spacing, goal, most_steps)
            store.write_trial(search.folder, trial)
            if trial.status == "COMPLETE":
                queue.note(search, trial, goal)
            least, rate = trial.measurements[OBJECTIVE].min(), trial.parameters["learning_rate"]
            print(
                f"{name}, batch {size}, trial {number}/{config.trials}: {trial.status} after "
                f"{plural(trial.steps, 'step')}, least error {100 * least:.1f} %  "
                f"(lr {rate:.3g}, {time.perf_counter() - began:.1f} s)",
                flush=True,
            )


def _searches(config: StudyConfig, folder: Path, train_samples: int) -> list[Search]:
    """Return the searches of a study, each with its ``study.json`` written."""
    searches = []
    for optimizer, batch_size in product(config.optimizers, sorted(config.batch_sizes)):
        ranges, budget = config.ranges(optimizer), config.budget(batch_size, train_samples)
        own = folder / config.model.replace("/", "--") / optimizer / str(batch_size)
        values = {
            "batch_size": batch_size,
            "dataset": folder.name,
            "early_stopping": config.early_stopping,
            "goal_error": config.goal_error,
            "model": config.model,
            "optimizer": optimizer,
            "parameter_configs": {
                n: {"type": "DOUBLE", "scale": r.scale, "min_value": r.low, "max_value": r.high}
                for n, r in ranges.items()
                if r.low < r.high
            },
            "train_steps": budget,
        }
        store.write_json(own / store.STUDY, values)
        seed = stream_seed(config.seed, f"search {optimizer}/{batch_size}")
        points = trials.search_points(ranges, config.trials, seed, budget)
        searches.append(Search(optimizer, batch_size, budget, own, dict(enumerate(points, 1))))
    return searches


def _keep_settings(config: StudyConfig, folder: Path) -> None:
    """Write a study's settings, or check that they match those it began with."""
    settings = {f.name: getattr(config, f.name) for f in fields(config)}
    settings["augment"] = config.augmentation
    # A launch may change settings that affect no trial. eval_samples does: it decides the goal.
    free = {*with_role(type(config), Role.FREE | Role.NODE)} - {"eval_samples"}
    text = config_to_yaml({n: value for n, value in settings.items() if n not in free})
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SETTINGS
    if not path.exists():
        write_text(path, text)
    before, now = read_settings(path), yaml.safe_load(text)
    for name in sorted(settings.keys() - free):  # an older study may have more
        must = f"{name} must be {as_given(before.get(name))} as in {path}, or output_dir another"
        require(before.get(name) == now.get(name), must, now.get(name))
