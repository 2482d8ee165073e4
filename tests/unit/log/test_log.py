import io
import json
import math
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dbsl.base.words import short_loss
from dbsl.checkpoint.disk import pack, unpack
from dbsl.config.hooks import Extra, Extras, Machine
from dbsl.extras.pictures import stage_spans
from dbsl.log import lines as display
from dbsl.log.log import RunLog
from dbsl.log.rows import missed_times, read_metrics, step_row, times_in_words
from dbsl.plan.sampler import Part, Step
from dbsl.plan.solve import TimeModel, plan_dual_batch
from dbsl.plan.stages import make_stages, stage_at
from dbsl.plan.types import Restart, RoundReport, StepLine, Turn
from dbsl.run.evaluation import Evaluation
from dbsl.run.session import Progress
from train import Config

STAGES = make_stages(2, [24, 32], learning_rate=0.1)
ROUND_KEYS = {
    "event",
    "worker",
    "epoch",
    "round",
    "resolution",
    "local_batch_size",
    "samples",
    "steps",
    "time_s",
    "loss",
    "merge_weight",
    "staleness",
    "predicted_time_s",
    "learning_rate",
    "compute_time_s",
    "wait_time_s",
}
PLAN_TOTALS = {
    "time_ratio",
    "epoch_time_s",
    "all_large_time_s",
    "equal_batch_time_s",
    "idle_share",
    "small_share",
}


