import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import scipy.stats
import yaml

import train
from dbsl.config.parse import parse_config, parse_flags
from experiments.compare import compare, jobs, statistics
from experiments.compare.report import arms_figure, read_runs, write_comparison, write_runs
from experiments.compare.statistics import ArmRun, detectable, interval, paired, read_run, table
from experiments.plots.rows import read
from tests.helpers import ROOT, Forked, refused

ARM = {"model": "test_resnet", "resolutions": [16], "train_samples": 60, "eval_samples": 40}
ARM |= {"epochs": 2, "slope": 0.001, "intercept": 0.01, "mixed_precision": "no", "cpu_threads": 1}


def run_of(seed, accuracy, time_s=10.0):
    curve = ((time_s / 2, accuracy / 2), (time_s, accuracy))
    return ArmRun(seed, accuracy, 1.0, time_s, 100, curve)


def test_interval_is_students():
    found = interval([0.70, 0.72, 0.74])
    assert (found.mean, found.count) == (pytest.approx(0.72), 3)
    assert found.sd == pytest.approx(0.02)
    assert found.half == pytest.approx(4.3027 * 0.02 / math.sqrt(3), rel=1e-4)  # t(2, 0.975)
    assert math.isnan(interval([0.5]).half)
    diverged = interval([0.5, math.nan, 0.7])
    assert diverged.count == 3
    assert all(map(math.isnan, (diverged.mean, diverged.sd, diverged.half, diverged.p)))
    with pytest.raises(ValueError, match="got none"):
        interval([])


def test_differences_are_paired_by_seed():
    base = [run_of(0, 0.50), run_of(1, 0.60), run_of(2, 0.70)]
    arm = [run_of(2, 0.73), run_of(0, 0.52), run_of(5, 0.99)]
    found = paired(arm, base)
    assert (found.count, found.mean) == (2, pytest.approx(0.025))
    assert found.sd == pytest.approx(0.01 / math.sqrt(2))  # the seeds' own spread is not in it
    assert paired(arm, [run_of(7, 0.1)]) is None
    # One image more in each of three seeds would else be told with certainty.
    found = paired([run_of(run.seed, run.accuracy + 1 / 360) for run in base], base)
    assert found.mean == pytest.approx(1 / 360)
    assert all(math.isnan(each) for each in (found.half, found.p, found.detectable))


def test_table_has_last_epochs_times_to_target_and_no_empty_arms(tmp_path):
    arms = {
        "base": [run_of(0, 0.50), run_of(1, 0.60)],
        "fast": [run_of(0, 0.58, 4.0), run_of(1, 0.68, 4.0)],
        "never": [run_of(0, 0.40), run_of(1, 0.56)],
        "not run": [],
    }
    rows = {row["arm"]: row for row in table(arms, "base", target=0.5)}
    assert list(rows) == ["base", "fast", "never"]
    assert rows["base"]["accuracy"] == pytest.approx(55.0)
    assert math.isnan(rows["base"]["difference"])
    assert rows["fast"]["difference"] == pytest.approx(8.0)
    between = (2 + 2 * 21 / 29, 2 + 2 * 16 / 34)  # halfway each had half its accuracy
    assert rows["fast"]["time_to_target_s"] == pytest.approx(sum(between) / 2)
    assert (rows["never"]["reached"], rows["never"]["time_to_target_s"]) == (1, math.inf)
    assert table(arms, "base")[0]["target"] == pytest.approx(54.0)  # a point below the baseline
    printed = write_comparison(arms, "base", 0.5, tmp_path, "")
    assert "- below 'to 50.0 %': not every seed has reached it (never: 1 of 2 seeds)" in printed


def test_p_values_are_those_of_the_paired_test_corrected_for_their_number():
    base = [run_of(seed, 0.50 + 0.01 * seed) for seed in range(4)]
    arms = {"base": base}
    for name, gains in (("sure", (5, 6, 5, 6)), ("unsure", (1, -1, 2, 0)), ("also", (3, 4, 5, 3))):
        arms[name] = [
            replace(run, accuracy=run.accuracy + gain / 100)
            for run, gain in zip(base, gains, strict=True)
        ]
    rows = {row["arm"]: row for row in table(arms, "base")}
    assert math.isnan(rows["base"]["p_holm"])
    p = scipy.stats.ttest_rel([r.accuracy for r in arms["sure"]], [r.accuracy for r in base]).pvalue
    assert rows["sure"]["p"] == pytest.approx(p)
    assert rows["sure"]["p_holm"] == pytest.approx(3 * p)
    assert rows["unsure"]["p_holm"] == pytest.approx(rows["unsure"]["p"])
    first, undefined, last = statistics.holm([0.04, math.nan, 0.03])
    assert (first, last, math.isnan(undefined)) == (0.06, 0.06, True)


