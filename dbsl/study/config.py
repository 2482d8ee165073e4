"""Settings of a scaling study, checked; what they mean for one batch size and one optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dbsl.base.bounds import in_range
from dbsl.data.transforms import Augment
from dbsl.run.accelerator import Precision
from dbsl.study.scaling import OBJECTIVE
from dbsl.study.search import Range, SearchSpace

_WITHOUT_MOMENTUM = ("sgd",)


@dataclass(frozen=True)
class StudyConfig:  # every field is a flag, its comment the help
    """Count steps to a goal at every batch size; a range is two values, one value is fixed."""

    # --- the study
    batch_sizes: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)  # samples per step
    goal_error: float | None = None  # classification error to fall under, in (0, 1); required
    trials: int = 16  # trials at every batch size
    # optimizers to study: sgd (no momentum), momentum, nesterov, or a name in timm.optim
    optimizers: tuple[str, ...] = ("nesterov",)
    # range of learning rate / (1 - momentum), searched on a log scale
    effective_lr: tuple[float, ...] = (0.01, 10.0)
    # range of momentum; 1 - momentum is searched on a log scale
    momentum: tuple[float, ...] = (0.5, 0.99)
    # range of last over first learning rate, searched on a log scale
    decay_factor: tuple[float, ...] = (0.01, 1.0)
    # range of the share of the step budget after which the learning rate stops falling
    decay_share: tuple[float, ...] = (0.25, 1.0)
    # range of weight decay, searched on a log scale; biases and norms have none
    weight_decay: tuple[float, ...] = (5e-4,)
    max_steps: int | None = None  # steps that a trial may take
    # samples that a trial may train on; with neither this nor --max-steps: 40 epochs
    max_examples: int | None = None
    eval_spacing: float = 0.05  # steps between measurements, as a share of the steps so far
    # end a trial at the goal, or when it can no longer be the best
    early_stopping: bool = True
    # --- data, model and step, as train.py has them
    dataset: str = "digits"  # digits, a folder, a .parquet file or a Hugging Face hub id
    image_column: str | None = None  # column of the images; unset: the only one
    # column of the classes; unset: label, or the class column with most classes
    label_column: str | None = None
    # images to train on, a stratified and seeded subset; unset: all
    train_samples: int | None = None
    # images to measure on, a stratified and seeded subset; unset: all
    eval_samples: int | None = None
    # crop: random crop and flip; paper: flip, rotation and zoom; none: nothing
    augment: Augment = "crop"
    # processes that decode large images; unset: by the cores; 0: none
    loader_workers: int | None = None
    resolution: int | None = None  # image side in pixels; unset: the images' own
    model: str = "resnet18"  # timm name of the model
    dropout: float = 0.0  # dropout before the classifier, in [0, 1)
    label_smoothing: float = 0.0  # label smoothing, in [0, 1)
    # samples per step of evaluation; unset: 256, on CUDA four times the largest batch, up to 2,000
    eval_batch_size: int | None = None
    # precision of forward passes; auto: bf16 where the device computes it natively, else no
    mixed_precision: Precision = "auto"
    seed: int = 0  # seed of everything random: subsets, search, and each trial's own streams
    # --- the launch
    # processes that run trials at a time on this machine; several GPUs are dealt out to them
    processes: int = 1
    # threads of each process; unset: its part of the cores, at most OMP_NUM_THREADS
    cpu_threads: int | None = None
    # minutes after which the study stops with status 75; repeat the command to resume
    max_minutes: float | None = None
    output_dir: str | None = None  # folder of the study; unset: studies/<dataset>-<model>
    # studies to read and draw instead of training: folders or tar archives, published ones too
    plot: tuple[str, ...] | None = None
    # column of the measurements that the goal is about, with --plot
    objective: str = OBJECTIVE

    def __post_init__(self) -> None:
        if self.goal_error is not None and self.objective == OBJECTIVE:
            in_range("goal_error", self.goal_error, 0, 1, open_low=True, open_high=True)
        if self.plot is None and self.goal_error is None:
            raise ValueError("goal_error must be given, in (0, 1), got none")
        if self.plot is None and self.objective != OBJECTIVE:
            raise ValueError(f"objective must be {OBJECTIVE} but with plot, got {self.objective}")
        for name in ("batch_sizes", "optimizers"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be one or more, each once, got {_join(values)}")
        for size in self.batch_sizes:
            in_range("batch_sizes", size, 1)
        for name in ("trials", "processes", "eval_batch_size", "resolution", "cpu_threads"):
            if getattr(self, name) is not None:
                in_range(name, getattr(self, name), 1)
        for name in ("max_steps", "max_examples", "train_samples", "eval_samples"):
            if getattr(self, name) is not None:
                in_range(name, getattr(self, name), 1)
        for name in ("seed", "eval_spacing"):
            in_range(name, getattr(self, name), 0)
        for name in ("dropout", "label_smoothing"):
            in_range(name, getattr(self, name), 0, 1, open_high=True)
        if self.max_minutes is not None:
            in_range("max_minutes", self.max_minutes, 0, open_low=True)
        for name, high in (("effective_lr", None), ("decay_factor", 1), ("decay_share", 1)):
            for value in _ends(name, getattr(self, name)):
                in_range(name, value, 0, high or float("inf"), open_low=True)
        for value in _ends("momentum", self.momentum):
            in_range("momentum", value, 0, 1, open_high=True)
        ends = _ends("weight_decay", self.weight_decay)
        for value in ends:
            in_range("weight_decay", value, 0, open_low=ends[0] != ends[1])

    def budget(self, batch_size: int, train_samples: int) -> int:
        """Return the steps that a trial may take at a batch size."""
        examples = self.max_examples
        if self.max_steps is None and examples is None:
            examples = 40 * train_samples
        limits = [self.max_steps, None if examples is None else max(1, examples // batch_size)]
        return min(limit for limit in limits if limit is not None)

    def space(self, optimizer: str) -> SearchSpace:
        """Return the search space of an optimizer."""
        log, linear = "LOG_SCALE", "LINEAR_SCALE"
        has_momentum = optimizer not in _WITHOUT_MOMENTUM
        return SearchSpace(
            Range(*_ends("effective_lr", self.effective_lr), log),
            Range(*_ends("momentum", self.momentum), "REVERSE_LOG_SCALE") if has_momentum else None,
            Range(*_ends("decay_factor", self.decay_factor), log),
            Range(*_ends("decay_share", self.decay_share), linear),
            Range(*_ends("weight_decay", self.weight_decay), log),
        )


def _ends(name: str, values: Sequence[float]) -> tuple[float, float]:
    if len(values) not in (1, 2) or values[0] > values[-1]:
        raise ValueError(f"{name} must be one value, or a range's ends, got {_join(values)}")
    return values[0], values[-1]


def _join(values: Sequence[Any]) -> str:
    return ",".join(map(str, values)) or "none"
