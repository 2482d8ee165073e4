import itertools
import json
import math
import os
from dataclasses import asdict
from unittest.mock import MagicMock

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from dbsl.base.files import save_figure, write_bytes
from dbsl.base.words import short_loss
from dbsl.extras import pictures
from dbsl.extras.pictures import (
    MAX_LINES,
    curves_figure,
    timeline_figure,
    worker_figure,
    worker_marks,
    worker_values,
)
from dbsl.log.rows import plan_row, read_metrics, round_row
from dbsl.plan.solve import TimeModel, plan_dual_batch, plan_steps
from dbsl.plan.stages import default_milestones, make_stages
from dbsl.plan.types import Plan, RoundReport, WorkerPlan

STAGES = make_stages(4, [24, 32], milestones=(2,), learning_rate=0.1, gamma=0.5)
ROUND = {"event": "round", **round_row(RoundReport(0, 0, 0, 8, 16, 64, 4, 1.0, 2.0, 1.0))}


def dual_batch_plans(workers=4, small_workers=1):
    models = {24: TimeModel(1e-3, 0.02), 32: TimeModel(2e-3, 0.02)}
    return {r: plan_dual_batch(4000, workers, small_workers, 50, m) for r, m in models.items()}


def plan_by_hand(times_s, small=1):
    workers = tuple(
        WorkerPlan(8 + i, 100 + i, 10, 1.0, time_s, time_s, i < small)
        for i, time_s in enumerate(times_s)
    )
    return Plan(sum(w.samples for w in workers), 1.0, 3.0, 3.5, workers)


def metrics_of(stages, epochs, *, eval_every=1, virtual=False):
    names = ("first_epoch", "end_epoch", "resolution", "learning_rate")
    rows = [{"event": "plan"} | {n: getattr(stage, n) for n in names} for stage in stages]
    for epoch in range(epochs):
        for worker, samples in enumerate((30, 10)):
            own = {"worker": worker, "epoch": epoch, "samples": samples}
            rows.append(ROUND | own | {"loss": 4.0 - epoch * 0.01 + worker})
        if eval_every and (epoch + 1) % eval_every == 0:
            row = {"event": "eval", "epoch": epoch, "accuracy": 0.5 + epoch / 1000}
            row |= {"loss": 3.0 - epoch * 0.01, "train_time_s": 10.0 * (epoch + 1)}
            rows.append(row | ({"virtual_time_s": 2.0 * (epoch + 1)} if virtual else {}))
    return rows


def with_figures(rows, event, **figures):
    return [row | figures if row["event"] == event else row for row in rows]


def bars(axes, *colors):
    """Return (row, start, length) of a panel's bars in these colours."""
    found = [
        (round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width())
        for bar in axes.patches
        if to_hex(bar.get_facecolor()) in colors and bar.get_width() > 0
    ]
    return sorted(found)


def texts(axes):
    return [text.get_text() for text in axes.texts]


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


COMPUTING = pictures.SMALL, pictures.LARGE


def test_timeline_has_a_panel_per_resolution_and_a_bar_per_worker_as_long_as_its_time():
    plans = dual_batch_plans()
    figure = timeline_figure(STAGES, plans, 1)
    for axes, resolution in zip(figure.axes, (24, 32), strict=True):
        workers = plans[resolution].workers
        expected = [(y, 0.0, worker.predicted_time_s) for y, worker in enumerate(workers)]
        assert [pytest.approx(bar) for bar in expected] == bars(axes, *COMPUTING)
        assert [y for y, _, _ in bars(axes, pictures.SMALL)] == [0]
        batch = f"batch {workers[0].local_batch_size}, {workers[0].samples} samples"
        assert batch in texts(axes)[0]
    assert [title.partition(":")[0] for title in titles(figure)] == [
        "24 px images, epochs 1, 3",
        "32 px images, epochs 2, 4",
    ]
    figure = timeline_figure(make_stages(1, [24, 32]), plans, 1)
    assert titles(figure)[0].startswith("32 px images, epoch 1:")


