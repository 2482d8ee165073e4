"""The forks of train.py in examples/forks/ apply, stay short, and train what they say."""

import copy
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_wine, make_multilabel_classification
from sklearn.metrics import f1_score
from torch import nn

import train
from dbsl.base.errors import SettingError
from dbsl.data.dataset import load_data
from dbsl.data.sources import TensorData, TensorSource, as_source
from dbsl.extras.charts.picture import run_figure
from dbsl.log.rows import read_metrics
from dbsl.model import load_model
from tests import helpers
from tests.helpers import (
    ROOT,
    end_ranks,
    fingerprint,
    make_table,
    read,
    rows,
    short,
    slow,
    start_ranks,
    summary_of,
    table,
    write_shards,
)
from tests.loop.test_misuse import edited

FORKS = {path.stem: path for path in sorted((ROOT / "examples/forks").glob("*.diff"))}
MOST_LINES = {"memmap": 44, "multi_label": 30}  # added and removed; else 20
OF_IMAGES = ("model", "train_samples", "eval_samples", "resolutions", "lr", "large_batch_size")
TINY = {**helpers.TINY, "workers": 4, "epochs": 2, "lr_milestones": (1,), "mixed_precision": "no"}
TINY |= {"large_batch_size": (10,)}
COMMON = {name: value for name, value in TINY.items() if name not in OF_IMAGES}
ROUNDS = {"large_batch_size": (10,), "rounds_per_epoch": 2}
SIZES = {"large_batch_size": None, "local_batch_sizes": (3, 5, 8, 4)}
MODES = {
    "bsp": {**ROUNDS, "workers": 2, "small_workers": 1, "ema_decay": 0.5},
    "asp": {
        **ROUNDS,
        "sync": "asp",
        "seed": 2**63 - 1,
        "emulate": ("noise=0.1",),
        "slowdown": ("3:2.5",),
    },
    "step": {"sync": "step", **SIZES, "balance": "dynamic"},
    "gradients": {"push": "gradients:2", **SIZES},
}


def patched(name, folder):
    """Return a copy of train.py with a fork's diff applied."""
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    script.write_bytes((ROOT / "train.py").read_bytes())
    command = ["git", "apply", "--whitespace=error", str(FORKS[name])]
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(command, cwd=folder, check=True, env=environment)
    return script


def load(script, name, patch):
    spec = importlib.util.spec_from_file_location(name, script)
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """Return ``fork(name)``: the module that train.py becomes by a diff."""
    return lambda name: load(patched(name, tmp_path / name), f"fork_{name}", monkeypatch)


def begin(module, folder, **settings):
    AcceleratorState._reset_state(True)
    module.main(module.Config(**settings, output_dir=str(folder)))


def run(module, folder, **settings):
    begin(module, folder, **settings)
    return summary_of(folder)


def start(module, ranks, folder, **settings):
    return start_ranks(lambda: begin(module, folder, **settings | {"workers": None}), ranks)


def copied_at_step(number, folder, copy):
    """Save the run in here after so many steps, and keep what it would leave if killed then."""
    count = itertools.count(1)

    def act(saver, _):
        if next(count) == number:
            saver._save()
            shutil.copytree(folder, copy)

    return helpers.each_step(act)


def weights_in(folder):
    """Return the weights of a run, [P]. Counters of batches are each process's own, and unread."""
    saved = sorted(load_file(folder / "model.safetensors").items())
    return torch.cat([value.flatten() for _, value in saved if value.is_floating_point()])


def changed_lines(path):
    """Return the lines that a diff adds and removes."""
    lines = [x for x in path.read_text().splitlines() if not x.startswith(("+++", "---"))]
    return sum(x.startswith("+") for x in lines), sum(x.startswith("-") for x in lines)


