"""What is predicted of each way, and which is advised: by hand, and as its run plans it."""

import json
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from dbsl.base.errors import SettingError
from dbsl.config.parse import parse_config
from dbsl.config.settings import check_effects
from dbsl.extras.emulate import EmulatedLink
from dbsl.plan.types import TimeModel
from dbsl.profile.memory import MemoryModel
from dbsl.tools.advise import advise as command
from dbsl.tools.advise import ways as predicting
from dbsl.tools.advise.measure import Bench
from dbsl.tools.advise.ways import AS_FAST, INNER, RULES, Measured, advise, ways_of
from tests.helpers import ROOT, TINY, refused, run
from train import Config

MATRIX = torch.Size((500, 200))  # 400 kB
LINK = EmulatedLink(gbps=0.1, ms=1.0)  # of two: 34 ms for a matrix in float32
NAMES = ("epoch_s", "images_per_s", "bytes_per_epoch", "memory_mib")


def measured(slopes=(0.001, 0.001), intercept=0.01, **more):
    workers = len(slopes)
    known = {"samples": 1280, "least": 2, "large": {16: [64] * workers}, "shares": {16: 1.0}}
    known |= {"shapes": [MATRIX], "numbers": (100_000, 0), "link": LINK, **more}
    return Measured({16: TimeModel.of([TimeModel(s, intercept) for s in slopes], workers)}, **known)


def settings(workers=2, **more):
    return Config(workers=workers, small_workers=0, resolutions=(16,), **more)


def by_name(found, **more):
    return {way.name: way for way in ways_of(settings(len(found.models[16]), **more), found)}


