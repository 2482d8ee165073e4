import numpy as np
import pytest
from PIL import Image

from dbsl.log.worker_plots import MAX_LINES, worker_figure, worker_history, worker_values


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
    assert values["share"][0, 1] == 100


@pytest.mark.parametrize("workers", [1, 3, MAX_LINES, MAX_LINES + 1, 200])
def test_every_worker_has_a_line_or_all_have_a_range(workers, tmp_path):
    figure = worker_figure(rounds(workers, 3))
    assert len(figure.axes) == 5
    for axes in figure.axes:
        assert len(axes.lines) == (workers if workers <= MAX_LINES else 1)
        assert len(axes.collections) == (workers > MAX_LINES)
        assert axes.get_ylabel()
    worker_history(rounds(workers, 3), tmp_path / "workers.png")
    with Image.open(tmp_path / "workers.png") as image:
        assert image.width == 900
