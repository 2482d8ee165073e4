"""The program of the runs on slow links tunes, plans and chains as its registration says."""

import pytest

from experiments.benchmarks import slow
from experiments.benchmarks.slow import (
    ARMS,
    CONFIGS,
    EVERY,
    MERGES,
    Arm,
    best,
    climb,
    fitting,
    stage_ends,
)
from experiments.plots import slow_links


def test_climbing_ends_where_no_neighbour_is_better_however_far_the_start():
    arm = Arm({}, (0, 0), {"merges": ("1", "2", "4")})
    tried = []

    def measured(points):
        tried.extend(points)
        return {point: -((point[0] - 2) ** 2) - (point[1] + 3) ** 2 for point in points}

    found = climb(arm.start, arm.neighbours, measured)
    assert max(found, key=found.get) == (2, -3)
    assert {(1, -3), (2, -4), (2, -2)} <= found.keys()  # (3, -3) would be beyond the settings
    assert len(tried) == len(set(tried)) == len(found)


def test_parts_have_the_flags_of_the_arm_then_what_is_tuned_then_their_own():
    arm = Arm({"a": 1, "b": 1}, (1, 0), {"b": ("2", "3")}, ({"c": 4}, {"b": 5}))
    assert arm.at((1, 0)) == [{"a": 1, "b": "3", "c": 4}, {"a": 1, "b": 5}]


def test_workers_have_78_samples_between_sixteen_merges_an_epoch_and_156_otherwise():
    def sizes(name, merges):
        point = (MERGES.index(merges), *ARMS[name].start[1:])
        return [flags.get("large-batch-size") for flags in ARMS[name].at(point)]

    assert sizes("local_sgd", "16") == sizes("diloco", "16") == ["78,78"]
    assert sizes("local_sgd", "8") == ["156,156"]
    assert sizes("post_local", "16") == [None, "78,78"]  # joint steps, then rounds
    assert sizes("qsr", "16") == ["78,78", "156,156"]  # from 16 merges to one


@pytest.mark.parametrize(
    ("budget_s", "seconds", "epochs"),
    [(10.0, [1.0], 10), (9.99, [1.0], 9), (9.9, [3.0, 0.5], 4), (0.1, [1.0], 1)],
)
def test_as_many_epochs_as_fit_by_the_seconds_of_their_stages(budget_s, seconds, epochs):
    # Of 4 epochs the first stage has 2: 2 * 3.0 + 2 * 0.5; of 5 it has 3: 3 * 3.0 + 2 * 0.5.
    assert fitting(budget_s, seconds) == epochs
    assert stage_ends(140) == (80, 120, 140)


def test_the_best_point_is_that_of_the_mean_of_all_tuning_seeds():
    def row(point, seed, accuracy, arm="ddp"):
        return {"arm": arm, "gbps": "0.1", "point": point, "turn": seed, "accuracy": accuracy}

    rows = [row("1", "100", "40"), row("1", "101", "42"), row("2", "100", "43")]
    rows += [row("0", "100", "41.5"), row("0", "101", "41"), row("3", "100", "50", arm="qsr")]
    assert best(rows, 0.1, "ddp") == (0,)
    for gbps, arm in ((0.01, "ddp"), (0.1, "qsr")):
        with pytest.raises(LookupError, match="must be tuned"):
            best(rows, gbps, arm)


def test_tuning_begins_at_the_best_point_of_the_first_link():
    class Runs:
        def __init__(self):
            self.table, self.asked, self.rows = self, [], []

        def make(self, cases):
            for gbps, name, point, seed in cases:
                self.asked.append((gbps, point))
                accuracy = -abs(point[0] - 5)
                row = {"point": " ".join(map(str, point)), "turn": seed, "accuracy": accuracy}
                self.rows.append({"arm": name, "gbps": gbps} | row)

        def accuracy(self, gbps, name, point, seed):
            return -abs(point[0] - 5)

    runs = Runs()
    assert [slow.tune(runs, gbps, "ddp") for gbps in slow.GBPS] == [(5,)] * 3
    first, *later = (next(p for g, p in runs.asked if g == gbps) for gbps in slow.GBPS)
    assert (first, later) == (ARMS["ddp"].start, [(5,), (5,)])


def test_every_arm_begins_at_a_point_of_its_settings_and_its_configs_are_there():
    for arm in EVERY.values():
        assert len(arm.start) == len(arm.settings) + 1
        for point in (arm.start, *arm.neighbours(arm.start)):
            for flags in arm.at(point):
                assert (CONFIGS / f"{flags['config']}.yaml").exists()


def test_a_run_that_diverged_counts_as_no_accuracy_and_other_ends_are_errors(monkeypatch):
    ended = type("Ended", (), {"returncode": 2, "stderr": "error: max_bad_rounds must be ..."})
    monkeypatch.setattr(slow.subprocess, "run", lambda *_, **__: ended)
    parts = [{"config": "gap/ddp_128"}]
    assert slow.measure(parts, 3, {}) == {"accuracy": 0.0}
    ended.stderr = "error: dataset must be there"
    with pytest.raises(RuntimeError, match="dataset"):
        slow.measure(parts, 3, {})


def rows_of(gbps, accuracies):
    keys = {"gbps": str(gbps), "epochs": "3", "train_accuracy": "50", "point": "0 0"}
    return [
        {"arm": arm, "turn": str(turn), "accuracy": str(each + turn), **keys}
        for arm, each in accuracies.items()
        for turn in range(5)
    ]


def test_a_link_counts_once_all_its_arms_are_complete_and_held_out_images_choose_the_best():
    accuracies = {arm: 40.0 + n for n, arm in enumerate(ARMS)}
    tuning = [
        row | {"turn": str(100 + int(row["turn"])), "accuracy": str(-float(row["accuracy"]))}
        for row in rows_of(0.1, accuracies)
        if int(row["turn"]) < 2
    ]
    link = slow_links._link(0.1, tuning, rows_of(0.1, accuracies))
    # On held-out images the order is the other way round.
    assert link.questions()["S1"] == ("local_sgd", "ddp")
    assert link.less("local_sgd", "ddp") == [accuracies["local_sgd"] - 40.0] * 5
    assert slow_links._link(0.1, tuning, rows_of(0.1, accuracies)[:-1]) is None
    assert slow_links._link(0.01, tuning, rows_of(0.1, accuracies)) is None
    # An arm after the fact is shown once it is complete, and makes no link incomplete.
    after = rows_of(0.1, {"fp16_larger": 60.0})
    rows = rows_of(0.1, accuracies) + after
    tuning += [row | {"turn": str(100 + int(row["turn"]))} for row in after[:2]]
    assert not slow_links._link(0.1, tuning, rows[:-1]).has("ddp", "fp16_larger")
    link = slow_links._link(0.1, tuning, rows)
    assert link.has("ddp", "fp16_larger")
    assert link.questions()["S1"] == ("local_sgd", "ddp")


@pytest.mark.parametrize(
    ("values", "p", "said"),
    [
        ([-2.0, -3.0, -2.5], 0.01, "below"),
        ([2.0, 3.0, 2.5], 0.01, "above"),
        ([2.0, 3.0, 2.5], 0.2, "not settled"),
        ([0.1, 0.2, 0.1], 0.2, "within"),
        ([-0.9, 1.1, 0.1], 0.9, "not settled"),  # the interval is wider than the margin
    ],
)
def test_what_is_said_of_a_difference_is_the_first_that_holds(values, p, said):
    assert slow_links._verdict(values, p, "below", "above", "within") == said
