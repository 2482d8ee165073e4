"""The planner against the published tables, and its promises over random settings."""

import json
import math
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dbsl.base.errors import EXIT_UNREAD
from dbsl.config.parse import yaml_to_argv
from dbsl.config.settings import RunConfig
from dbsl.plan.machines import WorkerProfiles, largest_remainder
from dbsl.plan.solve import PlanRules, TimeModel, merge_weights, plan_dual_batch
from dbsl.plan.spec import make_plan, specs_of
from dbsl.run.plans import count_workers
from dbsl.tools.plan import main as plan_from_the_shell
from tests.helpers import refused

GTX_1080 = TimeModel(0.00056607, 0.014041204118283607)


@pytest.fixture
def published(capsys):
    """Return ``published(**flags)``: the plan that `python -m dbsl.plan` prints as JSON."""

    def plan(**flags):
        plan_from_the_shell([*yaml_to_argv(flags), "--json"])
        return json.loads(capsys.readouterr().out)

    return plan


@pytest.mark.parametrize(
    ("workers", "k", "n_s", "d_l", "d_s", "b_s"),  # in the papers' letters
    [
        (4, 1.05, 1, 13125, 10625, 83),
        (4, 1.05, 2, 13125, 11875, 154),
        (4, 1.05, 3, 13125, 12291, 205),
        (4, 1.05, 4, 13125, 12500, 242),
        (4, 1.10, 1, 13750, 8750, 38),
        (4, 1.10, 2, 13750, 11250, 87),
        (4, 1.10, 3, 13750, 12083, 127),
        (4, 1.10, 4, 13750, 12500, 160),
        # Not published: from whole small shares and the exact time; 155.03 and 242.97 uncut.
        (8, 1.05, 4, 6562, 5938, 155),
        (8, 1.05, 8, 6562, 6250, 242),
    ],
)
def test_conference_table_comes_out_truncated(published, workers, k, n_s, d_l, d_s, b_s):
    how = {"samples": 50000, "large_batch_size": 500, "time_ratio": k, "rounding": "truncate"}
    how |= {"slope": GTX_1080.slope, "intercept": GTX_1080.intercept}
    plan = published(workers=workers, small_workers=n_s, **how)
    found = [plan[name] for name in ("large_samples", "small_samples", "small_batch_size")]
    assert found == [d_l, d_s, b_s]
    assert sum(w["samples"] for w in plan["workers"]) == 50000


# (samples, B_L, slope, intercept, B_S for n_S = 1..4, d_S for n_S = 1..4)
JOURNAL = {
    "cifar100-24px": (50000, 600, 3.5268184915e-4, 0.014788833468, (130, 230, 294, 340)),
    "cifar100-32px": (50000, 560, 5.0563588586e-4, 0.015562114075, (102, 185, 243, 286)),
    # 587 is published for n_S=4; half a unit of b's last printed digit covers the difference.
    "imagenet-160px": (1281167, 2330, 3.0135e-4, 0.01204, (156, 322, 464, 588)),
    "imagenet-224px": (1281167, 1110, 5.6838e-4, 0.01705, (112, 222, 310, 383)),
    "imagenet-288px": (1281167, 740, 9.3872e-4, 0.01666, (67, 135, 190, 236)),
}
JOURNAL_SHARES = {50000: (10625, 11875, 12292, 12500), 1281167: (272249, 304278, 314954, 320292)}


@pytest.mark.parametrize("case", JOURNAL)
@pytest.mark.parametrize("small_workers", [1, 2, 3, 4])
def test_journal_table_comes_out_rounded(published, case, small_workers):
    samples, large_batch_size, slope, intercept, small_batch_sizes = JOURNAL[case]
    how = {"samples": samples, "large_batch_size": large_batch_size, "time_ratio": 1.05}
    how |= {"slope": slope, "intercept": intercept}
    plan = published(workers=4, small_workers=small_workers, **how)
    assert plan["small_batch_size"] == small_batch_sizes[small_workers - 1]
    assert plan["small_samples"] == JOURNAL_SHARES[samples][small_workers - 1]


def test_update_factors_follow_their_rules():
    parts = np.array([8750 / 13750, 1.0])
    for rule, factor in (("data", 7 / 11), ("sqrt", math.sqrt(7 / 11)), ("none", 1.0)):
        assert merge_weights(parts, rule).tolist() == pytest.approx([factor, 1.0])


time_models = st.builds(
    TimeModel, st.floats(1e-5, 1e-1), st.floats(1e-4, 1.0), st.just(0.0) | st.floats(1e-4, 3.0)
)
clusters = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.lists(time_models, min_size=n, max_size=n),
        st.lists(st.integers(2, 600), min_size=n, max_size=n),
    )
)


