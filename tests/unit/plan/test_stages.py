import pytest
import timm.scheduler
import torch
from hypothesis import given
from hypothesis import strategies as st

import dbsl.plan.stages
from dbsl.config.settings import RunConfig
from dbsl.plan.solve import TimeModel, plan_dual_batch
from dbsl.plan.stages import Stages, default_milestones, default_resolutions, make_stages
from dbsl.plan.text import format_run
from train import learning_rate


def rows(stages):
    return [(s.first_epoch, s.end_epoch, s.resolution) for s in stages]


@pytest.mark.parametrize(
    ("schedule", "epochs", "message"),
    [
        ("cyclic", 3, None),
        ("cyclic", 2, "no epoch is at 32 px: every learning-rate stage is shorter than 2 epochs"),
        ("progressive", 2, None),
        ("progressive", 1, "no epoch is at 32 px: the run is shorter than 2 epochs"),
        ("fixed", 9, "no epoch is at 32 px: schedule fixed uses only the highest resolution"),
    ],
)
def test_a_resolution_without_an_epoch_is_named_with_the_reason(schedule, epochs, message):
    milestones = default_milestones(epochs)
    stages = make_stages(epochs, [32, 48], schedule=schedule, milestones=milestones)
    assert dbsl.plan.stages.unused_resolutions(stages, [32, 48], schedule) == message
    plans = {r: plan_dual_batch(400, 4, 1, 50, TimeModel(1e-3, 0.02)) for r in (32, 48)}
    assert ("32 px: no epoch\n" in format_run(stages, plans, 1)) == (message is not None)


def test_published_cifar_schedule_climbs_inside_every_stage():
    rates = {"learning_rate": 0.2, "milestones": default_milestones(140), "gamma": 0.1}
    stages = make_stages(140, (24, 32), dropout=(0.1, 0.2), **rates)
    low, high = ((0, 40, 24), (80, 100, 24), (120, 130, 24)), ((40, 80, 32), (100, 120, 32))
    assert rows(stages) == sorted([*low, *high, (130, 140, 32)])
    assert [s.learning_rate for s in stages] == pytest.approx([0.2, 0.2, 0.02, 0.02, 0.002, 0.002])
    assert [s.dropout for s in stages] == [0.1, 0.2] * 3
    assert [(s.index, s.substage) for s in stages] == [(i, k) for i in range(3) for k in (0, 1)]


def test_progressive_climbs_once_and_is_cut_by_milestones():
    stages = make_stages(12, (16, 24, 32), schedule="progressive", milestones=(6,))
    assert rows(stages) == [(0, 4, 16), (4, 6, 24), (6, 8, 24), (8, 12, 32)]


@pytest.mark.parametrize(("epochs", "counts"), [(2, [1, 1]), (6, [1, 1, 2, 2]), (8, [2] * 4)])
def test_higher_resolutions_get_the_extra_epochs_and_the_lowest_are_dropped(epochs, counts):
    sides = (128, 160, 192, 224)
    stages = make_stages(epochs, sides)
    assert [s.resolution for s in stages] == [*sides[-len(counts) :]]
    assert [len(s.epochs) for s in stages] == counts


@given(
    st.integers(1, 60),
    st.lists(st.integers(1, 300), min_size=1, max_size=4, unique=True).map(sorted),
    st.sampled_from(["cyclic", "progressive", "fixed"]),
    st.data(),
)
def test_stages_cover_each_epoch_once_and_end_at_the_final_resolution(
    epochs, resolutions, kind, data
):
    drawn = data.draw(st.sets(st.integers(1, max(1, epochs - 1)), max_size=3))
    milestones = sorted(drawn - {epochs})
    stages = make_stages(epochs, resolutions, schedule=kind, milestones=milestones)
    assert [e for s in stages for e in s.epochs] == list(range(epochs))
    assert stages[-1].resolution == resolutions[-1]
    assert all(e in dbsl.plan.stages.stage_at(stages, e).epochs for e in range(epochs))
    for stage in stages:  # low to high inside a learning-rate stage
        same = [s.resolution for s in stages if s.index == stage.index]
        assert same == sorted(same)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"milestones": (10,)}, r"lr_milestones must ascend inside \(0, epochs=10\), got 10"),
        ({"milestones": (5, 3)}, "lr_milestones must ascend"),
        ({"dropout": (0.1, 0.2, 0.3)}, r"dropout must have 1 value or one per .* \(2\), got 3"),
    ],
)
def test_bad_schedules_are_named_with_bound_and_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_stages(**{"epochs": 10, "resolutions": (24, 32), **arguments})


def rate(progress, **options):
    given = {"epochs": 10, "lr": 0.4, "lr_milestones": (6,), "warmup_epochs": 0.0}
    stages = Stages(RunConfig(**given | options), (32,))
    return learning_rate(progress, stages.config, stages)


def test_the_cosine_is_that_of_timms_scheduler():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    # With a prefix, timm counts the epochs of the warm-up on top.
    how = {"t_initial": 15, "lr_min": 0.02, "warmup_t": 5, "warmup_prefix": True}
    theirs = timm.scheduler.CosineLRScheduler(optimizer, cycle_limit=1, **how)
    options = {"lr_schedule": "cosine:0.02", "warmup_epochs": 5, "epochs": 20}
    for epoch in range(5, 20):
        found = rate(epoch, lr_milestones=None, **options)
        assert found == pytest.approx(theirs._get_lr(epoch)[0]), epoch


def test_a_rate_that_would_rise_is_refused():
    with pytest.raises(ValueError, match=r"lr_schedule must end at most at lr .0.1., got 0.2"):
        RunConfig(epochs=5, lr_schedule="cosine:0.2", lr=0.1)


def test_learning_rate_steps_at_milestones_and_warms_up():
    assert rate(0.0, warmup_epochs=2) == pytest.approx(0.004)
    assert rate(1.0, warmup_epochs=2) == pytest.approx(0.2)
    assert rate(2.0, warmup_epochs=2) == pytest.approx(0.4)
    assert rate(6.0, lr_gamma=0.5) == pytest.approx(0.2)


def test_defaults_follow_the_images_and_the_length_of_the_run():
    expected = {32: (24, 32), 8: (8, 16), 28: (16, 28), None: (160, 224)}
    assert {side: default_resolutions(side) for side in expected} == expected
