"""Uneven workers equal one process on the joined batch, in one process and over real ones."""

import copy
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from dbsl.cluster.alive import ControlGroup
from dbsl.cluster.meeting import BarrierCluster, JointCluster, SimulatedCluster
from dbsl.cluster.server import GradientServer
from dbsl.cluster.serving import through_server
from dbsl.cluster.steps import (
    ComputeTimer,
    DistributedSteps,
    JointSteps,
    PushedGradients,
    Stepper,
    begin_thawed,
    take_step,
)
from dbsl.cluster.weights import FlatWeights
from dbsl.config.settings import parse_wire
from dbsl.optimizer import make_clip
from dbsl.plan.follow import Planner
from dbsl.plan.members import Members
from dbsl.plan.sampler import StepSampler, micro_parts
from dbsl.plan.solve import plan_steps
from dbsl.plan.types import EpochEnd, RoundReport, TimeModel

CPU = torch.device("cpu")
LR, EPOCHS = 0.1, 5
CLIP = 0.02


def freeze(model, epoch):
    """Freeze the first layer in epochs 1 and 2, and thaw it then."""
    for parameter in list(model.parameters())[:2]:
        parameter.requires_grad_(epoch not in (1, 2))


@dataclass
class Case:
    how: str  # joint steps, or pushed gradients
    sizes: tuple[int, ...] = (6, 2)
    samples: int = 43  # with a last global batch of another size
    wire: str = "float32"
    clip: float | None = None
    micro: list | None = None  # the most samples at once, by worker
    begin: Callable = lambda model, epoch: None  # of an epoch
    staleness: int | None = 0
    change: Callable = lambda stepper: None
    first: Callable = lambda model: None  # of what a loop does in a step, before its passes
    last: Callable = lambda model: None  # and behind them


HOW = ["step", "gradients"]
# Whole global batches, a shorter last one, one of a single sample, and ones of which a small worker
# has nothing, the first among them.
SPLITS = [
    {"sizes": (8, 2), "samples": 40},
    {"sizes": (1, 15), "samples": 77},
    {"sizes": (5, 5, 5, 1), "samples": 71},
    {"sizes": (8, 2), "samples": 41},
    {"sizes": (2, 7, 1)},
    {"sizes": (1, 1), "samples": 21},
]


def make_data(samples):
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(samples, 3, 8, 8, dtype=torch.float64, generator=generator)
    return images, torch.randint(0, 3, (samples,), generator=generator)


def build(model, weight_decay=1e-3):
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=weight_decay)


def vector_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def joined_weights(model, case):
    """One process, the joined batches, plain PyTorch and its clipping."""
    model = copy.deepcopy(model)
    images, labels = make_data(case.samples)
    optimizer, sampler = build(model), StepSampler(case.samples, sum(case.sizes), seed=1)
    assert EPOCHS * sampler.steps_per_epoch >= 20  # the fewest that the promise is about
    for epoch in range(EPOCHS):
        case.begin(model, epoch)
        for number in range(sampler.steps_per_epoch):
            parts = sampler.step(epoch, number, case.sizes).parts
            batch = torch.cat([torch.from_numpy(part.indices) for part in parts])
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            if case.clip:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
    return vector_of(model)


def parts_of(step, case):
    """Return the micro-batches of a step."""
    sizes = case.micro or [None] * len(case.sizes)
    return [m for p in step.parts if len(p.indices) for m in micro_parts(p, sizes[p.worker])]


def take(stepper, step, case):
    """Take an optimizer step as train.py does."""
    stepper.complete(step)
    with stepper.stepping(step):
        if stepper.optimizers:
            optimizer = stepper.optimizers[step.parts[0].worker]
            make_clip(stepper.model, case.clip)(optimizer)
            take_step(optimizer, LR)
            optimizer.zero_grad()


