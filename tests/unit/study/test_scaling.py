"""Files in the published layout, written by hand; results and knees computed by hand."""

import json
import math

import pandas
import pytest

from dbsl.tools.study.scaling import (
    Trial,
    critical_batch,
    find_knees,
    study_figure,
    write_report,
)
from dbsl.tools.study.store import read_workloads, write_json, write_trial

STUDY = """{"batch_size": %d, "dataset": "cifar_10", "early_stopping": false, "model": "resnet_8",
 "optimizer": "sgd", "train_steps": 400, "parameter_configs": {"learning_rate": {
 "max_value": 10.0, "min_value": 0.01, "scale": "LOG_SCALE", "type": "DOUBLE"}}}"""
HEADER = "step,train/cross_entropy_error,val/cross_entropy_error,val/classification_error\n"


def write_by_hand(folder, number, status, errors, learning_rate=0.3):
    """Write a trial; `errors` are of every hundredth step from 100 on."""
    own = folder / str(number)
    own.mkdir(parents=True)
    rows = [f"{100 * k},1.5,1.25,{error}\n" for k, error in enumerate(errors, 1)]
    (own / "measurements.csv").write_text(HEADER + "0,2.3,2.3,0.9\n" + "".join(rows))
    metadata = {"_internal_trial_id": number, "trial_id": number, "status": status}
    metadata |= {"parameters": {"learning_rate": learning_rate}, "steps": 100 * len(errors)}
    (own / "metadata.json").write_text(json.dumps(metadata))


@pytest.fixture
def workload(tmp_path):
    root = tmp_path / "cifar_10/resnet_8/sgd"
    for size in (16, 32, 64):
        (root / str(size)).mkdir(parents=True)
        (root / f"{size}/study.json").write_text(STUDY % size)
    # 16: exactly at the goal is not past it; of two at step 300 the lower number counts, as a
    # number; trials that diverged or were cut short count for nothing.
    write_by_hand(root / "16", 10, "COMPLETE", [0.5, 0.4, 0.29, 0.2])
    write_by_hand(root / "16", 2, "COMPLETE", [0.6, 0.3, 0.28, 0.35], learning_rate=9.9)
    write_by_hand(root / "16", 3, "INFEASIBLE", [0.2, 0.1])
    write_by_hand(root / "16", 1, "INCOMPLETE", [0.1])
    write_by_hand(root / "32", 1, "COMPLETE", [0.5, 0.4, 0.3, 0.3])
    write_by_hand(root / "64", 1, "COMPLETE", [0.25, 0.4, 0.4, 0.4])
    write_by_hand(root / "64", 2, "COMPLETE", ["", "nan", 0.1, 0.1])
    return tmp_path


def test_files_by_hand_give_steps_by_hand(workload):
    studies = read_workloads([workload])["cifar_10/resnet_8/sgd"]
    assert [study.batch_size for study in studies] == [16, 32, 64]
    first, never, last = (study.best_trial(0.3) for study in studies)
    assert (first.reached_at(0.3), first.trial_id) == (300, 2)
    assert never is None
    assert (last.reached_at(0.3), last.trial_id) == (100, 1)
    assert studies[0].best_trial(0.29).trial_id == 2  # the goal is strict
    assert studies[0].best_trial(0.28).reached_at(0.28) == 400  # trial 10, at 0.2
    assert studies[0].best_trial(0.2) is None


@pytest.mark.parametrize(
    ("steps", "perfect", "useful", "seen"),
    [
        # From 8 on, 1.2 times perfect is 1200, 600, 300, 150, 75; 1.1 times the least is 132.
        ({8: 1000, 16: 500, 32: 299, 64: 151, 128: 130, 256: 120}, 32, 128, True),
        # Exactly on the rule counts: 1.2 * 600 * 8 / 16 = 360, 1.1 * 200 = 220.
        ({8: 600, 16: 360, 32: 220, 64: 200}, 16, 32, True),
        ({8: 100, 16: 50}, 16, 16, False),
        ({8: 100, 16: 50, 32: None}, 16, 16, True),
        ({8: None}, None, None, None),
    ],
)
def test_knees_follow_the_stated_rules(steps, perfect, useful, seen):
    found = find_knees(steps)
    assert (found["perfect_scaling_up_to"], found["useful_batch_size"]) == (perfect, useful)
    assert found["useful_is_seen"] == seen


def test_critical_batch_is_that_of_the_curve_that_made_the_steps():
    steps = {b: round(1000 * (1 + 80 / b)) for b in (4, 8, 16, 32, 64, 128, 256, 512)}
    assert critical_batch(steps) == pytest.approx(80, rel=0.01)
    assert critical_batch({8: 800, 16: 400}) is None
    assert critical_batch({8: 800, 16: 399, 32: 199}) is None  # only perfect scaling was seen


