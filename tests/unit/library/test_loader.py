"""Loaders that others built, cut into uneven batches: each sample once, in their own order."""

import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import dbsl
from dbsl import SettingError
from dbsl.plan.deals import deal


class Buckets(Sampler):
    """Batches of unlike sizes, drawn with `random`."""

    def __init__(self, samples, sizes):
        self.samples, self.sizes = samples, sizes

    def __len__(self):
        return len(self.sizes)

    def __iter__(self):
        order = random.sample(range(self.samples), self.samples)
        for size in self.sizes:
            yield order[:size]
            order = order[size:]


LOADERS = {
    "random": {"shuffle": True},
    "in order": {},
    "generator": {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
    "weighted": {"sampler": WeightedRandomSampler(torch.rand(43), 43, replacement=False)},
    "workers": {"shuffle": True, "num_workers": 1, "persistent_workers": True},
    "buckets": {"batch_sampler": Buckets(43, [9, 14, 7, 13])},
    "batches": {"batch_sampler": BatchSampler(RandomSampler(range(43)), 10, drop_last=False)},
    "drop_last": {"shuffle": True, "drop_last": True},
}


def loaders(kind, sizes, **options):
    own = {**LOADERS[kind]}
    own |= {} if "batch_sampler" in own else {"batch_size": sum(sizes)}
    return [
        dbsl.uneven(DataLoader(range(43), **own), sizes, rank=rank, num_replicas=2, **options)
        for rank in range(2)
    ]


def joint(pair, steps=None, skip=None):
    """Go through an epoch, or some steps; return the batches of both at each step."""
    found = []
    passes = [iter(loader) if skip is None else iter(skip(loader)) for loader in pair]
    count = len(pair[0]) if steps is None else steps
    while len(found) < count and (batch := next(passes[0], None)) is not None:
        batches = [batch.tolist(), next(passes[1]).tolist()]
        total = sum(map(len, batches))
        for loader, each in zip(pair, batches, strict=True):
            assert loader.scale(len(each)) == pytest.approx(2 * len(each) / total)
        found.append(batches)
    return found


def samples(steps):
    return [sample for step in steps for batch in step for sample in batch]


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("lengths", [None, range(1, 44)], ids=["", "lengths"])
def test_each_sample_comes_once_and_the_next_epoch_is_another(kind, lengths):
    pair, orders = loaders(kind, [1, 5], lengths=lengths), []
    left = 43 % 6 if kind == "drop_last" else 0
    for epoch in range(2):
        steps = joint(pair)
        assert len({*samples(steps)}) == len(samples(steps)) == 43 - left
        orders.append(steps)
        states = [loader.state_dict() for loader in pair]
        assert [(each["epoch"], each["samples"]) for each in states] == [(epoch, 43 - left)] * 2
    assert (orders[0] == orders[1]) == (kind == "in order")
    again = loaders(kind, [1, 5], lengths=lengths)
    for loader in again:
        loader.set_epoch(1)
    assert joint(again) == orders[1], "of an epoch's number alone"


def test_a_joint_batch_is_what_one_process_would_have():
    whole = dbsl.uneven(DataLoader(range(43), 5, shuffle=True), [5], rank=0, num_replicas=1)
    steps = joint(loaders("random", [2, 3]))
    assert [one.tolist() for one in whole] == [a + b for a, b in steps]


@pytest.mark.parametrize("kind", ["random", "buckets", "batches"])
def test_a_state_inside_an_epoch_goes_on_with_other_sizes(kind):
    before = loaders(kind, [2, 4])
    done = joint(before, steps=2)
    assert before[0].state_dict() == before[1].state_dict()
    after = loaders(kind, [3, 1])
    for loader in after:
        loader.load_state_dict(before[0].state_dict())
    rest = joint(after)
    assert sorted(samples(done) + samples(rest)) == [*range(43)]
    with pytest.raises(SettingError, match="seed must be 0, as in the state, got 1"):
        loaders(kind, [2, 4], seed=1)[0].load_state_dict(before[0].state_dict())


@pytest.mark.filterwarnings("ignore:scale was not called")
def test_batches_that_a_script_skips_are_counted():
    accelerate = pytest.importorskip("accelerate")
    whole = joint(loaders("random", [2, 4]))
    pair = loaders("random", [2, 4], accumulate=2)
    assert joint_windows(pair, lambda each: accelerate.skip_first_batches(each, 2)) == whole[2:]
    assert [loader.state_dict()["samples"] for loader in pair] == [43, 43]
    odd = loaders("random", [2, 4], accumulate=2)[0]
    with pytest.raises(SettingError, match=r"skip must be a multiple of accumulate \(2\), got 1"):
        next(iter(accelerate.skip_first_batches(odd, 1)))
    half = loaders("random", [2, 4])[0]
    half.load_state_dict(half.state_dict() | {"samples": 6})
    with pytest.raises(SettingError, match="skip must be left out inside the epoch"):
        next(iter(accelerate.skip_first_batches(half, 2)))


def joint_windows(pair, skip):
    passes = [skip(loader) for loader in pair]
    steps = [[a.tolist(), b.tolist()] for a, b in zip(*passes, strict=True)]
    for step in steps:
        for loader, batch in zip(pair, step, strict=True):
            loader.scale(len(batch))
    return steps


@pytest.mark.filterwarnings("ignore:scale was not called")
def test_a_window_has_the_samples_of_all_its_batches():
    pair = loaders("in order", [2, 4], accumulate=4)  # 43 = 7 * 6 + 1, which two steps share
    steps = [[a.tolist(), b.tolist()] for a, b in zip(*pair, strict=True)]
    scales = [[pair[r].scale(len(step[r])) for r in range(2)] for step in steps]
    for begin in (0, 4):
        total = len(samples(steps[begin : begin + 4]))
        for step, pair_of in zip(steps[begin : begin + 4], scales[begin : begin + 4], strict=True):
            assert pair_of == [2 * len(step[0]) / total, 2 * len(step[1]) / total]


def test_a_look_at_a_batch_changes_nothing():
    pair, other = loaders("workers", [2, 4]), loaders("random", [2, 4])
    next(iter(pair[0]))
    assert joint(pair) == joint(other)


def test_a_loader_is_gone_once_nobody_holds_it():
    """In a circle of references its workers would be waited for, 5 s each."""
    pair = loaders("random", [2, 4])
    joint(pair)
    kept = [weakref.ref(loader) for loader in pair]
    pair.clear()
    assert [each() for each in kept] == [None, None]


def test_random_streams_of_the_loop_are_as_before():
    pair = loaders("buckets", [2, 4])
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    pair[0].parts(0)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # noqa: NPY002


@pytest.mark.filterwarnings("ignore:scale was not called")
@pytest.mark.parametrize("kind", ["random", "workers", "buckets"])
def test_a_loop_without_scale_is_counted_by_what_it_has_got(kind):
    """As one inside `Rounds`: it may look at a batch, and goes on inside an epoch."""
    whole, loader = joint(loaders(kind, [2, 4])), loaders(kind, [2, 4])[0]
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(3)] == [step[0] for step in whole[:3]]
    state = loader.state_dict()
    assert state["samples"] == len(samples(whole[:3]))
    again = loaders(kind, [2, 4])[0]
    again.load_state_dict(state)
    next(iter(again))  # a look
    again.set_epoch(0)
    assert [each.tolist() for each in again] == [step[0] for step in whole[3:]]
    assert again.state_dict()["samples"] == 43


