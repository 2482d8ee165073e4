"""The forks of train.py in examples/forks/ apply, stay short, and train what they say."""

import copy
import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from dbsl.open import open_session
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import train
from dbsl.base.errors import SettingError
from dbsl.data.sources import TensorData
from dbsl.extras.charts.picture import run_figure
from dbsl.log.rows import read_metrics
from dbsl.loss import with_figures
from dbsl.model import load_model
from dbsl.plan.types import EpochEnd, Turn
from tests import helpers
from tests.helpers import (
    ROOT,
    end_ranks,
    fingerprint,
    make_table,
    rows,
    short,
    start_ranks,
    summary_of,
    write_shards,
)

FORKS = {path.stem: path for path in sorted((ROOT / "examples/forks").glob("*.diff"))}
MOST_LINES = {"tabular": 18, "tokens": 27}  # added and removed; else 15
OF_IMAGES = ("model", "train_samples", "eval_samples", "resolutions", "lr")
TINY = {**helpers.TINY, "workers": 4, "epochs": 2, "lr_milestones": (1,), "mixed_precision": "no"}
COMMON = {name: value for name, value in TINY.items() if name not in OF_IMAGES}
TINY |= {"large_batch_size": (10,)}
ROUNDS = {"large_batch_size": (10,), "rounds_per_epoch": 2}
MODES = {
    "bsp": {**ROUNDS, "small_workers": 1, "ema_decay": 0.5, "eval_train": True},
    "asp": {**ROUNDS, "sync": "asp", "seed": 2**63 - 1, "time_noise": 0.1, "slowdown": ("3:2.5",)},
    "step": {"sync": "step", "local_batch_sizes": (3, 5, 8, 4), "balance": "dynamic"},
    "gradients": {"push": "gradients:2", "local_batch_sizes": (3, 5, 8, 4)},
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


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """Return ``fork(name)``: the module that train.py becomes by a diff."""

    def load(name):
        script = patched(name, tmp_path / name)
        spec = importlib.util.spec_from_file_location(f"fork_{name}", script)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


def begin(module, folder, **settings):
    AcceleratorState._reset_state(True)
    module.main(module.Config(**settings, output_dir=str(folder)))


def run(module, folder, **settings):
    begin(module, folder, **settings)
    return summary_of(folder)


def start(module, ranks, folder, **settings):
    return start_ranks(lambda: begin(module, folder, **settings | {"workers": None}), ranks)


def goes_on_to_the_bits(folder, step, train_it, settings):
    """Stop a run at a step and resume it: it ends as the one in the folder `whole`."""
    broken, whole = folder / "broken", folder / "whole"
    with helpers.stopped_at_step(step):
        train_it(broken, **settings)
    train_it(broken, **settings, resume=str(broken))
    assert fingerprint(broken) == fingerprint(whole)


def weights_in(folder):
    """Return the weights of a run, [P]. Counters of batches are each process's own, and unread."""
    saved = sorted(load_file(folder / "model.safetensors").items())
    return torch.cat([value.flatten() for _, value in saved if value.is_floating_point()])


def changed_lines(path):
    """Return the lines that a diff adds and removes."""
    lines = [x for x in path.read_text().splitlines() if not x.startswith(("+++", "---"))]
    return sum(x.startswith("+") for x in lines), sum(x.startswith("-") for x in lines)


def test_every_fork_applies_is_short_and_says_what_it_does(tmp_path):
    assert len(FORKS) >= 6
    for name, path in FORKS.items():
        patched(name, tmp_path / name)
        head = path.read_text().partition("--- a/train.py")[0].splitlines()
        assert 2 <= len(head) <= 3, name
        assert all(line.startswith("# ") for line in head), name
        assert sum(changed_lines(path)) <= MOST_LINES.get(name, 15), name
    page = (ROOT / "docs/forks.md").read_text()
    told = re.findall(r"\[(\w+)\.diff\]\(\S+\) \| \+(\d+) -(\d+) \|", page)
    assert {n: (int(a), int(r)) for n, a, r in told} == {n: changed_lines(FORKS[n]) for n in FORKS}


# --- the user's own data and model


@pytest.mark.parametrize("mode", short(MODES, "bsp", "step", "gradients"))
def test_a_table_trains_by_every_sync_is_saved_and_goes_on_to_the_same_bits(
    fork, tmp_path, mode, capsys
):
    tabular, folder = fork("tabular"), tmp_path / "whole"
    settings = {**COMMON, "lr": 0.05, **MODES[mode], "epochs": 8 if mode == "bsp" else 2}
    summary = run(tabular, folder, **settings)
    assert (summary["classes"], summary["samples_seen"]) == (3, settings["epochs"] * 142)
    assert mode != "bsp" or summary["final_accuracy"] > 0.8  # of three classes
    printed = capsys.readouterr().out
    assert "build_mlp on wine: 142 training samples, 36 for evaluation" in printed
    assert " samples/s" in printed
    assert not re.search(r"\d px|image", printed)
    assert not list(folder.rglob("config.json"))
    model = tabular.build_mlp()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    assert all(value.isfinite().all() for value in model.state_dict().values())
    assert "dataset: wine\n" in (folder / "config.yaml").read_text()
    assert list(json.loads((folder / "plan.json").read_text())) == ["plan"]
    goes_on_to_the_bits(tmp_path, 9, partial(run, tabular), settings)


def test_step_times_of_a_table_are_measured_with_its_own_inputs(
    fork, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("dbsl.run.workers._SECONDS", 0.2)
    settings = {**COMMON, "slope": None, "intercept": None, "epochs": 1}
    run(fork("tabular"), tmp_path / "run", **{**settings, "lr": 0.05, "lr_milestones": ()})
    printed = capsys.readouterr().out
    assert "measuring steps of build_mlp-float32-inputs-13, 0.2 s at most" in printed
    assert re.search(r"^a step with x samples takes", printed, re.MULTILINE)


@helpers.slow
def test_tokens_are_learnt_from_an_embedding(fork, tmp_path):
    settings = {**COMMON, "epochs": 6, "lr_milestones": (), "lr": 0.1, "small_workers": 1}
    assert run(fork("tokens"), tmp_path / "run", **settings)["final_accuracy"] > 0.8


def table(samples=30, width=4, classes=3):
    return TensorDataset(torch.randn(samples, width), torch.arange(samples) % classes)


def opened(folder, data, own, build=None, loop=train.train, also=None, **settings):
    AcceleratorState._reset_state(True)
    config = train.Config(**{**COMMON, **settings, "output_dir": str(folder)})
    given = {"data": data, "model": own, "optimizer": build, "evaluate_also": also}
    with open_session(config, train.loss_function, **given) as session:
        loop(session)


def refused(folder, message, *given, train_it=opened, **settings):
    """Have a run refused in one line, with nothing written."""
    with pytest.raises(SettingError, match=message) as error:
        train_it(folder / "run", *given, **settings)
    assert "\n" not in str(error.value)
    assert not (folder / "run").exists()


def test_a_module_is_taken_as_it_is_and_images_keep_their_resolutions(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, bias=False)
            self.head, self.drop_rate = nn.Linear(4, 10), 0.3

        def forward(self, images):
            return self.head(self.conv(images).mean((2, 3)))

    model, folder = Net(), tmp_path / "run"
    settings = {k: TINY[k] for k in ("train_samples", "eval_samples", "large_batch_size")}
    opened(folder, None, model, **settings, resolutions=(8, 16), epochs=4, lr_milestones=(2,))
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert {row["resolution"] for row in rows(folder, "round")} == {8, 16}
    assert model.drop_rate == 0.3  # whoever built it chose it
    assert "model: Net\n" in (folder / "config.yaml").read_text()


def test_a_fault_of_a_model_of_ones_own_keeps_its_traceback(tmp_path):
    class Faulty(torch.nn.Linear):
        def forward(self, rows):
            if len(rows) == 1:
                raise RuntimeError("not of one row")
            return super().forward(rows)

    with pytest.raises(RuntimeError, match=r"^not of one row$"):
        opened(tmp_path / "run", TensorData(table(), table(), 3), lambda: Faulty(4, 3))


# --- loss, schedule, metric, batch sizes


def test_focal_loss_is_cross_entropy_with_exponent_zero(fork):
    loss_function = fork("focal_loss").loss_function
    logits, labels = torch.randn(6, 3), torch.arange(6) % 3
    losses = F.cross_entropy(logits, labels, reduction="none")
    for gamma in (0.0, 2.0):
        config = SimpleNamespace(label_smoothing=0.0, focal_gamma=gamma)
        expected = ((1 - torch.exp(-losses)) ** gamma * losses).mean()
        found = loss_function(nn.Identity(), logits, labels, config)
        torch.testing.assert_close(found, expected)


def test_one_cycle_rises_and_falls(fork):
    rate = fork("one_cycle").learning_rate
    session = SimpleNamespace(config=SimpleNamespace(epochs=10, lr=0.2))
    found = [rate(session, moment) for moment in (0, 1.5, 3, 6.5, 10)]
    assert found == pytest.approx([0.0, 0.1, 0.2, 0.1, 0.0])


def test_a_metric_of_ones_own_is_in_the_metrics_the_epochs_line_and_the_summary(
    fork, tmp_path, capsys
):
    settings = {**TINY, "eval_train": True, "ema_decay": 0.5}
    summary = run(fork("class_accuracy"), tmp_path / "run", **settings)
    found = rows(tmp_path / "run", "eval")
    assert [row["epoch"] for row in found] == [0, 1]
    for row in found:  # 20 digits, two of each
        for of in ("", "ema_"):
            values = [row[f"{of}accuracy_of_{number}"] for number in range(10)]
            assert sum(values) / 10 == pytest.approx(row[f"{of}accuracy"])
    assert ["train_accuracy_of_9" in row for row in found] == [False, True]
    row = found[0]
    assert all(summary[f"final_accuracy_of_{n}"] == found[1][f"accuracy_of_{n}"] for n in range(10))
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("epoch 1/2"))
    assert f"  accuracy_of_0 {row['accuracy_of_0']:.3f}  accuracy_of_1 " in line
    assert f"  accuracy_of_7 {row['accuracy_of_7']:.3f}  (12 more)  " in line


CLASS_WEIGHTS = (0.2, 0.8, 2.0)


def by_the_weights_of_a_part(model, inputs, labels, config):
    """What a fork must not do: divide by the weights of the samples at hand."""
    return F.cross_entropy(model(inputs), labels, torch.tensor(config.class_weights))


@pytest.mark.parametrize(
    ("name", "equal"), [("class_weights", True), ("gradient_penalty", True), (None, False)]
)
def test_gradients_of_weighted_parts_are_those_of_the_joined_batch(fork, name, equal):
    loss_function = fork(name).loss_function if name else by_the_weights_of_a_part
    settings = {"label_smoothing": 0.1, "class_weights": CLASS_WEIGHTS, "penalty": 10.0}
    config = SimpleNamespace(**settings)
    torch.manual_seed(0)
    model, labels = hidden().double(), torch.arange(20) % 3
    inputs = torch.randn(20, 4, dtype=torch.float64)
    gradients = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", partial(torch.tensor, dtype=torch.float64))
        for sizes in ([20], [3, 5, 8, 4]):
            model.zero_grad()
            for own in torch.arange(20).split(sizes):
                found = loss_function(model, inputs[own], labels[own], config)
                (with_figures(found)[0] * len(own) / 20).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.allclose(*gradients, rtol=1e-9, atol=1e-12) == equal


def test_distillation_learns_from_the_labels_and_from_a_teacher_that_stays_as_it_is(fork, tmp_path):
    teacher, module = tmp_path / "teacher", fork("distillation")
    run(train, teacher, **TINY | {"epochs": 1, "lr_milestones": ()})
    run(module, tmp_path / "run", **TINY, teacher=str(teacher))
    assert all(row["kd"] > 0 for row in rows(tmp_path / "run", "round"))
    device = torch.device("cpu")
    taught, saved = module.teacher(str(teacher), device), load_model(teacher)
    assert not taught.training
    assert all(torch.equal(v, saved.state_dict()[n]) for n, v in taught.state_dict().items())

    config = SimpleNamespace(label_smoothing=0.0, teacher=str(teacher))
    images, labels = torch.randn(6, 3, 16, 16), torch.arange(6)
    logits = torch.randn(6, 10, requires_grad=True)
    loss, _ = module.loss_function(lambda images: logits, images, labels, config)
    loss.backward()
    sought = F.one_hot(labels, 10) + saved(images).softmax(1)
    torch.testing.assert_close(logits.grad * 6, 2 * logits.softmax(1) - sought)
    assert all(parameter.grad is None for parameter in taught.parameters())


def test_a_second_head_is_learnt_and_evaluation_is_of_the_first(fork, tmp_path, monkeypatch):
    module, create = fork("second_head"), timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda _, **given: create("test_resnet", **given))
    settings = {name: value for name, value in TINY.items() if name != "model"}
    run(module, tmp_path / "run", **settings | {"epochs": 4, "lr": 0.1, "train_samples": 120})
    seconds = [row["second"] for row in rows(tmp_path / "run", "times")]
    assert seconds[-1] < 0.9 * seconds[0]
    net = module.two_heads()
    net.load_state_dict(load_file(tmp_path / "run/model.safetensors"))
    images = torch.randn(4, 3, 16, 16)
    assert net.eval()(images).shape == (4, 10)
    assert [part.shape for part in net.train()(images)] == [(4, 10), (4, 2)]


