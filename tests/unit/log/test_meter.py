import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from dbsl.checkpoint.disk import pack, unpack
from dbsl.cluster.wire import encode, read_report
from dbsl.plan.sampler import Part, Step
from dbsl.plan.types import RoundReport, Turn
from dbsl.run.meter import MEASURED, StepMeter, gradient_square
from dbsl.run.turns import Progress
from experiments.benchmarks.operators import Operators

CPU = SimpleNamespace(device=torch.device("cpu"), scaler=None)
WORKERS, ROUNDS, STEPS, BATCH = 2, 3, 5, 4


def make_meter(lines, every=3, state=None):
    model = nn.Linear(2, 1, bias=False)
    meter = StepMeter(every, range(WORKERS), model, CPU)
    if state is not None:
        meter.load_state_dict(state)
    return meter, model, lines


def train(meter, model, lines, todo, progress, until=math.inf):
    """Play rounds; a step's mean loss is its number in the run of its worker, its gradient too.

    Lines are taken after each step; None: they are left for reports.
    """
    played = 0
    while todo:
        worker, round_ = todo[0]
        meter.begin(Turn((worker,), round_, 0), anew=not progress.steps)
        for number in range(progress.steps, STEPS):
            if played == until:
                return progress
            played += 1
            value = float(round_ * STEPS + number + 1)
            step = Step((Part(worker, np.arange(BATCH), 1.0),), number / STEPS)
            before = progress.sums.get(worker, torch.zeros(1))
            progress.sums[worker] = before + BATCH * value
            progress.samples[worker] = progress.samples.get(worker, 0) + BATCH
            model.weight.grad = torch.tensor([[3.0, 4.0]]) * value
            meter.begin_step(step, 0.5)
            meter.end_step(step, 0.1, progress)
            if lines is not None:
                lines.extend(meter.take_lines())
            progress.steps += 1
        sums = {w: own.tolist() for w, own in progress.sums.items()}
        meter.end(sums, progress.samples)
        progress = Progress()
        todo.pop(0)
    return progress


def rounds():
    return [(worker, round_) for round_ in range(ROUNDS) for worker in range(WORKERS)]


def without_measured(lines):
    return [{k: v for k, v in x._asdict().items() if k not in MEASURED} for x in lines]


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_sums_over_a_round_are_exact_beside_weights_of_16_bits(kind):
    progress = Progress(sums={0: torch.tensor([69001.0])}, measured={"a": torch.tensor(70001.0)})
    assert progress.read(torch.ones(70000, dtype=kind)) == ({0: [69001.0]}, True)
    assert progress.measured == {"a": 70001.0}


def test_every_so_many_steps_of_a_worker_make_a_line_with_the_mean_since_the_last():
    lines = []
    train(*make_meter(lines), rounds(), Progress())
    own = [line for line in lines if line.worker == 1]
    assert [line.step for line in own] == [3, 6, 9, 12, 15]  # over the ends of rounds
    assert [line.loss for line in own] == [2.0, 5.0, 8.0, 11.0, 14.0]
    assert [line.gradient_norm for line in own] == [30.0, 60.0, 90.0, 120.0, 150.0]
    assert [(line.epoch, line.progress) for line in own][:2] == [(0, 0.4), (1, 0.0)]
    assert all(line.images_per_s > 0 and line.memory_gib > 0 for line in lines)
    train(*make_meter(lines, every=0), rounds(), Progress())
    assert len(lines) == WORKERS * ROUNDS * STEPS // 3


@pytest.mark.parametrize("stopped_after", range(WORKERS * ROUNDS * STEPS))
def test_a_resumed_run_neither_repeats_a_line_nor_misses_one(stopped_after):
    whole, lines, todo = [], [], rounds()
    train(*make_meter(whole), rounds(), Progress())
    meter, *rest = make_meter(lines)
    progress = train(meter, *rest, todo, Progress(), stopped_after)
    state = unpack(*pack(meter.state_dict()))
    train(*make_meter(lines, state=state), todo, progress)
    assert without_measured(lines) == without_measured(whole)


def test_lines_for_another_process_go_with_the_report():
    meter, *rest = make_meter(None)
    train(meter, *rest, rounds()[:WORKERS], Progress())
    sent = RoundReport(1, 0, 0, 8, 4, 8, 5, 1.0, 1.0, 0.5, lines=meter.take_lines())
    assert [line.step for line in read_report(encode(sent)).lines] == [3]
    assert meter.take_lines() == ()


def test_a_round_that_is_not_finite_leaves_the_next_lines_alone():
    lines = []
    meter, *rest = make_meter(lines)
    train(meter, *rest, [(0, 0)], Progress())
    meter.end({0: [math.nan]}, {0: BATCH})
    train(meter, *rest, [(0, 1)], Progress())
    assert [line.loss for line in lines] == [2.0, 6.0, 8.0]  # without the first round's rest


def test_a_gradient_norm_does_not_depend_on_where_memory_lies():
    torch.manual_seed(0)
    values = torch.randn(100_003)
    found = set()
    for offset in range(8):
        room = torch.empty(len(values) + 8)
        there = room[offset : offset + len(values)].copy_(values)
        found.add(f"{gradient_square([there]).sqrt().item():.6g}")
    assert len(found) == 1


def test_a_step_whose_batch_was_left_out_has_no_gradient():
    assert gradient_square([]) == 0


def test_steps_without_a_line_add_no_operator():
    meter, model, _ = make_meter([], every=3)
    meter.begin(Turn((0,), 0, 0), anew=True)
    model.weight.grad = torch.ones(1, 2)
    added = []
    for number in range(6):
        step = Step((Part(0, np.arange(BATCH), 1.0),), number / STEPS)
        with Operators() as operators:
            meter.begin_step(step, 1.0)
            meter.end_step(step, 0.1, Progress())
        added.append(operators.computing.total() + operators.others.total())
    assert [count > 0 for count in added] == [False, False, True] * 2
