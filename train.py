"""Train with a batch size for every worker: dual-batch learning, resolution by stage.

    accelerate launch train.py --small-ratio 0.1 --output-dir runs/first    # digits; 1 of 4 small
    accelerate launch train.py --dataset uoft-cs/cifar100 --small-workers 3 --epochs 140
    accelerate launch --config_file accelerate_configs/four_cpu.yaml train.py --small-workers 3
    accelerate launch train.py --config runs/first/config.yaml --output-dir runs/again
    accelerate launch train.py --resume runs/first            # after it was stopped

The first takes under a minute on two CPU cores and ends above 97 % test accuracy. For several
processes on a CPU: `torchrun --nproc-per-node 4 train.py` (accelerate launch --cpu starts one).

A worker is a trainer with its own batch size, its own share of each epoch and its own optimizer.
Workers are numbered from 0, those with small batches first. In an epoch each takes one turn, or
`--rounds-per-epoch` turns. Of several processes, each is one worker. A single process simulates
all workers: they take turns on one model, in the order in which separate machines would
be ready.

    setting            a turn of a worker                    what is merged, and when
    --sync bsp         pulls weights, trains, pushes them    weights: weighted mean, at a barrier
    --sync ssp, asp    the same                              weights: each push, on arrival
    --sync step        steps together with all others        gradients: weighted mean, at each step
    --push gradients   pulls weights, pushes gradients       gradients: the server's optimizer steps

This file is a template: copy it and change it. "dbsl:" marks what a plain loop does not have.
dbsl/plan/solve.py plans batch sizes, dbsl/plan/follow.py adapts them to measured times,
dbsl/plan/sampler.py deals out samples, dbsl/cluster/merges.py merges weights, and
dbsl/checkpoint/checkpoint.py saves a run.
"""

if __name__ == "__main__":
    from dbsl.base import errors

    errors.quiet_interrupts()  # Ctrl-C during the imports, which take seconds: no traceback

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from dbsl.checkpoint.checkpoint import Checkpoint
from dbsl.config.fields import Role, Within
from dbsl.model import create_model
from dbsl.optimizer import create_optimizer
from dbsl.plan.stages import Stages
from dbsl.run.plans import Plans
from dbsl.run.times import step_times
from dbsl.run.workers import Workers
from dbsl.runs import RunFolder, load_images, start_accelerator
from dbsl.settings import Settings


@dataclass(frozen=True)
class Config(Settings):
    """Train an image classifier on several workers, each with its own batch size.

    Of several processes, each is a worker; one process alone simulates its workers in turn. Some
    workers may take small batches (dual-batch learning), and all train at rising resolutions.

      accelerate launch train.py                            # handwritten digits, minutes on a CPU
      accelerate launch train.py --dataset photos --model resnet50 --pretrained --small-ratio 0.25
      torchrun --nproc-per-node 2 train.py --sync step --balance dynamic     # two unlike GPUs: DDP

    Lists take commas or spaces. --no-FLAG switches a flag off. The value unset takes back what a
    file or a resumed run sets.
    """

    # --- training
    # label smoothing, in [0, 1)
    label_smoothing: Annotated[float, Within(0, 1, open_high=True)] = 0.0
    # epochs between evaluations; the last epoch is always evaluated
    eval_every: Annotated[int, Within(1), Role.FREE] = 1
    # evaluate the training images too, at the end and without augmentation
    eval_train: Annotated[bool, Role.FREE] = False
    # save the weights of the best evaluation as model_best.safetensors
    save_best: Annotated[bool, Role.FREE] = True


