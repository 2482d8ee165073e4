"""The pictures show what the CSV files say."""

from statistics import fmean

import pytest
import yaml

from dbsl.plan.solve import TimeModel, plan_dual_batch
from experiments.plots import evidence
from experiments.plots.evidence import plans_figure
from experiments.plots.idea import STEPS, idea_figure, mixed_split
from experiments.plots.rows import read
from tests.helpers import ROOT

RESULTS = ROOT / "experiments/results"


def test_pictures_show_the_published_points_on_the_planners_lines():
    published, profile = (read(RESULTS / f"{name}.csv") for name in ("published", "profile"))
    batches, shares, drawn, times = plans_figure(published, profile).axes
    for axes in (batches, shares):
        for line, points in zip(axes.lines[::2], axes.lines[1::2], strict=True):
            assert [round(y) for y in line.get_ydata()] == list(points.get_ydata())
    assert len(drawn.patches) == 16  # four workers of four plans
    assert sum(len(line.get_xdata()) for line in times.lines[:-1]) == len(profile)


def test_pictures_of_accuracy_have_every_arm():
    published = read(RESULTS / "published.csv")
    runs = evidence.small_workers_runs()
    _, ours = evidence.small_workers_figure(published, runs).axes
    counted = ("all_large", "dual_1-lr0.2", "dual_2", "dual_3", "dual_4")
    means = [100 * fmean(run.accuracy for run in runs[name]) for name in counted]
    assert list(ours.lines[0].get_ydata()) == pytest.approx(means)
    along, ends = evidence.gap_figure().axes
    assert len(along.lines) == len(ends.containers) == len(evidence.GAP_ARMS)


def test_the_page_on_planning_prints_the_plan_of_the_first_command():
    times = yaml.safe_load((ROOT / "experiments/configs/digits/first_command.yaml").read_text())
    model = TimeModel(times["slope"][1], times["intercept"][1])
    plan = plan_dual_batch(1437, 4, 1, 32, model)
    page = (ROOT / "docs/planning.md").read_text()
    for each in plan.workers:
        assert f"{each.local_batch_size:>8}{each.samples:>10}{each.steps:>8}" in page


def test_the_picture_of_the_idea_has_the_batches_of_the_split_and_its_saving():
    split = mixed_split()
    equal, balanced = idea_figure(split).axes
    for axes, steps, sizes in zip(
        (equal, balanced), STEPS, ([64] * 4, split.local_batch_sizes), strict=True
    ):
        texts = [int(text.get_text()) for text in axes.texts]
        assert texts == [size for size in sizes for _ in range(steps)]
        assert sum(texts) == 256 * steps
    less = 100 - 100 * max(split.times_s) / split.equal_time_s
    assert f"{less:.0f} % less time" in balanced.get_title("left")
