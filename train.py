"""Train with every worker on a batch size of its own: dual-batch learning, resolution by stage.

    accelerate launch train.py --small-ratio 0.1               # digits, 4 simulated workers
    accelerate launch train.py --dataset uoft-cs/cifar100 --small-workers 3 --epochs 140
    accelerate launch --config_file accelerate_configs/four_cpu.yaml train.py --small-workers 3
    accelerate launch train.py --config runs/first/config.yaml --output-dir runs/again
    accelerate launch train.py --resume runs/first            # after it was stopped, or killed
    accelerate launch train.py --resume runs/first --eval-only

The first takes about two minutes on two CPU cores and ends above 95 % test accuracy. With one
process all workers live in it (a simulated cluster); with several, each process is one worker.

`open_session` loads the data, plans every worker's batches, and builds the model, the optimizers
and the cluster. Then workers take turns. A turn is a worker's round: pull the global weights, take
optimizer steps on its share of the epoch, push. The cluster merges what is pushed (`--merge`, or
`open_session(..., merge=rule)`). With `--sync step` or `--push gradients` all workers share each
optimizer step instead: a joint step. Every worker computes a part of it.
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":  # Ctrl-C while the rest is imported: no traceback of half an import
    on_interrupt = signal.getsignal(signal.SIGINT)
    if on_interrupt is signal.default_int_handler:  # not ignored, as in a background job
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from dbsl.base.bounds import Within
from dbsl.base.errors import one_line_errors
from dbsl.data.images import ImageSource
from dbsl.log.rows import Evaluation
from dbsl.model import BEST, EMA
from dbsl.open import open_session
from dbsl.plan.stages import learning_rate_at
from dbsl.plan.turns import EpochEnd, Round
from dbsl.run.config import RunConfig
from dbsl.run.evaluation import EvaluationSession
from dbsl.run.parse import parse_config
from dbsl.run.session import Session


@dataclass(frozen=True)
class Config(RunConfig):
    """Dual-batch learning with cyclic progressive resizing; lists take commas or spaces."""

    # --- training
    # label smoothing, in [0, 1)
    label_smoothing: Annotated[float, Within(0, 1, open_high=True)] = 0.0
    # binary cross-entropy: each class is a yes or no of its own
    bce_loss: bool = False
    # share of a class above which it counts as whole, and else as absent, with --bce-loss; unset:
    # shares stay, as label smoothing and mixing make them
    bce_target_thresh: Annotated[float | None, Within(0, 1, open_high=True)] = None
    # sum the binary cross-entropy over the classes instead of its mean
    bce_sum: bool = False
    # epochs between evaluations; the last epoch is always evaluated
    eval_every: Annotated[int, Within(1)] = 1
    # evaluate the training images too, at the end and without augmentation
    eval_train: bool = False
    # save the weights of the best evaluation as model_best.safetensors
    save_best: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, given in (
            ("bce_sum", self.bce_sum),
            ("bce_target_thresh", self.bce_target_thresh),
        ):
            if given and not self.bce_loss:
                raise ValueError(f"bce_loss must be given with {name}, got {name} alone")


def loss_function(logits: Tensor, labels: Tensor, config: Config) -> Tensor:
    """Return the mean loss of logits [B, C] and labels, [B] or shares of classes [B, C]."""
    if not config.bce_loss:
        return F.cross_entropy(logits, labels, label_smoothing=config.label_smoothing)
    from timm.loss import BinaryCrossEntropy  # slow to import, and seldom needed

    shares = labels if labels.dim() == 2 else F.one_hot(labels, logits.shape[1])
    smoothing = config.label_smoothing
    shares = (1 - smoothing) * shares + smoothing / logits.shape[1]
    loss = BinaryCrossEntropy(target_threshold=config.bce_target_thresh, sum_classes=config.bce_sum)
    return loss(logits.float(), shares)


def learning_rate(session: Session, moment: float) -> float:
    """Return the learning rate at a moment, in epochs since the start."""
    config = session.config
    return learning_rate_at(
        moment,
        stages=session.run.stages,
        base=config.lr,
        schedule=config.lr_schedule,
        **config.curve,
    )


def train_round(session: Session, turn: Round) -> None:
    """Give the workers of a turn their round: pull, train on their shares, push."""
    config, stepper, accelerator = session.config, session.stepper, session.accelerator
    with session.round(turn) as work:  # enter: pull into the model; leave: push from it
        for step in work.steps():
            # One part, this worker's batch; for a joint step in one process, one of every worker.
            for part, images, labels in work.parts(step):
                # images [B, 3, R, R], labels [B]: B is the worker's batch size, R the stage's side
                with stepper.part(step, part) as weight:  # 1; in a joint step B / sum of all B
                    with accelerator.autocast():
                        loss = loss_function(stepper.model(images), labels, config)
                    accelerator.backward(loss if weight == 1 else loss * weight)
                work.add(part, loss, len(labels))
            lr = work.lr_factor * learning_rate(session, turn.epoch + step.progress)
            with work.stepping(step, lr):  # counts the step; measures its gradients if it is time
                # A step of the worker's own optimizer, or a joint one. With --push gradients the
                # server takes it, after the push. All of them clear the gradients.
                stepper.step(step, lr)
            session.checkpointer.after_step(round_over=work.over)  # saves, or stops, if it is time


@torch.no_grad()
def evaluate(
    session: Session | EvaluationSession, source: ImageSource | None = None
) -> tuple[float, float, int, float | None]:
    """Return accuracy in [0, 1], cross-entropy, number of images (unset: of evaluation), top-5.

    Top-5 accuracy is None where there are 5 classes or fewer.
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
    return correct / samples, loss / samples, round(samples), top5


