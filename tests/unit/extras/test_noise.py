import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dbsl.extras.noise
from dbsl.config.settings import RunConfig
from dbsl.extras.noise import NoiseAverage, NoiseProbe, advice_on, pairs_of, separate
from dbsl.plan.sampler import Part, Step
from dbsl.plan.solve import PlanRules, plan_dual_batch
from dbsl.plan.types import RoundReport, TimeModel, Turn
from experiments.benchmarks.operators import Operators
from tests.helpers import rows, run, short, slow, summary_of

REPORT = RoundReport(0, 0, 0, 8, 16, 64, 4, 1.0, 2.0, 1.0)
ENDLESS = 10**12  # training samples, of which every batch is a new draw


def test_squares_give_the_published_formulas_and_of_more_sizes_the_line_through_them():
    # By hand: |G|^2 = (32*3 - 8*9)/24 = 1, tr(Sigma) = (9 - 3)/(1/8 - 1/32) = 64.
    assert separate([(8, 9.0), (32, 3.0)], ENDLESS) == pytest.approx((1.0, 64.0))
    squares = [(8, 9.0), (16, 5.0), (32, 3.0), (64, 2.0)]
    assert separate(squares, ENDLESS) == pytest.approx((1.0, 64.0))
    # Of 64 samples the last batch is all: its gradient is G itself.
    assert separate(squares, 64) == pytest.approx((2.0, 64.0))


class Quadratic(nn.Module):
    """Loss 1/2 |w - x|^2 of a sample x: its gradient is w - x, and nothing else is random."""

    def __init__(self, size, distance):
        super().__init__()
        self.place = nn.Parameter(torch.full((size,), distance / math.sqrt(size)))

    def forward(self, samples):
        return self.place - samples


def quadratic_loss(model, samples, labels):
    return 0.5 * model(samples).square().sum(1).mean()


@pytest.mark.parametrize("kind", ["micro", "joined"])
def test_parameters_frozen_after_the_probe_was_made_are_left_out(kind):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    probe = make_probe(model, kind, workers=2)
    model[0].requires_grad_(False)
    images, labels = torch.randn(8, 3), torch.zeros(8)

    def loss_of(model, images, labels):
        return model(images).square().mean()

    loss_of(model, images, labels).backward()
    found = probed(probe, 8, (images, labels), loss_of)
    own = sum(p.grad.square().sum() for p in model[1].parameters())
    torch.testing.assert_close(found["gradient_square"], own)
    assert ("micro_square" in found) == (kind == "micro")


def make_probe(model, kind="micro", least=1, **changes):
    settings = {"every": 1, "workers": 1, "rounds": 1} | changes
    return NoiseProbe(kind, least=least, model=model, **settings)


def probed(probe, size, data=(None, ()), loss_of=None, *, worker=0, epoch=0, weight=1.0):
    """Return what a probe measures of the gradients of a worker's step, which is its last."""
    step = Step((Part(worker, np.arange(size), weight),), 0.0)
    return probe.measure(Turn((worker,), epoch, 0), step, False, *data, loss_of)


def measure(model, sizes, rng, probe, epoch=0, data=None):
    """Return the pairs of a round: of one worker's micro-batch, or of the workers together.

    Batches are new samples each, or `data` dealt out without replacement.
    """
    reports, count = [], ENDLESS if data is None else len(data)
    places = None if data is None else torch.randperm(count, generator=rng).split(sizes)
    for worker, size in enumerate(sizes):
        if data is None:
            samples = torch.randn(size, len(model.place), generator=rng, dtype=torch.float64) * 2.0
        else:
            samples = data[places[worker]]
        labels = torch.zeros(size, dtype=torch.int64)
        model.zero_grad()
        quadratic_loss(model, samples, labels).backward()
        given = {"worker": worker, "epoch": epoch}
        found = probed(probe, size, (samples, labels), quadratic_loss, **given)
        numbers = {name: float(value) for name, value in found.items() if name.endswith("square")}
        who = {"worker": worker, "local_batch_size": size}
        reports.append(replace(REPORT, **who, **(found | numbers)))
    return pairs_of(reports, count)