def test_every_fork_applies_is_short_and_says_what_it_does(tmp_path):
    assert {*FORKS} == {*CASES}
    for name, path in FORKS.items():
        patched(name, tmp_path / name)
        head = path.read_text().partition("--- a/train.py")[0].splitlines()
        assert 2 <= len(head) <= 3, name
        assert all(line.startswith("# ") for line in head), name
        assert sum(changed_lines(path)) <= MOST_LINES.get(name, 20), name
    page = (ROOT / "docs/forks.md").read_text()
    told = re.findall(r"\[(\w+)\.diff\]\(\S+\) \| \+(\d+) -(\d+) \|", page)
    assert {n: (int(a), int(r)) for n, a, r in told} == {n: changed_lines(FORKS[n]) for n in FORKS}


# --- every fork trains, does what it says and goes on to the same bits

CASES = {}  # by name: settings, and what looks at the fork and a finished run by them
OWN_DATA = ("tabular", "tokens", "memmap", "multi_label")
WITHOUT = {"median_merge": ("step", "gradients")}  # modes in which no weights are merged


def case(**settings):
    def note(check):
        CASES[check.__name__] = settings, check
        return check

    return note


def named_cases():
    cases = [(name, mode) for name in FORKS for mode in MODES if mode not in WITHOUT.get(name, ())]
    return short(cases, *((name, "bsp") for name in FORKS), *(("tabular", mode) for mode in MODES))


