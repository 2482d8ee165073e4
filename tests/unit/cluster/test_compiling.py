from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dbsl.cluster import weights as compiling
from dbsl.cluster.weights import FlatWeights, compile_in_place, compiles, graphs_made
from dbsl.data.sources import image_batch
from dbsl.model import build_model
from dbsl.run import connect as module
from dbsl.run.connect import make_ready
from dbsl.run.stopping import Stopwatch
from dbsl.run.workers import Workers
from tests.helpers import planned
from train import Config, loss_function


def note_calls(model, calls):
    """Note a model's calls and whether gradients were left over."""

    def note(model, arguments):
        (images,) = arguments
        left_over = [name for name, p in model.named_parameters() if p.grad is not None]
        addresses = {p.data_ptr() for p in model.parameters()}
        calls.append(SimpleNamespace(shape=images.shape, left_over=left_over, places=addresses))

    model.register_forward_pre_hook(note)


def loss_of(model, images, labels, config=None):
    return F.cross_entropy(model(images), labels)


def run_of(model, sizes, device="cpu"):
    """Return what `make_ready` asks of workers at 16 px."""
    plans = SimpleNamespace(
        known=SimpleNamespace(micro_batch_sizes=None),
        stages=[SimpleNamespace(resolution=16, dropout=0.5)],
        batch_sizes=lambda workers: {16: sizes},
    )
    return SimpleNamespace(
        plans=plans,
        raw_model=model,
        graphs=0,
        accelerator=SimpleNamespace(device=torch.device(device), print=print),
        data=SimpleNamespace(example=lambda size, r: image_batch(size, r, 3, torch.device(device))),
        loss_of=loss_of,
    )


@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize(
    ("settings", "on"),
    [
        ({}, ("cuda",)),
        ({"workers": 2, "balance": "dynamic"}, ()),
        ({"compile": True}, ("cuda", "cpu", "mps")),
        ({"compile": False}, ()),
        ({"compile": "cudagraphs"}, ("cuda",)),
    ],
)
def test_models_are_compiled_on_cuda_unless_told_otherwise_or_batch_sizes_change(
    monkeypatch, settings, on, triton
):
    monkeypatch.setattr(compiling, "has_triton", lambda: triton)
    config, found = Config(**settings), {"cuda", "cpu", "mps"}
    found = {device for device in found if compiles(config, torch.device(device))}
    assert found == ({*on} if triton or config.compile != "auto" else set())


@pytest.mark.parametrize(("compiled", "times"), [(True, 3), (False, 1)])
def test_every_shape_is_met_from_gradients_of_its_own_and_nothing_moves(
    monkeypatch, accelerator, compiled, times
):
    in_place, calls = [], []
    monkeypatch.setattr(module, "compile_in_place", lambda *_, sums: in_place.append(sums))
    model = build_model("test_resnet", 3, (16,))
    note_calls(model, calls)
    weights = FlatWeights(model)
    before = weights.vector.clone()
    random = torch.get_rng_state()
    parts = run_of(model, {4, 6})
    monkeypatch.setattr(module, "graphs_made", lambda: 7)
    make_ready(parts, weights, (0,), compiled)
    assert parts.graphs == 7 * compiled
    assert in_place == [False] * compiled
    assert [call.shape[0] for call in calls] == [4] * times + [6] * times
    assert not any(call.left_over for call in calls)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(weights.vector, before)
    assert torch.equal(torch.get_rng_state(), random)
    assert {p.data_ptr() for p in model.parameters()} == calls[0].places


def test_shapes_are_met_in_the_mode_of_training_which_leaves_frozen_modules_alone(accelerator):
    model, modes = build_model("test_resnet", 3, (16,)), []
    frozen = next(each for each in model.modules() if isinstance(each, nn.BatchNorm2d))
    frozen.requires_grad_(False).register_forward_hook(lambda own, *_: modes.append(own.training))
    make_ready(run_of(model, {4}), FlatWeights(model), (0,), compiled=False)
    assert modes == [False], "a graph in another mode is made again at the first step"


@pytest.mark.parametrize("tries", [True, False])
def test_where_cudnn_tries_algorithms_it_does_before_the_training(monkeypatch, accelerator, tries):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", tries)
    settings = {"train_samples": 60, "eval_samples": 20, "resolutions": (16, 24), "lr": 0.1}
    settings |= {"slope": (0.001,), "intercept": (0.01,), "local_batch_sizes": (7, 8)}
    parts = planned(Config(model="test_resnet", workers=2, **settings), accelerator)
    calls = []
    note_calls(parts.model, calls)
    model, data, build = parts.model, parts.data, parts.build_optimizer
    Workers(parts.plans, accelerator, model, data, loss_function, build)
    found = {(tuple(call.shape[2:]), call.shape[0]) for call in calls}
    wanted = {((r, r), n) for r, sizes in parts.plans.batch_sizes((0, 1)).items() for n in sizes}
    assert found == (wanted if tries else set())
    assert len(wanted) > 3


def test_a_backend_that_compiles_nothing_trains_to_the_same_bits():
    """As cudagraphs does on CUDA: the kernels stay, and so do the addresses of weights."""
    found, device = [], torch.device("cpu")
    for how in (None, "aot_eager"):
        torch.manual_seed(0)
        model, before = build_model("test_resnet", 3, (16,)), graphs_made()
        weights = FlatWeights(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        if how:
            compile_in_place(model, device, how)
        for _ in range(3):
            loss_of(model, *image_batch(4, 16, 3, device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (graphs_made() > before) == bool(how)
        found.append(weights.vector)
    torch._dynamo.reset()
    assert torch.equal(*found)


def test_an_evaluation_makes_no_graph_of_a_compiled_model():
    graphs, before = [], graphs_made()

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    model = torch.nn.Linear(3, 2)
    model.compile(dynamic=False, backend=backend)
    alone = SimpleNamespace(num_processes=1)
    stopwatch, cluster = Stopwatch(), SimpleNamespace(load=lambda end: None)
    workers = SimpleNamespace(raw_model=model, stopwatch=stopwatch, accelerator=alone)
    workers.cluster = cluster
    model(torch.zeros(4, 3))
    with Workers.merged(workers, SimpleNamespace(ended_at=0.0)):
        model(torch.zeros(5, 3))
    assert len(graphs) == 1
    assert stopwatch.paused_s > 0
    model(torch.zeros(5, 3))
    assert len(graphs) == graphs_made() - before == 2
    torch._dynamo.reset()
