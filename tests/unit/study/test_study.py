import math
import signal
import time
from dataclasses import replace

import datasets
import numpy as np
import pandas
import pytest
import torch
from accelerate.state import AcceleratorState

from dbsl.config.parse import yaml_to_argv
from dbsl.model import load_model
from dbsl.tools.study import study
from dbsl.tools.study.scaling import Trial
from dbsl.tools.study.store import Queue, Search, read_workloads, write_trial
from dbsl.tools.study.trials import (
    Images,
    ImageTask,
    Range,
    measured_steps,
    run_trial,
    search_points,
)
from tests.helpers import Forked, refused, rows, run, wait_until, write_shards

TINY = {"batch_sizes": "16,32", "goal_error": 0.8, "trials": 3, "optimizers": "sgd,momentum"}
TINY |= {"model": "test_resnet", "train_samples": 64, "eval_samples": 40, "max_steps": 6}
TINY |= {"mixed_precision": "no", "cpu_threads": 1}


def flags(folder, **changes):
    return yaml_to_argv({**TINY, **changes, "output_dir": folder})


def run_study(folder, **changes):
    AcceleratorState._reset_state(True)
    study.main(flags(folder, **changes))


def trials_of(folder):
    """Return what every trial of a study came to, by workload, batch size and number."""
    return {
        (name, own.batch_size, trial.trial_id): (trial.status, trial.steps, dict(trial.parameters))
        for name, studies in read_workloads([folder / "digits"]).items()
        for own in studies
        for trial in own.trials
    }


# --- the loop of a trial


class Script:
    """A task whose errors are given, by step."""

    def __init__(self, errors, loss=1.0):
        self._errors, self._loss, self.rates = errors, loss, []

    def advance(self, rates):
        self.rates += rates
        return self._loss

    def measure(self):
        return 1.0, self._errors[min(len(self.rates), len(self._errors) - 1)]


def search(budget, parameters, **more):
    given = {"optimizer": "sgd", "batch_size": 16, "folder": None} | more
    return Search(budget=budget, points={1: parameters}, **given)


FALLING = [0.9, 0.8, 0.5, 0.49, 0.1]


@pytest.mark.parametrize(
    ("errors", "changes", "status", "steps"),
    [
        (FALLING, {}, "COMPLETE", 3),  # the goal is strict
        (FALLING, {"goal": 0.0}, "COMPLETE", 10),
        ([0.9] * 12, {}, "COMPLETE", 10),
        ([0.9] * 10 + [0.1], {"most_steps": lambda: 4}, "INCOMPLETE", 4),
        (
            [0.9, 0.9, 0.9, 0.9, 0.1],
            {"most_steps": lambda: 4},
            "COMPLETE",
            4,
        ),  # as good in any order
        ([0.9, 0.1], {"loss": math.nan}, "INFEASIBLE", 1),
    ],
)
def test_trial_ends_at_the_goal_or_where_it_can_reach_none_or_not_as_the_best(
    errors, changes, status, steps
):
    settings = {"goal": 0.5, "spacing": 0.0} | changes
    task = Script(errors, settings.pop("loss", 1.0))
    trial = run_trial(task, search(10, {"learning_rate": 0.1}), 1, **settings)
    assert (trial.status, trial.steps) == (status, steps)
    assert trial.measurements["step"].tolist() == list(range(steps + 1))
    diverged = math.isnan(trial.measurements["val/classification_error"].iloc[-1])
    assert diverged == (status == "INFEASIBLE")


def test_measurements_are_a_share_of_the_steps_apart():
    assert list(measured_steps(7, 0.0)) == [1, 2, 3, 4, 5, 6, 7]
    steps = list(measured_steps(1000, 0.05))
    assert steps[:20] == list(range(1, 21))
    assert steps[-1] == 1000
    gaps = np.diff(steps[20:-1]) / steps[20:-2]
    assert (gaps <= 0.05).all()
    assert len(steps) < 130


