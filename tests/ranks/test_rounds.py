"""`dbsl.Rounds` in your own loop is ``train.py --sync bsp`` to the bit, resumed or not."""

import copy
import io
import os

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import dbsl
import train
from dbsl.data.sources import TensorData
from dbsl.plan.types import Turn
from tests.helpers import free_port, own, place_of, table
from train import Config, learning_rate

SAMPLES, EPOCHS, ROUNDS = 96, 3, 2
LR = 0.1


def build_model():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def build_optimizer(model, config=None):
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def unwrapped(model):
    return model


def planned(training, rank):
    """Yield a worker's rounds: the weight of each, and its batches' samples and learning rates."""
    plans, how = training.workers.plans, (training.config, training.stages)
    for moment in range(EPOCHS * ROUNDS):
        turn = Turn((rank,), *divmod(moment, ROUNDS))
        plan = plans.planner.decide(turn.epoch, turn.round)
        steps = plans.sampler.steps(plan, turn.workers, turn.epoch, turn.round)
        batches = [torch.from_numpy(step.parts[0].indices) for step in steps]
        rates = [learning_rate(turn.epoch + step.progress, *how) for step in steps]
        yield plan.workers[rank].merge_weight, list(zip(batches, rates, strict=True))


class Loop:
    """A foreign loop over batches that are given round by round."""

    def __init__(self, model, wrap, data, todo, **options):
        self.model, self.data, self.todo = wrap(model), data, todo
        self.optimizer = build_optimizer(model)
        self.rounds = dbsl.Rounds(
            self.model, self.optimizer, weight=lambda: todo[self.rounds.merges][0], **options
        )

    def state(self):
        """Return what a script would save, through a file's bytes."""
        file, parts = io.BytesIO(), (self.model, self.optimizer, self.rounds)
        torch.save([part.state_dict() for part in parts], file)
        return file.getvalue()

    def load(self, saved):
        parts = self.model, self.optimizer, self.rounds
        for part, state in zip(parts, torch.load(io.BytesIO(saved)), strict=True):
            part.load_state_dict(state)

    def train(self, save_after=None):
        """Take the steps that are left; return the state after so many of them."""
        taken, saved = 0, None
        with self.rounds:
            while self.rounds.merges < len(self.todo):
                _, batches = self.todo[self.rounds.merges]
                for batch, lr in batches[self.rounds.steps :]:
                    if taken == save_after:
                        saved = self.state()
                    taken += 1
                    inputs, labels = (part[batch] for part in self.data)
                    functional.cross_entropy(self.model(inputs), labels).backward()
                    self.optimizer.param_groups[0]["lr"] = lr
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    merged = self.rounds.step()
                if not merged:
                    self.rounds.merge()
        return saved


def both(rank, port, folder, settings, every, outer, wrap):
    os.environ.update(place_of(rank, 2, port))
    torch.manual_seed(5 + rank)
    data = TensorData(table(SAMPLES, 6), table(20, 6), 3)
    common = {"output_dir": str(folder), "report_to": "none", "cpu_threads": 1, "sync": "bsp"}
    config = Config(
        epochs=EPOCHS, workers=2, rounds_per_epoch=ROUNDS, large_batch_size=(12,), lr=LR,
        slope=(0.001,), intercept=(0.01,), mixed_precision="no", **common, **settings,
    )  # fmt: skip
    found, whole = [], train.train

    def trained(training):
        model = training.model
        start, todo = copy.deepcopy(model.state_dict()), list(planned(training, rank))
        whole(training)
        plain = build_model()
        if rank == 0:
            plain.load_state_dict(start)
        how = {"every": every, "outer": outer, "wire": settings.get("wire", "float32")}
        loop = Loop(plain, wrap, (data.train.inputs, data.train.labels), todo, **how)
        saved = loop.train(save_after=len(todo[0][1]) + 1)  # in the middle of the second round
        again = Loop(build_model(), wrap, loop.data, todo, **how)
        again.load(saved)
        again.train()
        for m in (model, plain, getattr(again.model, "module", again.model)):
            values = [v.flatten().double() for v in m.state_dict().values()]
            found.append(torch.cat(values).numpy())

    with pytest.MonkeyPatch.context() as patch:
        parts = {"build_optimizer": build_optimizer, "train": trained}
        own(patch, data, build_model, **parts)
        train.main(config)
    return found


DELTA = {"merge": "delta:0.7,0.9"}
DUAL = {"small_workers": 1, "small_batch_size": (5,)}


@pytest.mark.parametrize(
    ("settings", "every", "outer", "wrap"),
    [
        (DUAL, None, None, DistributedDataParallel),
        (DELTA, 2, (0.7, 0.9), DistributedDataParallel),
        ({"wire": "int2", **DUAL, **DELTA}, None, (0.7, 0.9), unwrapped),
    ],
)
def test_rounds_are_a_run_at_a_barrier_to_the_bit(
    run_ranks, tmp_path, settings, every, outer, wrap
):
    found = run_ranks(both, free_port(), tmp_path / "run", settings, every, outer, wrap)
    for trained, plain, again in found:
        assert (trained == plain).all()
        assert (again == plain).all()
