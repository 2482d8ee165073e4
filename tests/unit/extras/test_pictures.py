import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from dbsl.base.files import save_figure
from dbsl.extras import pictures
from dbsl.extras.pictures import MAX_LINES, curves_figure, timeline_figure, worker_values
from dbsl.log.rows import for_people, plan_row, read_metrics
from dbsl.plan.solve import TimeModel, plan_dual_batch, plan_steps
from dbsl.plan.stages import make_stages
from dbsl.plan.types import Plan, WorkerPlan
from tests.helpers import a_round

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
    names = ("first_epoch", "end_epoch", "resolution", "learning_rate")
    rows = [{"event": "plan"} | {n: getattr(stage, n) for n in names} for stage in stages]
    for epoch in range(epochs):
        for worker, samples in enumerate((30, 10)):
            loss = 4.0 - epoch * 0.01 + worker
            rows.append(a_round(worker, epoch, samples=samples, loss=loss))
        if eval_every and (epoch + 1) % eval_every == 0:
            row = {"event": "eval", "epoch": epoch, "accuracy": 0.5 + epoch / 1000}
            row |= {"loss": 3.0 - epoch * 0.01, "train_time_s": 10.0 * (epoch + 1)}
            rows.append(row | ({"virtual_time_s": 2.0 * (epoch + 1)} if virtual else {}))
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
    named = [title.partition(":")[0] for title in titles(figure)]
    assert named == ["24 px images, epochs 1, 3", "32 px images, epochs 2, 4"]


def test_timeline_two_rounds_halve_the_bars_and_idle_time_fills_each_round():
    plan = plan_by_hand([4.0, 1.0])
    (axes,) = timeline_figure(make_stages(1, [24]), {24: plan}, 2).axes
    computing = [(0, 0.0, 2.0), (0, 2.0, 2.0), (1, 0.0, 0.5), (1, 2.0, 0.5)]
    assert bars(axes, *COMPUTING) == computing
    assert bars(axes, pictures.IDLE) == [(1, 0.5, 1.5), (1, 2.5, 1.5)]
    assert [text.partition("idle ")[2] for text in texts(axes)] == ["0.0 %", "75.0 %"]


MODEL = TimeModel(1e-3, 0.02)
WORKERS = [f"worker {number}" for number in range(40)]


@pytest.mark.parametrize(
    ("plan", "rows", "said"),
    [
        (plan_dual_batch(40_000, 40, 10, 50, MODEL), ["workers 0-9", "workers 10-39"], "4 epochs"),
        (plan_by_hand([1 + i / 100 for i in range(40)]), WORKERS[:16], "first 16 of 40 rows"),
        (plan_by_hand([452.5] * 2), WORKERS[:2], "all 4 epochs: 30.2 min; with all batches large"),
        (plan_steps(1000, (60, 20), [MODEL] * 2), WORKERS[:2], "each global batch split equally"),
        (plan_by_hand([5.0], 0), WORKERS[:1], "one epoch\nall 4 epochs: 20 s\n"),
    ],
)
def test_a_timeline_has_a_row_for_each_kind_of_worker_and_says_what_the_plan_is(plan, rows, said):
    figure = timeline_figure(make_stages(4, [24]), {24: plan}, 1)
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == rows
    assert len(bars(axes, *COMPUTING)) == len(rows)
    assert said in "\n".join([figure.get_suptitle(), *titles(figure)])
    assert bool(figure.legends) == (len(plan.workers) > 1)


