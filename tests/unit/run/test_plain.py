"""Workers, plans and checkpoints without flags, YAML or a run folder: another program's loop."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dbsl.checkpoint.checkpoint import Checkpoint
from dbsl.config.settings import RunConfig
from dbsl.data.sources import TensorData
from dbsl.plan.machines import WorkerProfiles
from dbsl.plan.stages import Stages
from dbsl.plan.types import TimeModel
from dbsl.run.plans import Plans
from dbsl.run.times import Times
from dbsl.run.workers import Workers

SAMPLES, EPOCHS = 30, 3
SLOPES, SIZES = (0.001, 0.002), (8, 4)


def loss_function(model, inputs, labels, config):
    return F.cross_entropy(model(inputs), labels), {}


def train(folder, accelerator, epochs, sync="bsp"):
    """Train so many epochs of the run; return the weights and the samples of each epoch."""
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 4)
    inputs[:, 0] = torch.arange(SAMPLES)
    split = TensorDataset(inputs, torch.arange(SAMPLES) % 2)
    data, model = TensorData(split, split, 2), nn.Linear(4, 2)
    config = RunConfig(
        workers=2, small_workers=0, local_batch_sizes=SIZES, sync=sync, epochs=EPOCHS, lr=0.01
    )
    stages = Stages(config, data.resolutions)
    times = TimeModel.of([TimeModel(slope, 0.01) for slope in SLOPES], 2)
    known = WorkerProfiles({0: times}, {0: list(SIZES)}, measured=False)
    plans = Plans(Times(stages.config, known, SAMPLES), stages, accelerator)
    build = lambda model: torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)  # noqa: E731
    workers = Workers(plans, accelerator, model, data, loss_function, build)
    checkpoint, seen = Checkpoint(folder, workers), {}
    with workers, checkpoint:
        for turn in workers.turns():
            if turn.ends_epoch:
                if turn.epoch + 1 == epochs:
                    workers.finish()
                checkpoint.after_epoch(turn)
                continue
            steps = turn.steps(data.train, None)
            workers.pull(turn)
            workers.train_mode(turn)
            for step in steps:
                for inputs, labels, part in step:
                    seen.setdefault(turn.epoch, []).extend(inputs[:, 0].int().tolist())
                    loss, figures = loss_function(workers.model, inputs, labels, config)
                    (loss * part.weight).backward()
                    step.add(part, loss, figures)
                workers.optimizers[turn.worker].step()
                workers.optimizers[turn.worker].zero_grad()
                step.done(0.01)
                checkpoint.after_step(turn)
            workers.push(turn)
    return workers.cluster.weights.vector.clone(), seen


def test_another_programs_loop_takes_each_sample_once_and_goes_on_to_the_bit(tmp_path, accelerator):
    for sync in ("bsp", "step"):
        whole, seen = train(tmp_path / f"whole-{sync}", accelerator, EPOCHS, sync)
        assert all(sorted(own) == [*range(SAMPLES)] for own in seen.values())
        assert len(seen) == EPOCHS
        train(tmp_path / f"broken-{sync}", accelerator, 1, sync)
        again, seen = train(tmp_path / f"broken-{sync}", accelerator, EPOCHS, sync)
        assert [*seen] == [1, 2]
        assert torch.equal(again, whole)
