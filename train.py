"""Train with every worker on a batch size of its own: dual-batch learning, resolution by stage.

    accelerate launch train.py --small-ratio 0.1               # digits, 4 simulated workers
    accelerate launch train.py --dataset uoft-cs/cifar100 --small-workers 3 --epochs 140
    accelerate launch --config_file accelerate_configs/four_cpu.yaml train.py --small-workers 3
    accelerate launch train.py --config runs/first/config.yaml --output-dir runs/again

The first takes about two minutes on two CPU cores and ends above 95 % test accuracy. With one
process all workers live in it (a simulated cluster); with several, each process is one worker.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from dbsl.balance import Balance
from dbsl.checkpoint import make_run_folder
from dbsl.config import check_run, one_line_errors, parse_config
from dbsl.connect import connect
from dbsl.cores import cores_of_process
from dbsl.model import check_optimizer, save_model, set_dropout
from dbsl.plan import Rounding, UpdateFactor
from dbsl.plots import accuracy_and_loss, plan_timeline, read_metrics
from dbsl.reports import make_reports
from dbsl.runlog import Evaluation, RunLog
from dbsl.sampler import evaluation_batches
from dbsl.seeds import stream_seed
from dbsl.server import EpochEnd, Merge, Push, Round, Sync
from dbsl.setup import prepare, print_run, profile_command
from dbsl.stages import LrSchedule, Schedule, learning_rate_at
from dbsl.trackers import ReportTo, check_tracker, start_trackers
from dbsl.transforms import Augment
from dbsl.worker_plots import worker_history


@dataclass(frozen=True)
class Config:
    """Dual-batch learning with cyclic progressive resizing; lists take commas or spaces."""

    # --- data
    dataset: str = "digits"  # digits, a folder, a .parquet file or a Hugging Face hub id
    image_column: str | None = None  # found from the dataset's features where not given
    label_column: str | None = None  # the same; of several ClassLabels the one with most classes
    train_samples: int | None = None  # train on a stratified, seeded subset of this many
    eval_samples: int | None = None  # evaluate on a stratified, seeded subset of this many
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
    sync: Sync = "bsp"  # barrier each round; ssp: bounded lead; asp: no wait; step: every step
    push: Push = "weights"  # or gradients: the server has the optimizer, workers share each batch
    push_every: int = 1  # push gradients: steps whose gradients are summed in a push
    damp_stale: bool = False  # push gradients: scale a push by 1/(1 + staleness)
    drop_last: bool = False  # joint steps: leave out an epoch's last, shorter global batch
    sync_batch_norm: bool = False  # sync step on GPUs: statistics of the global batch
    staleness: int = 1  # ssp: rounds that the leader may be ahead of the slowest
    merge: Merge | None = None  # unset: mean with bsp, ratio with ssp and asp
    rounds_per_epoch: int = 1  # pushes per worker and epoch
    dedicated_server: bool = False  # rank 0 serves and evaluates but does not train
    worker_timeout: float = 1800.0  # seconds of silence after which a peer counts as lost
    # --- emulation of uneven machines
    slowdown: tuple[str, ...] | None = None  # worker:factor on its compute time, 0:2.0,3:1.5
    disturb: str | None = None  # probability:epochs[:factor] of slow spells, 0.1:4-20
    time_noise: float = 0.0  # relative sd of a simulated round's time
    # --- schedule
    epochs: int = 14  # passes over the training data, all workers' shares together
    resolutions: tuple[int, ...] | None = None  # image sides, ascending; unset: 3/4 and 1 of own
    schedule: Schedule = "cyclic"  # resolution climbs in every LR stage; progressive: once
    optimizer: str = "sgd"  # a name that timm.optim knows; sgd is Nesterov's, momentum plain
    lr: float = 0.1  # learning rate of the first stage
    lr_schedule: LrSchedule = "step"  # down at milestones, or cosine from lr to 0
    lr_milestones: tuple[int, ...] | None = None  # epochs; unset: after 4/7 and 6/7 of the run
    lr_gamma: float = 0.2  # factor on the learning rate at each milestone
    warmup_epochs: float | None = None  # linear rise from lr/100; unset: 1/10 of the run, up to 2
    momentum: float = 0.9  # in [0, 1)
    weight_decay: float = 5e-4  # not on biases and norms
    reset_momentum: bool = False  # clear optimizer state where a new stage begins
    label_smoothing: float = 0.0  # in [0, 1)
    # --- run
    eval_every: int = 1  # epochs; the last is always evaluated
    eval_batch_size: int = 256  # samples
    checkpoint_every: int = 0  # epochs; 0: the final model only
    cpu_threads: int | None = None  # of torch; unset: the process's part of the cores
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"  # autocast of the forward pass
    seed: int = 0  # of everything random: split, shuffling, augmentation, weights, dropout
    output_dir: str | None = None  # the run folder, new; unset: runs/<dataset>-<model>-<time>
    report_to: ReportTo = "wandb"  # offline without a login or a network

    def __post_init__(self) -> None:
        check_run(self)


def train_round(run, turn, cluster, stepper, learning_rate, accelerator, log) -> None:
    """Give the workers of a turn their round: pull, train on their shares, push."""
    config, stage = run.config, run.stage_at(turn.epoch)
    segment = cluster.plan(turn)  # who trains on how much, in which batches
    log.plan(turn.epoch, segment.plan)
    steps = run.steps(segment, turn)
    if config.reset_momentum and (turn.epoch, turn.round) == (stage.first_epoch, 0):
        for worker in stepper.optimizers.keys() & turn.workers:
            stepper.optimizers[worker].state.clear()
    set_dropout(run.model, stage.dropout)
    torch.manual_seed(stream_seed(config.seed, "dropout", turn.workers[0], turn.epoch, turn.round))
    cluster.pull(turn)
    stepper.begin(turn)
    parts = [part for step in steps for part in step.parts if len(part.indices)]
    images = run.data.train.batches(
        [part.indices for part in parts], run.transforms[stage.resolution], turn.epoch
    )
    rates = [learning_rate(turn.epoch + step.progress) for step in steps]
    losses = train_steps(stepper, images, steps, rates, accelerator, config.label_smoothing)
    reports = make_reports(
        turn,
        segment.plan,
        steps,
        resolution=stage.resolution,
        learning_rate=rates[-1],
        losses=losses,
        clock=stepper.clock,
    )
    cluster.push(reports)


def train_steps(
    stepper, batches, steps, learning_rates, accelerator, label_smoothing
) -> dict[int, float]:
    """Take optimizer steps and return each worker's training loss, summed over its samples."""
    stepper.model.train()
    losses = defaultdict(lambda: torch.zeros((), device=accelerator.device))
    for step, learning_rate in zip(steps, learning_rates, strict=True):
        for part in step.parts:  # one; of joint steps in one process, one of each worker
            if not len(part.indices):
                continue
            with stepper.part(step, part) as weight:
                images, labels = next(batches)
                # images [B, 3, R, R], labels [B]: B is the worker's batch size, R the stage's side
                with accelerator.autocast():
                    logits = stepper.model(images)
                    loss = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
                accelerator.backward(loss * weight)
            losses[part.worker] += loss.detach() * len(labels)  # .item() would wait for the device
        stepper.step(step, learning_rate)  # here, of all workers together, or at the server
    return {worker: loss.item() for worker, loss in losses.items()}


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
    """Train, evaluate and save one run."""
    began = time.perf_counter()
    check_tracker(config.report_to)
    check_optimizer(config.optimizer)
    # Part of the config, because the bits depend on it; accelerate launch would set it to 1.
    config = replace(config, cpu_threads=config.cpu_threads or cores_of_process())
    torch.set_num_threads(config.cpu_threads)
    accelerator = Accelerator(
        # Without cpu=True, processes on a machine that has no accelerator would train alone.
        cpu=not torch.accelerator.is_available(),
        mixed_precision=config.mixed_precision,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=config.worker_timeout))],
    )
    rank, world_size = accelerator.process_index, accelerator.num_processes
    run = prepare(config, accelerator)
    config, data, model = run.config, run.data, run.model
    if config.plan_only:
        print_run(run, None, accelerator)
        accelerator.end_training()
        return
    folder = make_run_folder(config, run.plans, accelerator)
    print_run(run, folder, accelerator)
    start_trackers(accelerator, config.report_to, folder, folder.name, asdict(config))
    log = RunLog(
        folder,
        accelerator,
        run.stages,
        run.plans,
        profile_command(run, world_size) if config.balance == "none" else None,
        pushes=config.push == "gradients",
    )
    if accelerator.is_main_process:
        plan_timeline(run.stages, run.plans, config.rounds_per_epoch, folder / "plots/plan.png")
        log.images({"plots/plan": folder / "plots/plan.png"})
    cluster, stepper = connect(run, accelerator)  # who meets whom, and what a step is
    # Nobody trains while there is an evaluation; with several processes each evaluates its part.
    waits = world_size == 1 or config.sync in ("bsp", "step")
    together = waits and world_size > 1
    eval_batches = evaluation_batches(
        len(data.evaluation), config.eval_batch_size, *((rank, world_size) if together else ())
    )
    learning_rate = partial(  # of a moment, in epochs since the start
        learning_rate_at,
        stages=run.stages,
        base=config.lr,
        schedule=config.lr_schedule,
        warmup_epochs=config.warmup_epochs,
    )
    final_resolution = config.resolutions[-1]
    eval_time_s, loop_began = 0.0, time.perf_counter()

    for turn in cluster.turns():  # of this process's workers, and the ends of epochs
        if isinstance(turn, Round):
            train_round(run, turn, cluster, stepper, learning_rate, accelerator, log)

        for report in cluster.reports():  # of all workers, in the process that has the server
            log.round(report, virtual_time_s=getattr(cluster, "time_s", None))

        if isinstance(turn, EpochEnd):  # all workers have pushed: evaluate the merge, log, save
            # Evaluation holds all workers up where they meet at a barrier; else training goes on.
            train_time_s = turn.ended_at - loop_began - (eval_time_s if waits else 0.0)
            epochs_done, evaluation, started = turn.epoch + 1, None, time.perf_counter()
            cluster.load(turn)
            if epochs_done % config.eval_every == 0 or epochs_done == config.epochs:
                eval_transform = replace(run.transforms[final_resolution], augment="none")
                images = data.evaluation.batches(eval_batches, eval_transform)
                accuracy, loss, samples = evaluate(model, images, accelerator, together=together)
                took = time.perf_counter() - started
                evaluation = Evaluation(final_resolution, accuracy, loss, samples, took)
            if accelerator.is_main_process:
                if config.checkpoint_every and epochs_done % config.checkpoint_every == 0:
                    checkpoint = folder / f"checkpoints/epoch-{epochs_done:04d}"
                    save_model(model, checkpoint, final_resolution, data)
                if epochs_done == config.epochs:
                    save_model(model, folder, final_resolution, data)
            eval_time_s += time.perf_counter() - started
            log.epoch_end(
                turn.epoch,
                evaluation,
                train_time_s=train_time_s,
                learning_rate=learning_rate(turn.epoch),
                virtual_time_s=getattr(cluster, "time_s", None),
            )
    cluster.close()

    if accelerator.is_main_process:
        metrics = read_metrics(folder / "metrics.jsonl")
        accuracy_and_loss(metrics, folder / "plots/accuracy.png")
        worker_history(metrics, folder / "plots/workers.png")
        log.images({f"plots/{n}": folder / f"plots/{n}.png" for n in ("accuracy", "workers")})
        log.summary(
            {
                **log.results(),
                "total_time_s": time.perf_counter() - began,
                "epochs": config.epochs,
                "seed": config.seed,
                "workers": config.workers,
                "small_workers": config.small_workers,
                "sync": config.sync,
            }
        )
    log.close()
    accelerator.end_training()


if __name__ == "__main__":
    with one_line_errors():
        main(parse_config(Config))
