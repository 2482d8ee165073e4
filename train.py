"""Train with every worker on a batch size of its own: dual-batch learning, resolution by stage.

    accelerate launch train.py --small-ratio 0.1               # digits, 4 simulated workers
    accelerate launch train.py --dataset uoft-cs/cifar100 --small-workers 3 --epochs 140
    accelerate launch --config_file accelerate_configs/four_cpu.yaml train.py --small-workers 3
    accelerate launch train.py --config runs/first/config.yaml --output-dir runs/again
    accelerate launch train.py --resume runs/first            # after it was stopped, or killed

The first takes about two minutes on two CPU cores and ends above 95 % test accuracy. With one
process all workers live in it (a simulated cluster); with several, each process is one worker.
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":  # Ctrl-C while the rest is imported: no traceback of half an import
    on_interrupt = signal.getsignal(signal.SIGINT)
    if on_interrupt is signal.default_int_handler:  # not ignored, as in a background job
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from tqdm import tqdm

from dbsl.base.cores import threads_of_process
from dbsl.base.errors import one_line_errors
from dbsl.base.seeds import stream_seed
from dbsl.checkpoint.checkpointer import Keeper
from dbsl.checkpoint.resume import (
    adapt_to_processes,
    find_checkpoint,
    is_finished,
    read_resumed,
    take_over_folder,
)
from dbsl.cluster.transfer import Wire
from dbsl.data.transforms import Augment
from dbsl.log.divergence import DivergenceWarning, check_result
from dbsl.log.hub import check_hub, push_run
from dbsl.log.log import Evaluation
from dbsl.log.summary import start_log, sum_up
from dbsl.log.trackers import ReportTo, check_tracker
from dbsl.model import (
    BEST,
    EMA,
    check_optimizer,
    default_learning_rate,
    save_model,
    set_dropout,
)
from dbsl.plan.follow import Balance
from dbsl.plan.sampler import evaluation_batch_size, evaluation_batches
from dbsl.plan.stages import (
    LrScaling,
    LrSchedule,
    ResetMomentum,
    Schedule,
    learning_rate_at,
    resets_momentum,
)
from dbsl.plan.turns import EpochEnd, Merge, Push, Round, Sync
from dbsl.plan.types import Rounding, UpdateFactor
from dbsl.run.accelerator import Precision, start_accelerator
from dbsl.run.average import recompute_statistics
from dbsl.run.cluster import connect
from dbsl.run.config import check_run, parse_config
from dbsl.run.folder import RunFolder, default_folder
from dbsl.run.prepare import prepare, print_run
from dbsl.run.progress import make_reports, read_round
from dbsl.run.resolved import Found, found_by, with_resolved
from dbsl.run.stopping import Stopping, deadline_of


@dataclass(frozen=True)
class Config:
    """Dual-batch learning with cyclic progressive resizing; lists take commas or spaces."""

    # --- data
    dataset: str = "digits"  # digits, a folder, a .parquet file or a Hugging Face hub id
    image_column: str | None = None  # column of the images; unset: the only one
    # column of the classes; unset: label, or the class column with most classes
    label_column: str | None = None
    # images to train on, a stratified and seeded subset; unset: all
    train_samples: int | None = None
    # images to evaluate on, a stratified and seeded subset; unset: all
    eval_samples: int | None = None
    # share of the training images to evaluate on instead of the test split, in (0, 1)
    holdout: float | None = None
    # crop: random crop and flip; paper: flip, rotation and zoom; none: nothing
    augment: Augment = "crop"
    # processes that decode large images; unset: by the cores; 0: none
    loader_workers: int | None = None
    # --- model
    # timm name, local-dir:FOLDER or hf-hub:USER/NAME; the last two start from its weights
    model: str = "resnet18"
    # start from timm's weights of the model; they are downloaded unless cached
    pretrained: bool = False
    # dropout before the classifier, in [0, 1); one value, or one per resolution
    dropout: tuple[float, ...] = (0.0,)
    # --- workers and their batch sizes
    # workers simulated in one process; unset: 4; with several processes, their number
    workers: int | None = None
    small_ratio: float = 0.0  # share of workers on the small batch, in [0, 1]
    # number of workers on the small batch; wins over --small-ratio
    small_workers: int | None = None
    time_ratio: float = 1.05  # time that dual batch may take over all-large, k > 1
    # share of samples trained in small batches, in (0, 1); replaces --time-ratio
    small_share: float | None = None
    # samples per step of a large worker; one value, one per resolution, or one per resolution and
    # worker; auto: the largest that fits; unset: up to 128
    large_batch_size: tuple[int, ...] | Literal["auto"] | None = None
    # upper bound for --large-batch-size auto: what fits in memory, or the useful batch that a study
    # or a run found
    batch_limit: Literal["memory", "useful"] = "memory"
    # folder of the study or run for --batch-limit useful; unset: the newest of the same model and
    # data
    batch_evidence: str | None = None
    # samples per step set by hand; one value per worker, or per resolution and worker
    local_batch_sizes: tuple[int, ...] | None = None
    # samples per joint step over all workers; unset: the sum of their batches
    global_batch_size: int | None = None
    # samples per step of a small worker; one value, or one per resolution; 0 or unset: solved
    small_batch_size: tuple[int, ...] | None = None
    min_batch_size: int = 2  # smallest batch that a solved or balanced plan may give a worker
    # GiB that a step may use with --large-batch-size auto; unset: what is free
    memory_limit: float | None = None
    # seconds per sample; one value, one per resolution, or one per resolution and worker; unset:
    # measured
    slope: tuple[float, ...] | None = None
    # seconds per step; one value, one per resolution, or one per resolution and worker; unset:
    # measured
    intercept: tuple[float, ...] | None = None
    # least seconds that a step takes; one value, one per resolution, or one per resolution and
    # worker; unset: measured with the slope, or 0 where that is given
    floor: tuple[float, ...] | None = None
    # file of step times from python -m dbsl.profile --output; unset: the cache, or measured
    profile: str | None = None
    profile_seconds: float = 30.0  # seconds to measure step times for, all resolutions together
    profile_refresh: bool = False  # measure step times even if the cache has them
    plan_only: bool = False  # print the plan and its timeline, then stop
    # merge weight of small workers: d_S/d_L (data), its square root (sqrt) or 1 (none)
    update_factor: UpdateFactor = "data"
    # rounding of plans: to the nearest, as the journal; truncate: as the conference paper
    rounding: Rounding = "round"
    # plans stay as they are (none), follow measured times (dynamic), or follow the published rule
    # (dbs)
    balance: Balance = "none"
    balance_every: int | None = None  # rounds between two changes of the plan; unset: an epoch
    # --- how workers meet
    # how workers exchange what they learn: all wait for each other every round (bsp), fast workers
    # run at most --staleness rounds ahead (ssp), nobody waits (asp), or gradients are averaged at
    # every step (step). With ssp and asp the run goes on when a process dies, if each process was
    # launched on its own
    sync: Sync = "bsp"
    # what workers send: their weights, or gradients for an optimizer at the server
    push: Push = "weights"
    push_every: int = 1  # steps whose gradients are summed in one push, with --push gradients
    wire: Wire = "float32"  # number format of pushes between processes; bf16 halves their size
    damp_stale: bool = False  # scale gradients by 1/(1 + staleness), with --push gradients
    drop_last: bool = False  # leave out the last, shorter global batch of an epoch of joint steps
    # batch-norm statistics over the global batch, with --sync step on GPUs
    sync_batch_norm: bool = False
    # rounds that the fastest worker may be ahead of the slowest, with --sync ssp
    staleness: int = 1
    # merge rule: mean or delta with bsp, ratio or half with ssp and asp; unset: mean or ratio
    merge: Merge | None = None
    outer_lr: float = 0.7  # learning rate of the server's step, with --merge delta
    # Nesterov momentum of the server's step, with --merge delta; in [0, 1)
    outer_momentum: float = 0.9
    rounds_per_epoch: int = 1  # pushes per worker and epoch
    dedicated_server: bool = False  # rank 0 serves and evaluates but does not train
    # seconds of silence after which a process counts as lost, and that others wait at a barrier;
    # with asp and ssp a process that computes is heard all the while
    worker_timeout: float = 1800.0
    # --- emulation of uneven machines
    # factor on a worker's compute time as worker:factor, say 0:2.0,3:1.5
    slowdown: tuple[str, ...] | None = None
    disturb: str | None = None  # slow spells as probability:epochs[:factor], say 0.1:4-20
    time_noise: float = 0.0  # relative standard deviation of a simulated round's time
    # --- schedule
    epochs: int = 20  # passes over the training data; all workers share each pass
    # image sides in pixels, ascending; unset: 3/4 of the images' own side, then all of it
    resolutions: tuple[int, ...] | None = None
    # resolution climbs in every learning-rate stage (cyclic), once (progressive), or stays (fixed)
    schedule: Schedule = "cyclic"
    optimizer: str = "sgd"  # name in timm.optim; sgd has Nesterov momentum, momentum is plain SGD
    # learning rate of the first stage; unset: 0.1 for SGD, else the optimizer's own (adamw 0.001)
    lr: float | None = None
    # learning rate falls at milestones (step), or along a cosine to 0
    lr_schedule: LrSchedule = "step"
    # scale a worker's learning rate by batch / large batch (linear), or its square root (sqrt)
    lr_scaling: LrScaling = "none"
    # epochs after which the learning rate falls; unset: 4/7 and 6/7 of the run
    lr_milestones: tuple[int, ...] | None = None
    lr_gamma: float = 0.2  # factor on the learning rate at each milestone
    # epochs of linear rise from lr/100; unset: a tenth of the run, at most 2
    warmup_epochs: float | None = None
    momentum: float = 0.9  # momentum of SGD and optimizers that have one, in [0, 1)
    weight_decay: float = 5e-4  # weight decay; biases and norms have none
    # workers clear their optimizer's state never, where a stage (its resolution, too) begins, or
    # before every round
    reset_momentum: ResetMomentum = "never"
    label_smoothing: float = 0.0  # label smoothing, in [0, 1)
    mixup: float = 0.0  # alpha of mixup, say 0.2; 0: off
    # alpha of CutMix, say 1.0; 0: off; with --mixup, each batch gets one of the two
    cutmix: float = 0.0
    # decay per epoch of averaged weights, say 0.8; they are evaluated beside the raw; 0: off
    ema_decay: float = 0.0
    # --- run
    eval_every: int = 1  # epochs between evaluations; the last epoch is always evaluated
    # samples per step of evaluation; unset: 256, on CUDA four times the largest batch, up to 2,000
    eval_batch_size: int | None = None
    # steps of a worker between its lines of loss, speed and gradient norm in metrics.jsonl; 0: none
    log_every: int = 50
    # evaluate the training images too, at the end and without augmentation
    eval_train: bool = False
    # epochs (2) or minutes (10m) between checkpoints; 0: only at the end, or when stopped
    checkpoint_every: int | str = "10m"
    # number of newest checkpoints to keep; 0: one while the run lasts, none after it
    keep_checkpoints: int = 2
    # save the weights of the best evaluation as model_best.safetensors
    save_best: bool = True
    # run folder or checkpoint to go on from; auto: --output-dir, if it has a run
    resume: str | None = None
    allow_config_change: bool = False  # allow --resume with settings that change what is trained
    # minutes after which the run saves and stops with status 75, as after SIGTERM
    max_minutes: float | None = None
    max_bad_rounds: int = 10  # rounds that may be refused because loss or weights are not finite
    # images of each split that may be left out because they cannot be decoded
    max_bad_images: int = 16
    # threads of torch; unset: this process's part of the cores, at most OMP_NUM_THREADS; a 1 there
    # counts only if the launcher was started with it, because launchers set 1 themselves
    cpu_threads: int | None = None
    # precision of forward passes; auto: bf16 where the device computes it natively, else no; no:
    # float32, where PyTorch lets convolutions on CUDA use TF32, but not matrix products
    mixed_precision: Precision = "auto"
    noise_scale: bool = True  # estimate the batch size worth having; costs below 2 % of the time
    compile: bool = False  # use torch.compile; graphs for all batch sizes are made before training
    seed: int = 0  # seed of everything random: split, shuffling, augmentation, weights, dropout
    output_dir: str | None = None  # run folder, a new one; unset: runs/<dataset>-<model>-<time>
    # tracker of the run; wandb works offline without a login or a network
    report_to: ReportTo = "wandb"
    # repository user/name on the hub for model, card and figures of the finished run
    push_to_hub: str | None = None
    # what a run found out, as its config.yaml has it; no flag
    resolved: Found = field(default_factory=dict, metadata={"flag": False})

    def __post_init__(self) -> None:
        check_run(self)


def train_round(run, turn, cluster, stepper, keeper, learning_rate, accelerator, log) -> None:
    """Give the workers of a turn their round: pull, train on their shares, push."""
    config, stage = run.config, run.stage_at(turn.epoch)
    segment = cluster.plan(turn)  # who trains on how much, in which batches
    log.plan(turn.epoch, segment.plan)
    steps = run.steps(segment, turn)
    set_dropout(run.model, stage.dropout)
    torch.manual_seed(stream_seed(config.seed, "dropout", turn.workers[0], turn.epoch, turn.round))
    progress = keeper.progress()  # none, unless a resumed run was stopped inside this round
    steps_left = steps[progress.steps :]
    parts = [part for step in steps_left for part in step.parts if len(part.indices)]
    # loader processes begin, while the weights come
    batches = run.batches(parts, stage.resolution, turn.epoch)
    if not progress.steps:
        cluster.pull(turn)
        if resets_momentum(config.reset_momentum, stage, turn.epoch, turn.round):
            for worker in turn.workers:
                stepper.forget(worker)
    stepper.begin(turn, anew=not progress.steps)
    factor = run.rate_factor(segment, turn)  # of the worker's batch size
    rates = [factor * learning_rate(turn.epoch + step.progress) for step in steps]
    rates_left = rates[progress.steps :]
    loss_of = run.loss_of
    measure = partial(run.noise.measure, turn) if run.noise.due(turn) else None
    log.meter.begin(turn, anew=not progress.steps)
    train_steps(
        stepper,
        batches,
        steps_left,
        rates_left,
        accelerator,
        keeper,
        progress,
        loss_of,
        measure,
        log.meter,
    )
    losses, finite, measured = read_round(progress, cluster.outgoing)
    log.meter.end(losses, progress.samples)
    reports = make_reports(
        turn,
        segment.plan,
        len(steps),
        progress.samples,
        resolution=stage.resolution,
        learning_rate=rates[-1],
        losses=losses,
        clock=stepper.clock,
        refused=not finite,
        noise=measured,
        lines_of=log.meter.take_lines,
    )
    if cluster.push(reports):  # not finite, and not merged: the next pull brings good weights
        for worker in turn.workers:
            stepper.forget(worker)
    keeper.round_over()


def compute_loss(model, images, labels, *, accelerator, smoothing):
    """Return the mean loss of images [B, 3, R, R] and labels, [B] or shares of classes [B, C]."""
    with accelerator.autocast():
        return F.cross_entropy(model(images), labels, label_smoothing=smoothing)


def train_steps(
    stepper, batches, steps, learning_rates, accelerator, keeper, progress, loss_of, measure, meter
) -> None:
    """Take optimizer steps, adding each worker's loss, summed over its samples, to `progress`.

    `measure`, if any, looks at the gradients of the first step, for the noise scale; `meter` writes
    the lines of `log_every`.
    """
    stepper.model.train()
    zero = torch.zeros((), device=accelerator.device)
    for number, (step, learning_rate) in enumerate(zip(steps, learning_rates, strict=True), 1):
        for part in step.parts:  # one; of joint steps in one process, one of each worker
            if not len(part.indices):
                continue
            with stepper.part(step, part) as weight:
                images, labels = next(batches)
                # images [B, 3, R, R], labels [B]: B is the worker's batch size, R the stage's side
                loss = loss_of(stepper.model, images, labels)
                accelerator.backward(loss if weight == 1 else loss * weight)
            # .item() would wait for the device
            so_far = progress.losses.get(part.worker, zero)
            progress.losses[part.worker] = so_far + loss.detach() * len(labels)
            progress.samples[part.worker] = progress.samples.get(part.worker, 0) + len(labels)
        if measure and progress.samples and not progress.steps:
            progress.noise = measure(step, stepper.joint, images, labels, loss_of)
        with meter.step(step, learning_rate, progress):
            stepper.step(step, learning_rate)  # here, of all workers together, or at the server
        progress.steps += 1
        keeper.after_step(round_over=number == len(steps))  # saves, or stops, if it is time to


@torch.no_grad()
def evaluate(model, batches, accelerator, *, together: bool) -> tuple[float, float, int]:
    """Return accuracy in [0, 1], cross-entropy and the number of samples.

    `together`: each process has a part of the samples, and all get the result of the whole.
    """
    model.eval()
    totals = torch.zeros(3, device=accelerator.device)  # correct, loss, samples
    for images, labels in batches:
        with accelerator.autocast():
            logits = model(images).float()
        loss = F.cross_entropy(logits, labels, reduction="sum")
        correct = (logits.argmax(1) == labels).sum()
        totals += torch.stack([correct, loss, torch.full_like(loss, len(labels))])
    if together:
        totals = accelerator.reduce(totals)
    correct, loss, samples = totals.tolist()
    return correct / samples, loss / samples, round(samples)


def main(given: Config) -> None:
    """Train, evaluate and save one run, or go on with one."""
    deadline = deadline_of(given.max_minutes)
    check_tracker(given.report_to)
    check_optimizer(given.optimizer)
    config = with_resolved(given)  # what a run has found out, where it still holds
    # Part of the config, because the bits depend on it.
    config = replace(
        config,
        cpu_threads=config.cpu_threads or threads_of_process(),
        lr=default_learning_rate(config.optimizer) if config.lr is None else config.lr,
    )
    torch.set_num_threads(config.cpu_threads)
    accelerator = start_accelerator(config.mixed_precision, config.worker_timeout)
    config = replace(config, mixed_precision=accelerator.mixed_precision)  # of auto, what it is
    found = find_checkpoint(config, accelerator)
    if found and is_finished(found, config):
        accelerator.print(f"{found.run_folder} is finished: nothing to resume")
        accelerator.end_training()
        check_result(found.run_folder, config, accelerator)
        push_run(config, found.run_folder, accelerator)
        return
    config = adapt_to_processes(config, found, accelerator.num_processes)
    check_hub(config, accelerator)
    loss_of = partial(compute_loss, accelerator=accelerator, smoothing=config.label_smoothing)
    if config.plan_only:
        print_run(prepare(config, accelerator, loss_of), None, accelerator)
        accelerator.end_training()
        return
    named = found.run_folder if found else config.output_dir
    path = Path(named or default_folder(config))
    # First of all: nobody likes to measure and decode for a folder that cannot be written.
    with RunFolder(path, accelerator, new=found is None, named=bool(named)) as folder:
        run = prepare(config, accelerator, loss_of)
        resolved = found_by(given, run.config, accelerator.num_processes)
        run = replace(run, config=replace(run.config, resolved=resolved))
        with Stopping(deadline) as stopping:
            resumed = read_resumed(found, run, accelerator) if found else None
            cluster, stepper = connect(run, accelerator)  # who meets whom, and what a step is
            keeper = Keeper(run, folder.path, cluster, stepper, accelerator, stopping, resumed)
            if found:  # all has been read, and fits: from here on the folder is written
                take_over_folder(found, run, accelerator)
            folder.write_settings(given, resolved, run.plans)
            keeper.start_log(start_log(run, folder.path, resumed, accelerator), resumed)
            train(run, folder.path, cluster, stepper, keeper, accelerator)
    accelerator.end_training()
    check_result(folder.path, run.config, accelerator)
    push_run(config, folder.path, accelerator)


def train(run, folder, cluster, stepper, keeper, accelerator) -> None:
    """Train a run from its start, or from where it was saved, to its end."""
    config, data, model, log = run.config, run.data, run.model, keeper.log
    rank, world_size = accelerator.process_index, accelerator.num_processes
    # Nobody trains while there is an evaluation; with several processes each evaluates its part.
    waits = world_size == 1 or config.sync in ("bsp", "step")
    together = waits and world_size > 1
    learning_rate = partial(  # of a moment, in epochs since the start
        learning_rate_at,
        stages=run.stages,
        base=config.lr,
        schedule=config.lr_schedule,
        warmup_epochs=config.warmup_epochs,
    )
    eval_transform = replace(run.transforms[config.resolutions[-1]], augment="none")
    side = eval_transform.resolution
    largest = max(w.local_batch_size for plan in run.plans.values() for w in plan.workers)
    at_once = evaluation_batch_size(config.eval_batch_size, accelerator.device.type, largest)

    def assess(source=data.evaluation) -> tuple[float, float, int]:
        ranks = (rank, world_size) if together else ()
        batches = evaluation_batches(len(source), at_once, *ranks)
        images = source.batches(batches, eval_transform)
        return evaluate(model, images, accelerator, together=together)

    refresh_statistics = partial(  # of batch norm: averages of them do not fit averaged weights
        recompute_statistics,
        *(model, cluster.weights, data.train, eval_transform, accelerator),
        # Of it the statistics depend, so that it is the same on every device.
        batch_size=config.eval_batch_size or 256,
        seed=config.seed,
        together=together,
    )

    divergence = DivergenceWarning(config, data.num_classes, tqdm.write)

    with keeper:
        for turn in cluster.turns():  # of this process's workers, and the ends of epochs
            if isinstance(turn, Round):
                train_round(run, turn, cluster, stepper, keeper, learning_rate, accelerator, log)

            for report in cluster.reports():  # of all workers, in the process that has the server
                divergence.look(report.loss, f"the training loss of epoch {report.epoch + 1}")
                log.round(report, virtual_time_s=getattr(cluster, "time_s", None))

            if isinstance(turn, EpochEnd):  # all workers have pushed: evaluate the merge, log, save
                epochs_done, evaluation, started = turn.epoch + 1, None, time.perf_counter()
                train_time_s = keeper.train_time_s(turn, without_evaluation=waits)
                cluster.load(turn)
                last = epochs_done == config.epochs
                if epochs_done % config.eval_every == 0 or last:
                    evaluation = Evaluation(side, *assess(), time.perf_counter() - started)
                if config.eval_train and last:
                    accuracy, loss, _ = assess(data.train)
                    evaluation = replace(evaluation, train_accuracy=accuracy, train_loss=loss)
                if accelerator.is_main_process and last:
                    save_model(model, folder, side, data)
                if config.save_best and evaluation and log.enabled and log.is_best(evaluation):
                    save_model(model, folder, side, data, name=BEST)
                if run.average:
                    run.average.add(cluster.weights.vector)
                if run.average and evaluation:  # the model has the averaged weights for a while
                    with run.average.inside(cluster.weights, model):
                        refresh_statistics()
                        accuracy, loss, _ = assess()
                        evaluation = replace(evaluation, ema_accuracy=accuracy, ema_loss=loss)
                        if accelerator.is_main_process and last:
                            save_model(model, folder, side, data, name=EMA)
                keeper.eval_time_s += time.perf_counter() - started
                log.epoch_end(
                    turn.epoch,
                    evaluation,
                    train_time_s=train_time_s,
                    learning_rate=learning_rate(turn.epoch),
                    virtual_time_s=getattr(cluster, "time_s", None),
                )
                keeper.epoch_over(turn)
        keeper.finish()
        cluster.close()
    sum_up(run, folder, log, keeper, accelerator)


if __name__ == "__main__":
    with one_line_errors():
        signal.signal(signal.SIGINT, on_interrupt)
        main(parse_config(Config))
