"""Slow links and unlike machines: arms, rates and verdicts; no root, no time."""

import json
from contextlib import nullcontext

import pytest

from experiments.benchmarks.demos import arms, islands, link, more_workers, quota, slow_link, uneven
from experiments.benchmarks.demos.slow_link import ARMS, EPOCHS, FAMILIES, RATES, Arm, rate_of
from experiments.plots import links, quotas
from experiments.plots.rows import equivalence_p, read
from tests.helpers import ROOT

SYNTHETIC = {"epochs": "8", "train_s": "10", "epoch_s": "1", "accuracy": "0.3"}


def tuned(arm, **accuracies):
    return [
        {"arm": arm, "model": "m", "lr": lr, "seed": str(seed), "accuracy": str(accuracy)}
        for lr, accuracy in accuracies.items()
        for seed in slow_link.TUNING_SEEDS
    ]


def test_a_rate_is_settled_only_where_the_best_is_not_at_an_end():
    rows = tuned("a", **{"0.1": 0.3, "0.2": 0.4})
    rows += tuned("b", **{"0.1": 0.3, "0.2": 0.4, "0.4": 0.1})
    rows += [{"arm": "b", "model": "m", "lr": "0.05", "seed": "100", "accuracy": "0.9"}]  # one seed
    assert [slow_link.best_rate(rows, arm, "m") for arm in "abc"] == [None, 0.2, None]


def test_an_arm_that_was_tuned_itself_runs_at_its_rate_and_others_at_that_of_float32():
    grid = ("0.1", "0.2", "0.4")
    rows = tuned("step float32", **dict(zip(grid, (0.3, 0.4, 0.1), strict=True)))
    low_rank = Arm(0, "powersgd:4:4")
    assert rate_of(rows, low_rank, "m") == 0.2
    rows += tuned(str(low_rank), **dict(zip(("0.4", "0.8", "1.6"), (0.3, 0.4, 0.1), strict=True)))
    assert rate_of(rows, low_rank, "m") == 0.8
    assert rate_of(rows, Arm(0, "bf16"), "m") == 0.2


def test_tuning_extends_the_grid_until_the_best_is_inside(tmp_path, monkeypatch):
    tried = []

    def measure(arm, prefixes, run):
        assert run["holdout"] == 0.1
        tried.append((str(arm), run["lr"]))
        return {"accuracy": 0.5 - abs(run["lr"] - 0.4)}

    monkeypatch.setattr(slow_link, "measure", measure)
    monkeypatch.setattr(slow_link, "link", lambda rate: arms.suppress())
    for _ in range(2):  # the second call has nothing to do
        flags = ["--dataset", "x", "--folder", str(tmp_path)]
        slow_link.main(["tune", *flags, "--models", "resnet10t"])
    found = sorted(lr for arm, lr in tried if arm == "step float32")
    assert found == [lr for lr in (0.05, 0.1, 0.2, 0.4, 0.8) for _ in range(2)]
    assert len(read(tmp_path / "tuning.csv")) == len(FAMILIES) * 5 * 2
    with pytest.raises(SystemExit):  # of the other model there is no rate
        slow_link.main(["time", *flags])


def test_each_arm_of_islands_is_tuned_by_itself_and_runs_at_its_rate(tmp_path, monkeypatch):
    seen = []

    def run_train(prefixes, address, flags):
        assert prefixes == ["one", "one", "other", "other"]
        best = 0.2 if "worker-processes" in flags else 0.1
        seen.append((flags.get("holdout"), flags["lr"], flags["seed"], flags["local-batch-sizes"]))
        return {"train_s": 8.0, "epoch_s": 1.0, "accuracy": 0.5 - abs(flags["lr"] - best)}

    monkeypatch.setattr(islands, "run_train", run_train)
    monkeypatch.setattr(islands, "link", lambda rate: nullcontext(("one", "other")))
    common = ["--dataset", "x", "--folder", str(tmp_path)]
    with pytest.raises(SystemExit):  # nothing is tuned yet
        islands.main(["run", *common])
    islands.main(["tune", *common])
    assert {holdout for holdout, *_ in seen} == {0.1}
    seen.clear()
    islands.main(["run", *common, "--seeds", "3"])
    assert seen == [(None, 0.1, 3, [32] * 4), (None, 0.1, 3, [32] * 4), (None, 0.2, 3, [64] * 2)]


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_a_part_of_a_run_has_steps_and_rounds_like_the_whole(arm, monkeypatch):
    """Its epochs are scaled up to the whole training."""
    ran = []

    def found(prefixes, address, given, halfway=None, **plain):
        ran.append(given or plain)
        return {"train_s": 3.0, "epoch_s": 1.0, "accuracy": 0.5}

    monkeypatch.setattr(slow_link, "run_train", found)
    monkeypatch.setattr(slow_link, "run_plain", lambda *a, **plain: found(*a, None, **plain))
    monkeypatch.setattr(slow_link, "link", lambda rate: arms.suppress())
    for model, rates in RATES.items():
        for rate in rates:
            run = {"dataset": "x", "model": model, "lr": 0.1, "seed": 0}
            row = slow_link.timed_run(arm, rate, run)
            flags = {name.replace("_", "-"): value for name, value in ran[-1].items()}
            whole = row["epochs"] == EPOCHS[model]
            assert ("accuracy" in row) == whole
            share, epochs = row["share"], EPOCHS[model]
            assert flags["train-samples"] == int(5000 * share)
            if arm.wire and arm.rounds:
                assert flags["rounds-per-epoch"] == arm.rounds * share >= 1
            if not whole:
                assert row["train_s"] == pytest.approx((2.0 + (epochs - 1) * 1.0) / share)
                assert row["epoch_s"] == pytest.approx(1 / share)
            if arm.wire == "powersgd:4:40":
                assert flags["wire"] == f"powersgd:4:{40 * share:.0f}"


