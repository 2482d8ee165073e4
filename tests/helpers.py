"""What tests of whole runs share: a tiny config, a run, what it left, and runs as processes."""

import gc
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image
from torch.utils.data import TensorDataset

import train
from dbsl import runs
from dbsl.base.errors import RunStopped, one_line_errors
from dbsl.base.machine import STOP_SIGNALS
from dbsl.checkpoint.checkpoint import Checkpoint
from dbsl.config.parse import parse_config, yaml_to_argv
from dbsl.data.transforms import Transform
from dbsl.log.rows import read_metrics, round_row
from dbsl.plan.stages import Stages
from dbsl.plan.types import RoundReport
from dbsl.run.meter import MEASURED
from dbsl.run.plans import Plans, count_workers
from dbsl.run.times import step_times
from train import Config, main

ROOT = Path(__file__).resolve().parent.parent
slow = pytest.mark.slow  # of what `pytest -m slow` runs
TINY = {"model": "test_resnet", "train_samples": 60, "eval_samples": 20, "resolutions": (16,)}
TINY |= {"slope": (0.001,), "intercept": (0.01,), "lr": 0.02, "cpu_threads": 1, "report_to": "none"}


def pages():
    """Return the pages that people read: README.md, docs/ and those of the experiments."""
    of_results = sorted(ROOT.glob("experiments/**/README.md"))
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *of_results]


def make_table(images, labels=2):
    """Return a table of images, with a label each or in turn of so many classes."""
    import datasets  # slow, and few tests need it

    if isinstance(labels, int):
        labels = [number % labels for number in range(len(images))]
    names = [str(name) for name in range(max([1, *labels]) + 1)]
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    columns = {"image": images, "label": labels}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def table(samples=30, width=4, classes=3, seed=0):
    """Return rows of random numbers, whose labels take turns."""
    rows = torch.randn(samples, width, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(rows, torch.arange(samples) % classes)


def plain(side, augment="none"):
    """Return a transform whose images have the values 0..255 that were stored."""
    return Transform(side, augment, True, (0.0,) * 3, (1 / 255,) * 3, 0)


def read(source, transform, batches=None, epoch=0):
    """Return the images and labels of batches, or of all samples as one."""
    batches = [range(len(source))] if batches is None else batches
    found = source.batches(list(map(np.array, batches)), transform, epoch)
    images, labels = zip(*found, strict=True)
    return torch.cat(images), torch.cat(labels)


def read_all(source, side=8, batches=None):
    """Return the value of each sample's first pixel and its label."""
    images, labels = read(source, plain(side), batches)
    return images[:, 0, 0, 0].round().int().tolist(), labels.tolist()


SHARDED = 96, 16, 8  # images to train on and to evaluate on, and those of a row group


def write_shards(folder):
    """Write three shards of noise, and one to evaluate on; an image begins with its number."""
    train, evaluation, group = SHARDED
    noise = np.random.default_rng(0).integers(0, 256, (256, 16, 16, 3), dtype=np.uint8)
    noise[:, 0, 0] = np.arange(256)[:, None]
    each = train // 3
    files = {f"train-{n:05d}-of-00003": range(n * each, n * each + each) for n in range(3)}
    files["test-00000-of-00001"] = range(200, 200 + evaluation)
    for name, numbers in files.items():
        table = make_table([Image.fromarray(noise[n]) for n in numbers], [n % 3 for n in numbers])
        table.to_parquet(folder / f"{name}.parquet", batch_size=group)
    return folder


def run(folder, **settings):
    """Train in this process, with `TINY` where nothing else is said, and return the config."""
    config = Config(**{**TINY, **settings, "output_dir": str(folder)})
    AcceleratorState._reset_state(True)
    main(config)
    return config


def own(patch, data=None, model=None, loss=None, **parts):
    """Have train.py take these parts, as a fork of it would."""
    if data is not None:
        patch.setattr(train, "load_images", lambda config, accelerator: data.on(accelerator.device))
    if model is not None:

        def seeded(config, *_):
            torch.manual_seed(config.stream("initial weights"))
            return model()

        patch.setattr(train, "build_model", seeded)
    for name, part in {**parts, **({"loss_function": loss} if loss else {})}.items():
        patch.setattr(train, name, part)


def planned(config, accelerator, loss=train.loss_function):
    """Return what main of train.py makes before its workers: data, model and plans."""
    config = count_workers(config, accelerator.num_processes)
    data = runs.load_images(config, accelerator)
    stages = Stages(config, data.resolutions)
    model = train.build_model(stages.config, data.num_classes, stages.resolutions)
    model.to(accelerator.device, memory_format=torch.channels_last)
    data = data.normalised_for(model)
    build = partial(train.build_optimizer, config=stages.config)
    times = step_times(stages.config, accelerator, model, data, loss, build)
    plans = Plans(times, stages, accelerator)
    return SimpleNamespace(data=data, model=model, plans=plans, build_optimizer=build)


def train_by(*flags):
    """Train in this process by flags."""
    AcceleratorState._reset_state(True)
    main(parse_config(Config, [*flags]))


def to_flags(folder, **settings):
    """Return the flags of the run that `run` would make."""
    return yaml_to_argv({**TINY, **settings, "output_dir": folder})


def metrics_of(folder):
    """Return the events of a run without measured times, which differ between equal runs."""
    return [
        {k: v for k, v in row.items() if "time" not in k and k not in MEASURED}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def fingerprint(folder):
    return metrics_of(folder), (folder / "model.safetensors").read_bytes()


def a_round(worker=0, epoch=0, **values):
    """Return a round's row, a usual one where nothing else is said."""
    row = round_row(RoundReport(worker, epoch, 0, 8, 16, 64, 4, 1.0, 2.0, 1.0))
    return {"event": "round", **row, **values}


def rounds_of(folder):
    return [event for event in metrics_of(folder) if event["event"] == "round"]


def rows(folder, *events):
    """Return the rows of some kinds, measured times and all."""
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["event"] in events]


def samples_by_epoch(folder, epochs=3):
    """Return the samples that metrics.jsonl has of each epoch."""
    found = rows(folder, "round", "restart")  # joint steps that others took, and no round has
    return [sum(r["samples"] for r in found if r["epoch"] == epoch) for epoch in range(epochs)]


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def short(cases, *first):
    """Return the cases of a test, those that are not among the first for `pytest -m slow`."""
    return [
        pytest.param(*(c if isinstance(c, tuple) else (c,)), marks=[slow] * (c not in first))
        for c in cases
    ]


@contextmanager
def each_step(act):
    """Call ``act(checkpoint, round_over)`` after each step of the run in here."""
    after_step = Checkpoint._after_step

    def acts(self, *, round_over):
        act(self, round_over)
        after_step(self, round_over=round_over)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "_after_step", acts)
        yield


