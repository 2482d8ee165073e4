"""The whole script: on digits in one process and in two, twice the same, and refusing bad input."""

import os
import re
import time
from functools import partial
from importlib.util import find_spec

import pytest
import torch

import train
from dbsl.config.image_settings import ImageConfig
from dbsl.config.parse import COMMON, parse_config, read_source
from dbsl.config.settings import check_effects
from dbsl.data.dataset import load_data
from dbsl.data.sources import PixelStore
from dbsl.data.transforms import Transform
from dbsl.model import load_model
from dbsl.plan.sampler import evaluation_batches
from dbsl.profile.cache import Profiler
from dbsl.profile.memory import MemoryModel
from dbsl.profile.timing import fit_profile
from dbsl.run.folder import holder_of
from tests import helpers
from tests.helpers import fingerprint, rounds_of, rows, samples_by_epoch, short, slow, to_flags
from train import Config, main

ABSENT = next(name for name in ("trackio", "dvclive", "aim") if find_spec(name) is None)
SETTINGS = {"eval_samples": 40, "resolutions": (16, 32), "epochs": 3, "lr_milestones": (2,)}
SETTINGS |= {"large_batch_size": (10,), "small_workers": 1}
run = partial(helpers.run, **SETTINGS)
run_in_ranks = partial(helpers.run_in_ranks, **SETTINGS)


@pytest.mark.usefixtures("pictures")
def test_one_process_leaves_a_whole_run_folder(tmp_path, monkeypatch, capsys):
    folder, began, held = tmp_path / "run", time.perf_counter(), []

    def start(*_):  # what a run waits for before its first batch is start-up, and no training
        time.sleep(0.4)
        held.append(holder_of(folder))

    monkeypatch.setattr(PixelStore, "start", start, raising=False)
    run(folder, checkpoint_every=2)
    assert all(holder.startswith(f"process {os.getpid()} on ") for holder in held)
    spent, printed = time.perf_counter() - began, capsys.readouterr().out
    assert printed.index("\nstart-up ") < printed.index("\nepoch 1/3 ")
    assert " and start-up " in printed
    assert "4 workers simulated in one process, 1 on small batches" in printed
    assert "16 px, epoch 1, lr 0.02; time ratio 1.050" in printed
    assert {p.name for p in folder.iterdir()} == {
        *("config.yaml", "plan.json", "metrics.jsonl", "summary.json"),
        *("model.safetensors", "model_best.safetensors", "config.json", "checkpoints", "plots"),
    }
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["epoch-0002", "epoch-0003"]

    summary = helpers.summary_of(folder)
    assert set(summary) == {
        *("final_accuracy", "final_top5_accuracy", "best_accuracy", "final_loss", "held_out"),
        *("train_time_s", "virtual_time_s", "start_up_time_s", "total_time_s"),
        *("images_per_s", "samples_seen", "epochs", "seed", "workers", "small_workers", "sync"),
        *("noise", "device", "precision", "torch", "timm", "classes"),
    }
    assert (summary["samples_seen"], summary["workers"], summary["small_workers"]) == (180, 4, 1)
    assert summary["start_up_time_s"] > 0.8  # training and evaluation images
    assert summary["start_up_time_s"] + summary["train_time_s"] < summary["total_time_s"] < spent

    assert [event["resolution"] for event in rows(folder, "plan")] == [16, 32, 32]
    rounds, evals = rows(folder, "round"), rows(folder, "eval")
    assert len(rounds) == 3 * 4
    assert {e["resolution"] for e in rounds if e["epoch"] == 0} == {16}
    assert samples_by_epoch(folder) == [60] * 3  # every sample once an epoch
    told = [(e["epoch"], e["resolution"], e["samples"]) for e in evals]
    assert told == [(epoch, 32, 40) for epoch in range(3)]
    assert evals[-1]["accuracy"] == summary["final_accuracy"]
    data = load_data(ImageConfig("digits", train_samples=60, eval_samples=40))
    transform, correct = Transform(32, "none", data.mirror, data.mean, data.std, 0), 0
    with torch.no_grad():
        for images, labels in data.evaluation.batches(evaluation_batches(40, 16), transform):
            correct += (load_model(folder)(images).argmax(1) == labels).sum().item()
    assert correct / 40 == pytest.approx(summary["final_accuracy"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["1 worker in one process (--workers is unset); cpu", "epochs, without evaluation: "]),
        (
            {"small_ratio": 0.25},
            ["4 workers simulated in one process, 1 on small batches (--workers is unset), "],
        ),
        ({"workers": 2}, ["2 workers simulated in one process, 0 on small batches, sync"]),
        (
            {"lr_schedule": "cosine", "warmup_epochs": 2, "epochs": 20},
            ["16 px, epochs 1-20, lr 0.02 to 0 (cosine)"],
        ),
        (SETTINGS, ["|SSSS", "predicted for all 3 epochs", "one equal batch"]),
        (
            {"workers": 2, "slope": (1e-3, 9e-2), "resolutions": (16,), "sync": "step"},
            ["worker 0 alone is best, ", " times as fast as balanced"],
        ),
        (
            {
                **{"workers": 2, "slope": (1e-3, 2e-3), "resolutions": (16,), "sync": "step"},
                **{"global_batch_size": 16, "min_batch_size": 8},
            },
            ["equal batches and balanced take the same time"],  # both have batches of 8
        ),
    ],
)
def test_plan_only_prints_the_plan_and_why_and_leaves_nothing(tmp_path, capsys, settings, words):
    helpers.run(tmp_path / "run", plan_only=True, **settings)
    printed = capsys.readouterr().out
    for word in ("plan only: nothing is trained or written", *words):
        assert word in printed
    assert ("% of them" in printed) == (settings.get("small_ratio") == 0.1)
    if not settings:  # a plain training
        of_several = ("sync", "small", "idle", "weight ", "all large", "side by side")
        assert not [word for word in of_several if word in printed]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["large_batch_size", "micro_batch_size"])
