import json
import re
import shlex
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.state import PartialState
from accelerate.tracking import GeneralTracker
from accelerate.utils import LoggerType
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dbsl.base.errors import SettingError
from dbsl.extras import charts
from dbsl.extras.charts import Charts, tracker_names
from dbsl.log.rows import PLAN_TOTALS
from tests.helpers import a_round, run

WORKERS = [
    {"worker": 0, "local_batch_size": 4, "samples": 40},
    {"worker": 1, "local_batch_size": 8, "samples": 60},
]
PLAN = {"event": "plan", "resolution": 24, "workers": WORKERS} | dict.fromkeys(PLAN_TOTALS, 0.5)
EVAL = {"event": "eval", "epoch": 0, "resolution": 24, "accuracy": 0.75, "loss": 0.5, "samples": 90}
EVAL |= {"time_s": 0.25, "train_time_s": 10.0, "learning_rate": 0.1, "train_resolution": 24}
EVAL["of_cats"] = 0.25  # a metric of your own
NOISE = {"event": "noise", "epoch": 0, "resolution": 24, "b_simple": 30.0, "high": None}


def step(worker, progress, loss, **figures):
    row = dict.fromkeys(("learning_rate", "gradient_norm", "images_per_s", "memory_gib"))
    row |= {"event": "step", "worker": worker, "epoch": 0, "progress": progress, "loss": loss}
    return row | figures


def epoch(number=0):
    usual = {"epoch": number, "resolution": 24, "learning_rate": 0.1}
    rows = [a_round(loss=2.0 + own["worker"], **usual | own) for own in WORKERS]
    times = {"event": "times", "epoch": number, "resolution": 24, "images_per_s": 10.0}
    times |= {"large_workers_time_s": 1.0, "workers_wait_time_s": {"0": 0.0}, "train_time_s": 10.0}
    return [*rows, times]


class Recorder(GeneralTracker):
    """A tracker that notes what it is told."""

    name, requires_logging_directory, main_process_only = "mlflow", False, False
    tracker = None

    def __init__(self, project, **own):
        super().__init__()
        self.records, self.own, self.stored, self.tables, self.pictures = [], own, None, [], []

    def store_init_configuration(self, values):
        self.stored = values

    def log(self, values, step=None):
        self.records.append((step, values))

    def log_table(self, name, columns, data):
        self.tables.append(name)

    def log_images(self, values, step=None):
        self.pictures += values

    def finish(self):
        self.records.append("finished")


@pytest.fixture(autouse=True)
def alone():
    PartialState(cpu=True)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "first run"
    (folder / "plots").mkdir(parents=True)
    (folder / "config.yaml").write_text("lr: 0.1\nresolutions: [24, 32]\nresolved: {workers: 2}\n")
    (folder / "summary.json").write_text('{"best_accuracy": 0.75, "epochs": 1}')
    Image.new("RGB", (30, 20), "red").save(folder / "plots/plan.png")
    return folder


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setitem(charts.LOGGER_TYPE_TO_CLASS, "mlflow", Recorder)


def show(folder, *names, rows=(), before=(PLAN,), state=None):
    shown = Charts(names)
    if state:
        shown.load_state_dict(state, same=True)
    shown.report(folder, list(before))
    for row in rows:
        shown.row(row)
    return shown


def test_trackers_are_those_that_accelerate_knows_and_that_are_installed(monkeypatch):
    names = sorted({*map(str, LoggerType)} - {"all"})
    for name in names:
        monkeypatch.setattr(charts, "get_available_trackers", lambda: [LoggerType(name)])  # noqa: B023
        assert tracker_names(name) == tracker_names("all") == tracker_names(f"{name},{name}")
        assert tracker_names(name) == (name,)
    assert tracker_names("none") == ()
    known = "report_to must be none, all or trackers .aim, clearml, .*wandb. with commas.*got"
    missing = r"report_to must name an installed tracker, got 'aim' \(pip install aim\)"
    refused = dict.fromkeys(("wand", "none,wandb", "all,wandb", ""), known) | {"aim": missing}
    for given, message in refused.items():
        with pytest.raises(ValueError, match=f"^{message}[^\n]*$"):
            tracker_names(given)