def train(cluster, stepper, case):
    """The loop of train.py, bare."""
    images, labels = make_data(case.samples)
    sampler = StepSampler(case.samples, sum(case.sizes), seed=1)
    for turn in cluster.turns():
        if isinstance(turn, EpochEnd):
            cluster.load(turn)
            continue
        case.begin(stepper.model, turn.epoch)
        cluster.plan(turn)
        cluster.pull(turn)
        stepper.begin(turn)
        pushing = isinstance(stepper, PushedGradients)
        rounds = (turn.round, turn.round + 1) if pushing else (0, sampler.steps_per_epoch)
        for number in range(*rounds):
            step = sampler.step(turn.epoch, number, case.sizes, turn.workers)
            case.first(stepper.model)
            for part in parts_of(step, case):
                with stepper.micro_batch(step, part) as weight:
                    batch = torch.from_numpy(part.indices)
                    loss = F.cross_entropy(stepper.model(images[batch]), labels[batch])
                    (loss * weight).backward()
            case.last(stepper.model)
            take(stepper, step, case)
        shares = {w: case.sizes[w] / sum(case.sizes) for w in turn.workers}
        cluster.push([report_of(w, turn.round, share, turn.epoch) for w, share in shares.items()])
    cluster.close()
    # Without the gaps between tensors.
    return torch.cat([tensor.flatten() for tensor in cluster.weights.tensors])


def report_of(worker, round_=0, share=0.5, epoch=0, refused=False):
    counts = (8, 1, 1, 1, 0.1, 0.5, share)
    return RoundReport(worker, epoch, round_, *counts, learning_rate=LR, refused=refused)


def make_planner(case):
    """Return the planner of a case, whose rounds are its pushes where gradients are pushed."""
    models = [TimeModel(0.001, 0.01)] * len(case.sizes)
    plan = plan_steps(case.samples, case.sizes, models)
    members = Members(len(models), 1 if case.how == "step" else plan.workers[0].steps)
    return Planner({8: plan}, lambda epoch: 8, {8: models}, members=members)


def example_loss(model):
    return model(torch.zeros(2, 3, 8, 8).to(next(model.parameters()))).sum()


def trained(model, case, rank=None):
    """Return the weights after training as one process of several, or as all workers in one."""
    model, alone = copy.deepcopy(model), rank is None
    planner, workers = make_planner(case), range(len(case.sizes)) if alone else (rank,)
    common = {"planner": planner, "epochs": EPOCHS, "workers": workers}
    if alone:
        common["times"] = lambda worker, epoch, round_: (1.0, 0.0)
    elif case.staleness == 0:
        common["control"] = ControlGroup(20.0)
    weights, timer = FlatWeights(model), ComputeTimer(CPU)
    if case.how == "gradients":
        stepper, server = PushedGradients(model, weights, timer, {}), None
        common["outgoing"] = stepper.vector
        if not rank:
            build_clip = partial(make_clip, bound=case.clip)
            how = {"staleness": case.staleness, "build_clip": build_clip}
            server = GradientServer(model, CPU, build, planner.members, **how)
        if alone:
            cluster = SimulatedCluster(weights, server, **common)
        elif case.staleness == 0:
            cluster = BarrierCluster(weights, server, wire=case.wire, **common)
        else:
            cluster = through_server(weights, server, timeout_s=20.0, **common)
        return train(cluster, stepper, case)
    common_of = (model, weights, timer, {workers[0]: build(model)})
    if alone:
        stepper = JointSteps(*common_of, wire=parse_wire(case.wire))
    else:
        wire = parse_wire(case.wire)
        stepper = DistributedSteps(*common_of, example_loss=example_loss, wire=wire)
    case.change(stepper)
    cluster = JointCluster(weights, finish_round=stepper.finish_round, **common)
    return train(cluster, stepper, case)


def one_rank(rank, model, case):
    return trained(model, case, rank).tolist()


def of_all(rank, model, cases):
    return [one_rank(rank, model, case) for case in cases]


@pytest.fixture
def train_ranks(run_ranks):
    """Return ``train(model, cases)``: of each case the weights of each process after training.

    Processes are started once for all cases of as many.
    """

    def train(model, cases):
        found = [[] for _ in cases]
        for size in {len(case.sizes) for case in cases}:
            own = [number for number, case in enumerate(cases) if len(case.sizes) == size]
            ranks = run_ranks(of_all, model, [cases[number] for number in own], world_size=size)
            for number, *weights in zip(own, *ranks, strict=True):
                found[number] = [torch.tensor(each, dtype=torch.float64) for each in weights]
        return found

    return train