def test_auto_on_a_cpu_is_the_usual_and_is_written_down(tmp_path, name):
    settings = {"epochs": 1, "lr_milestones": ()} | {"large_batch_size": None, name: "auto"}
    run(tmp_path / "run", **settings)
    run(tmp_path / "usual", **settings | {name: None})
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "usual")
    config = parse_config(Config, ["--config", str(tmp_path / "run/config.yaml")])
    assert getattr(config, name) == "auto"
    assert config.found[name] == ((15, 15) if name == "large_batch_size" else None)


def test_a_joint_batch_with_auto_is_planned_again_by_the_runs_own_settings(tmp_path):
    settings = {"sync": "step", "small_workers": None, "epochs": 1, "lr_milestones": ()}
    run(tmp_path / "first", **settings, large_batch_size="auto", global_batch_size=30)
    given = str(tmp_path / "first/config.yaml")
    helpers.train_by("--config", given, "--output-dir", str(tmp_path / "again"))
    plans = [(tmp_path / name / "plan.json").read_text() for name in ("first", "again")]
    assert plans[0] == plans[1]


def test_learning_rates_follow_the_workers_batch(tmp_path):
    run(tmp_path / "run", lr_scaling="sqrt", warmup_epochs=0, small_batch_size=(4,))
    rounds = rounds_of(tmp_path / "run")
    for event in rounds:
        rate = 0.02 * (0.2 if event["epoch"] == 2 else 1.0)
        expected = rate * (event["local_batch_size"] / 10) ** 0.5
        assert event["learning_rate"] == pytest.approx(expected)
    assert {event["local_batch_size"] for event in rounds} == {4, 10}


SHORT = {"epochs": 2, "lr_milestones": (1,), "resolutions": (16,)}
JOINT = {"small_workers": 0, "large_batch_size": None, "train_samples": 63, **SHORT}


def eval_losses(folder):
    return [event["loss"] for event in rows(folder, "eval")]


@slow
def test_joint_steps_in_processes_equal_those_of_the_server(tmp_path):
    options = {"local_batch_sizes": (7, 3), "lr": 0.002}  # small steps: rounding grows slowly
    run_in_ranks(tmp_path / "joint", sync="step", **JOINT, **options)
    run_in_ranks(tmp_path / "server", push="gradients", **JOINT, **options)
    losses = eval_losses(tmp_path / "server")
    assert losses == pytest.approx(eval_losses(tmp_path / "joint"), 1e-3)
    rounds = rounds_of(tmp_path / "server")
    # Seven steps of 9: six samples and three.
    assert [e["samples"] for e in rounds[:2]] == [42, 21]


