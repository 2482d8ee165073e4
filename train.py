"""Train with a batch size for every worker: dual-batch learning, resolution by stage.

    accelerate launch train.py --small-ratio 0.1 --output-dir runs/first    # digits; 1 of 4 small
    accelerate launch train.py --dataset uoft-cs/cifar100 --small-workers 3 --epochs 140
    accelerate launch --config_file accelerate_configs/four_cpu.yaml train.py --small-workers 3
    accelerate launch train.py --config runs/first/config.yaml --output-dir runs/again
    accelerate launch train.py --resume runs/first            # after it was stopped

The first takes about two minutes on two CPU cores and ends above 95 % test accuracy. With one
process all workers live in it (a simulated cluster); with several, each process is one worker.

`open_session` loads the data, plans every worker's batches, and builds the model, the optimizers
and the cluster. Then workers take rounds. A round is a worker's pass over its share of an epoch, or
a part of that (`--rounds-per-epoch`; 4 steps with `--push gradients:4`). What it does depends on
how they meet:

    setting            in a round, a worker          what is merged, and when
    --sync bsp         pulls, takes steps, pushes    weights: a weighted mean, once all have pushed
    --sync ssp, asp    pulls, takes steps, pushes    weights: each push as it comes
    --sync step        takes joint steps             gradients, at every step: all stay equal
    --push gradients   pulls, adds gradients up,     gradients: the server's optimizer takes a step
                       pushes                        with them

In a joint step every worker computes its part of one global batch. Losses are weighted by samples:
the gradient is that of the whole batch (but for batch norm, which takes each part by itself). A
round whose loss or weights are not finite is refused, and a line says why: weights stay, and the
worker's optimizer state is cleared. More than `--max-bad-rounds` of them end the run.

How much each gets: dbsl/plan/solve.py, and as times change dbsl/plan/follow.py. Which samples:
dbsl/plan/sampler.py. Steps: dbsl/cluster/steps.py. Merges: dbsl/cluster/merges.py. Saving and
resuming: dbsl/checkpoint/checkpointer.py. `# dbsl:` marks what a plain loop does not have.
"""

if __name__ == "__main__":
    from dbsl.base.errors import one_line_errors, quiet_interrupts

    quiet_interrupts()  # Ctrl-C during the imports, which take seconds, ends without traceback

from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dbsl.config.fields import Role, Within
from dbsl.config.hooks import settings_of_extras
from dbsl.config.parse import parse_config
from dbsl.config.settings import RunConfig
from dbsl.data.sources import Source
from dbsl.loss import Loss, with_figures
from dbsl.model import BEST, FINAL
from dbsl.open import open_session
from dbsl.plan.stages import learning_rate_at
from dbsl.plan.types import EpochEnd, Turn
from dbsl.run.evaluation import Evaluation
from dbsl.run.session import Session


