"""`check` names what is wrong with a loop; Rounds of what trains send nothing else."""

import itertools
import os
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, default_collate

import dbsl
from tests.helpers import place_of


def dataset():
    draw = torch.Generator().manual_seed(0)
    classes, tokens = torch.randint(0, 3, (64,), generator=draw), torch.arange(64) % 7 + 1
    return TensorDataset(torch.randn(64, 6, generator=draw).double(), classes, tokens)


def cross_entropy(model, batch, **options):
    return functional.cross_entropy(model(batch[0]), batch[1], **options)


def scaled(model, batch, loader):
    return cross_entropy(model, batch) * loader.scale(len(batch[1]))


def over_tokens(model, batch, loader):
    each = cross_entropy(model, batch, reduction="none") * batch[2]
    return each.sum() / batch[2].sum() * loader.scale(len(batch[1]))


def counted(model, batch, loader):
    each = cross_entropy(model, batch, reduction="none") * batch[2]
    return each.sum() / batch[2].sum() * dbsl.mean_scale(int(batch[2].sum()))


def contrastive(model, batch, loader):
    vectors = functional.normalize(model(batch[0]), dim=1)
    logits = vectors @ vectors.T
    return functional.cross_entropy(logits, torch.arange(len(logits))) * loader.scale(len(logits))


def summed(model, batch, loader):
    return cross_entropy(model, batch, reduction="sum")


def halved(model, batch, loader):
    """A loss with a factor of its own, which happens to be 1 over the accumulation."""
    return 0.5 * cross_entropy(model, batch) * loader.scale(len(batch[1]))


LOOPS = {
    "scaled": (scaled, {}, "equal"),
    "a mean by hand": (
        lambda m, b, s: summed(m, b, s) / len(b[1]) * s.scale(len(b[1])),
        {},
        "equal",
    ),
    "accumulated": (scaled, {"accumulate": 4}, "equal"),
    "a mean by hand of as many samples as batches are accumulated": (
        lambda m, b, s: summed(m, b, s) / len(b[1]) * s.scale(len(b[1])),
        {"accumulate": 4, "sizes": [4, 4]},
        "equal",
    ),
    "a factor of its own": (halved, {"accumulate": 2}, "equal"),
    "no scale, equal parts": (
        lambda m, b, s: cross_entropy(m, b),
        {"sizes": [4, 4]},
        "is not multiplied by scale",
    ),
    "no scale": (lambda m, b, s: cross_entropy(m, b), {}, "is not multiplied by scale"),
    "twice": (lambda m, b, s: scaled(m, b, s) * s.scale(len(b[1])), {}, "by scale twice"),
    "a sum": (summed, {}, "is a sum over samples: .* (it is off by n)"),
    "a sum, scaled": (
        lambda m, b, s: summed(m, b, s) * s.scale(len(b[1])),
        {},
        "is a sum over samples",
    ),
    "divided twice": (
        lambda m, b, s: scaled(m, b, s) / 4,
        {"accumulate": 4},
        "divided by the accumulation (4) twice",
    ),
    "multiplied by n": (lambda m, b, s: 2 * scaled(m, b, s), {}, "off by n: multiplied by 2"),
    "sizes by hand": (
        lambda m, b, s: cross_entropy(m, b) * [0.5, 1.5][s.rank],
        {},
        "multiplied by fixed numbers (0.5, 1.5, by process)",
    ),
    "sizes by hand, too": (
        lambda m, b, s: scaled(m, b, s) / [2, 4][s.rank],
        {},
        "multiplied by fixed numbers (0.5, 0.25, by process)",
    ),
    "sizes by hand, of a sum": (
        lambda m, b, s: summed(m, b, s) * 2 * [0.25, 0.75][s.rank],
        {},
        "multiplied by fixed numbers (0.5, 1.5, by process)",
    ),
    "a mean by hand without scale": (
        lambda m, b, s: summed(m, b, s) / len(b[1]),
        {"sizes": [7, 1]},
        "is not multiplied by scale",
    ),
    "tokens by hand": (
        lambda m, b, s: over_tokens(m, b, s) * 8 / len(b[1]),
        {"sizes": [7, 1]},
        "dbsl.mean_scale(tokens)",
    ),
    "tokens": (over_tokens, {}, "dbsl.mean_scale(tokens)"),
    "tokens, counted": (counted, {}, "equal"),
    "contrastive": (contrastive, {}, "depends on other samples"),
    "batch norm": (scaled, {"norm": True}, "batch norm has each process's own statistics"),
    "dropping": (scaled, {"drop": True}, "was given 1 on process 0, whose part has 2 samples"),
}


