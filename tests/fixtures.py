"""Fixtures of all tests; tests/conftest.py has what the process beside them needs, too."""

import itertools
import os
import pickle
import signal
import sys
import traceback
from functools import cache, partial

import hypothesis
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from PIL import Image
from torch import nn

import dbsl.data.dataset
from dbsl.base.machine import STOP_SIGNALS
from dbsl.config.hooks import found_extras
from dbsl.config.image_settings import ImageConfig
from dbsl.run.folder import read_code
from tests.helpers import Forked, wait_until

torch.set_num_threads(1)
CACHES = itertools.count()
# A busy machine is no failure; the same cases every time, so that a failure can be repeated.
hypothesis.settings.register_profile("short", deadline=None, derandomize=True, max_examples=100)
hypothesis.settings.register_profile("nightly", deadline=None, derandomize=True, max_examples=1000)


@pytest.fixture(scope="session", autouse=True)
def no_pictures():
    """Have runs draw a pixel: a second saved each. The picture has tests of its own."""

    def draw(self, folder):
        path = folder / "plots/run.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (1, 1)).save(path)

    with pytest.MonkeyPatch.context() as patches:
        if charts := found_extras().get("charts"):
            patches.setattr(charts, "_draw", draw)
        yield patches


@pytest.fixture(scope="session", autouse=True)
def quick_runs():
    """Read digits and code once, ask git nothing, which is two processes, and save at once."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(os, "fsync", lambda handle: None)  # no test cuts the power
        whole = dbsl.data.dataset.open_labelled
        digits = cache(lambda: whole(ImageConfig("digits")))

        def opened(config):
            return digits() if config.dataset == "digits" else whole(config)

        patches.setattr(dbsl.data.dataset, "open_labelled", opened)
        patches.setattr("dbsl.runs.read_code", cache(read_code))
        patches.setattr("dbsl.log.log.commit_of", lambda script: "")
        yield


@pytest.fixture
def pictures(no_pictures, monkeypatch):
    """Draw as a run does."""
    for target, name, drawing in no_pictures._setattr:
        monkeypatch.setattr(target, name, drawing)


@pytest.fixture(autouse=True)
def fresh_accelerator():
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture
def tiny_model():
    """A classifier of 8x8 images without batch norm, whose result is linear in the batch's mean."""
    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(3 * 64, 8), nn.Tanh(), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


@pytest.fixture
def run_ranks(tmp_path):
    """Return ``run(fn, *args, world_size=2)``: fn(rank, *args) in forked gloo processes.

    Gives one result per rank, in order. A rank that raises or dies fails the test, or with
    `expect_errors` gives its traceback, or None. The store is a file: no port to clash with.
    """

    def run(fn, *args, world_size=2, timeout_s=60.0, expect_errors=False):
        folder = tmp_path / f"ranks-{os.urandom(4).hex()}"
        folder.mkdir()
        ranks = [
            Forked(partial(_rank_main, rank, world_size, folder, fn, args))
            for rank in range(world_size)
        ]

        def over():
            codes = [rank.poll() for rank in ranks]
            return None not in codes or (not expect_errors and any(codes))

        try:
            wait_until(over, timeout_s, "ranks")
            codes = [rank.returncode for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                sys.stderr.write(rank.stderr)
        assert expect_errors or not any(codes), f"ranks ended with exit codes {codes}"
        found = [folder / str(rank) for rank in range(world_size)]
        return [pickle.loads(path.read_bytes()) if path.exists() else None for path in found]

    return run


def _rank_main(rank, world_size, folder, fn, args):
    def leave(status, found):
        (folder / str(rank)).write_bytes(pickle.dumps(found))
        os._exit(status)  # a failed pair must not keep the process in a destructor

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
        )
        leave(0, fn(rank, *args))
    except BaseException:
        traceback.print_exc()
        leave(1, traceback.format_exc())


@pytest.fixture
def launcher():
    """A launcher's store, which outlives its processes, and the environment that leads to it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}


@pytest.fixture
def usual_signals():
    """Signals as in a terminal: the parent of pytest (nohup, a script) may ignore some of them."""
    usual = {signal.SIGINT: signal.default_int_handler}
    usual |= dict.fromkeys(set(STOP_SIGNALS) - {signal.SIGINT}, signal.SIG_DFL)
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def accelerator(fresh_accelerator):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    yield accelerator
    accelerator.end_training()


@pytest.fixture
def no_login(tmp_path, monkeypatch):
    """A user who has never heard of W&B, in a folder of their own."""
    for name in [*os.environ]:
        if name.startswith(("WANDB_", "XDG_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    import wandb

    yield
    wandb.teardown()


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path_factory, monkeypatch):
    """Keep profiles of tests away from the user's, and from each other."""
    folder = tmp_path_factory.getbasetemp() / f"cache-{next(CACHES)}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