def check_equal(found, expected, case, rtol=1e-6, atol=1e-9):
    """Check the weights of each process."""
    for weights in found:
        torch.testing.assert_close(
            weights, expected, rtol=rtol, atol=atol, msg=lambda text: f"{case}: {text}"
        )


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "settings",
    [
        *SPLITS,
        # Some micro-batches do not divide a batch, some are larger than it.
        *(split | {"micro": [3, 2, 4, 1], "clip": CLIP} for split in SPLITS),
        {"sizes": (5, 2, 1), "clip": CLIP},
        {"begin": freeze},
    ],
)
def test_uneven_workers_in_one_process_equal_the_joined_batch(tiny_model, how, settings):
    expected = joined_weights(tiny_model, Case(how, **settings))
    found = trained(tiny_model, Case(how, **settings))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_uneven_processes_equal_the_joined_batch(train_ranks, tiny_model):
    settings = [
        *SPLITS,
        {"clip": CLIP},
        *({"micro": micro} for micro in ([3, 2], [None, 1], [2, 100])),
        {"begin": freeze},  # gradients that ranks do not share would show
    ]
    cases = [Case(how, **own) for how in HOW for own in settings]
    for case, found in zip(cases, train_ranks(tiny_model, cases), strict=True):
        check_equal(found, joined_weights(tiny_model, case), case)


def replaced(model, *_):
    """Replace what earlier parts of the step have added up; also as a hook."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("micro", [None, [2, 1]])
@pytest.mark.parametrize("does", [{"first": nn.Module.zero_grad}, {"last": replaced}, {}])
def test_a_loop_may_clear_gradients_or_put_others_in_their_place(tiny_model, how, micro, does):
    usual = Case(how, micro=micro)
    expected = trained(tiny_model, usual)
    if not does:
        tiny_model.register_forward_pre_hook(replaced)
    assert torch.equal(trained(tiny_model, replace(usual, **does)), expected)


def test_layers_that_are_thawed_inside_a_round_forget_their_gradients(tiny_model):
    def thaw(model):
        model.requires_grad_(True)

    def frozen(model, epoch):
        next(model.parameters()).requires_grad_(False)

    case = Case("step", begin=frozen, first=thaw)
    expected = trained(tiny_model, Case("step"))
    torch.testing.assert_close(trained(tiny_model, case), expected)


def wrapped(rank, model):
    """Return weights of a process's own before and after DDP is around the model."""
    weights = FlatWeights(model)
    weights.vector.fill_(1.0 + rank)
    DistributedSteps(model, weights, ComputeTimer(CPU), {}, example_loss=example_loss)
    return weights.vector.unique().tolist()


def test_ddp_leaves_each_processes_weights_and_statistics_as_they_are(run_ranks, tiny_model):
    assert run_ranks(wrapped, tiny_model) == [[1.0], [2.0]]


def one_noisy_rank(rank, model):
    def noise(model):
        for parameter in model.parameters():
            parameter.grad.add_(rank * 0.1)

    return one_rank(rank, model, Case("step", sizes=(2, 2), samples=16, last=noise))


def test_processes_whose_weights_part_are_stopped(run_ranks, tiny_model):
    for error in run_ranks(one_noisy_rank, tiny_model, expect_errors=True):
        assert "weights must stay the same in all processes that step together" in error


def test_an_optimizer_that_has_its_state_from_the_start_begins_with_it_again(tiny_model):
    optimizer = build(tiny_model)
    for parameter in tiny_model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    stepper = Stepper(tiny_model, FlatWeights(tiny_model), ComputeTimer(CPU), {0: optimizer})
    for state in optimizer.state.values():
        state["momentum_buffer"].fill_(math.nan)
    for _ in range(2):
        stepper.forget(0)
        for parameter in tiny_model.parameters():
            assert optimizer.state[parameter]["momentum_buffer"].eq(1).all()
            optimizer.state[parameter]["momentum_buffer"].fill_(2)


@pytest.mark.parametrize(("wire", "processes"), [("bf16", 2), ("bf16", 1), ("fp16", 1)])
def test_joint_gradients_on_a_narrow_wire_differ_by_their_rounding_alone(
    train_ranks, tiny_model, wire, processes
):
    def train(wire):
        case = Case("step", wire=wire)
        several = processes > 1
        return train_ranks(tiny_model, [case])[0][0] if several else trained(tiny_model, case)

    wide = train("float32")
    change = (wide - vector_of(tiny_model)).norm()
    assert 0 < (wide - train(wire)).norm() < 0.02 * change


