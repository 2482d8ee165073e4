"""What Windows and macOS do not have, file systems do not know, and devices cannot count with."""

import errno
import importlib
import os
import pkgutil
import runpy
import select
import signal
import sys

import pytest
import torch
import torch._dynamo  # it looks at the system once

from dbsl.base import files, machine
from dbsl.cluster.steps import ComputeTimer
from dbsl.library.watch import Watch
from dbsl.profile import fit
from tests import helpers

ABSENT = (
    (signal, "SIGHUP SIGUSR1 SIGUSR2 SIGQUIT sigwaitinfo pthread_sigmask"),
    (os, "register_at_fork sched_getaffinity fork getuid killpg O_DIRECTORY"),
    (select, "poll epoll"),
)


def elsewhere(flags):
    """Import all modules of dbsl anew, as on other systems, and train."""
    for module, names in ABSENT:
        for name in names.split():
            delattr(module, name)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("dbsl", "train")]:
        del sys.modules[name]
    sys.modules["fcntl"] = sys.modules["resource"] = None
    dbsl = importlib.import_module("dbsl")
    for found in pkgutil.walk_packages(dbsl.__path__, "dbsl."):
        *room, library = found.name.split(".")
        if room != ["dbsl", "integrations"] or importlib.util.find_spec(library):
            importlib.import_module(found.name)
    sys.argv[1:] = flags
    runpy.run_path(str(helpers.ROOT / "train.py"), run_name="__main__")


def test_every_module_imports_and_a_run_ends_without_what_windows_and_macos_lack(tmp_path):
    done = helpers.Forked(lambda: elsewhere(helpers.to_flags(tmp_path / "run", epochs=1)))
    assert done.wait() == 0, done.stderr
    assert helpers.summary_of(tmp_path / "run")["epochs"] == 1


def without_outputs(flags):
    """Train as where stdout and stderr are closed; files of the run may take their numbers."""
    outputs, (sys.stdout, sys.stderr) = (sys.stdout, sys.stderr), (None, None)
    try:
        os.close(1), os.close(2)
        sys.argv[1:] = flags
        runpy.run_path(str(helpers.ROOT / "train.py"), run_name="__main__")
    finally:
        sys.stdout, sys.stderr = outputs


def test_a_run_without_outputs_comes_to_its_end(tmp_path):
    done = helpers.Forked(lambda: without_outputs(helpers.to_flags(tmp_path / "run", epochs=1)))
    assert done.wait() == 0
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
    monkeypatch.setattr("dbsl.library.watch.CPU", mps)
    with ComputeTimer(mps).running((0,)):
        pass
    Watch(torch.nn.Linear(1, 1))._now()
    assert waited == [(mps,)] * 3
    machine.moment(torch.device("cpu"))
    assert len(waited) == 3
    fit.measure_step_times(lambda size: None, [1, 2], seconds=0.0)
    assert len(waited) > 6