@pytest.mark.parametrize(
    ("kind", "sizes", "samples"),
    [
        ("micro", (64,), ENDLESS),
        ("joined", (8, 32, 32), ENDLESS),
        # Dealt out whole: with new draws for granted the noise scale would come out as 230.
        ("micro", (64,), 64),
        pytest.param("joined", (12, 12, 20, 20), 64, marks=slow),
    ],
)
def test_known_noise_scale_is_estimated_within_a_tenth(kind, sizes, samples):
    # Samples have variance 4 in each of 50 dimensions, the optimum is 2 away: 200 / 4 = 50.
    truth, data, rng = (4.0, 200.0), None, torch.Generator().manual_seed(2)
    model = Quadratic(50, 2.0).double()
    if samples < ENDLESS:
        data = torch.randn(samples, 50, generator=rng, dtype=torch.float64) * 2.0
        mean = model.place.detach() - data.mean(0)
        truth = float(mean.square().sum()), float(data.var(0).sum())
    probe = make_probe(model, kind, workers=len(sizes))
    pairs = [measure(model, sizes, rng, probe, epoch, data)[0] for epoch in range(500)]
    gradient_square, trace = np.mean(pairs, axis=0)
    assert (gradient_square, trace) == pytest.approx(truth, rel=0.1)
    assert trace / gradient_square == pytest.approx(truth[1] / truth[0], rel=0.1)


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=slow)])
def test_ranks_that_share_a_joint_gradient_give_an_interval_of_95_percent(ranks):
    # Each rank measures a part of its batch of 16 beside the gradient of all ranks together.
    rng, size, rounds, inside = np.random.default_rng(ranks), 30, 40, 0
    batch, micro = 16, 4
    for _ in range(200):
        shape = (rounds, ranks, size)
        parts = 1 / np.sqrt(size) + 2 * rng.normal(size=shape) / np.sqrt(micro)
        rests = 1 / np.sqrt(size) + 2 * rng.normal(size=shape) / np.sqrt(batch - micro)
        joined = (micro * parts + (batch - micro) * rests).mean(1) / batch
        average = NoiseAverage()
        own, shared = np.square(parts).sum(2), np.square(joined).sum(1)
        for round_ in range(rounds):
            measured = {"gradient_batch": ranks * batch, "gradient_square": shared[round_]}
            measured |= {"round": round_, "micro_batch": micro}
            reports = [
                replace(REPORT, worker=worker, micro_square=own[round_, worker], **measured)
                for worker in range(ranks)
            ]
            for pair in pairs_of(reports, ENDLESS):
                average.add(*pair)
        assert average.pairs == rounds
        scale = average.estimate()
        inside += scale.low <= 4 * size <= scale.high
    assert 0.91 <= inside / 200 <= 0.99


def test_a_round_that_is_left_in_the_middle_does_not_leak_into_the_next_one():
    model, rng = Quadratic(6, 2.0).double(), torch.Generator().manual_seed(0)
    whole = measure(model, (4, 8, 4), rng, make_probe(model, "joined", workers=3))
    probe = make_probe(model, "joined", workers=3)
    assert measure(model, (4, 8), rng.manual_seed(1), probe, epoch=0) != []
    assert measure(model, (4, 8, 4), rng.manual_seed(0), probe, epoch=1) == whole


def chosen(large, sync="bsp", processes=1, device="cpu", wire="float32"):
    """Return the probe of a run of four workers, one with small batches."""
    model = TimeModel(0.001, 0.01)
    plans = SimpleNamespace(
        first={8: plan_dual_batch(400, 4, 1, large, model, PlanRules(time_ratio=1.2))},
        known=SimpleNamespace(models={8: [model] * 4}),
        rounds=1,
        sampler=SimpleNamespace(least=1),
        config=RunConfig(sync=sync, wire=wire, workers=4),
    )
    accelerator = SimpleNamespace(num_processes=processes)
    model = nn.Linear(1, 1, device=device)
    workers = SimpleNamespace(plans=plans, raw_model=model, accelerator=accelerator)
    return dbsl.extras.noise.choose_probe(workers)


def test_gradients_are_joined_of_workers_at_the_same_weights_in_one_process():
    modes = {("bsp", 1): "joined", ("bsp", 4): "micro", ("asp", 1): "micro", ("step", 1): "micro"}
    assert {mode: chosen(32, *mode).kind for mode in modes} == modes
    assert chosen(32, "step", 2, wire="bf16").kind == "micro"
    assert chosen(32, "step", 2, wire="powersgd:4") is None  # they are smaller than they were


def launches_of_a_joined_round(layers):
    with FakeTensorMode():  # has CUDA tensors without a GPU
        model = nn.Sequential(*(nn.Conv2d(2, 2, 3, device="cuda") for _ in range(layers)))
        for parameter in model.parameters():
            order = torch.channels_last if parameter.dim() == 4 else torch.preserve_format
            parameter.grad = torch.empty_like(parameter, memory_format=order)
        probe = make_probe(model, "joined", workers=2)
        with Operators() as launches:
            for worker in (0, 1):
                found = probed(probe, 4, worker=worker)
    assert found["micro_square"].is_cuda
    del launches.computing["prim::device"]
    return launches.computing.total()


def test_joined_gradients_take_as_many_launches_whatever_the_parameters():
    assert launches_of_a_joined_round(layers=30) == launches_of_a_joined_round(layers=2) < 20