@pytest.mark.parametrize(("name", "mode"), named_cases())
def test_a_fork_trains_does_what_it_says_and_goes_on_to_the_same_bits(
    fork, tmp_path, monkeypatch, name, mode
):
    pytest.importorskip({"wandb_images": "wandb", "albumentations": name}.get(name, "torch"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    own, check = CASES[name]
    more = {"train_samples": 120} if mode == "asp" else {}  # of which two rounds have whole batches
    settings = {**(COMMON if name in OWN_DATA else TINY | more), **MODES[mode], **own}
    settings = {n: v(tmp_path) if callable(v) else v for n, v in settings.items()}
    module, folder, killed = fork(name), tmp_path / "whole", tmp_path / "killed"
    with copied_at_step(2 if name == "early_stop" else 5, folder, killed):
        run(module, folder, **settings)
    check(module, folder, settings)
    run(module, killed, **settings, resume=str(killed))
    assert fingerprint(killed) == fingerprint(folder)


@case()
def focal_loss(module, folder, settings):
    logits, labels = torch.randn(6, 3), torch.arange(6) % 3
    losses = F.cross_entropy(logits, labels, reduction="none")
    for gamma in (0.0, 2.0):
        config = SimpleNamespace(label_smoothing=0.0, focal_gamma=gamma)
        expected = ((1 - torch.exp(-losses)) ** gamma * losses).mean()
        found, _ = module.loss_function(nn.Identity(), logits, labels, config)
        torch.testing.assert_close(found, expected)


def by_the_weights_of_a_part(model, inputs, labels, config):
    """What a fork must not do: divide by the weights of the samples at hand."""
    return F.cross_entropy(model(inputs), labels, torch.tensor(config.class_weights)), {}


def gradients_agree(loss_function):
    """Say whether gradients of weighted parts are those of the joined batch."""
    settings = {"label_smoothing": 0.1, "class_weights": (0.2, 0.8, 2.0), "penalty": 10.0}
    config, labels = SimpleNamespace(**settings), torch.arange(20) % 3
    model, inputs = hidden().double(), torch.randn(20, 4, dtype=torch.float64)
    gradients = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", partial(torch.tensor, dtype=torch.float64))
        for sizes in ([20], [3, 5, 8, 4]):
            model.zero_grad()
            for own in torch.arange(20).split(sizes):
                loss, _ = loss_function(model, inputs[own].clone(), labels[own], config)
                (loss * len(own) / 20).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return torch.allclose(*gradients, rtol=1e-9, atol=1e-12)


@case()
def class_weights(module, folder, settings):
    assert gradients_agree(module.loss_function)
    assert not gradients_agree(by_the_weights_of_a_part)


@case(penalty=10.0, clip_grad=1.0, lr=0.005)
def gradient_penalty(module, folder, settings):
    assert gradients_agree(module.loss_function)
    if settings.keys().isdisjoint({"sync", "push"}):  # joint steps are too few to tell
        run(module, folder.parent / "free", **settings | {"penalty": 0.0})
        flat, free = (rows(of, "times")[-1]["penalty"] for of in (folder, folder.parent / "free"))
        assert 0 < flat < free


def a_teacher(folder):
    run(train, folder / "teacher", **TINY | {"epochs": 1, "lr_milestones": ()})
    return str(folder / "teacher")


@case(teacher=a_teacher)
def distillation(module, folder, settings):
    assert all(row["kd"] > 0 for row in rows(folder, "times"))
    teacher = settings["teacher"]
    taught, saved = module.teacher(teacher, torch.device("cpu")), load_model(teacher)
    config = SimpleNamespace(label_smoothing=0.0, teacher=teacher)
    images, labels = torch.randn(6, 3, 16, 16), torch.arange(6)
    logits = torch.randn(6, 10, requires_grad=True)
    loss, _ = module.loss_function(lambda images: logits, images, labels, config)
    loss.backward()
    sought = F.one_hot(labels, 10) + saved(images).softmax(1)
    torch.testing.assert_close(logits.grad * 6, 2 * logits.softmax(1) - sought)
    assert all(parameter.grad is None for parameter in taught.parameters())


@case(epochs=4, lr=0.1)
def second_head(module, folder, settings):
    seconds = [row["second"] for row in rows(folder, "times")]
    assert seconds[-1] < 0.9 * seconds[0]
    net = module.build_model(module.Config(**settings), 10, (16,))
    net.load_state_dict(load_file(folder / "model.safetensors"))
    images = torch.randn(4, 3, 16, 16)
    assert net.eval()(images).shape == (4, 10)
    assert [part.shape for part in net.train()(images)] == [(4, 10), (4, 2)]


@case(log_every=1)
def step_metric(module, folder, settings):
    for row in rows(folder, "step"):
        assert (row["slope"] > 0, 0 <= row["right"] <= 1) == (True, True)
        if settings.keys().isdisjoint({"sync", "push"}):  # the metre measures the same gradients
            assert row["slope"] == pytest.approx(row["gradient_norm"], rel=1e-4)
    for row in rows(folder, "round"):  # a whole number of samples is right
        assert row["right"] * row["samples"] == pytest.approx(round(row["right"] * row["samples"]))


@case()
def one_cycle(module, folder, settings):
    config = SimpleNamespace(epochs=10, lr=0.2)
    found = [module.learning_rate(moment, config, None) for moment in (0, 1.5, 3, 6.5, 10)]
    assert found == pytest.approx([0.0, 0.1, 0.2, 0.1, 0.0])


@case()
def median_merge(module, folder, settings):
    for n in (2, 3, 4):
        pushed = torch.randn(n, 7, dtype=torch.float64)
        found = module.median(torch.zeros(7), pushed, torch.ones(n))
        torch.testing.assert_close(found, torch.quantile(pushed, 0.5, dim=0))


@case()
def class_accuracy(module, folder, settings):
    found, summary = rows(folder, "eval"), summary_of(folder)
    for row in found:  # 20 digits, two of each
        values = [row[f"accuracy_of_{number}"] for number in range(10)]
        assert sum(values) / 10 == pytest.approx(row["accuracy"])
    assert all(summary[f"final_accuracy_of_{n}"] == found[1][f"accuracy_of_{n}"] for n in range(10))


@case(also=("digits",))
def second_evaluation(module, folder, settings):
    for row in rows(folder, "eval"):
        assert (row["samples"], 0 <= row["digits_accuracy"] <= 1) == (20, True)
        assert row["digits_loss"] != row["loss"]  # of all of them, not of 20


@case(lr=0.05, epochs=8)
def tabular(module, folder, settings):
    summary = summary_of(folder)
    assert (summary["classes"], summary["samples_seen"]) == (3, 8 * 142)
    assert summary["final_accuracy"] > (0.8 if "ema_decay" in settings else 0.3)
    assert not list(folder.rglob("config.json"))
    model = module.build_model(module.Config(), 3, (0,))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    assert all(value.isfinite().all() for value in model.state_dict().values())


@case(lr=0.1)
def tokens(module, folder, settings):
    assert summary_of(folder)["final_accuracy"] > 0.6  # of two classes


@case()
def muon(module, folder, settings):
    built = module.build_optimizer(hidden(), SimpleNamespace(lr=0.1, weight_decay=0.0))
    assert [type(one).__name__ for one in built] == ["Muon", "AdamW"]


@case(target_accuracy=0.001)
def early_stop(module, folder, settings):
    assert summary_of(folder)["epochs"] == len(rows(folder, "eval")) == 1


STAGES = {"epochs": 3, "lr_milestones": (), "checkpoint_every": 1, "keep_checkpoints": 9}


@case(frozen_epochs=2, **STAGES, rounds_per_epoch=1, weight_decay=0.1)
def thaw(module, folder, settings):
    places = [folder / f"checkpoints/epoch-000{n}/model.safetensors" for n in (1, 2, 3)]
    frozen = stays(places[1], load_file(places[0]))
    if settings.get("sync") != "asp":  # there others are in the next epoch already
        assert {name for name, same in frozen.items() if not same} == {"fc.weight", "fc.bias"}
    moved = {name for name, same in stays(places[2], load_file(places[0])).items() if not same}
    assert {"conv1.0.weight", "fc.weight"} <= moved
    assert any("running_mean" in name for name in moved)


def draws_by_sample(module, folder, settings):
    augment = module.Augment(16, "timm", False, (0.0,) * 3, (1.0,) * 3, 0)
    noise = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    draw = partial(augment.augmented, Image.fromarray(noise))
    first = draw(3, 0)
    assert (first.shape, first.dtype) == ((16, 16, 3), np.uint8)
    assert np.array_equal(first, draw(3, 0))
    assert not any(np.array_equal(first, draw(*other)) for other in ((4, 0), (3, 1)))


CASES |= dict.fromkeys(("torchvision", "albumentations"), ({"loader_workers": 0}, draws_by_sample))


@case()
def weighted_sampling(module, folder, settings):
    labels = torch.tensor([0] * 90 + [1] * 10)
    source = SimpleNamespace(labels=labels, batches=lambda numbers, *_: numbers)

    def drawn(epoch, *parts):
        found = module.Weighted(source, 0).batches(map(np.array, parts), None, epoch)
        return np.concatenate([*found])

    whole = drawn(0, range(100))
    assert 35 <= labels[whole].sum() <= 65
    assert np.array_equal(whole, drawn(0, range(40), range(40, 100)))
    assert not np.array_equal(whole, drawn(1, range(100)))


@case(report_to="wandb")
def wandb_images(module, folder, settings):
    images = [*folder.glob("wandb/offline-*/files/media/images/*.png")]
    assert len(images) > settings["epochs"]


@case()
def f1(module, folder, settings):
    data = load_data(module.Config(**settings), settings.get("seed", 0))
    images, labels = read(data.evaluation, data.transform(16, "none", 0))
    predictions = load_model(folder)(images).argmax(1)
    expected = f1_score(labels, predictions, average="macro")
    assert summary_of(folder)["final_f1"] == pytest.approx(expected)


def test_f1_is_that_of_all_images_where_processes_have_unlike_parts(fork, tmp_path):
    module, settings = fork("f1"), {**TINY, "lr": 0.1, "epochs": 4}
    end_ranks(start(module, 3, tmp_path / "run", **settings))
    f1(module, tmp_path / "run", settings)


def in_files(folder):
    table, labels = load_wine(return_X_y=True)
    table = ((table - table.mean(0)) / table.std(0)).astype(np.float32)
    test = np.arange(178) % 5 == 0
    for name, own in (("train", ~test), ("test", test)):
        (folder / name).mkdir()
        np.save(folder / name / "inputs.npy", table[own])
        np.save(folder / name / "labels.npy", labels[own])
    return str(folder)


@case(lr=0.05, arrays=in_files)
def memmap(module, folder, settings):
    """The samples in memory give the same bits."""

    def in_memory(*splits, num_classes):
        splits = ([torch.tensor(array) for array in split.arrays] for split in splits)
        return TensorData(*(TensorSource(*own) for own in splits), num_classes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MappedData", in_memory)
        run(module, folder.parent / "kept", **settings)
    assert fingerprint(folder.parent / "kept") == fingerprint(folder)


@case(lr=0.3)
def multi_label(module, folder, settings):
    inputs, labels = make_multilabel_classification(1000, n_classes=5, random_state=0)
    model = module.build_model(module.Config(), 5, (0,))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    with torch.no_grad():
        right = (model(torch.tensor(inputs[800:]).float()) > 0).numpy() == labels[800:]
    assert summary_of(folder)["final_accuracy"] == pytest.approx(right.mean())
    assert right.mean() > 0.6


@slow
def test_loader_processes_augment_as_the_process_itself(fork, tmp_path):
    run(fork("torchvision"), tmp_path / "here", **TINY, loader_workers=0)
    flags = helpers.to_flags(tmp_path / "there", **TINY, loader_workers=2)
    command = [sys.executable, str(tmp_path / "torchvision/train.py"), *flags]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert fingerprint(tmp_path / "here") == fingerprint(tmp_path / "there")


def test_step_times_of_a_table_are_measured_with_its_own_inputs(
    fork, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("dbsl.run.times._SECONDS_SIMULATED", 0.2)
    settings = {**COMMON, "slope": None, "intercept": None, "epochs": 1}
    run(fork("tabular"), tmp_path / "run", **{**settings, "lr": 0.05, "lr_milestones": ()})
    printed = capsys.readouterr().out
    assert "float32-13, 0.2 s at most" in printed
    assert re.search(r"^a step with x samples takes", printed, re.MULTILINE)
    assert not re.search(r"\d px|image", printed)


# --- further evaluation sets


def test_further_sets_are_evaluated_recorded_and_told(fork, tmp_path, monkeypatch, capsys):
    module, other = fork("second_evaluation"), table(20)
    data = TensorData(table(60), table(), 3)
    sets = {"digits": data, "same": data, "dataset": other}
    sets["source"] = TensorData(table(), other, 3).evaluation
    monkeypatch.setattr(module, "load_images", lambda config, _: sets[config.dataset])
    monkeypatch.setattr(module, "build_model", lambda *_: hidden())
    how = {"lr": 0.05, "eval_every": 2, "epochs": 4, "also": ("same", "source", "dataset")}
    run(module, tmp_path / "run", **COMMON | how)
    (first, last) = rows(tmp_path / "run", "eval")
    for row in (first, last):
        assert (row["same_accuracy"], row["same_loss"]) == (row["accuracy"], row["loss"])
        assert row["source_accuracy"] == row["dataset_accuracy"]
    model = hidden()
    model.load_state_dict(load_file(tmp_path / "run/model.safetensors"))
    inputs, labels = other.tensors
    assert last["dataset_loss"] == pytest.approx(F.cross_entropy(model(inputs), labels).item())
    assert f"  same_accuracy {last['accuracy']:.3f}  same_loss " in capsys.readouterr().out
    figure = run_figure(read_metrics(tmp_path / "run/metrics.jsonl"))
    drawn = {line.get_label() for line in figure.axes[0].lines}
    assert {f"{name} accuracy" for name in ("same", "source", "dataset")} <= drawn


def test_a_second_evaluation_set_may_have_other_columns(fork, tmp_path):
    table = make_table([Image.new("L", (16, 16), n) for n in range(60)], [n % 3 for n in range(60)])
    table.rename_column("label", "kind").to_parquet(path := str(tmp_path / "kinds.parquet"))
    given = {**TINY, "train_samples": 40, "eval_samples": 10}
    given |= {"dataset": path, "label_column": "kind"}
    (tmp_path / "shards").mkdir()
    also = (str(write_shards(tmp_path / "shards")),)
    run(fork("second_evaluation"), tmp_path / "run", **given, also=also)
    assert all(f"{also[0]}_loss" in row for row in rows(tmp_path / "run", "eval"))


# --- data, model and optimizer of one's own


def hidden(width=4, classes=3):
    return nn.Sequential(nn.Linear(width, 8), nn.Linear(8, classes))


def with_own(folder, data, own, build=None, module=train, **settings):
    """Train as forks do whose lines give these."""
    with pytest.MonkeyPatch.context() as patch:
        if data is not None:
            patch.setattr(module, "load_images", lambda *_: data)
        patch.setattr(module, "build_model", lambda *_: own())
        patch.setattr(module, "build_optimizer", build or module.build_optimizer)
        begin(module, folder, **{**COMMON, **settings})


def refused(folder, message, module=train, train_it=None, **settings):
    """Have a run refused in one line, with nothing written."""
    with pytest.raises(SettingError, match=message) as error:
        (train_it or partial(begin, module))(folder / "refused", **settings)
    assert "\n" not in str(error.value)
    assert not (folder / "refused").exists()


def test_a_module_is_taken_as_it_is_and_images_keep_their_resolutions(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, bias=False)
            self.head, self.drop_rate = nn.Linear(4, 10), 0.3

        def forward(self, images):
            return self.head(self.conv(images).mean((2, 3)))

    model, folder = Net(), tmp_path / "run"
    settings = {k: TINY[k] for k in ("train_samples", "eval_samples", "large_batch_size", "lr")}
    how = {"resolutions": (8, 16), "epochs": 4, "lr_milestones": (2,)}
    with_own(folder, None, lambda: model, **settings, **how)
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert {row["resolution"] for row in rows(folder, "round")} == {8, 16}
    assert model.drop_rate == 0.3  # whoever built it chose it


def test_a_fault_of_a_model_of_ones_own_keeps_its_traceback(tmp_path):
    class Faulty(torch.nn.Linear):
        def forward(self, rows):
            if len(rows) == 2:
                raise RuntimeError("not of two rows")
            return super().forward(rows)

    with pytest.raises(RuntimeError, match=r"^not of two rows$"):
        with_own(tmp_path / "run", TensorData(table(), table(), 3), lambda: Faulty(4, 3), lr=0.1)


def two_rates(model, config):
    weights, biases = ([p for p in model.parameters() if p.dim() == dims] for dims in (2, 1))
    return torch.optim.SGD([{"params": weights}, {"params": biases, "lr": 0.0}], lr=config.lr)


ALL_MODES = {**MODES, "pushes": {"sync": "asp", "push": "gradients", **SIZES}}


def stays(path, begun):
    """Return of each tensor in a file whether it is as it was."""
    return {
        name: torch.allclose(value.float(), begun[name].float(), rtol=0, atol=1e-6)
        for name, value in load_file(path).items()
    }


@pytest.mark.parametrize("mode", short(ALL_MODES, "bsp", "step", "pushes"))
def test_what_an_optimizer_freezes_or_gives_a_rate_of_0_stays_where_it_is(tmp_path, mode):
    torch.manual_seed(0)
    frozen = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.5))
    data, first = TensorData(table(120), table(), 3), nn.Sequential(frozen, nn.Linear(8, 3))
    frozen.requires_grad_(False)
    begun = copy.deepcopy(first.state_dict())
    with_own(tmp_path / "run", data, lambda: first, two_rates, lr=0.05, **ALL_MODES[mode])
    for path in (tmp_path / "run").glob("model*.safetensors"):
        same = {name for name, same in stays(path, begun).items() if same}
        assert same == begun.keys() - {"1.weight"}, path


def data_of(*sets):
    return {"data": lambda: TensorData(*sets, 3)}


def cumulative():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None))


