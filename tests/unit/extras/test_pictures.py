import itertools
import json
import math
import os
from dataclasses import asdict

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from dbsl.base.words import short_loss
from dbsl.extras import pictures as plots
from dbsl.log.rows import for_people, plan_row, read_metrics
from dbsl.plan.solve import TimeModel, plan_dual_batch, plan_steps
from dbsl.plan.stages import default_milestones, make_stages
from dbsl.plan.types import Plan, WorkerPlan

pytestmark = pytest.mark.usefixtures("pictures")

STAGES = make_stages(4, [24, 32], milestones=(2,), learning_rate=0.1, gamma=0.5)


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
    rows = [
        {
            "event": "plan",
            "first_epoch": stage.first_epoch,
            "end_epoch": stage.end_epoch,
            "resolution": stage.resolution,
            "learning_rate": stage.learning_rate,
        }
        for stage in stages
    ]
    for epoch in range(epochs):
        for worker, samples in enumerate((30, 10)):
            loss = 4.0 - epoch * 0.01 + worker
            row = {"event": "round", "worker": worker, "epoch": epoch, "samples": samples}
            rows.append(row | {"loss": loss})
        if eval_every and (epoch + 1) % eval_every == 0:
            rows.append(
                {
                    "event": "eval",
                    "epoch": epoch,
                    "accuracy": 0.5 + epoch / 1000,
                    "loss": 3.0 - epoch * 0.01,
                    "train_time_s": 10.0 * (epoch + 1),
                }
                | ({"virtual_time_s": 2.0 * (epoch + 1)} if virtual else {})
            )
    return rows


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


def test_timeline_has_a_panel_per_resolution_and_a_bar_per_worker_as_long_as_its_time():
    plans = dual_batch_plans()
    figure = plots.timeline_figure(STAGES, plans, 1)
    for axes, resolution in zip(figure.axes, (24, 32), strict=True):
        workers = plans[resolution].workers
        assert axes.get_title(loc="left").startswith(f"{resolution} px")
        expected = [(y, 0.0, worker.predicted_time_s) for y, worker in enumerate(workers)]
        drawn = bars(axes, plots.SMALL, plots.LARGE)
        assert [pytest.approx(bar) for bar in expected] == drawn
        assert [y for y, _, _ in bars(axes, plots.SMALL)] == [0]
        assert (
            f"batch {workers[0].local_batch_size}, {workers[0].samples} samples" in texts(axes)[0]
        )


def test_timeline_two_rounds_halve_the_bars_and_idle_time_fills_each_round():
    plan = plan_by_hand([4.0, 1.0])
    (axes,) = plots.timeline_figure(make_stages(1, [24]), {24: plan}, 2).axes
    computing = [(0, 0.0, 2.0), (0, 2.0, 2.0), (1, 0.0, 0.5), (1, 2.0, 0.5)]
    assert bars(axes, plots.SMALL, plots.LARGE) == computing
    assert bars(axes, plots.IDLE) == [(1, 0.5, 1.5), (1, 2.5, 1.5)]
    assert "idle 0.0 %" in texts(axes)[0]
    assert "idle 75.0 %" in texts(axes)[1]
    assert "idle 37.5 %" in axes.get_title(loc="left")  # 3 of 8 worker-seconds


def test_timeline_title_names_the_epochs_of_a_resolution_from_one():
    figure = plots.timeline_figure(STAGES, dual_batch_plans(), 1)
    assert "epochs 1, 3:" in figure.axes[0].get_title(loc="left")
    assert "epochs 2, 4:" in figure.axes[1].get_title(loc="left")
    one = plots.timeline_figure(make_stages(1, [24]), {24: plan_by_hand([1.0])}, 1)
    assert "epoch 1:" in one.axes[0].get_title(loc="left")


