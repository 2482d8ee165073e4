import time

import pytest
import torch

from dbsl.model import build_model
from dbsl.profile import (
    batch_sizes_to_measure,
    fit_time_model,
    measure_step_times,
    measure_time_model,
)


def test_fit_recovers_a_line_and_weighs_relative_errors():
    sizes = [8, 16, 32, 64]
    model = fit_time_model(sizes, [0.002 * x + 0.01 for x in sizes])
    assert (model.slope, model.intercept) == pytest.approx((0.002, 0.01))
    # One per cent too slow at 64 samples must not cost ten per cent at 8.
    model = fit_time_model(sizes, [0.026, 0.042, 0.074, 0.138 * 1.01])
    assert model.time(8, 1) == pytest.approx(0.026, rel=0.01)


def test_fit_that_would_start_below_zero_goes_through_the_origin():
    model = fit_time_model([8, 16, 32], [0.010, 0.025, 0.055])
    assert model.intercept == 0.0
    assert 0.010 / 8 < model.slope < 0.055 / 32


@pytest.mark.parametrize(
    ("large", "sizes"), [(64, [8, 16, 32, 64]), (500, [62, 125, 250, 500]), (3, [2, 3]), (1, [1])]
)
def test_measured_sizes_are_geometric_up_to_the_large_batch(large, sizes):
    assert batch_sizes_to_measure(large) == sizes


def test_step_times_are_medians_after_warm_up():
    calls = []

    def step(batch_size):
        calls.append(batch_size)
        slow = 0.05 if len(calls) <= 4 or calls.count(batch_size) == 4 else 0.0
        time.sleep(slow + 0.001 * batch_size)  # slow to warm up, and one outlier later

    times = measure_step_times(step, [2, 8], seconds=0.3)
    assert times == pytest.approx([0.002, 0.008], rel=0.5)
    assert abs(calls.count(2) - calls.count(8)) == 0


def test_measuring_leaves_the_model_as_it_was(accelerator):
    model = build_model("test_resnet", 3, final_resolution=32)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    time_model = measure_time_model(model, 16, 8, 3, accelerator, seconds=0.1)
    assert time_model.slope > 0
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
