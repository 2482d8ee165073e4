"""Uneven workers equal one process on the joined batch, in one process and over real ones."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.optimizer import AcceleratedOptimizer
from timm.models import model_parameters
from timm.utils import dispatch_clip_grad
from torch import nn

from dbsl.cluster.alive import ControlGroup
from dbsl.cluster.barrier import BarrierCluster
from dbsl.cluster.gradients import GradientServer, ServerOptimizer
from dbsl.cluster.joint import JointCluster
from dbsl.cluster.served import through_server
from dbsl.cluster.simulated import SimulatedCluster
from dbsl.cluster.steps import (
    ComputeClock,
    DistributedSteps,
    JointSteps,
    OwnSteps,
    PushedGradients,
    take_step,
)
from dbsl.cluster.weights import FlatWeights
from dbsl.optimizer import make_clip
from dbsl.plan.follow import Planner
from dbsl.plan.sampler import Part, Step, StepSampler, micro_parts
from dbsl.plan.solve import plan_steps
from dbsl.plan.types import EpochEnd, RoundReport, Segment, TimeModel, Turn

CPU = torch.device("cpu")
LR, EPOCHS = 0.1, 5
# Sizes, samples: whole global batches, a shorter last one, one of a single sample, and one of which
# a small worker has nothing.
SPLITS = [
    ((8, 2), 40),
    ((1, 15), 77),
    ((5, 5, 5, 1), 71),
    ((8, 2), 41),
    ((2, 7, 1), 43),
]


def make_data(samples):
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(samples, 3, 8, 8, dtype=torch.float64, generator=generator)
    return images, torch.randint(0, 3, (samples,), generator=generator)


def build(model, weight_decay=1e-3):
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=weight_decay)


CLIPS = [(None, "norm"), (0.02, "norm"), (0.002, "value"), (0.01, "agc")]


def freeze(model, epoch):
    """Freeze the first layer in epochs 1 and 2, and thaw it then."""
    for parameter in list(model.parameters())[:2]:
        parameter.requires_grad_(epoch not in (1, 2))


def joined_weights(model, sizes, samples, clip=CLIPS[0], begin=lambda model, epoch: None):
    """One process, the joined batches, plain PyTorch and timm's clipping."""
    model = copy.deepcopy(model)
    images, labels = make_data(samples)
    optimizer, sampler = build(model), StepSampler(samples, sum(sizes), seed=1)
    steps = 0
    for epoch in range(EPOCHS):
        begin(model, epoch)
        for number in range(sampler.steps_per_epoch):
            parts = sampler.step(epoch, number, sizes).parts
            batch = torch.cat([torch.from_numpy(part.indices) for part in parts])
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            if clip[0]:
                parameters = model_parameters(model, exclude_head=clip[1] == "agc")
                dispatch_clip_grad(parameters, *clip)
            optimizer.step()
            steps += 1
    assert steps >= 20  # the fewest that the promise is about
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(cluster, stepper, sizes, samples, weighted=True, micro=None, begin=None):
    """The loop of train.py, bare; `micro` has the most samples at once, by worker."""
    images, labels = make_data(samples)
    sampler = StepSampler(samples, sum(sizes), seed=1)
    turns = 0
    for turn in cluster.turns():
        if isinstance(turn, EpochEnd):
            cluster.load(turn)
            continue
        turns += 1
        if begin:
            begin(stepper.model, turn.epoch)
        cluster.pull(turn)
        stepper.begin(turn)
        count = sampler.steps_per_epoch
        pushing = isinstance(stepper, PushedGradients)
        first, last = (turn.round, turn.round + 1) if pushing else (0, count)
        for step in sampler.steps(turn.workers, turn.epoch, first, last, sizes):
            for whole in step.parts:
                at_once = micro and micro[whole.worker]
                for part in micro_parts(whole, at_once) if len(whole.indices) else ():
                    with stepper.part(step, part) as weight:
                        batch = torch.from_numpy(part.indices)
                        loss = F.cross_entropy(stepper.model(images[batch]), labels[batch])
                        (loss * (weight if weighted else 1.0)).backward()
            stepper.step(step, LR)
        cluster.push(
            [
                RoundReport(
                    *(w, turn.epoch, turn.round, 8, 1, 1, 1, 0.1, 0.5),
                    merge_weight=sizes[w] / sum(sizes),
                    learning_rate=LR,
                )
                for w in turn.workers
            ]
        )
    cluster.close()
    return tight(cluster.weights)