@pytest.mark.usefixtures("pictures")
def test_a_plan_is_drawn_from_plan_json_and_its_rows(tmp_path, monkeypatch):
    drawn = []
    whole = pictures.timeline_figure
    monkeypatch.setattr(pictures, "timeline_figure", lambda *g: drawn.append(g) or whole(*g))
    plans = dual_batch_plans(2, 1)
    rows = [plan_row(stage, plans[stage.resolution]) | {"event": "plan"} for stage in STAGES]
    lines = [json.dumps(for_people(row)) + "\n" for row in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    named = {f"{resolution} px": asdict(plan) for resolution, plan in plans.items()}
    (tmp_path / "plan.json").write_text(json.dumps(named))
    (tmp_path / "config.yaml").write_text("rounds_per_epoch: 2\nepochs: 4")
    pictures.Pictures().report(tmp_path, rows[:1])  # the file has all
    ((stages, *given),) = drawn
    assert given == [plans, 2]
    spans = [(stage.first_epoch, stage.end_epoch, stage.resolution) for stage in stages]
    assert spans == [(stage.first_epoch, stage.end_epoch, stage.resolution) for stage in STAGES]
    with Image.open(tmp_path / "plots/plan.png") as image:
        assert image.width >= 900
    (tmp_path / "plan.json").write_text(json.dumps({"32 px": named["32 px"]}))
    (tmp_path / "config.yaml").write_text("rounds_per_epoch: 2\nepochs: 3")
    pictures.Pictures().report(tmp_path, rows[:1])  # resumed with fewer resolutions and epochs
    (stages, kept, _), spans = drawn[1], [span for span in spans if span[2] == 32]
    assert kept.keys() == {32}
    left = [(first, min(end, 3), side) for first, end, side in spans if first < 3]
    assert [(s.first_epoch, s.end_epoch, s.resolution) for s in stages] == left


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
    named = ["24 px\nlr 0.1", "32 px\nlr 0.1", "24 px\nlr 0.05", "32 px\nlr 0.05"]
    assert [text.replace(", ", "\n") for text in texts(accuracy)] == named
    assert [(p.get_x(), p.get_width()) for p in loss.patches] == [(1, 1), (3, 1)]  # every other


def test_one_exploded_loss_is_named_at_the_top_and_the_others_keep_their_axis():
    rows = metrics_of(STAGES, 4)
    rows[-1]["loss"] = 6e35
    for axes, x in zip(curves_figure(rows).axes[2:], (4, 40), strict=True):
        low, high = axes.get_ylim()
        assert low < 2.97
        assert 4.25 < high < 5
        marks = [line for line in axes.lines if line.get_marker() == "^" and len(line.get_xdata())]
        assert [line.get_xdata().tolist() for line in marks] == [[x]]
        assert [text.strip() for text in texts(axes)] == ["6.0e35"]


def test_figures_of_the_loss_function_and_averaged_weights_have_curves_with_gaps():
    rows = metrics_of(STAGES, 4)
    for row in rows:
        if row["event"] == "round" and row["epoch"]:
            row["kd"] = None if row["epoch"] == 3 else row["samples"]
            row["loss"] = None if row["epoch"] == 1 else row["loss"]
        if row["event"] == "eval":
            row |= {"ema_accuracy": 0.75, "ema_loss": 1.5, "new_accuracy": 0.5, "new_loss": 2.0}
    accuracy, _, loss, _ = curves_figure(rows).axes
    assert len({line.get_color() for line in loss.lines}) == len(loss.lines) == 5
    mean = (30 * 30 + 10 * 10) / 40
    drawn = {line.get_label(): line.get_ydata() for line in loss.lines}
    kd = [math.nan, mean, mean, math.nan]
    assert drawn["training, kd"] == pytest.approx(kd, nan_ok=True)
    assert np.isnan(drawn["training, mean of the epoch"]).tolist() == [False, True, False, False]
    assert drawn["evaluation, averaged weights"].tolist() == [1.5] * 4
    assert accuracy.lines[-2].get_ydata() == pytest.approx([75] * 4)


def test_curves_of_one_worker_have_measured_time_and_the_losses_that_are_known():
    """An epoch that was over when others went on has rounds of no steps."""
    rows = metrics_of(make_stages(3, [24, 32], milestones=[]), 3, virtual=True)
    rows = [row for row in rows if not row.get("worker")]
    for row in rows:
        if row["event"] == "round" and row["epoch"] == 1:
            row |= {"samples": 0, "loss": 0.0}
    figure = curves_figure(rows, falling=True)
    assert figure.axes[3].get_xlabel() == "training time (s)"
    assert texts(figure.axes[0]) == ["24 px", "32 px"]  # its rate has no steps
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


def test_picture_that_cannot_be_drawn_leaves_the_old_one_alone(tmp_path, monkeypatch):
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
    with pytest.raises(ValueError, match="line 2 must be a row in JSON, got 'nonsense"):
        read_metrics(path)


def rounds(workers, epochs, per_epoch=1):
    names = ("local_batch_size", "samples", "compute_time_s", "time_s", "predicted_time_s")
    of_worker = [
        dict(zip(names, (8 + w, 10 * (w + 1), 2.0 + w, 3.0 + w, 1.0 + w), strict=True))
        for w in range(workers)
    ]
    return [
        a_round(worker, epoch, round=number, wait_time_s=0.5, **own)
        for epoch in range(epochs)
        for worker, own in enumerate(of_worker)
        for number in range(per_epoch)
    ]


def test_values_are_sums_over_rounds_and_shares_of_the_epoch():
    rows = rounds(3, 2, per_epoch=2)
    epochs, values = worker_values(rows)
    assert epochs == [1, 2]
    assert values["local_batch_size"].tolist() == [[8, 8], [9, 9], [10, 10]]
    assert values["compute_time_s"][:, 0].tolist() == [4, 6, 8]
    assert values["wait_time_s"][:, 1].tolist() == [1, 1, 1]
    assert values["share"][:, 0] == pytest.approx([100 / 6, 200 / 6, 300 / 6])
    _, values = worker_values([row for row in rows if (row["worker"], row["epoch"]) != (1, 1)])
    assert np.isnan(values["compute_time_s"][1, 1])  # it has not finished its epoch
    assert values["share"][0] == pytest.approx([100 / 6] * 2)  # nobody is given more meanwhile


def test_joint_steps_of_workers_before_are_neither_a_workers_share_nor_nobodys():
    rows = [r for r in rounds(2, 2, per_epoch=2) if (r["epoch"], r["round"]) != (1, 0)]
    rows.append({"event": "restart", "epoch": 1, "steps": 3, "samples": 30})
    _, values = worker_values(rows)
    assert values["nobody"].tolist() == [0, 0]
    assert np.nansum(values["share"], axis=0).tolist() == pytest.approx([100, 50])
    labels = pictures.worker_figure(rows).axes[1].get_legend_handles_labels()[1]
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
    assert pictures.worker_marks(rows) == [("lost", 1, 6), ("joined", 1, 8)]
    axes = pictures.worker_figure(rows).axes[1]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([0, 0, 0, 0, 0, 20, 20, 0])
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    assert sorted(named) == ["joined", "lost", "nobody"]


@pytest.mark.parametrize("workers", [1, 2, MAX_LINES, MAX_LINES + 1])
def test_every_worker_has_a_line_or_all_have_a_range(workers):
    """In simulated runs, which have computing twice: measured, and on the cluster's clock."""
    figure = pictures.worker_figure([row | {"virtual_time_s": 1.0} for row in rounds(workers, 3)])
    assert len(figure.axes) == (5 if workers > 1 else 2)
    for axes in figure.axes:
        planned = [line.get_ydata().tolist() for line in axes.lines if line.get_linestyle() == ":"]
        assert len(axes.lines) - len(planned) == (workers if workers <= MAX_LINES else 1)
        assert len(axes.collections) == (workers > MAX_LINES)
        if workers == 2:
            assert planned == ([[1] * 3, [2] * 3] if "measured" in axes.get_ylabel() else [])