def make_plans(workers=4):
    model = TimeModel(1e-3, 0.02)
    return {r: plan_dual_batch(100 * workers, workers, workers // 4, 50, model) for r in (24, 32)}


def make_log(
    folder,
    accelerator,
    plans,
    stages=STAGES,
    *,
    measured=False,
    evaluated=0,
    normalises=False,
    apart=False,
    planner=None,
    extras=None,
    state=None,
    restart=None,
    **settings,
):
    """Return the log of a run that has nothing but its plans."""
    config = Config(workers=4, epochs=stages[-1].end_epoch, **settings)
    model = torch.nn.BatchNorm1d(2) if normalises else torch.nn.Linear(1, 1)
    run = SimpleNamespace(
        config=replace(config, dedicated_server=apart),
        data=SimpleNamespace(evaluation=range(evaluated), num_classes=1),
        stages=stages,
        plans=plans,
        planner=planner,
        model=model,
        known=SimpleNamespace(measured=measured),
        machine=Machine(),
        extras=Extras(extras),
    )
    return RunLog(run, folder, accelerator, state=state, restart=restart)


def step_of(worker):
    return Step((Part(worker, np.arange(5), 1.0),), progress=0.0)


def play(log, plans, *, epochs=(0, 1), evaluate=(1,), loss=2.0, virtual=None, stages=STAGES):
    """Run epochs through the log; worker w's loss is `loss` + w, its time 1 + w seconds."""
    for epoch in epochs:
        stage = stage_at(stages, epoch)
        for worker, plan in enumerate(plans[stage.resolution].workers):
            report = RoundReport(
                worker=worker,
                epoch=epoch,
                round=0,
                resolution=stage.resolution,
                local_batch_size=plan.local_batch_size,
                samples=plan.samples,
                steps=plan.steps,
                time_s=1.0 + worker,
                loss=loss + worker,
                merge_weight=plan.merge_weight,
                staleness=worker,
                predicted_time_s=plan.predicted_time_s,
                compute_time_s=1.0 + worker,
                learning_rate=0.1,
            )
            log.round(report, virtual_time_s=virtual)
        evaluation = Evaluation(0.75, 0.5, 90, 32, time_s=0.25) if epoch in evaluate else None
        log.epoch_end(
            epoch,
            evaluation,
            train_time_s=10.0 * (epoch + 1),
            virtual_time_s=virtual,
        )


def weighted_loss(plan, loss=2.0):
    return sum((loss + i) * w.samples for i, w in enumerate(plan.workers)) / plan.samples


def strict(line):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_metrics_lines_are_strict_json_with_the_promised_keys(tmp_path, accelerator):
    plans = make_plans()
    with make_log(tmp_path, accelerator, plans, measured=True) as log:
        play(log, plans, virtual=3.5)
    rows = [strict(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["event"] for row in rows] == [
        *["plan"] * 2,
        *["round"] * 4,
        "times",
        *["round"] * 4,
        "times",
        "eval",
    ]
    plan, round_, evaluation = rows[0], rows[3], rows[-1]
    assert plan.keys() >= PLAN_TOTALS
    kept = {k: v for k, v in plan.items() if k not in {"workers", *PLAN_TOTALS}}
    assert kept == {
        "event": "plan",
        "stage": 0,
        "substage": 0,
        "first_epoch": 1,
        "last_epoch": 1,
        "resolution": 24,
        "learning_rate": 0.1,
        "dropout": 0.0,
        "notes": [],
    }
    worker = plans[24].workers[1]
    assert plan["workers"][1] == {
        "worker": 1,
        "local_batch_size": 50,
        "samples": worker.samples,
        "steps": worker.steps,
        "merge_weight": 1.0,
        "predicted_time_s": worker.predicted_time_s,
        "simplified_time_s": worker.simplified_time_s,
        "small": False,
    }
    assert set(round_) == ROUND_KEYS | {"virtual_time_s"}
    assert (round_["worker"], round_["loss"], round_["time_s"]) == (1, 3.0, 2.0)
    assert evaluation == {
        "event": "eval",
        "epoch": 2,
        "resolution": 32,
        "accuracy": 0.75,
        "loss": 0.5,
        "samples": 90,
        "time_s": 0.25,
        "train_time_s": 20.0,
        "virtual_time_s": 3.5,
        "learning_rate": 0.1,
        "train_resolution": 32,
    }


def test_metrics_without_optional_times_leave_them_out(tmp_path, accelerator):
    plans = make_plans()
    with make_log(tmp_path, accelerator, plans, measured=True) as log:
        play(log, plans)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert set(rows[2]) == ROUND_KEYS
    assert "virtual_time_s" not in rows[-1]


def test_metrics_nan_loss_becomes_null(tmp_path, accelerator):
    plans = make_plans()
    with make_log(tmp_path, accelerator, plans, measured=True) as log:
        play(log, plans, loss=math.nan)
    rows = [strict(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows if row["event"] == "round"] == [None] * 8


def test_metrics_line_is_on_disk_when_the_round_is_recorded(tmp_path, accelerator):
    plans = make_plans()
    with make_log(tmp_path, accelerator, plans, measured=True) as log:
        play(log, plans, epochs=[0])
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2 + 4 + 1


def test_other_processes_write_and_print_nothing(tmp_path, capsys):
    plans = make_plans()
    with make_log(tmp_path, SimpleNamespace(is_main_process=False), plans) as log:
        play(log, plans)
        log.summary({"final_accuracy": 1.0})
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_epoch_line_tells_people_the_result(tmp_path, accelerator, capsys):
    plans = make_plans()
    with make_log(tmp_path, accelerator, plans, measured=True) as log:
        play(log, plans)
    first, second = capsys.readouterr().out.splitlines()[:2]
    loss = f"{weighted_loss(plans[32]):.3f}"
    assert first == (f"epoch 1/2  24 px  lr 0.1  loss {loss}  40 images/s  workers 1.0-4.0 s")
    assert second == (
        f"epoch 2/2  32 px  lr 0.1  loss {loss}  eval 75.0 %, loss 0.500  40 images/s  "
        "workers 1.0-4.0 s"
    )


def test_the_longest_epoch_line_fits_120_columns(tmp_path, accelerator, capsys):
    stages, plans = make_stages(1000, [224, 256]), make_plans(workers=8)
    plans = {224: plans[24], 256: plans[32]}
    with make_log(tmp_path, accelerator, plans, stages, measured=True) as log:
        for worker in range(8):
            report = RoundReport(
                worker, 998, 0, 256, 64, 160000, 9, time_s=88.8 + worker, loss=6.9, merge_weight=1.0
            )
            log.round(replace(report, learning_rate=1.23456e-05))
        evaluation = Evaluation(
            0.98765,
            1.23456,
            9999,
            256,
            time_s=1.0,
            ema_accuracy=0.98765,
            ema_loss=1.23456,
        )
        log.epoch_end(998, evaluation, train_time_s=100.0)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        "epoch  999/1000  256 px  lr 1.23e-05  loss 6.900  eval 98.8 %, loss 1.235  EMA 98.8 %  "
        "12800 images/s  workers 89-96 s"
    )
    assert len(line) <= 120


@pytest.mark.parametrize(
    ("times_s", "text"),
    [
        ([], ""),
        ([0.0, 0.0], ""),
        ([0.0123, 0.0234], "  workers 0.012-0.023 s"),
        ([1.23, 1.24], "  workers 1.2 s"),
        ([9.4, 1234.5], "  workers 9.4-1234 s"),
    ],
)
def test_worker_times_have_two_digits_or_are_left_out(times_s, text):
    assert times_in_words(times_s) == text


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        *((0.0012, "0.001"), (2.3026, "2.303"), (99.9994, "99.999"), (123.4, "123.4")),
        *((12345.6, "12346"), (1e6, "1.0e06"), (6.04e35, "6.0e35"), (math.nan, "nan")),
    ],
)
def test_a_loss_is_printed_in_six_characters(loss, text):
    assert short_loss(loss) == text


def test_rounds_of_the_next_epoch_do_not_count_for_this_one(tmp_path, accelerator, capsys):
    plans = make_plans()
    early = RoundReport(0, 1, 0, 32, 8, 85, 3, time_s=99.0, loss=99.0, merge_weight=1.0)
    with make_log(tmp_path, accelerator, plans, measured=True) as log:
        log.round(early)  # asynchronous: worker 0 is an epoch ahead
        play(log, plans, epochs=[0])
    assert f"  loss {weighted_loss(plans[24]):.3f}" in capsys.readouterr().out


def test_progress_bar_on_a_terminal_moves_with_every_step(tmp_path, accelerator, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(display, "_BAR_EVERY_S", 0.0)
    plans = make_plans()
    total = sum(w.steps for plan in plans.values() for w in plan.workers)
    with make_log(tmp_path, accelerator, plans) as log:
        log.meter.begin(Turn((1,), 1, 0), anew=True)
        for _ in range(3):
            with log.meter.step(step_of(1), 0.0125, Progress()):
                pass
        bar = log._display._bar
        assert f"3/{total} [<" in str(bar)
    assert ", epoch 2/2, " in terminal.getvalue()
    assert " images/s]" in terminal.getvalue()
    bar.set_postfix_str("epoch 100/140, loss 2.303, 12345 images/s", refresh=False)
    longest = bar.format_dict | {"n": 12345, "total": 123456, "elapsed": 4000.0, "ncols": 80}
    assert bar.format_meter(**longest).endswith("images/s]")


def test_without_a_terminal_a_line_tells_of_the_steps_about_once_a_minute(
    tmp_path, accelerator, monkeypatch, capsys
):
    now = [0.0]
    monkeypatch.setattr(display.time, "perf_counter", lambda: now[0])
    plans = make_plans()
    with make_log(tmp_path, accelerator, plans) as log:
        log.meter.begin(Turn((0,), 0, 0), anew=True)
        for _ in range(7):
            now[0] += 20.0
            with log.meter.step(step_of(0), 0.1, Progress()):
                pass
    total = sum(w.steps for plan in plans.values() for w in plan.workers)
    assert capsys.readouterr().out.splitlines() == [
        f"  3/{total} steps, epoch 1/2, lr 0.1 (worker 0), 0.25 images/s",
        f"  6/{total} steps, epoch 1/2, lr 0.1 (worker 0), 0.25 images/s",
    ]


def test_another_processes_step_lines_come_before_their_round_with_its_own(
    tmp_path, accelerator, capsys
):
    plans = make_plans()
    line = StepLine(1, 0, 0, 50, 0.5, 2.5, 0.1, math.inf, 123.4, 1.5)
    report = RoundReport(1, 0, 0, 24, 50, 85, 60, 1.0, 2.0, 1.0, logged=1, lines=(line,))
    with make_log(tmp_path, accelerator, plans) as log:
        log.round(report)
        assert log.meter.state_dict()["heard"] == {1: 60}
    rows = [strict(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][2:]
    assert [row["event"] for row in rows] == ["step", "round"]
    assert rows[0] == {"event": "step", **step_row(line), "epoch": 1, "gradient_norm": None}
    assert set(rows[1]) == ROUND_KEYS


def test_summary_is_strict_json_and_printed_in_a_line(tmp_path, accelerator, capsys):
    with make_log(tmp_path, accelerator, make_plans(), measured=True) as log:
        log.summary({"final_loss": math.inf, "final_accuracy": 0.9712, "epochs": 2, "sync": "bsp"})
    text = (tmp_path / "summary.json").read_text()
    assert strict(text) == {
        "epochs": 2,
        "final_accuracy": 0.9712,
        "final_loss": None,
        "sync": "bsp",
    }
    assert list(json.loads(text)) == sorted(json.loads(text))
    assert "accuracy 97.12 %" in capsys.readouterr().out


def test_summary_that_fails_leaves_the_old_one_whole(tmp_path, accelerator, monkeypatch):
    def fail(*_):
        raise OSError("disk gone")

    with make_log(tmp_path, accelerator, make_plans(), measured=True) as log:
        log.summary({"final_accuracy": 0.5})
        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="disk gone"):
            log.summary({"final_accuracy": 0.6})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"final_accuracy": 0.5}


def test_measured_times_are_set_against_predicted_ones_and_a_miss_is_said_once(
    tmp_path, accelerator, capsys
):
    plans = make_plans()  # predict less than a second; played are 1 + worker seconds
    stages = make_stages(10, [24, 32])  # epochs 0 to 4, 5 to 9
    with make_log(tmp_path, accelerator, plans, stages, measured=True) as log:
        play(log, plans, epochs=range(2), stages=stages)
        assert "warning" not in capsys.readouterr().out  # caches and the device warm up
        play(log, plans, epochs=range(2, 10), stages=stages)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    times = [row for row in rows if row["event"] == "times"]
    assert [row["epoch"] for row in times] == list(range(10))
    assert times[0]["small_workers_time_s"] == 1.0
    assert times[0]["large_workers_time_s"] == 3.0  # of 2, 3 and 4 s
    planned = plans[24].workers
    assert times[0]["predicted_small_workers_time_s"] == planned[0].predicted_time_s
    assert times[0]["predicted_large_workers_time_s"] == pytest.approx(planned[1].predicted_time_s)
    printed = capsys.readouterr().out
    warnings = [x for x in printed.splitlines() if x.startswith("warning")]
    assert len(warnings) == 1
    assert "4 of 4 workers" in warnings[0]


@pytest.mark.parametrize(("error", "said"), [(0.6, True), (-0.6, True), (0.4, False)])
def test_times_are_warned_of_only_if_half_off(error, said):
    values = {"time_s": 1 + error, "predicted_time_s": 1.0}
    assert bool(missed_times({0: values, 1: {"time_s": 1.0, "predicted_time_s": 0.0}})) == said


def test_one_worker_alone_is_not_warned_of_its_time():
    assert missed_times({0: {"time_s": 2.0, "predicted_time_s": 1.0}}) is None


def test_a_new_plan_is_recorded_once_and_an_older_one_not_again(tmp_path, accelerator, capsys):
    plans, stages = make_plans(), make_stages(4, [24, 32])
    slower = TimeModel(2e-3, 0.02)
    moved = plan_dual_batch(400, 4, 1, 50, [slower, *[TimeModel(1e-3, 0.02)] * 3])
    with make_log(tmp_path, accelerator, plans, stages) as log:
        log.plan(0, 0, plans[24])
        log.plan(1, 1, moved)  # epochs 0 and 1 have 24 px
        log.plan(0, 0, plans[24])  # a slow worker's turn
        log.plan(1, 1, moved)
        log.plan(1, 0, plans[24])  # and in a round before
        play(log, plans, stages=stages)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    changed = [row for row in rows if "from_epoch" in row]
    assert [(row["event"], row["from_epoch"], row["resolution"]) for row in changed] == [
        ("plan", 1, 24)
    ]
    assert changed[0]["workers"][0]["samples"] == moved.workers[0].samples
    printed = capsys.readouterr().out
    assert printed.count("from epoch 2 on at 24 px: batches") == 1
    assert "warning" not in printed  # nobody plans by times that the run follows itself


def test_a_server_of_its_own_tells_of_a_new_plan_where_a_round_by_it_is_recorded(
    tmp_path, accelerator, capsys
):
    plans, stages = make_plans(), make_stages(4, [24, 32])
    moved = plan_dual_batch(400, 4, 1, 50, [TimeModel(2e-3, 0.02), *[TimeModel(1e-3, 0.02)] * 3])
    of_epoch = {0: plans[24], 1: moved}
    decided = {"decided": lambda epoch, round_: of_epoch.get(epoch)}
    with make_log(
        *(tmp_path, accelerator, plans, stages), planner=SimpleNamespace(**decided), apart=True
    ) as log:
        play(log, plans, stages=stages)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["from_epoch"] for r in rows if r["event"] == "plan" and "from_epoch" in r] == [1]
    assert capsys.readouterr().out.count("from epoch 2 on at 24 px: batches") == 1


