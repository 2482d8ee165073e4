import json
import re
import shlex
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from accelerate.state import PartialState
from accelerate.tracking import GeneralTracker
from accelerate.utils import LoggerType
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dbsl.extras import charts
from dbsl.extras.charts import Charts, tracker_names
from dbsl.log import rows as log_rows
from tests.helpers import a_round, run

WORKERS = [
    {"worker": 0, "local_batch_size": 4, "samples": 40},
    {"worker": 1, "local_batch_size": 8, "samples": 60},
]
PLANNED = [worker | {"predicted_time_s": 1.0, "small": False} for worker in WORKERS]
PLAN = {"event": "plan", "resolution": 24, "workers": PLANNED, "epoch_time_s": 1.0}
PLAN |= {"first_epoch": 0, "end_epoch": 1}
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
        self.records, self.stored = [], None

    def store_init_configuration(self, values):
        self.stored = values

    def log(self, values, step=None):
        self.records.append((step, values))

    def finish(self):
        self.records.append("finished")


@pytest.fixture(autouse=True)
def alone():
    PartialState(cpu=True)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "first run"
    folder.mkdir()
    (folder / "config.yaml").write_text("lr: 0.1\nresolutions: [24, 32]\nfound: {workers: 2}\n")
    (folder / "summary.json").write_text('{"best_accuracy": 0.75, "epochs": 1}')
    rows = [json.dumps(log_rows.for_people(row)) for row in (PLAN, *epoch(), EVAL)]
    (folder / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))
    return folder


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setitem(charts.LOGGER_TYPE_TO_CLASS, "mlflow", Recorder)


def show(folder, *names, rows=(), before=(PLAN,), state=None):
    shown = Charts(names)
    if state:
        shown.begin(None, state, same=True)
    context = shown.report(folder, list(before))
    shown.row = context.__enter__()
    shown.close = lambda kind: context.__exit__(kind, kind and kind(), None)
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


@pytest.mark.usefixtures("recorder", "pictures")
def test_a_tracker_gets_settings_and_rows_over_thousandths_of_an_epoch(folder):
    rows = [step(1, 0.25, 1.5, kd=0.5), *epoch(), EVAL, NOISE, {"event": "lost", "worker": 1}]
    shown = show(folder, "mlflow", rows=rows)
    (tracker,) = shown._trackers
    assert tracker.stored == {"lr": 0.1, "resolutions": "24,32", "workers": 2}
    (first, line), (second, train), (_, found), (_, noise) = tracker.records
    assert (first, line) == (250, {"epoch": 0.25, "worker 1/loss": 1.5, "worker 1/kd": 0.5})
    assert second == 1000
    assert train["train/loss"] == pytest.approx(2.6)  # the mean over samples
    assert (train["train/learning_rate"], train["train/images_per_s"]) == (0.1, 10.0)
    assert (train["time/large_workers_s"], train["time/train_s"]) == (1.0, 10.0)
    assert (train["worker 1/share"], train["worker 0/local_batch_size"]) == (0.6, 4)
    assert not any("train_time" in name for name in train)
    assert found.pop("eval/of_cats") == 0.25
    assert found == {"epoch": 1, "eval/accuracy": 0.75, "eval/loss": 0.5, "time/eval_s": 0.25}
    assert noise == {"epoch": 1, "noise/b_simple": 30.0}
    shown.close(None)
    assert tracker.records[-1] == "finished"
    with Image.open(folder / "plots/run.png") as image:
        assert image.width > 500


@pytest.mark.usefixtures("recorder")
def test_a_resumed_run_shows_nothing_twice_and_an_error_is_not_hidden(folder, monkeypatch):
    shown = show(folder, "mlflow", before=[PLAN, *epoch()])
    (tracker,) = shown._trackers
    assert tracker.records == []
    monkeypatch.setattr(Recorder, "finish", lambda self: 1 / 0)
    shown.close(ValueError)  # where the run has failed, a tracker does not hide why
    assert not (folder / "plots/run.png").exists()