def test_layout_that_is_written_is_read_back(tmp_path):
    columns = {"step": [0, 5], "val/classification_error": [0.875, math.nan]}
    measured = pandas.DataFrame(columns, dtype=float)
    trial = Trial(3, "INFEASIBLE", 5, {"learning_rate": 0.1}, measured)
    folder = tmp_path / "d/m/o/8"
    values = {"batch_size": 8, "dataset": "d", "model": "m", "optimizer": "o"}
    write_json(folder / "study.json", values | {"goal_error": 0.25})
    write_trial(folder, trial)
    (folder / "7").mkdir()  # a trial that is being written
    ((study,),) = read_workloads([tmp_path]).values()
    assert (study.workload, study.batch_size, study.goal) == ("d/m/o", 8, 0.25)
    (read,) = study.trials
    assert (read.trial_id, read.status, read.steps) == (3, "INFEASIBLE", 5)
    pandas.testing.assert_frame_equal(read.measurements, measured)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("study.json", "{", "study files must be as a study writes them"),
        ("study.json", '{"dataset": "d"}', "no entry 'model'"),
        ("2/metadata.json", '{"trial_id": 2}', "2/metadata.json .no entry 'status'"),
        (
            "2/measurements.csv",
            "step,val/classification_error\n1,x\n",
            "could not convert string to float: 'x'",
        ),
        ("2/measurements.csv", "a,b\n1,2\n", "columns expected but not found"),
    ],
)
def test_broken_files_are_named(workload, name, text, message):
    path = workload / "cifar_10/resnet_8/sgd/16" / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_workloads([workload])


def test_two_studies_of_one_batch_size_are_refused(workload):
    with pytest.raises(ValueError, match=r"resnet_8/sgd at 16 a second time"):
        read_workloads([workload, workload])


def test_report_prints_rules_warnings_and_writes_pictures(workload, tmp_path):
    with pytest.raises(ValueError, match="goal_error must be given, since"):
        write_report(read_workloads([workload]), tmp_path, None)
    text = write_report(read_workloads([workload]), tmp_path / "out", 0.3)
    said = (
        "perfect scaling up to 16 (the largest b with steps(b) <= 1.2",
        "maximum useful batch 64 (the smallest b with steps(b) <= 1.1",
        "the largest tried: more may still be useful",
    )
    assert [words for words in said if words not in text] == []
    pictures = {path.name for path in (tmp_path / "out/plots").iterdir()}
    assert pictures == {"study.png"}
    report = json.loads((tmp_path / "out/report.json").read_text())["cifar_10/resnet_8/sgd"]
    assert report["steps_to_result"] == {"16": 300, "64": 100}
    rows = (tmp_path / "out/results.csv").read_text().splitlines()
    assert rows[1].startswith("cifar_10,resnet_8,sgd,16,0.3,300,4800,2,9.9,0,2,1,1")
    assert rows[2].startswith("cifar_10,resnet_8,sgd,32,0.3,,,,")


def test_trials_that_ended_at_a_goal_say_nothing_about_another(workload, tmp_path):
    for path in workload.rglob("study.json"):
        values = json.loads(path.read_text()) | {"early_stopping": True, "goal_error": 0.3}
        path.write_text(json.dumps(values))
    text = write_report(read_workloads([workload]), tmp_path / "out", 0.25)
    assert "an error < 0.3," in text
    assert "its goal is kept, not 0.25" in text
    report = json.loads((tmp_path / "out/report.json").read_text())["cifar_10/resnet_8/sgd"]
    assert report["steps_to_result"] == {"16": 300, "64": 100}


def test_pictures_show_what_was_computed():
    def figure(steps):
        rows = [
            {"batch_size": b, "steps_to_result": s, "learning_rate": 0.01 * b, "momentum": 0.9}
            for b, s in steps.items()
        ]
        return study_figure({"w": rows}, {"w": {"goal": 0.3, **find_knees(steps)}})

    steps = {8: 1000, 16: 500, 32: 300, 64: 290, 128: 280}
    axes, rates = figure(steps).axes
    lines = {line.get_label(): line.get_ydata().tolist() for line in axes.lines}
    assert lines["measured"] == [*steps.values()]
    assert lines["steps halve as the batch doubles"] == [1000, 500, 250, 125, 62.5]
    spans = {p.get_label(): (p.get_x(), p.get_x() + p.get_width()) for p in axes.patches}
    # 300 is exactly 1.2 times 250, and below 1.1 times 280.
    assert spans == {"perfect scaling": (8, 32), "no gain": (32, 128)}
    axes, *_ = figure({8: 1000, 16: 500}).axes
    assert [p.get_label() for p in axes.patches] == ["perfect scaling"]  # no gain was not seen
    assert rates.lines[0].get_ydata() == pytest.approx([0.8, 1.6, 3.2, 6.4, 12.8])
    assert rates.lines[1].get_ydata() == pytest.approx([0.8, 1.6, 3.2, 6.4, 12.8])
    assert rates.lines[2].get_ydata()[-1] == pytest.approx(0.8 * 4)