def test_an_epoch_is_told_with_the_learning_rate_of_its_last_step(tmp_path, accelerator, capsys):
    """Of workers with rates of their own the highest: a small batch may lower one's."""
    with make_log(tmp_path, accelerator, make_plans()) as log:
        for round_, rates in enumerate(((0.01, 0.005), (0.02, 0.01))):
            for worker, rate in enumerate(rates):
                report = RoundReport(worker, 0, round_, 24, 8, 10, 2, 0.5, 1.0, 1.0)
                log.round(replace(report, learning_rate=rate))
        log.epoch_end(0, Evaluation(0.75, 0.5, 90, 32), train_time_s=1.0)
    assert "  lr 0.02  loss 1.000  eval 75.0 %, loss 0.500  " in capsys.readouterr().out
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["learning_rate"] == 0.02


def test_an_evaluation_of_fewer_images_than_were_told_says_so_once(tmp_path, accelerator, capsys):
    with make_log(tmp_path, accelerator, make_plans(), evaluated=93) as log:
        play(log, make_plans(), evaluate=(0, 1))
    said = capsys.readouterr().out
    assert said.count("warning: evaluations are of 90 images: 3 of 93 cannot be decoded\n") == 1


def test_binary_cross_entropy_and_the_evaluations_loss_have_names(tmp_path, accelerator, capsys):
    with make_log(tmp_path, accelerator, make_plans(), bce_loss=True) as log:
        play(log, make_plans())
        log.summary({"final_loss": 0.5})
    said = capsys.readouterr().out
    assert re.search(r"  BCE 3\.\d+  eval 75\.0 %, cross-entropy 0\.500  ", said)
    assert "\ncross-entropy 0.500; all of it" in said
    assert " loss " not in said