def check_promises(plan, machines, limits, *, rounds, min_batch_size):
    """All samples once, sizes in their bounds, and everyone done within one step a round."""
    assert sum(w.samples for w in plan.workers) == plan.samples
    for worker, machine, limit in zip(plan.workers, machines, limits, strict=True):
        assert 1 <= worker.local_batch_size <= limit
        if worker.small and not any("lowered" in note for note in plan.notes):
            assert worker.local_batch_size >= min(min_batch_size, limit)
        assert worker.steps == sum(
            -(-(worker.samples * (r + 1) // rounds - worker.samples * r // rounds) // b)
            for r in range(rounds)
            for b in (worker.local_batch_size,)
        )
        assert worker.predicted_time_s == pytest.approx(machine.time(worker.samples, worker.steps))
    times = [w.predicted_time_s for w in plan.workers]
    sizes = [(m, w.local_batch_size) for m, w in zip(machines, plan.workers, strict=True)]
    one_step = max(machine.time(size, 1) for machine, size in sizes)
    one_sample = max(machine.sample_time(size) for machine, size in sizes)
    assert max(times) - min(times) <= rounds * one_step + one_sample  # shares are whole samples


@given(
    clusters,
    st.booleans(),
    st.data(),
    st.integers(2000, 10**6),
    st.integers(1, 3),
    st.sampled_from([1, 4]),
    st.fixed_dictionaries({"time_ratio": st.floats(1.001, 1.3)}) | st.just({"small_batch_size": 2}),
)
def test_workers_cover_all_samples_and_finish_together(
    cluster, equal, data, samples, rounds, min_batch_size, goal
):
    machines, limits = cluster
    workers = len(machines)
    if equal:
        most = min(limits[0], samples // workers // rounds)
        machines, limits = machines[:1] * workers, [most] * workers
    small_workers = data.draw(st.integers(0, workers))
    rules = PlanRules(**goal, rounds=rounds, min_batch_size=min_batch_size)
    try:
        plan = plan_dual_batch(samples, workers, small_workers, limits, machines, rules)
    except ValueError:
        assume(False)
    least = goal.get("small_batch_size", min_batch_size)
    check_promises(plan, machines, limits, rounds=rounds, min_batch_size=least)
    # Without notes what was asked for comes out, but for rounding.
    if small_workers and not plan.notes and samples > 10**5:
        assert plan.time_ratio > 0.99


@pytest.mark.parametrize("machines", ["equal", "unequal"])
def test_a_ratio_gives_the_batch_that_gives_the_ratio(machines):
    model, limits = GTX_1080, 500
    if machines == "unequal":
        model = [TimeModel(GTX_1080.slope * f, GTX_1080.intercept) for f in (1, 2, 1, 3)]
        limits = [500, 500, 400, 300]

    def plan(**goal):
        return plan_dual_batch(500_000, 4, 2, limits, model, PlanRules(**goal))

    solved = plan(time_ratio=1.05)
    by_batch = plan(small_batch_size=solved.small_batch_size)
    assert by_batch.time_ratio == pytest.approx(1.05, abs=2e-3)
    assert by_batch.small_share == pytest.approx(solved.small_share, abs=2e-3)


def test_unequal_workers_by_hand():
    # Two seconds a sample against one, no cost per step: half the samples, whatever the batch.
    machines = [TimeModel(2.0, 0.0), TimeModel(1.0, 0.0)]
    plan = plan_dual_batch(300, 2, 0, [10, 20], machines)
    assert [w.samples for w in plan.workers] == [100, 200]
    assert [w.steps for w in plan.workers] == [10, 10]
    assert [w.merge_weight for w in plan.workers] == [0.5, 1.0]
    assert plan.time_s == plan.all_large_time_s == 200.0
    assert plan.equal_batch_time_s == 300.0  # 150 samples each, and the second waits
    assert (plan.large_samples, plan.update_factor, plan.small_batch_size) == (None, None, None)
    assert plan.time_ratio == 1.0


@given(
    st.lists(time_models, min_size=2, max_size=5), st.booleans(), st.data(), st.floats(1.001, 1.3)
)
def test_the_small_batch_is_the_least_that_keeps_the_ratio_by_trying_all(
    models, equal, data, time_ratio
):
    workers, samples = len(models), 10**9  # so many that whole shares move no batch
    models = models[:1] * workers if equal else models
    small = data.draw(st.integers(1, workers))
    limits = [data.draw(st.integers(1, 400))] * workers
    rules = PlanRules(time_ratio=time_ratio)
    try:
        plan = plan_dual_batch(samples, workers, small, limits, models, rules)
    except ValueError:
        assume(False)

    def speed(batches):
        pairs = zip(models, batches, strict=True)
        return sum(size / max(m.floor, m.slope * size + m.intercept) for m, size in pairs)

    time_s = time_ratio * samples / speed(limits)
    enough = [
        size
        for size in range(1, limits[0] + 1)
        if time_s * speed([size] * small + limits[small:]) >= samples * (1 - 1e-9)
    ]
    if not any("min_batch_size" in note for note in plan.notes):
        assert enough[0] - 1 <= plan.small_batch_size <= enough[0]  # it is rounded


def test_a_line_through_a_fast_gpus_floor_plans_nearly_large_batches_and_says_so():
    # Estimated of an H200: 13,000 images/s with batch 64, 40,000 with 500.
    small_s, large_s = 64 / 13_000, 500 / 40_000
    slope = (large_s - small_s) / (500 - 64)

    def plan(model, **options):
        return plan_dual_batch(50_000, 4, 3, 500, model, PlanRules(rounding="truncate", **options))

    line = plan(TimeModel(slope, large_s - 500 * slope))
    assert (line.small_batch_size, plan(GTX_1080).small_batch_size) == (408, 205)
    assert "82% of the large one, since a step costs 219 samples' time" in line.notes[0]
    # What a step of 64 takes is all host: the device needs as long for 197.
    hinge = plan(TimeModel(large_s / 500, 0.0, floor=small_s))
    assert (hinge.small_batch_size, hinge.notes) == (184, ())
    assert hinge.time_ratio == pytest.approx(1.05, abs=1e-3)
    # A slower host, and the floor itself is the reason.
    (note,) = plan(TimeModel(large_s / 500, 0.0, floor=0.9 * large_s)).notes
    assert "since a step of fewer than 450 samples takes no less time" in note
    for helps in ("--compile", "--large-batch-size", "--time-ratio", "--rounds-per-epoch"):
        assert helps in line.notes[0]
        assert helps in note


def test_a_solved_batch_below_the_least_is_clamped_and_said():
    plan = plan_dual_batch(8000, 4, 1, 64, TimeModel(0.01, 0.001), PlanRules(min_batch_size=4))
    assert plan.small_batch_size == 4
    assert "min_batch_size=4, got 0" in plan.notes[0]
    assert plan.time_ratio < 1.05
    times = [w.predicted_time_s for w in plan.workers]
    assert max(times) == pytest.approx(min(times), rel=0.01)


def test_a_small_worker_stays_at_what_it_can_hold():
    machines = [GTX_1080, TimeModel(GTX_1080.slope, 2 * GTX_1080.intercept), GTX_1080, GTX_1080]
    plan = plan_dual_batch(50000, 4, 2, [8, 500, 500, 500], machines)
    assert plan.workers[0].local_batch_size == 8
    assert plan.workers[1].local_batch_size == plan.small_batch_size > 8
    assert "1 of 2 small workers hold fewer than" in plan.notes[0]


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=50), st.integers(0, 10**11))
@example([0.1, 0.2, 0.3, 0.4], 6 * 10**9)
@example([1.0] * 2000, 1_999_999_999)
def test_largest_remainder_sums_exactly_and_stays_within_one(weights, total):
    parts = largest_remainder(weights, total)
    assert parts.sum() == total
    scale = total / sum(weights)
    assert all(abs(p - w * scale) < 1 + 1e-6 * total for p, w in zip(parts, weights, strict=True))


@pytest.mark.parametrize(
    ("large", "intercept", "least", "batch", "why"),
    [(128, 0.0, 1, 16, "intercept"), (12, 0.0001, 2, 2, "min_batch_size")],
)
def test_measured_model_without_a_plan_falls_back_to_an_eighth_or_the_least_and_says_so(
    large, intercept, least, batch, why
):
    models = {8: TimeModel.of(TimeModel(0.01, intercept), 4)}
    known = WorkerProfiles(models, {8: [large] * 4}, measured=True)
    config = RunConfig(workers=4, small_workers=1, resolutions=(8,), min_batch_size=least)
    plan = make_plan(specs_of(config, known, 8000, 1)[8], models[8])
    # Of a run that repeats this one they are given.
    again, given = replace(config, found={"slope": (0.01,)}), replace(known, measured=False)
    assert make_plan(specs_of(again, given, 8000, 1)[8], models[8]) == plan
    assert plan.small_batch_size == batch
    assert sum(w.samples for w in plan.workers) == 8000
    assert why in plan.notes[0]
    times = [w.predicted_time_s for w in plan.workers]
    assert max(times) == pytest.approx(min(times), rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, r"workers must be in \[1, 65536\], got 0"),
        ({"small_workers": 5}, r"small_workers must be in \[0, workers=4\], got 5"),
        ({"time_ratio": 1.0}, "time_ratio must be above 1, got 1$"),
        ({"time_ratio": 2.0}, r"be below 1\.333 .*, got 2$"),
        ({"time_ratio": 1.1, "small_batch_size": 9}, "given together: .* and small_batch_size"),
        ({"time_model": TimeModel(0.01, 0.0)}, "intercept must be above 0"),
        ({"large_batch_size": 0}, "large_batch_size must be at least 1, got 0"),
        ({"large_batch_size": 14000}, "large_batch_size must be at most 13125"),
        ({"samples": 3}, "samples must be at least the number of workers"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"small_batch_size": 501}, r"small_batch_size must be in \[1, large_batch_size=500\]"),
        ({"min_batch_size": 501}, r"min_batch_size must be in \[1, large_batch_size=500\]"),
    ],
)
def test_bad_settings_are_named_with_bound_and_value(arguments, message):
    settings = {"samples": 50000, "workers": 4, "small_workers": 1, "large_batch_size": 500}
    settings["time_model"] = GTX_1080
    rules = {name: value for name, value in arguments.items() if name not in settings}
    settings |= {name: value for name, value in arguments.items() if name in settings}
    with pytest.raises(ValueError, match=message):
        plan_dual_batch(**settings, rules=PlanRules(**rules))