def test_a_resolution_without_an_epoch_is_named_in_the_timeline():
    plans = dual_batch_plans()
    stages = make_stages(1, [24, 32])
    title = plots.timeline_figure(stages, plans, 1).get_suptitle()
    assert title.endswith("\nno epoch is at 24 px")
    assert "no epoch" not in plots.timeline_figure(STAGES, plans, 1).get_suptitle()


def test_timeline_of_many_workers_draws_equal_ones_once():
    plans = {24: plan_dual_batch(40_000, 40, 10, 50, TimeModel(1e-3, 0.02))}
    (axes,) = plots.timeline_figure(make_stages(1, [24]), plans, 1).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["workers 0-9", "workers 10-39"]
    assert len(bars(axes, plots.SMALL, plots.LARGE)) == 2


def test_timeline_of_many_unequal_workers_shows_the_first_and_says_so():
    plan = plan_by_hand([1.0 + i / 100 for i in range(40)])
    (axes,) = plots.timeline_figure(make_stages(1, [24]), {24: plan}, 1).axes
    assert len(bars(axes, plots.SMALL, plots.LARGE)) == plots.MAX_ROWS
    assert "first 16 of 40 rows" in axes.get_title(loc="left")


def test_curves_show_accuracy_in_percent_and_sample_weighted_loss_over_completed_epochs():
    figure = plots.curves_figure(metrics_of(STAGES, 4))
    accuracy, loss = figure.axes[0], figure.axes[2]
    assert accuracy.lines[0].get_xydata().tolist() == [[e + 1, 50 + e / 10] for e in range(4)]
    train, evaluation = loss.lines
    expected = [(30 * (4 - e * 0.01) + 10 * (5 - e * 0.01)) / 40 for e in range(4)]
    assert train.get_ydata() == pytest.approx(expected)
    assert evaluation.get_ydata() == pytest.approx([3 - e * 0.01 for e in range(4)])


@pytest.mark.parametrize(
    ("virtual", "seconds", "words"), [(False, 10, "time (s)"), (True, 2, "sim")]
)
def test_curves_over_time_use_the_simulated_clock_where_there_is_one(virtual, seconds, words):
    figure = plots.curves_figure(metrics_of(STAGES, 4, virtual=virtual))
    for axes in figure.axes[1], figure.axes[3]:
        for line in axes.lines:
            assert line.get_xdata() == pytest.approx([seconds * (e + 1) for e in range(4)])
    assert words in figure.axes[3].get_xlabel()


def test_losses_of_very_different_size_have_a_logarithmic_axis():
    rows = metrics_of(STAGES, 4)
    for row in (row for row in rows if row["event"] == "eval"):
        row["loss"] = 6e35
    figure = plots.curves_figure(rows)
    assert [axes.get_yscale() for axes in figure.axes] == ["linear", "linear", "log", "log"]


@pytest.mark.parametrize("exploded", [200.0, 6e35])
def test_one_exploded_loss_is_named_at_the_top_and_the_others_keep_their_axis(exploded):
    rows = metrics_of(STAGES, 4)
    rows[-1]["loss"] = exploded
    figure = plots.curves_figure(rows)
    for axes, x in zip(figure.axes[2:], (4, 40), strict=True):
        assert axes.get_yscale() == "linear"
        low, high = axes.get_ylim()
        assert low < 2.97
        assert 4.25 < high < 5
        marks = [line for line in axes.lines if line.get_marker() == "^" and len(line.get_xdata())]
        assert [line.get_xdata().tolist() for line in marks] == [[x]]
        assert texts(axes) == [short_loss(exploded)]


def test_averaged_weights_have_curves_where_they_were_evaluated():
    rows = metrics_of(STAGES, 4)
    for row in (row for row in rows if row["event"] == "eval"):
        row |= {"ema_accuracy": 0.75, "ema_loss": 1.5}
    figure = plots.curves_figure(rows)
    for axes, value in zip(figure.axes, (75, 75, 1.5, 1.5), strict=True):
        assert axes.lines[-1].get_ydata() == pytest.approx([value] * 4)
        assert axes.lines[-1].get_label() == "evaluation, averaged weights"


