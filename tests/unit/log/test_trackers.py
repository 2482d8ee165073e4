import socket
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import accelerate
import pytest
from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker
from accelerate.utils import LoggerType

from dbsl.extras import charts as trackers
from dbsl.extras.charts import (
    check_tracker,
    start_trackers,
    tracker_ids,
    tracker_names,
)


@pytest.mark.parametrize("tracker", ["wandb", "tensorboard", "none", "all", "wandb,tensorboard"])
def test_check_tracker_accepts_installed_ones_and_none(tracker):
    check_tracker(tracker)


def test_check_tracker_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ["wandb"])
    message = r"report_to must name an installed tracker, got 'trackio' \(pip install trackio\)"
    with pytest.raises(ValueError, match=message):
        check_tracker("trackio")


@pytest.mark.parametrize("given", ["wand", "none,wandb", "all,wandb", ""])
def test_a_tracker_that_nobody_knows_is_refused_with_the_list_of_those_known(given):
    message = "report_to must be none, all or trackers .aim, clearml, .*wandb. with commas.*got"
    with pytest.raises(ValueError, match=message) as error:
        check_tracker(given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", sorted({*map(str, LoggerType)} - {"all"}))
def test_every_tracker_of_accelerate_is_taken_by_name(name, monkeypatch):
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: [LoggerType(name)])
    assert tracker_names(name) == tracker_names("all") == (name,)


def test_several_trackers_are_started_once_each(tmp_path, no_login, accelerator, monkeypatch):
    started = []
    for tracker in (WandBTracker, TensorBoardTracker):
        start = tracker.start
        monkeypatch.setattr(
            tracker, "start", lambda self, start=start: (started.append(self.name), start(self))
        )
    start_trackers(accelerator, "tensorboard, wandb,tensorboard", tmp_path, "run", {"lr": 0.1})
    assert [tracker.name for tracker in accelerator.trackers] == ["tensorboard", "wandb"] == started
    assert {"tensorboard", "wandb"} <= {path.name for path in tmp_path.iterdir()}
    accelerator.end_training()


def test_a_tracker_without_a_way_of_its_own_is_started_as_accelerate_does(
    tmp_path, accelerator, monkeypatch
):
    class Live(GeneralTracker):
        name, requires_logging_directory = "dvclive", False

        def __init__(self, project, **settings):
            super().__init__()
            self.settings, self.stored = settings, None

        tracker = None

        def store_init_configuration(self, values):
            self.stored = values

    monkeypatch.setattr(trackers, "get_available_trackers", lambda: [LoggerType.DVCLIVE])
    monkeypatch.setattr(trackers, "filter_trackers", lambda name, folder: [name])
    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "dvclive", Live)
    monkeypatch.setitem(accelerate.accelerator.LOGGER_TYPE_TO_CLASS, "dvclive", Live)
    start_trackers(accelerator, "dvclive", tmp_path, "run", {"lr": 0.1})
    (live,) = accelerator.trackers
    assert (live.settings, live.stored) == ({"dir": str(tmp_path / "dvclive")}, {"lr": 0.1})


def test_no_tracker_starts_on_other_processes_or_for_none(tmp_path, accelerator):
    start_trackers(SimpleNamespace(is_main_process=False), "wandb", tmp_path, "run", {})
    start_trackers(accelerator, "none", tmp_path, "run", {})
    assert accelerator.trackers == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("dbsl", "run", "", "", ())),
        (
            {
                "WANDB_PROJECT": "mine",
                "WANDB_NAME": "called",
                "WANDB_RUN_GROUP": "group",
                "WANDB_JOB_TYPE": "arm",
                "WANDB_TAGS": "a,b",
                "WANDB_ENTITY": "team",
            },
            ("mine", "called", "group", "arm", ("a", "b")),
        ),
    ],
)
def test_wandb_variables_of_the_user_are_honoured(
    tmp_path, no_login, accelerator, monkeypatch, given, expected
):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    start_trackers(accelerator, "wandb", tmp_path, "run", {})
    run = accelerator.get_tracker("wandb", unwrap=True)
    assert (run.project, run.name, run.group, run.job_type, run.tags or ()) == expected
    assert run.entity == given.get("WANDB_ENTITY", "")


def test_wandb_whose_server_is_not_there_runs_offline(
    tmp_path, no_login, accelerator, monkeypatch, capsys
):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("WANDB_BASE_URL", url)  # nobody listens there any more
    start_trackers(accelerator, "wandb", tmp_path, "run", {})
    assert f"offline (no answer from {url})" in capsys.readouterr().out
    assert accelerator.get_tracker("wandb", unwrap=True).offline


def test_wandb_whose_server_refuses_the_key_runs_offline(
    tmp_path, no_login, accelerator, monkeypatch, capsys
):
    answer = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"

    def refuse_all(server):
        while True:
            try:
                connection, _ = server.accept()
            except OSError:  # closed: the test is over
                return
            with connection:
                if connection.recv(65536):
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=refuse_all, args=(server,), daemon=True).start()
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        start_trackers(accelerator, "wandb", tmp_path, "run", {})
        assert "wandb: offline (" in capsys.readouterr().out
        assert accelerator.get_tracker("wandb", unwrap=True).offline
        assert len(accelerator.trackers) == 1
        accelerator.end_training()
        server.shutdown(socket.SHUT_RDWR)


def test_answers_asks_the_proxy_where_one_is_set(no_login, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert trackers._answers("https://host.invalid", timeout_s=5.0)
    assert not trackers._answers("https://host.invalid", timeout_s=5.0)


def test_answers_gives_up_in_time_where_a_name_lookup_hangs(no_login, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(socket, "create_connection", lambda *_: nullcontext(release.wait(30)))
    started = time.monotonic()
    assert not trackers._answers("https://host.invalid", timeout_s=0.2)
    assert time.monotonic() - started < 5
    release.set()


def test_each_tracker_of_a_resumed_run_goes_on_by_what_is_its_own(tmp_path, no_login, accelerator):
    start_trackers(accelerator, "tensorboard,wandb", tmp_path, "run", {})
    before = tracker_ids(accelerator)
    run = accelerator.get_tracker("wandb", unwrap=True)
    assert before == {"tensorboard": "", "wandb": run.id}
    accelerator.end_training()
    start_trackers(accelerator, "wandb", tmp_path, "run", {}, resumed=before)
    assert accelerator.get_tracker("wandb", unwrap=True).id == run.id
    accelerator.end_training()
    start_trackers(accelerator, "wandb", tmp_path, "run", {}, resumed={"tensorboard": ""})
    assert accelerator.get_tracker("wandb", unwrap=True).id not in (run.id, "tensorboard")