def test_rate_falls_in_a_line_then_stays():
    given = {"learning_rate": 0.4, "end_learning_rate_factor": 0.25}
    given["learning_rate_decay_steps"] = 10
    task = Script([1.0])
    run_trial(task, search(51, given), 1, spacing=0.5, goal=0.5)
    assert len(task.rates) == 51
    assert [task.rates[n] for n in (0, 5, 10, 50)] == pytest.approx([0.4, 0.25, 0.1, 0.1])
    run_trial(task, search(1, {"learning_rate": 0.3}), 1, spacing=0.5, goal=0.5)
    assert task.rates[-1] == 0.3


# --- the same step as train.py's


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_trial_is_train_pys_run_with_one_worker(tmp_path, accelerator, momentum):
    steps = {"workers": 1, "sync": "step", "local_batch_sizes": (16,), "drop_last": True}
    rates = {"lr": 0.05, "momentum": momentum, "lr_milestones": (), "warmup_epochs": 0.0}
    size = {"train_samples": 70, "eval_samples": 40, "epochs": 2, "mixed_precision": "no"}
    run(tmp_path / "run", **steps, **rates, **size, checkpoint_every=0, seed=3)
    own = {"batch_sizes": (16,), "augment": "crop", "resolution": 16, "eval_batch_size": 64}
    own |= {"model": "test_resnet", "train_samples": 70, "eval_samples": 40, "seed": 3}
    images = Images(study.StudyConfig(goal_error=0.5, **own), accelerator)
    given = {"learning_rate": 0.05, "momentum": momentum, "weight_decay": 5e-4}
    name = "sgd" if momentum == 0 else "nesterov"
    task = ImageTask(images, search(8, given, optimizer=name), 1, seed=3)
    task.advance([0.05] * 5)
    task.advance([0.05] * 3)  # 4 steps an epoch: both calls end inside one
    trained = load_model(tmp_path / "run").state_dict()
    for name, value in task._model.state_dict().items():
        assert torch.equal(value, trained[name]), name
    last = rows(tmp_path / "run", "eval")[-1]
    expected = (last["loss"], 1 - last["accuracy"])
    assert task.measure() == pytest.approx(expected, rel=1e-5)


# --- search


RANGES = {
    "effective_learning_rate": Range(0.01, 10.0, "LOG_SCALE"),
    "momentum": Range(0.5, 0.99, "REVERSE_LOG_SCALE"),
    "end_learning_rate_factor": Range(0.1, 1.0, "LOG_SCALE"),
    "learning_rate_decay_share": Range(0.25, 1.0, "LINEAR_SCALE"),
    "weight_decay": Range(5e-4, 5e-4, "LOG_SCALE"),
}


def test_points_fill_every_range_evenly_and_repeat():
    points = search_points(RANGES, 64, 5, 200)
    assert points == search_points(RANGES, 64, 5, 200)
    assert points[:10] == search_points(RANGES, 10, 5, 200)
    assert points != search_points(RANGES, 64, 6, 200)
    rates = np.array([values["effective_learning_rate"] for values in points])
    eighths = np.histogram(np.log10(rates), bins=8, range=(-2, 1))[0]
    assert (eighths == 8).all()  # which random points would not do
    momenta = np.array([values["momentum"] for values in points])
    assert momenta.min() >= 0.5
    assert momenta.max() <= 0.99
    assert np.histogram(np.log(1 - momenta), bins=8)[0].min() >= 6
    for values in points:
        rate = values["effective_learning_rate"] * (1 - values["momentum"])
        assert values["learning_rate"] == pytest.approx(rate)
        assert 50 <= values["learning_rate_decay_steps"] <= 200
        assert values["weight_decay"] == 5e-4


def test_points_are_those_of_studies_that_optuna_searched():
    ranges = RANGES | {"weight_decay": Range(0, 0, "LOG_SCALE")}
    (point, *_) = search_points(ranges, 2, 123456789012, 100)
    known = [0.326030877, 0.826246616, 0.155853248, 0.737200552, 0.0]
    assert sorted(point[name] for name in ranges) == pytest.approx(sorted(known))