def checked(rank, name, build):
    torch.manual_seed(1)
    loss, options, _ = LOOPS[name]
    norm = [nn.BatchNorm1d(8)] if options.get("norm") else []
    layers = [nn.Linear(6, 8), *norm, nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)]
    model = DistributedDataParallel(nn.Sequential(*layers).double())
    accumulate, sizes = options.get("accumulate", 1), options.get("sizes", [2, 6])
    collate = (lambda samples: default_collate(samples[1:])) if options.get("drop") else None
    if build == "uneven":
        loader = DataLoader(dataset(), 4, shuffle=True, collate_fn=collate)
        sampler = loader = dbsl.uneven(loader, sizes, accumulate=accumulate)
    else:
        options = {"local_batch_sizes": sizes, "accumulate": accumulate}
        sampler = dbsl.UnevenBatchSampler(64, **options)
        loader = DataLoader(dataset(), batch_sampler=sampler, collate_fn=collate)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    said = dbsl.check(model, lambda model, batch: loss(model, batch, sampler), loader)
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert all(module.training for module in model.modules())
    batch = next(iter(loader))
    if name == "scaled":
        loss(model, batch, sampler).backward()  # the loop goes on as ever
    return said


def all_checked(rank, build):
    warnings.simplefilter("ignore")
    return {name: checked(rank, name, build) for name in LOOPS}


def plain(said, expected):
    return all(part in said for part in expected.split(" .* "))


@pytest.mark.parametrize("build", ["uneven", "sampler"])
def test_a_loop_that_is_wrong_is_told_why(run_ranks, build):
    first, second = run_ranks(all_checked, build)
    assert first == second
    for name, (_, _, expected) in LOOPS.items():
        assert plain(first[name], expected), (name, first[name])
        assert first[name].startswith("equal (") == (expected == "equal")


class Adapted(nn.Module):
    """A frozen layer with a small one that trains beside it, as LoRA has."""

    def __init__(self, width=64, rank=2, dtype=torch.float32):
        super().__init__()
        self.base = nn.Linear(width, width, dtype=dtype).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        packed = torch.arange(300, dtype=torch.int64).to(torch.uint8)
        self.packed = nn.Parameter(packed, requires_grad=False)  # as QLoRA keeps weights

    def forward(self, inputs):
        base = functional.linear(inputs.to(self.base.weight.dtype), self.base.weight)
        return base.float() + self.up(self.down(inputs))


def adapted(rank, wire, differ=False):
    torch.manual_seed(0)
    model = Adapted()
    if differ and rank:
        model.base.weight.data[3, 5] += 1
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    with dbsl.Rounds(model, optimizer, every=2, wire=wire) as rounds:
        for _ in range(4):
            model(torch.randn(4, 64) + rank).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            rounds.step()
    size = sum(
        t.numel() * t.element_size()
        for t in rounds.state_dict().values()
        if t is not None and isinstance(t, torch.Tensor)
    )
    kept = all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
    return [p.tolist() for p in trained], kept, size, rounds.bytes_per_merge


