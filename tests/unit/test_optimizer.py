import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import nn

from dbsl.cluster.steps import ComputeTimer, Stepper, take_step
from dbsl.cluster.weights import FlatWeights
from dbsl.config.fields import parse_kwargs
from dbsl.config.parse import config_to_yaml, parse_config
from dbsl.config.settings import RunConfig
from dbsl.optimizer import check_optimizer, create_optimizer, default_learning_rate, load_optimizer
from train import Config


def small_vit():
    torch.manual_seed(0)
    return timm.create_model("test_vit", num_classes=3, img_size=32)


def give_gradients(model):
    for number, parameter in enumerate(model.parameters()):
        stream = torch.Generator().manual_seed(number)
        parameter.grad = torch.randn(parameter.shape, generator=stream)


def test_a_step_is_timms_own_with_its_eps_betas_layer_decay_and_more():
    config = RunConfig(opt_kwargs=("layer_decay=0.5", "eps=1e-3", "betas=0.8,0.7", "amsgrad=True"))
    mine, theirs = small_vit(), small_vit()
    ours = create_optimizer("adamw", mine, 1.0, 0.9, 0.1, **config.optimizer_settings)
    given = {"eps": 1e-3, "betas": (0.8, 0.7), "layer_decay": 0.5, "amsgrad": True, "fused": True}
    them = create_optimizer_v2(theirs, "adamw", 0.01, 0.1, **given)
    for group in them.param_groups:  # as timm's schedulers do
        group["lr"] = 0.01 * group["lr_scale"]
    scales = {group["lr_scale"] for group in ours.param_groups}
    assert len(scales) > 2
    for _ in range(2):
        give_gradients(mine), give_gradients(theirs)
        take_step(ours, 0.01)
        them.step()
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (("sgd", 0.0), ("sgd", 0.9)),
        (("sgd", 0.9), ("momentum", 0.9)),
        (("sgd", 0.9), ("sgd", 0.0)),
        (("adamw", 0.9, ("eps", 1e-3)), ("adamw", 0.9, ("eps", 1e-8))),
    ],
)
def test_a_resumed_optimizer_is_the_one_that_the_settings_name(before, now):
    def build(name, momentum, *more):
        return create_optimizer(name, model, 0.1, momentum, 0.0, **dict(more))

    model = nn.Linear(2, 2)
    old, new, whole = build(*before), build(*now), build(*now)
    give_gradients(model)
    old.step()
    load_optimizer(new, old.state_dict())
    for loaded, built in zip(new.param_groups, whole.param_groups, strict=True):
        assert all(loaded[name] == built[name] for name in built.keys() - {"params"})
    assert bool(new.state) == bool(before[1])


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("sgd", {"betas": (0.9, 0.9)}, "opt_kwargs must name arguments such as .*, got betas$"),
        ("adamw", {"eps": 1e-8, "beta": 1}, "must name arguments such as betas, got beta$"),
        ("adamw", {"layer_decay_min_scale": 0.1}, "as .*layer_decay, got layer_decay_min_scale"),
        ("adamw", {"betas": (0.9,)}, "betas"),
        ("sgd", {"nesterov": "banana"}, "take a step here, got sgd nesterov=banana"),
        ("adamw", {"amsgrad": 5}, "take a step here, got adamw amsgrad=5"),
        ("fusedadam", {}, "optimizer must take a step here, got fusedadam"),
        ("adahessian", {}, "optimizer must take a step here, got adahessian"),
    ],
)
def test_settings_that_an_optimizer_does_not_take_are_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        check_optimizer(name, settings)


def test_settings_are_tried_with_the_momentum_that_is_given():
    check_optimizer("sgd", {"nesterov": True})
    with pytest.raises(ValueError, match=r"sgd nesterov=True \(Nesterov momentum requires"):
        check_optimizer("sgd", {"nesterov": True}, momentum=0.0)


def test_layer_decay_is_tried_without_a_false_warning_or_a_random_number(caplog):
    before = torch.get_rng_state()
    check_optimizer("sgd", {"layer_decay": 0.5, "layer_decay_min_scale": 0.0})
    assert not caplog.records
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_that_begin_with_one_state_count_their_own_steps():
    model = small_vit()
    optimizer = create_optimizer("adamw", model, 0.1, 0.9, 0.0)
    give_gradients(model)
    take_step(optimizer, 0.1)
    saved, two = optimizer.state_dict(), []
    for _ in range(2):
        two.append(create_optimizer("adamw", model, 0.1, 0.9, 0.0))
        load_optimizer(two[-1], saved)
    take_step(two[0], 0.1)
    steps = [next(iter(one.state.values()))["step"].item() for one in (*two, optimizer)]
    assert steps == [2.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["lamb", "adan"])
def test_a_cleared_optimizer_begins_again(name):
    updates = []
    for steps in (0, 30):
        model = nn.Linear(4, 2)
        weights = FlatWeights(model)
        optimizer = create_optimizer(name, model, 0.1, 0.9, 0.0)
        stepper = Stepper(model, weights, ComputeTimer(torch.device("cpu")), {0: optimizer})
        for _ in range(steps):
            give_gradients(model)
            take_step(optimizer, 0.0)
        stepper.forget(0)
        before = weights.vector.clone()
        give_gradients(model)
        take_step(optimizer, 1e-3)
        updates.append((weights.vector - before).norm().item())
    assert updates[0] == pytest.approx(updates[1], rel=0.2)


@pytest.mark.filterwarnings("ignore:It is highly recommended to have .opt_einsum")
def test_kron_draws_the_same_numbers_in_every_process():
    optimizer = create_optimizer("kron", nn.Linear(2, 2), 0.01, 0.9, 0.0)
    assert optimizer.deterministic
    saved = {**optimizer.state_dict(), "rng_state": (3, (*range(625),), None)}
    load_optimizer(optimizer, saved)
    assert optimizer.state_dict()["rng_state"] == saved["rng_state"]


def test_arguments_are_literals_or_texts():
    pairs = ["a=1", "b=1e-3", "c=None", "d=avg", "e=[1,2]"]
    found = parse_kwargs("opt_kwargs", pairs)
    assert found == {"a": 1, "b": 1e-3, "c": None, "d": "avg", "e": [1, 2]}
    for pairs in (["a"], ["=1"], ["a=1", "a=2"], ["a-b=1"]):
        with pytest.raises(ValueError, match="opt_kwargs must"):
            parse_kwargs("opt_kwargs", pairs)


def test_lists_of_arguments_are_read_and_written_in_one_line_each(tmp_path):
    given = ["--opt-kwargs", "betas=0.9", "0.95", "eps=1e-8,amsgrad=True"]
    config = parse_config(Config, given)
    assert config.opt_kwargs == ("betas=0.9,0.95", "eps=1e-8", "amsgrad=True")
    assert config.optimizer_settings == {"betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": True}
    (tmp_path / "c.yaml").write_text(config_to_yaml({"opt_kwargs": config.opt_kwargs}))
    assert parse_config(Config, ["--config", str(tmp_path / "c.yaml")]) == config


@pytest.mark.parametrize(
    ("optimizer", "rate"),
    [
        *(("sgd", 0.1), ("momentum", 0.1), ("sgdw", 0.1), ("sgdp", 0.1)),
        *(("adam", 0.001), ("adamw", 0.001), ("lion", 0.0001), ("adafactor", 0.001)),
    ],
)
def test_each_optimizer_has_a_learning_rate_of_its_own(optimizer, rate):
    assert default_learning_rate(optimizer) == rate