def test_timeline_two_rounds_halve_the_bars_and_idle_time_fills_each_round():
    plan = plan_by_hand([4.0, 1.0])
    (axes,) = timeline_figure(make_stages(1, [24]), {24: plan}, 2).axes
    computing = [(0, 0.0, 2.0), (0, 2.0, 2.0), (1, 0.0, 0.5), (1, 2.0, 0.5)]
    assert bars(axes, *COMPUTING) == computing
    assert bars(axes, pictures.IDLE) == [(1, 0.5, 1.5), (1, 2.5, 1.5)]
    assert "idle 0.0 %" in texts(axes)[0]
    assert "idle 75.0 %" in texts(axes)[1]
    assert "idle 37.5 %" in axes.get_title(loc="left")  # 3 of 8 worker-seconds


def test_timeline_of_many_workers_draws_equal_ones_once_and_of_unequal_ones_the_first():
    plans = {24: plan_dual_batch(40_000, 40, 10, 50, TimeModel(1e-3, 0.02))}
    (axes,) = timeline_figure(make_stages(1, [24]), plans, 1).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["workers 0-9", "workers 10-39"]
    assert len(bars(axes, *COMPUTING)) == 2
    plan = plan_by_hand([1.0 + i / 100 for i in range(40)])
    (axes,) = timeline_figure(make_stages(1, [24]), {24: plan}, 1).axes
    assert len(bars(axes, *COMPUTING)) == pictures.MAX_ROWS
    assert "first 16 of 40 rows" in axes.get_title(loc="left")


@pytest.mark.parametrize(
    ("epoch_s", "text"), [(5.0, "20 s"), (452.5, "30.2 min"), (45250.0, "50.3 h")]
)
def test_the_title_of_a_timeline_has_a_duration_that_can_be_read(epoch_s, text):
    plan = plan_by_hand([epoch_s] * 2)
    title = timeline_figure(STAGES, {24: plan, 32: plan}, 1).get_suptitle()
    assert f"all 4 epochs: {text}; with" in title


def test_a_plan_of_joint_steps_speaks_of_global_batches():
    plan = plan_steps(1000, (60, 20), [TimeModel(1e-3, 0.02), TimeModel(3e-3, 0.02)])
    figure = timeline_figure(make_stages(2, [24]), {24: plan}, 1)
    assert "by the first plan" in figure.get_suptitle()
    assert "split equally" in figure.get_suptitle()
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["computes on its part of each global batch", "waits for the slowest worker"]
    assert "13 joint steps, 76 or 77 samples each;" in titles(figure)[0]


def test_the_pictures_of_one_worker_have_nothing_that_it_could_wait_for():
    figure = timeline_figure(STAGES, dict.fromkeys((24, 32), plan_by_hand([5.0], 0)), 1)
    assert figure.get_suptitle() == "Predicted time of one epoch\nall 4 epochs: 20 s"
    assert not figure.legends
    assert titles(figure)[0].endswith(": 5 s an epoch of 10 steps")
    assert texts(figure.axes[0]) == ["batch 8, 100 samples, 5 s"]
    rows = [row for row in metrics_of(STAGES, 4, virtual=True) if not row.get("worker")]
    assert curves_figure(rows).axes[3].get_xlabel() == "training time (s)"


