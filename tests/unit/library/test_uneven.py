import math
import time
import warnings
import weakref
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_model
from torch import nn
from torch.utils.data import DataLoader

import dbsl
from dbsl import PlanRules, Rounds, SettingError, TimeModel, UnevenBatchSampler, split_batch
from dbsl.library.processes import USED
from dbsl.library.watch import Watch
from dbsl.optimizer import first_state


def samplers(samples, sizes, **kwargs):
    how = {"local_batch_sizes": sizes, "num_replicas": len(sizes), **kwargs}
    return [UnevenBatchSampler(samples, rank=rank, **how) for rank in range(len(sizes))]


def train(group, epoch, steps=None, ahead=0):
    """Train an epoch, or some steps of it, with loaders that draw `ahead` batches beforehand.

    Return by step the samples of all processes, in order of the ranks, and the scales.
    """
    joint = []
    for rank, sampler in enumerate(group):
        sampler.set_epoch(epoch)
        batches, drawn = iter(sampler), []
        for step in range(steps if steps is not None else 10**9):
            while len(drawn) <= step + ahead and (batch := next(batches, None)) is not None:
                drawn.append(batch)
            if step >= len(drawn):
                break
            scale = sampler.scale(len(drawn[step]))
            if len(joint) <= step:
                joint.append([])
            assert len(joint[step]) == rank, "as many steps as any other"
            joint[step].append((drawn[step], scale))
    return joint


@st.composite
def runs(draw):
    sizes = st.lists(st.integers(1, 9), min_size=1, max_size=5)
    first, second = draw(sizes), draw(sizes)
    samples = draw(st.integers(max(len(first), len(second)), 150))
    run = {"samples": samples, "first": first, "second": second, "epoch": draw(st.integers(0, 3))}
    run |= {"stop": draw(st.integers(0, 12)), "ahead": draw(st.integers(0, 6))}
    return run | {"seed": draw(st.integers(0, 5)), "shuffle": draw(st.booleans())}


@given(runs())
def test_each_sample_is_met_once_by_whoever_resumes(run):
    fixed = {"seed": run["seed"], "shuffle": run["shuffle"]}
    group = samplers(run["samples"], run["first"], **fixed)
    before = train(group, run["epoch"], run["stop"], run["ahead"])
    state = group[-1].state_dict()
    if before:  # a process without a step has nothing to say
        assert state == {**group[0].state_dict()}
    others = samplers(run["samples"], run["second"], **fixed)
    left = run["samples"] - state["samples"]
    if before and 0 < left < len(others):
        with pytest.raises(SettingError, match=f"num_replicas must be at most {left}"):
            others[0].load_state_dict(state)
        return
    for sampler in others:
        sampler.load_state_dict(state)
    after = train(others, others[0].epoch if before else run["epoch"], ahead=run["ahead"])
    trained = [i for joint in before + after for batch, _ in joint for i in batch]
    assert sorted(trained) == list(range(run["samples"]))
    assert all(batch for joint in before + after for batch, _ in joint)
    alone = train(samplers(run["samples"], [sum(run["first"])], **fixed), run["epoch"])
    order = [i for joint in alone for batch, _ in joint for i in batch]
    count = sum(len(batch) for joint in before for batch, _ in joint)
    assert trained[:count] == order[:count]


@given(runs(), st.integers(1, 4))
def test_scales_make_of_the_means_the_mean_over_the_window(run, accumulate):
    group = samplers(run["samples"], run["first"], accumulate=accumulate)
    joint = train(group, run["epoch"], ahead=run["ahead"])
    for begin in range(0, len(joint), accumulate):
        window = joint[begin : begin + accumulate]
        total = sum(len(batch) for step in window for batch, _ in step)
        for step in window:
            for batch, scale in step:
                assert scale == len(group) * len(batch) / total


@given(runs())
def test_batches_are_as_planned_and_the_last_is_what_is_left(run):
    joint = train(samplers(run["samples"], run["first"]), 0)
    whole = joint[:-2]
    assert all([len(batch) for batch, _ in step] == run["first"] for step in whole)