def tight(weights):
    """Return weights without the gaps between tensors."""
    return torch.cat([tensor.flatten() for tensor in weights.tensors()])


def make_planner(sizes, samples):
    models = [TimeModel(0.001, 0.01)] * len(sizes)
    plan = plan_steps(samples, sizes, models)
    return Planner({8: plan}, lambda epoch: 8, {8: models}), plan


def one_process(model, how, sizes, samples, weighted=True, clip=CLIPS[0], micro=None, begin=None):
    model = copy.deepcopy(model)
    planner, plan = make_planner(sizes, samples)
    clock, workers = ComputeClock(CPU), range(len(sizes))
    common = {"planner": planner, "epochs": EPOCHS, "duration": lambda worker, epoch, round_: 1.0}
    if how == "step":
        weights = FlatWeights(model)
        stepper = JointSteps(model, weights, clock, build, workers)
        stepper.clip = make_clip(model, *clip)
        cluster = JointCluster(weights, workers=workers, rounds_per_epoch=1, **common)
    else:
        owner = ServerOptimizer(model, CPU, build, clip=clip[0], clip_mode=clip[1])
        server = GradientServer(
            owner,
            len(sizes),
            staleness=0,
            rounds_per_epoch=plan.workers[0].steps,
        )
        weights = FlatWeights(model)
        stepper = PushedGradients(model, weights, clock)
        cluster = SimulatedCluster(weights, server, outgoing=stepper.vector, **common)
    return train(cluster, stepper, sizes, samples, weighted, micro, begin)


def example_loss(model):
    return model(torch.zeros(2, 3, 8, 8).to(next(model.parameters()))).sum()


def one_rank(
    rank,
    model,
    how,
    sizes,
    samples,
    weighted=True,
    wire=None,
    clip=CLIPS[0],
    micro=None,
    begin=None,
):
    planner, plan = make_planner(sizes, samples)
    clock = ComputeClock(CPU)
    common = {"planner": planner, "epochs": EPOCHS}
    if how == "step":
        weights = FlatWeights(model)
        stepper = DistributedSteps(model, weights, clock, build, rank, example_loss, wire=wire)
        stepper.clip = make_clip(model, *clip)
        cluster = JointCluster(
            weights,
            workers=[rank],
            rounds_per_epoch=1,
            duration=None,
            finish_round=stepper.average_buffers,
            control=ControlGroup(20.0),
            **common,
        )
    else:
        server, rounds = None, plan.workers[0].steps
        common |= {"rounds_per_epoch": rounds, "workers": (rank,)}
        if rank == 0:
            owner = ServerOptimizer(model, CPU, build, clip=clip[0], clip_mode=clip[1])
            server = GradientServer(
                owner,
                len(sizes),
                staleness=0,
                rounds_per_epoch=rounds,
            )
        weights = FlatWeights(model)
        stepper = PushedGradients(model, weights, clock)
        cluster = BarrierCluster(
            weights,
            server,
            outgoing=stepper.vector,
            control=ControlGroup(20.0),
            wire=wire,
            **common,
        )
    return train(cluster, stepper, sizes, samples, weighted, micro, begin).tolist()


@pytest.mark.parametrize("how", ["step", "gradients"])
def test_gradients_on_a_narrow_wire_differ_by_their_rounding_alone(run_ranks, tiny_model, how):
    sizes, samples = (6, 2), 43  # with a last global batch of another size
    before = torch.cat([p.detach().flatten() for p in tiny_model.parameters()])
    wide, narrow = (
        torch.tensor(
            run_ranks(one_rank, tiny_model, how, sizes, samples, True, wire)[0],
            dtype=torch.float64,
        )
        for wire in (None, torch.bfloat16)
    )
    change = (wide - before[: len(wide)]).norm()
    assert 0 < (wide - narrow).norm() < 0.02 * change