def test_joined_gradients_count_by_batch_over_weight():
    model, total = nn.Conv2d(3, 4, 3), 0
    probe = make_probe(model, "joined", workers=3)
    for worker, (size, weight) in enumerate([(5, 1.0), (7, 0.3), (3, 0.7)]):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        found = probed(probe, size, worker=worker, weight=weight)
        own = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
        name = "micro_square" if worker == 2 else "gradient_square"
        torch.testing.assert_close(found[name], own.square().sum() / weight**2)
        total += own * size / weight
    torch.testing.assert_close(found["gradient_square"], (total / 15).square().sum())


@pytest.mark.parametrize(("device", "every"), [("cpu", 1), ("cuda", 43)])
def test_on_cuda_rounds_of_few_steps_are_joined_now_and_then_all_workers_at_once(device, every):
    with FakeTensorMode():
        probe = chosen(50, device=device)
    due = [[probe.due(Turn((w,), epoch, 0)) for epoch in range(90)] for w in range(4)]
    assert due == [[epoch % every == 0 for epoch in range(90)]] * 4


def test_smoothing_is_before_dividing_and_forgets():
    assert NoiseAverage().estimate() is None
    values = [1.0, -0.5, 1.0, 0.5]  # single ratios would be nonsense
    average = averaged([1.0, math.nan, -0.5, 1.0, math.inf, 0.5])  # what is not finite is left out
    scale = average.estimate()
    mean = np.average(values, weights=0.95 ** np.arange(3, -1, -1))
    assert scale.gradient_square == pytest.approx(mean)
    assert scale.b_simple == pytest.approx(10.0 / mean)
    for _ in range(300):
        average.add(2.0, 50.0)
    assert average.estimate().b_simple == pytest.approx(25.0, rel=1e-4)


def averaged(values, trace=10.0):
    average = NoiseAverage()
    for value in values:
        average.add(value, trace)
    return average


def test_signal_that_may_be_zero_has_no_upper_end():
    assert averaged((1.0, -1.0, 0.5, -0.4, 0.8, -0.8)).estimate().high == math.inf
    scale = averaged([-1.0] * 5).estimate()
    assert (scale.b_simple, scale.low, scale.high) == (math.inf, 0.0, math.inf)


def test_pairs_are_of_one_round_and_of_good_ones():
    small = replace(REPORT, local_batch_size=8, gradient_batch=8, gradient_square=9.0)
    large = replace(small, worker=1, local_batch_size=32, gradient_batch=32, gradient_square=3.0)
    later = replace(large, round=1)
    assert pairs_of([large, later, small], ENDLESS) == [pytest.approx((1.0, 64.0))]
    assert pairs_of([small, replace(large, refused=True)], ENDLESS) == []
    assert pairs_of([small, replace(small, worker=1)], ENDLESS) == []  # sizes that are not unlike
    own = replace(small, gradient_batch=32, gradient_square=3.0, micro_batch=8, micro_square=9.0)
    own = replace(own, local_batch_size=32)
    pair = pytest.approx((1.0, 64.0))
    assert pairs_of([own, replace(own, worker=1)], ENDLESS) == [pair] * 2
    joint = replace(own, local_batch_size=16)  # 32 are those of both workers
    assert pairs_of([joint, replace(joint, worker=1)], ENDLESS) == [pair]


def test_probe_leaves_everything_as_it_was(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(), nn.Linear(144, 2)
    model = nn.Sequential(*layers)
    images, labels = torch.randn(12, 3, 8, 8), torch.arange(12) % 2
    tried = []  # whether cuDNN tries algorithms

    def loss_of(module, images, labels):
        tried.append(torch.backends.cudnn.benchmark)
        return nn.functional.cross_entropy(module(images), labels)

    loss_of(model, images, labels).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters()]
    random = torch.get_rng_state()
    found = probed(make_probe(model, least=2), 12, (images, labels), loss_of)
    assert (found["micro_batch"], found["gradient_batch"]) == (3, 12)
    squares = sum(g.square().sum() for g in gradients)
    torch.testing.assert_close(found["gradient_square"], squares)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert [*tried, torch.backends.cudnn.benchmark] == [True, False, True]


def after_backward(factor=1.0):
    """Return a model of |G| = 2, which has a factor times its gradient, and three samples."""
    model = Quadratic(4, 2.0).double()
    data = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    (quadratic_loss(model, *data) * factor).backward()
    return model, data


def test_a_batch_taken_in_micro_batches_is_measured_as_the_whole():
    model, last = after_backward()  # the last micro-batch: no more are on the device
    for kind, micro in (("micro", 3), ("joined", None)):
        found = probed(make_probe(model, kind, workers=2), 16, last, quadratic_loss)
        assert (found["gradient_batch"], found.get("micro_batch")) == (16, micro)