FOLLOWING = {
    "rounds-dbs-half-epochs": {"balance": "dbs:1", "rounds_per_epoch": 2},
    "step-thirds-of-epochs": {
        **{"balance": "dynamic:1", "sync": "step", "rounds_per_epoch": 3, "small_workers": 0}
    },
    "pushes-dbs": {"balance": "dbs:2", "push": "gradients", "small_workers": 0},
    "asp": {"balance": "dynamic", "sync": "asp", "epochs": 4},  # later, since nobody waits
}


@pytest.mark.parametrize("how", short(FOLLOWING, "step-thirds-of-epochs"))
def test_plans_that_follow_simulated_times_repeat_to_the_bit(tmp_path, capsys, how):
    settings = {
        "slowdown": ("3:2.5",),
        "emulate": ("noise=0.05",),
        "epochs": 3,
        "train_samples": 200,
    }
    settings |= {"resolutions": (16,), **FOLLOWING[how]}
    for name in ("one", "two"):
        run(tmp_path / name, **settings)
    assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "two")
    assert " px: batches " in capsys.readouterr().out
    changed = [event for event in rows(tmp_path / "one", "plan") if "from_epoch" in event]
    assert changed[-1]["workers"][3]["samples"] < changed[-1]["workers"][2]["samples"] * 0.6
    epochs = settings["epochs"]
    assert samples_by_epoch(tmp_path / "one", epochs) == [200] * epochs


HARD = {
    "one-sample-more": {"train_samples": 41, "local_batch_sizes": (30, 10)},  # than a global batch
    "100-times-slower": {
        **{"train_samples": 80, "slowdown": "1:100", "global_batch_size": 20, "balance": "dbs"}
    },
    "ssp-gradients": {"push": "gradients", "sync": "ssp", "local_batch_sizes": (17, 3)},
}


@pytest.mark.parametrize("case", short(HARD, "one-sample-more", "ssp-gradients"))
def test_two_processes_finish_with_everything_counted_and_none_hangs(tmp_path, case):
    settings = {**JOINT, "sync": "step", **HARD[case]}
    run_in_ranks(tmp_path / "run", **settings)
    epochs, samples = settings["epochs"], settings["train_samples"]
    assert [event["epoch"] for event in rows(tmp_path / "run", "eval")] == [*range(epochs)]
    assert samples_by_epoch(tmp_path / "run", epochs) == [samples] * epochs


def test_a_clipped_step_is_as_long_as_the_bound_and_the_log_has_the_norm_before(
    tmp_path, monkeypatch
):
    step, moves = torch.optim.SGD.step, []

    def noted(self, *arguments):
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in parameters]
        step(self, *arguments)
        rate = self.param_groups[0]["lr"]
        changes = [(p.detach() - b) / rate for p, b in zip(parameters, before, strict=True)]
        moves.append(torch.stack([change.norm() for change in changes]).norm().item())

    monkeypatch.setattr(torch.optim.SGD, "step", noted)
    plain = {"optimizer": "momentum", "momentum": 0.0, "weight_decay": 0.0, "warmup_epochs": 0.0}
    settings = {"workers": 2, "large_batch_size": (15,), **plain, "clip_grad": 1e-3, "log_every": 1}
    helpers.run(tmp_path / "run", epochs=2, lr_milestones=(1,), **settings)
    del moves[0]  # it tried the optimizer before the run
    assert moves == pytest.approx([1e-3] * len(moves), rel=1e-2)
    lines = rows(tmp_path / "run", "step")
    assert len(lines) >= len(moves) > 0
    assert all(line["gradient_norm"] > 0.1 for line in lines)


MICRO = {
    "bsp": {"large_batch_size": (12, 9), "small_workers": 1},
    "step": {"sync": "step", "local_batch_sizes": (3, 4, 6, 9)},
    "gradients": {"push": "gradients", "local_batch_sizes": (3, 4, 6, 9)},
}