@pytest.mark.parametrize("mode", short(["bsp", "step"], "bsp"))
def test_a_step_has_figures_of_the_loss_function_and_of_the_loop(fork, tmp_path, mode):
    settings = {**TINY, "sync": mode, "log_every": 1}
    run(fork("step_metric"), tmp_path / "run", **settings)
    for row in rows(tmp_path / "run", "step"):  # the metre measures the same gradients
        if mode == "bsp":
            assert row["slope"] == pytest.approx(row["gradient_norm"], rel=1e-4)
        assert row["slope"] > 0
    rounds = rows(tmp_path / "run", "round")
    assert len(rows(tmp_path / "run", "step")) == sum(row["steps"] for row in rounds)
    assert all(0 <= row["right"] <= 1 for row in rows(tmp_path / "run", "step"))
    for row in rounds:  # a whole number of samples is right
        assert row["right"] * row["samples"] == pytest.approx(round(row["right"] * row["samples"]))


def test_a_gradient_penalty_keeps_the_loss_flat_over_images(fork, tmp_path):
    module, last = fork("gradient_penalty"), {}
    for factor in (0.0, 10.0):
        run(module, tmp_path / str(factor), **TINY, penalty=factor)
        last[factor] = rows(tmp_path / str(factor), "times")[-1]["penalty"]
    assert 0 < last[10.0] < last[0.0]