def test_simulated_workers_train_at_tuned_rates_all_seeds_at_one_link(tmp_path, monkeypatch):
    seen = []

    def run_train(prefixes, address, flags):
        assert prefixes == [[]]
        parts = [int(size) for size in flags["local-batch-sizes"].split(",")]
        assert len(parts) == flags["workers"] == 8
        assert sum(parts) == 128
        seen.append((flags["wire"], flags.get("sync"), flags["link-gbps"], flags["seed"]))
        best = 0.2 if flags["wire"].startswith("powersgd") else 0.1
        return {"accuracy": 0.5 - abs(flags["lr"] - best), "virtual_s": 3.0}

    monkeypatch.setattr(more_workers, "run_train", run_train)
    monkeypatch.setattr(more_workers, "RESULTS", tmp_path)
    words = ["--dataset", "x", "--cases", "eight"]
    with pytest.raises(SystemExit):  # no rate yet
        more_workers.main(["run", *words])
    assert not seen
    more_workers.main(["tune", *words, "--jobs", "2"])
    assert {seed for *_, seed in seen} == set(slow_link.TUNING_SEEDS)
    seen.clear()
    for _ in range(2):  # the second call has nothing to do
        more_workers.main(["run", *words, "--jobs", "2"])
    assert len(seen) == len(set(seen)) == 5 * (5 + 1)
    rows = read(tmp_path / "more_workers.csv")
    rates = {row["arm"]: row["lr"] for row in rows}
    assert rates == {str(arm): "0.1" for arm in more_workers.ARMS} | {links.POWERSGD: "0.2"}
    assert {row["megabits"] for row in rows if row["seed"] == "4"} == {"10.0"}


def test_something_happens_at_half_of_a_run_and_once(tmp_path):
    happened = []
    watch = arms._at_half(tmp_path / "log", 4, lambda: happened.append(1))
    counts = []
    for epoch in range(4):
        watch()
        counts.append(len(happened))
        with (tmp_path / "log").open("a") as file:
            print(json.dumps({"event": "times", "epoch": epoch + 1}), file=file)
    assert counts == [0, 0, 1, 1]


def test_both_ends_of_the_link_are_counted_and_the_loopback_is_not(monkeypatch):
    def ip(*command):
        ends = [("lo", 1000), ("dbv", 7)]
        return json.dumps([{"ifname": n, "stats64": {"tx": {"bytes": b}}} for n, b in ends])

    monkeypatch.setattr(link, "_ip", ip)
    assert link.sent_bytes() == 14


@pytest.mark.parametrize("version", [1, 2])
def test_quotas_are_written_as_the_kernel_has_them(tmp_path, version):
    if version == 2:
        (tmp_path / "cpu.max").write_text("max 100000")
    quota.limit(tmp_path, 0.25)
    found = {file.name: file.read_text() for file in tmp_path.iterdir()}
    one = {"cpu.cfs_period_us": "10000", "cpu.cfs_quota_us": "2500"}
    assert found == (one if version == 1 else {"cpu.max": "2500 10000"})


def test_quotas_fit_on_their_cores_and_the_limit_is_that_of_the_speeds():
    for machine in uneven.MACHINES.values():
        for parts in (machine.parts, machine.later or machine.parts):
            for core in (0, 1):
                there = [p for p, c in zip(parts, machine.cores, strict=True) if c == core]
                assert 0 < sum(there) <= 1
    assert uneven.MACHINES["4:1"].limit == pytest.approx(0.4)
    assert uneven.flags_of("equal", 3) == {"local-batch-sizes": [64, 64, 64]}
    assert uneven.flags_of("alone", 2) == {"workers": 1, "local-batch-sizes": [128]}
    assert uneven.flags_of("96/32", 2) == {"local-batch-sizes": [96, 32]}
    assert uneven.flags_of("dbs", 3)["global-batch-size"] == 192


