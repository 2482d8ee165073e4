"""What was given and what was found out: the file repeats the run, and a flag is a flag."""

import json
import shutil
import typing
from dataclasses import fields, replace

import pytest
import yaml

import train
from dbsl.base.errors import RunStopped
from dbsl.config.complete import found_by, still_true
from dbsl.config.parse import parse_config
from dbsl.plan.types import TimeModel
from dbsl.profile.timing import fit_profile
from tests.helpers import TINY, fingerprint, run, train_by
from train import Config

SETTINGS = {"resolutions": (16, 32), "epochs": 3, "small_ratio": 0.25}
SETTINGS |= {"slope": None, "intercept": None, "cpu_threads": None, "checkpoint_every": 1}
GIVEN = {name: value for name, value in (TINY | SETTINGS).items() if value is not None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished run that has found its step times and chosen all that it may."""
    folder = tmp_path_factory.mktemp("found") / "run"
    run(folder, **SETTINGS)
    return folder


@pytest.fixture(scope="module", autouse=True)
def machine(tmp_path_factory):
    """A machine of one thread, whose step times follow a formula."""

    def measured(step, sizes, **_):
        times = [max(0.005, 0.001 * size) for size in sizes]
        return fit_profile(step.resolution, sizes, times, [0.01] * len(times))

    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patches.setattr("dbsl.profile.cache.profile_steps", measured)
        patches.setattr("dbsl.runs.threads_of_process", lambda: 1)
        yield


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """Return ``planned(*flags)``: the run that train.py would train with these flags."""
    runs = []

    def stop(run, *_):
        runs.append(run)
        raise RunStopped

    def plan(*flags):
        with pytest.raises(RunStopped):
            train_by(*flags, "--output-dir", str(tmp_path / "again"))
        return runs.pop()

    monkeypatch.setattr(train, "Workers", stop)
    return plan


def parsed(file, *flags):
    """Return the config that flags and a file give."""
    return parse_config(Config, ["--config", str(file), *flags])


def read(folder):
    return yaml.safe_load((folder / "config.yaml").read_text())


def test_config_yaml_keeps_what_was_given_and_what_was_found_apart(folder):
    written = read(folder)
    found = written.pop("found")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in written.items()}
    assert values.items() >= GIVEN.items()
    assert set(written) <= {field.name for field in fields(Config)}
    assert not {"workers", "small_workers", "slope", "lr_milestones"} & set(written)
    assert written["mixed_precision"] == "auto"
    assert (found["workers"], found["small_workers"], found["processes"]) == (4, 1, 1)
    assert (found["lr_milestones"], found["warmup_epochs"]) == ([2], 0.3)
    assert len(found["slope"]) == len(found["intercept"]) == 2
    assert found["mixed_precision"] in ("no", "bf16")
    assert found["cpu_threads"] == 1


def test_the_file_as_it_is_repeats_the_run_to_the_bit(folder, tmp_path, monkeypatch):
    def slower(step, sizes, **_):  # a machine on which the plan would be another one
        return fit_profile(
            step.resolution, sizes, [0.1 + 0.001 * x for x in sizes], [0] * len(sizes)
        )

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("dbsl.profile.cache.profile_steps", slower)
    again = tmp_path / "again"
    train_by("--config", str(folder / "config.yaml"), "--output-dir", str(again))
    assert (again / "config.yaml").read_text() == (folder / "config.yaml").read_text()
    assert fingerprint(again) == fingerprint(folder)


def test_what_follows_from_other_settings_is_found_anew(folder, planned):
    file = ("--config", str(folder / "config.yaml"))
    run = planned(*file, "--small-ratio", "0.75", "--epochs", "10")
    assert run.config.small_workers == 3
    assert sum(worker.small for worker in run.first[32].workers) == 3
    assert (run.config.lr_milestones, run.config.warmup_epochs) == ((6, 9), 1.0)
    assert planned(*file, "--epochs", "40").config.warmup_epochs == 2.0  # at most
    run = planned(*file, "--resolutions", "24", "--slope", "0.001", "--intercept", "0.01")
    assert (run.config.slope, set(run.first)) == ((0.001,), {24})


@pytest.mark.parametrize(
    ("flags", "kept", "gone"),
    [
        ("", "slope intercept large_batch_size workers", ""),
        ("--eval-every 2", "slope workers", ""),
        ("--model resnet10t", "", "slope intercept large_batch_size workers"),
        ("--profile again", "", "slope"),
        ("--epochs 10", "slope workers", "lr_milestones warmup_epochs"),
        ("--epochs 10 --seed 1", "", "slope workers lr_milestones warmup_epochs"),
    ],
)
def test_findings_hold_until_another_setting_changes(
    folder, tmp_path, monkeypatch, flags, kept, gone
):
    (tmp_path / "more.yaml").write_text(f"base: {folder / 'config.yaml'}\n")  # as the file itself
    found = set(parsed(tmp_path / "more.yaml", *flags.split()).found)
    assert found >= {*kept.split()}
    assert not found & {*gone.split()}
    monkeypatch.setenv("WORLD_SIZE", "2")  # more processes count their workers anew
    found = set(parsed(tmp_path / "more.yaml", *flags.split()).found)
    assert not {"workers", "small_workers", "cpu_threads", "slope"} & found


def test_a_measured_floor_is_planned_with_and_goes_with_its_slope(planned):
    flags = ["--model", "test_resnet", "--train-samples", "240", "--resolutions", "16,32"]
    run = planned(*flags, "--large-batch-size", "20", "--workers", "4")
    assert run.config.floor == pytest.approx((0.005, 0.005))
    times = (run.config.slope, run.config.intercept, run.config.floor)
    assert [*run.known.models[32]] == [TimeModel(*(x[0] for x in times))] * 4
    assert all(w.predicted_time_s >= 0.005 * w.steps for w in run.first[32].workers)
    given = Config()
    found = found_by(given, run.config, 1)
    assert set(still_true(found, given, given, 1)) >= {"slope", "intercept", "floor"}
    changed = replace(given, slope=(1.0,), intercept=(1.0,))
    assert not {"slope", "intercept", "floor"} & set(still_true(found, given, changed, 1))


@pytest.mark.parametrize("given", ["auto", "no"])
def test_a_precision_that_was_given_is_not_the_launchers_to_move(given):
    config = replace(Config(), mixed_precision=given)
    found = {"slope": (1.0,), "processes": 1} | (
        {"mixed_precision": "no"} if given == "auto" else {}
    )
    kept = still_true(found, config, config, 1, "bf16")
    assert ("slope" in kept) == (given == "no")


def test_a_run_that_is_made_longer_finds_milestones_anew(folder, tmp_path, capsys):
    longer = tmp_path / "longer"
    shutil.copytree(folder, longer)
    train_by("--resume", str(longer), "--epochs", "7")
    said = capsys.readouterr().out
    assert "epochs 3 -> 7" in said
    assert "lr_milestones 2 -> 4,6" in said
    lines = map(json.loads, (longer / "metrics.jsonl").read_text().splitlines())
    rates = [row["learning_rate"] for row in lines if row["event"] == "eval"]
    assert rates == pytest.approx([0.02, 0.02, 0.004, 0.02, 0.004, 0.004, 0.0008])
    assert read(longer)["found"]["lr_milestones"] == [4, 6]
    (longer / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"epochs must be above the 7 that are complete, got 6"):
        train_by("--resume", str(longer), "--epochs", "6")


def test_a_file_without_findings_has_its_settings_as_given(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "slope: [0.001]\nintercept: [0.01]\nworkers: 4\nlr_milestones: [2]\nreset_momentum: never\n"
    )
    config = parsed(tmp_path / "config.yaml")
    assert (config.slope, config.workers, config.lr_milestones) == ((0.001,), 4, (2,))
    assert (config.reset_momentum, config.found) == ("never", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("found: 3\n", "found must map settings to values, got 3"),
        ("found: {sed: 3}\n", "found must name settings, got sed"),
    ],
)
def test_odd_findings_are_refused(tmp_path, text, message):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        parsed(tmp_path / "config.yaml")


def test_a_resumed_run_takes_back_any_setting_that_may_be_unset(tmp_path):
    hints = typing.get_type_hints(Config)
    optional = [n for n, hint in hints.items() if type(None) in typing.get_args(hint)]
    optional.remove("floor")  # no flag
    assert {"global_batch_size", "merge", "augment"} <= set(optional)
    flags = [text for name in optional for text in (f"--{name}", "unset")]
    values = vars(parse_config(Config, flags))
    assert {name: values[name] for name in optional} == dict.fromkeys(optional)
    settings = "sync: step\nglobal_batch_size: 8\nworkers: 4\n"
    (tmp_path / "config.yaml").write_text(settings)
    resume = ["--resume", str(tmp_path), "--sync", "bsp"]
    with pytest.raises(ValueError, match="sets global_batch_size"):
        parse_config(Config, resume)
    resume += ["--global-batch-size", "unset"]
    assert parse_config(Config, resume).global_batch_size is None
