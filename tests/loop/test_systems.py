"""What Windows and macOS do not have, file systems do not know, and devices cannot count with."""

import errno
import os
import subprocess
import sys

import pytest
import torch

from dbsl.base import files, machine
from dbsl.cluster.steps import ComputeTimer
from dbsl.library.watch import Watch
from dbsl.profile import fit
from tests import helpers

ELSEWHERE = """
import importlib.util, os, pkgutil, select, signal, sys
import accelerate, datasets, matplotlib.figure, optuna, pandas, timm, torch, wandb
import torch.utils.benchmark, sklearn.datasets, multiprocessing.forkserver  # they know their system

for module, names in (
    (signal, "SIGHUP SIGUSR1 SIGUSR2 SIGQUIT sigwaitinfo pthread_sigmask"),
    (os, "register_at_fork sched_getaffinity fork getuid killpg O_DIRECTORY"),
    (select, "poll epoll"),
):
    for name in names.split():
        delattr(module, name)
sys.modules["fcntl"] = sys.modules["resource"] = None
import dbsl
for found in pkgutil.walk_packages(dbsl.__path__, "dbsl."):
    *room, library = found.name.split(".")
    if room != ["dbsl", "integrations"] or importlib.util.find_spec(library):
        importlib.import_module(found.name)
from dbsl.base.errors import one_line_errors
from train import Config, main
with one_line_errors():
    main(Config.from_flags())
"""


def test_every_module_imports_and_a_run_ends_without_what_windows_and_macos_lack(tmp_path):
    flags = helpers.to_flags(tmp_path / "run", epochs=1)
    command = [sys.executable, "-c", ELSEWHERE, *flags]
    done = subprocess.run(command, cwd=helpers.ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert helpers.summary_of(tmp_path / "run")["epochs"] == 1


def test_a_run_without_outputs_comes_to_its_end(tmp_path):
    flags = helpers.to_flags(tmp_path / "run", epochs=1)
    line = 'exec "$@" >&- 2>&-'
    command = ["sh", "-c", line, "sh", sys.executable, "train.py", *flags]
    assert subprocess.run(command, cwd=helpers.ROOT, timeout=200).returncode == 0
    assert helpers.summary_of(tmp_path / "run")["epochs"] == 1


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_disk_that_cannot_sync_is_no_error_and_one_that_fails_is(tmp_path, monkeypatch, number):
    def fsync(handle):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output"):
            files.write_text(tmp_path / "text", "one")
    else:
        files.write_text(tmp_path / "text", "one")
        assert (tmp_path / "text").read_text() == "one"


def test_windows_syncs_files_that_are_open_to_write_and_no_folders(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(files, "_WINDOWS", True)
    monkeypatch.setattr(files.os, "open", lambda *how: opened.append(how) or 0)
    monkeypatch.setattr(files.os, "fsync", lambda handle: None)
    monkeypatch.setattr(files.os, "close", lambda handle: None)
    for path in (tmp_path, tmp_path / "text"):
        files.sync_file(path)
    assert opened == [(tmp_path / "text", os.O_RDWR)]


def test_clocks_wait_for_a_device_that_is_not_cuda(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *device: waited.append(device))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    mps = torch.device("mps")
    timer, watch = ComputeTimer(mps), Watch(torch.nn.Linear(1, 1))
    with timer.running((0,)):
        pass
    watch._device = mps
    watch._now()
    assert waited == [(mps,)] * 3
    machine.clock(torch.device("cpu"))
    assert len(waited) == 3
    fit.measure_step_times(lambda size: None, [1, 2], seconds=0.0)
    assert len(waited) > 6
