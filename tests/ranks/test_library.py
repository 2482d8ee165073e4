"""What the library's objects do with real processes: agree, measure, balance and merge."""

import os
import time
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import dbsl
from dbsl.library.watch import Watch
from tests.helpers import place_of


def build(rank, arguments):
    own = {k: v[rank] if k == "num_samples" else v for k, v in arguments.items()}
    dbsl.UnevenBatchSampler(**own)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_samples": [9, 8]}, "num_samples must be the same on every process, got 9 on rank 0"),
        ({"local_batch_sizes": [4]}, "one value for each process (2), got [4]"),
    ],
)
def test_every_process_names_what_is_not_alike_or_wrong(run_ranks, arguments, said):
    usual = {"num_samples": [9, 9], "global_batch_size": 4}
    for error in run_ranks(build, usual | arguments, expect_errors=True):
        assert "SettingError" in error
        assert said in error


def of_lengths(rank):
    list(dbsl.uneven(DataLoader(range(8), 4), lengths=[1 + rank] * 8))


def test_lengths_that_are_not_alike_are_refused(run_ranks):
    errors = run_ranks(of_lengths, expect_errors=True)
    assert "lengths and the batches that a seed gives must be the same" in "".join(
        filter(None, errors)
    )


def prepared(rank, interleave, prepare):
    from accelerate import Accelerator

    os.environ.update(place_of(rank, 2))
    accelerator = Accelerator(cpu=True)
    sampler = dbsl.UnevenBatchSampler(40, local_batch_sizes=[3, 5], interleave=interleave)
    loader = DataLoader(range(40), batch_sampler=sampler)
    seen, loader = [], accelerator.prepare(loader) if prepare else loader
    for _ in range(2):
        seen = []
        for batch in loader:
            sampler.scale(len(batch))
            seen += batch.tolist()
    return seen


def test_accelerate_deals_out_what_is_in_turn_and_is_refused_what_is_not(run_ranks):
    first, second = run_ranks(prepared, True, True)
    assert sorted(first + second) == list(range(40))
    for error in run_ranks(prepared, False, True, expect_errors=True):
        assert "scale must be called for each batch, got 3 calls for the 5 batches" in error
    for error in run_ranks(prepared, True, False, expect_errors=True):
        assert "goes through accelerator.prepare, else False" in error


class Slow(nn.Module):
    """A linear layer that takes a given time a sample."""

    def __init__(self, seconds):
        super().__init__()
        self.layer, self.seconds = nn.Linear(4, 1), seconds

    def forward(self, x):
        time.sleep(self.seconds * len(x))
        return self.layer(x)


def watched(rank, wrap):
    torch.manual_seed(0)
    model = wrap(DistributedDataParallel(Slow(0.02 if rank == 0 else 0.0)))
    watch = Watch(model)
    for step in range(4):
        watch.samples = step + 1
        model(torch.ones(step + 1, 4)).sum().backward()
    return watch.read()


def all_watched(rank):
    return [watched(rank, wrap) for wrap in (lambda ddp: ddp, nn.Sequential)]


def test_the_watch_leaves_out_the_wait_for_others(run_ranks):
    for slow, fast in zip(*run_ranks(all_watched), strict=True):
        assert [samples for samples, _ in slow] == [1, 2, 3, 4]
        assert all(seconds >= 0.02 * samples for samples, seconds in slow)
        assert sum(seconds for _, seconds in fast) < 0.5 * sum(seconds for _, seconds in slow)


def balanced(rank, every):
    torch.manual_seed(0)
    model = DistributedDataParallel(Slow(0.004 if rank == 0 else 0.001))
    sampler = dbsl.UnevenBatchSampler(120, 10, balance="dynamic", balance_every=every)
    sampler.watch(model)
    loader = DataLoader(torch.eye(120), batch_sampler=sampler)
    seen, sizes = [], []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        seen.append([])
        for batch in loader:
            scale = sampler.scale(len(batch))
            (model(batch[:, :4]).sum() * scale).backward()
            seen[-1] += batch.argmax(1).tolist()
            sizes.append(len(batch))
    state = sampler.state_dict()
    return seen, sizes, state


@pytest.mark.parametrize("every", [None, 4])
def test_sizes_follow_the_speed_of_the_processes(run_ranks, every):
    (seen, slow, state), (others, fast, other_state) = run_ranks(balanced, every)
    assert all(sorted(a + b) == list(range(120)) for a, b in zip(seen, others, strict=True))
    assert {a + b for a, b in zip(slow, fast, strict=True)} == {10}
    assert slow[0] == fast[0] == 5
    assert slow[-1] < fast[-1], "the slow one has fewer samples in the end"
    assert (slow[4] < 5) == bool(every), "moved inside the epoch only where that was asked for"
    assert state["local_batch_sizes"] == other_state["local_batch_sizes"]  # of what comes next
    sampler = dbsl.UnevenBatchSampler(120, 10, rank=0, num_replicas=1)
    sampler.load_state_dict(state)  # another number of processes: equal parts again
    assert sampler.local_batch_sizes == [10]


