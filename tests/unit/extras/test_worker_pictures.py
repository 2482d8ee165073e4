import numpy as np
import pytest
from PIL import Image

from dbsl.extras.pictures import (
    MAX_LINES,
    save_figure,
    worker_figure,
    worker_marks,
    worker_values,
)


def rounds(workers, epochs, per_epoch=1):
    return [
        {
            "event": "round",
            "worker": worker,
            "epoch": epoch,
            "round": number,
            "local_batch_size": 8 + worker,
            "samples": 10 * (worker + 1),
            "compute_time_s": 2.0 + worker,
            "time_s": 3.0 + worker,
            "predicted_time_s": 1.0 + worker,
            "wait_time_s": 0.5,
        }
        for epoch in range(epochs)
        for worker in range(workers)
        for number in range(per_epoch)
    ]


def test_values_are_sums_over_rounds_and_shares_of_the_epoch():
    epochs, values = worker_values(rounds(3, 2, per_epoch=2))
    assert epochs == [1, 2]
    assert values["local_batch_size"].tolist() == [[8, 8], [9, 9], [10, 10]]
    assert values["compute_time_s"][:, 0].tolist() == [4, 6, 8]
    assert values["wait_time_s"][:, 1].tolist() == [1, 1, 1]
    assert values["share"][:, 0] == pytest.approx([100 / 6, 200 / 6, 300 / 6])
    assert values["idle"][:, 0].tolist() == [50, 25, 0]


def test_an_epoch_that_a_worker_has_not_finished_is_left_out():
    _, values = worker_values([r for r in rounds(2, 2) if (r["worker"], r["epoch"]) != (1, 1)])
    assert np.isnan(values["compute_time_s"][1, 1])
    assert values["share"][:, 0] == pytest.approx([100 / 3, 200 / 3])
    assert values["share"][0, 1] == pytest.approx(100 / 3)  # nobody is given more meanwhile


def test_joint_steps_of_workers_before_are_neither_a_workers_share_nor_nobodys():
    rows = [r for r in rounds(2, 2, per_epoch=2) if (r["epoch"], r["round"]) != (1, 0)]
    rows.append({"event": "restart", "epoch": 1, "steps": 3, "samples": 30})
    _, values = worker_values(rows)
    assert values["before"].tolist() == [0, 50]
    assert np.nansum(values["share"], axis=0).tolist() == pytest.approx([100, 50])
    labels = worker_figure(rows).axes[1].get_legend_handles_labels()[1]
    assert "nobody" not in labels


def with_a_lost_worker():
    """Worker 1 is lost in epoch 6 and back in 8."""
    rows = []
    for row in rounds(4, 8, per_epoch=2):
        worker, epoch, number = row["worker"], row["epoch"], row["round"]
        if worker != 1 or epoch not in (5, 6):
            # Worker 0 has more in two epochs, and lies on others in the rest.
            rows.append(row | {"samples": 12 if worker == 0 and epoch in (5, 6) else 10})
        elif (epoch, number) == (5, 1):
            rows.append({"event": "lost", "worker": 1, "rounds": 10, "samples": 40})
    return [*rows, {"event": "joined", "worker": 1, "epoch": 7}]


def test_samples_that_nobody_trained_on_and_lost_workers_are_seen():
    rows = with_a_lost_worker()
    _, values = worker_values(rows)
    assert values["share"][0, :5].tolist() == [25] * 5
    unknown = np.isnan(values["idle"][1])
    assert (1 + np.flatnonzero(unknown)).tolist() == [6, 7]
    assert worker_marks(rows) == [("lost", 1, 6), ("joined", 1, 8)]
    axes = worker_figure(rows).axes[1]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([0, 0, 0, 0, 0, 20, 20, 0])
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    assert sorted(named) == ["joined", "lost", "nobody"]


@pytest.mark.parametrize("workers", [1, 3, MAX_LINES, MAX_LINES + 1, 200])
def test_every_worker_has_a_line_or_all_have_a_range(workers, tmp_path):
    figure = worker_figure(rounds(workers, 3))
    assert len(figure.axes) == (5 if workers > 1 else 2)
    for axes in figure.axes:
        measured = [line for line in axes.lines if line.get_linestyle() != ":"]
        assert len(measured) == (workers if workers <= MAX_LINES else 1)
        assert len(axes.collections) == (workers > MAX_LINES)
        assert axes.get_ylabel()
    save_figure(figure, tmp_path / "workers.png")
    with Image.open(tmp_path / "workers.png") as image:
        assert image.width == 900


def test_measured_seconds_have_the_planned_ones_beside_them_in_simulated_runs_too():
    (axes,) = [axes for axes in worker_figure(rounds(2, 3)).axes if "measured" in axes.get_ylabel()]
    planned = [line for line in axes.lines if line.get_linestyle() == ":"]
    assert [line.get_ydata().tolist() for line in planned] == [[1] * 3, [2] * 3]
    simulated = worker_figure([row | {"virtual_time_s": 1.0} for row in rounds(2, 3)])
    labels = [axes.get_ylabel().replace("\n", " ") for axes in simulated.axes]
    assert [label for label in labels if label.startswith("computing")] == [
        "computing, measured [s per epoch]",
        "computing, on the cluster's clock [s]",
    ]


@pytest.mark.parametrize("workers", [1, 3, MAX_LINES + 1])
def test_a_first_epoch_that_took_very_long_is_named_at_the_top_and_does_not_flatten(workers):
    rows = rounds(workers, 8)
    for row in rows:
        row |= {"time_s": 200.0 if row["epoch"] == 0 else 3.0}
    (axes,) = [a for a in worker_figure(rows).axes if "measured" in a.get_ylabel()]
    assert axes.get_ylim()[1] < 30
    assert axes.get_yscale() == "linear"
    several = 1 < workers <= MAX_LINES
    assert [text.get_text() for text in axes.texts] == ["up to 200 s" if several else "200 s"]
    assert sum(len(line.get_xdata()) for line in axes.lines if line.get_marker() == "^") == (
        workers if workers <= MAX_LINES else 1
    )