@pytest.mark.parametrize("how", ["step", "gradients"])
@pytest.mark.parametrize(("sizes", "samples"), SPLITS)
def test_uneven_workers_in_one_process_equal_the_joined_batch(tiny_model, how, sizes, samples):
    expected = joined_weights(tiny_model, sizes, samples)
    found = one_process(tiny_model, how, sizes, samples)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("how", ["step", "gradients"])
@pytest.mark.parametrize("clip", CLIPS[1:])
def test_clipped_steps_of_uneven_workers_are_those_of_the_joined_batch(tiny_model, how, clip):
    sizes, samples = (5, 2, 1), 43  # with a shorter last global batch
    expected = joined_weights(tiny_model, sizes, samples, clip)
    found = one_process(tiny_model, how, sizes, samples, clip=clip)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    unclipped = joined_weights(tiny_model, sizes, samples)
    assert (found - unclipped).norm() > 0.1 * unclipped.norm()


@pytest.mark.parametrize("how", ["step", "gradients"])
def test_clipped_steps_of_uneven_processes_are_those_of_the_joined_batch(
    run_ranks, tiny_model, how
):
    sizes, samples, clip = (6, 2), 43, CLIPS[1]
    expected = joined_weights(tiny_model, sizes, samples, clip)
    for found in run_ranks(one_rank, tiny_model, how, sizes, samples, True, None, clip):
        found = torch.tensor(found, dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("how", ["step", "gradients"])
@pytest.mark.parametrize(("sizes", "samples"), SPLITS)
def test_micro_batches_of_uneven_workers_equal_the_joined_batch(tiny_model, how, sizes, samples):
    micro = [3, 2, 4, 1][: len(sizes)]  # some do not divide a batch, some are larger than it
    expected = joined_weights(tiny_model, sizes, samples, CLIPS[1])
    found = one_process(tiny_model, how, sizes, samples, clip=CLIPS[1], micro=micro)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("how", ["step", "gradients"])
@pytest.mark.parametrize("micro", [[3, 2], [None, 1], [2, 100]])
def test_processes_that_differ_in_their_micro_batches_equal_the_joined_batch(
    run_ranks, tiny_model, how, micro
):
    sizes, samples = (6, 2), 43  # with a last global batch of another size
    expected = joined_weights(tiny_model, sizes, samples)
    arguments = (tiny_model, how, sizes, samples, True, None, CLIPS[0], micro)
    for found in run_ranks(one_rank, *arguments):
        found = torch.tensor(found, dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("how", ["step", "gradients"])
def test_layers_frozen_for_some_epochs_move_as_on_the_joined_batch(run_ranks, tiny_model, how):
    """A decayed or moved frozen weight, or gradients that ranks do not share, would show."""
    sizes, samples = (6, 2), 43
    expected = joined_weights(tiny_model, sizes, samples, begin=freeze)
    moving = joined_weights(tiny_model, sizes, samples)
    assert (expected - moving).norm() > 1e-3 * moving.norm()
    found = one_process(tiny_model, how, sizes, samples, begin=freeze)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    arguments = (tiny_model, how, sizes, samples, True, None, CLIPS[0], None, freeze)
    for found in run_ranks(one_rank, *arguments):
        found = torch.tensor(found, dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_parts_of_steps_leave_frozen_parameters_where_they_are():
    model = nn.Linear(3, 2)
    for kind, options in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {})):
        owner = ServerOptimizer(
            model, CPU, lambda m, k=kind, o=options: k(m.parameters(), lr=LR, **o)
        )
        before = owner.vector.clone()
        model.bias.requires_grad_(False)
        for _ in range(2):
            owner.apply(torch.ones_like(owner.vector), LR, 0.5)
        moved = owner.vector != before
        assert moved[:6].all()
        assert not moved[64:].any()
        model.bias.requires_grad_(True)
        owner.apply(torch.ones_like(owner.vector), LR, 0.5)
        assert (owner.vector != before)[64:66].all()


class Normed(nn.Module):
    """Its loss does not depend on its batch norm, whose statistics are those of the images."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm2d(3), nn.Linear(3 * 64, 3)

    def forward(self, images):
        self.norm(images)
        return self.head(images.flatten(1))


def statistics_after_a_step(stepper_of, micro):
    """Return the gradient and the running mean after one step of 7 samples."""
    torch.manual_seed(0)
    images, labels = make_data(7)
    model = Normed().double()
    weights = FlatWeights(model)
    stepper = stepper_of(model, weights)
    step = Step((Part(0, np.arange(7), 1.0),), 0.0)
    stepper.begin(Turn((0,), 0, 0))
    for part in micro_parts(step.parts[0], micro):
        with stepper.part(step, part) as weight:
            loss = F.cross_entropy(model(images[part.indices]), labels[part.indices])
            (loss * weight).backward()
    stepper.step(step, 0.0)
    return model.norm.running_mean.clone(), model.norm.running_var.clone(), stepper


STEPPERS = {
    "own": lambda m, w: OwnSteps(m, ComputeClock(CPU), build, [0], w.buffers),
    "joint": lambda m, w: JointSteps(m, w, ComputeClock(CPU), build, [0]),
    "pushed": lambda m, w: PushedGradients(m, w, ComputeClock(CPU)),
}


@pytest.mark.parametrize("kind", STEPPERS)
def test_micro_batches_move_running_statistics_once_a_step(kind):
    mean, variance, stepper = statistics_after_a_step(STEPPERS[kind], None)
    of_micro, other_variance, other = statistics_after_a_step(STEPPERS[kind], 3)
    torch.testing.assert_close(of_micro, mean)
    assert not torch.allclose(other_variance, variance)  # each normalises by its own
    torch.testing.assert_close(other_variance, variance, rtol=0.1, atol=0)
    if kind == "pushed":
        torch.testing.assert_close(other.vector[-128:-64], stepper.vector[-128:-64])
        assert other.vector[-128:-125].abs().min() > 0  # the change of the running mean


def test_a_worker_of_its_own_clips_before_it_steps_and_tells_the_norm_before(tiny_model):
    images, labels = make_data(6)
    part = Part(0, np.arange(6), 1.0)
    plain = copy.deepcopy(tiny_model)
    stepper = OwnSteps(tiny_model, ComputeClock(CPU), build, [0])
    stepper.clip = make_clip(tiny_model, 0.01, "norm")
    told = []
    stepper.on_gradients = lambda weight: told.append(norm_of(tiny_model).item())
    for model in (tiny_model, plain):
        F.cross_entropy(model(images), labels).backward()
    before = norm_of(plain).item()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    optimizer = build(plain)
    optimizer.step()
    stepper.step(Step((part,), 0.0), LR)
    assert told == [before]
    assert before > 0.02
    for ours, theirs in zip(tiny_model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_in_fp16_bounds_the_unscaled_gradients(accelerator, fused):
    weight = nn.Parameter(torch.zeros(4))
    model = nn.ParameterList([weight])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    raw = torch.optim.SGD([weight], lr=1.0, fused=fused)
    optimizer = AcceleratedOptimizer(raw, scaler=scaler)
    scaler.scale((weight * torch.tensor([3.0, 4.0, 0.0, 0.0])).sum()).backward()
    make_clip(model, 0.5, "norm")(optimizer)
    take_step(optimizer, 1.0)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.3, -0.4, 0.0, 0.0]))


@pytest.mark.parametrize("mode", ["norm", "value", "agc"])
def test_what_has_no_gradient_is_left_alone_by_clipping(mode):
    used, unused = model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    used(torch.full((1, 2), 9.0)).sum().backward()
    make_clip(model, 0.01, mode)(build(model))
    assert unused.weight.grad is None
    assert used.weight.grad.norm() < 1.0


def norm_of(model):
    return torch.stack([p.grad.norm() for p in model.parameters()]).norm()


def test_gradients_of_joint_steps_are_summed_in_one_place(tiny_model):
    """A CUDA graph's next call overwrites what its last one returned."""
    places = []

    def note(model, _):
        places.append([parameter.grad.data_ptr() for parameter in model.parameters()])

    tiny_model.register_forward_pre_hook(note)
    one_process(tiny_model, "step", (6, 2), 16)
    assert len(places) == 2 * 2 * EPOCHS
    assert all(place == places[0] for place in places)


@pytest.mark.parametrize("how", ["step", "gradients"])
@pytest.mark.parametrize(("sizes", "samples"), SPLITS)
def test_uneven_processes_equal_the_joined_batch(run_ranks, tiny_model, how, sizes, samples):
    expected = joined_weights(tiny_model, sizes, samples)
    results = run_ranks(one_rank, tiny_model, how, sizes, samples, world_size=len(sizes))
    for found in results:
        found = torch.tensor(found, dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


def alone_in_a_group(rank, model):
    return one_process(model, "step", (8, 2), 40).tolist()


def test_one_process_that_a_launcher_started_takes_the_steps_of_all_workers(run_ranks, tiny_model):
    (found,) = run_ranks(alone_in_a_group, tiny_model, world_size=1)
    assert found == one_process(tiny_model, "step", (8, 2), 40).tolist()


@pytest.mark.parametrize("how", ["step", "gradients"])
def test_without_the_weights_uneven_processes_are_wrong(run_ranks, tiny_model, how):
    expected = joined_weights(tiny_model, (8, 2), 40)
    found = run_ranks(one_rank, tiny_model, how, (8, 2), 40, False)[0]
    difference = (torch.tensor(found, dtype=torch.float64) - expected).norm() / expected.norm()
    assert difference > 1e-3


class NormNet(nn.Module):
    """Batch norm before a linear layer: its statistics are easily known."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3, momentum=0.3)
        self.head = nn.Linear(3 * 64, 3)

    def forward(self, images):
        return self.head(self.norm(images).flatten(1))


def expected_statistics(sizes, samples):
    """Running mean and variance from weighted statistics of the parts, by hand."""
    images, _ = make_data(samples)
    sampler = StepSampler(samples, sum(sizes), seed=1)
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for epoch in range(EPOCHS):
        for number in range(sampler.steps_per_epoch):
            step = [p for p in sampler.step(epoch, number, sizes).parts if len(p.indices)]
            batches = [images[torch.from_numpy(p.indices)] for p in step]
            means = [p.weight * x.mean((0, 2, 3)) for p, x in zip(step, batches, strict=True)]
            vars_ = [p.weight * x.var((0, 2, 3)) for p, x in zip(step, batches, strict=True)]
            mean, var = 0.7 * mean + 0.3 * sum(means), 0.7 * var + 0.3 * sum(vars_)
    return torch.cat([mean, var])


@pytest.mark.parametrize("how", ["step", "gradients"])
@pytest.mark.parametrize(("sizes", "samples"), [((8, 2), 43), ((2, 7, 1), 41)])
def test_running_statistics_are_weighted_as_the_parts(run_ranks, how, sizes, samples):
    torch.manual_seed(0)
    model = NormNet().double()
    expected = expected_statistics(sizes, samples)
    found = one_process(model, how, sizes, samples)
    torch.testing.assert_close(found[-6:], expected, rtol=1e-9, atol=1e-12)
    for rank in run_ranks(one_rank, model, how, sizes, samples, world_size=len(sizes)):
        rank = torch.tensor(rank, dtype=torch.float64)
        torch.testing.assert_close(rank[-6:], expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(rank, found, rtol=1e-9, atol=1e-12)


def server_rank(rank, model, sync):
    """Gradients without a barrier: every push is a step of its own."""
    sizes, samples = (6, 2), 40
    planner, plan = make_planner(sizes, samples)
    rounds = plan.workers[0].steps
    server = None
    if rank == 0:
        owner = ServerOptimizer(model, CPU, build)
        server = GradientServer(
            owner,
            2,
            staleness=1 if sync == "ssp" else None,
            rounds_per_epoch=rounds,
        )
    weights = FlatWeights(model)
    stepper = PushedGradients(model, weights, ComputeClock(CPU))
    cluster = through_server(
        weights,
        server,
        planner=planner,
        workers=(rank,),
        epochs=EPOCHS,
        rounds_per_epoch=rounds,
        timeout_s=20.0,
        outgoing=stepper.vector,
    )
    train(cluster, stepper, sizes, samples)
    if server is None:
        return None
    weights.load(server.snapshot())
    return server.version, tight(weights).tolist()


@pytest.mark.parametrize("sync", ["asp", "ssp"])
def test_pushed_gradients_without_a_barrier_are_a_step_each(run_ranks, tiny_model, sync):
    version, weights = run_ranks(server_rank, tiny_model, sync)[0]
    assert version == 2 * EPOCHS * 5  # two workers, five steps an epoch
    before = torch.cat([p.detach().flatten() for p in tiny_model.parameters()])
    assert (torch.tensor(weights, dtype=torch.float64) - before).norm() > 0.01


def test_a_stale_push_is_its_part_of_a_step():
    steps = []

    class Owner:
        vector = torch.zeros(2)

        def apply(self, gradients, learning_rate, part):
            steps.append((gradients.tolist(), learning_rate, part))

    server = GradientServer(Owner(), 2, rounds_per_epoch=9, staleness=None)
    server.pull(0), server.pull(1)
    for worker in (0, 1):
        report = RoundReport(worker, 0, 0, 8, 4, 4, 1, 0.1, 0.5, 0.5, learning_rate=0.3)
        done = server.push(torch.full((2,), 4.0), report)
    assert done.staleness == 1
    assert steps == [([4.0, 4.0], 0.3, 0.5)] * 2


OPTIMIZERS = {
    "plain": partial(torch.optim.SGD, lr=LR, weight_decay=0.05),
    "momentum": partial(torch.optim.SGD, lr=LR, momentum=0.9, weight_decay=0.05),
    "nesterov": partial(torch.optim.SGD, lr=LR, momentum=0.9, weight_decay=0.05, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=LR, weight_decay=0.05),
    "adamw": partial(torch.optim.AdamW, lr=LR, weight_decay=0.05, fused=True),
}
PARTS = (0.1, 0.2, 0.3, 0.4)


def pushed(kind, steps, sync, decay=None, gradient=lambda step: 0.0):
    """Return one weight after steps of four workers' pushes, each with its part of the gradient."""
    weight = torch.nn.ParameterList([torch.ones((), dtype=torch.float64)])
    options = {} if decay is None else {"weight_decay": decay}
    owner = ServerOptimizer(weight, CPU, lambda m: OPTIMIZERS[kind](m.parameters(), **options))
    server = GradientServer(
        owner, 4, staleness={"bsp": 0, "asp": None}[sync], rounds_per_epoch=steps
    )
    for step in range(steps):
        for worker, part in enumerate(PARTS):
            report = RoundReport(worker, 0, step, 8, 1, 1, 1, 0.1, 0.5, part, learning_rate=LR)
            server.push(torch.full_like(owner.vector, part * gradient(step)), report)
    return server.snapshot()[0].item()


@pytest.mark.parametrize("kind", ["plain", "momentum", "nesterov", "adamw"])
def test_weights_decay_without_a_barrier_as_with_one(kind):
    decay = 0.005 if kind in ("momentum", "nesterov") else 0.05  # momentum moves ten times as far
    barrier, free = (pushed(kind, 100, sync, decay) for sync in ("bsp", "asp"))
    assert 0.5 < barrier < 0.7
    assert free == pytest.approx(barrier, rel=0.01)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_pushes_of_all_workers_are_one_step_of_their_joined_batch(kind):
    def gradient(step):
        return 1.0 if step < 5 else -0.7  # and momentum from before works on

    barrier, free = (pushed(kind, 12, sync, 0.0, gradient) for sync in ("bsp", "asp"))
    exact = not kind.startswith("adam")  # whose second moment is in the denominator of each part
    assert abs(barrier - 1) > 0.005
    assert free == pytest.approx(barrier, abs=1e-12 if exact else 0.05)


def decayed(rank, sync, sizes=(1, 3), rounds=60):
    """Return the weights' norm after pushes of zeros, in one process or over real ones."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    planner, _ = make_planner(sizes, sum(sizes) * rounds)
    owner = ServerOptimizer(model, CPU, partial(build, weight_decay=0.005))
    server = GradientServer(
        owner, 2, staleness=0 if sync == "bsp" else None, rounds_per_epoch=rounds
    )
    weights, pushed = FlatWeights(model), torch.zeros_like(owner.vector)
    common = {"planner": planner, "epochs": 1, "outgoing": pushed}
    if rank is None:
        durations = (1.0, 1.3)
        cluster = SimulatedCluster(weights, server, duration=lambda w, *_: durations[w], **common)
    else:
        common |= {"workers": (rank,), "rounds_per_epoch": rounds, "timeout_s": 20.0}
        cluster = through_server(weights, None if rank else server, **common)
    for turn in cluster.turns():
        if not isinstance(turn, EpochEnd):
            cluster.segment(turn)
            cluster.pull(turn)
            (w,) = turn.workers
            part = sizes[w] / sum(sizes)
            report = RoundReport(w, 0, turn.round, 8, 1, 1, 1, 0.1, 0.5, part, learning_rate=LR)
            cluster.push([report])
    cluster.close()
    return server.snapshot().norm().item()


def test_weights_decay_alike_in_every_cluster(run_ranks):
    barrier, simulated = decayed(None, "bsp"), decayed(None, "asp")
    real = run_ranks(decayed, "asp")[0]
    assert [simulated, real] == pytest.approx([barrier] * 2, rel=0.02)


def barrier_of_gradients(workers):
    """Return a server with a barrier, and the steps that it takes: gradients and learning rate."""
    steps = []

    class Owner:
        vector = torch.zeros(1)

        def apply(self, gradients, learning_rate, part):
            steps.append((gradients.tolist(), learning_rate))

    return GradientServer(Owner(), workers, staleness=0, rounds_per_epoch=9), steps


def report_of(worker, round_=0, refused=False):
    counts = (8, 4, 4, 1, 0.1, 0.5, 0.5)
    return RoundReport(worker, 0, round_, *counts, learning_rate=0.3, refused=refused)


def test_no_step_is_taken_where_all_gradients_of_a_barrier_are_refused():
    server, steps = barrier_of_gradients(2)
    for worker in (0, 1):
        server.push(torch.full((1,), float("nan")), report_of(worker, refused=True))
    assert (steps, server.clocks, server.version) == ([], [1, 1], 0)
    for worker in (0, 1):
        server.push(torch.ones(1), report_of(worker, 1, refused=worker == 0))
    assert steps == [([1.0], 0.3)]


@pytest.mark.parametrize("lost", [1, 2])
def test_a_barrier_of_gradients_goes_on_without_a_lost_worker(lost):
    server, steps = barrier_of_gradients(3)
    for worker in (0, 1):
        server.push(torch.ones(1), report_of(worker))
    server.drop(lost)  # it has pushed already, or all others wait for it
    if lost == 1:
        server.push(torch.ones(1), report_of(2))
    assert steps == [([3.0 if lost == 1 else 2.0], 0.3)]
    for worker in sorted({0, 1, 2} - {lost}):
        server.push(torch.ones(1), report_of(worker, 1))
    assert steps[1:] == [([2.0], 0.3)]


def test_a_segment_says_where_a_plan_begins():
    planner, plan = make_planner((3, 5), 40)
    assert planner.at(7) == Segment(plan, 0, 0)
