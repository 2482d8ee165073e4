"""What README says of the results is what the CSV files say, and the pictures show it."""

import re
from pathlib import Path

import pytest

from plots.evidence import (
    MAIN_ARMS,
    plans_figure,
    read,
    small_workers_figure,
    table_lines,
    time_figure,
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
TABLES = {  # README's links, and the table that they are rows of
    "configs/mini/": RESULTS / "mini/arms.csv",
    "configs/beyond/": RESULTS / "beyond/arms.csv",
    "configs/beyond_imagenette/": RESULTS / "beyond_imagenette/arms.csv",
    "configs/vit/": RESULTS / "vit/arms.csv",
}


def readme_rows():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if re.match(r"\| \[\w+\]\(configs/\w+/\w+\.yaml\)", line)]


def test_every_row_of_a_results_table_is_a_row_of_its_csv():
    rows = readme_rows()
    assert len(rows) > 10
    known = set()
    for configs, path in TABLES.items():
        known |= set(table_lines(read(path), configs.rstrip("/")))
    equal = table_lines(read(RESULTS / "mini/equal_time.csv"), "configs/mini")
    assert not [row for row in rows if row not in known | set(equal)]
    for row in rows:
        assert (ROOT / re.search(r"\((configs/.*?\.yaml)\)", row)[1]).exists()


def test_the_table_of_what_goes_beyond_has_the_differences_of_both_workloads():
    def difference(row):
        return f"{float(row['difference']):+.1f} ± {float(row['difference_ci95']):.1f}"

    both = [
        {row["arm"]: row for row in read(RESULTS / name / "arms.csv")}
        for name in ("beyond", "beyond_imagenette")
    ]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    arms = both[0].keys() - {"hybrid", "ema"}  # the reference, and the raw weights of that run
    assert len(arms) == 11
    for arm in arms:
        assert " | ".join(difference(rows[arm]) for rows in both) in readme, arm


@pytest.mark.parametrize("name", ["mini", "beyond", "beyond_imagenette", "vit"])
def test_every_arm_has_a_row_of_three_seeds(name):
    rows = {row["arm"]: row for row in read(RESULTS / name / "arms.csv")}
    arms = {path.stem for path in (ROOT / "configs" / name).glob("*.yaml")}
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
    arms, curves = (read(RESULTS / f"mini/{name}.csv") for name in ("arms", "arms_curves"))
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