@pytest.mark.usefixtures("pictures")
def test_a_plan_is_drawn_from_plan_json_and_its_rows(tmp_path, monkeypatch):
    drawn = []
    whole = pictures.timeline_figure
    monkeypatch.setattr(pictures, "timeline_figure", lambda *g: drawn.append(g) or whole(*g))
    plans = dual_batch_plans(2, 1)
    rows = [plan_row(stage, plans[stage.resolution]) | {"event": "plan"} for stage in STAGES]
    named = {f"{resolution} px": asdict(plan) for resolution, plan in plans.items()}
    (tmp_path / "plan.json").write_text(json.dumps(named))
    (tmp_path / "config.yaml").write_text("rounds_per_epoch: 2")
    pictures.draw_plan(tmp_path, rows)
    ((stages, *given),) = drawn
    assert given == [plans, 2]
    spans = [(stage.first_epoch, stage.end_epoch, stage.resolution) for stage in stages]
    assert spans == [(stage.first_epoch, stage.end_epoch, stage.resolution) for stage in STAGES]
    assert (tmp_path / "plots/plan.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("virtual", "seconds", "words"), [(False, 10, "time (s)"), (True, 2, "sim")]
)
def test_curves_show_percent_and_sample_weighted_loss_over_epochs_and_time(virtual, seconds, words):
    figure = curves_figure(metrics_of(STAGES, 4, virtual=virtual))
    accuracy, _, loss, _ = figure.axes
    assert accuracy.lines[0].get_xydata().tolist() == [[e + 1, 50 + e / 10] for e in range(4)]
    train, evaluation = loss.lines
    expected = [(30 * (4 - e * 0.01) + 10 * (5 - e * 0.01)) / 40 for e in range(4)]
    assert train.get_ydata() == pytest.approx(expected)
    assert evaluation.get_ydata() == pytest.approx([3 - e * 0.01 for e in range(4)])
    for line in (*figure.axes[1].lines, *figure.axes[3].lines):
        assert line.get_xdata() == pytest.approx([seconds * (e + 1) for e in range(4)])
    assert words in figure.axes[3].get_xlabel()
    for axes in figure.axes[:2]:
        assert [text.replace(", ", "\n") for text in texts(axes)] == [
            *("24 px\nlr 0.1", "32 px\nlr 0.1", "24 px\nlr 0.05", "32 px\nlr 0.05"),
        ]
    assert [(p.get_x(), p.get_width()) for p in loss.patches] == [(1, 1), (3, 1)]  # every other


@pytest.mark.parametrize("exploded", [200.0, 6e35])
def test_one_exploded_loss_is_named_at_the_top_and_the_others_keep_their_axis(exploded):
    rows = metrics_of(STAGES, 4)
    rows[-1]["loss"] = exploded
    for axes, x in zip(curves_figure(rows).axes[2:], (4, 40), strict=True):
        low, high = axes.get_ylim()
        assert low < 2.97
        assert 4.25 < high < 5
        marks = [line for line in axes.lines if line.get_marker() == "^" and len(line.get_xdata())]
        assert [line.get_xdata().tolist() for line in marks] == [[x]]
        assert [text.strip() for text in texts(axes)] == [short_loss(exploded)]


def test_averaged_weights_have_curves_where_they_were_evaluated():
    rows = with_figures(metrics_of(STAGES, 4), "eval", ema_accuracy=0.75, ema_loss=1.5)
    for axes, value in zip(curves_figure(rows).axes, (75, 75, 1.5, 1.5), strict=True):
        assert axes.lines[-1].get_ydata() == pytest.approx([value] * 4)
        assert axes.lines[-1].get_label() == "evaluation, averaged weights"


def test_figures_of_the_loss_function_have_curves_next_to_it_with_gaps_where_none_is_known():
    rows = metrics_of(STAGES, 4)
    for row in (row for row in rows if row["event"] == "round" and row["epoch"]):
        row["kd"] = None if row["epoch"] == 3 else row["samples"]
        row["loss"] = None if row["epoch"] == 1 else row["loss"]
    for axes in curves_figure(rows).axes[2:]:
        train, kd, _ = axes.lines
        assert kd.get_label() == "training, kd"
        mean = (30 * 30 + 10 * 10) / 40
        assert kd.get_ydata() == pytest.approx([math.nan, mean, mean, math.nan], nan_ok=True)
        assert [math.isnan(value) for value in train.get_ydata()] == [False, True, False, False]


def test_curves_of_a_falling_rate_name_resolutions_alone_and_have_the_losses_that_are_known():
    """An epoch that was over when others went on has rounds of no steps."""
    rows = metrics_of(make_stages(3, [24, 32], gamma=1.0, milestones=[]), 3)
    for row in rows:
        if row["event"] == "round" and row["epoch"] == 1:
            row |= {"samples": 0, "loss": 0.0}
    figure = curves_figure(rows, falling=True)
    assert texts(figure.axes[0]) == ["24 px", "32 px"]
    assert figure.get_suptitle().endswith("(each strip: epochs with one resolution)")
    assert figure.axes[2].lines[0].get_xdata().tolist() == [1.0, 3.0]


