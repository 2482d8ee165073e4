"""From settings to a run under way, and from its last epoch to its summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from dbsl.base.errors import NothingLeft, RunFinished, SettingError, SyncError, join_the_others
from dbsl.base.machine import check_installed, threads_of_process
from dbsl.checkpoint.checkpointer import Checkpointer
from dbsl.checkpoint.disk import MODEL_FILE, Found, newest, reading_checkpoint
from dbsl.checkpoint.resume import (
    Resumed,
    adapt_to_processes,
    check_joining,
    find_checkpoint,
    is_finished,
    read_resumed,
    take_over_folder,
    without_effect,
)
from dbsl.cluster.launch import RunningJob, find_running_job
from dbsl.cluster.merges import MergeRule
from dbsl.config.complete import found_by, with_resolved
from dbsl.config.fields import sources
from dbsl.config.hooks import Extra, Extras
from dbsl.config.parse import run_folder_of
from dbsl.config.settings import (
    CHECKPOINTS,
    RunConfig,
    check_effects,
    meets_at_server,
    steps_in_parts,
)
from dbsl.data.sources import TrainingData
from dbsl.log.lines import print_run
from dbsl.log.log import check_result, start_log
from dbsl.log.meter import StepMeter
from dbsl.loss import LossFunction
from dbsl.optimizer import check_optimizer, default_learning_rate
from dbsl.run.accelerator import common_threads, start_accelerator, start_joining_accelerator
from dbsl.run.connect import connect
from dbsl.run.evaluation import EvaluationSession
from dbsl.run.folder import Code, RunFolder, changed_since, check_alike, default_folder, read_code
from dbsl.run.prepare import (
    ModelOrBuilder,
    OptimizerBuilder,
    Replaced,
    prepare,
    prepare_evaluation,
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
) -> Iterator[Session[ConfigT] | EvaluationSession[ConfigT] | None]:
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
        With `eval_only` the weights and the images to evaluate; nothing is written.
    """
    check_installed()
    stopwatch = Stopwatch()
    replaced = Replaced(data, model, optimizer, evaluate_also, figures or ())
    given = replaced.named(given)
    stopping, code = Stopping(deadline_of(given.max_minutes)), read_code()
    config = _complete(given, replaced)
    extras = Extras.of(config)
    opening = _Opening(loss_function, replaced, merge, stopwatch, stopping, code, extras)
    alone = not meets_at_server(config.sync) or config.plan_only
    if config.eval_only:
        program = _evaluating(config, opening)
    elif not alone and (job := find_running_job()):
        program = _joining(config, job, opening)
    else:
        program = _launched(config, given, opening)
    with program as session:
        yield session


@dataclass(frozen=True)
class _Opening:
    """What a run is opened with besides its settings; see `open_session`."""

    loss_function: LossFunction
    replaced: Replaced
    merge: MergeRule | None
    stopwatch: Stopwatch
    stopping: Stopping
    code: Code
    extras: Extras

    def meet(self, config: RunConfig) -> Accelerator:
        """Meet the other processes; none goes on unless all have the same settings and code."""
        check = partial(check_alike, config, self.code)
        return start_accelerator(config.mixed_precision, config.worker_timeout, check)

    def prepare(self, config: RunConfig, accelerator: Accelerator) -> Run:
        """Return the run; its steps are in the accelerator's precision."""
        return prepare(config, accelerator, self.loss_function, self.replaced, self.extras)

    def start(
        self,
        run: Run,
        folder: Path,
        accelerator: Accelerator,
        resumed: Resumed | None,
        job: RunningJob | None = None,
    ) -> Session:
        """Build the cluster and the stepper, and bring them to where a resumed run was."""
        cluster, stepper = connect(run, accelerator, self.merge, job, self.code.sums)
        meter = StepMeter(run.config.log_every, figures=run.figures)
        meter.attach(cluster.workers, stepper, accelerator)
        parts = (self.stopping, self.stopwatch, meter)
        session = Session(run, folder, accelerator, cluster, stepper, *parts)
        run.extras.each(Extra.begin, session)
        session.checkpointer = Checkpointer(session, resumed)
        return session


def _complete(given: RunConfig, replaced: Replaced) -> RunConfig:
    own = replaced.optimizer is not None
    if not own:
        in_parts = steps_in_parts(given)
        check_optimizer(given.optimizer, given.optimizer_settings, in_parts=in_parts)
    config = with_resolved(given)
    if own and config.lr is None:
        raise SettingError(
            f"lr must be the rate that {config.optimizer} builds its main parameters with (the "
            "schedule moves it, and each group keeps its proportion to it), got unset"
        )
    config = replace(
        config,
        cpu_threads=config.cpu_threads or threads_of_process(),  # the bits depend on it
        lr=default_learning_rate(config.optimizer) if config.lr is None else config.lr,
    )
    torch.set_num_threads(config.cpu_threads)
    return config


# --- evaluation alone


@contextmanager
def _evaluating(config: RunConfig, opening: _Opening) -> Iterator[EvaluationSession]:
    """Load the data, and the weights of `resume`, a run or a checkpoint, else of `model`."""
    folder = None
    if config.resume is not None:
        folder = Path(config.resume)
        if folder.parent.name != CHECKPOINTS:
            run_folder = run_folder_of(config.resume, config.output_dir)
            last = newest(run_folder, with_model=True)
            folder = last[0] if last else run_folder  # a finished run may have no checkpoint
        if not (folder / MODEL_FILE).exists():
            raise SettingError(
                "resume must name a run that is finished or has a checkpoint of an epoch's end, or "
                f"such a checkpoint, with eval_only, got {config.resume}"
            )
    accelerator = opening.meet(config)
    yield prepare_evaluation(config, accelerator, opening.replaced, folder)
    accelerator.end_training()