def test_joint_gradients_are_of_the_whole_batch_once_they_are_summed():
    model, data = after_backward(0.25)
    probe, turn = make_probe(model, "joined", workers=2), Turn((0,), 0, 0)
    step = Step((Part(0, np.arange(3), 0.25),), 0.0)
    found = probe.measure(turn, step, True, *data, quadratic_loss)
    assert (found["gradient_batch"], float(found["gradient_square"])) == (12, pytest.approx(0.25))
    odd = replace(step, odd=True)  # not summed over the processes yet
    assert probe.measure(turn, odd, True, *data, quadratic_loss) == {}


@pytest.mark.parametrize("launch_s", [0.0, 1.5])
@pytest.mark.parametrize("steps", [1, 3, 10, 30, 100])
def test_extra_passes_stay_within_their_share(steps, launch_s):
    model = TimeModel(0.01, 0.05)
    every = dbsl.extras.noise.probe_interval(model, 64, steps, 2, launch_s)
    round_s, extra_s = steps * model.time(64, 1), max(model.time(16, 1), launch_s)
    assert extra_s / (every * round_s) <= 0.003
    assert every == 1 or extra_s / ((every - 1) * round_s) > 0.003


def test_workers_take_turns():
    probe = make_probe(nn.Linear(1, 1), every=3, rounds=2)
    turns = [[Turn((worker,), e, r) for e in range(3) for r in range(2)] for worker in range(3)]
    due = [[probe.due(turn) for turn in own] for own in turns]
    assert np.sum(due, axis=0).tolist() == [1] * 6
    assert np.sum(due, axis=1).tolist() == [2] * 3


def test_a_run_whose_noise_scale_is_known_says_it_next_to_its_batch():
    plan = plan_dual_batch(4000, 4, 0, 16, TimeModel(1e-3, 0.02))
    scale = dbsl.extras.noise.NoiseScale(100.0, 80.0, 130.0, 1.0, 100.0, 50)
    gains = "a step gains from more samples up to about 100, the gradient noise scale"
    assert advice_on(scale, plan) == f"{gains} (95 %: 80 to 130); the largest batch is 16"
    assert "80 or more" in advice_on(replace(scale, high=math.inf), plan)
    for unknown in (replace(scale, b_simple=math.inf), replace(scale, pairs=5)):
        assert not advice_on(unknown, plan)


DUAL = {"rounds_per_epoch": 2, "small_workers": 2, "small_batch_size": (4,)}
DUAL |= {"large_batch_size": (16,)}
# Settings; the largest batch that was measured; micro-batches, or pairs of joined gradients.
MODES = {
    "dual batch": (DUAL | {"epochs": 2}, 36, 4),
    "asp": (DUAL | {"sync": "asp", "epochs": 60}, 15, {2, 4}),
    "equal batches": ({"local_batch_sizes": (4, 4, 4, 4)}, 16, 4),
    "one worker": ({"workers": 1, "local_batch_sizes": (8,), "epochs": 20}, 8, {2}),
    "step": ({"sync": "step", "local_batch_sizes": (4, 8, 8, 12), "epochs": 100}, 30, {3}),
    "push": ({"push": "gradients", "local_batch_sizes": (8, 8, 8, 8)}, 30, 32),
}


@pytest.mark.parametrize("mode", short(MODES, "dual batch"))
def test_noise_is_measured_and_changes_no_bit(mode, tmp_path):
    settings, largest, expected = MODES[mode]
    settings = {"train_samples": 240, "epochs": 4, "intercept": (0.0001,), "lr": 0.01} | settings
    settings |= {"dropout": (0.1,), "mixed_precision": "no", "checkpoint_every": 0}
    with_it, without = tmp_path / "with", tmp_path / "without"
    run(with_it, noise_scale=True, **settings)
    run(without, noise_scale=False, **settings)
    one, other = (folder / "model.safetensors" for folder in (with_it, without))
    assert one.read_bytes() == other.read_bytes()
    noise, summary = rows(with_it, "noise"), summary_of(with_it)
    assert noise, "no estimate in the whole run"
    names = ("b_simple", "low", "high")
    assert [summary["noise"][n] for n in names] == [noise[-1][n] for n in names]
    assert not rows(without, "noise")
    assert "noise" not in summary_of(without)
    measured = [row for row in rows(with_it, "round") if "gradient_batch" in row]
    assert max(row["gradient_batch"] for row in measured) == largest
    micro = {row.get("micro_batch") for row in measured}
    assert expected == (micro if isinstance(expected, set) else noise[-1]["pairs"])
