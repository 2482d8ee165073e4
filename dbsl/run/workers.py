"""This process's workers: their model, optimizers and turns, and how they meet the others."""

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

    All of them in one process, which simulates a cluster, one in each of several, or none in that
    of a dedicated server. Those of unlike processes meet as `sync` says.

    Args:
        plans: Each worker's batch size and share.
        model: On its device. From here on its weights are views of one vector.
        data: Whose training images are in the plans.
        loss_function: The mean loss and figures of a batch, as `dbsl.loss.LossFunction`.
        build_optimizer: Builds what steps on a model: one optimizer, or several.
        merge: A rule of your own, ``merge(global_ [P], pushed [n, P], factors [n]) -> [P]``. It
            gets all n workers' weights at a barrier, else each push alone. None: by the settings.
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
        # How weights move, and what an optimizer step is.
        self.cluster, self.stepper = connect(self, build, merge)
        own = self.cluster.workers, self.stepper.model, accelerator
        self.meter = StepMeter(config.log_every, *own, shares_batch=plans.place is not None)
        self.stopwatch, self.train_time_s = Stopwatch(), 0.0  # seconds up to the last epoch's end
        self.progress = Progress()
        self.steps_taken = 0  # by this process since it began
        self.finishing = False  # this process wishes that the run ends early, by `finish`
        self.finishes_next = False  # all processes know that the next epoch's end is the last
        # Whether all processes evaluate at a time, each its part of the images.
        together = not meets_at_server(config.sync)
        self.shares_evaluation = accelerator.num_processes > 1 and together
        self._evaluates = False  # at an epoch's end
        self.is_between_steps = False
        self._random: Mapping[str, Any] | None = None  # to go on with in the middle of a round
        self._turn: WorkerTurn | None = None  # pulled and not pushed

    @property
    def model(self) -> nn.Module:
        """The model to call in training: DDP is around it in joint steps of several processes."""
        return self.stepper.model

    @property
    def optimizers(self) -> Mapping[int, torch.optim.Optimizer]:
        """By worker. Joint steps share one; where gradients are pushed the server has it."""
        return self.stepper.optimizers

    def __enter__(self) -> Workers:
        self.cluster.__enter__()
        # Have ready what the first batches need: loader processes.
        sources = [self.data.train] * bool(self.cluster.workers)
        evaluates = self.accelerator.is_main_process or self.shares_evaluation
        for source in sources + [self.data.evaluation] * evaluates:
            if start := getattr(source, "start", None):  # your own data may not know of it
                start(self._without_data)
        if self.cluster.control is not None:  # they would wait for each other on the clock
            self.cluster.control.highest(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> bool | None:
        if kind is None:
            self.cluster.close()
        return self.cluster.__exit__(kind, *error)

    def _without_data(self) -> None:
        """End a wait for data if the run is to stop; save, where no process waits for this one."""
        if not self.cluster.interrupted:
            return
        if self.cluster.control is None and (self._evaluates or self.is_between_steps):
            raise RunStopped
        raise ReadError("asked to stop while no data came; the last checkpoint counts")

    def turns(self) -> Iterator[WorkerTurn | EpochEnd]:
        """Yield the rounds of this process's workers, and each epoch's end when it comes.

        Simulated workers may be in different epochs, where nobody waits for the others.
        """
        for turn in self.cluster.turns():
            if turn.ends_epoch:
                yield turn
                continue
            self._turn = None
            yield WorkerTurn(self, turn)
            refuse_order(self._turn, "call workers.push(turn) after its last step", "none")

    def pull(self, turn: WorkerTurn) -> None:
        """Load the weights that a round starts from into the model.

        Joint steps pull none: all have the same, of which a copy is kept.
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
        """Hand over what a round came to: weights, or the sum of its weighted gradients.

        Work that is not finite is refused: the global weights stay, and the optimizer's state is
        cleared.
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
        """Have the next turn, which was begun before, draw on where it was."""
        self._random = random

    def restore_random_state(self) -> None:
        """Bring the random state back, if a resumed run was stopped inside this round."""
        if self._random is not None:
            load_random_state(self._random, self.accelerator.device)
            self._random = None

    def finish(self) -> None:
        """End the run with this epoch; to be called before `checkpoint.after_epoch`.

        One process is enough, of those that epochs end on: all learn of it there. An epoch that is
        not evaluated is followed by one that is. Model and summary are of what was trained,
        and `--resume` goes on.
        """
        self.finishing = True

    def is_last(self, end: EpochEnd) -> bool:
        """Whether the run is known to end with this epoch."""
        return end.epoch + 1 == self.config.epochs or self.finishes_next

    # --- evaluation

    @contextmanager
    def merged(self, end: EpochEnd) -> Iterator[Callable[[], float]]:
        """Have the merged weights of an epoch in the model; gives what tells the seconds so far.

        A compiled model runs uncompiled: graphs of an evaluation's few batches would never pay.
        Its modules are in the same modes afterwards: a round may go on. A signal breaks it off: it
        is saved, and a resumed run evaluates anew.
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
        """Yield batches of images [B, 3, R, R] and labels [B], nothing at random in them.

        Where processes evaluate together, they are this process's part. A source may be a map-style
        dataset of (input tensor, label), too, or data with evaluation samples.
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
        """Return totals summed over the processes that evaluate together."""
        return self.accelerator.reduce(totals) if self.shares_evaluation else totals


def _refuse_unasked(config: RunConfig) -> None:
    """Refuse settings by which a merge rule of your own would not be asked."""
    usual = {"merge": None, "push": "weights", "wire": FLOAT32.name}
    for name, value in usual.items():
        got = getattr(config, name)
        require(got == value, f"{name} must be left out with your own merge", got)
    require(config.sync != "step", "sync must not be step with your own merge", config.sync)
