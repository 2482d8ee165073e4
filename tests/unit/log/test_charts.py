import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
from PIL import Image

from dbsl.extras import charts
from dbsl.extras.charts import Charts, start_trackers
from dbsl.log.rows import STEPS, WORKERS


class Recorder:
    """A tracker that notes what it is told."""

    def __init__(self, name):
        self.name, self.records, self.defined, self.summary = name, [], {}, {}
        self.tracker = self

    def log(self, values, step=None):
        self.records.append((step, values))

    def define_metric(self, name, **settings):
        self.defined[name] = settings


def charts_of(*trackers, workers=4):
    return Charts(SimpleNamespace(trackers=trackers), workers, "run")


def test_a_tracker_that_knows_nothing_else_gets_numbers_over_thousandths_of_an_epoch():
    tracker = Recorder("mlflow")
    shown = charts_of(tracker)
    shown.record({"train/loss": 2.0}, 1)
    shown.workers(STEPS, {3: {"loss": 1.5, "gradient_norm": math.inf}}, 0.25)
    assert tracker.records == [
        (1000, {"epoch": 1, "train/loss": 2.0}),
        (250, {"epoch": 0.25, "steps/loss/3": 1.5}),
    ]


def test_wandb_hides_figures_of_single_workers_and_draws_all_in_one_chart():
    tracker = Recorder("wandb")
    shown = charts_of(tracker)
    for worker in (1, 0):
        for epochs in (0.25, 0.5):
            shown.workers(STEPS, {worker: {"loss": 2.0 + worker}}, epochs)
    shown.workers(WORKERS, {0: {"share": 0.4, "samples": 40}, 1: {"share": 0.6, "samples": 60}}, 1)
    hidden = {name for name, settings in tracker.defined.items() if settings.get("hidden")}
    assert hidden == {
        *("epoch", "steps/loss/0", "steps/loss/1"),
        *(f"workers/{name}/{worker}" for name in ("share", "samples") for worker in (0, 1)),
    }
    assert tracker.defined["eval/accuracy"]["summary"] == "max,last"
    assert not any("all " in name for _, values in tracker.records for name in values)
    shown.close()
    _, values = tracker.records[-1]
    assert values.keys() == {"epoch", "all steps: loss", "all workers: share"}
    table = values["all steps: loss"].table
    assert sorted(table.data) == [
        *([0.25, "worker 0", 2.0], [0.25, "worker 1", 3.0]),
        *([0.5, "worker 0", 2.0], [0.5, "worker 1", 3.0]),
    ]


