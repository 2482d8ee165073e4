"""From settings to a run under way, and from its last epoch to its summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dbsl.base.errors import NothingLeft, SettingError
from dbsl.base.machine import check_installed, threads_of_process
from dbsl.checkpoint import resume
from dbsl.checkpoint.checkpointer import Checkpointer
from dbsl.checkpoint.disk import Found, reading_checkpoint
from dbsl.cluster.merges import MergeRule
from dbsl.config.complete import found_by, with_resolved
from dbsl.config.hooks import Extra, Extras
from dbsl.config.settings import RunConfig, check_effects
from dbsl.data.sources import TrainingData
from dbsl.log.lines import print_run
from dbsl.log.log import check_result, start_log
from dbsl.log.meter import StepMeter
from dbsl.loss import LossFunction
from dbsl.optimizer import check_optimizer, default_learning_rate
from dbsl.run.accelerator import common_threads, nodes_of, start_accelerator
from dbsl.run.connect import connect
from dbsl.run.folder import RunFolder, check_alike, default_folder, read_code
from dbsl.run.prepare import (
    ModelOrBuilder,
    OptimizerBuilder,
    Replaced,
    prepare,
    settle_islands,
)
from dbsl.run.session import Session
from dbsl.run.stopping import Stopping, Stopwatch, deadline_of
from dbsl.run.training import ConfigT, Run


@contextmanager
def open_session(
    given: ConfigT,
    loss_function: LossFunction,
    *,
    data: TrainingData | None = None,
    model: ModelOrBuilder | None = None,
    optimizer: OptimizerBuilder | None = None,
    merge: MergeRule | None = None,
    evaluate_also: Mapping[str, Any] | None = None,
    figures: Sequence[str] | None = None,
) -> Iterator[Session[ConfigT] | None]:
    """Open the run that the settings describe; on leaving, sum it up.

    All is checked and read before anything is written. A run that is to be resumed goes on where
    it was.

    Args:
        given: The settings. What they name holds where the arguments below are None.
        loss_function: ``loss_function(model, images, labels, config)`` gives the mean loss of a
            batch, [], or it and figures: a dict of means by name, tensors [] or numbers. Labels are
            [B], or with mixing shares of classes [B, C]. All that trains or measures calls it.
        data: Data of your own, such as `dbsl.data.sources.TensorData`.
        model: A module of your own, or a function that builds one from the run's seed.
        optimizer: ``optimizer(model, config)``, which builds a torch optimizer or a sequence of
            them. The schedule moves `lr`; each group keeps its proportion to it.
        merge: A merge rule of your own, ``merge(global_ [P], pushed [n, P], factors [n]) -> [P]``.
            It gets all n workers' weights at a barrier, else each push alone.
        evaluate_also: Further evaluation sets by name: a source, data with evaluation samples, a
            map-style dataset of (input tensor, label), or the name of a dataset or folder.
        figures: Names of figures that the loop gives `work.add` besides the loss function's.

    Yields:
        The run; None if nothing is to be trained: it is finished, or the plan alone was asked for.
    """
    check_installed()
    replaced = Replaced(data, model, optimizer, merge, evaluate_also, figures or ())
    with _Opening(given, loss_function, replaced).launched() as session:
        yield session


class _Opening:
    """A run on its way from settings to a session; see `open_session`."""

    def __init__(self, given: RunConfig, loss_function: LossFunction, replaced: Replaced) -> None:
        self.stopwatch = Stopwatch()
        self.loss_function, self.replaced = loss_function, replaced
        self.given = replaced.named(given)
        self.stopping, self.code = Stopping(deadline_of(self.given.max_minutes)), read_code()
        self.config = with_resolved(self.given)
        if replaced.optimizer is None:
            own = given.optimizer_settings, given.momentum, given.weight_decay
            check_optimizer(given.optimizer, *own)
        elif self.config.lr is None:
            raise SettingError(
                f"lr must be the rate that {self.given.optimizer} builds its main parameters with "
                "(the schedule moves it, and each group keeps its proportion to it), got unset"
            )
        threads, lr = self.config.cpu_threads or threads_of_process(), self.config.lr
        torch.set_num_threads(threads)  # the bits depend on them
        lr = default_learning_rate(self.given.optimizer) if lr is None else lr
        self.config = replace(self.config, cpu_threads=threads, lr=lr)
        self.extras = Extras.of(self.config)

    def prepare(self, config: RunConfig) -> Run:
        """Return the run; its steps are in the accelerator's precision."""
        return prepare(config, self.accelerator, self.loss_function, self.replaced, self.extras)

    def start(self, run: Run, folder: Path, resumed: resume.Resumed | None) -> Session:
        """Build the cluster and the stepper, and bring them to where a resumed run was."""
        accelerator = self.accelerator
        cluster, stepper = connect(run, accelerator, self.replaced.merge)
        meter = StepMeter(run.config.log_every, figures=run.figures)
        meter.attach(cluster.workers, stepper, accelerator)
        meter.shares_batch = run.place is not None
        parts = (self.stopping, self.stopwatch, meter)
        session = Session(run, folder, accelerator, cluster, stepper, *parts)
        run.extras.each(Extra.begin, session)
        session.checkpointer = Checkpointer(session, resumed)
        return session

    @contextmanager
    def launched(self) -> Iterator[Session | None]:
        """Open a run of its own: finished, planned only, or trained."""
        config, check = self.config, partial(check_alike, self.config, self.code)
        # They meet here; none goes on unless all have the same settings and code.
        accelerator = start_accelerator(config.mixed_precision, config.worker_timeout, check)
        self.accelerator = accelerator
        # What was left open is settled: auto, and threads, of which unlike nodes have their own.
        threads, processes = common_threads(accelerator), accelerator.num_processes
        found_out = {"mixed_precision": accelerator.mixed_precision, "cpu_threads": threads}
        config = replace(self.config, **found_out)
        config = settle_islands(config, processes, nodes_of(accelerator))
        found = resume.find_checkpoint(config, accelerator)
        if found and resume.is_finished(found, config):
            folder = found.run_folder  # what could not be done at its end is done now
            if changes := resume.without_effect(folder, self.given):
                accelerator.print(f"warning: without effect on a finished run: {changes}")
            accelerator.print(f"{folder} is finished: nothing to resume")
            self._end(config, folder)
            yield None
            return
        if found is None:
            check_effects(config, processes)
        now = resume.adapt_to_processes(config, found, processes, self.given)
        given = _given_now(self.given, config, now)
        if now.plan_only:
            print_run(self.prepare(now), None, accelerator)
            accelerator.end_training()
            yield None
            return
        with self._in_folder(now, given, found) as session:
            yield session
        self._end(session.config, session.folder)

    @contextmanager
    def _in_folder(
        self, config: RunConfig, given: RunConfig, found: Found | None
    ) -> Iterator[Session]:
        accelerator, named = self.accelerator, found.run_folder if found else config.output_dir
        path = Path(named or default_folder(config))
        # First of all: nobody likes to measure and decode for a folder that cannot be written.
        with RunFolder(path, accelerator, new=found is None, named=bool(named)) as folder:
            if found:
                resume.check_newest(found, config, accelerator)
            run = self.prepare(config)
            resolved = found_by(given, run.config, accelerator.num_processes)
            run = replace(run, config=replace(run.config, resolved=resolved))
            with self.stopping:
                resumed = resume.read_resumed(found, run, accelerator) if found else None
                session = self.start(run, folder.path, resumed)
                # All has been read, and fits: from here on the folder is written.
                if found is None:  # first of all: a folder without settings cannot be resumed
                    folder.write_settings(given, run)
                folder.keep_script(self.code)
                if found:
                    resume.take_over_folder(found, run, accelerator)
                    folder.write_settings(given, run)
                with reading_checkpoint(resumed and resumed.folder):
                    parts = (resumed.state.get("log"), resumed.handover) if resumed else ()
                    session.log = start_log(session, *parts)
                with run.extras, session.log:
                    with _running(session):
                        yield session
                    session.log.sum_up()
                    session.checkpointer.clean_up()

    def _end(self, config: RunConfig, folder: Path) -> None:
        self.accelerator.end_training()
        check_result(folder, config, self.accelerator)


def _given_now(given: RunConfig, before: RunConfig, now: RunConfig) -> RunConfig:
    """Return the settings as given, but for those of other workers, which a resumed run adapts."""
    names = [field.name for field in fields(given) if getattr(given, field.name) is not None]
    adapted = {n: getattr(now, n) for n in names if getattr(before, n) != getattr(now, n)}
    return replace(given, **adapted)


@contextmanager
def _running(session: Session) -> Iterator[None]:
    """Train within; a run that has come to its end is saved as such, and its workers part."""
    with session.cluster, session.checkpointer:
        session.start_training()
        with suppress(NothingLeft):
            yield
        session.checkpointer.finish()
        session.cluster.close()