def test_a_second_evaluation_set_is_a_flag(fork, tmp_path):
    run(fork("second_evaluation"), tmp_path / "run", **TINY, also=("digits",))
    found = rows(tmp_path / "run", "eval")
    assert all(row["samples"] == 20 and 0 <= row["digits_accuracy"] <= 1 for row in found)
    assert all(row["digits_loss"] != row["loss"] for row in found)  # of all of them, not of 20
    run(fork("second_evaluation"), tmp_path / "held", **TINY, also=("digits",), holdout=0.5)
    held = rows(tmp_path / "held", "eval")[-1]
    assert held["digits_loss"] != held["loss"]  # of images that nobody holds out


def test_a_second_evaluation_set_may_have_other_columns(fork, tmp_path):
    table = make_table([Image.new("L", (16, 16), n) for n in range(60)], [n % 3 for n in range(60)])
    table.rename_column("label", "kind").to_parquet(path := str(tmp_path / "kinds.parquet"))
    given = {**TINY, "train_samples": 40, "eval_samples": 10}
    given |= {"dataset": path, "label_column": "kind"}
    (tmp_path / "shards").mkdir()
    also = (str(write_shards(tmp_path / "shards")),)
    run(fork("second_evaluation"), tmp_path / "run", **given, also=also)
    assert rows(tmp_path / "run", "eval")
    message = r"^dataset must .*'none'.* \(evaluate_also none\)$"
    with pytest.raises(ValueError, match=message):
        run(fork("second_evaluation"), tmp_path / "other", **given, also=("none",))