@pytest.mark.parametrize("mode", short(MICRO, "bsp"))
def test_micro_batches_train_as_whole_batches_do_without_batch_norm(tmp_path, monkeypatch, mode):
    sizes, loss_function = [], train.loss_function

    def noting(model, images, *rest):
        sizes.append(len(images))
        return loss_function(model, images, *rest)

    monkeypatch.setattr(train, "loss_function", noting)
    settings = {"model": "test_vit", "resolutions": (16, 32), "epochs": 2, "workers": 4}
    settings |= MICRO[mode] | {"lr_milestones": (), "log_every": 1, "mixed_precision": "no"}
    helpers.run(tmp_path / "whole", **settings)
    whole, sizes[:] = sizes.copy(), []
    micro = (5, 5, 5, 5, 2, 3, 4, 4)  # by resolution and worker
    helpers.run(tmp_path / "micro", **settings, micro_batch_size=micro)
    assert max(sizes) <= 5 < max(whole)
    assert sum(sizes) == sum(whole)
    kept = ("event", "worker", "epoch", "samples", "steps", "local_batch_size", "step")
    found, expected = helpers.metrics_of(tmp_path / "micro"), helpers.metrics_of(tmp_path / "whole")
    for ours, theirs in zip(found, expected, strict=True):
        assert [ours.get(name) for name in kept] == [theirs.get(name) for name in kept]
        for name in ("loss", "gradient_norm", "gradient_square", "gradient_batch"):
            assert (ours.get(name) or 0) == pytest.approx(theirs.get(name) or 0, rel=2e-3), name


def test_a_batch_by_hand_that_does_not_fit_is_said_in_the_plan(tmp_path, monkeypatch, capsys):
    memory = MemoryModel(100.0, 10.0, 0.0, room_bytes=175.0)
    profile = fit_profile(16, (2, 10), (0.1, 0.3), (0.0, 0.0), memory=memory)
    monkeypatch.setattr(Profiler, "profile", lambda *_: profile)
    settings = {"workers": 2, "local_batch_sizes": (7, 10), "sync": "step", "plan_only": True}
    helpers.run(tmp_path / "run", **settings, slope=None, intercept=None)
    said = "worker 1: 10 samples at once are more than the 7 that fit into memory: set --micro-"
    assert said in capsys.readouterr().out