def at_step(number, act):
    """Call ``act()`` when the run in here has taken so many steps."""
    count = itertools.count(1)
    return each_step(lambda *_: next(count) == number and act())


def signal_at(step, rank, number):
    """Have a signal come to one of the processes started in here after so many of its steps."""
    return at_step(step, lambda: os.environ["RANK"] == str(rank) and os.kill(os.getpid(), number))


@contextmanager
def stopped_when(due):
    """Have SIGTERM come after the step at which ``due(checkpoint)``, and the run in here end."""
    with (
        pytest.raises(RunStopped),
        each_step(lambda saver, _: due(saver) and os.kill(os.getpid(), signal.SIGTERM)),
    ):
        yield


def stopped_at_round(number):
    """Stop when all workers have pushed so many rounds, and the first is in its next."""
    return stopped_when(lambda saver: {*saver._cluster.server.clocks} == {number})


def stopped_at_step(number):
    count = itertools.count(1)
    return stopped_when(lambda _: next(count) == number)


def refused(capsys, command, *arguments):
    """Return the one line that a command says where it refuses its arguments, with status 2."""
    with pytest.raises(SystemExit) as ended, one_line_errors():
        sys.exit(command(*arguments))
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("error: ")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Forked:
    """A command in a fork of this process, which has the imports already.

    As much of `subprocess.Popen` as tests use; stdout and stderr are texts, also while it runs.
    """

    def __init__(self, call, **environment):
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        self._said = None
        self.returncode = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            gc.freeze()  # the parent's garbage has threads that are not here: its end may crash
            try:
                os.environ.update(environment)
                for file, number in zip(self._files, (1, 2), strict=True):
                    os.dup2(file.fileno(), number)
                sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1) for n in (1, 2))
                for number in STOP_SIGNALS:
                    signal.signal(number, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                AcceleratorState._reset_state(True)
                with one_line_errors():
                    call()
                status = 0
            except SystemExit as ended:
                status = ended.code or 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._said = [self._read(0), self._read(1)]
                for file in self._files:
                    file.close()
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout=240):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            assert time.monotonic() < deadline, f"a process did not end within {timeout} s"
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)
        self.wait(30)

    @property
    def stdout(self):
        return self._read(0)

    @property
    def stderr(self):
        return self._read(1)

    def _read(self, number):
        if self._said is not None:
            return self._said[number]
        file = self._files[number]
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()


def start_ranks(flags, ranks):
    """Start `ranks` processes of one run, as a launcher does, and return them without waiting."""
    port = free_port()
    return [start_rank(flags, rank, ranks, port) for rank in range(ranks)]


def place_of(rank, ranks, port=1, **more):
    """Return what a launcher has in a process's environment; nobody answers at port 1."""
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **more}
    return {name: str(value) for name, value in launched.items()}


def start_rank(flags, rank, ranks, port, **more):
    """Start one process of a run of `ranks`, which meet at a port; flags may be what it calls."""
    call = flags if callable(flags) else lambda: main(parse_config(Config, flags))
    return Forked(call, **place_of(rank, ranks, port, **more))


def wait_all(processes, timeout_s=90):
    """Wait for processes of one run, and return their exit statuses."""
    try:
        return [process.wait(timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()


def torchrun(flags, ranks=2):
    """Launch train.py as people do, with imports of its own: half a minute of CPU time."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "2"]
    command += ["--nproc-per-node", str(ranks), "train.py", *flags]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run_in_ranks(folder, ranks=2, **settings):
    """Train in several processes to the end, and return what rank 0 printed."""
    return end_ranks(start_ranks(to_flags(folder, **settings), ranks))


def end_ranks(processes, timeout_s=90):
    """Wait for processes of one run that all end well, and return what rank 0 printed."""
    statuses = wait_all(processes, timeout_s)
    assert statuses == [0] * len(processes), [process.stderr for process in processes]
    return processes[0].stdout


def wait_until(condition, seconds=60, what="it"):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what} in vain"
        time.sleep(0.01)
