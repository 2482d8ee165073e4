from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from dbsl.cluster import compiling
from dbsl.cluster.compiling import compile_for
from dbsl.cluster.weights import FlatWeights
from dbsl.data.sources import image_batch
from dbsl.model import build_model


@pytest.fixture
def calls(monkeypatch):
    """Instead of compiling, note the calls of the model and whether gradients were left over."""
    found = []

    def note(model, arguments):
        (images,) = arguments
        left_over = [name for name, p in model.named_parameters() if p.grad is not None]
        addresses = {p.data_ptr() for p in model.parameters()}
        found.append(SimpleNamespace(shape=images.shape, left_over=left_over, places=addresses))

    monkeypatch.setattr(
        compiling,
        "compile_in_place",
        lambda model, _, sums: model.register_forward_pre_hook(note),
    )
    return found


def examples(size, side):
    return image_batch(size, side, 3, torch.device("cpu"))


def test_every_graph_is_called_three_times_from_gradients_of_its_own(calls):
    model = build_model("test_resnet", 3, final_resolution=16, resolutions=(16,))
    weights = FlatWeights(model)
    before = weights.vector.clone()
    random = torch.get_rng_state()

    def loss_of(model, images, labels):
        return torch.nn.functional.cross_entropy(model(images), labels)

    compile_for(model, weights, {16: {4, 6}}, {16: 0.5}, Accelerator(cpu=True), examples, loss_of)
    assert [call.shape[0] for call in calls] == [4] * 3 + [6] * 3
    assert not any(call.left_over for call in calls)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(weights.vector, before)
    assert torch.equal(torch.get_rng_state(), random)
    assert {p.data_ptr() for p in model.parameters()} == calls[0].places