def test_pushes_become_one_round_a_worker_and_epoch(tmp_path, accelerator):
    plans = make_plans()
    with make_log(tmp_path, accelerator, plans, push="gradients") as log:
        for number in range(3):
            for worker in (1, 0):
                log.round(
                    RoundReport(worker, 0, number, 24, 8, 10, 2, 0.5, float(number), 0.25, number)
                )
        log.epoch_end(0, train_time_s=1.0)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    rounds = [row for row in rows if row["event"] == "round"]
    assert [(r["worker"], r["round"], r["samples"], r["steps"]) for r in rounds] == [
        (0, 0, 30, 6),
        (1, 0, 30, 6),
    ]
    assert (rounds[0]["loss"], rounds[0]["time_s"], rounds[0]["staleness"]) == (1.0, 1.5, 1.0)
    assert set(rounds[0]) == ROUND_KEYS


@pytest.mark.parametrize("epochs", [2, 4])
def test_a_longer_run_counts_on_from_the_steps_taken_and_records_its_new_stages(
    tmp_path, accelerator, epochs
):
    plans = make_plans()
    plans[32] = plan_dual_batch(400, 4, 1, 25, TimeModel(1e-3, 0.02))  # more steps at 32 px
    low, high = (sum(w.steps for w in plans[r].workers) for r in (24, 32))
    assert low < high
    with make_log(tmp_path, accelerator, plans) as log:
        play(log, plans)
        log._display.step(0, 1, 0.1, None, low + high)
        state = unpack(*pack(log.state_dict()))
        assert log._display.done == log._display.total
    stages = make_stages(epochs, [24, 32], learning_rate=0.1)
    with make_log(tmp_path, accelerator, plans, stages, state=state) as log:
        assert log._display.total - log._display.done == (epochs - 2) * high
        again = unpack(*pack(log.state_dict()))
    with make_log(tmp_path, accelerator, plans, stages, state=again):
        pass
    rows = read_metrics(tmp_path / "metrics.jsonl")
    spans = [(row["first_epoch"], row["end_epoch"]) for row in stage_spans(rows)]
    assert spans == [(0, 1), (1, epochs)]
    new = [row for row in rows if row["event"] == "plan" and "from_epoch" in row]
    assert [(row["from_epoch"], row["resolution"]) for row in new] == [(2, 32)][: epochs - 2]