def end_epoch(session: Session, end: EpochEnd) -> None:
    """Evaluate the merged weights, save what is to be kept of them, and log the epoch."""
    config, log, ema = session.config, session.log, session.run.ema
    train_time_s, result = session.train_time_s(end), None
    last = end.epoch + 1 == config.epochs
    due = last or (end.epoch + 1) % config.eval_every == 0
    with session.stopwatch.evaluating() as spent:
        session.cluster.load(end)
        if due:
            accuracy, loss, samples, top5 = evaluate(session)
            result = Evaluation(session.side, accuracy, loss, samples, spent(), top5_accuracy=top5)
        if config.eval_train and last:
            accuracy, loss, *_ = evaluate(session, session.run.data.train)
            result = replace(result, train_accuracy=accuracy, train_loss=loss)
        if last:
            session.save_model("model")
        if config.save_best and result and log.is_best(result):
            session.save_model(BEST)
        if ema:
            ema.add(session.cluster.weights.vector)
        if ema and result:
            with session.ema_weights():
                accuracy, loss, *_ = evaluate(session)
                result = replace(result, ema_accuracy=accuracy, ema_loss=loss)
                if last:
                    session.save_model(EMA)
    log.epoch_end(
        end.epoch,
        result,
        train_time_s=train_time_s,
        learning_rate=learning_rate(session, end.epoch),
        virtual_time_s=session.cluster.time_s,
    )


def train(session: Session) -> None:
    """Train from the start, or from where the run was saved, to the end."""
    cluster, log = session.cluster, session.log
    for turn in cluster.turns():  # rounds of this process's workers, and each epoch's end
        if isinstance(turn, Round):
            train_round(session, turn)
        for report in cluster.reports():  # all workers' rounds; none but on the main process
            log.round(report, virtual_time_s=cluster.time_s)
        for worker in cluster.lost():  # its process died, and the others go on
            log.lost(worker)
        if isinstance(turn, EpochEnd):  # all workers have pushed the epoch's last round
            end_epoch(session, turn)
            session.checkpointer.after_epoch(turn)


def main(config: Config) -> None:
    """Train, evaluate and save one run, or go on with one."""
    with open_session(config, loss_function) as session:
        if config.eval_only:
            session.tell(*evaluate(session))
        elif session is not None:  # a finished run, or --plan-only: nothing is to be trained
            train(session)


if __name__ == "__main__":
    with one_line_errors():
        signal.signal(signal.SIGINT, on_interrupt)
        main(parse_config(Config))
