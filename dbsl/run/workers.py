"""This process's workers: their model, optimizers, turns, and exchange with other workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from dbsl.base.errors import ReadError, RunStopped, require
from dbsl.cluster.merges import MergeRule
from dbsl.cluster.weights import kept_modes, uncompiled
from dbsl.config.settings import FLOAT32, RunConfig, meets_at_server
from dbsl.data.sources import TrainingData, as_source
from dbsl.data.transforms import Mixing
from dbsl.loss import LossFunction, bind_loss
from dbsl.model import train_mode
from dbsl.optimizer import BuildOptimizer, join_optimizers, keep_ratios
from dbsl.plan.sampler import evaluation_batches
from dbsl.plan.types import EpochEnd
from dbsl.run.connect import connect
from dbsl.run.meter import StepMeter
from dbsl.run.plans import Plans
from dbsl.run.stopping import Stopwatch
from dbsl.run.turns import Progress, WorkerTurn, load_random_state, refuse_order


class Workers:
    """The workers of this process; a context manager around their turns.

    A single process simulates all workers. With several, each process has one, or none if it is a
    dedicated server. Workers of different processes exchange as `sync` says.

    Args:
        plans: Each worker's batch size and share.
        model: On its device. From here on, its weights are views of one vector.
        data: The plans divide its training images.
        loss_function: The mean loss and figures of a batch, as `dbsl.loss.LossFunction`.
        build_optimizer: Builds the optimizer, or several, of a model.
        merge: Your own rule, ``merge(global_ [P], pushed [n, P], factors [n]) -> [P]``. It receives
            all n workers' weights at a barrier, else each push separately. None: by the settings.
    """

    def __init__(
        self,
        plans: Plans,
        accelerator: Accelerator,
        model: nn.Module,
        data: TrainingData,
        loss_function: LossFunction,
        build_optimizer: BuildOptimizer,
        *,
        merge: MergeRule | None = None,
    ) -> None:
        config = plans.config
        if merge is not None:
            _refuse_unasked(config)
        self.plans, self.config, self.accelerator, self.data = plans, config, accelerator, data
        self.raw_model = model  # nothing is wrapped around it
        self.side = config.resolutions[-1]  # of evaluation images, in pixels
        self.loss_of = bind_loss(loss_function, config, accelerator.autocast)
        mixes = {"num_classes": data.num_classes, "seed": config.seed}
        self.mixing = Mixing(config.mixup, config.cutmix, **mixes) if config.mixes else None

        def build(model: nn.Module) -> torch.optim.Optimizer:
            return keep_ratios(join_optimizers(build_optimizer(model)), config.lr)

        self.graphs = 0
        # How weights move, and how an optimizer step is taken.
        self.cluster, self.stepper = connect(self, build, merge)
        own = self.cluster.workers, self.stepper.model, accelerator
        self.meter = StepMeter(config.log_every, *own, shares_batch=plans.place is not None)
        self.stopwatch, self.train_time_s = Stopwatch(), 0.0  # seconds up to the last epoch's end
        self.progress = Progress()
        self.steps_taken = 0  # by this process since it began
        self.finishing = False  # this process asked, by `finish`, to end the run early
        self.finishes_next = False  # all processes know that the next epoch's end is the last
        # Whether all processes evaluate together, each its part of the images.
        together = not meets_at_server(config.sync)
        self.shares_evaluation = accelerator.num_processes > 1 and together
        self._evaluates = False  # at an epoch's end
        self.is_between_steps = False
        self._random: Mapping[str, Any] | None = None  # to continue in the middle of a round
        self._turn: WorkerTurn | None = None  # pulled but not yet pushed

    @property
    def model(self) -> nn.Module:
        """The model to call in training; in joint steps of several processes, DDP wraps it."""
        return self.stepper.model

    @property
    def optimizers(self) -> Mapping[int, torch.optim.Optimizer]:
        """Optimizers by worker. Joint steps share one; the server has it for pushed gradients."""
        return self.stepper.optimizers

    def __enter__(self) -> Workers:
        self.cluster.__enter__()
        # Start the loader processes that the first batches need.
        sources = [self.data.train] * bool(self.cluster.workers)
        evaluates = self.accelerator.is_main_process or self.shares_evaluation
        for source in sources + [self.data.evaluation] * evaluates:
            if start := getattr(source, "start", None):  # your own data may have none
                start(self._without_data)
        if self.cluster.control is not None:  # else they would wait in training time
            self.cluster.control.highest(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> bool | None:
        if kind is None:
            self.cluster.close()
        return self.cluster.__exit__(kind, *error)

    def _without_data(self) -> None:
        """End a wait for data if the run must stop; save, if no process waits for this one."""
        if not self.cluster.interrupted:
            return
        if self.cluster.control is None and (self._evaluates or self.is_between_steps):
            raise RunStopped
        raise ReadError("asked to stop while no data came; the last checkpoint counts")

    def turns(self) -> Iterator[WorkerTurn | EpochEnd]:
        """Yield the rounds of this process's workers, and the end of each epoch.

        Simulated workers may be in different epochs if none waits for the others.
        """
        for turn in self.cluster.turns():
            if turn.ends_epoch:
                yield turn
                continue
            self._turn = None
            yield WorkerTurn(self, turn)
            refuse_order(self._turn, "call workers.push(turn) after its last step", "none")

    def pull(self, turn: WorkerTurn) -> None:
        """Load the weights from which a round starts into the model.

        Joint steps pull none: all workers have the same weights, and a copy is kept.
        """
        refuse_order(self._turn, "push a turn before it pulls the next", "two pulls")
        self._turn, turn.is_pulled = turn, True
        anew = not self.progress.steps
        if anew:
            self.cluster.pull(turn.plain)
            when = self.config.reset_momentum
            begins = (turn.epoch, turn.round) == (turn.stage.first_epoch, 0)
            if when == "round" or (when == "stage" and begins):
                self._forget(turn)
        self.stepper.begin(turn.plain, anew=anew)
        self.meter.begin(turn.plain, anew=anew)

    def train_mode(self, turn: WorkerTurn) -> None:
        """Put the model into training mode; see `dbsl.model.train_mode`."""
        train_mode(self.raw_model, turn.stage.dropout)

    def push(self, turn: WorkerTurn) -> None:
        """Push the result of a round: weights, or the sum of its weighted gradients.

        A result that is not finite is refused: the global weights do not change, and the
        optimizer's state is cleared.
        """
        refuse_order(self._turn is not turn, "call workers.pull(turn) before the push", "none")
        taken = f"a push after {self.progress.steps}"
        refuse_order(not turn.is_over, "take all steps of a turn", taken)
        self._turn = None
        self.cluster.weights.check_views()
        if self.cluster.push(turn.reports()):  # refused: the next pull brings good weights
            self._forget(turn)
            self.stepper.drop_remainders()  # they may not be finite
        self.progress.load({}, self.accelerator.device)

    def _forget(self, turn: WorkerTurn) -> None:
        for worker in turn.workers:
            self.stepper.forget(worker)

    def go_on_with(self, random: Mapping[str, Any]) -> None:
        """Give the next turn, begun in an earlier session, its random state."""
        self._random = random

    def restore_random_state(self) -> None:
        """Restore the random state if a resumed run was stopped inside this round."""
        if self._random is not None:
            load_random_state(self._random, self.accelerator.device)
            self._random = None

    def finish(self) -> None:
        """End the run with this epoch; call it before `checkpoint.after_epoch`.

        One of the processes that receive epochs' ends is enough: `after_epoch` tells the others. If
        this epoch is not evaluated, the run ends with the next, which is. Model and summary are of
        the trained epochs, and `--resume` continues the run.
        """
        self.finishing = True

    def is_last(self, end: EpochEnd) -> bool:
        """Whether the run is known to end with this epoch."""
        return end.epoch + 1 == self.config.epochs or self.finishes_next

    # --- evaluation

    @contextmanager
    def merged(self, end: EpochEnd) -> Iterator[Callable[[], float]]:
        """Load an epoch's merged weights; yield a function that returns the seconds so far.

        A compiled model runs uncompiled: compiling would not pay off for an evaluation's few
        batches. Its modules keep their modes, so a round may continue. A signal interrupts the
        evaluation: the run is saved, and a resumed run repeats the evaluation.
        """
        self.train_time_s = self.stopwatch.train_s(end.ended_at)
        pauses = self.accelerator.num_processes == 1 or self.shares_evaluation  # nobody trains
        self._evaluates = True
        try:
            with (
                self.stopwatch.evaluating(pauses=pauses) as spent,
                uncompiled(self.raw_model),
                kept_modes(self.raw_model),
            ):
                self.cluster.load(end)
                yield spent
        except RunStopped:  # by `evaluation_batches`, in all processes that evaluate
            self.cluster.put_back(end)
            raise
        finally:
            self._evaluates = False

    def evaluation_batches(self, source: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of images [B, 3, R, R] and labels [B], without random transforms.

        If processes evaluate together, it yields this process's part. A source may also be a
        map-style dataset of (input tensor, label), or data with evaluation samples.
        """
        accelerator = self.accelerator
        source = as_source(source, self.data, self.side, "source")
        ranks = (accelerator.process_index, accelerator.num_processes)
        own = ranks if self.shares_evaluation else ()
        parts = evaluation_batches(len(source), self.plans.evaluation_batch, *own)
        transform = self.data.transform(self.side, "none", self.config.seed)
        for batch in source.batches(parts, transform):
            yield batch
            if self._evaluates and self.cluster.interrupted:
                break
        stops = self._evaluates and self.cluster.interrupted
        if self._evaluates and self.shares_evaluation:
            (stops,) = self.cluster.highest(stops)
        if stops:
            raise RunStopped

    def sum_of_processes(self, totals: Tensor) -> Tensor:
        """Return the sum of totals over the processes that evaluate together."""
        return self.accelerator.reduce(totals) if self.shares_evaluation else totals


def _refuse_unasked(config: RunConfig) -> None:
    """Refuse settings with which your own merge rule would not be called."""
    usual = {"merge": None, "push": "weights", "wire": FLOAT32.name}
    for name, value in usual.items():
        got = getattr(config, name)
        require(got == value, f"{name} must be left out with your own merge", got)
    require(config.sync != "step", "sync must not be step with your own merge", config.sync)