def test_stages_of_a_longer_run_take_the_place_of_older_ones_from_where_it_went_on():
    rows = metrics_of(make_stages(2, [24, 32], learning_rate=0.1), 2)
    longer = metrics_of(make_stages(6, [24, 32], learning_rate=0.1), 0)
    rows += [row | {"from_epoch": 2} for row in longer]
    rows.append(rows[-1] | {"from_epoch": 4})  # a plan that follows the machines
    spans = [[*span.values()][:3] for span in pictures.stage_spans(rows)]
    assert spans == [[0, 1, 24], [1, 2, 32], [2, 3, 24], [3, 6, 32]]


@pytest.mark.parametrize("metrics", [[], metrics_of(STAGES, 3, eval_every=0)])
def test_curves_without_an_evaluation_say_so(metrics):
    figure = curves_figure(metrics)
    assert texts(figure.axes[1]) == ["no evaluation yet"]
    assert len(figure.axes[2].lines) == bool(metrics)


@pytest.mark.parametrize("resolutions", [[24, 32], [160, 224, 288]])
def test_labels_of_a_published_schedule_do_not_overlap(resolutions):
    stages = make_stages(140, resolutions, milestones=default_milestones(140), gamma=0.1)
    figure = curves_figure(metrics_of(stages, 140))
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    for axes in figure.axes[:2]:
        boxes = [text.get_window_extent(renderer) for text in axes.texts]
        assert len(boxes) == len(stages)
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


