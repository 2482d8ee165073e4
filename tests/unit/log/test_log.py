"""What a log writes and prints: rows of metrics.jsonl, summary.json, lines and the progress bar."""

import io
import json
import math
import os
import re
from contextlib import nullcontext
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dbsl.checkpoint.disk import pack, unpack
from dbsl.config.hooks import Extra, Extras, Machine
from dbsl.log import lines as display
from dbsl.log.log import RunLog
from dbsl.log.rows import PLAN_TOTALS, evaluation_row, read_metrics, step_row
from dbsl.plan.follow import Planner
from dbsl.plan.sampler import Part, Step
from dbsl.plan.solve import TimeModel, plan_dual_batch
from dbsl.plan.stages import make_stages, stage_at
from dbsl.plan.types import LostWorker, RoundReport, StepLine, Turn
from dbsl.run.meter import StepMeter, TakenSteps
from dbsl.run.turns import Progress
from train import Config

STAGES = make_stages(2, [24, 32], learning_rate=0.1)
ROUND_KEYS = {"event", "worker", "epoch", "round", "resolution", "local_batch_size", "samples"}
ROUND_KEYS |= {"steps", "time_s", "loss", "merge_weight", "staleness", "predicted_time_s"}
ROUND_KEYS |= {"learning_rate", "compute_time_s", "wait_time_s"}
OF_PLAN = ("local_batch_size", "samples", "steps", "merge_weight", "predicted_time_s")
FAST, SLOW = TimeModel(1e-3, 0.02), TimeModel(2e-3, 0.02)
EVALUATION = evaluation_row({"accuracy": 0.75, "loss": 0.5, "samples": 90, "time_s": 0.25}, 32)