def test_rounds_that_nobody_was_told_of_are_told_before_those_of_the_workers_that_go_on(
    tmp_path, accelerator, capsys
):
    """Rounds count from 0 again: the epoch's learning rate is still that of its last."""
    reports = [
        RoundReport(0, 0, n, 24, 8, 10, 2, 1.0, 2.0, 1.0, learning_rate=rate)
        for n, rate in enumerate((0.4, 0.3, 0.2))
    ]
    with make_log(tmp_path, accelerator, make_plans()) as log:
        log.round(reports[0])
        state = unpack(*pack(log.state_dict()))
    start = Restart(weights=None, version=0, clock=0, left={0: ((30, 60),)}, reports=reports[1:])
    options = {"state": state, "restart": start}
    with make_log(tmp_path, accelerator, make_plans(), **options) as log:
        log.round(replace(reports[0], learning_rate=0.1))
        log.epoch_end(0, None, train_time_s=1.0)
        assert log._samples == 40
    assert "lr 0.1  " in capsys.readouterr().out
    rows = read_metrics(tmp_path / "metrics.jsonl")
    events = [row["event"] for row in rows if row["event"] in ("round", "restart")]
    assert events == ["round"] * 3 + ["restart", "round"]


@pytest.mark.parametrize("normalises", [True, False])
def test_a_batch_that_balance_made_too_small_for_batch_norm_is_told_once(
    tmp_path, accelerator, capsys, normalises
):
    plans = make_plans()
    with make_log(tmp_path, accelerator, plans, normalises=normalises) as log:
        first = plans[STAGES[0].resolution]
        log.plan(0, 0, first)
        for size in (3, 2):
            workers = (replace(first.workers[0], local_batch_size=size), *first.workers[1:])
            log.plan(0, 1, replace(first, workers=workers))
    told = "warning: worker 0 has batches of 3, of which batch norm has no good statistics"
    printed = capsys.readouterr().out
    assert (printed.count(told), printed.count("batch norm")) == (normalises, normalises)