UNLIKE = [(torch.zeros(4), 0), (torch.zeros(5), 1)]
REFUSED = [
    (data_of(UNLIKE, table()), r"train must have inputs of one .* \[4\] .* \[5\] in sample 1"),
    (data_of(table(), table(width=5)), r"evaluation must have .* \[5\] in sample 0"),
    (data_of(table(classes=4), table()), r"labels in \[0, 3\), got 3 in sample 3"),
    (data_of(torch.zeros(8, 4), table()), "train must give a pair of a tensor and a"),
    (data_of([], table()), "train must be a map-style dataset with samples, got list"),
    (data_of([(torch.zeros(4), 0.5)], table()), "train must give .* sample 0.*label 0.5"),
    ({"resolutions": (8,)}, "resolutions must be left out with inputs that have no side, got 8"),
    ({"own": lambda: hidden(classes=5)}, r"3 classes, \[2, 3\] .*, got \[2, 5\] of"),
    ({"own": cumulative}, "model must have batch norm whose statistics have a mom"),
    ({"build": lambda model, config: None}, "optimizer must build an optimizer of torch"),
    (
        {"build": lambda model, config: two_rates(model.requires_grad_(False), config)},
        "optimizer must leave parameters that are trained, got all frozen",
    ),
    (
        {"build": lambda model, config: [two_rates(model, config)] * 2},
        "optimizer must have each parameter once",
    ),
    (
        {"build": lambda model, config: two_rates(model[1], config)},
        "all parameters .* got 2 without, such as 0.weight",
    ),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path, given, message):
    def train_it(folder):
        data = given.get("data", lambda: TensorData(table(), table(), 3))()
        with_own(folder, **{"own": hidden, "lr": 0.1, **given, "data": data})

    refused(tmp_path, message, train_it=train_it)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (TensorData(table(), table(), 4), "source must have the 3 classes of the training data"),
        (table(width=5), r"source must have inputs of one .* \[5\] in sample 0"),
        (3, "source must be a map-style dataset with samples, got int"),
    ],
)
def test_a_source_that_the_model_cannot_be_evaluated_on_is_named(source, message):
    with pytest.raises(SettingError, match=message):
        as_source(source, TensorData(table(), table(), 3), 0, "source")