def test_what_so_few_seeds_can_find_has_the_published_sizes():
    # The usual tables of power 0.8 at 5 %, two-sided: n = 3, 5, 10.
    assert [detectable(n) for n in (3, 5, 10)] == pytest.approx([3.26, 1.68, 1.0], rel=0.01)
    assert math.isnan(detectable(1))


def test_cost_per_point_is_worker_seconds_over_points_gained():
    arms = {"base": (0.50, 10.0, 4), "dear": (0.52, 15.0, 4), "alone": (0.55, 30.0, 1)}
    arms["worse"] = (0.49, 5.0, 4)
    runs = {name: [replace(run_of(0, a, s), workers=n)] for name, (a, s, n) in arms.items()}
    costs = [row["cost_per_point_s"] for row in table(runs, "base")]
    expected = [math.nan, 20 / 2, -10 / 5, math.nan]  # alone is better and cheaper
    assert costs == pytest.approx(expected, nan_ok=True)


def test_equal_time_is_never_above_the_baselines_in_whole_epochs():
    base = [replace(run_of(0, 0.5, 20.0), epochs=20)]
    for time_s, epochs in ((20.0, 20), (21.0, 19), (80.0, 5), (15.0, 26), (2000.0, 1)):
        arm = [replace(run_of(0, 0.5, time_s), epochs=20)]
        assert statistics.equal_time_epochs(arm, base) == epochs


@pytest.mark.parametrize("milestones", [None, "None", "unset", "", [], "3,"])
def test_epochs_move_whatever_milestones_there_are(milestones):
    settings = {"lr_milestones": milestones, "warmup_epochs": "None"}
    extra = compare.Arm("a", "a", Path("a"), settings, {}).with_epochs(8, 4).extra
    assert extra == {"epochs": 8} | ({"lr_milestones": [6]} if milestones == "3," else {})


def test_figure_shows_means_and_intervals_within_what_accuracy_can_be():
    arms = {"a": [run_of(0, 0.9), run_of(1, 0.6)], "b": [run_of(0, 0.7)], "none": []}
    left, right = arms_figure(arms, "a").axes  # the interval of a is 75 +- 191 %
    means = [line.get_ydata().tolist() for line in left.lines]
    assert means == [pytest.approx([37.5, 75]), pytest.approx([35, 70])]
    assert [text.get_text() for text in right.get_yticklabels()] == ["a", "b"]
    assert right.get_xlim() == (0, 100)
    marks = [(line.get_marker(), *line.get_xydata()[0]) for line in right.lines]
    assert [mark for mark in marks if mark[0] in "<>"] == [("<", 0, 0), (">", 100, 0)]


@pytest.fixture
def forked(monkeypatch):
    """Have runs begin as forks of this process, which has the imports already."""

    def start(command, env, start_new_session, stdout=None, stderr=None):
        assert command[:2] == [sys.executable, str(ROOT / "train.py")]
        return Forked(lambda: train.main(parse_config(train.Config, command[2:])))

    monkeypatch.setattr(jobs, "subprocess", SimpleNamespace(Popen=start))


@pytest.fixture
def launched(monkeypatch):
    """Have runs end at once, a second an epoch over the workers; return what was launched."""
    launched = []

    def launch_all(launches, jobs, stopping, on_finished):
        for launch in launches:
            if not compare.is_finished(launch.folder):
                launched.append(launch)
                end_run(launch.folder, parse_config(train.Config, launch.flags))
                on_finished()

    monkeypatch.setattr(compare, "launch_all", launch_all)
    return launched


def end_run(folder, config):
    epochs, workers = range(1, config.epochs + 1), config.workers or 4
    evaluations = [
        {"event": "eval", "train_time_s": 4 * epoch / workers, "accuracy": epoch / 100}
        for epoch in epochs
    ]
    summary = {"seed": config.seed, "epochs": config.epochs, "workers": workers}
    summary |= {"final_accuracy": config.epochs / 100, "final_loss": 1.0, "total_time_s": 9.0}
    summary |= dict.fromkeys(("device", "precision", "torch", "timm"), "x")
    if config.ema_decay:
        summary |= {"final_ema_accuracy": 0.5, "final_ema_loss": 0.5}
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, evaluations)))
    (folder / "summary.json").write_text(json.dumps(summary | {"samples_seen": 60}))