@pytest.mark.usefixtures("recorder")
def test_a_plan_that_is_drawn_once_the_trackers_are_there_is_sent_with_the_first_row(folder):
    plan = folder / "plots/plan.png"
    content = plan.read_bytes()
    plan.unlink()
    shown = show(folder, "mlflow")
    plan.write_bytes(content)
    for row in epoch():
        shown.row(row)
    assert shown._shown[0].tracker.pictures == ["plots/plan"]


@pytest.mark.usefixtures("recorder")
def test_a_tracker_gets_settings_rows_pictures_and_a_table_over_thousandths_of_an_epoch(folder):
    rows = [step(1, 0.25, 1.5, kd=0.5), *epoch(), EVAL, NOISE, {"event": "lost", "worker": 1}]
    shown = show(folder, "mlflow", rows=rows)
    (tracker,) = (own.tracker for own in shown._shown)
    assert tracker.own == {"run_name": "first run"}
    assert tracker.stored == {"lr": 0.1, "resolutions": "24,32", "workers": 2}
    assert (tracker.tables, tracker.pictures) == (["plan/table"], ["plots/plan"])
    (first, line), (second, train), (_, workers), (_, found), (_, noise) = tracker.records
    assert (first, line) == (250, {"epoch": 0.25, "steps/loss/1": 1.5, "steps/kd/1": 0.5})
    assert second == 1000
    assert train["train/loss"] == pytest.approx(2.6)  # the mean over samples
    assert (train["train/learning_rate"], train["train/images_per_s"]) == (0.1, 10.0)
    assert (train["time/large_workers_s"], train["time/train_s"]) == (1.0, 10.0)
    assert train["plan/idle_share"] == 0.5
    assert not any("train_time" in name or "wait_time" in name for name in train)
    assert (workers["workers/share/1"], workers["workers/loss/0"]) == (0.6, 2.0)
    assert found.pop("eval/of_cats") == 0.25
    assert found == {"epoch": 1, "eval/accuracy": 0.75, "eval/loss": 0.5, "time/eval_s": 0.25}
    assert noise == {"epoch": 1, "noise/b_simple": 30.0}
    shown.close(None)
    assert tracker.records[-1] == "finished"
    assert tracker.pictures == ["plots/plan"] * 2


@pytest.mark.usefixtures("recorder")
def test_a_resumed_run_goes_on_in_the_charts_of_before_and_shows_nothing_twice(folder, monkeypatch):
    before = [PLAN, *epoch()]
    shown = show(folder, "mlflow", before=before, state={"trackers": {"mlflow": ""}})
    (tracker,) = (own.tracker for own in shown._shown)
    assert (tracker.records, tracker.tables, tracker.pictures) == ([], [], [])
    assert shown.state_dict() == {"trackers": {"mlflow": ""}}
    monkeypatch.setitem(charts.LOGGER_TYPE_TO_CLASS, "comet_ml", Recorder)
    other = show(folder, "comet_ml", before=before, state=shown.state_dict())
    assert other.state_dict()["trackers"].keys() == {"comet_ml", "mlflow"}
    monkeypatch.setattr(Recorder, "finish", lambda self: 1 / 0)
    shown.close(ValueError)  # where the run has failed, a tracker does not hide why


def test_tensorboard_forgets_what_a_killed_session_showed_after_its_checkpoint(folder):
    steps = [step(0, progress, 3.0) | {"epoch": 1} for progress in (0.25, 0.5)]
    first = show(folder, "tensorboard", rows=[*epoch(), *steps, *epoch(1)])
    first.close(None)
    time.sleep(0.01)
    changed = [row | {"loss": 5.0} if row["event"] == "round" else row for row in epoch(1)]
    state, kept = {"trackers": {"tensorboard": ""}}, [PLAN, *epoch(), steps[0]]
    second = show(folder, "tensorboard", before=kept, state=state, rows=changed)
    second.close(None)
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [point.step for point in events.Scalars("steps/loss/0")] == [1250]
    points = [(point.step, point.value) for point in events.Scalars("train/loss")]
    assert points == [(1000, pytest.approx(2.6)), (2000, 5.0)]
    assert events.Images("plots/plan")[0].width == 30
    (hparams, *_) = (folder / "tensorboard").glob("*/hparams.yml")
    assert "resolutions: 24,32" in hparams.read_text()