@pytest.mark.parametrize("wire", ["float32", "int4"])
def test_rounds_merge_what_trains_and_leave_the_rest(run_ranks, wire):
    (one, kept, size, sent), (other, *_) = run_ranks(adapted, wire)
    assert one == other
    assert kept
    numbers = 2 * 64 * 2
    assert size == 4 * numbers
    assert sent == (4 * numbers if wire == "float32" else numbers // 2 + 4)  # one block


def test_frozen_weights_that_differ_are_refused_on_every_process(run_ranks):
    for error in run_ranks(adapted, "float32", True, expect_errors=True):
        assert "weights that are not merged must be the same on every process" in error


def frozen_later(rank, dtype, wire, outer):
    """Freeze a layer of a model of short numbers after the first merge."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with dbsl.Rounds(model, optimizer, 1, [1, 2][rank], outer, wire=wire) as rounds:
        for number in range(8):
            if number == 2:
                model[0].requires_grad_(False)
                frozen = model[0].weight.clone()
            model(torch.randn(4, 16).to(dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            rounds.step()
    return torch.equal(frozen, model[0].weight), model[1].weight.tolist()


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIRES = ("float32", "bf16", "int8", "int4", "int2")
CASES = [*itertools.product(DTYPES, WIRES, (None, (0.7, 0.9)))]


def all_frozen_later(rank):
    return [frozen_later(rank, *case) for case in CASES]


def test_what_is_frozen_midway_keeps_its_bits(run_ranks):
    pairs = zip(*run_ranks(all_frozen_later), strict=True)
    for case, ((kept, one), (also, other)) in zip(CASES, pairs, strict=True):
        assert kept, case
        assert also, case
        assert one == other, case


def without_matrices(rank):
    model = nn.LayerNorm(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dbsl.Rounds(model, optimizer, 1, wire="bf16") as rounds:
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        rounds.step()
    return model.weight.tolist()


def test_a_model_without_matrices_travels_in_any_format(run_ranks):
    one, other = run_ranks(without_matrices)
    assert one == other


def saved_whole(rank, folder, stop, *wires):
    """Take five steps in rounds of three; after `stop` of them all is saved, and loaded anew."""
    draw = torch.Generator().manual_seed(rank)
    for begin, end in ((0, stop), (stop, 5)):
        torch.manual_seed(0 if begin == 0 else 7)
        model = Adapted(8)
        if begin:  # a fresh process has other small layers, and the same frozen ones
            torch.manual_seed(0)
            model.base.load_state_dict(Adapted(8).base.state_dict())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        wire = wires[begin > 0] if wires else "float32"
        rounds = dbsl.Rounds(model, optimizer, every=3, outer=(0.7, 0.9), wire=wire)
        if begin:
            rounds.load(folder)
        with rounds:
            for _ in range(begin, end):
                model(torch.randn(4, 8, generator=draw)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                rounds.step()
            if end < 5:
                rounds.save(folder)
                rounds.steps = 0  # leaves without a merge
    return model.up.weight.tolist()


STOPS = [(0,), (2,), (3,), (4,), (4, "int4", "float32"), (4, "float32", "int4")]


def all_saved(rank, folder):
    return [saved_whole(rank, folder / str(n), *stop) for n, stop in enumerate(STOPS)]


def test_rounds_save_and_load_to_the_same_bits_and_in_another_format(run_ranks, tmp_path):
    found, others = run_ranks(all_saved, tmp_path)
    assert found == others
    whole, *same, wide, narrow = found
    assert same == [whole] * 3
    for weights in (wide, narrow):
        torch.testing.assert_close(*map(torch.tensor, (weights, whole)), rtol=0, atol=0.1)


def registered(rank, folder):
    os.environ.update(place_of(rank, 2))
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    rounds = dbsl.Rounds(model, optimizer, every=1)
    accelerator.register_for_checkpointing(rounds)
    with rounds:
        rounds.step()
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)


def test_a_state_that_accelerate_keeps_of_one_process_is_refused_on_all(run_ranks, tmp_path):
    for error in run_ranks(registered, tmp_path, expect_errors=True):
        assert "a state must be that of process" in error
