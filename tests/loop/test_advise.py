"""Processes on two machines advise: what they measure, print and leave; a run of the advice."""

import json
import shlex
import signal

from dbsl.config.parse import parse_config
from dbsl.run import prepare
from dbsl.tools.advise import measure
from tests.helpers import TINY, end_ranks, start_ranks, to_flags, wait_all, wait_until
from train import Config, main

GIVEN = {**TINY, "slope": None, "intercept": None, "large_batch_size": (8,), "epochs": 2}
GIVEN |= {"mixed_precision": "no", "train_samples": 96}
QUICK = {"_ROUND_S": 0.01, "_AGAIN": 1, "_MERGES": 3, "SECONDS": 600.0}


def advising(folder, act=lambda: None, **settings):
    """Start processes that advise, and measure as little as can be; two are on one machine."""
    flags = to_flags(folder, **{**GIVEN, "advise": True, **settings})

    def call():
        for name, value in QUICK.items():
            setattr(measure, name, value)
        prepare.nodes_of = lambda accelerator: (0, 0, 1)
        act()
        main(parse_config(Config, flags))

    return start_ranks(call, 3)


def test_processes_advise_with_measured_figures_and_the_advised_line_trains(tmp_path):
    def fails_where_nothing_is_measured():
        measured = measure.Bench.exchange

        def checked(self, way, *given):
            seconds = measured(self, way, *given)
            assert way.key in seconds, way.key
            return seconds

        measure.Bench.exchange = checked

    folder = tmp_path / "run"
    said = end_ranks(advising(folder, fails_where_nothing_is_measured, json=True))
    (line,) = said.splitlines()
    found = json.loads(line)
    assert found.keys() == {"ways", "recommended", "sure"}
    words = {word for way in found["ways"] for word in way["flags"].split()}
    flags = {"--wire", "--rounds-per-epoch", "--sync", "--slope", "--worker-processes"}
    assert flags <= words
    assert all(way["epoch_s"] > 0 and way["bytes_per_epoch"] > 0 for way in found["ways"])
    assert [path.name for path in tmp_path.iterdir()] == ["run-ways.png"]
    flags = [*to_flags(folder, **GIVEN), *shlex.split(found["recommended"])]
    end_ranks(start_ranks(flags, 3))
    config = parse_config(Config, flags)
    (plan,) = json.loads((folder / "plan.json").read_text()).values()
    sizes = config.local_batch_sizes or ((16, 8) if config.worker_processes else (8, 8, 8))
    assert tuple(worker["local_batch_size"] for worker in plan["workers"]) == sizes
    assert (folder / "summary.json").exists()


def test_an_interrupted_advice_leaves_nothing_behind(tmp_path):
    processes = advising(tmp_path / "run", lambda: setattr(measure, "_ROUND_S", 5.0))
    wait_until(lambda: "measuring" in processes[0].stdout)
    for process in processes:
        process.send_signal(signal.SIGINT)
    assert 130 in wait_all(processes)
    assert not any(tmp_path.iterdir())