# --- further evaluation sets


def test_further_sets_are_evaluated_recorded_and_told(tmp_path, capsys):
    data, other = TensorData(table(60), table(), 3), table(20)
    also = {"same": data, "source": TensorData(table(), other, 3).evaluation, "dataset": other}
    opened(tmp_path / "run", data, hidden, also=also, lr=0.05, eval_every=2, epochs=4)
    (first, last) = rows(tmp_path / "run", "eval")
    for row in (first, last):
        assert (row["same_accuracy"], row["same_loss"]) == (row["accuracy"], row["loss"])
        assert row["source_accuracy"] == row["dataset_accuracy"]
    model = hidden()
    model.load_state_dict(load_file(tmp_path / "run/model.safetensors"))
    inputs, labels = other.tensors
    assert last["dataset_loss"] == pytest.approx(F.cross_entropy(model(inputs), labels).item())
    told = f"  same {100 * last['accuracy']:.1f} %, loss {last['loss']:.3g}"
    assert told[:12] in capsys.readouterr().out
    figure = run_figure(read_metrics(tmp_path / "run/metrics.jsonl"))
    drawn = {line.get_label() for line in figure.axes[0].lines}
    assert {f"{name} accuracy" for name in ("same", "source", "dataset")} <= drawn


# --- an optimizer