@pytest.mark.parametrize(
    ("optimizer", "searched"),
    [("sgd", False), ("momentum", True), ("nesterov", True), ("adamw", False), ("rmsprop", True)],
)
def test_momentum_is_searched_where_the_optimizer_takes_it(optimizer, searched):
    config = study.StudyConfig(goal_error=0.1, optimizers=(optimizer,))
    ranges = config.ranges(optimizer)
    assert ("momentum" in ranges) == searched
    rates = ranges["effective_learning_rate"]
    factor = {"adamw": 0.01, "rmsprop": 0.1}.get(optimizer, 1)  # of SGD's
    assert (rates.low, rates.high) == pytest.approx((0.01 * factor, 10 * factor))


# --- the queue


def make_queue(folder, trials=3, check_stop=lambda: None):
    points = {number: {"learning_rate": 0.1 * number} for number in range(1, trials + 1)}
    (folder / "queue").mkdir(exist_ok=True)
    return Queue(folder, [Search("sgd", 16, 100, folder / "16", points)], check_stop)


def numbers(queue):
    """Yield the trials that a process gets."""
    return (number for _, number in queue.trials())


def write(folder, trial_id, status="COMPLETE", reached=20):
    columns = {"step": [reached], "val/classification_error": [0.1]}
    trial = Trial(trial_id, status, 20, {}, pandas.DataFrame(columns))
    write_trial(folder / "16", trial)
    return trial


def test_each_trial_is_given_to_one_process_and_a_dead_ones_to_the_next(tmp_path):
    first, second = (numbers(make_queue(tmp_path)) for _ in range(2))
    assert [next(first), next(second)] == [1, 2]
    write(tmp_path, 1)
    assert next(first) == 3
    second.close()  # as the system lets go of the locks of a process that dies
    write(tmp_path, 3)
    assert next(first) == 2
    write(tmp_path, 2, "INFEASIBLE")
    assert next(first, None) is None
    assert [*numbers(make_queue(tmp_path))] == []
    assert next(numbers(make_queue(tmp_path, trials=4))) == 4