@pytest.mark.parametrize(("workers", "epochs"), [(1, 1), (40, 20)])
def test_pictures_are_written_as_png_of_a_readable_size(tmp_path, workers, epochs):
    stages, plans = make_stages(epochs, [24, 32]), dual_batch_plans(workers, workers // 4)
    save_figure(timeline_figure(stages, plans, 1), tmp_path / "plots/timeline.png")
    save_figure(curves_figure(metrics_of(stages, epochs)), tmp_path / "plots/curves.png")
    save_figure(worker_figure(rounds(workers, epochs)), tmp_path / "plots/workers.png")
    assert len([*(tmp_path / "plots").iterdir()]) == 3
    for file in (tmp_path / "plots").iterdir():
        with Image.open(file) as image:
            assert image.format == "PNG"
            assert 900 <= image.width <= 1600
            assert 200 <= image.height <= 1600


def test_picture_that_cannot_be_drawn_leaves_the_old_one_and_no_other_file(tmp_path, monkeypatch):
    path = tmp_path / "curves.png"
    path.write_text("before")

    def fail_half_way(figure, file, **_):
        file.write_bytes(b"half")
        raise RuntimeError("broken")

    monkeypatch.setattr(Figure, "savefig", fail_half_way)
    with pytest.raises(RuntimeError, match="broken"):
        save_figure(Figure(), path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_picture_that_cannot_be_put_in_place_leaves_no_half_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", MagicMock(side_effect=OSError("disk gone")))
    with pytest.raises(OSError, match="disk gone"):
        write_bytes(tmp_path / "plan.png", b"picture")
    assert not list(tmp_path.iterdir())


def test_metrics_are_read_without_a_half_written_last_line_and_a_broken_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "eval"}\n{"event": "ro')
    assert read_metrics(path) == [{"event": "eval"}]
    path.write_text('{"event": "eval"}\nnonsense\n{"event": "eval"}\n')
    with pytest.raises(ValueError, match="line 2 must be JSON, got 'nonsense"):
        read_metrics(path)


def rounds(workers, epochs, per_epoch=1):
    names = ("local_batch_size", "samples", "compute_time_s", "time_s", "predicted_time_s")
    of_worker = [
        dict(zip(names, (8 + w, 10 * (w + 1), 2.0 + w, 3.0 + w, 1.0 + w), strict=True))
        for w in range(workers)
    ]
    return [
        ROUND | {"worker": worker, "epoch": epoch, "round": number, "wait_time_s": 0.5} | own
        for epoch in range(epochs)
        for worker, own in enumerate(of_worker)
        for number in range(per_epoch)
    ]


def test_values_are_sums_over_rounds_and_shares_of_the_epoch():
    epochs, values = worker_values(rounds(3, 2, per_epoch=2))
    assert epochs == [1, 2]
    assert values["local_batch_size"].tolist() == [[8, 8], [9, 9], [10, 10]]
    assert values["compute_time_s"][:, 0].tolist() == [4, 6, 8]
    assert values["wait_time_s"][:, 1].tolist() == [1, 1, 1]
    assert values["share"][:, 0] == pytest.approx([100 / 6, 200 / 6, 300 / 6])


def test_an_epoch_that_a_worker_has_not_finished_is_left_out():
    _, values = worker_values([r for r in rounds(2, 2) if (r["worker"], r["epoch"]) != (1, 1)])
    assert np.isnan(values["compute_time_s"][1, 1])
    assert values["share"][:, 0] == pytest.approx([100 / 3, 200 / 3])
    assert values["share"][0, 1] == pytest.approx(100 / 3)  # nobody is given more meanwhile


def test_joint_steps_of_workers_before_are_neither_a_workers_share_nor_nobodys():
    rows = [r for r in rounds(2, 2, per_epoch=2) if (r["epoch"], r["round"]) != (1, 0)]
    rows.append({"event": "restart", "epoch": 1, "steps": 3, "samples": 30})
    _, values = worker_values(rows)
    assert values["nobody"].tolist() == [0, 0]
    assert np.nansum(values["share"], axis=0).tolist() == pytest.approx([100, 50])
    labels = worker_figure(rows).axes[1].get_legend_handles_labels()[1]
    assert "nobody" not in labels


def test_samples_that_nobody_trained_on_and_lost_workers_are_seen():
    rows = []  # worker 1 is lost in epoch 6 and back in 8
    for row in rounds(4, 8, per_epoch=2):
        worker, epoch, number = row["worker"], row["epoch"], row["round"]
        if worker != 1 or epoch not in (5, 6):
            rows.append(row | {"samples": 12 if worker == 0 and epoch in (5, 6) else 10})
        elif (epoch, number) == (5, 1):
            rows.append({"event": "lost", "worker": 1, "rounds": 10, "samples": 40})
    rows.append({"event": "joined", "worker": 1, "epoch": 7})
    _, values = worker_values(rows)
    assert values["share"][0, :5].tolist() == [25] * 5
    assert worker_marks(rows) == [("lost", 1, 6), ("joined", 1, 8)]
    axes = worker_figure(rows).axes[1]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([0, 0, 0, 0, 0, 20, 20, 0])
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    assert sorted(named) == ["joined", "lost", "nobody"]


@pytest.mark.parametrize("workers", [1, MAX_LINES, MAX_LINES + 1])
def test_every_worker_has_a_line_or_all_have_a_range(workers):
    figure = worker_figure(rounds(workers, 3))
    assert len(figure.axes) == (4 if workers > 1 else 2)
    for axes in figure.axes:
        measured = [line for line in axes.lines if line.get_linestyle() != ":"]
        assert len(measured) == (workers if workers <= MAX_LINES else 1)
        assert len(axes.collections) == (workers > MAX_LINES)
        assert axes.get_ylabel()


def measured_panel(figure):
    return next(axes for axes in figure.axes if "measured" in axes.get_ylabel())


def test_measured_seconds_have_the_planned_ones_beside_them_in_simulated_runs_too():
    lines = measured_panel(worker_figure(rounds(2, 3))).lines
    assert [line.get_ydata().tolist() for line in lines if line.get_linestyle() == ":"] == [
        [1] * 3,
        [2] * 3,
    ]
    simulated = worker_figure([row | {"virtual_time_s": 1.0} for row in rounds(2, 3)])
    labels = [axes.get_ylabel().replace("\n", " ") for axes in simulated.axes]
    assert [label for label in labels if label.startswith("computing")] == [
        "computing, measured [s per epoch]",
        "computing, on the cluster's clock [s]",
    ]


@pytest.mark.parametrize("workers", [1, 3, MAX_LINES + 1])
def test_a_first_epoch_that_took_very_long_is_named_at_the_top_and_does_not_flatten(workers):
    rows = [row | {"time_s": 3.0 if row["epoch"] else 200.0} for row in rounds(workers, 8)]
    axes = measured_panel(worker_figure(rows))
    assert axes.get_ylim()[1] < 30
    lines = workers if workers <= MAX_LINES else 1
    assert [text.strip() for text in texts(axes)] == ["up to 200 s" if lines > 1 else "200 s"]
    marked = [len(line.get_xdata()) for line in axes.lines if line.get_marker() == "^"]
    assert sum(marked) == lines