def test_figures_of_the_loss_function_have_curves_next_to_it():
    rows = metrics_of(STAGES, 4)
    for row in (row for row in rows if row["event"] == "round" and row["epoch"]):
        row["kd"] = 2.0 if row["samples"] == 30 else None
    for axes in plots.curves_figure(rows).axes[2:]:
        (line,) = (line for line in axes.lines if line.get_label() == "training, kd")
        assert len(line.get_ydata()) == 4
    for row in (row for row in rows if row["event"] == "round" and row["epoch"]):
        row["kd"] = row["samples"]
    line = plots.curves_figure(rows).axes[2].lines[1]
    assert line.get_ydata()[1:] == pytest.approx([(30 * 30 + 10 * 10) / 40] * 3)
    assert math.isnan(line.get_ydata()[0])  # not in that epoch


def test_curves_null_loss_leaves_a_gap():
    rows = metrics_of(STAGES, 4)
    next(row for row in rows if row["event"] == "round" and row["epoch"] == 1)["loss"] = None
    train = plots.curves_figure(rows).axes[2].lines[0].get_ydata()
    assert [math.isnan(value) for value in train] == [False, True, False, False]


def test_curves_shade_every_other_substage_and_name_all():
    figure = plots.curves_figure(metrics_of(STAGES, 4))
    for axes in figure.axes[0], figure.axes[1]:
        assert [text.replace(", ", "\n") for text in texts(axes)] == [
            "24 px\nlr 0.1",
            "32 px\nlr 0.1",
            "24 px\nlr 0.05",
            "32 px\nlr 0.05",
        ]
    strips = [(patch.get_x(), patch.get_width()) for patch in figure.axes[2].patches]
    assert strips == [(1, 1), (3, 1)]


def test_curves_name_a_rate_that_falls_inside_a_substage_by_its_last_step():
    stages = make_stages(4, [24, 32], learning_rate=0.1, gamma=1.0, milestones=[])
    rows = metrics_of(stages, 4)
    for row in rows:
        if row["event"] == "round":  # the second worker's rate is lower
            row["learning_rate"] = 0.08 - 0.02 * row["epoch"] - 0.001 * row["worker"]
    figure = plots.curves_figure(rows, falling=True)
    assert texts(figure.axes[0]) == ["24 px\nto lr 0.06", "32 px\nto lr 0.02"]
    assert figure.get_suptitle().endswith(
        "(each strip: epochs with one resolution; lr: where it ends)"
    )
    untold = plots.curves_figure(metrics_of(stages, 4), falling=True)  # rows without a rate
    assert texts(untold.axes[0]) == ["24 px", "32 px"]


def test_curves_of_a_run_that_others_went_on_with_have_its_last_rate_and_the_losses_it_knows():
    """Rounds count from 0 again behind a restart; an epoch that was over has rounds of no steps."""
    stages = make_stages(3, [24], learning_rate=0.1, gamma=1.0, milestones=[])
    rows = metrics_of(stages, 3)
    for row in rows:
        if row["event"] == "round":
            row |= {"learning_rate": 0.3, "round": 5}
            row |= {"samples": 0, "loss": 0.0} if row["epoch"] == 1 else {}
    last = [r for r in rows if r["event"] == "round" and r["epoch"] == 2]
    rows.append({"event": "restart", "epoch": 2, "steps": 0, "samples": 0})
    rows += [row | {"round": 0, "learning_rate": 0.1} for row in last]
    figure = plots.curves_figure(rows, falling=True)
    assert texts(figure.axes[0]) == ["24 px\nto lr 0.1"]
    train, _ = figure.axes[2].lines
    assert train.get_xdata().tolist() == [1.0, 3.0]