@pytest.mark.usefixtures("no_login")
def test_wandb_without_a_login_runs_offline_and_says_how_to_upload(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder.parent)
    shown = show(folder, "wandb", rows=[*epoch(), EVAL])
    (said,) = capsys.readouterr().out.splitlines()
    command = re.fullmatch(r"wandb: offline \(no login\); to upload: (.*)", said)[1]
    program, verb, path = shlex.split(command)
    assert (program, verb, Path(path)) == ("wandb", "sync", Path("first run/wandb"))
    run = shown._shown[0].tracker.tracker
    shown.end(folder)
    assert (run.project, run.name) == ("dbsl", "first run")
    assert run.config["resolutions"] == "24,32"
    assert dict(run.summary["eval/accuracy"]) == {"max": 0.75, "last": 0.75}
    assert run.summary["workers/samples/1"] == 60
    assert run.summary["best_accuracy"] == 0.75
    shown.close(None)
    assert list(Path(path).glob("offline-*/run-*.wandb"))
    again = show(folder, "wandb", state={"trackers": {"wandb": run.id}})
    assert again._shown[0].id == run.id
    again.close(None)
    assert "wandb" not in capsys.readouterr().err


OF_USER = {"PROJECT": "mine", "NAME": "called", "RUN_GROUP": "group", "JOB_TYPE": "arm"}


@pytest.mark.parametrize("mode", ["disabled", "offline"])
def test_wandb_variables_of_the_user_are_honoured(folder, no_login, monkeypatch, capsys, mode):
    for name, value in (OF_USER | {"TAGS": "a,b", "MODE": mode}).items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    shown = show(folder, "wandb", rows=epoch())
    run, offline = shown._shown[0].tracker.tracker, mode == "offline"
    if offline:
        assert [run.project, run.name, run.group, run.job_type] == [*OF_USER.values()]
        assert run.tags == ("a", "b")
    shown.close(None)
    printed = capsys.readouterr()
    assert (folder / "wandb").exists() == offline
    assert ("wandb: offline (WANDB_MODE=offline)" in printed.out) == offline
    assert printed.err == ""


