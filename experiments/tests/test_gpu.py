"""The command that finds out on a GPU what only a GPU shows: it survives being cut off."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dbsl.config.parse import parse_config
from experiments.benchmarks.gpu import __main__ as command
from experiments.benchmarks.gpu.child import Settings
from experiments.benchmarks.gpu.lines import bisect, search
from experiments.benchmarks.gpu.runner import RESULTS, Stage, append, read_results, run_stages
from experiments.benchmarks.gpu.runs import MODES, common_flags, dual_batch_flags, equal_batch_flags
from experiments.benchmarks.gpu.stages import QUARTER, all_stages
from experiments.benchmarks.gpu.training import ARMS, arm_flags
from tests.helpers import ROOT, Forked, refused, wait_until
from train import Config

STUBS = """
import os, subprocess, sys, time

def work(settings, seconds, fails_until=None):
    yield {"first": 1}
    if fails_until is not None and not os.path.exists(fails_until):
        open(fails_until, "w").close()
        raise ArithmeticError("not yet")
    time.sleep(seconds)
    yield {"second": 2}

def meets(settings, folder, name, others):
    there = len(os.listdir(folder)) + 1
    open(f"{folder}/{name}", "w").close()
    deadline = time.monotonic() + 30
    while not all(os.path.exists(f"{folder}/{other}") for other in others):
        assert time.monotonic() < deadline, os.listdir(folder)
        time.sleep(0.02)
    yield {"there": there}
    open(f"{folder}/{name}-over", "w").close()