def test_a_process_waits_for_the_trials_of_others_and_may_stop(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("dbsl.tools.study.store._LOOK_S", 0.0)
    other, waited = numbers(make_queue(tmp_path, trials=1)), iter((1, 1, 0))
    assert next(other) == 1
    with pytest.raises(ZeroDivisionError):  # by the third look
        next(numbers(make_queue(tmp_path, 1, lambda: 1 / next(waited))))
    assert capsys.readouterr().out == "waiting for 1 trial of other processes\n"


def test_what_one_process_has_found_all_know(tmp_path):
    first, second = make_queue(tmp_path), make_queue(tmp_path)
    search, _ = next(first.trials())
    assert second.best(search) == math.inf
    for trial in (write(tmp_path, 2, reached=10), write(tmp_path, 3, reached=30)):
        first.note(search, trial, goal=0.2)
        assert second.best(search) == 10


# --- the command


def test_study_runs_writes_and_goes_on(tmp_path, capsys):
    run_study(tmp_path, trials=1, early_stopping=False)
    printed = capsys.readouterr().out
    assert "maximum useful batch" in printed or "no batch size reached the goal" in printed
    found = trials_of(tmp_path)
    assert [key[1:] for key in found] == [(16, 1), (32, 1)] * 2
    for (name, *_), (status, steps, given) in found.items():
        assert (status, steps) == ("COMPLETE", 6)
        assert ("momentum" in given) == ("momentum" in name)
    run_study(tmp_path, trials=2, early_stopping=False)
    assert capsys.readouterr().out.count("trial 2/2") == 4  # the first ones did not run again
    more = trials_of(tmp_path)
    assert len(more) == 8
    assert {key: more[key] for key in found} == found


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return the folder of a study of one optimizer."""
    folder = tmp_path_factory.mktemp("studies") / "unbroken"
    run_study(folder, optimizers="sgd", early_stopping=False)
    return folder


def all_texts(folder):
    """Return what is in all files of a study but those of its queue."""
    files = (path for path in folder.rglob("*") if path.suffix in (".json", ".csv", ".yaml"))
    return {path.relative_to(folder): path.read_text() for path in files}


def test_one_of_two_processes_is_killed_and_every_trial_is_there_once(tmp_path, unbroken):
    given = flags(tmp_path, optimizers="sgd", early_stopping=False)
    killed, other = (Forked(lambda: study.main(given)) for _ in range(2))
    wait_until(lambda: ", trial " in killed.stdout)
    time.sleep(0.05)  # inside the next trial, as a rule
    killed.kill()
    assert other.wait(120) == 0, other.stderr
    ran = [line for line in (killed.stdout + other.stdout).splitlines() if ", trial " in line]
    assert len({line.partition(":")[0] for line in ran}) == len(ran) >= 5  # it dies as it prints
    assert all_texts(tmp_path) == all_texts(unbroken)


@pytest.mark.slow
def test_stopped_study_gives_its_trial_back_and_says_how_to_go_on(tmp_path):
    process = Forked(lambda: study.main(flags(tmp_path, max_steps=100, goal_error=0.001)))
    wait_until(lambda: process.stdout.count("\n"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    assert "giving its trial back" in process.stderr
    assert "stopped; repeat the command to continue" in process.stderr


def test_plot_reads_a_study_again(tmp_path, unbroken, capsys):
    study.main(["--plot", str(unbroken), "--output-dir", str(tmp_path / "b")])
    assert "error < 0.8" in capsys.readouterr().out
    assert (tmp_path / "b/results.csv").exists()


GOAL = "--goal-error 0.3"
SMALL = f"{GOAL} --model test_resnet --train-samples 64 --eval-samples 40 --mixed-precision no"
NORMALISED = "--resolution 8 --model resnet18"  # its last maps are one pixel


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "goal_error must be given, in (0, 1), got none"),
        ("--goal-error 1.5", "goal_error must be in (0, 1), got 1.5"),
        (f"{GOAL} --batch-sizes 0", "batch_sizes must be at least 1, got 0"),
        (f"{GOAL} --effective-lr 1,0.1", "effective_lr must ascend, got 1.0,0.1"),
        (f"{GOAL} --weight-decay 0,1", "weight_decay must be above 0, got 0"),
        (f"{GOAL} --optimizers sgdd", "optimizer must be a name that timm"),
        ("--plot", "plot must name a folder, got none"),
        ("--plot nowhere", "folder must have a study.json in it or below, got nowhere"),
        (f"{SMALL} --batch-sizes 16,65", "batch_sizes must be in [2, 64], got 65"),
        (f"{SMALL} {NORMALISED} --batch-sizes 1,16", "batch_sizes must be in [2, 64], got 1"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, study.main, arguments.split()).startswith(message)
    assert not list(tmp_path.iterdir())


def test_folder_of_another_study_is_refused(unbroken):
    before = trials_of(unbroken)
    with pytest.raises(ValueError, match=r"goal_error must be 0.8 as in .*study.yaml, or output_d"):
        run_study(unbroken, early_stopping=False, goal_error=0.7)
    with pytest.raises(ValueError, match=r"momentum must be .* as in .*, got 0.9$"):
        run_study(unbroken, early_stopping=False, momentum=(0.9,))
    assert trials_of(unbroken) == before


def test_a_study_reads_data_that_come_through_a_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")
    (tmp_path / "shards").mkdir()
    given = {"dataset": write_shards(tmp_path / "shards"), "cache_gib": 1, "loader_workers": 0}
    sizes = {"batch_sizes": 16, "optimizers": "sgd", "trials": 1, "eval_samples": 16}
    run_study(tmp_path / "study", **given, **sizes)
    assert "cache_gib: 1.0" in (tmp_path / "study/study.yaml").read_text()
    assert [*(tmp_path / "hf_cache/dbsl/row-groups").glob("*.arrow")]


def test_budget_is_the_smaller_of_steps_and_examples():
    config = study.StudyConfig(goal_error=0.3)
    assert config.budget(100, 1000) == 400  # 40 epochs
    assert replace(config, max_steps=50).budget(100, 1000) == 50
    both = replace(config, max_steps=50, max_examples=2000)
    assert [both.budget(size, 1000) for size in (10, 100, 5000)] == [50, 20, 1]