class RefusesKeys(BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_error(401)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("there", [True, False])
def test_wandb_whose_server_is_not_there_or_refuses_the_key_runs_offline(
    folder, no_login, monkeypatch, capsys, there
):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    with ThreadingHTTPServer(("127.0.0.1", 0), RefusesKeys) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("WANDB_BASE_URL", url)
        if there:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        else:
            server.server_close()
        shown = show(folder, "wandb")
        if there:
            server.shutdown()
        said = "wandb: offline (" + f"no answer from {url})" * (not there)
        assert said in capsys.readouterr().out
        assert shown._shown[0].tracker.tracker.offline
        shown.close(None)


@pytest.fixture
def wandb(monkeypatch):
    """As much of W&B as charts use."""
    tracker, defined = Recorder("dbsl"), {}
    define_metric = lambda name, **settings: defined.update({name: settings})  # noqa: E731
    tracker.tracker = SimpleNamespace(id="own", define_metric=define_metric, defined=defined)
    monkeypatch.setattr(charts, "start_wandb", lambda *_: tracker)
    return tracker


def test_wandb_hides_figures_of_single_workers_and_draws_all_in_one_chart(folder, wandb):
    before = [PLAN, step(0, 0.25, 2.0), step(1, 0.25, 3.0)]
    shown = show(folder, "wandb", before=before, rows=[step(1, 0.5, 4.0, kd=0.5), *epoch()])
    hidden = {name for name, settings in wandb.tracker.defined.items() if settings.get("hidden")}
    assert {"epoch", "steps/loss/1", "workers/share/0", "workers/samples/1"} <= hidden
    assert wandb.tracker.defined["eval/accuracy"]["summary"] == "max,last"
    assert not any("all " in name for _, values in wandb.records for name in values)
    shown.close(None)
    _, values = wandb.records[-2]
    assert {"all steps: loss", "all steps: kd", "all workers: share"} <= values.keys()
    assert "all workers: samples" not in values
    points = [[0.25, "worker 0", 2.0], [0.25, "worker 1", 3.0], [0.5, "worker 1", 4.0]]
    assert sorted(values["all steps: loss"].table.data) == points


def test_wandb_charts_of_all_workers_come_ever_more_seldom_and_stay_small(
    folder, wandb, monkeypatch
):
    now = [0.0]
    monkeypatch.setattr(charts.time, "monotonic", lambda: now[0])
    many = PLAN | {"workers": [WORKERS[0] | {"worker": n} for n in range(40)]}
    shown, sent_at = show(folder, "wandb", before=[many]), []
    for number in range(6000):
        now[0] += 1.0
        shown.row(step(number % 40, number / 6000, 1.0))
        if line := wandb.records[-1][1].get("all steps: loss"):
            sent_at.append(now[0])
            workers = [worker for _, worker, _ in line.table.data]
            assert len(workers) <= 10 * (charts._POINTS + 1)
    gaps = [after - before for before, after in pairwise(sent_at)]
    assert (sent_at[0], min(gaps)) == (60, 60)
    assert gaps == sorted(gaps)
    assert len(sent_at) < 50
    assert len({*workers}) == 10
    assert {"worker 0", "worker 39"} <= {*workers}


def test_a_finished_run_is_drawn_and_sent_again_from_its_folder_alone(tmp_path, pictures):
    from dbsl.tools.report import main

    run(tmp_path / "run", epochs=1, workers=1, local_batch_sizes=(8,))
    left = ("plots/plan.png", "plots/accuracy.png", "plots/workers.png", "README.md")
    before = [(tmp_path / "run" / name).read_bytes() for name in left]
    for name in left:
        (tmp_path / "run" / name).unlink()
    main([str(tmp_path / "run"), "--report-to", "tensorboard"])
    assert [(tmp_path / "run" / name).read_bytes() for name in left] == before
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    (point,) = events.Scalars("eval/accuracy")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert point.value == pytest.approx(summary["final_accuracy"])
    with pytest.raises(ValueError, match="run must be the folder of a finished run, got"):
        main([str(tmp_path)])
    with pytest.raises(SettingError, match=r"^the following arguments are required: run$"):
        main([])
    damages = [("summary.json", "{}"), ("metrics.jsonl", ""), ("config.yaml", "a: [")]
    damages += [("config.yaml", ""), ("plan.json", '{"16 px": '), ("plan.json", None)]
    damages += [("metrics.jsonl", None), ("metrics.jsonl", "{}\n"), ("metrics.jsonl", "[]\n")]
    damages += [("plan.json", "[1]"), ("config.yaml", "epochs: 2")]
    for name, text in damages:
        whole = (tmp_path / "run" / name).read_text()
        if text is None:
            (tmp_path / "run" / name).unlink()
        else:
            (tmp_path / "run" / name).write_text(text)
        with pytest.raises(SettingError, match=str(tmp_path)):
            main([str(tmp_path / "run")])
        (tmp_path / "run" / name).write_text(whole)


def test_a_tracker_that_raises_is_left_out_and_the_others_go_on(folder, monkeypatch, capsys):
    class Broken(Recorder):
        name = "comet_ml"

        def log(self, values, step=None):
            raise ConnectionError("the server is gone")

    monkeypatch.setitem(charts.LOGGER_TYPE_TO_CLASS, "mlflow", Recorder)
    monkeypatch.setitem(charts.LOGGER_TYPE_TO_CLASS, "comet_ml", Broken)
    shown = show(folder, "comet_ml", "mlflow")
    (recorder,) = (one.tracker for one in shown._shown if one.tracker.name == "mlflow")
    for row in epoch():
        shown.row(row)
    shown.end(folder)
    shown.close(None)
    assert recorder.records[-1] == "finished"
    assert any("train/loss" in values for _, values in recorder.records[:-1])
    said = capsys.readouterr()
    told = "warning: comet_ml gets nothing from now on (the server is gone)\n"
    assert (said.out + said.err).count(told) == 1
    assert shown.state_dict()["trackers"].keys() == {"comet_ml", "mlflow"}  # to go on there
