"""Settings of a scaling study, checked; what they mean for one batch size and one optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from dbsl.base.bounds import Within, check_bounds, in_range
from dbsl.base.errors import SettingError
from dbsl.data.config import ImageConfig, check_images
from dbsl.run.config import MachineConfig
from dbsl.study.scaling import OBJECTIVE
from dbsl.study.search import Range

_WITHOUT_MOMENTUM = ("sgd",)


@dataclass(frozen=True)
class StudyConfig(MachineConfig, ImageConfig):  # every field is a flag, its comment the help
    """Count steps to a goal at every batch size; a range is two values, one value is fixed."""

    # --- the study
    goal_error: float | None = None  # classification error to fall under, in (0, 1); required
    # samples per step
    batch_sizes: Annotated[tuple[int, ...], Within(1)] = (16, 32, 64, 128, 256, 512, 1024)
    trials: Annotated[int, Within(1)] = 16  # trials at every batch size
    # optimizers to study: sgd (no momentum), momentum, nesterov, or a name in timm.optim
    optimizers: tuple[str, ...] = ("nesterov",)
    # range of learning rate / (1 - momentum), searched on a log scale
    effective_lr: Annotated[tuple[float, ...], Within(0, open_low=True)] = (0.01, 10.0)
    # range of momentum; 1 - momentum is searched on a log scale
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
    output_dir: str | None = None  # folder of the study; unset: studies/<dataset>-<model>
    # processes that run trials at a time on this machine; several GPUs are dealt out to them
    processes: Annotated[int, Within(1)] = 1
    # studies to read and draw instead of training: folders or tar archives, published ones too
    plot: tuple[str, ...] | None = None
    # column of the measurements that the goal is about, with --plot
    objective: str = OBJECTIVE

    def __post_init__(self) -> None:
        if self.goal_error is not None and self.objective == OBJECTIVE:
            in_range("goal_error", self.goal_error, 0, 1, open_low=True, open_high=True)
        if self.plot is None and self.goal_error is None:
            raise SettingError("goal_error must be given, in (0, 1), got none")
        if self.plot is None and self.objective != OBJECTIVE:
            raise SettingError(
                f"objective must be {OBJECTIVE} except with plot, got {self.objective}"
            )
        for name in ("batch_sizes", "optimizers"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise SettingError(f"{name} must be one or more, each once, got {_join(values)}")
        check_bounds(self)
        check_images(self)
        for name in ("effective_lr", "momentum", "decay_factor", "decay_share"):
            _ends(name, getattr(self, name))
        low, high = _ends("weight_decay", self.weight_decay)
        in_range("weight_decay", low, 0, open_low=low != high)  # a log scale has no 0

    def budget(self, batch_size: int, train_samples: int) -> int:
        """Return the steps that a trial may take at a batch size."""
        examples = self.max_examples
        if self.max_steps is None and examples is None:
            examples = 40 * train_samples
        limits = [self.max_steps, None if examples is None else max(1, examples // batch_size)]
        return min(limit for limit in limits if limit is not None)

    def ranges(self, optimizer: str) -> dict[str, Range]:
        """Return what is searched for an optimizer, by the names that parameters have.

        The best learning rate / (1 - momentum) differs less between momenta than the best rate.
        """
        log = "LOG_SCALE"
        momentum = Range(*_ends("momentum", self.momentum), "REVERSE_LOG_SCALE")
        return {
            "effective_learning_rate": Range(*_ends("effective_lr", self.effective_lr), log),
            **({} if optimizer in _WITHOUT_MOMENTUM else {"momentum": momentum}),
            "end_learning_rate_factor": Range(*_ends("decay_factor", self.decay_factor), log),
            "learning_rate_decay_share": Range(
                *_ends("decay_share", self.decay_share), "LINEAR_SCALE"
            ),
            "weight_decay": Range(*_ends("weight_decay", self.weight_decay), log),
        }


def _ends(name: str, values: Sequence[float]) -> tuple[float, float]:
    if len(values) not in (1, 2) or values[0] > values[-1]:
        raise SettingError(f"{name} must be one value, or a range's ends, got {_join(values)}")
    return values[0], values[-1]


def _join(values: Sequence[Any]) -> str:
    return ",".join(map(str, values)) or "none"