# --- gradients of a low rank

RANKED = [{"sizes": (3, 5)}, {"sizes": (1, 7)}, {"sizes": (2, 7, 1)}]


def joined(case):
    """Return the case of one process on the joined batches."""
    return replace(case, sizes=(sum(case.sizes),), micro=None)


def test_a_rank_that_is_high_enough_is_exact(train_ranks, tiny_model, monkeypatch):
    monkeypatch.setattr("dbsl.cluster.formats._LEAST_SAVING", 1e-9)
    settings = [
        *RANKED,
        {"sizes": (1, 1), "samples": 21},
        {"sizes": (3, 5), "micro": [2, 3], "clip": CLIP},
        {"sizes": (3, 5), "begin": freeze},
    ]
    cases = [Case("step", wire="powersgd:8", **own) for own in settings]
    for case, found in zip(cases, train_ranks(tiny_model, cases), strict=True):
        check_equal(found, joined_weights(tiny_model, case), case)


def test_uneven_processes_send_the_joint_batchs_gradient_in_a_low_rank(train_ranks, tiny_model):
    settings = [
        *RANKED,
        {"sizes": (5, 2, 1), "micro": [3, 2, 1], "clip": CLIP},
        {"sizes": (3, 5), "begin": freeze},
    ]
    wires = ("powersgd:1", "powersgd:3:4")
    # Of 40 samples no step is without a worker: it would be float32.
    cases = [Case("step", wire=wire, samples=40, **own) for wire in wires for own in settings]
    together = train_ranks(tiny_model, [joined(case) for case in cases])
    pairs = zip(together, train_ranks(tiny_model, cases), strict=True)
    for case, ((expected,), ranks) in zip(cases, pairs, strict=True):
        assert all(torch.equal(ranks[0], other) for other in ranks[1:])
        check_equal(ranks[:1], expected, case)
        whole = joined_weights(tiny_model, case)
        assert (expected - whole).norm() > 1e-2 * (whole - vector_of(tiny_model)).norm()


def convolutions(memory_format):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 12, 3), nn.GroupNorm(3, 12), nn.Tanh(), nn.Conv2d(12, 12, 3)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * 16, 3)).double()
    return model.to(memory_format=memory_format)


def test_convolutions_in_either_memory_order_are_compressed_alike(train_ranks, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "EPOCHS", 2)  # later on rounding has grown
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model = convolutions(memory_format)
        case = Case("step", (3, 5), wire="powersgd:1:1", samples=40)
        (expected,), found = train_ranks(model, [joined(case), case])
        check_equal(found, expected, case)
        whole = trained(model, replace(case, wire="float32"))
        assert (expected - whole).norm() > 1e-3 * whole.norm()


def train_wide(rank):
    """Train more numbers than DDP has in a bucket, three ranks at once."""
    torch.manual_seed(0)
    layers = [nn.Linear(192, 700), *(nn.Linear(700, 700) for _ in range(3)), nn.Linear(700, 3)]
    model = nn.Sequential(nn.Flatten(), *layers).double()
    assert sum(p.nbytes for p in model.parameters()) > 10 * 2**20
    case = Case("step", (3, 2, 1), 60, wire="powersgd:2")
    return float(trained(model, case, rank).detach().norm())


def test_sums_of_several_buckets_do_not_meet(run_ranks, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "EPOCHS", 1)
    first, *others = run_ranks(train_wide, world_size=3)
    assert np.isfinite(first)
    assert others == [first] * 2


def alone_in_a_group(rank, model):
    return one_rank(None, model, Case("step"))


def test_one_process_that_a_launcher_started_takes_the_steps_of_all_workers(run_ranks, tiny_model):
    (found,) = run_ranks(alone_in_a_group, tiny_model, world_size=1)
    assert found == alone_in_a_group(None, tiny_model)


