"""The picture of a run, from its rows."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from dbsl.base.files import save_figure
from dbsl.extras.charts.picture import MOST, run_figure, worker_values
from dbsl.log.rows import read_metrics
from tests.helpers import a_round


def rounds(workers, epochs, per_epoch=1):
    return [
        a_round(
            worker,
            epoch,
            round=number,
            local_batch_size=8 + worker,
            samples=10 * (worker + 1),
            time_s=3.0 + worker,
            predicted_time_s=1.0 + worker,
        )
        for epoch in range(epochs)
        for worker in range(workers)
        for number in range(per_epoch)
    ]


def plan(workers, resolution=24, first_epoch=0, end_epoch=2):
    each = {"local_batch_size": 8, "samples": 40, "predicted_time_s": 2.0}
    own = [{"worker": w, "small": w == 0, **each} for w in range(workers)]
    row = {"event": "plan", "resolution": resolution, "workers": own, "epoch_time_s": 2.0}
    return row | {"first_epoch": first_epoch, "end_epoch": end_epoch}


def evaluation(epoch, **more):
    return {"event": "eval", "epoch": epoch, "accuracy": 0.5 + 0.1 * epoch, **more}


def test_values_are_those_of_the_epochs_that_a_worker_has_finished():
    rows = rounds(3, 2, per_epoch=2)
    epochs, values = worker_values(rows)
    assert epochs == [1, 2]
    assert values["local_batch_size"].tolist() == [[8, 8], [9, 9], [10, 10]]
    assert values["time_s"][:, 0].tolist() == [6, 8, 10]  # of two rounds
    _, values = worker_values([row for row in rows if (row["worker"], row["epoch"]) != (1, 1)])
    assert np.isnan(values["time_s"][1, 1])


@pytest.mark.parametrize("workers", [1, 2, MOST, MOST + 1])
def test_every_worker_has_a_line_or_all_have_a_range(workers):
    figure = run_figure([plan(workers), *rounds(workers, 2), evaluation(0)])
    _, bars, batches, times = figure.axes
    planned = [line for line in times.lines if line.get_linestyle() == ":"]
    assert len(batches.lines) == (workers if workers <= MOST else 1)
    assert len(times.lines) - len(planned) == len(batches.lines) == len(planned)
    assert len(batches.collections) == (workers > MOST)
    assert len(bars.patches) == min(workers, MOST)
    assert ("1 workers more" in bars.get_title("left")) == (workers > MOST)


def test_accuracies_are_in_percent_each_named_and_epochs_of_a_resolution_are_shaded():
    plans = [plan(1, 16, 0, 1), plan(1, 32, 1, 2)]
    more = [evaluation(0), evaluation(1, ema_accuracy=0.9, train_accuracy=1.0)]
    axes = run_figure([*plans, *rounds(1, 2), *more]).axes[0]
    drawn = {line.get_label(): line.get_ydata().tolist() for line in axes.lines}
    assert drawn.keys() == {"accuracy", "ema accuracy"}
    assert drawn["accuracy"] == pytest.approx([50, 60])
    assert drawn["ema accuracy"][1] == pytest.approx(90)
    assert len({patch.get_alpha() for patch in axes.patches}) == 2
    assert "darker: 32 px" in axes.get_title("left")


def test_a_picture_that_cannot_be_drawn_leaves_the_old_one_alone(tmp_path, monkeypatch):
    path, link = tmp_path / "curves.png", tmp_path / "link.png"
    path.touch()
    link.symlink_to(path)
    save_figure(Figure(), link)
    assert link.is_symlink()
    assert path.read_bytes().startswith(b"\x89PNG")
    link.unlink()
    path.write_text("before")

    def fail_half_way(figure, file, **_):
        file.write_bytes(b"half")
        raise OSError("broken")

    monkeypatch.setattr(Figure, "savefig", fail_half_way)
    with pytest.raises(OSError, match="broken"):
        save_figure(Figure(), path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_metrics_are_read_without_a_half_written_last_line_and_a_broken_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "eval"}\n{"event": "ro')
    assert read_metrics(path) == [{"event": "eval"}]
    path.write_text('{"event": "eval"}\nnonsense\n{"event": "eval"}\n')
    with pytest.raises(ValueError, match="must have a row in JSON in each line, got 'nonsense"):
        read_metrics(path)
