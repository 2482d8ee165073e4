"""The committed results are whole, and the pictures show what the CSV files say."""

from statistics import fmean

import pytest

from experiments.plots.demos import demos_figure
from experiments.plots.evidence import (
    MAIN_ARMS,
    plans_figure,
    small_workers_figure,
    time_figure,
    with_ddp,
)
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
    _, ours = small_workers_figure(published, arms).axes
    accuracy = {row["arm"]: float(row["accuracy"]) for row in arms}
    first = ours.containers[0].lines[0].get_ydata()
    assert list(first) == [
        accuracy["all_large"],
        *(accuracy[f"dual_{n}_k105"] for n in range(1, 5)),
    ]
    along, ends = time_figure(arms, curves).axes
    assert len(along.lines) == len(MAIN_ARMS)
    assert len(ends.containers) == len(arms)


def test_the_picture_of_the_demonstrations_has_every_arm_at_every_rate():
    uneven, links = (read(RESULTS / f"demos/{name}.csv") for name in ("uneven", "slow_link"))
    machines, shaped = demos_figure(uneven, links).axes
    arms = ("accelerate_ddp", "equal", "balanced")
    seconds = [fmean(float(r["epoch_s"]) for r in uneven if r["arm"] == arm) for arm in arms]
    assert [bar.get_width() for bar in machines.patches] == pytest.approx(seconds)
    cases = {(r["arm"], r["megabits"]) for r in links if r["model"] == "test_resnet"}
    assert len(shaped.containers) == len(cases) == 12