def test_gradients_of_joint_steps_are_summed_in_one_place(tiny_model):
    """A CUDA graph's next call overwrites what its last one returned."""
    places = []

    def note(model, _):
        places.append([parameter.grad.data_ptr() for parameter in model.parameters()])

    tiny_model.register_forward_pre_hook(note)
    trained(tiny_model, Case("step", samples=16))
    assert len(places) == 2 * 2 * EPOCHS
    assert all(place == places[0] for place in places)


class NormNet(nn.Module):
    """Batch norm before a linear layer: its statistics are easily known."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3, momentum=0.3)
        self.head = nn.Linear(3 * 64, 3)

    def forward(self, images):
        return self.head(self.norm(images).flatten(1))


def expected_statistics(case):
    """Running mean and variance from weighted statistics of all micro-batches, by hand."""
    images, _ = make_data(case.samples)
    sampler = StepSampler(case.samples, sum(case.sizes), seed=1)
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for epoch in range(EPOCHS):
        for number in range(sampler.steps_per_epoch):
            step = sampler.step(epoch, number, case.sizes)
            passes = [(p.weight, images[torch.from_numpy(p.indices)]) for p in parts_of(step, case)]
            means = [weight * x.mean((0, 2, 3)) for weight, x in passes]
            vars_ = [weight * x.var((0, 2, 3)) for weight, x in passes]
            mean, var = 0.7 * mean + 0.3 * sum(means), 0.7 * var + 0.3 * sum(vars_)
    return torch.cat([mean, var])


def test_running_statistics_move_once_a_step_and_are_weighted_as_the_losses(train_ranks):
    torch.manual_seed(0)
    model, exactly = NormNet().double(), {"rtol": 1e-9, "atol": 1e-12}
    given = [((8, 2), 43, None), ((2, 7, 1), 41, None), ((8, 2), 43, [3, 1]), ((7,), 21, [3])]
    cases = [Case(how, *own, micro=micro) for how in HOW for *own, micro in given]
    for case, ranks in zip(cases, train_ranks(model, cases), strict=True):
        found = trained(model, case)
        check_equal([found[-6:]], expected_statistics(case), case, **exactly)
        check_equal(ranks, found, case, **exactly)


# --- clipping


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_in_fp16_bounds_the_unscaled_gradients(accelerator, fused):
    weight = nn.Parameter(torch.zeros(4))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    raw = torch.optim.SGD([weight], lr=1.0, fused=fused)
    optimizer = AcceleratedOptimizer(raw, scaler=scaler)
    scaler.scale((weight * torch.tensor([3.0, 4.0, 0.0, 0.0])).sum()).backward()
    make_clip(nn.ParameterList([weight]), 0.5)(optimizer)
    take_step(optimizer, 1.0)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.3, -0.4, 0.0, 0.0]))


def test_a_first_step_that_overflows_leaves_no_momentum(accelerator, monkeypatch):
    weight = nn.Parameter(torch.zeros(4))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    raw = torch.optim.SGD([weight], 1.0, momentum=0.9, fused=True)
    optimizer = AcceleratedOptimizer(raw, scaler=scaler)
    # What torch takes for momentum before the first step.
    monkeypatch.setattr(torch, "empty_like", lambda like, **_: torch.full_like(like, 7.0))
    for factor in (torch.inf, 1.0):
        begin_thawed(optimizer)
        scaler.scale((weight * torch.tensor([factor, 1.0, 1.0, 1.0])).sum()).backward()
        take_step(optimizer, 1.0)
        optimizer.zero_grad()
    torch.testing.assert_close(weight.detach(), torch.full((4,), -1.0))


# --- the server's steps, with a barrier and without

OPTIMIZERS = {
    "plain": partial(torch.optim.SGD, lr=LR, weight_decay=0.05),
    "momentum": partial(torch.optim.SGD, lr=LR, momentum=0.9, weight_decay=0.05),
    "nesterov": partial(torch.optim.SGD, lr=LR, momentum=0.9, weight_decay=0.05, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=LR, weight_decay=0.05),
    "adamw": partial(torch.optim.AdamW, lr=LR, weight_decay=0.05, fused=True),
}
SHARES = (0.1, 0.2, 0.3, 0.4)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_push_without_a_barrier_is_a_step_with_its_part_of_the_rate(kind):
    weight, build = nn.Parameter(torch.ones((), dtype=torch.float64)), OPTIMIZERS[kind]
    optimizer, model = build([weight]), nn.ParameterList([weight.detach().clone()])
    how = {"build_optimizer": lambda own: build(own.parameters()), "staleness": None}
    server = GradientServer(model, CPU, members=Members(4, 12), **how)
    for step in range(12):
        for worker, share in enumerate(SHARES):
            gradient = 0.3 * step - 1
            weight.grad = torch.full_like(weight, gradient)
            take_step(optimizer, LR * share)
            pushed = torch.full_like(server.snapshot(), share * gradient)
            server.push(pushed, report_of(worker, step, share))
    assert abs(weight.item() - 1) > 0.005
    assert server.snapshot()[0].item() == pytest.approx(weight.item(), abs=1e-12)


@pytest.mark.parametrize("resumed", [False, True])
def test_pushes_of_a_bf16_model_are_summed_in_float32(resumed):
    weight = torch.nn.ParameterList([torch.zeros(64, dtype=torch.bfloat16)])

    def new():
        def build_sgd(own):
            return torch.optim.SGD(own.parameters(), lr=1.0)

        return GradientServer(weight, CPU, build_sgd, Members(8, 1), staleness=0)

    server, parts = new(), torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for worker, part in enumerate(parts):
        server.push(part, replace(report_of(worker), learning_rate=1.0))
        if resumed and worker == 5:
            state, server = server.state_dict(), new()
            server.load_state_dict(state)
    assert torch.equal(server.snapshot(), -parts.float().sum(0).bfloat16())


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_steps_of_pushes_leave_frozen_parameters_where_they_are(kind):
    model = nn.Linear(3, 2)

    def build_kind(own):
        return OPTIMIZERS[kind](own.parameters())

    server = GradientServer(model, CPU, build_kind, Members(1, 9), staleness=None)
    before = server.snapshot()
    model.bias.requires_grad_(False)
    for round_ in range(2):
        server.push(torch.ones_like(before), report_of(0, round_))
    moved = server.snapshot() != before
    assert moved[:6].all()
    assert not moved[64:].any()
    model.bias.requires_grad_(True)
    server.push(torch.ones_like(before), report_of(0, 2))
    assert (server.snapshot() != before)[64:66].all()


def noting_server(monkeypatch, workers, staleness):
    """Return a server of one weight, and the steps that it takes: gradient, rate, weight."""
    steps = []

    def note(self, gradients, *how):
        steps.append((gradients[0].item(), *how))

    monkeypatch.setattr(GradientServer, "_step", note)
    model = nn.ParameterList([torch.zeros(1)])
    return GradientServer(model, CPU, build, Members(workers, 9), staleness=staleness), steps


def test_no_step_is_taken_where_all_gradients_of_a_barrier_are_refused(monkeypatch):
    server, steps = noting_server(monkeypatch, 2, 0)
    for worker in (0, 1):
        server.push(torch.full((64,), float("nan")), report_of(worker, refused=True))
    assert (steps, server.clocks, server.version) == ([], [1, 1], 0)
    for worker in (0, 1):
        server.push(torch.ones(64), report_of(worker, 1, refused=worker == 0))
    assert steps == [(1.0, LR, 1.0)]


@pytest.mark.parametrize("lost", [1, 2])
def test_a_barrier_of_gradients_goes_on_without_a_lost_worker(monkeypatch, lost):
    server, steps = noting_server(monkeypatch, 3, 0)
    for worker in (0, 1):
        server.push(torch.ones(64), report_of(worker))
    server.drop(lost)  # it has pushed already, or all others wait for it
    if lost == 1:
        server.push(torch.ones(64), report_of(2))
    assert steps == [(3.0 if lost == 1 else 2.0, LR, 1.0)]
    for worker in sorted({0, 1, 2} - {lost}):
        server.push(torch.ones(64), report_of(worker, 1))
    assert steps[1:] == [(2.0, LR, 1.0)]


def test_gradients_without_a_barrier_are_pushed_and_stepped_on(train_ranks, tiny_model):
    cases = [Case("gradients", staleness=staleness) for staleness in (None, 1)]
    for found, _ in train_ranks(tiny_model, cases):
        assert 0.01 < (found - vector_of(tiny_model)).norm() < 10