@pytest.mark.filterwarnings("ignore:scale was not called")
@given(runs())
def test_in_turn_are_the_batches_that_each_process_has_alone(run):
    alone = train(samplers(run["samples"], run["first"]), run["epoch"])
    (one, *_) = samplers(run["samples"], run["first"], interleave=True)
    one.set_epoch(run["epoch"])
    batches = list(one)
    assert batches == [batch for step in alone for batch, _ in step]
    assert len(one) == len(batches)


def test_drop_last_leaves_out_what_does_not_fill_a_joint_batch():
    joint = train(samplers(103, [3, 5], drop_last=True), 0)
    assert [[len(batch) for batch, _ in step] for step in joint] == [[3, 5]] * 12


def test_the_order_is_another_each_epoch_and_the_same_for_a_seed():
    chosen = ((0, 0), (0, 1), (1, 0), (0, 0))
    orders = [train(samplers(40, [3, 5], seed=seed), epoch) for seed, epoch in chosen]
    assert orders[0] == orders[3]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]
    kept = train(samplers(40, [3, 5], shuffle=False), 7)
    assert [i for step in kept for batch, _ in step for i in batch] == list(range(40))


def test_loaders_find_no_batch_size_and_lightning_the_sampler():
    (sampler,) = samplers(10, [4])
    assert not hasattr(sampler, "batch_size")
    assert not hasattr(sampler, "drop_last")
    assert sampler.sampler is sampler