def looked_at(rank):
    model = DistributedDataParallel(Slow(0.001))
    sampler = dbsl.UnevenBatchSampler(24, 8, balance="dynamic")
    sampler.watch(model)
    loader = DataLoader(torch.eye(24), batch_sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        if rank == epoch % 2:
            next(iter(loader))  # to log a sample
        for batch in loader:
            (model(batch[:, :4]).sum() * sampler.scale(len(batch))).backward()
    return sampler.local_batch_sizes


def test_one_process_alone_may_look_at_a_batch(run_ranks):
    first, second = run_ranks(looked_at)
    assert first == second


def bounded(rank):
    model = DistributedDataParallel(Slow(0.02 if rank == 0 else 0.0))
    bounds = {"least": 2, "limits": [9, 7]}
    sampler = dbsl.UnevenBatchSampler(80, 10, balance="dynamic", balance_every=2, **bounds)
    sampler.watch(model)
    for batch in DataLoader(torch.eye(80), batch_sampler=sampler):
        (model(batch[:, :4]).sum() * sampler.scale(len(batch))).backward()
    return sampler.local_batch_sizes


def test_sizes_that_follow_stay_within_their_bounds(run_ranks):
    assert run_ranks(bounded) == [[3, 7], [3, 7]]


def tokens(rank):
    counts = ([3, 8], [5, 1], [2, 2])
    alone = [dbsl.mean_scale(count[rank]) for count in counts]
    following = [*[count[rank] for count in counts[1:]], None]
    pairs = zip(counts, following, strict=True)
    ahead = [dbsl.mean_scale(count[rank], ahead=after) for count, after in pairs]
    return alone, ahead


def test_mean_scale_weights_by_the_tokens_of_all(run_ranks):
    for rank, (alone, ahead) in enumerate(run_ranks(tokens)):
        assert alone == ahead == [2 * (3, 8)[rank] / 11, 2 * (5, 1)[rank] / 6, 1.0]


def in_rounds(rank, weights):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    merged, before = [], []
    with dbsl.Rounds(model, optimizer, every=2, weight=weights[rank]) as rounds:
        start = rounds._weights.read()
        for _ in range(5):
            model(torch.randn(6, 3).double() + rank).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            before.append(rounds._weights.read())
            if rounds.step():
                merged.append(rounds._weights.read())
    merged.append(rounds._weights.read())
    return [v.numpy() for v in (start, *before)], [v.numpy() for v in merged], rounds.merges


def test_rounds_take_the_weighted_mean_of_weights_and_statistics(run_ranks):
    (one, merged, merges), (two, also_merged, _) = run_ranks(in_rounds, [1.0, 3.0])
    assert merges == 3, "what is left of a round is merged on leaving"
    assert (one[0] == two[0]).all(), "all begin with the weights of process 0"
    for number, (a, b) in enumerate(zip(merged, also_merged, strict=True)):
        assert (a == b).all(), "alike to the bit"
        step = (2, 4, 5)[number]
        assert abs(a - (0.25 * one[step] + 0.75 * two[step])).max() < 1e-15


def refused_rounds(rank, *all_):
    """Return what is said of each."""
    said = []
    for what in all_:
        with pytest.raises(dbsl.SettingError) as refused:
            broken_round(rank, what)
        said.append(str(refused.value))
    return said


def broken_round(rank, what):
    model = nn.Linear(2, 1, bias=not (what == "model" and rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weight = 0.0 if what == "weight" else 1.0
    outer = (0.7, 0.9) if what == "outer" and rank else None
    wire = ("int4", "int8")[rank] if what == "wire" else "float32"
    rounds = dbsl.Rounds(model, optimizer, every=2, weight=weight, outer=outer, wire=wire)
    with warnings.catch_warnings(record=True) as warned, rounds:
        warnings.simplefilter("always")
        for _ in range({"6 and 5": (6, 5)}.get(what, (2, 2))[rank]):
            model.weight.data.fill_(float("nan") if rank == 1 and what == "nan" else 2.0)
            rounds.step()
    return model.weight.tolist(), [str(w.message) for w in warned]


def test_weights_that_are_not_finite_are_left_out_and_said(run_ranks):
    (first, quiet), (second, said) = run_ranks(broken_round, "nan")
    assert first == second == [[2.0, 2.0]]
    assert not quiet
    assert said == ["weights after step 2 of round 0 were not finite: left out"]


def from_infinity(rank):
    model = nn.Linear(16, 16)
    model.register_buffer("least", torch.full((2,), float("inf")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dbsl.Rounds(model, optimizer, 1, weight=1.0 - rank) as rounds:
        model.least.fill_(-3.0) if rank == 0 else None
        rounds.step()
    return model.least.tolist()


def test_a_process_of_weight_0_takes_what_the_others_have_wherever_it_was(run_ranks):
    assert run_ranks(from_infinity) == [[-3.0, -3.0]] * 2


def fixed_graph(rank):
    model = DistributedDataParallel(nn.Linear(2, 1), static_graph=True)
    with pytest.raises(dbsl.SettingError, match="static_graph of DDP must be False, got true"):
        dbsl.Rounds(model, torch.optim.SGD(model.parameters()))
    return True


def test_a_fixed_graph_whose_reduction_cannot_be_paused_is_refused(run_ranks):
    assert run_ranks(fixed_graph) == [True, True]


def with_constants(rank, wire):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 2))
    model.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
    model.bias = nn.Parameter(torch.full((3,), float("-inf")), requires_grad=False)
    mask, frozen = model.mask.clone(), None
    optimizer = torch.optim.AdamW([*model[0].parameters(), *model[1].parameters()], lr=0.1)
    weights = iter([rank + 1, rank, rank + 1] * 9)
    with dbsl.Rounds(model, optimizer, 1, lambda: next(weights), (0.7, 0.9), wire=wire) as rounds:
        for number in range(20):
            if number == 5:
                model[0].requires_grad_(False)
                frozen = model[0].weight.clone()
            model(torch.randn(4, 50)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            rounds.step()
    kept = torch.equal(model[0].weight, frozen), torch.equal(model.mask, mask)
    return (*kept, bool(model.bias.isneginf().all()))


def all_with_constants(rank):
    return [with_constants(rank, wire) for wire in ("float32", "int4")]


def test_what_nobody_changes_keeps_its_bits(run_ranks):
    assert run_ranks(all_with_constants) == [[(True, True, True)] * 2] * 2


def wrapped_rounds(rank, wrap):
    """Take two steps of a round on unlike data; return the weights after each."""
    torch.manual_seed(0)
    ddp, found = DistributedDataParallel(nn.Linear(2, 1)), []
    model = wrap(ddp)
    with dbsl.Rounds(model, torch.optim.SGD(model.parameters(), 0.1), 2) as rounds:
        for _ in range(2):
            ddp(torch.full((1, 2), rank + 1.0)).sum().backward()
            rounds._optimizer.step()
            rounds.step()
            found.append(ddp.module.weight.detach().clone())
    return found


def all_wrapped(rank):
    return [
        wrapped_rounds(rank, wrap) for wrap in (lambda ddp: ddp, lambda ddp: nn.ModuleList([ddp]))
    ]


def test_gradients_are_not_averaged_in_a_round_wherever_ddp_is(run_ranks):
    for (first, merged), (second, other) in zip(*run_ranks(all_wrapped), strict=True):
        assert not torch.equal(first, second)
        assert torch.equal(merged, other)


def left_again(rank):
    model = nn.Linear(2, 1)
    rounds = dbsl.Rounds(model, torch.optim.SGD(model.parameters()), 3)
    try:
        with rounds:
            for _ in range(1 + rank):
                rounds.step()
    except dbsl.SettingError as error:
        return str(error), rounds._inside


def test_rounds_that_an_error_ends_are_left(run_ranks):
    for said, inside in run_ranks(left_again):
        assert "equally often" in said
        assert inside is None


WRONG = {
    "weight": "weight must be at least 0, and their sum above 0 and finite, got 0.0,0.0",
    "model": "tensors of model must be the same on every process",
    "outer": "outer must be the same on every process",
    "wire": "wire must be the same on every process, got int4 on rank 0 and int8 on rank 1",
    "6 and 5": "step and merge must be called equally often on every process",
}


def test_wrong_rounds_are_refused_on_every_process(run_ranks):
    for texts in run_ranks(refused_rounds, *WRONG):
        for text, said in zip(texts, WRONG.values(), strict=True):
            assert said in text


def foreign_states(rank):
    model = nn.Linear(3, 2)
    states, said = {}, []
    for steps in (1, 2):
        for wire in ("float32", "int4"):
            with dbsl.Rounds(model, torch.optim.SGD(model.parameters()), 2, wire=wire) as rounds:
                for _ in range(steps):
                    model.weight.data.add_(0.1)
                    rounds.step()
                states[steps, wire] = rounds.state_dict()
    for (steps, wire), state in states.items():
        rounds = dbsl.Rounds(model, torch.optim.SGD(model.parameters()), 2, wire=wire)
        for process in ((rank, 2), (1 - rank, 2), (rank, 3)):
            try:
                rounds.load_state_dict(state | {"process": process})
            except dbsl.SettingError as error:
                said.append((steps, wire, process, str(error)))
    return said


def test_a_state_is_of_one_process_unless_nothing_in_it_is(run_ranks):
    said = run_ranks(foreign_states)[0]
    refused = [(steps, wire, process) for steps, wire, process, _ in said]
    inside = [(1, wire, process) for wire in ("float32", "int4") for process in ((1, 2), (0, 3))]
    ends = [(2, "float32", (1, 2)), (2, "int4", (1, 2))]
    assert refused == [*inside, *ends]
    assert said[0][3] == "a state must be that of process 0 of 2, got that of process 1 of 2"
