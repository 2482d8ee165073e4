"""The pictures show what the CSV files say."""

from statistics import fmean

import pytest

from experiments.plots import evidence
from experiments.plots.evidence import plans_figure
from experiments.plots.idea import ROUNDS, first_plan, idea_figure, mixed_split
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


def test_the_picture_of_the_idea_has_each_step_of_the_plan_that_the_page_prints():
    plan, split = first_plan(), mixed_split()
    rounds, joint = idea_figure(plan, split).axes
    page = (ROOT / "docs/planning.md").read_text()
    for row, each in zip(rounds.collections[::ROUNDS], plan.workers, strict=True):
        ends = [path.get_extents().x1 for path in row.get_paths()]
        assert len(ends) == each.steps
        assert max(ends) <= plan.time_s * ROUNDS
        assert f"{each.local_batch_size:>8}{each.samples:>10}{each.steps:>8}" in page
    assert len(rounds.collections) == ROUNDS * len(plan.workers)
    batches = [int(text.get_text()) for text in joint.texts]
    assert sorted(set(batches)) == sorted(set(split.local_batch_sizes))
    assert sum(batches) % sum(split.local_batch_sizes) == 0