# --- a run that ends early

LONG = {"epochs": 4, "lr": 0.05, "lr_milestones": ()}


def finishing(epochs):
    """Return an `end_epoch` by which the main process ends the run after so many epochs."""
    end_epoch = train.end_epoch

    def ended(end, training):
        end_epoch(end, training)
        if end.epoch + 1 == epochs and training.accelerator.is_main_process:
            training.workers.finish()

    return ended


AFTER_EPOCH = "                checkpoint.after_epoch(turn)\n"
RETURNS = AFTER_EPOCH + "                if turn.epoch == 1:\n                    return\n"


@pytest.mark.parametrize("mode", short([*ALL_MODES, "return"], "bsp", "step", "pushes", "return"))
def test_a_run_that_ends_early_tells_what_it_trained_and_goes_on_to_the_same_bits(
    tmp_path, monkeypatch, mode
):
    module = edited(AFTER_EPOCH, RETURNS) if mode == "return" else train
    mode = "bsp" if mode == "return" else mode
    torch.manual_seed(0)
    data = TensorData(table(120), table(), 3)
    settings = {**LONG, **ALL_MODES[mode], "checkpoint_every": 2}
    torch.manual_seed(1)
    with_own(tmp_path / "whole", data, hidden, **settings)
    torch.manual_seed(1)
    with monkeypatch.context() as patch:
        if module is train:
            patch.setattr(train, "end_epoch", finishing(2))
        with_own(tmp_path / "early", data, hidden, module=module, **settings)
    summary, evaluated = summary_of(tmp_path / "early"), rows(tmp_path / "early", "eval")
    assert summary["epochs"] == len(evaluated) == 2
    assert summary["final_accuracy"] == evaluated[-1]["accuracy"]
    seen = sum(row["samples"] for row in rows(tmp_path / "early", "round"))
    if mode not in ("asp", "pushes"):  # whose other workers were ahead
        assert seen == 2 * 120
    assert summary["samples_seen"] == seen or mode == "pushes"
    assert (tmp_path / "early/model_ema.safetensors").exists() == ("ema_decay" in settings)

    with_own(tmp_path / "early", data, hidden, resume=str(tmp_path / "early"), **settings)
    assert fingerprint(tmp_path / "early") == fingerprint(tmp_path / "whole")
    assert summary_of(tmp_path / "early")["epochs"] == 4