def test_equal_workers_take_what_steps_and_the_link_say():
    ways = by_name(measured())
    assert len(ways) == 3 + 2 * 4 + 1
    joint = ways["step equal float32"]  # 10 steps of 74 ms, each with a sum of 34 ms
    assert joint.epoch_s == pytest.approx(10 * (0.074 + 0.034))
    assert joint.images_per_s == pytest.approx(1280 / 1.08)
    assert joint.bytes_per_epoch == 2 * 10 * 400_000
    assert (joint.steps, joint.waiting_s, joint.memory_mib) == (10, (0, 0), None)
    half = ways["step equal bf16"]
    assert half.epoch_s == pytest.approx(10 * (0.074 + 0.018))
    assert half.bytes_per_epoch * 2 == joint.bytes_per_epoch
    low = ways["step equal powersgd:4:4"]  # of rank 4, in three sums, one of them empty
    assert low.bytes_per_epoch == 2 * 10 * 4 * 4 * (500 + 200)
    rounds = ways["bsp 4 float32"]
    rounds_s = 0.64 + 12 * 0.01  # of 64, 64 and 32 samples
    assert rounds.epoch_s == pytest.approx(rounds_s + 4 * 0.034)
    assert rounds.bytes_per_epoch == 2 * 4 * 400_000
    rounded = ways["bsp 1 int4"]  # in blocks of 256 numbers
    assert rounded.bytes_per_epoch == 2 * 391 * (256 // 2 + 4)
    served = ways["asp 4 float32"]  # worker 0 is at the server; a push and a pull are 33 ms each
    assert served.epoch_s == pytest.approx(rounds_s + 4 * 2 * 0.033)


def test_what_was_measured_of_an_exchange_counts_and_not_what_the_link_says():
    exchange_s = {"step equal float32": 0.1, "bsp float32": 0.2, "asp float32": (0.0, 0.5)}
    ways = by_name(measured(exchange_s=exchange_s))
    spent = {name: way.epoch_s - way.compute_s[0] for name, way in ways.items()}
    assert spent["step equal float32"] == pytest.approx(1.0)
    assert spent["bsp 2 float32"] == pytest.approx(0.4)
    # Of a merge of 0.2 s the link took 34 ms: the rest is there in int4, too.
    assert spent["bsp 2 int4"] == pytest.approx(2 * (0.2 - 0.034 + 391 * 132 * 8 / 1e8 + 0.002))
    assert spent["step equal bf16"] == pytest.approx(10 * (0.1 - 0.034 + 0.018))
    assert spent["asp 4 float32"] == pytest.approx(2.0)


def test_unlike_workers_wait_in_equal_parts_and_not_in_balanced_ones():
    ways = by_name(measured((0.001, 0.003), 0.0))
    equal, balanced = ways["step equal float32"], ways["step balanced float32"]
    assert balanced.settings["local_batch_sizes"] == (96, 32)
    assert equal.epoch_s - equal.exchange_s == pytest.approx(10 * 64 * 0.003)
    assert equal.waiting_s == pytest.approx((10 * 64 * 0.002, 0))
    assert balanced.epoch_s - balanced.exchange_s == pytest.approx(10 * 96 * 0.001)
    assert balanced.waiting_s == pytest.approx((0, 0))
    assert ways["bsp 1 float32"].compute_s == pytest.approx((0.96, 0.96))
    # What an exchange was measured to take with equal parts stands for balanced ones.
    ways = by_name(measured((0.001, 0.003), 0.0, exchange_s={"step equal bf16": 0.5}))
    assert ways["step balanced bf16"].exchange_s == pytest.approx(5.0)


def test_an_epoch_is_the_mean_over_the_resolutions_of_the_run():
    found = measured()
    quick = {8: TimeModel.of(TimeModel(0.0005, 0.0), 2), **found.models}
    of_sides = {"shares": {8: 0.75, 16: 0.25}, "large": {8: [32] * 2, 16: [64] * 2}}
    found = replace(found, models=quick, **of_sides)
    ways = ways_of(replace(settings(), resolutions=(8, 16)), found)
    joint = next(way for way in ways if way.name == "step equal float32")
    assert joint.settings["local_batch_sizes"] == (32, 32, 64, 64)
    assert joint.steps == 0.75 * 20 + 0.25 * 10 + 0.5  # 17.5, rounded to even
    assert sum(joint.compute_s) / 2 == pytest.approx(0.75 * 20 * 0.016 + 0.25 * 10 * 0.074)


def test_machines_with_several_processes_are_workers_that_sum_inside():
    found = measured((0.001,) * 3, 0.0, nodes=(0, 0, 1), inner=EmulatedLink(1.0), samples=1536)
    way = by_name(found)["islands 4 float32"]
    assert way.settings["worker_processes"] == (2, 1)
    assert way.settings["large_batch_size"] == (128, 64)
    inside_s = 2 * 8 * 200_000 / 1e9
    assert way.compute_s == pytest.approx((8 * (64 * 0.001 + inside_s), 8 * 64 * 0.001))
    assert way.bytes_per_epoch == 2 * 400_000 * 8 + 2 * 400_000 * 4
    # Only the other machine's worker needs the link to the server.
    served = by_name(found)["asp 4 float32"]
    assert served.epoch_s - served.compute_s[2] == pytest.approx(4 * 2 * 0.033)
    found = replace(found, exchange_s={INNER: 0.5})
    assert by_name(found)["islands 4 float32"].compute_s[0] == pytest.approx(8 * (0.064 + 0.5))


ALIKE, UNLIKE = (0.001, 0.001), (0.001, 0.003)


@pytest.mark.parametrize(
    ("slopes", "gbps", "name", "why"),
    [
        (ALIKE, 100.0, "step equal float32", "0% exchange and 0% waiting: little is to be"),
        (UNLIKE, 100.0, "step balanced float32", "33% waiting: unlike workers"),
        (ALIKE, 0.6, "step equal bf16", "7% exchange and 0% waiting: bf16 sends 1/2 of"),
        (ALIKE, 0.1, "step equal powersgd:4:4", "PowerSGD sends 1/36 of the bytes"),
        (ALIKE, 0.01, "bsp 1 int4", "81% exchange and 0% waiting: 1 merge an epoch, 1/"),
    ],
)
def test_the_way_that_meets_most_often_is_advised_among_those_that_are_as_fast(
    slopes, gbps, name, why
):
    intercept = 0.01 * (slopes[0] == slopes[1])
    ways = ways_of(settings(), measured(slopes, intercept, link=EmulatedLink(gbps)))
    taken, said = advise(ways)
    assert taken.name == name
    assert why in said
    assert taken.epoch_s <= AS_FAST * ways[0].epoch_s


def test_rules_stand_in_the_docs_as_they_do_in_the_code():
    text = (ROOT / "docs/planning.md").read_text()
    names = (f"`{kind} {wire}`".replace(" `", "`") for kind, wire, _ in RULES)
    assert ", ".join(names) in text
    results = (ROOT / "docs/results.md").read_text()
    of = dict(re.findall(r"^\| \[(\w+)\]\([^)]*\): [^|]*\| ([\d.]+) ±", results, re.M))
    arms = ("ddp_128", "ddp_512", "all_large_rounds_4", "all_large")
    assert [of[arm] for arm in arms] == re.findall(r"([\d.]+) %", command.ACCURACY)


@pytest.mark.parametrize("name", ["step balanced float32", "bsp 4 int4", "asp 4 float32"])
def test_a_run_with_the_flags_of_a_way_has_the_plan_that_was_shown(tmp_path, name):
    way = by_name(measured((0.00123456, 0.00246913), samples=256, large={16: [16, 16]}))[name]
    given = {**TINY, "train_samples": 256, "slope": None, "intercept": None, "balance": "dynamic"}
    given |= {"local_batch_sizes": (3, 5), "epochs": 1, "save_best": False}
    flags = way.flags(Config(**given))
    assert "--balance none" in flags
    assert ("--local-batch-sizes unset" in flags) == (not name.startswith("step"))
    config = parse_config(Config, flags.split())
    values = {n: getattr(config, n) for n in way.settings}
    others = {**given, "balance": "none", "local_batch_sizes": None}
    run(tmp_path / "run", **{**others, **values, "workers": 2})
    (plan,) = json.loads((tmp_path / "run/plan.json").read_text()).values()
    assert plan == json.loads(json.dumps(asdict(way.plans[16])))


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ("--sync ssp --staleness 3", {"step", "bsp", "asp"}),
        ("--merge delta --outer-lr 0.5 --outer-momentum 0.3", {"step", "bsp", "asp"}),
        ("--small-workers 1 --time-ratio 1.2 --update-factor sqrt", {"step", "bsp", "asp"}),
        ("--small-ratio 0.5 --small-share 0.2", {"step", "bsp", "asp"}),
        ("--lr-scaling sqrt", {"bsp", "asp"}),
        ("--sync step --drop-last", {"step"}),
    ],
)
def test_flags_of_every_way_can_be_added_to_the_command(words, kinds):
    given = f"--resolutions 16 --workers 2 {words}".split()
    config = parse_config(Config, given)
    ways = ways_of(replace(config, small_workers=config.small_workers or 0), measured(UNLIKE))
    assert {way.kind.split()[0] for way in ways} == kinds
    for way in ways:
        check_effects(parse_config(Config, [*given, *way.flags(config).split()]), 2)


