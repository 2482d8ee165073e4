"""Signals stop a run after its step, but for those that its parent has it ignore; its seconds."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from dbsl.base.errors import EXIT_STOPPED
from dbsl.base.machine import STOP_SIGNALS
from dbsl.run.stopping import Stopping, Stopwatch

pytestmark = pytest.mark.usefixtures("usual_signals")
REPORT = """
import os, signal
from dbsl.run.stopping import Stopping
with Stopping() as stopping:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
        print(stopping.reason)
"""


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_is_noted_and_the_second_does_what_it_did_before(number, capfd):
    before = signal.getsignal(number)
    with Stopping() as stopping:
        assert stopping.reason is None
        os.kill(os.getpid(), number)
        assert stopping.reason == number.name
        assert signal.getsignal(number) == before
    assert f"{number.name}: finishing the step and saving" in capfd.readouterr().err


def test_a_signal_is_heard_while_the_main_thread_waits_outside_python():
    answer = torch.futures.Future()  # as one waits for another process
    with Stopping(on_signal=lambda: answer.set_result("stop")) as stopping:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        late = threading.Timer(5, lambda: answer.done() or answer.set_result("late"))
        late.start()
        assert answer.wait() == "stop"
        late.cancel()
    assert stopping.signal == "SIGTERM"


def test_signals_after_the_first_one_are_taken_without_a_word(capfd):
    heard = threading.Semaphore(0)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)  # as torch's loaders have it
    with Stopping(on_signal=heard.release):
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.acquire(timeout=5)
        time.sleep(0.1)  # whoever told of it may be gone
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGCHLD)
    signal.signal(signal.SIGCHLD, before)
    assert not heard.acquire(blocking=False)
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_a_signal_to_a_fork_is_no_signal_to_this_process():
    heard = []
    with Stopping(on_signal=lambda: heard.append(1)) as stopping:
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.2)
    assert not heard
    assert stopping.reason is None


def test_a_background_job_under_nohup_is_stopped_by_sigterm_alone():
    command = ["sh", "-c", 'nohup "$0" -c "$1" & wait', sys.executable, REPORT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["None", "None", "SIGTERM"]


UNREAD = """
import signal, sys, time
from dbsl.base.errors import RunStopped, one_line_errors
from dbsl.run.stopping import Stopping
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.default_int_handler)
with one_line_errors(), Stopping() as stopping:
    print("begun", flush=True)
    while stopping.reason is None:
        time.sleep(0.01)
    for number in range(3):
        print("a step", flush=True)
        print("a warning", file=sys.stderr)
    open(sys.argv[1], "w").close()
    raise RunStopped("saved")
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_run_saves_though_who_reads_it_is_gone_with_the_signal(tmp_path, number):
    saved = tmp_path / "saved"
    command = [sys.executable, "-c", UNREAD, str(saved)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout.readline() == b"begun\n"
        process.stdout.close()  # as `tee` does, which Ctrl-C ends, too
        process.send_signal(number)
        assert process.wait(60) == EXIT_STOPPED
    assert saved.exists()


def test_a_process_without_outputs_is_stopped_like_any_other(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with Stopping() as stopping:
        os.kill(os.getpid(), signal.SIGTERM)
        print("nobody hears it")
        assert stopping.reason == "SIGTERM"


def test_start_up_is_in_the_total_and_not_in_the_training_over_two_sessions(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    first = Stopwatch()
    now[0] += 12
    assert first.start_training() == 12
    now[0] += 30
    with first.evaluating(pauses=True):
        now[0] += 5
    with first.evaluating(pauses=False):  # others trained
        now[0] += 7
    saved = first.state_dict()

    now[0] += 1000  # nothing ran
    second = Stopwatch()
    now[0] += 2
    second.load_state_dict(saved)
    now[0] += 1
    resumed_with = now[0]  # an epoch's end that is to be told
    now[0] += 1
    second.start_training()
    assert second.train_s(resumed_with) == 30 + 7
    now[0] += 10
    assert second.start_up_s == 12 + 4
    assert second.train_s(now[0]) == 30 + 7 + 10
    assert second.total_s == 12 + 42 + 4 + 10