PUSHES = {"sync": "asp", "push": "gradients", "local_batch_sizes": (3, 5, 8, 4)}
OWN_MODES = {**MODES, "pushes": PUSHES}


def hidden(width=4, classes=3):
    return nn.Sequential(nn.Linear(width, 8), nn.Linear(8, classes))


def cumulative():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None))


def weights_and_biases(model):
    return [[p for p in model.parameters() if p.dim() == dims] for dims in (2, 1)]


def two_rates(model, config):
    weights, biases = weights_and_biases(model)
    return torch.optim.SGD([{"params": weights}, {"params": biases, "lr": 0.0}], lr=config.lr)


def muon(model, config):
    weights, biases = weights_and_biases(model)
    return [torch.optim.Muon(weights, lr=config.lr), torch.optim.AdamW(biases, lr=config.lr / 10)]


@pytest.mark.parametrize("mode", short(MODES, "asp", "step"))
def test_muon_with_adamw_trains_and_goes_on_to_the_same_bits(tmp_path, mode):
    torch.manual_seed(0)
    data, settings = TensorData(table(120), table(), 3), {**MODES[mode], "lr": 0.05}
    train_it = partial(opened, data=data, own=hidden, build=muon)
    train_it(tmp_path / "whole", **settings)
    goes_on_to_the_bits(tmp_path, 5, train_it, settings)
    assert "optimizer: muon\n" in (tmp_path / "whole/config.yaml").read_text()


def frozen_first(model, config):
    model[0].requires_grad_(False)
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=config.lr)


def normed():
    first = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.5)
    return nn.Sequential(nn.Sequential(*first), nn.Linear(8, 3))


FREEZING = {**OWN_MODES, "bsp": {**OWN_MODES["bsp"], "ema_decay": 0.5}}


def stays(path, begun):
    """Return of each tensor in a file whether it is as it was."""
    return {
        name: torch.allclose(value.float(), begun[name].float(), rtol=0, atol=1e-7)
        for name, value in load_file(path).items()
    }


@pytest.mark.parametrize("mode", short(FREEZING, "bsp", "step", "pushes"))
@pytest.mark.parametrize(
    ("build", "optimizer", "still"),
    [
        (hidden, two_rates, lambda name: "bias" in name),  # a group whose rate is 0
        (normed, frozen_first, lambda name: name.startswith("0.")),
    ],
)
def test_what_an_optimizer_freezes_or_gives_a_rate_of_0_stays_where_it_is(
    tmp_path, build, optimizer, still, mode
):
    torch.manual_seed(0)
    data, first = TensorData(table(120), table(), 3), build()
    begun = copy.deepcopy(first.state_dict())
    opened(tmp_path / "run", data, first, optimizer, lr=0.05, **FREEZING[mode])
    for path in (tmp_path / "run").glob("model*.safetensors"):
        assert all(same == still(name) for name, same in stays(path, begun).items()), path


def data_of(*sets):
    return {"data": lambda: TensorData(*sets, 3)}


def without_bad():
    data = TensorData(table(), table(), 3)
    own = SimpleNamespace(__len__=data.train.__len__, batches=data.train.batches)
    object.__setattr__(data, "train", own)
    return data