@pytest.mark.parametrize("values", [(math.nan, 1.0), (0.0, 1.0), (-1.0, 1.0), (1.0, math.inf)])
def test_impossible_step_times_are_refused(values):
    with pytest.raises(ValueError, match=r"slope|intercept"):
        TimeModel(*values)


@pytest.mark.parametrize(
    ("processes", "settings", "expected"),
    [
        (1, {}, (1, 0)),
        (1, {"small_workers": 0}, (4, 0)),
        (1, {"local_batch_sizes": (1, 2, 3, 4)}, (4, 0)),
        (1, {"workers": 2, "local_batch_sizes": (1, 2)}, (2, 0)),
        (3, {"local_batch_sizes": (1, 2, 3)}, (3, 0)),
        (1, {"small_ratio": 0.1}, (4, 1)),
        (1, {"small_ratio": 0.6, "workers": 10}, (10, 6)),
        (1, {"small_ratio": 1.0}, (4, 4)),
        (3, {"small_ratio": 0.5}, (3, 2)),
        (3, {"small_workers": 0, "small_ratio": 0.5}, (3, 0)),
        (4, {"workers": 4, "small_workers": 3}, (4, 3)),
        (4, {"dedicated_server": True}, (3, 0)),
        (2, {"workers": 4}, r"workers must equal the number of processes \(2\), got 4"),
        (1, {"small_workers": 5}, r"small_workers must be at most the workers \(4\), got 5"),
        (1, {"dedicated_server": True}, "dedicated_server must have at least 2 processes, got 1"),
    ],
)
def test_workers_are_counted_from_processes_and_ratio(processes, settings, expected):
    refused = pytest.raises(ValueError, match=expected) if isinstance(expected, str) else None
    with refused or nullcontext():
        counted = count_workers(RunConfig(**settings), processes)
        assert (counted.workers, counted.small_workers) == expected