def test_an_epoch_may_be_chosen_after_the_iterator_was_made():
    (late, early) = samplers(20, [4])[0], samplers(20, [4])[0]
    batches = iter(late)
    late.set_epoch(3)
    early.set_epoch(3)
    assert list(batches) == list(early)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loop_without_set_epoch_goes_on_with_whole_epochs(shuffle):
    ((first,), (second,)) = (samplers(40, [8], shuffle=shuffle) for _ in range(2))
    for batch in first:
        first.scale(len(batch))
    second.load_state_dict(first.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that set_epoch was not called
        found = [len([second.scale(len(batch)) for batch in second]) for _ in range(3)]
    assert found == [0, 5, 5]


@pytest.mark.parametrize(
    ("use", "said"),
    [
        ({}, "global_batch_size or local_batch_sizes must be given, got neither"),
        ({"global_batch_size": 1}, "global_batch_size must be an integer of at least 2"),
        ({"local_batch_sizes": [3]}, r"one value for each process \(2\), got \[3\]"),
        ({"local_batch_sizes": "24,8"}, r"one value for each process \(2\), got 24,8"),
        ({"global_batch_size": 8, "num_samples": None}, "num_samples must be .* got None"),
        ({"local_batch_sizes": [3, 5], "global_batch_size": 9}, r"global_batch_size \(9\), got 8"),
        ({"global_batch_size": 8, "accumulate": 0}, "accumulate must be .* at least 1"),
        ({"global_batch_size": 8, "balance": "dbs"}, "balance must be None or 'dynamic'"),
        ({"global_batch_size": 8, "balance_every": 5}, "balance_every needs balance='dynamic'"),
        ({"global_batch_size": 8, "seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"global_batch_size": 500, "drop_last": True}, r"drop_last must be False .*\(500\)"),
        ({"global_batch_size": 8, "least": 5}, "at least 10, 5 for each process, got 8"),
        ({"local_batch_sizes": [3, 5], "limits": [3, 4]}, r"within limits \(\[3, 4\]\), got"),
        ({"global_batch_size": 8, "limits": [3, 4]}, r"limits must sum to .* \(8\), got \[3, 4\]"),
        ({"global_batch_size": 8, "rank": 2}, r"rank in \[0, num_replicas\), got rank 2"),
        ({"global_batch_size": 8, "rank": None}, "given together, .* got rank None"),
        ({"global_batch_size": 8, "balance": "dynamic"}, "num_replicas must be the world size"),
        (lambda: samplers(9, [3])[0].set_epoch(-1), "epoch must be an integer of at least 0, got"),
        ({"global_batch_size": 10**30}, "global_batch_size must be an integer of at least 2"),
        ({"global_batch_size": 8, "shuffle": "False"}, "shuffle must be True or False, got"),
        ({"global_batch_size": 8, "rank": ""}, r"rank in \[0, num_replicas\), got rank "),
        (lambda: samplers(9, [3])[0].skip(-1), "batches must be an integer of at least 0, got -1"),
        (lambda: Rounds(3, None), "model must be a torch module, got int"),
        (lambda: rounds(params="some"), "params must be trainable or all, got some"),
        (lambda: rounds(params=[nn.Parameter(torch.ones(1))]), "must be parameters of model"),
        (lambda: split_batch(8, None), "time_models must be one or more"),
        (lambda: dbsl.measure_step(print, [8], seconds="3"), "seconds must be .* got 3"),
        (lambda: split_batch(9, []), "time_models must be one or more"),
        (lambda: split_batch(9, [TimeModel(1, -1)]), "intercept of at least 0"),
        (lambda: split_batch(9, [TimeModel(1, 1)] * 2, limits=[0, 9]), "limits must .* at least 1"),
        (lambda: split_batch(9, [TimeModel(1, 1)] * 2, limits=[9, math.inf]), "one integer for"),
        (lambda: split_batch(-4, [TimeModel(1, 1)] * 2), "global_batch_size must be .* least 2"),
        (lambda: split_batch(9, [0.1, 0.2]), "must be one or more TimeModel .* got .0.1, 0.2"),
        (lambda: PlanRules(small_batch_size=10.5), "small_batch_size must be a whole .*, got 10.5"),
        (lambda: PlanRules(rounding="x"), "rounding must be round or truncate, got 'x'"),
        (lambda: PlanRules(min_batch_size=0), "min_batch_size must be at least 1, got 0"),
        (lambda: dbsl.plan_dual_batch(9, 2, 1.5, 4, TimeModel(1, 1)), "small_workers must be an i"),
        (lambda: dbsl.plan_dual_batch(99, 2, 1, 9.5, TimeModel(1, 1)), "must be integers, got 9.5"),
        (lambda: watch_twice(), "watch must be called once"),
        (lambda: unwatched(), r"balance must be None without watch\(model\), got 'dynamic'"),
        (lambda: rounds().__enter__().load_state_dict({}), "must be loaded before `with`"),
        (lambda: dbsl.measure_step(print, [8.5, 9]), "batch_sizes must be integers that ascend"),
        (lambda: dbsl.measure_step(print, [8], seconds=float("nan")), "seconds must be .* got nan"),
        (lambda: rounds(outer=(0.7, 1.0)), r"momentum in \[0, 1\)"),
        (lambda: rounds(every=0), "every must be .* got 0"),
        (lambda: rounds().step(), "must be called inside `with Rounds"),
        (lambda: rounds(outer=(math.inf, 0.9)), "outer must be a finite learning rate above 0"),
        (lambda: with_more(rounds()), "weights that train must be merged: .* got late"),
        (lambda: with_more(rounds(params="all")), r"must keep its tensors, .* got late \[3\]"),
        (lambda: twice(rounds()), "must be left before it is entered again"),
        (lambda: rounds(model=nn.ReLU()), "one dtype and one device, got none"),
        (lambda: Rounds(nn.Linear(1, 1), []), "optimizer must be one optimizer, got list"),
        (lambda: rounds(model=nn.ParameterList([torch.ones(2) * 1j])), "must have real numbers"),
    ],
)  # fmt: skip
def test_wrong_use_is_named_with_its_bound_and_value(use, said):
    usual = {"num_samples": 100, "rank": 0, "num_replicas": 2}
    with pytest.raises(SettingError, match=said):
        UnevenBatchSampler(**{**usual, **use}) if isinstance(use, dict) else use()


def test_a_process_group_that_is_still_to_come_is_asked_for(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = nn.Linear(1, 1)
    for use in (
        lambda: UnevenBatchSampler(10, 4),
        lambda: dbsl.mean_scale(3),
        lambda: Rounds(model, torch.optim.SGD(model.parameters())),
    ):
        with pytest.raises(SettingError, match=r"process group must be there first .*SIZE=2"):
            use()


def rounds(model=None, **arguments):
    model = model or nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*model.parameters()] or [torch.zeros(1)])
    return Rounds(model, optimizer, **{"every": 1, **arguments})


def with_more(used):
    with used:
        used._model.late = nn.Parameter(torch.ones(3))
        used.step()


def watch_twice():
    sampler = UnevenBatchSampler(8, 4, balance="dynamic")
    for _ in range(2):
        sampler.watch(nn.Linear(1, 1))


def unwatched():
    sampler = UnevenBatchSampler(20, 4, balance="dynamic")
    sampler.scale(len(next(iter(sampler))))


def twice(used):
    with used, used:
        pass


def test_a_model_inside_rounds_is_saved_as_any_other_and_may_move(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model.register_buffer("mask", torch.full((2, 2), -math.inf), persistent=False)
    with rounds(model, outer=("0.7", "0.9")) as used:
        used.step()
        save_model(model, tmp_path / "model.safetensors")
        saved = load_file(tmp_path / "model.safetensors")
        own = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
        assert {name: tensor.tolist() for name, tensor in saved.items()} == own
        model.double()[0] = nn.Linear(3, 4).double()  # what is read is what the model has
        with torch.no_grad():
            model[0].weight.fill_(2)
        used.step()
    merged = model[0].weight.float().flatten()
    assert torch.equal(used._weights.vector[:12], merged)
    assert merged.gt(1.5).all()
    model[0].bias.data.fill_(math.nan)
    with pytest.raises(FloatingPointError, match=r"0.bias \[4\] is not finite"), used:
        used.step()


class Gives(nn.Module):
    """A model that returns a parameter, too."""

    def __init__(self):
        super().__init__()
        self.layer, self.bias = nn.Linear(2, 1), nn.Parameter(torch.zeros(1))

    def forward(self, inputs):
        return self.layer(inputs), self.bias


def test_a_parameter_that_the_model_returns_gathers_no_hooks():
    model = Gives()
    watch = Watch(model)
    for _ in range(3):
        outputs, bias = model(torch.ones(1, 2))
        (outputs + bias).sum().backward()
    assert len(watch.read()) == 3
    assert not model.bias._backward_hooks


@dataclass
class Inner:
    found: torch.Tensor


@dataclass(slots=True)
class Outer:
    inner: list[Inner]


class Nested(nn.Linear):
    """A model whose output torch does not know as a container."""

    def forward(self, inputs):
        inner = Inner(super().forward(inputs))
        inner.kind, inner.whole = Inner, inner
        return Outer([inner])


def test_the_backward_pass_of_nested_outputs_is_measured():
    watch = Watch(model := Nested(2, 1))
    for _ in range(2):
        model(torch.ones(1, 2)).inner[0].found.sum().backward()
    assert len(watch.read()) == 2


def test_packed_integers_of_a_frozen_layer_keep_their_bits():
    model = nn.Linear(2, 1)
    packed = torch.tensor([16777217, 123456789], dtype=torch.int32)
    model.packed = nn.Parameter(packed.clone(), requires_grad=False)
    with rounds(model) as used:
        used.step()
    assert torch.equal(model.packed, packed)


def test_what_the_loop_holds_is_let_go_once_it_lets_go():
    loader = DataLoader(range(8), batch_sampler=UnevenBatchSampler(8, 4))

    def loop():
        held = torch.ones(2)
        kept = weakref.ref(held)
        first = next(iter(loader))
        del held
        assert first is not None
        return kept()

    assert loop() is None


def test_an_optimizer_whose_state_was_loaded_begins_afresh_from_none():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    again = torch.optim.Adam(model.parameters())
    again.load_state_dict(optimizer.state_dict())
    assert first_state(again) == {}
    momentum = torch.optim.SGD(model.parameters(), momentum=0.9)
    momentum.step()
    assert Rounds(model, momentum)._first == {}
    new = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    assert [state["sum"].unique().item() for state in first_state(new).values()] == [0.5, 0.5]


def test_a_watch_of_another_model_is_warned_of():
    sampler = UnevenBatchSampler(8, 4, balance="dynamic")
    sampler.watch(nn.Linear(1, 1))
    first, second = sampler
    sampler.scale(len(first))
    with pytest.warns(UserWarning, match="watch saw no step of its model"):
        sampler.scale(len(second))


def test_a_step_is_measured_after_one_that_failed_and_without_its_pauses():
    model, fails = nn.Linear(2, 1), iter([True, False, False])
    watch = Watch(model)
    for pause in (0.0, 0.2, 0.2):
        outputs = model(torch.ones(3, 2))
        outputs.register_hook(lambda gradient: gradient * (1 // (not next(fails))))
        with watch.paused():
            time.sleep(pause)
        with suppress(ZeroDivisionError):
            outputs.sum().backward()
    (_, first), (_, second) = watch.read()
    assert 0 < min(first, second) < 0.15


def test_a_process_group_that_came_later_is_refused(monkeypatch):
    sampler, merging = UnevenBatchSampler(10, 4), rounds()
    for module in ("uneven", "rounds"):
        monkeypatch.setattr(f"dbsl.library.{module}.world_size", lambda group=None: 2)
    for use in (lambda: iter(sampler), lambda: merging.__enter__()):
        with pytest.raises(SettingError, match="built after the process group, which has 2"):
            use()


def test_scale_twice_for_a_batch_and_for_another_batch_are_errors():
    sampler = samplers(20, [3, 5])[1]
    with pytest.raises(SettingError, match="got another call after 0 batches"):
        sampler.scale(5)
    batches = iter(sampler)
    next(batches)
    message = "count must be 5, as planned for batch 0 of rank 1, got 3"
    with pytest.raises(SettingError, match=message):
        sampler.scale(3)
    sampler.scale(5)
    with pytest.raises(SettingError, match="got another call after 1 batches"):
        sampler.scale(5)


def test_what_is_forgotten_is_warned_of():
    USED.clear()
    sampler = samplers(4000, [1, 2])[0]
    with pytest.warns(UserWarning, match="scale was not called for any batch"):
        list(sampler)
    with pytest.warns(UserWarning, match="epoch 0 comes in the same order again"):
        next(iter(sampler))
    sampler = samplers(6, [1, 2])[0]
    list(sampler)
    sampler.set_epoch(1)
    with pytest.warns(UserWarning, match="scale was not called for any batch"):
        list(sampler)  # an epoch of few batches
    sampler.scale(1)
    sampler.set_epoch(2)
    sampler.set_epoch(1)
    with pytest.raises(SettingError, match="scale must be called for each batch, got 1 calls for"):
        next(iter(sampler))


def resumed(samples, size, epoch=0, steps=None, **options):
    """Return a sampler that has trained an epoch, or some steps of it, and one with its state."""
    (sampler,), (other,) = (samplers(samples, [size], **options) for _ in range(2))
    train([sampler], epoch, steps=steps)
    other.load_state_dict(sampler.state_dict())
    return sampler, other


@pytest.mark.parametrize("workers", [0, 1])  # one draws ahead
def test_a_look_at_a_batch_trains_on_nothing(workers):
    sampler, other = resumed(20, 4, steps=2)
    for _ in range(2):  # for a summary of the model
        next(iter(DataLoader(range(20), batch_sampler=other, num_workers=workers)))
    assert other.state_dict() == sampler.state_dict()
    assert [len(joint) for joint in train([other], 0)] == [1] * 3
    assert other.state_dict()["samples"] == 20


@pytest.mark.filterwarnings("ignore:set_epoch was not called")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_look_inside_an_epoch_changes_nothing(workers):
    (sampler,) = samplers(40, [4])
    loader = DataLoader(range(40), batch_sampler=sampler, num_workers=workers)
    seen = []
    for number, batch in enumerate(loader, 1):
        assert sampler.scale(len(batch)) == 1.0
        seen += batch.tolist()
        if number in (3, 9, 10):
            assert len([*zip(range(2), loader, strict=False)]) == 2  # such as for a loss
        assert sampler.state_dict()["samples"] == 4 * number
    assert sorted(seen) == [*range(40)]


def test_epochs_that_are_left_early_move_no_sizes_and_say_so():
    sampler = UnevenBatchSampler(12, 4, balance="dynamic")
    sampler.watch(nn.Linear(1, 1))
    sampler.scale(len(next(iter(sampler))))
    sampler.set_epoch(1)
    with pytest.warns(UserWarning, match="balance_every must be given where epochs are left early"):
        next(iter(sampler))


@pytest.mark.parametrize(("steps", "samples"), [(1, 0), (2, 12), (3, 12), (4, 24), (5, 26)])
def test_a_state_inside_a_window_is_that_of_its_begin(steps, samples):
    (sampler,) = samplers(26, [6], accumulate=2)
    train([sampler], 0, steps=steps)
    assert sampler.state_dict()["samples"] == samples


@given(
    sizes=st.lists(st.integers(2, 9), min_size=1, max_size=4),
    samples=st.integers(8, 150),
    start=st.integers(0, 5),
)
def test_no_process_has_fewer_samples_than_the_least(sizes, samples, start):
    group = samplers(samples, sizes, least=2)
    train(group, 0, steps=start)
    joint = train(group, 1)
    assert all(len(batch) >= 2 for step in joint for batch, _ in step)
    assert sorted(i for step in joint for batch, _ in step for i in batch) == [*range(samples)]


def test_sizes_are_within_limits_and_numbers_of_numpy_are_those_of_python(tmp_path):
    sampler = UnevenBatchSampler(
        *(np.int64(100), np.int64(64)), limits=np.array([9, 90, 90]), rank=0, num_replicas=3
    )
    assert sampler.local_batch_sizes == [9, 28, 27]
    sampler.set_epoch(np.int64(1))
    torch.save(sampler.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt") == sampler.state_dict()
    batch = next(iter(sampler))
    assert type(sampler.scale(torch.tensor(len(batch)))) is float
    state = sampler.state_dict() | {"local_batch_sizes": [20, 22, 22]}
    other = UnevenBatchSampler(100, 64, limits=[9, 90, 90], rank=0, num_replicas=3)
    other.load_state_dict(state)
    assert other.local_batch_sizes == [9, 28, 27], "what the state has is too large here"


def test_leaving_the_loaded_epoch_is_warned_of():
    _, other = resumed(20, 4, epoch=2, steps=2)
    with pytest.warns(UserWarning, match=r"set_epoch\(0\) leaves epoch 2"):
        other.set_epoch(0)
    assert len(list(other)) == 5


def test_an_epoch_that_is_resumed_has_the_length_of_what_is_left():
    _, other = resumed(70, 10, steps=4)
    loader = DataLoader(range(70), batch_sampler=other)
    assert len(loader) == 7, "a schedule asks for that of a whole epoch"
    other.set_epoch(0)
    assert len(loader) == 3
    numbers = [(number, len(loader)) for number, batch in enumerate(loader, 1)]
    assert numbers == [(1, 3), (2, 3), (3, 3)]
    other.scale(10)  # no word of it
    other.set_epoch(1)
    assert len(other) == 7


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_state_of_an_epochs_last_batch_leaves_nothing_to_warn_of(drop_last):
    _, other = resumed(22, 4, drop_last=drop_last)
    assert list(other) == []
    other.set_epoch(1)
    assert len(list(zip(range(2), other, strict=False))) == 2


def test_a_state_of_other_data_is_refused():
    state = samplers(20, [4])[0].state_dict()
    with pytest.raises(SettingError, match="num_samples must be 20, as in the state, got 21"):
        samplers(21, [4])[0].load_state_dict(state)
    with pytest.raises(SettingError, match="seed must be 0, as in the state, got 3"):
        samplers(20, [4], seed=3)[0].load_state_dict(state)
    for samples in (-1, 21):
        with pytest.raises(SettingError, match=rf"must be in \[0, 20\], got {samples}"):
            samplers(20, [4])[0].load_state_dict(state | {"samples": samples})


def test_a_mean_over_nothing_is_refused_and_announced_counts_are_held_to():
    assert dbsl.mean_scale(7) == 1.0
    for count in (0, math.inf, "all", None):
        with pytest.raises(SettingError, match=f"at least 1 on every process.* got {count} here"):
            dbsl.mean_scale(count)
    assert type(dbsl.mean_scale(torch.tensor([7]))) is float
    assert dbsl.mean_scale(7, ahead=5) == 1.0
    with pytest.raises(SettingError, match="count must be 5, announced by ahead, got 6"):
        dbsl.mean_scale(6)