def test_ways_that_do_not_fit_into_memory_are_left_out_and_none_is_refused():
    memory = MemoryModel(1e6, 1e4, 2e6, 0.2, 1e5, "test")  # room for 50 samples
    found = measured(large={16: [40, 40]}, memory=[memory] * 2)
    ways = by_name(found)
    assert ways["step equal float32"].memory_mib == pytest.approx(1.5e6 / 2**20)
    uneven = replace(found, models=measured((0.001, 0.003), 0.0).models)
    assert not any(name.startswith("step balanced") for name in by_name(uneven))  # 60 and 20
    text = "large_batch_size must be one with which a worker fits into memory, got 60"
    with pytest.raises(SettingError, match=f"{text}, which needs 2 MiB of 2"):
        ways_of(settings(), replace(found, large={16: [60, 60]}))


def test_one_process_is_refused_in_a_line(tmp_path):
    text = "advise must be given to at least 2 processes, whose exchanges are measured, got 1"
    with pytest.raises(SettingError, match=text):
        run(tmp_path / "run", advise=True)
    assert not any(tmp_path.iterdir())
    with pytest.raises(SettingError, match="advise must be false with plan_only or"):
        Config(advise=True, plan_only=True)
    with pytest.raises(SettingError, match="json must be false except with advise"):
        Config(json=True)


def test_a_link_that_cannot_be_measured_is_said_in_a_line(monkeypatch):
    def fails(*_):
        raise RuntimeError("[x.cc:1] Connection closed by peer. It may help to retry")

    bench = object.__new__(Bench)
    bench.run = type("Run", (), {"model": torch.nn.Linear(2, 2)})
    bench.accelerator = type("Accelerator", (), {"device": torch.device("cpu")})
    monkeypatch.setattr("torch.distributed.all_reduce", fails)
    text = "the link between processes cannot be measured: Connection closed by peer$"
    with pytest.raises(RuntimeError, match=text):
        bench.link()