UNLIKE = [(torch.zeros(4), 0), (torch.zeros(5), 1)]
REFUSED = [
    (data_of(UNLIKE, table()), r"train must have inputs of one .* \[4\] .* \[5\] in sample 1"),
    (data_of(table(), table(width=5)), r"evaluation must have .* \[5\] in sample 0"),
    (data_of(table(classes=4), table()), r"labels in \[0, 3\), got 3 in sample 3"),
    (data_of(torch.zeros(8, 4), table()), "train must give a pair of a tensor and a"),
    (data_of([], table()), "train must be a map-style dataset with samples, got list"),
    (data_of([(torch.zeros(4), 0.5)], table()), "train must give .* sample 0.*label 0.5"),
    ({"data": lambda: without_bad()}, "sources of data must have bad, .* got SimpleNamespace"),
    ({"data": lambda: (table(), table())}, "data must have .* got tuple without 'name'"),
    ({"dataset": "cifar"}, "dataset must be left out or mine with your .* got cifar"),
    ({"mixup": 0.2}, "mixup must be left out with your own data, got 0.2"),
    ({"cache_gib": 1.0}, "cache_gib must be left out with your own data, got 1.0"),
    ({"resolutions": (8,)}, "resolutions must be left out with your own d"),
    ({"own": lambda: hidden(classes=5)}, r"3 classes, \[2, 3\] .*, got \[2, 5\] of"),
    ({"own": None}, "model must be given with your own data, got none"),
    ({"own": lambda: "net"}, "model must build a module, got str"),
    ({"own": cumulative}, "model must have batch norm whose statistics have a mom"),
    ({"dropout": (0.1,)}, "dropout must be left out with your own model"),
    ({"opt_kwargs": ("layer_decay=0.5",)}, "opt_kwargs must leave out layer_decay"),
    ({"model": "resnet50"}, "model must be left out or hidden with .* got resnet50"),
    ({"also": {"few": TensorData(table(), table(), 4)}}, "evaluate_also few must have the 3 clas"),
    ({"also": {"wide": table(width=5)}}, r"evaluate_also wide must have inputs .* float32 \[5\]"),
    ({"also": {"none": 3}}, "evaluate_also none must be a map-style dataset with samples, got int"),
    ({"also": {"ema": table()}}, "evaluate_also must have words for names, not ema or top5 or tr"),
    ({"also": {"a b": table()}}, "evaluate_also must have words for names"),
    ({"also": {"digits": "digits"}}, "evaluate_also must have sources or datasets of tensors"),
    ({"build": muon, "lr": None}, "lr must be the rate that muon builds its main parameters with"),
    ({"build": muon, "opt_kwargs": ("eps=1",)}, "opt_kwargs must be left out with your"),
    ({"build": muon, "optimizer": "adam"}, "optimizer must be left out or muon"),
    ({"build": lambda *_: None}, "optimizer must build an optimizer of torch"),
    ({"build": lambda *_: []}, "optimizer must build an optimizer of torch"),
    ({"build": "sgd"}, "optimizer must be a function of model and settings, got str"),
    ({"build": lambda net, c: two_rates(net.requires_grad_(False), c)}, "got all frozen"),
    ({"build": lambda *given: [two_rates(*given)] * 2}, "optimizer must have each parameter once"),
    ({"build": lambda net, c: two_rates(net[1], c)}, "all parameters .* for 0.weight and 1 more"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path, given, message):
    def train_it(folder):
        data = given.get("data", lambda: TensorData(table(), table(), 3, name="mine"))()
        opened(folder, **{"own": hidden, "lr": 0.1, **given, "data": data})

    refused(tmp_path, message, train_it=train_it)


# --- a run that ends early

LONG = {"epochs": 4, "lr": 0.05, "lr_milestones": ()}


def finishing(epochs):
    """Return an `end_epoch` by which the main process ends the run after so many epochs."""
    end_epoch = train.end_epoch

    def ended(session, end):
        end_epoch(session, end)
        if end.epoch + 1 == epochs and session.accelerator.is_main_process:
            session.finish()

    return ended


def ends_by(how, epochs=2):
    """Return a `train` of a fork that ends after so many epochs, in one of three ways."""

    def finished(session):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "end_epoch", finishing(epochs))
            train.train(session)

    def returned(session):
        for turn in session.cluster.turns():
            if isinstance(turn, Turn):
                train.train_round(session, turn)
                if how == "inside":
                    return
            for report in session.cluster.reports():
                session.log.round(report)
            if isinstance(turn, EpochEnd):
                train.end_epoch(session, turn)
                session.checkpointer.after_epoch(turn)
                if turn.epoch + 1 == epochs:
                    return

    return finished if how == "finish" else returned