def make_plans(workers=4):
    plan = plan_dual_batch(100 * workers, workers, workers // 4, 50, FAST)
    return {24: plan, 32: replace(plan)}


PLANS = make_plans()
STEPS = sum(worker.steps for plan in PLANS.values() for worker in plan.workers)
MOVED = plan_dual_batch(400, 4, 1, 50, [SLOW, FAST, FAST, FAST])


class Images(list):
    bad = ()


@pytest.fixture
def make_log(tmp_path, accelerator):
    """Return what makes the log of a run that has nothing but its plans."""

    def make(
        plans=PLANS,
        stages=STAGES,
        *,
        main=True,
        normalises=False,
        extras=None,
        state=None,
        **settings,
    ):
        planned = SimpleNamespace(
            config=Config(workers=len(plans[24].workers), epochs=stages[-1].end_epoch, **settings),
            stages=stages,
            stage_at=lambda epoch: stage_at(stages, epoch),
            first=plans,
            planner=Planner(plans, lambda epoch: stage_at(stages, epoch).resolution, {}),
            known=SimpleNamespace(measured=True),
            machine=Machine(),
            extras=Extras(extras or {}),
        )
        workers = SimpleNamespace(
            plans=planned,
            data=SimpleNamespace(train=Images(), evaluation=Images(), num_classes=1),
            raw_model=torch.nn.BatchNorm1d(2) if normalises else torch.nn.Linear(1, 1),
            accelerator=accelerator if main else SimpleNamespace(is_main_process=False),
            meter=StepMeter(0, range(4), torch.nn.Linear(1, 1), accelerator),
            progress=Progress(),
            cluster=SimpleNamespace(refused=0, time_s=42.5),
            stopwatch=SimpleNamespace(start_up_s=1.0, total_s=30.0),
            graphs=0,
        )
        if state:
            state = {"stages": [asdict(stage) for stage in STAGES], **state}
        return RunLog(tmp_path, workers, state)

    return make


@pytest.fixture
def rows(tmp_path):
    """Return what reads the log's rows, or those of some events."""
    path = tmp_path / "metrics.jsonl"
    return lambda *events: [r for r in read_metrics(path) if not events or r["event"] in events]


def report_of(worker, epoch=0, round_=0, **values):
    usual = {"resolution": 24, "local_batch_size": 8, "samples": 10, "steps": 2, "time_s": 0.5}
    usual |= {"loss": 1.0, "merge_weight": 1.0}
    return RoundReport(worker, epoch, round_, **usual | values)


def play(log, plans=PLANS, *, epochs=(0, 1), evaluate=(1,), virtual=None, stages=STAGES):
    """Run epochs through the log; worker w's loss is 2 + w, its time 1 + w seconds."""
    for epoch in epochs:
        stage = stage_at(stages, epoch)
        for worker, plan in enumerate(plans[stage.resolution].workers):
            report = report_of(
                *(worker, epoch),
                **{name: getattr(plan, name) for name in OF_PLAN},
                **dict.fromkeys(("time_s", "compute_time_s"), 1.0 + worker),
                **{"resolution": stage.resolution, "loss": 2.0 + worker, "staleness": worker},
                learning_rate=0.1,
            )
            log.round(report, virtual_time_s=virtual)
        evaluation = EVALUATION if epoch in evaluate else None
        log.epoch_end(epoch, evaluation, train_time_s=10.0 * (epoch + 1), virtual_time_s=virtual)


def weighted_loss(plan):
    return sum((2.0 + i) * w.samples for i, w in enumerate(plan.workers)) / plan.samples


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def strict_rows(folder):
    return [strict(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_metrics_lines_are_strict_json_with_the_promised_keys(tmp_path, make_log):
    with make_log() as log:
        play(log, virtual=3.5, epochs=[0])
        assert len(strict_rows(tmp_path)) == 2 + 4 + 1  # on the disk as soon as it is recorded
        play(log, virtual=3.5, epochs=[1])
    rows = strict_rows(tmp_path)
    epoch = [*["round"] * 4, "times"]
    assert [row["event"] for row in rows] == [*["plan"] * 2, *epoch, *epoch, "eval"]
    plan, round_, evaluation = rows[0], rows[3], rows[-1]
    worker = PLANS[24].workers[1]
    assert plan.pop("workers")[1] == {"worker": 1, **asdict(worker)}
    totals = {name: plan.pop(name) for name in PLAN_TOTALS}
    assert all(value is None or value >= 0 for value in totals.values())
    stage = {"stage": 0, "substage": 0, "first_epoch": 1, "last_epoch": 1, "resolution": 24}
    assert plan == stage | {"event": "plan", "learning_rate": 0.1, "dropout": 0.0, "notes": []}
    assert set(round_) == ROUND_KEYS | {"virtual_time_s"}
    assert (round_["worker"], round_["loss"], round_["time_s"]) == (1, 3.0, 2.0)
    found = {"resolution": 32, "accuracy": 0.75, "loss": 0.5, "samples": 90, "time_s": 0.25}
    found |= {"train_time_s": 20.0, "virtual_time_s": 3.5, "learning_rate": 0.1}
    assert evaluation == found | {"event": "eval", "epoch": 2, "train_resolution": 32}


def test_other_processes_write_and_print_nothing(tmp_path, make_log, capsys):
    with make_log(main=False) as log:
        log.hear(SimpleNamespace(reports=lambda: [report_of(0)]))
        log.plan(0, MOVED)
        log.epoch_end(0, EVALUATION, train_time_s=1.0)
        log.write("mine", {"a": 1})
        log.sum_up()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_metrics_of_your_own_are_plain_numbers_with_names_that_no_row_has():
    found = {"accuracy": 0.5, "loss": 1.0, "samples": 10}
    row = evaluation_row({"f1": np.float32(0.5), "count": torch.tensor(3), **found}, 8)
    assert [(type(row[name]), row[name]) for name in [*row][-2:]] == [(float, 0.5), (int, 3)]
    with pytest.raises(ValueError, match="auc of evaluate must be a number, got unset"):
        evaluation_row({"auc": None, **found}, 8)
    for name in ("resolution", "epoch"):
        with pytest.raises(ValueError, match=f"a metric of evaluate .* got '{name}', which "):
            evaluation_row({name: 0.25, **found}, 32)


def test_rows_of_others_stay_where_they_are_written(tmp_path, make_log):
    path = tmp_path / "metrics.jsonl"
    path.write_text("an older file\n")
    with make_log() as log:
        for number in range(3):
            with path.open("a") as file:
                file.write(json.dumps({"event": "own", "number": number}) + "\n")
            log.write("mine", {"epoch": number})
        assert log.state_dict()["metrics_bytes"] == path.stat().st_size
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["number"] for r in rows if r["event"] == "own"] == [0, 1, 2]
    assert [r["epoch"] for r in rows if r["event"] == "mine"] == [1, 2, 3]
    assert rows[0]["event"] == "plan"


def test_epoch_line_tells_people_the_result(make_log, capsys):
    with make_log() as log:
        play(log)
    first, second = capsys.readouterr().out.splitlines()[:2]
    loss = f"loss {weighted_loss(PLANS[32]):.3f}"
    end = "40 images/s  workers 1.0-4.0 s"
    assert first == f"epoch 1/2  24 px  lr 0.1  {loss}  {end}"
    assert second == f"epoch 2/2  32 px  lr 0.1  {loss}  eval 75.0 %, loss 0.500  {end}"


def test_the_longest_epoch_line_fits_120_columns(make_log, capsys):
    plans = dict.fromkeys((24, 224, 256), make_plans(workers=8)[24])
    with make_log(plans, make_stages(1000, [224, 256])) as log:
        for worker in range(8):
            usual = {"resolution": 256, "samples": 160000, "loss": 6.9, "learning_rate": 1.23456e-5}
            log.round(report_of(worker, 998, time_s=88.8 + worker, **usual))
        own = {"accuracy": 0.98765, "loss": 1.23456, "samples": 9999}
        found = evaluation_row(own | {"ema_accuracy": 0.98765, "ema_loss": 1.23456}, 256)
        log.epoch_end(998, found, train_time_s=100.0)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        "epoch  999/1000  256 px  lr 1.23e-05  loss 6.900  eval 98.8 %, loss 1.235  EMA 98.8 %  "
        "12800 images/s  workers 89-96 s"
    )
    assert len(line) <= 120


def test_rounds_of_the_next_epoch_do_not_count_for_this_one(make_log, capsys):
    with make_log() as log:
        log.round(report_of(0, 1, loss=99.0))  # asynchronous: worker 0 is an epoch ahead
        play(log, epochs=[0])
    assert f"  loss {weighted_loss(PLANS[24]):.3f}" in capsys.readouterr().out


def take_steps(log, turn, number, rate, before=lambda: None):
    meter = log._workers.meter
    meter.begin(turn, anew=True)
    for _ in range(number):
        before()
        step = Step((Part(turn.workers[0], np.arange(5), 1.0),), progress=0.0)
        meter.begin_step(step, 0.0)
        meter.end_step(step, rate, Progress())
        log.hear(SimpleNamespace(reports=tuple, losses=tuple))


def test_progress_bar_on_a_terminal_moves_with_every_step(make_log, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(display, "_BAR_EVERY_S", 0.0)
    with make_log() as log:
        take_steps(log, Turn((1,), 1, 0), 3, 0.0125)
        bar = log._display._bar
        assert f"3/{STEPS} [<" in str(bar)
    assert ", epoch 2/2, " in terminal.getvalue()
    assert " images/s]" in terminal.getvalue()
    bar.set_postfix_str("epoch 100/140, loss 2.303, 12345 images/s", refresh=False)
    longest = bar.format_dict | {"n": 12345, "total": 123456, "elapsed": 4000.0, "ncols": 80}
    assert bar.format_meter(**longest).endswith("images/s]")


def test_without_a_terminal_a_line_tells_of_the_steps_about_once_a_minute(
    make_log, monkeypatch, capsys
):
    now = [0.0]
    monkeypatch.setattr(display.time, "perf_counter", lambda: now[0])
    with make_log() as log:
        take_steps(log, Turn((0,), 0, 0), 7, 0.1, before=lambda: now.append(now.pop() + 20.0))
    assert capsys.readouterr().out.splitlines() == [
        f"  {done}/{STEPS} steps, epoch 1/2, lr 0.1 (worker 0), 0.25 images/s" for done in (3, 6)
    ]


def test_another_processes_step_lines_come_before_their_round_with_its_own(tmp_path, make_log):
    line = StepLine(1, 0, 0, 50, 0.5, 2.5, 0.1, math.inf, 123.4, 1.5)
    with make_log() as log:
        log.round(report_of(1, steps=60, lines=(line,)))
        assert log._workers.meter.state_dict()["heard"] == {1: 60}
    rows = strict_rows(tmp_path)[2:]
    assert [row["event"] for row in rows] == ["step", "round"]
    assert rows[0] == {"event": "step", **step_row(line), "epoch": 1, "gradient_norm": None}
    assert set(rows[1]) == ROUND_KEYS


def test_summary_is_strict_json_written_in_one_go_and_printed_in_a_line(
    tmp_path, make_log, monkeypatch, capsys
):
    def fail(*_):
        raise OSError("disk gone")

    with make_log() as log:
        play(log, epochs=[0], evaluate=[0])
        log.epoch_end(1, EVALUATION | {"accuracy": 0.6, "loss": math.inf}, train_time_s=20.0)
        log.sum_up()
        text = (tmp_path / "summary.json").read_text()
        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="disk gone"):
            log.sum_up()
    assert (tmp_path / "summary.json").read_text() == text
    summary = strict(text)
    results = {"final_accuracy": 0.6, "best_accuracy": 0.75, "final_loss": None}
    results |= {"train_time_s": 20.0, "images_per_s": 20.0, "samples_seen": 400}
    results["virtual_time_s"] = 42.5
    assert summary.items() >= results.items()
    assert list(summary) == sorted(summary)
    printed = capsys.readouterr().out
    assert "accuracy 60.00 % (best 75.00 %)" in printed
    assert "side by side the workers would train in 42.5 s" in printed


def test_measured_times_are_set_against_predicted_ones_and_a_miss_is_said_once(
    make_log, rows, capsys
):
    """Plans predict less than a second; played are 1 + worker seconds."""
    stages = make_stages(6, [24, 32])
    with make_log(stages=stages) as log:
        play(log, epochs=range(2), stages=stages)
        assert "warning" not in capsys.readouterr().out  # caches and the device warm up
        play(log, epochs=range(2, 6), stages=stages)
    times = rows("times")
    assert [row["epoch"] for row in times] == list(range(6))
    assert times[0]["small_workers_time_s"] == 1.0
    assert times[0]["large_workers_time_s"] == 3.0  # the mean of 2, 3 and 4 s
    small, large, *_ = PLANS[24].workers
    assert times[0]["predicted_small_workers_time_s"] == small.predicted_time_s
    assert times[0]["predicted_large_workers_time_s"] == pytest.approx(large.predicted_time_s)
    (warning,) = re.findall("warning.*", capsys.readouterr().out)
    assert "4 of 4 workers" in warning


@pytest.mark.parametrize("apart", [False, True])
def test_a_new_plan_is_recorded_once_and_an_older_one_not_again(make_log, rows, capsys, apart):
    """A server of its own tells of it where a round by it is recorded."""
    stages, of_epoch = make_stages(4, [24, 32]), {0: PLANS[24], 1: MOVED}  # both have 24 px
    with make_log(stages=stages, dedicated_server=apart, balance="dynamic") as log:
        planner = log._plans.planner
        planner.plans.last, planner.at = {24: MOVED}, lambda epoch, round_: of_epoch.get(epoch)
        # The third is a slow worker's turn.
        for epoch, plan in () if apart else ((1, MOVED), (0, PLANS[24]), (1, MOVED)):
            log.plan(epoch, plan)
        play(log, stages=stages)
    changed = [row for row in rows("plan") if "from_epoch" in row]
    assert [(row["from_epoch"], row["resolution"]) for row in changed] == [(1, 24)]
    assert changed[0]["workers"][0]["samples"] == MOVED.workers[0].samples
    printed = capsys.readouterr().out
    assert printed.count("from epoch 2 on at 24 px: batches") == 1
    assert "warning" not in printed  # nobody plans by times that the run follows itself


def test_an_epoch_is_told_with_the_learning_rate_of_its_last_step(make_log, rows, capsys):
    """Where workers' rates differ the highest: a small batch may lower one's."""
    with make_log() as log:
        for round_, rates in enumerate(((0.01, 0.005), (0.02, 0.01))):
            for worker, rate in enumerate(rates):
                log.round(report_of(worker, 0, round_, learning_rate=rate))
        log.epoch_end(0, EVALUATION, train_time_s=1.0)
    assert "  lr 0.02  loss 1.000  eval 75.0 %, loss 0.500  " in capsys.readouterr().out
    assert rows()[-1]["learning_rate"] == 0.02


def test_pushes_become_one_round_a_worker_and_epoch(make_log, rows):
    with make_log(push="gradients") as log:
        for number in range(3):
            for worker in (1, 0):
                own = {"loss": float(number), "staleness": number, "learning_rate": number / 10}
                log.round(report_of(worker, 0, number, **own))
        log.epoch_end(0, train_time_s=1.0)
    rounds = rows("round")
    counts = [(r["worker"], r["round"], r["samples"], r["steps"]) for r in rounds]
    assert counts == [(0, 0, 30, 6), (1, 0, 30, 6)]
    assert (rounds[0]["loss"], rounds[0]["time_s"], rounds[0]["staleness"]) == (1.0, 1.5, 1.0)
    assert rounds[0]["learning_rate"] == 0.2  # the last
    assert set(rounds[0]) == ROUND_KEYS


def test_a_refused_last_push_leaves_the_others_of_its_worker_in_the_loss(make_log, rows):
    with make_log(push="gradients") as log:
        for number, loss in enumerate((1.0, 3.0, math.nan)):
            log.round(report_of(0, 0, number, loss=loss, refused=math.isnan(loss)))
            log.round(report_of(1, 0, number, loss=math.nan, refused=True))
        log.epoch_end(0, train_time_s=1.0)
    one, other = rows("round")
    assert (one["loss"], "refused" in one, other["refused"]) == (2.0, False, True)


@pytest.mark.parametrize("epochs", [2, 4])
def test_a_longer_run_counts_on_from_the_steps_taken_and_records_its_new_stages(
    make_log, rows, epochs
):
    plans = PLANS | {32: plan_dual_batch(400, 4, 1, 25, FAST)}  # more steps at 32 px
    low, high = (sum(w.steps for w in plans[r].workers) for r in (24, 32))
    assert low < high
    with make_log(plans) as log:
        play(log, plans)
        log._display.step(TakenSteps(low + high))
        state = unpack(*pack(log.state_dict()))
        assert log._display.done == log._display.total
    stages = make_stages(epochs, [24, 32], learning_rate=0.1)
    with make_log(plans, stages, state=state) as log:
        assert log._display.total - log._display.done == (epochs - 2) * high
        again = unpack(*pack(log.state_dict()))
    again["stages"] = [asdict(stage) for stage in stages]
    with make_log(plans, stages, state=again):
        pass
    new = [row for row in rows("plan") if "from_epoch" in row]
    assert [(row["from_epoch"], row["resolution"]) for row in new] == [(2, 32)][: epochs - 2]


def test_joint_steps_that_other_workers_took_count_as_samples_of_their_epoch(make_log, rows):
    with make_log() as log:
        log.round(report_of(0, 0))
        state = unpack(*pack(log.state_dict()))
    with make_log(state=state | {"taken": 25, "stages": []}) as log:
        log.round(report_of(1, 0))
        log.epoch_end(0, EVALUATION, train_time_s=1.0)
        assert log.results()["samples_seen"] == 45
    assert [row["event"] for row in rows("round", "restart")] == ["round", "restart", "round"]
    assert rows("times")[0]["images_per_s"] == 45


@pytest.mark.parametrize("normalises", [True, False])
def test_a_batch_that_balance_made_too_small_for_batch_norm_is_told_once(
    make_log, capsys, normalises
):
    first, *others = PLANS[24].workers
    with make_log(normalises=normalises) as log:
        log.plan(0, PLANS[24])
        for size in (3, 2):
            small = replace(first, local_batch_size=size)
            log.plan(0, replace(PLANS[24], workers=(small, *others)))
    told = "warning: worker 0 has batches of 3, too few for batch norm's statistics"
    printed = capsys.readouterr().out
    assert (printed.count(told), printed.count("batch norm")) == (normalises, normalises)


@pytest.mark.parametrize("loss", [8.0, 74.0, math.inf])
def test_a_training_loss_that_has_risen_far_is_said_once_with_what_to_lower(make_log, capsys, loss):
    """Distillation, penalties, sums over classes: no loss is told by its size alone."""
    said = []
    for losses in ([2.3, 5.5, loss, loss], [693.0, 7.7], [-3.0, -50.0], [math.nan, 9.0, 7.0]):
        with make_log(stages=make_stages(4, [24]), lr=0.1, optimizer="adamw") as log:
            for epoch, value in enumerate(losses):
                log.round(report_of(0, epoch, loss=value))
                log.epoch_end(epoch, train_time_s=1.0 + epoch)
        said += re.findall("warning.*", capsys.readouterr().out)
    assert said == [
        f"warning: the training loss of epoch 3 is {loss:g}, and was 2.3 in the first epoch: "
        "training diverges; lower lr (0.1 with adamw)"
    ]


def test_workers_that_are_lost_between_two_looks_are_recorded_in_order(make_log, rows, capsys):
    losses = [LostWorker(n, n, 3, 7, "its process died") for n in (2, 1)]
    with make_log() as log:
        log.hear(SimpleNamespace(reports=tuple, losses=lambda: losses))
        play(log)
        log.sum_up()
    assert [row["event"] for row in rows()[2:4]] == ["lost", "lost"]
    summary = json.loads((log.folder / "summary.json").read_text())
    assert (summary["lost_workers"], summary["lost_samples"]) == ([2, 1], 14)
    said = [line.partition(" (")[0] for line in capsys.readouterr().out.splitlines()[:2]]
    assert said == ["warning: rank 2", "warning: rank 1"]


def test_graphs_that_were_compiled_while_it_trained_are_counted(make_log, monkeypatch, capsys):
    monkeypatch.setattr("dbsl.log.log.graphs_made", lambda: 5)
    for before in (5, 3):
        with make_log() as log:
            log._workers.graphs = before
            play(log)
            log.sum_up()
        late = json.loads((log.folder / "summary.json").read_text()).get("recompilations")
        said = "2 graphs were compiled while it trained" in capsys.readouterr().out
        assert (late, said) == ((2, True) if before == 3 else (None, False))


def test_extras_get_every_row_as_it_is_read_back_and_those_of_before_at_once(make_log, rows):
    class Reporter(Extra):
        def __init__(self):
            self.before, self.rows = None, []

        def report(self, folder, rows):
            self.before = rows
            return nullcontext(self.rows.append)

        def epoch(self, epoch, plan, reports):
            yield "norm", {"value": math.inf}

    reporter = Reporter()
    with make_log(extras={"reporter": reporter}) as log:
        play(log)
        state = unpack(*pack(log.state_dict()))
    assert (reporter.before, reporter.rows) == ([], rows())
    assert reporter.rows[-1] == {"event": "norm", "epoch": 1, "resolution": 32, "value": None}
    before = rows()
    with make_log(extras={"reporter": reporter}, state=state):
        assert reporter.before == before


def test_a_last_epoch_of_refused_rounds_is_known_to_a_run_that_ends_after_a_resume(make_log):
    with make_log() as log:
        log.round(report_of(0, refused=True))
        log.epoch_end(0, EVALUATION, train_time_s=1.0)
        state = unpack(*pack(log.state_dict()))
    with make_log(state=state) as log:
        assert log.results()["last_epoch_refused"] is True


def test_patience_is_counted_on_the_main_process_alone(make_log):
    """The others have no evaluations to compare with, and one wish ends the run."""
    with make_log() as log:
        log.epoch_end(0, EVALUATION, train_time_s=1.0)
        assert not log.is_best(0.75, 0.5)
        log.enabled = False
        assert log.is_best(0.75, 0.5)
        log.enabled = True