def test_one_epoch_without_scale_is_warned_of(monkeypatch):
    monkeypatch.setattr("dbsl.library.uneven.USED", set())
    for kind in ("random", "workers", "buckets"):
        loader = loaders(kind, [2, 4])[0]
        with pytest.warns(UserWarning, match="scale was not called for any batch"):
            list(loader)
    sampler = dbsl.UnevenBatchSampler(43, local_batch_sizes=[2, 4], rank=0, num_replicas=2)
    with pytest.warns(UserWarning, match="scale was not called for any batch"):
        list(DataLoader(range(43), batch_sampler=sampler))


@pytest.mark.parametrize("kind", ["random", "workers", "buckets", "sampler"])
@pytest.mark.parametrize("chosen", [True, False])
def test_an_evaluation_over_the_loader_trains_on_nothing(monkeypatch, kind, chosen):
    monkeypatch.setattr("dbsl.library.uneven.USED", set())  # warnings are errors

    def trained(evaluates):
        sizes, place = [2, 4], {"rank": 0, "num_replicas": 2}
        if kind == "sampler":
            sampler = dbsl.UnevenBatchSampler(43, local_batch_sizes=sizes, **place)
            loader = DataLoader(range(43), batch_sampler=sampler)
        else:
            loader = sampler = loaders(kind, sizes)[0]
        found = []
        for epoch in range(3):
            if chosen:
                sampler.set_epoch(epoch)
            for moment in range(2):
                if evaluates:
                    with torch.no_grad():
                        assert len([*loader]) == len(loader)
                if not moment:
                    for batch in loader:
                        sampler.scale(len(batch))
                        found.append((batch.tolist(), sampler.state_dict()))
        return found

    assert trained(True) == trained(False)


def test_a_loop_inside_rounds_is_not_asked_for_scale(monkeypatch):
    used = set()
    for module in ("uneven", "rounds"):
        monkeypatch.setattr(f"dbsl.library.{module}.USED", used)
    model = torch.nn.Linear(1, 1)
    with dbsl.Rounds(model, torch.optim.SGD(model.parameters())):
        assert len(list(loaders("random", [2, 4])[0])) == 8  # warnings are errors


def test_sizes_that_are_not_the_loaders_are_said():
    for size in (6, 3, 1):  # of all processes, of each, and torch's own where none was chosen
        dbsl.uneven(DataLoader(range(43), size), [2, 4], rank=0, num_replicas=2)
    with pytest.warns(UserWarning, match=r"a step has 6 samples, .* batch_size \(4\) does not"):
        dbsl.uneven(DataLoader(range(43), 4), [2, 4], rank=0, num_replicas=2)