def test_a_run_that_is_to_end_with_an_epoch_that_is_not_evaluated_takes_one_that_is(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(train, "end_epoch", finishing(1))
    with_own(tmp_path / "run", TensorData(table(120), table(), 3), hidden, eval_every=3, **LONG)
    assert [row["epoch"] for row in rows(tmp_path / "run", "eval")] == [1]
    assert summary_of(tmp_path / "run")["epochs"] == 2


@pytest.mark.parametrize("sync", short(["asp", "step", "bsp"], "asp"))
def test_one_process_ends_the_run_early_and_all_leave_in_good_order(tmp_path, monkeypatch, sync):
    monkeypatch.setattr(train, "end_epoch", finishing(2))
    batch = {"global_batch_size": 20} if sync == "step" else {"large_batch_size": 10}
    helpers.run_in_ranks(tmp_path / "run", sync=sync, **batch, epochs=4, lr_milestones=())
    summary = summary_of(tmp_path / "run")
    assert (summary["epochs"], "lost_workers" in summary) == (2, False)
    assert summary["samples_seen"] >= 2 * 60
    assert (tmp_path / "run/checkpoints/epoch-0002/manifest.json").exists()


# --- a merge rule


JOINT = {"large_batch_size": None, "local_batch_sizes": (3, 3, 4, 6)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sync": "step", **JOINT}, "sync must not be step with your"),
        ({"push": "gradients", **JOINT}, "push must be left out with"),
        ({"merge": "mean"}, "merge must be left out with your own merge, got mean"),
        ({"wire": "bf16"}, "wire must be left out with your own merge, got bf16"),
    ],
)
def test_where_a_rule_is_not_asked_it_is_refused_and_nothing_is_written(
    fork, tmp_path, settings, message
):
    refused(tmp_path, message, fork("median_merge"), **TINY | settings)