def test_results_are_those_of_the_last_and_of_the_best_evaluation(tmp_path, accelerator):
    with make_log(tmp_path, accelerator, make_plans(), measured=True) as log:
        for epoch, accuracy in ((0, 0.8), (1, 0.6)):
            play(log, make_plans(), epochs=[epoch], evaluate=())
            evaluation = Evaluation(accuracy, 1.0 - accuracy, 90, 32, time_s=0.25)
            log.epoch_end(epoch, evaluation, train_time_s=20.0)
        assert log.results() == {
            "final_accuracy": 0.6,
            "best_accuracy": 0.8,
            "final_loss": 0.4,
            "train_time_s": 20.0,
            "images_per_s": 40.0,  # 400 samples an epoch
            "samples_seen": 800,
        }


def test_extras_get_every_row_as_it_is_read_back_and_those_of_before_at_once(tmp_path, accelerator):
    class Reporter(Extra):
        def __init__(self):
            self.before, self.rows = None, []

        def report(self, folder, rows):
            self.before = rows

        def row(self, row):
            self.rows.append(row)

        def epoch(self, epoch, plan, reports):
            yield "norm", {"value": math.inf}

    reporter = Reporter()
    with make_log(tmp_path, accelerator, make_plans(), extras={"reporter": reporter}) as log:
        play(log, make_plans())
    assert [row["event"] for row in reporter.before] == ["plan"] * 2
    assert reporter.before + reporter.rows == read_metrics(tmp_path / "metrics.jsonl")
    assert reporter.rows[-1] == {"event": "norm", "epoch": 1, "resolution": 32, "value": None}