class Endless(IterableDataset):
    """Samples without numbers."""

    def __iter__(self):
        return iter(range(10))


class Repeats(Sampler):
    """As timm's RepeatAugSampler."""

    num_repeats = 3


@pytest.mark.parametrize(
    ("loader", "options", "said"),
    [
        ([1, 2], {}, "loader must be a torch DataLoader, got list"),
        (DataLoader(Endless()), {}, "got IterableDataset: .* dbsl.mean_scale"),
        (DataLoader(range(9), batch_size=None), {}, "got no batch size"),
        (
            DataLoader(range(9), sampler=DistributedSampler(range(9), 2, 0)),
            {},
            "got DistributedSampler, which splits them already",
        ),
        (
            DataLoader(
                range(9), batch_sampler=BatchSampler(DistributedSampler(range(9), 2, 0), 2, False)
            ),
            {},
            "got DistributedSampler as the sampler of BatchSampler, .* put RandomSampler",
        ),
        (DataLoader(range(9), sampler=Repeats()), {}, "got Repeats: repeated augmentation"),
        (DataLoader(range(9), 2), {"local_batch_sizes": [1]}, r"one value for each process \(2\)"),
        (DataLoader(range(9), 2), {"lengths": [1] * 8}, r"each of the 9 samples, got shape \(8,\)"),
        (DataLoader(range(9), 2), {"balance": "dbs"}, "balance must be None or 'dynamic'"),
        (
            DataLoader(range(9), batch_sampler=Buckets(9, [8, 1])),
            {"local_batch_sizes": [1, 1]},
            "batches of the batch sampler must have at least 2 samples, got 1",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(loader, options, said):
    with pytest.raises(SettingError, match=said):
        list(dbsl.uneven(loader, **{"rank": 0, "num_replicas": 2, **options}))


def test_shares_and_steps_are_said(monkeypatch):
    loader = loaders("random", [2, 4], accumulate=3)[1]
    assert dbsl.share(6, [2, 4], 1) == loader.share(6) == (2, 6)
    assert dbsl.share(9, [2, 4], 0) == (0, 3)
    # 43 samples in steps of 6 are 8 batches, in windows of 3 three steps.
    assert dbsl.steps_of(loader, 10) == 30
    assert dbsl.steps_of(loader, 0.5) == 2
    assert dbsl.steps_of(loader, 10, prepared=True) == 60
    sampler = dbsl.UnevenBatchSampler(43, local_batch_sizes=[2, 4], rank=0, num_replicas=2)
    assert dbsl.steps_of(DataLoader(range(43), batch_sampler=sampler), 2) == 16
    for wrong, said in (((6, [2, 0], 0), "integers of at least 1"), ((1, [2, 4], 0), "least 2")):
        with pytest.raises(SettingError, match=said):
            dbsl.share(*wrong)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingError, match=r"for each of 2 processes, got \(6, 2, 1\)"):
        dbsl.share(9, [6, 2, 1], 0)  # nobody would train on the third part
    with pytest.raises(SettingError, match=r"loader must come from .*, got DataLoader"):
        dbsl.steps_of(DataLoader(range(9)), 1)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 1000), min_size=4, max_size=40),
    speeds=st.lists(st.integers(1, 8), min_size=1, max_size=4),
)
def test_what_is_dealt_by_length_is_soonest_over(lengths, speeds):
    lengths = np.array(lengths)
    parts = deal(lengths, speeds)
    assert sorted(np.concatenate(parts).tolist()) == [*range(len(lengths))]
    assert min(map(len, parts)) >= 1
    times = [len(p) * lengths[p].max() / v for p, v in zip(parts, speeds, strict=True)]
    # No single sample of the slowest part would be cheaper with another process.
    equal = np.array_split(np.argsort(-lengths, kind="stable"), len(speeds))
    by_count = [len(p) * lengths[p].max() / v for p, v in zip(equal, speeds, strict=True)]
    assert max(times) <= max(by_count) + 1e-6


def test_two_processes_of_one_speed_share_padded_cost():
    lengths = np.array([1000, 10, 10, 10, 10, 10, 10, 10])
    assert [len(part) for part in deal(lengths, [1, 1])] == [1, 7]
    assert [len(part) for part in deal(lengths, [1, 8])][1] >= 1


def test_a_loaders_methods_are_listed_and_check_asks_for_what_a_wrapper_wraps():
    loader = dbsl.uneven(DataLoader(range(8), 4), [4])
    assert {"set_epoch", "state_dict", "watch", "scale"} <= {*dir(loader)}
    wrapper = SimpleNamespace(sampler=loader.sampler)  # as timm's PrefetchLoader
    with pytest.raises(SettingError, match="give the one that it wraps, got SimpleNamespace"):
        dbsl.check(torch.nn.Linear(1, 1), None, wrapper)