@pytest.mark.parametrize(("sync", "pushes"), [("bsp", 4), ("asp", 1)])
def test_a_rule_gets_all_at_a_barrier_and_else_one_and_must_return_weights(
    fork, tmp_path, monkeypatch, sync, pushes
):
    module, settings = fork("median_merge"), {**TINY, "sync": sync}
    monkeypatch.setattr(module, "median", lambda global_, pushed, factors: pushed)
    message = rf"a merge rule must return weights \[\d+\], got \[{pushes}, \d+\]$"
    with pytest.raises(SettingError, match=message):
        run(module, tmp_path / "run", **settings)
    monkeypatch.setattr(module, "median", lambda global_, pushed, factors: pushed[0])
    assert run(module, tmp_path / "run", **settings, resume="auto")["epochs"] == 2


@slow
def test_a_rule_gives_the_same_weights_in_processes_and_with_a_server_of_their_own(fork, tmp_path):
    module, settings = fork("median_merge"), {**TINY, **ROUNDS, "small_workers": 1}
    run(module, tmp_path / "simulated", **settings | {"workers": 3})
    run(train, tmp_path / "mean", **settings | {"workers": 3})
    end_ranks(start(module, 3, tmp_path / "three", **settings))
    end_ranks(start(module, 4, tmp_path / "server", **settings, dedicated_server=True))
    expected = weights_in(tmp_path / "simulated")
    for name in ("three", "server"):
        torch.testing.assert_close(weights_in(tmp_path / name), expected, rtol=1e-5, atol=1e-6)
    assert (weights_in(tmp_path / "mean") - expected).abs().max() > 1e-3