STEP = ("--sync", "step", "--small-workers", "0")
PUSH = ("--push", "gradients", "--sync", "asp", "--small-workers", "0")
MICRO_4 = ("--micro-batch-size", "4")
COSINE = ("--lr-schedule", "cosine")
LOW = "powersgd:RANK[:STEPS]"
ALONE = (*STEP, "--workers", "1")
HELP = "flag must be one that --help lists"
REFUSED = [
    (["--sync", "asp", "--merge", "delta"], "merge must be ratio or half with sync"),
    (["--resolutions", "32,16"], "resolutions must ascend, got 32,16"),
    (["--resolutions", "0"], "resolutions must be positive for images, got 0"),
    (["--dataset", "no-such-name-on/the-hub"], "'no-such-name-on/the-hub' cannot be opened"),
    (["--optimizer", "sdg"], "optimizer must be a name that timm.optim.list_optimizers()"),
    (["--slope", "0.1", "0.2", "0.3"], "slope must have 1 value, one per resolution (2) or"),
    (["--profile", "no-such.json"], "profile must be unset with slope"),
    ([*STEP, "--dataset", "no", "--local-batch-sizes", "2,2,2"], "local_batch_sizes must have"),
    ([*STEP, "--local-batch-sizes", "20,20,20,2"], "local_batch_sizes must sum to at most"),
    ([*STEP, "--global-batch-size", "50"], "global_batch_size must be in [8, 40], 2 a worker"),
    (["--small-batch-size", "2,2,2,2"], "small_batch_size must have one value, or one per res"),
    ([*STEP, "--rounds-per-epoch", "9"], "rounds_per_epoch must be at most the 2 joint steps"),
    ([*STEP, "--wire", "int4"], f"wire must be float32, bf16, fp16 or {LOW} with sync step, got"),
    ([*STEP, "--wire", "powersgd:0"], "wire must be powersgd with a rank of at least 1, got pow"),
    ([*STEP, "--wire", "powersgd:4"], "wire must not be powersgd with simulated workers: it ne"),
    ([*STEP, "--wire", "powersgd:4", "--mixed-precision", "fp16"], "mixed_precision must not be"),
    ([*ALONE, "--wire", "bf16"], "wire must be float32 with one worker, which sends nothing"),
    (["--wire", "powersgd:4"], "wire must be float32, bf16, int8, int4 or int2 with sync bsp"),
    (["--wire", "int4", "--sync", "asp"], "wire must be float32 with sync asp, got int4"),
    ([*PUSH, "--wire", "bf16"], "wire must be float32 with push gradients, got bf16"),
    (["--micro-batch-size", "1"], "micro_batch_size must be at least 2, since batch norm"),
    (["--micro-batch-size", "2,2,2"], "micro_batch_size must have 1 value, one per resolution"),
    ([*MICRO_4, "--large-batch-size", "auto"], "large_batch_size must not be auto with micro_b"),
    ([*COSINE, "--schedule", "fixed", "--lr-milestones", "1,2"], "lr_milestones must be left out"),
    (["--lr-schedule", "cosine", "--lr-gamma", "0.1"], "lr_gamma must be 0.2 except with lr_sch"),
    (["--sync", "step"], "small_workers must be unset with sync step or push gra"),
    (["--push", "gradients:0"], "STEPS of push gradients must be at least 1, got 0"),
    (["--slowdown", "7:2"], "slowdown must name a worker in [0, 3], got 7"),
    (["--emulate", "disturb=2:4-20"], "disturb must have a probability in [0, 1]"),
    (["--mixed-precision", "fp16"], "mixed_precision must be no or bf16 on a CPU"),
    (["--report-to", ABSENT], f"report_to must name an installed tracker, got {ABSENT!r}"),
    # without effect
    (["--balance", "none:3"], "balance must be none, dynamic[:ROUNDS] or dbs[:ROUNDS], got none:3"),
    (["--merge", "delta:0.7,1"], "MOMENTUM of merge delta must be in [0, 1), got 1"),
    (["--merge", "delta:0.7,0.9,1"], "merge must be mean, delta[:LR,MOMENTUM], ratio or half, got"),
    (["--lr-schedule", "cosine:x"], "lr_schedule must be step or cosine[:LAST], got cosine:x"),
    (["--emulate", "noise=-1"], "emulate noise must be at least 0, got -1"),
    (["--emulate", "gbp=1"], "emulate must name arguments such as gbps"),
    (["--outer-lr", "1"], f"{HELP}, got --outer-lr, which is --merge delta:LR,MOMENTUM here"),
    # no value of the flag's type
    (["--resolutions", "24,x"], "--resolutions must be whole numbers, got '24,x'"),
    (["--pretrained", "yes"], "values must follow a flag that takes them, got 'yes'"),
    (["--compile", "yes"], "--compile must be auto or cudagraphs or true or false, got 'yes'"),
    (["--no-compile", "yes"], "values must follow a flag that takes them, got 'yes'"),
    (["--batch-size=3"], f"{HELP}, got --batch-size, which is --large-batch-size or --local-b"),
    (["--class_weights", "1"], f"{HELP}, got --class-weights, which is a line of loss_function"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, capsys, arguments, message):
    flags = [*to_flags(tmp_path / "run", **SETTINGS), *arguments]
    line = helpers.refused(capsys, lambda: main(parse_config(Config, flags)))
    assert line.startswith(message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: yes\n", "lr must be a number, got true (YAML's yes, no, .*; {} sets"),
        ("mixed-precision: no\n", "mixed_precision must be auto, no, .*got false (.*; {} sets"),
        ("save_best: 1\n", "save_best must be true or false, got 1"),
        ("compile: 1\n", "--compile must be auto or cudagraphs or true or false, got '1'"),
        ("lr: abc\n", "--lr must be a number, got 'abc' ({} sets lr"),
        (
            "epochs: 3\nwarmup_epochs: 5\n",
            "warmup_epochs must be at most the 3 epochs of the run, got 5 ({} sets warmup_epochs",
        ),
    ],
)
def test_yaml_that_is_wrong_or_says_other_than_it_seems_is_refused_in_one_line(
    tmp_path, text, message
):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        parse_config(Config, ["--config", str(path)])
    pattern = ".*".join(map(re.escape, message.format(path).split(".*")))
    assert re.match(pattern, str(refused.value)), refused.value
    path.write_text("compile: yes\nmixed_precision: 'no'\nlr: 1\nno_save_best: false\n")
    config = parse_config(Config, ["--config", str(path)])
    assert (config.compile, config.mixed_precision, config.lr) == (True, "no", 1.0)
    assert config.save_best


@pytest.mark.parametrize("name", ["20261127", "2026-11-27", "1.5"])
def test_a_run_folder_in_yaml_may_be_a_number_or_a_date(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.yaml").write_text("lr: 0.7\n")
    for text in (f"resume: auto\noutput_dir: {name}\n", f"resume: {name}\n"):
        (tmp_path / "recipe.yaml").write_text(text)
        assert parse_config(Config, ["--config", "recipe.yaml"]).lr == 0.7


def test_settings_that_have_their_default_or_an_effect_are_taken_and_others_are_not():
    check_effects(Config(staleness=3, sync="ssp", balance="dbs:3"))
    check_effects(Config(workers=1, small_workers=0, small_ratio=0.1))
    check_effects(Config(workers=1, small_workers=1), processes=2)  # their number wins
    alone = [Config(workers=1, small_workers=1), Config(small_workers=1, dedicated_server=True)]
    for processes, config in enumerate(alone, 1):
        with pytest.raises(ValueError, match=r"^small_workers must be 0 with one worker, .* got 1"):
            check_effects(config, processes)
    with pytest.raises(ValueError, match=r"^small_ratio must be 0 with one worker, .* got 0.1"):
        check_effects(Config(workers=1, small_ratio=0.1))


def test_milestones_of_a_cosine_are_taken_where_something_changes_at_them():
    cosine = {"lr_schedule": "cosine", "lr_milestones": (5,)}
    check_effects(Config(**cosine))  # resolutions climb
    check_effects(Config(**cosine, schedule="fixed", reset_momentum="stage"))
    check_effects(Config(**cosine, schedule="fixed", found={"lr_milestones": (5,)}))
    for others in ({"schedule": "fixed"}, {"schedule": "progressive"}, {"resolutions": (32,)}):
        with pytest.raises(ValueError, match=r"lr_milestones must be left out .*, got 5"):
            check_effects(Config(**cosine, **others))


def test_flags_win_over_the_file_and_lists_take_commas_or_spaces(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("lr: 0.5\nepochs: 7\nresolutions: [24, 32]\nlr_gamma: 1e-1\n")
    config = parse_config(Config, ["--config", str(path), "--epochs", "9", "--dropout", "0.1,0.2"])
    assert (config.lr, config.epochs, config.lr_gamma) == (0.5, 9, 0.1)
    assert (config.resolutions, config.dropout) == ((24, 32), (0.1, 0.2))
    assert parse_config(Config, ["--resolutions=24,32"]).resolutions == (24, 32)
    assert parse_config(Config, ["--resolutions", "24", "32"]).resolutions == (24, 32)


def test_help_is_grouped_and_every_flag_explains_itself(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        parse_config(Config, ["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    titles = [line[:-1] for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert titles[:3] == ["common", "data", "mixing"]
    assert len(titles) == 11
    assert len(text.splitlines()) <= 260
    common = text[text.index("common:") : text.index("data:\n")]
    assert common.count("\n  --") == len(COMMON)
    assert "--config FILE" in common
    for name in Config.__dataclass_fields__.keys() - {"found", "floor"}:
        flags = re.findall(rf"\n  --{name.replace('_', '-')}[, \n]", text)
        assert len(flags) == 1, name
    assert "--floor" not in text
    words = " ".join(text.split())
    assert "--small-ratio X share of workers that take small batches, in [0, 1];" in words
    assert "--large-batch-size N,..|auto batch size of a worker" in words
    assert "--merge mean|delta[:LR,MOMENTUM]|ratio|half how weights w of workers change" in words
    assert words.count("seconds of a step = slope x samples + intercept") == 2
    assert "{None}" not in words
    assert "--- " not in words  # the group headings of the source are no help texts


def test_help_texts_are_claims_that_stand_alone():
    _, words = read_source(Config)
    assert words.keys() == Config.__dataclass_fields__.keys()
    for name, text in words.items():
        assert len(text) > 10, name
        assert text.split()[0].lower() not in {"of", "or", "that", "the same", "then", "in"}, name