@pytest.mark.usefixtures("recorder", "pictures")
def test_a_picture_for_which_the_disk_has_no_room_leaves_a_finished_run(
    folder, monkeypatch, capsys
):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(charts, "save_figure", full)
    shown = show(folder, "mlflow", rows=[*epoch(), EVAL])
    (tracker,) = shown._trackers
    shown.close(None)
    assert tracker.records[-1] == "finished"
    said = capsys.readouterr()
    assert "warning: plots/run.png could not be drawn" in said.out + said.err


@pytest.mark.usefixtures("no_login", "pictures")
def test_wandb_without_a_login_runs_offline_and_says_how_to_upload(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder.parent)
    shown = show(folder, "wandb", rows=[*epoch(), EVAL])
    (said,) = capsys.readouterr().out.splitlines()
    command = re.fullmatch(r"wandb: offline \(no login\); to upload: (.*)", said)[1]
    program, verb, path = shlex.split(command)
    assert (program, verb, Path(path)) == ("wandb", "sync", Path("first run/wandb"))
    run = shown._trackers[0].tracker
    assert (run.project, run.name) == ("dbsl", "first run")
    assert run.config["resolutions"] == "24,32"
    assert run.summary["worker 1/local_batch_size"] == 8
    shown.close(None)
    assert list(Path(path).glob("offline-*/run-*.wandb"))
    again = show(folder, "wandb", state={"wandb": run.id})
    assert again.state_dict() == {"wandb": run.id} == {"wandb": again._trackers[0].tracker.id}
    again.close(None)
    assert "wandb" not in capsys.readouterr().err


OF_USER = {"PROJECT": "mine", "NAME": "called", "RUN_GROUP": "group", "JOB_TYPE": "arm"}


@pytest.mark.parametrize("mode", ["disabled", "offline"])
def test_wandb_variables_of_the_user_are_honoured(folder, no_login, monkeypatch, capsys, mode):
    for name, value in (OF_USER | {"TAGS": "a,b", "MODE": mode}).items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    shown = show(folder, "wandb", rows=epoch())
    run, offline = shown._trackers[0].tracker, mode == "offline"
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
        assert shown._trackers[0].tracker.offline
        shown.close(None)


def test_a_finished_run_is_drawn_and_sent_again_from_its_folder_alone(tmp_path, pictures):
    from dbsl.tools.report import main

    run(tmp_path / "run", epochs=1, workers=1, local_batch_sizes=(8,))
    picture = tmp_path / "run/plots/run.png"
    before = picture.read_bytes()
    picture.unlink()
    main([str(tmp_path / "run"), "--report-to", "tensorboard"])
    assert picture.read_bytes() == before
    events = EventAccumulator(str(tmp_path / "run/dbsl")).Reload()
    (point,) = events.Scalars("eval/accuracy")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (point.step, point.value) == (1000, pytest.approx(summary["final_accuracy"]))
    (hparams, *_) = (tmp_path / "run/dbsl").glob("*/hparams.yml")
    assert "local_batch_sizes: '8'" in hparams.read_text()
    with pytest.raises(ValueError, match="run must be a finished run's folder, got"):
        main([str(tmp_path)])
    with pytest.raises(ValueError, match="run must be one folder, got empty"):
        main([])


def test_a_tracker_that_raises_is_left_out_and_the_others_go_on(folder, monkeypatch, capsys):
    class Broken(Recorder):
        name = "comet_ml"

        def log(self, values, step=None):
            raise ConnectionError("the server is gone")

    monkeypatch.setitem(charts.LOGGER_TYPE_TO_CLASS, "mlflow", Recorder)
    monkeypatch.setitem(charts.LOGGER_TYPE_TO_CLASS, "comet_ml", Broken)
    shown = show(folder, "comet_ml", "mlflow")
    (recorder,) = (one for one in shown._trackers if one.name == "mlflow")
    for row in epoch():
        shown.row(row)
    shown.close(None)
    assert recorder.records[-1] == "finished"
    assert any("train/loss" in values for _, values in recorder.records[:-1])
    said = capsys.readouterr()
    told = "warning: comet_ml gets nothing from now on (the server is gone)\n"
    assert (said.out + said.err).count(told) == 1