@dataclass(frozen=True)
class Config(*settings_of_extras(), RunConfig):
    """Dual-batch learning with cyclic progressive resizing.

    Lists take commas or spaces. The value unset removes what a file or a resumed run sets.
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


def loss_function(model: nn.Module, images: Tensor, labels: Tensor, config: Config) -> Loss:
    """Return the mean loss of images [B, 3, R, R] and labels, [B] or shares of classes [B, C].

    It may return (loss, figures): {"penalty": tensor, ...} is logged wherever the loss is (steps:
    --log-every). Measured step times and the noise scale call it, too. A teacher is built at the
    first call, by a function with @cache. Call `model(...)`, not its layers: DDP may be around it.
    """
    logits = model(images)
    return F.cross_entropy(logits, labels, label_smoothing=config.label_smoothing)


def learning_rate(session: Session[Config], moment: float) -> float:
    """Return the learning rate at a moment, in epochs since the start."""
    config, stages = session.config, session.run.stages
    curve = {"warmup_epochs": config.warmup_epochs, "min_lr": config.min_lr}
    return learning_rate_at(moment, stages, base=config.lr, schedule=config.lr_schedule, **curve)


def train_round(session: Session[Config], turn: Turn) -> None:
    """Train one round: of one worker, or, in joint steps, of all workers of this process."""
    config, stepper, accelerator = session.config, session.stepper, session.accelerator
    with session.round(turn) as work:  # dbsl: pulls weights (not in joint steps); at its end pushes
        for step in work.steps():
            # dbsl: This worker's batch; for a joint step in one process one of every worker. With
            # --micro-batch-size each comes in several parts.
            for part, images, labels in work.parts(step):
                # images [b, 3, R, R]: b is the worker's batch size at most, R the stage's side
                # labels [b], or with mixup and CutMix shares of the classes [b, C]
                # dbsl: The weight is 1, or b / B where all workers' parts make one batch of B, or
                # n * b / B where DDP averages over n processes; of a micro-batch its share of that.
                with stepper.micro_batch(step, part) as weight:
                    with accelerator.autocast():
                        found = loss_function(stepper.model, images, labels, config)
                    loss, figures = with_figures(found)
                    accelerator.backward(loss * weight)  # once: add further losses up before
                work.add(part, len(labels), loss, figures)  # dbsl: without waiting for the device
            # dbsl: each worker is at its own place in the epoch, and may have its --lr-scaling
            lr = work.lr_factor * learning_rate(session, turn.epoch + step.progress)
            with work.stepping(step, lr):  # dbsl: counts the step; measures gradients if it is time
                stepper.step(step, lr)  # clips, steps, clears; --push gradients: the server steps
            # dbsl: Saves if it is time. If the run is to stop it raises RunStopped, so that nothing
            # is pushed, and a resumed run takes the steps that are left of the round.
            session.checkpointer.after_step(round_over=work.over)


@torch.no_grad()
def evaluate(session: Session, source: Source | None = None) -> Evaluation:
    """Return accuracy, cross-entropy and top-5 accuracy (None below 6 classes) on a source.

    Without a source: of the evaluation images. Own metrics: `Evaluation(..., more={"name": 1.0})`.
    """
    model, accelerator = session.model, session.accelerator
    model.eval()
    totals = torch.zeros(4, device=accelerator.device)  # correct, loss, samples, in the first 5
    for images, labels in session.evaluation_images(source):
        with accelerator.autocast():
            logits = model(images).float()
        loss = F.cross_entropy(logits, labels, reduction="sum")
        correct = (logits.argmax(1) == labels).sum()
        first5 = (logits.topk(min(5, session.num_classes)).indices == labels[:, None]).sum()
        totals += torch.stack([correct, loss, torch.full_like(loss, len(labels)), first5])
    if session.shares_evaluation:  # each process has evaluated a part of the images
        totals = accelerator.reduce(totals)
    correct, loss, samples, first5 = totals.tolist()
    top5 = first5 / samples if session.num_classes > 5 else None
    return Evaluation(correct / samples, loss / samples, round(samples), session.side, top5)


def end_epoch(session: Session[Config], end: EpochEnd) -> None:
    """Evaluate the merged weights, save what is to be kept of them, and log the epoch."""
    config, cluster, log = session.config, session.cluster, session.log
    train_time_s, result = session.train_time_s(end), None
    last = session.is_last(end)
    due = last or (end.epoch + 1) % config.eval_every == 0
    with session.evaluating() as spent:
        cluster.load(end)  # the merged weights into the model
        if due:
            result = evaluate(session)
            for name, source in session.also.items():  # from open_session(evaluate_also=...)
                result = result.also(name, evaluate(session, source))
            result = replace(result, time_s=spent())  # here session.finish() makes this the last
        if config.eval_train and last:
            result = result.also("train", evaluate(session, session.run.data.train))
        if last:
            session.save_model(FINAL)
        if config.save_best and due and log.is_best(result):
            session.save_model(BEST)
        # Such as averaged weights, by --ema-decay; a file of yours in dbsl/extras may add more.
        result = session.run.extras.evaluated(session, end, result, evaluate)
    log.epoch_end(end.epoch, result, train_time_s=train_time_s, virtual_time_s=cluster.time_s)


def train(session: Session[Config]) -> None:
    """Train from the start, or from where the run was saved, to the end."""
    cluster, log = session.cluster, session.log
    for turn in cluster.turns():  # rounds of this process's workers, and ends of epochs
        if isinstance(turn, Turn):
            train_round(session, turn)
        for report in cluster.reports():  # all workers' rounds; none but on the main process
            log.round(report, virtual_time_s=cluster.time_s)
        log.hear(cluster)  # which workers were lost, or have come back
        if isinstance(turn, EpochEnd):  # all workers have pushed the epoch's last round
            end_epoch(session, turn)
            session.checkpointer.after_epoch(turn)


def main(config: Config) -> None:
    """Train, evaluate and save one run, or go on with one."""
    with open_session(
        config,
        loss_function,
        data=None,  # TensorData(train, evaluation, classes), else the images of --dataset
        model=None,  # a module, or a function that builds one: without --model; else timm's
        # (model, config) -> one or several of torch, else timm's --optimizer. It needs --lr, and
        optimizer=None,  # each group keeps its proportion to it under the schedule.
        merge=None,  # (global_ [P], pushed [n, P], factors [n], by samples) -> [P], else --merge
        evaluate_also=None,  # {name: data, source, dataset of tensors, or name of a dataset}
        figures=None,  # names of those that train_round gives work.add besides loss_function's
    ) as session:
        if session is not None:  # a finished run, or --plan-only: nothing is to be trained
            train(session)


if __name__ == "__main__":
    with one_line_errors():
        main(parse_config(Config))