def test_wandb_charts_of_all_workers_come_ever_more_seldom_and_stay_small(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(charts.time, "monotonic", lambda: now[0])
    tracker = Recorder("wandb")
    shown = charts_of(tracker, workers=40)
    sent_at = []
    for step in range(6000):
        now[0] += 1.0
        shown.workers(STEPS, {step % 40: {"loss": 1.0}}, step / 6000)
        if "all steps: loss" in tracker.records[-1][1]:
            sent_at.append(now[0])
            rows = tracker.records[-1][1]["all steps: loss"].table.data
            assert len(rows) <= 10 * (charts._POINTS + 1)
    gaps = [after - before for before, after in pairwise(sent_at)]
    assert sent_at[0] == 60
    assert min(gaps) >= 60
    assert gaps == sorted(gaps)
    assert len(sent_at) < 50
    assert len({row[1] for row in rows}) == 10
    assert {"worker 0", "worker 39"} <= {row[1] for row in rows}


def test_a_resumed_run_keeps_the_lines_of_the_sessions_before_in_wandbs_charts():
    tracker = Recorder("wandb")
    shown = charts_of(tracker)
    line = {"event": "step", "worker": 1, "epoch": 0, "progress": 0.5, "loss": 2.0, "kd": 0.5}
    nothing = dict.fromkeys(("learning_rate", "gradient_norm", "images_per_s", "memory_gib"))
    round_ = {"event": "round", "worker": 1, "epoch": 0, "round": 0, "resolution": 24}
    round_ |= {"local_batch_size": 8, "samples": 20, "steps": 3, "time_s": 1.0, "loss": None}
    round_ |= {"kd": 0.25}
    round_ |= {"merge_weight": 1.0, "compute_time_s": 2.0, "virtual_time_s": 2.0}
    times = {"event": "times", "epoch": 0}
    begun = round_ | {"epoch": 1}  # is recorded as a whole when it is over
    shown.resume([{"event": "plan"}, line | nothing, round_, times, begun])
    shown.close()
    (_, values), *_ = tracker.records
    assert values["all steps: loss"].table.data == [[0.5, "worker 1", 2.0]]
    assert values["all steps: kd"].table.data == [[0.5, "worker 1", 0.5]]  # a figure of the loss
    assert values["all workers: kd"].table.data == [[1, "worker 1", 0.25]]
    assert values["all workers: local_batch_size"].table.data == [[1, "worker 1", 8]]
    assert values["all workers: share"].table.data == [[1, "worker 1", 1.0]]


def test_a_table_and_pictures_go_once_to_the_trackers_of_a_resumed_run(tmp_path):
    class Taker(Recorder):
        def log_table(self, name, columns, data):
            self.records.append(name)

        def log_images(self, values, step=None):
            self.records += values

    Image.new("RGB", (30, 20)).save(tmp_path / "plan.png")
    for again in (False, True):
        before, new = Taker("clearml"), Taker("aim")
        shown = Charts(SimpleNamespace(trackers=[before, new]), 2, "run", {"clearml"})
        shown.table("plan/table", [{"worker": 0}], again=again)
        shown.images({"plots/plan": tmp_path / "plan.png"}, 0, again=again)
        assert new.records == ["plan/table", "plots/plan"]
        assert before.records == (new.records if again else [])


def test_tensorboard_forgets_what_a_killed_session_showed_after_its_checkpoint(
    tmp_path, accelerator
):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    line = dict.fromkeys(("learning_rate", "gradient_norm", "images_per_s", "memory_gib"))
    line |= {"event": "step", "worker": 0, "epoch": 1, "progress": 0.25, "loss": 2.0}
    for session in range(2):
        before = {"tensorboard": ""} if session else {}
        start_trackers(accelerator, "tensorboard", tmp_path, "run", {}, resumed=before, epochs=1)
        shown = Charts(accelerator, 1, "run", before)
        if session:
            shown.resume([line])
        for epochs, loss in ((1.25, 2.0), (1.75, 3.0))[session:]:
            shown.workers(STEPS, {0: {"loss": loss + session}}, epochs)
        for epochs in (1, 2)[session:]:
            shown.record({"train/loss": epochs + session}, epochs)
        shown.close()
        accelerator.end_training()

    def points(folder, tag):
        found = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard" / folder)).Reload()
        return [(point.step, point.value) for point in found.Scalars(tag)]

    assert points("worker-0", "steps/loss") == [(1250, 2.0), (1750, 4.0)]
    assert points("", "train/loss") == [(1000, 1.0), (2000, 3.0)]


def test_trackio_has_a_run_for_each_worker_in_a_group_and_table_and_pictures(
    tmp_path, accelerator, monkeypatch
):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio", reason="an optional tracker")
    Image.new("RGB", (30, 20), "red").save(tmp_path / "plan.png")
    start_trackers(accelerator, "trackio", tmp_path, "first", {"lr": 0.1})
    shown = Charts(accelerator, 2, "first")
    shown.table("plan/table", [{"worker": 0, "samples": 40}])
    shown.images({"plots/plan": tmp_path / "plan.png"}, 0)
    shown.workers(STEPS, {0: {"loss": 2.0}}, 0.5)
    shown.workers(STEPS, {1: {"loss": 3.0}}, 0.5)
    shown.record({"train/loss": 2.5}, 1)
    shown.close()
    accelerator.end_training()
    api = trackio.Api()
    runs = {run.name: run for run in api.runs("dbsl")}
    assert runs.keys() == {"first", "first worker 0", "first worker 1"}
    read = trackio.sqlite_storage.SQLiteStorage.get_logs
    (point,) = read("dbsl", "first worker 1")
    assert (point["step"], point["epoch"], point["steps/loss"]) == (500, 0.5, 3.0)
    own = {
        name: (row["step"], value) for row in read("dbsl", "first") for name, value in row.items()
    }
    assert own["plan/table"][1]["_value"] == [{"worker": 0, "samples": 40}]
    assert own["plots/plan"][1]["_type"] == "trackio.image"
    assert own["train/loss"] == (1000, 2.5)