def test_a_mean_is_equivalent_only_if_its_interval_is_within_the_margin():
    assert equivalence_p([-0.1, 0.0, 0.1, 0.05, -0.05], 0.5) < 0.001
    assert equivalence_p([0.6, 0.7, 0.8], 0.5) > 0.5
    assert equivalence_p([-0.6, -0.7, -0.8], 0.5) > 0.5
    assert equivalence_p([2.0, -2.0, 0.1], 0.5) > 0.2


def test_the_front_has_what_nothing_beats_in_both():
    points = {"a": (1.0, 30.0), "b": (2.0, 29.0), "c": (3.0, 31.0), "d": (3.0, 30.5)}
    assert links.front(points) == ["a", "c"]


def rows_of_links():
    accuracy = [
        {"arm": str(arm), "model": model, "seed": str(seed), "megabytes": "1.5"}
        | {"accuracy": str(0.3 + 0.001 * seed * arm.rounds)}
        for arm in ARMS
        for model in EPOCHS
        for seed in range(5)
    ]
    time = [
        {**SYNTHETIC, "arm": str(arm), "model": model, "megabits": str(rate), "turn": str(turn)}
        | {"train_s": str(10 + turn + (arm.wire == "int2")), "epochs": str(EPOCHS[model])}
        for arm in ARMS
        for model, rates in RATES.items()
        for rate in rates
        for turn in range(3)
    ]
    return accuracy, time


def test_tables_and_picture_of_links_have_every_arm_and_question():
    accuracy, time = rows_of_links()
    for model in EPOCHS:
        assert len(links._arms("", model, accuracy, time)) == 2 + len(ARMS)
    own_rate = [row for row in accuracy if row["arm"] == links.POWERSGD]
    text = "\n".join(links._questions("", accuracy, time, time[::2], own_rate))
    assert "| F: int4 less float32, points | +0.00 ± 0.00 | 5 |" in text
    assert text.count("G3: ") == text.count("after the fact: ") == 4
    panels = [axes for axes in links.links_figure(accuracy, time).axes if axes.get_title()]
    assert len(panels) == sum(map(len, RATES.values()))
    assert all(len(axes.containers) == len(ARMS) for axes in panels)


def test_the_table_of_more_workers_has_a_line_for_each_case():
    rows = [
        {"arm": str(arm), "model": case, "megabits": str(rate), "seed": str(seed)}
        | {"virtual_s": "6", "accuracy": f"{0.31 + 0.0001 * seed:.4f}"}
        | ({} if arm.rounds else {"virtual_s": "12", "accuracy": "0.3"})
        for case in more_workers.CASES
        for arm in more_workers.ARMS
        for rate in more_workers.RATES
        for seed in range(5)
    ]
    lines = links._more_workers("", rows)[2:]
    assert len(lines) == len(more_workers.CASES)
    ahead = "+1.0 ± 0.0; below 0.001"
    assert lines[1].startswith(f"| 8 workers, 0.4 M parameters | 2.00 | 2.00 | {ahead} | {ahead} |")
    assert lines[1].endswith("| +0.0 ± 0.0 | +0.0 ± 0.0 | +1.0 ± 0.0 |")


def test_the_picture_of_quotas_has_every_arm_on_every_machine():
    rows = [
        {"arm": arm, "machine": name, "turn": str(turn), "accuracy": "0.3"}
        | {"train_s": str(10 + turn)}
        for arm in uneven.ARMS
        for name in uneven.MACHINES
        for turn in range(2)
    ]
    splits = [
        {"arm": "96/32", "machine": name, "epoch_s": str(turn + 1.0)}
        for name in uneven.SWEPT
        for turn in range(2)
    ]
    bars, *swept = quotas.quotas_figure(rows, splits).axes
    assert len(bars.patches) == (len(uneven.ARMS) - 1) * len(uneven.MACHINES)
    assert len(swept) == len(uneven.SWEPT)


def test_the_registered_arms_are_those_that_run():
    text = (ROOT / "experiments/configs/links/README.md").read_text("utf-8")
    for wire in slow_link.JOINT:
        assert wire in text
    assert str(Arm(8, "int2")) == links.GOALS["G1"][1]
    assert {arm for _, arm, _ in links.GOALS.values()} | {links.POWERSGD} <= set(map(str, ARMS))