@pytest.mark.parametrize("mode", short([*OWN_MODES, "return"], "bsp", "step", "pushes", "return"))
def test_a_run_that_ends_early_tells_what_it_trained_and_goes_on_to_the_same_bits(tmp_path, mode):
    mode, how = ("bsp", "return") if mode == "return" else (mode, "finish")
    torch.manual_seed(0)
    data = TensorData(table(120), table(), 3)
    settings = {**LONG, **OWN_MODES[mode], "checkpoint_every": 2}
    opened(tmp_path / "whole", data, hidden, **settings)
    opened(tmp_path / "early", data, hidden, loop=ends_by(how), **settings)
    summary, evaluated = summary_of(tmp_path / "early"), rows(tmp_path / "early", "eval")
    assert summary["epochs"] == len(evaluated) == 2
    assert summary["final_accuracy"] == evaluated[-1]["accuracy"]
    seen = sum(row["samples"] for row in rows(tmp_path / "early", "round"))
    if mode not in ("asp", "pushes"):  # whose other workers were ahead
        assert seen == 2 * 120
    assert summary["samples_seen"] == seen or mode == "pushes"
    model = hidden()
    model.load_state_dict(load_file(tmp_path / "early/model.safetensors"))
    correct = (model(data.evaluation.inputs).argmax(1) == data.evaluation.labels).float().mean()
    assert correct.item() == pytest.approx(summary["final_accuracy"])
    assert (tmp_path / "early/model_ema.safetensors").exists() == ("ema_decay" in settings)

    opened(tmp_path / "early", data, hidden, resume=str(tmp_path / "early"), **settings)
    assert fingerprint(tmp_path / "early") == fingerprint(tmp_path / "whole")
    assert summary_of(tmp_path / "early")["epochs"] == 4


def test_a_run_that_is_to_end_with_an_epoch_that_is_not_evaluated_takes_one_that_is(tmp_path):
    data, loop = TensorData(table(120), table(), 3), ends_by("finish", epochs=1)
    opened(tmp_path / "run", data, hidden, loop=loop, eval_every=3, **LONG)
    assert [row["epoch"] for row in rows(tmp_path / "run", "eval")] == [1]
    assert summary_of(tmp_path / "run")["epochs"] == 2


@pytest.mark.parametrize(("how", "settings"), [("inside", {}), ("return", {"eval_every": 4})])
def test_a_return_that_leaves_no_result_is_refused_and_leaves_no_record(tmp_path, how, settings):
    data = TensorData(table(120), table(), 3)
    with pytest.raises(SettingError, match=r"train must take all turns, .* got a return after"):
        opened(tmp_path / "run", data, hidden, loop=ends_by(how), **LONG, **settings)
    assert not (tmp_path / "run/summary.json").exists()
    assert not (tmp_path / "run/README.md").exists()


ENDED = [{"sync": "asp"}, {"sync": "step"}, {}, {"sync": "ssp", "dedicated_server": True}]


@pytest.mark.parametrize("settings", short(ENDED, ENDED[0]))
def test_one_process_ends_the_run_early_and_all_leave_in_good_order(
    tmp_path, monkeypatch, settings
):
    monkeypatch.setattr(train, "end_epoch", finishing(2))
    joint = settings.get("sync") == "step"
    batch = {"global_batch_size": 20} if joint else {"large_batch_size": 10}
    ranks = 2 + settings.get("dedicated_server", False)
    helpers.run_in_ranks(tmp_path / "run", ranks, **settings, **batch, epochs=4, lr_milestones=())
    summary = summary_of(tmp_path / "run")
    assert (summary["epochs"], "lost_workers" in summary) == (2, False)
    assert summary["samples_seen"] >= 2 * 60
    assert (tmp_path / "run/checkpoints/epoch-0002/manifest.json").exists()


def test_muon_and_early_stop_are_forks_that_run(fork, tmp_path):
    common = {**TINY, "epochs": 3}
    assert run(fork("muon"), tmp_path / "one", **common)["epochs"] == 3
    assert "optimizer: build_optimizers\n" in (tmp_path / "one/config.yaml").read_text()
    summary = run(fork("early_stop"), tmp_path / "two", **common, target_accuracy=0.001)
    assert (summary["epochs"], summary["samples_seen"]) == (1, 60)