def test_stages_of_a_longer_run_take_the_place_of_older_ones_from_where_it_went_on():
    rows = metrics_of(make_stages(2, [24, 32], learning_rate=0.1), 2)
    longer = metrics_of(make_stages(6, [24, 32], learning_rate=0.1), 0)
    rows += [row | {"from_epoch": 2} for row in longer]
    rows.append(rows[-1] | {"from_epoch": 4})  # a plan that follows the machines
    spans = plots.stage_spans(rows)
    assert [(s["first_epoch"], s["end_epoch"], s["resolution"]) for s in spans] == [
        (0, 1, 24),
        (1, 2, 32),
        (2, 3, 24),
        (3, 6, 32),
    ]


@pytest.mark.parametrize("metrics", [[], metrics_of(STAGES, 3, eval_every=0)])
def test_curves_without_an_evaluation_say_so(metrics):
    figure = plots.curves_figure(metrics)
    assert texts(figure.axes[1]) == ["no evaluation yet"]
    assert len(figure.axes[2].lines) == bool(metrics)


@pytest.mark.parametrize("resolutions", [[24, 32], [160, 224, 288]])
def test_labels_of_a_published_schedule_do_not_overlap(resolutions):
    stages = make_stages(140, resolutions, milestones=default_milestones(140), gamma=0.1)
    figure = plots.curves_figure(metrics_of(stages, 140))
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    for axes in figure.axes[:2]:
        boxes = [text.get_window_extent(renderer) for text in axes.texts]
        assert len(boxes) == len(stages)
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


@pytest.mark.parametrize(("workers", "epochs"), [(1, 1), (4, 4), (40, 140)])
def test_pictures_are_written_as_png_of_a_readable_size(tmp_path, workers, epochs):
    stages = make_stages(epochs, [24, 32])
    plans = dual_batch_plans(workers, workers // 4)
    plots.save_figure(plots.timeline_figure(stages, plans, 1), tmp_path / "plots/timeline.png")
    plots.save_figure(
        plots.curves_figure(metrics_of(stages, epochs)), tmp_path / "plots" / "curves.png"
    )
    assert sorted(file.name for file in (tmp_path / "plots").iterdir()) == [
        "curves.png",
        "timeline.png",
    ]
    for file in (tmp_path / "plots").iterdir():
        with Image.open(file) as image:
            assert image.format == "PNG"
            assert 1200 <= image.width <= 1600
            assert 200 <= image.height <= 1600


def test_picture_that_cannot_be_drawn_leaves_the_old_one_and_no_other_file(tmp_path, monkeypatch):
    path = tmp_path / "curves.png"
    plots.save_figure(plots.curves_figure([]), path)
    before = path.read_bytes()

    def fail_half_way(figure, file, **_):
        file.write(b"half")
        raise RuntimeError("broken")

    monkeypatch.setattr(Figure, "savefig", fail_half_way)
    with pytest.raises(RuntimeError, match="broken"):
        plots.save_figure(plots.curves_figure(metrics_of(STAGES, 4)), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_picture_that_cannot_be_put_in_place_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "curves.png"
    plots.save_figure(plots.curves_figure([]), path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk gone")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk gone"):
        plots.save_figure(plots.curves_figure(metrics_of(STAGES, 4)), path)
    assert path.read_bytes() == before


def test_read_metrics_drops_a_half_written_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "eval"}\n{"event": "ro')
    assert read_metrics(path) == [{"event": "eval"}]


def test_read_metrics_names_a_broken_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "eval"}\nnonsense\n{"event": "eval"}\n')
    with pytest.raises(ValueError, match="line 2 must be JSON, got 'nonsense"):
        read_metrics(path)


def test_pictures_need_nothing_but_the_metrics_file(tmp_path):
    rows = metrics_of(STAGES, 4)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(for_people(row)) + "\n" for row in rows))
    assert read_metrics(path) == rows
    plots.save_figure(plots.curves_figure(read_metrics(path)), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("epoch_s", "text"), [(5.0, "20 s"), (452.5, "30.2 min"), (45250.0, "50.3 h")]
)
def test_the_title_of_a_timeline_has_a_duration_that_can_be_read(epoch_s, text):
    plan = plan_by_hand([epoch_s] * 2)
    title = plots.timeline_figure(STAGES, {24: plan, 32: plan}, 1).get_suptitle()
    assert f"all 4 epochs: {text}; with" in title


