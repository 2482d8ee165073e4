"""The committed results are whole, and the pictures show what the CSV files say."""

from statistics import fmean

import pytest

from dbsl.tools.compare.report import arms_figure
from experiments.plots import evidence
from experiments.plots.evidence import COMPARISONS, MAIN_ARMS, plans_figure, time_figure, with_ddp
from experiments.plots.idea import ROUNDS, first_plan, idea_figure, mixed_split
from experiments.plots.rows import read
from tests.helpers import ROOT

RESULTS = ROOT / "experiments/results"


@pytest.mark.parametrize("name", ["mini", "beyond", "beyond_imagenette", "vit"])
def test_every_arm_has_a_row_of_three_seeds(name):
    files = [path for path in (RESULTS / name).glob("**/arms.csv") if "tuning" not in str(path)]
    rows = {row["arm"]: row for path in files for row in read(path)}
    arms = {path.stem for path in (ROOT / "experiments/configs" / name).glob("*.yaml")}
    assert arms <= rows.keys()
    assert {row["seeds"] for row in rows.values()} == {"3"}
    assert all(row[field] for row in rows.values() for field in ("command", "device", "torch"))


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
    arms, curves = (with_ddp(RESULTS / "mini", f"{name}.csv") for name in ("arms", "arms_curves"))
    runs = evidence.small_workers_runs()
    _, ours = evidence.small_workers_figure(published, runs).axes
    counted = ("all_large", "dual_1-lr0.2", "dual_2", "dual_3", "dual_4")
    means = [100 * fmean(run.accuracy for run in runs[name]) for name in counted]
    assert list(ours.lines[0].get_ydata()) == pytest.approx(means)
    along, ends = time_figure(arms, curves).axes
    assert len(along.lines) == len(MAIN_ARMS)
    assert len(ends.containers) == len(arms)


@pytest.mark.parametrize("name", COMPARISONS)
def test_pictures_of_arms_show_the_control_that_wins(name):
    left, right = arms_figure(evidence.runs_of(name), COMPARISONS[name]).axes
    arms = [text.get_text() for text in right.get_yticklabels()]
    assert name == "digits/arms" or any(arm.startswith("ddp_") for arm in arms)
    assert ("ema (EMA)" in arms) == name.startswith("beyond")
    colors = [line.get_color() for line in left.lines]
    assert len(set(colors)) == len(colors)
    assert all(0 <= end <= 100 for end in right.get_xlim())


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