def build_model(config: Config, num_classes: int, resolutions: tuple[int, ...]) -> nn.Module:
    """Return the model, with the same weights in every process."""
    torch.manual_seed(config.stream("initial weights"))
    # timm.create_model; images of up to 64 px get a 3x3 stem, or patches that suit them.
    return create_model(config, num_classes, resolutions)


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Return an optimizer: each worker has its own, or with pushed gradients the server has one.

    The schedule moves `config.lr`, which is the optimizer's default if unset (sgd: 0.1). Each group
    of parameters keeps the proportion to it that it has here.
    """
    rates = {"lr": config.lr, "momentum": config.momentum, "weight_decay": config.weight_decay}
    return create_optimizer(config.optimizer, model, **rates, **config.optimizer_settings)


def loss_function(
    model: nn.Module, images: Tensor, labels: Tensor, config: Config
) -> tuple[Tensor, Mapping[str, Any]]:
    """Return the mean loss of images [B, 3, R, R] and labels [B], and figures to log beside it.

    With mixup and CutMix labels are shares of the classes, [B, C]. Figures are means over the
    batch. Two places call this function: the loop, and what measures step times.
    """
    logits = model(images)
    return F.cross_entropy(logits, labels, label_smoothing=config.label_smoothing), {}


def learning_rate(progress: float, config: Config, stages: Stages) -> float:
    """Return the learning rate, `progress` epochs after the start."""
    if progress < stages.warmup_epochs:
        return config.lr * max(progress / stages.warmup_epochs, 0.01)
    if config.lr_schedule == "step":
        return stages.at(int(progress)).learning_rate
    share = (progress - stages.warmup_epochs) / max(config.epochs - stages.warmup_epochs, 1e-9)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1.0 + math.cos(math.pi * share))


@dataclass
class Training:
    """What the loop works with; a fork adds its own."""

    config: Config
    accelerator: Accelerator
    data: Any  # data.train and data.evaluation: samples by number; `dbsl.data.sources`
    augment: Mapping[int, Any]  # random transforms, by resolution
    stages: Stages  # which epoch has which resolution, dropout and learning rate
    model: nn.Module
    workers: Workers
    checkpoint: Checkpoint
    run: RunFolder


def train_turn(turn: Any, training: Training) -> None:
    """Train one round: of one worker, or in joint steps of all workers of this process.

    `dbsl.run.turns.WorkerTurn` documents `turn`.
    """
    config, accelerator, workers = training.config, training.accelerator, training.workers
    checkpoint, model = training.checkpoint, training.model
    training.run.plan(turn)  # dbsl: says so where batch sizes are not those of the round before
    # Stands for a DataLoader: this worker's samples in batches of its size, in an order that
    # depends on seed and epoch alone. Loader processes begin here, while the weights come.
    steps = turn.steps(training.data.train, training.augment[turn.stage.resolution])
    workers.pull(turn)  # dbsl: the global weights; in joint steps they are here
    workers.train_mode(turn)  # model.train(), with the dropout of its stage; frozen modules stay
    if turn.is_over:  # dbsl: it has no samples in this round, but others save while they train
        checkpoint.after_step(turn)
    for step in steps:
        # One batch, or micro-batches. A joint step in one process has a batch for each worker.
        for images, labels, part in step:
            with accelerator.autocast():
                loss, figures = loss_function(workers.model, images, labels, config)
            # dbsl: The weight is 1, or b / B where all workers' batches of b make one of B, or
            # n * b / B where DDP averages over n processes; of a micro-batch its share of that.
            weighted = loss if part.weight == 1 else loss * part.weight
            accelerator.backward(weighted)  # once: add further losses up before
            step.add(part, loss, figures)  # for the log; on the device: .item() would wait for it
        # dbsl: Each worker is at its own place in the epoch, and may have its --lr-scaling.
        lr = turn.lr_factor * learning_rate(turn.epoch + step.progress, config, training.stages)
        if config.push == "weights":  # else gradients add up, and the server's optimizer steps
            optimizer = workers.optimizers[turn.worker]
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]  # dbsl: its initial rate over config.lr
            if config.clip_grad is not None:
                accelerator.unscale_gradients(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
            optimizer.step()
            optimizer.zero_grad()
        step.done(lr)
        # Saves every --checkpoint-every (10 minutes). If the run must stop, it saves and raises:
        # nothing is pushed, and a resumed run takes the remaining steps.
        checkpoint.after_step(turn)
    # dbsl: Weights or gradients, merged by --sync and --merge. A round with non-finite loss or
    # weights is refused: it changes no global weights, and the worker's optimizer is reset.
    workers.push(turn)


@torch.no_grad()
def evaluate(training: Training, source: Any = None) -> dict[str, Any]:
    """Return metrics of the weights that are in the model, on the evaluation images or a source.

    Any name works: metrics go to metrics.jsonl, the tracker and, for the last epoch, summary.json.
    """
    model, workers, accelerator = training.model, training.workers, training.accelerator
    source = training.data.evaluation if source is None else source
    model.eval()
    totals = torch.zeros(4, device=accelerator.device)  # correct, loss, samples, in the first 5
    for images, labels in workers.evaluation_batches(source):  # dbsl: a part in each process
        with accelerator.autocast():
            logits = model(images).float()
        loss = F.cross_entropy(logits, labels, reduction="sum")
        correct = (logits.argmax(1) == labels).sum()
        first5 = (logits.topk(min(5, logits.shape[1])).indices == labels[:, None]).sum()
        totals += torch.stack([correct, loss, torch.full_like(loss, len(labels)), first5])
    correct, loss, samples, first5 = workers.sum_of_processes(totals).tolist()
    metrics = {"accuracy": correct / samples, "loss": loss / samples, "samples": round(samples)}
    return metrics | ({"top5_accuracy": first5 / samples} if training.data.num_classes > 5 else {})


def end_epoch(end: Any, training: Training) -> None:
    """Evaluate the merged weights, save them when due, and log the epoch.

    `dbsl.plan.types.EpochEnd` documents `end`.
    """
    config, workers, run = training.config, training.workers, training.run
    last = workers.is_last(end)
    due, metrics = last or (end.epoch + 1) % config.eval_every == 0, None
    with workers.merged(end) as seconds:  # dbsl: the merged weights are in the model
        if due:
            metrics = evaluate(training)
            metrics["time_s"] = seconds()
        if config.eval_train and last:
            found = evaluate(training, training.data.train)
            metrics |= {f"train_{name}": found[name] for name in ("accuracy", "loss")}
        if last:
            run.save_model("model")
        if config.save_best and due and run.is_best(metrics):
            run.save_model("model_best")
        # dbsl: Averaged weights, by --ema-decay; your own file in dbsl/extras may add more.
        metrics = run.evaluate_more(end, metrics, partial(evaluate, training))
    run.epoch(end, metrics)


def train(training: Training) -> None:
    """Train from the start, or from where the run was saved, to the end."""
    workers, checkpoint, run = training.workers, training.checkpoint, training.run
    # dbsl: SIGTERM saves and ends the run. If a process dies, bsp and step end with one line that
    # names it; under ssp and asp the others go on, if each was launched by itself.
    with workers, checkpoint:
        run.begin(workers, checkpoint)  # config.yaml, plan.json, W&B, the printed plan
        for turn in workers.turns():  # rounds of this process's workers, and ends of epochs
            if not turn.ends_epoch:
                train_turn(turn, training)
            run.log_rounds()  # dbsl: from the workers' reports
            if turn.ends_epoch:
                end_epoch(turn, training)  # to stop early, call workers.finish() in it
                checkpoint.after_epoch(turn)


def main(config: Config) -> None:
    """Train, evaluate and save one run, or go on with one."""
    accelerator = start_accelerator(config)  # dbsl: all processes, with the same settings and code
    with RunFolder(config, accelerator) as run:  # dbsl: locked; written from run.begin on
        if run.is_finished:
            return
        data = load_images(run.config, accelerator)
        stages = Stages(run.config, data.resolutions, accelerator.print)
        config = stages.config  # what was left open is settled
        model = build_model(config, data.num_classes, stages.resolutions)
        model.to(accelerator.device, memory_format=torch.channels_last)
        data = data.normalised_for(model)  # pretrained weights have their own mean and deviation
        augment = {
            r: data.transform(r, config.augmentation, config.seed) for r in stages.resolutions
        }
        new_optimizer = partial(build_optimizer, config=config)

        # dbsl: Seconds of a step with x samples, a * x + b: given, or measured with this loss.
        times = step_times(config, accelerator, model, data, loss_function, new_optimizer)
        plans = Plans(times, stages, accelerator)
        if config.plan_only:
            run.tell(plans, data, model)
            return
        workers = Workers(plans, accelerator, model, data, loss_function, new_optimizer)
        checkpoint = Checkpoint(run, workers)  # --resume: brings everything back
        training = Training(
            config, accelerator, data, augment, stages, model, workers, checkpoint, run
        )
        train(training)


if __name__ == "__main__":
    with errors.one_line_errors():
        main(Config.from_flags())