def rows_of(path):
    return {row["arm"]: row for row in read(path)}


@pytest.fixture
def arms(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs/tiny").mkdir(parents=True)
    paths = []
    for name, extra in (("large", {}), ("dual", {"small_workers": 2, "small_batch_size": 4})):
        path = tmp_path / f"configs/tiny/{name}.yaml"
        path.write_text(yaml.safe_dump(ARM | {"large_batch_size": 8} | extra))
        paths.append(str(path))
    return paths


@pytest.mark.usefixtures("forked")
def test_an_arm_runs_once_here_and_its_rows_count_on_another_machine(arms, tmp_path, capfd):
    options = [arms[1], "--seeds", "1", "--set", "eval_train=true"]
    compare.main(options)
    assert "run 1/1: dual, seed 0" in capfd.readouterr().out
    folder, output = tmp_path / "runs/tiny-dual-s0", tmp_path / "results/tiny"
    summary = json.loads((folder / "summary.json").read_text())
    row = rows_of(output / "arms.csv")["dual"]
    assert float(row["accuracy"]) == pytest.approx(100 * summary["final_accuracy"], abs=0.01)
    assert (output / "arms.png").exists()
    run = read_run(folder)
    assert (run.samples, len(run.curve)) == (120, 2)
    assert run.train_time_s < 1.0  # the simulated workers' clock
    rows = (output / "arms_runs.csv").read_text()
    assert 0 <= float(rows_of(output / "arms_runs.csv")["dual"]["train_accuracy"]) <= 100

    shutil.rmtree(output)  # the run is there
    compare.main(options)
    shutil.rmtree(tmp_path / "runs")  # a clone has the tables alone
    compare.main([*options, "--set", "dataset=digits"])
    # Another number of checkpoints makes no other result.
    compare.main([*options, "--set", "keep_checkpoints=2", "--report-only"])
    assert "run 1" not in capfd.readouterr().out
    assert (output / "arms_runs.csv").read_text() == rows


def test_a_run_that_began_in_processes_has_the_wall_clocks_times(tmp_path):
    """Where not every evaluation has the simulated clock, no time is of it."""
    config = train.Config(epochs=2, seed=0, workers=1)
    end_run(tmp_path / "run", config)
    metrics = tmp_path / "run/metrics.jsonl"
    first, last = map(json.loads, metrics.read_text().splitlines())
    metrics.write_text(json.dumps(first) + "\n" + json.dumps(last | {"virtual_time_s": 0.1}))
    assert read_run(tmp_path / "run").train_time_s == last["train_time_s"]


def test_runs_have_their_comparison_arm_and_seed_in_trackers(arms, monkeypatch, launched):
    monkeypatch.setenv("WANDB_JOB_TYPE", "mine")
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    compare.main([arms[1], "--seeds", "2", "--set", "report_to=tensorboard"])
    assert [launch.environment for launch in launched] == [
        {"WANDB_RUN_GROUP": "tiny", "WANDB_JOB_TYPE": "mine", "WANDB_NAME": f"dual-s{seed}"}
        for seed in range(2)
    ]
    flags = launched[0].flags
    assert flags[flags.index("--report-to") + 1] == "tensorboard"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nowhere.yaml", "config must be a readable YAML file, got nowhere.yaml"),
        ("LARGE --set lr", "set must be of the form name=value, got lr"),
        ("a/x.yaml b/x.yaml", "arms must be one or more YAML files with different names"),
        ("LARGE --baseline y", "baseline must be one of large, got y"),
        ("LARGE --vary lr=0.1,0.1", "vary must have values that differ, got lr=0.1,0.1"),
        ("LARGE --vary lr=1 --set lr=2", "set and vary must give a setting once"),
        ("LARGE --set a-b=2 --set a_b=3", "set and vary must give a setting once"),
        ("LARGE --vary lrr=1,2", "--lr, got --lrr (arm large-lrr1)"),
        ("LARGE --set momentun=0.5", "--momentum, got --momentun (arm large)"),
        ("LARGE --vary lr=0.1,fast", "--lr must be a number, got 'fast' (arm large-lrfast)"),
        ("LARGE --report-only", "at least one finished run, got none"),
        ("LARGE --set seed=3", "an arm must leave seed to the comparison, got it in set or vary"),
        ("LARGE --set save_best=maybe", "that takes them, got 'maybe' after --save-best (arm lar"),
        ("LARGE --report-only --set save_best=True", "at least one finished run, got none"),
        ("LARGE --equal-time --report-only", "at least one fin"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(arguments, message, arms, capsys, tmp_path):
    assert message in refused(capsys, compare.main, arguments.replace("LARGE", arms[0]).split())
    assert not (tmp_path / "runs").exists()


def test_equal_time_trains_again_with_other_epochs_and_moved_milestones(
    tmp_path, monkeypatch, launched
):
    monkeypatch.chdir(tmp_path)
    arms = []
    for name, extra in (("base", {}), ("alone", {"workers": 1, "ema_decay": 0.5})):
        arms.append(f"{name}.yaml")
        settings = ARM | {"workers": 4, "large_batch_size": 8, "epochs": 4, "lr_milestones": [2]}
        (tmp_path / arms[-1]).write_text(yaml.safe_dump(settings | extra))
    options = ["--seeds", "1", "--jobs", "2", "--equal-time", "--set", "lr=0.01"]
    compare.main([*arms, *options, "--output-dir", "out"])
    titles = [launch.title for launch in launched]  # one worker takes four times as long
    assert titles == ["base, seed 0", "alone, seed 0", "alone-1epochs, seed 0"]
    made = parse_config(train.Config, launched[-1].flags)
    assert (made.epochs, made.lr_milestones, made.lr) == (1, (), 0.01)
    rows = {name: rows_of(tmp_path / f"out/{name}.csv") for name in ("arms", "equal_time")}
    for own in rows.values():
        assert own.keys() == {"base", "alone", "alone (EMA)"}
        assert float(own["alone (EMA)"]["accuracy"]) == 50.0
    assert [own["alone"]["epochs"] for own in rows.values()] == ["4", "1"]
    shutil.rmtree(tmp_path / "runs")  # another machine has the rows alone
    (tmp_path / "out/equal_time_runs.csv").unlink()
    del launched[:]
    compare.main([*arms, *options, "--output-dir", "out"])
    assert [launch.title for launch in launched] == ["alone-1epochs, seed 0"]
    assert rows["arms"]["base"] | {"target": ""} == rows["equal_time"]["base"] | {"target": ""}
    row = rows["arms"]["base"]
    assert row["command"].startswith("python -m experiments.compare *.yaml --seeds 1")
    assert all(row[name] for name in ("device", "torch", "timm", "precision", "date"))
    curves = read(tmp_path / "out/arms_curves.csv")
    assert [row["arm"] for row in curves] == ["base"] * 4 + ["alone"] * 4


@pytest.mark.parametrize(
    ("noted", "options", "message"),
    [
        ({}, ["--set", "lr=0.5"], "lr of arm large must be unset as in .*large-s0.arm.yaml"),
        ({}, ["--set", "large_batch_size=4"], "large_batch_size of arm large must be 8 as in"),
        ({"momentum": 0.5}, [], "momentum of arm large must be 0.5 as in"),
        (None, [], r"must have only runs of comparisons, got .*large-s0"),
    ],
)
def test_runs_of_other_settings_are_not_taken_for_the_arms(arms, tmp_path, noted, options, message):
    (tmp_path / "runs/tiny-large-s0").mkdir(parents=True)
    if noted is not None:
        settings = yaml.safe_load(Path(arms[0]).read_text())
        note = tmp_path / "runs/tiny-large-s0.arm.yaml"
        note.write_text(yaml.safe_dump(settings | noted))
    with pytest.raises(ValueError, match=message):
        compare.main([arms[1], arms[0], "--seeds", "1", *options])
    assert not (tmp_path / "runs/tiny-dual-s0.arm.yaml").exists()  # nothing is half written


@pytest.fixture
def read_arm(tmp_path):
    """Return what reads an arm of two epochs with settings as they are given to --set."""
    path = tmp_path / "arm.yaml"
    path.write_text("epochs: 2\ndataset: uoft-cs/cifar100\n")
    config = compare.CompareConfig
    return lambda *given: compare._read_arm(
        path, "", compare._as_yaml(compare._pairs(config((str(path),), set=given).set))
    )


def test_set_and_vary_take_lists_and_booleans(tmp_path, read_arm):
    given = ("lr=0.01", "resolutions=24,32", "compile=false")
    flags = [text for each in given for text in ("--set", each)]
    assert parse_flags(compare.CompareConfig, [str(tmp_path / "arm.yaml"), *flags]).set == given
    arms = {"": read_arm(*given)}
    for end, values in compare._variations(["save-best=true,false"]):
        arms[end] = compare._read_arm(tmp_path / "arm.yaml", end, values)
    assert [*arms] == ["", "-save_besttrue", "-save_bestfalse"]
    found = [parse_config(train.Config, arm.flags(3, Path("none"), 1)) for arm in arms.values()]
    assert (found[0].lr, found[0].resolutions, found[0].compile) == (0.01, (24, 32), False)
    assert [config.save_best for config in found] == [False, True, False]
    assert [config.seed for config in found] == [3] * 3


def test_a_flag_whose_extra_is_deleted_is_not_given(monkeypatch, read_arm):
    given = read_arm().flags(0, Path("none"), 1)
    assert given[given.index("--report-to") + 1] == "none"
    monkeypatch.setattr(compare, "defaults_of_extras", dict)
    assert "--report-to" not in read_arm().flags(0, Path("none"), 1)


def test_settings_are_those_that_move_results_whatever_they_are_written_as(tmp_path, read_arm):
    own = read_arm("lr=0.001", "resolutions=24,32", "compile=true", f"dataset={tmp_path}")
    again = replace(own, settings={"lr": 1e-3, "resolutions": [24, 32], "compile": "true"})
    assert own.hash == replace(again, settings=again.settings | {"epochs": "2"}).hash
    assert own.hash == replace(own, settings={**own.settings, "report_to": "wandb"}).hash
    assert read_arm(f"dataset={tmp_path}").hash == read_arm().hash  # a local copy of it
    for other in ("lr=0.002", "resolutions=24", "sync=asp", "dataset=uoft-cs/cifar10"):
        assert read_arm(other).hash != read_arm().hash
    (tmp_path / "arm.yaml").write_text("dataset: digits\n")  # of which there is no copy
    assert read_arm(f"dataset={tmp_path}").hash != read_arm().hash
    (tmp_path / "arm.yaml").write_text("lr: 0.1\n")  # names no dataset
    alike = [read_arm(f"dataset={tmp_path}/{name}/train").hash for name in ("cars", "dogs")]
    assert alike[0] != alike[1]


def test_a_folder_that_is_taken_for_a_copy_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "arm.yaml").write_text("epochs: 2\ndataset: uoft-cs/cifar100\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "launch_all", lambda *_, **__: None)
    with pytest.raises(ValueError, match="finished"):
        compare.main(["arm.yaml", "--set", f"dataset={tmp_path}"])
    line = f"{tmp_path} is taken for a copy of uoft-cs/cifar100, of which rows and runs count"
    assert line in capsys.readouterr().out


def test_runs_of_another_script_are_told_of(tmp_path, monkeypatch, capsys, read_arm):
    """Rows and runs count by their settings, which do not tell of the code."""
    arms, launched = [read_arm()], []
    monkeypatch.setattr(compare, "launch_all", lambda launches, *_, **__: launched.extend(launches))
    config = compare.CompareConfig((str(tmp_path / "arm.yaml"),), runs_dir=str(tmp_path / "runs"))
    config = replace(config, output_dir=str(tmp_path / "out"), seeds=2)
    for script in (compare.SCRIPT.read_bytes(), b"another"):
        table = compare._Table("arms", arms, config)
        for folder in table.lacking:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "train.py").write_bytes(script)
            compare._note_of(folder).write_text(compare.parse.config_to_yaml(arms[0].settings))
        compare._Table("arms", arms, config).make(None)
        said = capsys.readouterr().out
        assert ("warning: another train.py made 2 runs of this table" in said) == (
            script == b"another"
        )


@pytest.fixture
def meanwhile(monkeypatch):
    """Return what has another command write rows while this one trains."""

    def writes(runs, folder):
        def launch_all(launches, jobs, stopping, on_finished):
            write_runs(runs, folder)
            on_finished()

        monkeypatch.setattr(compare, "launch_all", launch_all)

    return writes


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_trained(arms, tmp_path):
    for name in ("output_dir", "runs_dir"):
        with pytest.raises(
            ValueError, match=f"{name} must be a folder that can be written, got /p"
        ):
            compare.main([*arms, "--seeds", "1", f"--{name}", "/proc/x"])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("when", ["before", "before a report", "meanwhile"])
def test_rows_of_other_settings_are_neither_counted_nor_replaced(arms, tmp_path, meanwhile, when):
    output, other = tmp_path / "results/tiny", replace(run_of(0, 0.5), settings="another")
    meanwhile({"large": [other]}, output)
    for folder in (tmp_path / "same", *[output] * (when != "meanwhile")):
        write_runs({"large": [other]}, folder)
    refused = (
        r"output_dir must have no rows of arm large with other settings, got 1 row of other "
        r"settings in results/tiny/arms_runs.csv; take another output_dir, or remove them"
    )
    with pytest.raises(ValueError, match=refused):
        compare.main([*arms, "--seeds", "1", *["--report-only"] * (when == "before a report")])
    left, same = (folder / "arms_runs.csv" for folder in (output, tmp_path / "same"))
    assert left.read_bytes() == same.read_bytes()
    assert (tmp_path / "runs").exists() == (when == "meanwhile")
    assert not (output / ".lock").exists()


def test_rows_that_another_command_writes_meanwhile_stay_and_count(arms, tmp_path, meanwhile):
    """Two commands have one folder of tables: here the other one ends while this one trains."""
    output = tmp_path / "results/tiny"
    runs = {
        name: [replace(run_of(0, 0.4), settings=compare._read_arm(Path(path), "", {}).hash)]
        for name, path in zip(("large", "dual"), arms, strict=True)
    }
    meanwhile(runs, output)
    compare.main([arms[0], "--seeds", "2"])
    found = {arm: [run.seed for run in own] for arm, own in read_runs(output).items()}
    assert found == {"large": [0], "dual": [0]}
    assert [*rows_of(output / "arms.csv")] == ["large"]


@pytest.mark.parametrize("setting", ["resume=auto", "plan_only=true"])
def test_what_makes_one_run_of_all_or_trains_none_is_refused(arms, setting):
    with pytest.raises(ValueError, match=f"must leave {setting.partition('=')[0]} to the"):
        compare.main([arms[0], "--set", setting])


def test_varied_settings_are_arms_of_their_own(arms, tmp_path, launched):
    options = ["--seeds", "1", "--set", "epochs=1", "--vary", "lr=0.1,0.05", "--vary", "seed=1"]
    (tmp_path / "configs/tiny/dual.yaml").write_text("seed: 3\n")
    for arguments in ([arms[0], *options], [arms[1], *options[:-2]]):
        with pytest.raises(ValueError, match="an arm must leave seed to the comparison"):
            compare.main(arguments)
    options[-1] = "momentum=0.5"
    compare.main([arms[0], *options, "--baseline", "large-lr0.05-momentum0.5"])
    found = [*rows_of(tmp_path / "results/tiny/arms.csv")]
    assert found == ["large-lr0.1-momentum0.5", "large-lr0.05-momentum0.5"]


def test_rows_of_before_settings_were_recorded_stay_and_count_for_nothing(arms, tmp_path, launched):
    """Those of other arms are left alone, those of this arm would have to be removed."""
    folder = tmp_path / "results/tiny"
    folder.mkdir(parents=True)
    head = "arm,seed,accuracy,loss,train_time_s,total_time_s,workers,epochs,samples,"
    head += "device,precision,torch,timm\n"
    old = "old,0,41.25,1.9,7.5,9.0,4,2,120,cpu,no,2.15.0,1.0.31\n"
    (folder / "arms_curves.csv").write_text("arm,seed,train_time_s,accuracy\n")
    (folder / "arms_runs.csv").write_text(head + old + old.replace("old", "large"))
    with pytest.raises(ValueError, match="1 row of settings that were not recorded in"):
        compare.main([arms[0], "--seeds", "1"])
    (folder / "arms_runs.csv").write_text(head + old)
    compare.main([arms[0], "--seeds", "1"])
    found = rows_of(folder / "arms_runs.csv")
    assert found.keys() == {"old", "large"}
    assert (found["old"]["accuracy"], found["old"]["settings"]) == ("41.250", "")
    assert found["large"]["settings"]
