"""A signal at any moment ends a run within seconds; what was trained goes on to the same bits."""

import os
import signal

import pytest

import train
from dbsl.base.errors import EXIT_STOPPED
from dbsl.checkpoint import checkpoint
from dbsl.data.sources import PixelStore
from dbsl.profile import timing
from dbsl.run.workers import Workers
from tests import helpers
from tests.helpers import fingerprint, rows, short

TERM, USR1, USR2, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT
SETTINGS = {"epochs": 2, "checkpoint_every": 0, "ema_decay": 0.5, "large_batch_size": (3,)}
MODES = {
    "bsp": {"small_workers": 1},
    "asp": {"small_workers": 1, "sync": "asp"},
    "step": {"sync": "step"},
}
# The moment; which signal, in how many processes, and by how they meet.
MOMENTS = [
    ("start-up", USR1, 1, "bsp"),
    ("evaluation 1", TERM, 1, "bsp"),
    ("step", USR2, 1, "asp"),
    ("profiling", TERM, 1, "bsp"),
    ("start-up", TERM, 2, "step"),
    ("step", USR1, 2, "bsp"),
    ("evaluation 1", USR2, 1, "asp"),
    ("evaluation 3", USR1, 1, "step"),
    ("evaluation 1", USR1, 2, "bsp"),
    ("evaluation 1", TERM, 2, "step"),
    ("evaluation 1", TERM, 2, "asp"),
    ("wait", TERM, 1, "bsp"),
    ("save", USR1, 1, "step"),
    ("save", TERM, 2, "bsp"),
    ("merge", TERM, 1, "bsp"),
    ("merge", USR2, 1, "step"),
    ("start-up", USR1, 3, "bsp"),
    ("step", USR1, 3, "step"),
    ("merge", TERM, 3, "bsp"),
    ("merge", USR1, 3, "asp"),
    ("evaluation 1", TERM, 3, "bsp"),
    ("save", USR2, 3, "step"),
]


def signals(patch, moment, number):
    """Have a signal come to the first and last process at a moment, once; in start-up to all."""
    came = []

    def come(*, due=True):
        last = int(os.environ.get("WORLD_SIZE", "1")) - 1
        mine = int(os.environ.get("RANK", "0")) in (0, last) or moment == "start-up"
        if due and not came and mine:
            came.append(number)
            os.kill(os.getpid(), number)

    def before(place, name, **due):
        act = getattr(place, name)
        patch.setattr(place, name, lambda *a, **more: (come(), act(*a, **more))[1])

    batches, count = PixelStore.batches, []

    def evaluated(self, index_batches, transform, epoch=0):
        for batch in batches(self, index_batches, transform, epoch):
            count.append(transform.augment == "none")
            come(due=count[-1] and sum(count) == int(moment[-1]))
            yield batch

    def waits(self, index_batches, transform, epoch=0):
        for batch in batches(self, index_batches, transform, epoch):
            count.append(batch)
            if len(count) == 9:
                come()
                helpers.wait_until(self.waits)  # as for loader processes
            yield batch

    def starts(self, while_waiting):
        self.waits = while_waiting

    if moment == "wait":
        patch.setattr(PixelStore, "batches", waits)
        patch.setattr(PixelStore, "start", starts, raising=False)
    elif moment == "start-up":
        before(train, "build_model")
    elif moment == "profiling":
        before(timing, "measure_step_times")
    elif moment == "merge":
        before(Workers, "push")
    elif moment == "save":
        before(checkpoint, "write_shard")
    elif moment != "step":
        patch.setattr(PixelStore, "batches", evaluated)
    return helpers.at_step(9 if moment == "step" else 10**9, come)


@pytest.mark.parametrize(("moment", "number", "ranks", "mode"), short(MOMENTS, *MOMENTS[:2]))
def test_a_signal_ends_the_run_and_what_was_trained_goes_on(tmp_path, moment, number, ranks, mode):
    settings = {**SETTINGS, **MODES[mode], "resume": "auto"}
    settings |= {"checkpoint_every": 1} if moment == "save" else {}
    settings |= {"slope": None, "intercept": None} if moment == "profiling" else {}
    folder = tmp_path / "run"
    if ranks > 1:
        settings |= {"small_workers": None, "worker_timeout": 30}
        # Nobody waits for the others there, and who has finished is not stopped: it hears of it
        # where it pulls.
        settings |= {"slowdown": ("1:4.0",), "epochs": 4} if mode == "asp" else {}
    flags = helpers.to_flags(folder, **settings)
    with pytest.MonkeyPatch.context() as patch, signals(patch, moment, number):
        processes = helpers.start_ranks(flags, ranks)
    statuses = helpers.wait_all(processes)
    if moment in ("start-up", "profiling"):  # there is nothing to be saved
        assert statuses == [-number] * ranks, processes[0].stderr
        assert not [*folder.glob("checkpoints/*")]
        return
    assert statuses == [EXIT_STOPPED] * ranks, processes[0].stderr
    if moment.startswith("evaluation"):
        assert not rows(folder, "eval")  # it is done anew
    said = helpers.end_ranks(helpers.start_ranks(flags, ranks))
    assert "resumed from" in said
    assert [row["epoch"] for row in rows(folder, "eval")] == [*range(settings["epochs"])]
    if ranks == 1 or mode != "asp":
        processes = helpers.start_ranks(helpers.to_flags(tmp_path / "whole", **settings), ranks)
        helpers.end_ranks(processes)
        assert fingerprint(folder) == fingerprint(tmp_path / "whole")