def test_a_plan_of_joint_steps_speaks_of_global_batches():
    plan = plan_steps(1000, (60, 20), [TimeModel(1e-3, 0.02), TimeModel(3e-3, 0.02)])
    figure = plots.timeline_figure(make_stages(2, [24]), {24: plan}, 1)
    assert "split equally" in figure.get_suptitle()
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["computes on its part of each global batch", "waits for the slowest worker"]
    assert "13 joint steps, 76 or 77 samples each;" in figure.axes[0].get_title(loc="left")


def test_a_plan_that_was_remade_is_drawn_below_the_first_and_both_say_which_they_are():
    first, last = plan_by_hand([4.0, 4.0]), plan_by_hand([3.0, 2.0])
    plans = {24: first, 32: first}
    figure = plots.timeline_figure(STAGES, plans, 1, {24: (2, last)})
    titles = [axes.get_title(loc="left").split(":")[0] for axes in figure.axes]
    assert titles == [
        "24 px images, epochs 1, 3, the first plan",
        "24 px images, from epoch 3 on, the last plan",
        "32 px images, epochs 2, 4",
    ]
    assert bars(figure.axes[1], plots.SMALL, plots.LARGE) == [(0, 0.0, 3.0), (1, 0.0, 2.0)]
    assert "all 4 epochs by the first plans: 16 s" in figure.get_suptitle()


def test_the_timeline_of_one_worker_has_nothing_that_it_could_wait_for():
    figure = plots.timeline_figure(STAGES, dict.fromkeys((24, 32), plan_by_hand([5.0], 0)), 1)
    assert figure.get_suptitle() == "Predicted time of one epoch\nall 4 epochs: 20 s"
    assert not figure.legends
    assert figure.axes[0].get_title(loc="left").endswith(": 5 s an epoch of 10 steps")
    assert texts(figure.axes[0]) == ["batch 8, 100 samples, 5 s"]


def test_the_curves_of_one_worker_are_over_measured_time():
    rows = [row for row in metrics_of(STAGES, 4, virtual=True) if not row.get("worker")]
    assert plots.curves_figure(rows).axes[3].get_xlabel() == "training time (s)"


def test_a_plan_is_drawn_from_its_rows_and_once_more_where_it_was_remade(tmp_path, monkeypatch):
    drawn = []
    figure = plots.timeline_figure
    monkeypatch.setattr(
        plots, "timeline_figure", lambda *given: drawn.append(given) or figure(*given)
    )
    plans = dual_batch_plans(2, 1)
    rows = [plan_row(stage, plans[stage.resolution]) | {"event": "plan"} for stage in STAGES]
    named = {f"{resolution} px": asdict(plan) for resolution, plan in plans.items()}
    (tmp_path / "plan.json").write_text(json.dumps(named))
    (tmp_path / "config.yaml").write_text("rounds_per_epoch: 2")
    plots.draw_plan(tmp_path, rows)
    workers = [worker | {"samples": 7} for worker in rows[-1]["workers"]]
    plots.draw_plan(tmp_path, [*rows, rows[-1] | {"workers": workers, "from_epoch": 3}])
    (stages, first, rounds, latest), (*_, remade) = drawn
    assert (first, rounds, latest) == (plans, 2, {})
    spans = [(stage.first_epoch, stage.end_epoch, stage.resolution) for stage in stages]
    assert spans == [(stage.first_epoch, stage.end_epoch, stage.resolution) for stage in STAGES]
    ((resolution, (since, plan)),) = remade.items()
    assert (resolution, since) == (STAGES[-1].resolution, 3)
    assert [worker.samples for worker in plan.workers] == [7, 7]
    assert (tmp_path / "plots/plan.png").stat().st_size > 1000
