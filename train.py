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

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

from dbsl.average import recompute_statistics
from dbsl.balance import Balance
from dbsl.config import check_run, parse_config
from dbsl.connect import connect
from dbsl.cores import cores_of_process
from dbsl.errors import one_line_errors
from dbsl.hub import check_hub, push_run
from dbsl.keeper import Keeper
from dbsl.launch import Precision, start_accelerator
from dbsl.model import EMA, check_optimizer, save_model, set_dropout
from dbsl.plan import Rounding, UpdateFactor
from dbsl.reports import make_reports, read_round
from dbsl.results import start_log, sum_up
from dbsl.resume import adapt_to_processes, find_checkpoint, is_finished, read_resumed
from dbsl.runfolder import RunFolder, default_folder
from dbsl.runlog import Evaluation
from dbsl.sampler import evaluation_batches
from dbsl.seeds import stream_seed
from dbsl.server import EpochEnd, Merge, Push, Round, Sync
from dbsl.setup import prepare, print_run
from dbsl.stages import LrScaling, LrSchedule, Schedule, learning_rate_at
from dbsl.stopping import Stopping, deadline_of
from dbsl.trackers import ReportTo, check_tracker
from dbsl.transfer import Wire
from dbsl.transforms import Augment


@dataclass(frozen=True)
class Config:
    """Dual-batch learning with cyclic progressive resizing; lists take commas or spaces."""

    # --- data
    dataset: str = "digits"  # digits, a folder, a .parquet file or a Hugging Face hub id
    image_column: str | None = None  # found from the dataset's features where not given
    label_column: str | None = None  # the same; of several ClassLabels the one with most classes
    train_samples: int | None = None  # train on a stratified, seeded subset of this many
    eval_samples: int | None = None  # evaluate on a stratified, seeded subset of this many
    holdout: float | None = None  # share of the training images to evaluate on, not the test split
    augment: Augment = "crop"  # crop and flip; paper: flip, rotation, zoom; none
    loader_workers: int | None = None  # processes that decode large images; unset: by the cores
    # --- model
    model: str = "resnet18"  # a name in timm's registry
    pretrained: bool = False  # start from timm's weights (downloads them)
    dropout: tuple[float, ...] = (0.0,)  # before the classifier; one, or one per resolution
    # --- workers and their batch sizes
    workers: int | None = None  # simulated in one process (unset: 4); else the process count
    small_ratio: float = 0.0  # share of workers on the small batch, in [0, 1]
    small_workers: int | None = None  # the same as a count; wins over small_ratio
    time_ratio: float = 1.05  # k > 1, what dual batch may cost over all-large
    small_share: float | None = None  # of the samples, in (0, 1); decides instead of time_ratio
    # one, or one per resolution (and worker); auto: the largest that fits; unset: up to 128
    large_batch_size: tuple[int, ...] | Literal["auto"] | None = None
    batch_limit: Literal["memory", "useful"] = "memory"  # of auto; useful: as a study or run found
    batch_evidence: str | None = None  # that study or run; unset: the newest of this model and data
    local_batch_sizes: tuple[int, ...] | None = None  # by hand, one per worker (and resolution)
    global_batch_size: int | None = None  # of joint steps; unset: the sum over workers
    small_batch_size: tuple[int, ...] | None = None  # one, or one per resolution; 0: solved
    min_batch_size: int = 2  # the least that a solution or a balance may give a worker
    memory_limit: float | None = None  # GiB, for large_batch_size auto; unset: what is free
    # seconds per sample: one, or one per resolution (and worker); unset: measured
    slope: tuple[float, ...] | None = None
    intercept: tuple[float, ...] | None = None  # seconds per step, in the same way
    profile: str | None = None  # file of python -m dbsl.profile --output; unset: cache, or measure
    profile_seconds: float = 30.0  # about how long to measure, all resolutions together
    profile_refresh: bool = False  # measure even if the cache has step times
    plan_only: bool = False  # print the plan and its timeline, train nothing
    update_factor: UpdateFactor = "data"  # merge weight of small workers: d_S/d_L, its root, 1
    rounding: Rounding = "round"  # of plan results: as the journal, or truncate as the conference
    balance: Balance = "none"  # dynamic: plans follow measured times; dbs: the published rule
    balance_every: int | None = None  # rounds from one chance to the next; unset: an epoch
    # --- how workers meet

    # barrier each round; ssp: bounded lead; asp: no wait; step: every step. ssp and asp outlive a
    # process that dies if each has a launch of its own: a launcher ends all that it has started
    sync: Sync = "bsp"
    push: Push = "weights"  # or gradients: the server has the optimizer, workers share each batch
    push_every: int = 1  # push gradients: steps whose gradients are summed in a push
    wire: Wire = "float32"  # several processes: pushes in bf16 are half as long
    damp_stale: bool = False  # push gradients: scale gradients by 1/(1 + staleness)
    drop_last: bool = False  # joint steps: leave out an epoch's last, shorter global batch
    sync_batch_norm: bool = False  # sync step on GPUs: statistics of the global batch
    staleness: int = 1  # ssp: rounds that the leader may be ahead of the slowest
    merge: Merge | None = None  # unset: mean with bsp, ratio with ssp and asp; bsp: or delta
    outer_lr: float = 0.7  # merge delta: learning rate of the server's step on the workers' change
    outer_momentum: float = 0.9  # of that step, Nesterov's; in [0, 1)
    rounds_per_epoch: int = 1  # pushes per worker and epoch
    dedicated_server: bool = False  # rank 0 serves and evaluates but does not train
    # seconds of silence after which a process counts as lost, and that others wait at a barrier;
    # with asp and ssp a process that computes is heard all the while
    worker_timeout: float = 1800.0
    # --- emulation of uneven machines
    slowdown: tuple[str, ...] | None = None  # worker:factor on its compute time, 0:2.0,3:1.5
    disturb: str | None = None  # probability:epochs[:factor] of slow spells, 0.1:4-20
    time_noise: float = 0.0  # relative sd of a simulated round's time
    # --- schedule
    epochs: int = 20  # passes over the training data, all workers' shares together
    resolutions: tuple[int, ...] | None = None  # image sides, ascending; unset: 3/4 and 1 of own
    schedule: Schedule = "cyclic"  # resolution climbs in every LR stage; progressive: once
    optimizer: str = "sgd"  # a name that timm.optim knows; sgd is Nesterov's, momentum plain
    lr: float = 0.1  # learning rate of the first stage
    lr_schedule: LrSchedule = "step"  # down at milestones, or cosine from lr to 0
    lr_scaling: LrScaling = "none"  # of a worker by its batch over the large one, or its root
    lr_milestones: tuple[int, ...] | None = None  # epochs; unset: after 4/7 and 6/7 of the run
    lr_gamma: float = 0.2  # factor on the learning rate at each milestone
    warmup_epochs: float | None = None  # linear rise from lr/100; unset: 1/10 of the run, up to 2
    momentum: float = 0.9  # in [0, 1)
    weight_decay: float = 5e-4  # not on biases and norms
    reset_momentum: bool = False  # clear optimizer state where a new stage begins
    label_smoothing: float = 0.0  # in [0, 1)
    mixup: float = 0.0  # alpha of timm's mixup, 0.2 say; 0: none
    cutmix: float = 0.0  # alpha of timm's CutMix, 1.0 say; 0: none; with mixup, a batch gets one
    ema_decay: float = 0.0  # per epoch, 0.8 say: evaluate averaged weights beside the raw; 0: none
    # --- run
    eval_every: int = 1  # epochs; the last is always evaluated
    eval_batch_size: int = 256  # samples
    eval_train: bool = False  # at the end evaluate the training images too, without augmentation
    checkpoint_every: int | str = "10m"  # epochs (2) or minutes (10m); 0: only when stopped
    keep_checkpoints: int = 2  # the newest so many
    resume: str | None = None  # a run folder or checkpoint, or auto: output_dir's, if it has any
    allow_config_change: bool = False  # resume with settings that change what is trained
    max_minutes: float | None = None  # then save and stop with status 75, as after SIGTERM
    max_bad_rounds: int = 10  # rounds refused because loss or weights are not finite
    max_bad_images: int = 16  # left out because they cannot be decoded, of each split
    cpu_threads: int | None = None  # of torch; unset: the process's part of the cores
    mixed_precision: Precision = "auto"  # of forward passes: bf16 where it is native, else no
    noise_scale: bool = True  # estimate the batch size worth having; costs below 2 %
    compile: bool = False  # torch.compile; graphs for all batch sizes are made before training
    seed: int = 0  # of everything random: split, shuffling, augmentation, weights, dropout
    output_dir: str | None = None  # the run folder, new; unset: runs/<dataset>-<model>-<time>
    report_to: ReportTo = "wandb"  # offline without a login or a network
    push_to_hub: str | None = None  # user/name: upload model, card and figures when it is done

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
        if config.reset_momentum and (turn.epoch, turn.round) == (stage.first_epoch, 0):
            for worker in turn.workers:
                stepper.forget(worker)
    stepper.begin(turn, anew=not progress.steps)
    factor = run.rate_factor(segment, turn)  # of the worker's batch size
    rates = [factor * learning_rate(turn.epoch + step.progress) for step in steps]
    rates_left = rates[progress.steps :]
    loss_of = run.loss_of
    measure = partial(run.noise.measure, turn) if run.noise.due(turn) else None
    train_steps(
        stepper, batches, steps_left, rates_left, accelerator, keeper, progress, loss_of, measure
    )
    losses, finite, measured = read_round(progress, cluster.outgoing)
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
    stepper, batches, steps, learning_rates, accelerator, keeper, progress, loss_of, measure
) -> None:
    """Take optimizer steps, adding each worker's loss, summed over its samples, to `progress`.

    `measure`, if any, looks at the gradients of the first step, for the noise scale.
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
                accelerator.backward(loss * weight)
            # .item() would wait for the device
            so_far = progress.losses.get(part.worker, zero)
            progress.losses[part.worker] = so_far + loss.detach() * len(labels)
            progress.samples[part.worker] = progress.samples.get(part.worker, 0) + len(labels)
        if measure and progress.samples and not progress.steps:
            progress.noise = measure(step, stepper.joint, images, labels, loss_of)
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


def main(config: Config) -> None:
    """Train, evaluate and save one run, or go on with one."""
    deadline = deadline_of(config.max_minutes)
    check_tracker(config.report_to)
    check_optimizer(config.optimizer)
    # Part of the config, because the bits depend on it; accelerate launch would set it to 1.
    config = replace(config, cpu_threads=config.cpu_threads or cores_of_process())
    torch.set_num_threads(config.cpu_threads)
    accelerator = start_accelerator(config.mixed_precision, config.worker_timeout)
    config = replace(config, mixed_precision=accelerator.mixed_precision)  # of auto, what it is
    found = find_checkpoint(config, accelerator)
    if found and is_finished(found, config):
        accelerator.print(f"{found.run_folder} is finished: nothing to resume")
        accelerator.end_training()
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
        with Stopping(deadline) as stopping:
            resumed = read_resumed(found, run, accelerator) if found else None
            folder.write_settings(run.config, run.plans)
            train(run, folder.path, stopping, resumed, accelerator)
    accelerator.end_training()
    push_run(config, folder.path, accelerator)


def train(run, folder, stopping, resumed, accelerator) -> None:
    """Train a run from its start, or from where it was saved, to its end."""
    config, data, model = run.config, run.data, run.model
    rank, world_size = accelerator.process_index, accelerator.num_processes
    log = start_log(run, folder, resumed, accelerator)
    cluster, stepper = connect(run, accelerator)  # who meets whom, and what a step is
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

    def assess(source=data.evaluation) -> tuple[float, float, int]:
        ranks = (rank, world_size) if together else ()
        batches = evaluation_batches(len(source), config.eval_batch_size, *ranks)
        images = source.batches(batches, eval_transform)
        return evaluate(model, images, accelerator, together=together)

    refresh_statistics = partial(  # of batch norm: averages of them do not fit averaged weights
        recompute_statistics,
        *(model, cluster.weights, data.train, eval_transform, accelerator),
        batch_size=config.eval_batch_size,
        seed=config.seed,
        together=together,
    )

    with Keeper(run, folder, cluster, stepper, log, accelerator, stopping, resumed) as keeper:
        for turn in cluster.turns():  # of this process's workers, and the ends of epochs
            if isinstance(turn, Round):
                train_round(run, turn, cluster, stepper, keeper, learning_rate, accelerator, log)

            for report in cluster.reports():  # of all workers, in the process that has the server
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
        cluster.close()
    sum_up(run, folder, log, keeper, accelerator)


if __name__ == "__main__":
    with one_line_errors():
        main(parse_config(Config))
