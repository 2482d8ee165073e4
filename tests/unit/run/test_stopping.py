"""Signals stop a run after its step, but for those that its parent has it ignore."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from dbsl.run.stopping import Stopping

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
REPORT = """
import os, signal
from dbsl.run.stopping import Stopping
with Stopping() as stopping:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
        print(stopping.reason)
"""


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted_and_the_second_does_what_it_did_before(number, capfd):
    before = signal.getsignal(number)
    with Stopping() as stopping:
        assert stopping.reason is None
        os.kill(os.getpid(), number)
        assert stopping.reason == number.name
        assert signal.getsignal(number) == before
    assert f"{number.name}: finishing the step and saving" in capfd.readouterr().err


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_the_parent_ignores_stays_ignored(number):
    signal.signal(number, signal.SIG_IGN)
    with Stopping() as stopping:
        os.kill(os.getpid(), number)
        assert stopping.reason is None
    assert signal.getsignal(number) == signal.SIG_IGN


@pytest.mark.usefixtures("usual_signals")
def test_a_signal_is_heard_while_the_main_thread_waits_outside_python():
    answer, began = torch.futures.Future(), time.monotonic()  # as one waits for another process
    with Stopping() as stopping:
        stopping.on_signal = lambda: answer.set_result("stop")
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        late = threading.Timer(5, lambda: answer.done() or answer.set_result("late"))
        late.start()
        assert answer.wait() == "stop"
        late.cancel()
    assert stopping.signal == "SIGTERM"
    assert time.monotonic() - began < 4


@pytest.mark.usefixtures("usual_signals")
def test_signals_after_the_first_one_are_taken_without_a_word(capfd):
    heard = threading.Semaphore(0)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)  # as torch's loaders have it
    with Stopping() as stopping:
        stopping.on_signal = heard.release
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.acquire(timeout=5)
        time.sleep(0.1)  # whoever told of it may be gone
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGCHLD)
    signal.signal(signal.SIGCHLD, before)
    assert not heard.acquire(blocking=False)
    assert len(capfd.readouterr().err.splitlines()) == 1


@pytest.mark.usefixtures("usual_signals")
def test_a_signal_to_a_fork_is_no_signal_to_this_process():
    heard = []
    with Stopping() as stopping:
        stopping.on_signal = lambda: heard.append(1)
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.2)
    assert not heard
    assert stopping.reason is None


@pytest.mark.usefixtures("usual_signals")
def test_a_background_job_under_nohup_is_stopped_by_sigterm_alone():
    command = ["sh", "-c", 'nohup "$0" -c "$1" & wait', sys.executable, REPORT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["None", "None", "SIGTERM"]