SHELL = [
    *("--samples", "50000", "--workers", "4", "--small-workers", "3", "--time-ratio", "1.05"),
    *("--large-batch-size", "500", "--slope", "0.00056607"),
    *("--intercept", "0.014041204118283607"),
]


def test_planner_from_the_shell_prints_the_promised_json_or_refuses_in_one_line(capsys):
    command = [sys.executable, "-m", "dbsl.plan", *SHELL, "--rounding", "truncate", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    plan = json.loads(done.stdout)
    assert (plan["large_samples"], plan["small_samples"]) == (13125, 12291)
    assert (plan["small_batch_size"], plan["time_ratio"]) == (205, 1.05)
    assert plan["update_factor"] == pytest.approx(12291 / 13125)
    assert [w["local_batch_size"] for w in plan["workers"]] == [205, 205, 205, 500]
    keys = {"local_batch_size", "samples", "steps", "merge_weight", "predicted_time_s"}
    assert all(keys <= set(w) for w in plan["workers"])
    before, after = os.pipe()
    os.close(before)  # as `| head` does once it has enough
    ended = subprocess.run([*command[:3], "--help"], stdout=after, stderr=subprocess.PIPE)
    os.close(after)
    assert (ended.returncode, ended.stderr) == (EXIT_UNREAD, b"")
    line = refused(capsys, plan_from_the_shell, [*SHELL, "--small-workers", "5"])
    assert line == "small_workers must be in [0, workers=4], got 5"


def test_a_slow_workers_least_lowers_the_batches_of_those_that_give_it_up():
    models = [TimeModel(0.001, 1e-6), TimeModel(0.1, 1e-6)]
    plan = plan_dual_batch(1000, 2, 0, 245, models, PlanRules(rounds=4, min_batch_size=8))
    assert [(w.local_batch_size, w.samples) for w in plan.workers] == [(242, 968), (8, 32)]
