import pytest
from torch import nn

from dbsl.plan.joint_steps import plan_steps
from dbsl.plan.types import TimeModel
from dbsl.run.notes import with_notes
from dbsl.run.workers import Workers
from train import Config

NORM = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


def notes(samples, sizes, model=NORM, **settings):
    models = [TimeModel(0.001, 0.01)] * len(sizes)
    plan = plan_steps(samples, sizes, models, drop_last=settings.get("drop_last", False))
    known = Workers({16: models}, {16: list(sizes)}, {16: None}, measured=False)
    config = Config(sync="step", **settings)
    return with_notes(plan, known, 16, config, model, samples).notes


def test_a_last_step_with_too_few_samples_for_batch_norm_is_told_of():
    (note,) = notes(5000, [32] * 4)
    assert note == (
        "the last step of an epoch has 8 of 128 samples, about 2 for a worker, too few for batch "
        "norm: --drop-last leaves it out"
    )


@pytest.mark.parametrize(
    ("samples", "sizes", "model", "settings"),
    [
        (5120, [32] * 4, NORM, {}),  # nothing is left
        (5000, [64] * 4, NORM, {}),  # 136 are, 34 a worker
        (5000, [32] * 4, NORM, {"drop_last": True}),
        (5000, [32] * 4, nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), {}),
        (1001, [4] * 4, NORM, {}),  # all steps have few: the user has asked for that
    ],
    ids=["none left", "enough left", "left out", "no batch norm", "small batches"],
)
def test_a_last_step_that_does_no_harm_is_not(samples, sizes, model, settings):
    assert not notes(samples, sizes, model, **settings)