def starts_another(settings, file):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open(file, "w").write(str(child.pid))
    yield {"pid": os.getpid()}
    time.sleep(60)
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Return a maker of stages whose functions are above."""
    (tmp_path / "stub_stages.py").write_text(STUBS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")

    def make(stage, function="work", limit_s=60.0, expected_s=0.0, alone=True, **arguments):
        call = f"stub_stages:{function}"
        return Stage(stage, call, arguments, expected_s, limit_s, alone=alone)

    return make


def by_stage(folder):
    return {line["stage"]: line for line in read_results([folder / RESULTS])}


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_result_is_a_line_with_figures_and_a_failure_has_its_traceback(stub, tmp_path):
    stages = [
        stub("good", seconds=0),
        stub("bad", seconds=0, fails_until=str(tmp_path / "flag")),
        stub("slow", seconds=60, limit_s=1.5),
        stub("gone", function="no_such"),
    ]
    assert run_stages(stages, tmp_path / "out", facts={"commit": "abc"}) == 3
    lines = by_stage(tmp_path / "out")
    ends = {name: line["status"] for name, line in lines.items()}
    assert ends == {"good": "ok", "bad": "failed", "slow": "timeout", "gone": "failed"}
    assert lines["good"]["figures"] == {"first": 1, "second": 2}
    assert lines["slow"]["figures"] == {"first": 1}  # what it had found until then
    assert "ArithmeticError: not yet" in lines["bad"]["error"]
    assert 1.4 < lines["slow"]["seconds"] < 20
    for line in lines.values():
        assert {"device", "torch", "commit", "command", "date"} <= set(line)
    # Once more: what is finished is left out, what failed is tried again.
    assert run_stages(stages[:2], tmp_path / "again", done=[tmp_path / "out" / RESULTS]) == 0
    assert [*by_stage(tmp_path / "again")] == ["bad"]


def test_what_does_not_fit_is_left_out(stub, tmp_path, capsys):
    stages = [
        stub("long", seconds=0, expected_s=500.0),
        stub("short", seconds=0, expected_s=1.0),
    ]
    assert run_stages(stages, tmp_path, deadline_s=60.0) == 0
    assert [*by_stage(tmp_path)] == ["short"]
    assert "long: left out, " in capsys.readouterr().out


@pytest.mark.parametrize("ending", ["deadline", "kill"])
def test_a_stage_ends_with_all_that_it_has_started(stub, tmp_path, ending):
    """At the deadline, and when its runner is killed."""
    file, deadline_s = tmp_path / "pid", 1.5 if ending == "deadline" else 60.0
    stages = [stub("starts", function="starts_another", file=str(file))]
    runner = Forked(lambda: run_stages(stages, tmp_path, deadline_s=deadline_s))
    wait_until(lambda: file.exists() and file.read_text())
    if ending == "kill":
        runner.kill()
    else:
        assert runner.wait() == 0, runner.stderr
        assert by_stage(tmp_path)["starts"]["status"] == "timeout"
    wait_until(lambda: not alive(int(file.read_text())))


def test_stages_that_may_share_the_device_do_four_at_a_time_and_others_are_alone(stub, tmp_path):
    folder, four = tmp_path / "meet", list("abcd")
    folder.mkdir()

    def meet(name, others, **options):
        return stub(name, "meets", folder=str(folder), name=name, others=others, **options)

    stages = [meet(name, four, alone=False) for name in four]
    stages += [meet("alone", [f"{name}-over" for name in four])]
    stages += [meet(name, ["alone-over"], alone=False) for name in "ef"]
    assert run_stages(stages, tmp_path) == 0
    lines = by_stage(tmp_path)
    assert len(lines) == len(stages)
    assert lines["alone"]["figures"] == {"there": 4 + 4 + 1}


def test_half_a_line_is_no_result_and_the_next_one_is_whole(tmp_path):
    path = tmp_path / RESULTS
    append(path, {"stage": "one", "status": "ok"})
    with path.open("a") as file:
        file.write('{"stage": "two", "sta')
    append(path, {"stage": "three", "status": "ok"})
    assert [line["stage"] for line in read_results([path, path])] == ["one", "three"]
    assert read_results([tmp_path / "none"]) == []


def test_stages_have_names_of_their_own_and_time_to_end():
    stages = all_stages()
    names = [stage.name for stage in stages]
    assert len(names) == len(set(names))
    assert sum(name.startswith("mode-") for name in names) == len(MODES) == 10
    for stage in stages:
        assert stage.expected_s < stage.limit_s


def test_a_quarter_of_an_hour_has_what_it_is_for_and_its_dry_run_has_some_of_each(capsys):
    assert command.main(["--quarter-hour", "--list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert sum(float(line[1]) for line in lines) < 570
    for name in QUARTER:
        assert any(line[0].startswith(name) for line in lines)
        assert any(stage.name.startswith(name) and stage.dry for stage in all_stages())
    assert [line[0] for line in lines] == [stage.name for stage in all_stages()][: len(lines)]


def test_every_mode_and_every_arm_has_flags_that_train_takes(tmp_path):
    settings = Settings()
    for kind, own in MODES.values():
        sizes = (dual_batch_flags if kind == "dual" else equal_batch_flags)(settings)
        flags = [*common_flags(settings, tmp_path / "run"), "--epochs", "2", *own.split(), *sizes]
        assert parse_config(Config, flags).report_to == "none"
    for arm in ARMS:
        assert parse_config(Config, arm_flags(settings, arm, 0)).epochs == 140
        assert parse_config(Config, arm_flags(replace(settings, dry=True), arm, 0)).epochs == 2


@pytest.mark.parametrize("largest", [0, 1, 5, 97, 1000, 40_000])
def test_the_largest_batch_that_runs_is_found_to_within_a_hundredth(largest):
    asked = []

    def fits(size):
        asked.append(size)
        return size <= largest

    found = bisect(fits, 700, tolerance=0.01)
    assert largest / 1.011 - 1 <= found <= largest
    assert len(asked) < 25


def test_an_error_that_is_not_of_memory_ends_the_search_with_what_is_known():
    tried = []

    def runs(size):
        tried.append(size)
        if size > 150:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        if size > 120:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    (found,) = search(runs, 100, 110)
    assert found["note"].startswith("100 runs, another error ended")
    assert found["refusals"] == {"CUDA error: an illegal memory access was encountered": 200}
    assert tried == [100, 200]
    (found,) = search(runs, 75, 110)
    assert (found["runs"], found["predicted_over_runs"]) == (120, 0.625)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--out must name a folder"),
        (["--out", "out", "--stages", "mode-bsp,nonsense"], "--stages must name .* 'nonsense'"),
        (["--out", "out", "--data", "no/such"], "--data must be a folder that exists"),
    ],
)
def test_a_wrong_flag_gives_one_line(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert re.search(message, refused(capsys, command.main, flags))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_dry_run_of_all_stages_ends_with_every_stage_once(tmp_path):
    flags = ["--dry", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    call = [sys.executable, "-m", "experiments.benchmarks.gpu", *flags]
    process = subprocess.Popen(call, cwd=ROOT)
    first = tmp_path / "out" / RESULTS
    wait_until(lambda: first.exists() and len(read_results([first])) > 1, 300)
    process.kill()  # in the middle of the third, most likely
    process.wait()
    subprocess.run(call, cwd=ROOT, check=True)
    lines = read_results([first])
    assert sorted(line["stage"] for line in lines) == sorted(s.name for s in all_stages() if s.dry)
    assert {line["status"] for line in lines} == {"ok"}