@pytest.mark.parametrize("mode", short(FREEZING, "bsp", "step", "pushes"))
def test_layers_that_are_thawed_later_move_from_then_on(fork, tmp_path, mode):
    settings = {**TINY, "large_batch_size": None, **FREEZING[mode], "lr_milestones": ()}
    settings |= {"epochs": 3, "checkpoint_every": 1, "keep_checkpoints": 9, "weight_decay": 0.1}
    settings |= {"rounds_per_epoch": 1}
    run(fork("thaw"), tmp_path / "run", **settings, frozen_epochs=2)
    places = [tmp_path / f"run/checkpoints/epoch-000{n}/model.safetensors" for n in (1, 2, 3)]
    frozen = stays(places[1], load_file(places[0]))
    assert any("running_mean" in name for name in frozen)
    if mode not in ("asp", "pushes"):  # there others are in the next epoch already
        assert {name for name, same in frozen.items() if not same} == {"fc.weight", "fc.bias"}
    moved = {name for name, same in stays(places[2], load_file(places[0])).items() if not same}
    assert {"conv1.0.weight", "fc.weight"} <= moved
    assert any("running_mean" in name for name in moved)


# --- a merge rule


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_median_is_the_median(fork, n):
    pushed = torch.randn(n, 7, dtype=torch.float64)
    found = fork("median_merge").median(torch.zeros(7), pushed, torch.ones(n))
    torch.testing.assert_close(found, torch.quantile(pushed, 0.5, dim=0))


@pytest.mark.parametrize(
    ("settings", "count"),
    [({}, 4), ({"sync": "asp"}, 1), pytest.param({"sync": "ssp"}, 1, marks=helpers.slow)],
)
def test_a_rule_gets_all_at_a_barrier_and_else_each_push_alone(
    fork, tmp_path, monkeypatch, settings, count
):
    module, seen = fork("median_merge"), []
    rule = module.median

    def noted(global_, pushed, factors):
        seen.append((len(pushed), len(factors)))
        return rule(global_, pushed, factors)

    monkeypatch.setattr(module, "median", noted)
    settings = {**TINY, **ROUNDS, "large_batch_size": (5,), **settings}
    run(module, tmp_path / "run", **settings)
    pushes = 2 * 2 * 4  # epochs, rounds, workers
    assert seen == [(count, count)] * (pushes // count)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sync": "step", "local_batch_sizes": (3, 3, 4, 6)}, "sync must not be step with your"),
        ({"push": "gradients", "local_batch_sizes": (3, 3, 4, 6)}, "push must be left out with"),
        ({"merge": "delta"}, "merge must be left out with your own merge, got delta"),
        ({"merge": "mean"}, "merge must be left out with your own merge, got mean"),
    ],
)
def test_where_a_rule_is_not_asked_it_is_refused_and_nothing_is_written(
    fork, tmp_path, settings, message
):
    settings = {name: v for name, v in {**TINY, **settings}.items() if name != "large_batch_size"}
    refused(tmp_path, message, train_it=partial(run, fork("median_merge")), **settings)


@pytest.mark.parametrize(
    ("merge", "got"),
    [
        pytest.param(lambda global_, pushed, factors: pushed, r"\[4, \d+\]", marks=helpers.slow),
        (lambda global_, pushed, factors: None, "NoneType"),
    ],
)
def test_a_rule_that_returns_no_weights_is_refused_and_the_run_goes_on_with_a_right_one(
    fork, tmp_path, monkeypatch, merge, got
):
    module = fork("median_merge")
    monkeypatch.setattr(module, "median", merge)
    message = rf"a merge rule must return weights \[\d+\], got {got}$"
    with pytest.raises(SettingError, match=message):
        run(module, tmp_path / "run", **TINY)
    monkeypatch.setattr(module, "median", lambda global_, pushed, factors: pushed[0])
    assert run(module, tmp_path / "run", **TINY, resume="auto")["epochs"] == 2


@helpers.slow
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


def test_processes_refuse_a_rule_whose_pushes_are_rounded(fork, tmp_path):
    processes = start(fork("median_merge"), 2, tmp_path / "run", **TINY, wire="bf16")
    assert helpers.wait_all(processes) == [2, 2]
    said = "".join(process.stderr for process in processes)
    assert said.startswith("error: wire must be left out with your own merge, got bf16")
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()