@pytest.mark.parametrize(("rounds", "spread"), [(2, 0.0), (3, 2 / 3)])
def test_one_measured_round_says_nothing_of_its_spread(rounds, spread):
    bench = object.__new__(Bench)
    bench.accelerator = type("Accelerator", (), {"device": torch.device("cpu")})
    bench.sure, bench._spent = 0.0, lambda: 1e9
    bench._train = lambda run, real: [np.full((2, 6), float(n)) for n in range(rounds)]
    bench._rounds(lambda: None)
    assert bench.sure == pytest.approx(spread)


def test_the_noise_scale_of_a_run_in_the_folder_is_repeated(tmp_path):
    summary = tmp_path / "summary.json"
    assert command.noise_of(tmp_path) == ""
    summary.write_text("{}")
    assert command.noise_of(tmp_path) == ""
    summary.write_text('{"noise_advice": "gradient noise scale 70"}')
    assert command.noise_of(tmp_path) == f"\ngradient noise scale 70 ({tmp_path})"


# --- machines of a file


def test_a_file_of_machines_is_enough_for_the_advice(capsys):
    file = str(ROOT / "examples/clusters/machines.yaml")
    command.main(["--machines", file, "--model", "test_resnet", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"ways", "recommended", "sure"}
    assert all(way.keys() == {"flags", *NAMES} for way in found["ways"])
    flags = [way["flags"] for way in found["ways"]]
    assert found["recommended"] in flags
    assert any("--worker-processes 4,4,2" in text for text in flags)
    seconds = [way["epoch_s"] for way in found["ways"]]
    assert seconds == sorted(seconds)
    for text in flags:
        parse_config(Config, text.split())
    command.main(["--machines", file, "--model", "test_resnet"])
    assert f"\n  {found['recommended']}\n" in capsys.readouterr().out


def of_one(machine="{images_per_s: 9, gpus: 2}", link="{gbps: 1}"):
    """Return the text of a file of one machine."""
    return f"machines: [{machine}]\nlink: {link}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (of_one("{images_per_s: 0, gpus: 2}"), "images_per_s must be above 0"),
        (of_one(link="{gbps: -1}"), "gbps must be above 0, got -1"),
        (of_one("{images_per_s: 9}"), "must have 2 to 4096 GPUs, got 1"),
        (of_one("{images_per_s: 9, count: 99999}"), "GPUs, got 99999"),
        (of_one("{images_per_s: fast}"), "images_per_s must be a number, got"),
        (of_one("{images_per_s: true}"), "images_per_s must be a number, got"),
        (of_one("{images_per_s: 9, gpus: 2.5}"), "gpus must be a whole number"),
        (of_one("{images_per_s: 9e0, gpus: 2.0}"), "gpus must be a whole number, got 2.0"),
        (of_one("{images_per_s: 9e0, gpus: '1'}"), "must have 2 to 4096 GPUs, got 1"),
        (of_one(link="{gbps: quick}"), "gbps must be a number"),
        (
            of_one("{images_per_s: 9, gpu: 2}"),
            "may set gpus, count, step_s, got images_per_s, gpu in",
        ),
        ("machines: [{images_per_s: 9, gpus: 2}]", "the file must set machines, link, and may set"),
        (of_one() + "links: 1\n", "got machines, link, links"),
        ("", "the file must set machines, link, and may set inner_link, got unset"),
        ("machines: 5\nlink: {gbps: 1}", "machines must be a list, got 5"),
        (of_one("null"), "each of machines must set images_per_s, and may"),
        (of_one(link="{ms: 1}"), "link must set gbps, and may"),
        (
            of_one("{images_per_s: 9, gpus: 999}"),
            "samples must be at least those of a step of all GPUs, 127872, got 50000",
        ),
        (None, "No such file"),
    ],
)
def test_a_file_that_says_no_machines_is_refused_in_a_line(tmp_path, capsys, text, said):
    file = tmp_path / "cluster.yaml"
    if text is not None:
        file.write_text(text)
    assert said in refused(capsys, command.main, ["--machines", str(file)])


def test_the_picture_has_a_bar_of_each_way_as_long_as_its_epoch():
    ways = ways_of(settings(), measured((0.001, 0.003), 0.0))
    (axes,) = command.ways_figure(ways).axes
    ends = np.array([[bar.get_width() for bar in group] for group in axes.containers]).sum(0)
    assert ends == pytest.approx([way.epoch_s for way in ways])
    assert axes.get_title(loc="left") == f"advised: {advise(ways)[0].name}"
    fast = [way for way in ways if way.epoch_s <= AS_FAST * ways[0].epoch_s]
    assert predicting.rank(advise(ways)[0]) == min(map(predicting.rank, fast))