# --- one more worker of a running job


@contextmanager
def _joining(config: RunConfig, job: RunningJob, opening: _Opening) -> Iterator[Session | None]:
    """Open the run of a job under way for one more worker. Nothing is written but its checkpoints.

    None: the job has no round left. It is a `SyncError` if a setting is another one than the job's,
    or rank 0 refuses.
    """
    join_the_others()
    try:
        if config.resume is None:
            raise SettingError("resume must be auto to join a running job, got unset")
        folder = run_folder_of(config.resume, config.output_dir)
        found_out = {name: job.settings[name] for name in ("mixed_precision", "cpu_threads")}
        config = replace(config, **found_out)
        accelerator = start_joining_accelerator(job.rank, job.processes, config.mixed_precision)
        check_joining(job.settings, config, but=sources(type(config)), code=opening.code)
        run = opening.prepare(config, accelerator)
        check_joining(job.settings, run.config)
    except SettingError as error:  # every process of a launch meets it, and this one is alone
        raise SyncError(f"rank {job.rank} cannot join the running job: {error}") from error
    with opening.stopping:
        try:
            session = opening.start(run, folder, accelerator, None, job)
        except NothingLeft as reason:
            print(reason, flush=True)
            yield None
            return
        session.log = start_log(session)
        with session.log, _running(session):
            yield session
    accelerator.end_training()


# --- a run of its own: finished, planned only, or trained


@contextmanager
def _launched(config: RunConfig, given: RunConfig, opening: _Opening) -> Iterator[Session | None]:
    accelerator, extras = opening.meet(config), opening.extras
    # What was left open is settled: auto, and the threads, of which unlike nodes have their own.
    found_out = {"mixed_precision": accelerator.mixed_precision}
    config = replace(config, **found_out, cpu_threads=common_threads(accelerator))
    config = extras.first(Extra.config, config, accelerator) or config
    found = find_checkpoint(config, accelerator)
    if found and is_finished(found, config):  # what could not be done at its end is done now
        folder = found.run_folder
        if changes := without_effect(folder, given):
            accelerator.print(f"warning: without effect on a finished run: {changes}")
        accelerator.print(f"{folder} is finished: nothing to resume")
        extras.each(Extra.check, config, accelerator)
        extras.each(Extra.open, config, folder, found, accelerator)
        _end(config, folder, accelerator, extras)
        yield None
        return
    if found is None:
        check_effects(config, accelerator.num_processes)
    before, config = config, adapt_to_processes(config, found, accelerator.num_processes, given)
    given = _given_now(given, before, config)
    extras.each(Extra.check, config, accelerator)
    if config.plan_only:
        print_run(opening.prepare(config, accelerator), None, accelerator)
        accelerator.end_training()
        yield None
        return
    with _in_folder(config, given, found, accelerator, opening) as session:
        yield session
    _end(session.config, session.folder, accelerator, extras)


def _given_now(given: RunConfig, before: RunConfig, now: RunConfig) -> RunConfig:
    """Return the settings as given, but for those of other workers, which a resumed run adapts."""
    names = [field.name for field in fields(given) if getattr(given, field.name) is not None]
    adapted = {n: getattr(now, n) for n in names if getattr(before, n) != getattr(now, n)}
    return replace(given, **adapted)


@contextmanager
def _in_folder(
    config: RunConfig,
    given: RunConfig,
    found: Found | None,
    accelerator: Accelerator,
    opening: _Opening,
) -> Iterator[Session]:
    named = found.run_folder if found else config.output_dir
    path = Path(named or default_folder(config))
    # First of all: nobody likes to measure and decode for a folder that cannot be written.
    with RunFolder(path, accelerator, new=found is None, named=bool(named)) as folder:
        opening.extras.each(Extra.open, config, folder.path, found, accelerator)
        run = opening.prepare(config, accelerator)
        resolved = found_by(given, run.config, accelerator.num_processes)
        run = replace(run, config=replace(run.config, resolved=resolved))
        with opening.stopping:
            resumed = read_resumed(found, run, accelerator) if found else None
            session = opening.start(run, folder.path, accelerator, resumed)
            if found:  # all has been read, and fits: from here on the folder is written
                if files := changed_since(folder.path, opening.code):
                    accelerator.print(f"warning: code has changed since the run began: {files}")
                take_over_folder(found, run, accelerator)
            folder.write_settings(given, resolved, run.plans, opening.code)
            with reading_checkpoint(resumed and resumed.folder):
                parts = (resumed.state.get("log"), resumed.handover) if resumed else ()
                session.log = start_log(session, *parts)
            with run.extras, session.log:
                with _running(session):
                    yield session
                session.log.sum_up()
                session.checkpointer.clean_up()


@contextmanager
def _running(session: Session) -> Iterator[None]:
    """Train within; a run that has come to its end is saved as such, and its workers part."""
    with session.cluster, session.checkpointer:
        session.start_training()
        with suppress(RunFinished):
            yield
        session.checkpointer.finish()
        session.cluster.close()


def _end(config: RunConfig, folder: Path, accelerator: Accelerator, extras: Extras) -> None:
    accelerator.end_training()
    check_result(folder, config, accelerator)
    extras.each(Extra.finished, config, folder, accelerator)
